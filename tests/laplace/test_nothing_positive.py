"""An encoder that learned nothing: no positive curvature is left, and every structure says so and what to do."""

import warnings
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc

SEED = 53
"""Of random weights whose curvature factor has negative eigenvalues only, as about one in thirty has."""


def problem(size: float, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(12, 5, dtype=torch.float64)
    encoder = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3)).double().eval()
    with torch.no_grad():
        encoder[2].weight.mul_(size)
    return encoder, x, torch.arange(12) % 6


def fitted(structure: str, size: float, seed: int = 0, **options: Any) -> Any:
    encoder, x, y = problem(size, seed)
    la = Laplace(encoder, "contrastive", hessian_structure=structure, backend_kwargs=options)
    la.fit([(x, y)])
    return la


@each("structure", ["kron_lowrank", "kron", "diag", "full"])
def test_fit_warns_and_the_prior_is_refused(structure: str) -> None:
    """Embeddings in one place: in euclidean distance every pair's curvature has the sign of its weight."""
    with pytest.warns(UserWarning, match="zero everywhere: the posterior is the prior.*Train the encoder") as caught:
        la = fitted(structure, 1e-12, distance="euclidean")
    assert caught[0].filename == __file__
    before = la.temperature, la.prior_precision.clone()
    with pytest.raises(cc.InputError, match=r"zero everywhere.*smaller negative_weight.*la\.prior_precision"):
        la.optimize_prior_precision()
    assert (la.temperature, float(la.prior_precision)) == (before[0], float(before[1]))
    la.prior_precision = 2.0
    assert la(problem(1e-12)[1]).uncertainty.isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(structure, 1e-12, distance="euclidean", negative_weight=0.01).optimize_prior_precision()
        fitted("diag", 1e-12, distance="euclidean", pd_fix="positive").optimize_prior_precision()


def test_factors_may_have_nothing_where_a_diagonal_has_something() -> None:
    """Kronecker factors are clamped in the eigenbasis of a sum over points, a diagonal entry by entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagonal = fitted("diag", 1.0, seed=SEED)
    assert bool((diagonal.H > 0).any())
    assert bool((diagonal.H_raw < 0).any())
    for structure in ("kron_lowrank", "kron"):
        with pytest.warns(UserWarning, match="zero everywhere"):
            la = fitted(structure, 1.0, seed=SEED)
        assert bool((torch.linalg.eigvalsh(la.H_raw[0][0]) < 0).all())


class Stopped(nn.Module):
    """Some layers run where no gradient is recorded, as in encoders that freeze their trunk in ``forward``."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.trunk, self.head = what, nn.Sequential(nn.Linear(5, 20), nn.ReLU()), nn.Linear(20, 3)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.what == "nothing"):
            h = self.trunk(x)
        return self.head(h).detach() if self.what == "everything" else self.head(h)


@each("structure", ["kron", "diag", "full"])
def test_layers_that_no_gradient_reaches_are_named(structure: str) -> None:
    def fit(what: str) -> Any:
        la = Laplace(Stopped(what), "contrastive", "all", structure, backend_kwargs={"pd_fix": "psd"})
        la.fit([problem(1.0)[1:]])
        return la

    with pytest.warns(
        UserWarning, match=r"no gradient reaches 120 of .* 183 weights, all of 'trunk.0': .*prior alone"
    ) as caught:
        fit("the trunk")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"zero everywhere.*no gradient reaches the weights") as caught:
        la = fit("everything")
    assert "Train the encoder" not in str(caught[0].message)
    with pytest.raises(cc.InputError, match=r"zero everywhere.*no gradient reaches.*la\.prior_precision"):
        la.optimize_prior_precision()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("nothing")


def collapsed(dtype: torch.dtype, radius: float, **options: Any) -> Any:
    """The posterior of an encoder whose outputs of a class differ by little, and those of two by much."""
    y = torch.arange(24) % 4
    x = torch.eye(4, 6)[y] + radius * torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    encoder = nn.Sequential(nn.Linear(6, 6))
    with torch.no_grad():
        encoder[0].weight.copy_(torch.eye(6))
        encoder[0].bias.zero_()
    structure, temperature = options.pop("structure"), options.pop("temperature", {})
    model = encoder.to(dtype)
    la: Any = Laplace(model, "contrastive", "last_layer", structure, backend_kwargs=options, **temperature)
    la.fit([(x[:12].to(dtype), y[:12]), (x[12:].to(dtype), y[12:])])
    return la


@each("options", [{"loss": cc.SupConLoss(0.02)}, {}])
def test_the_temperature_of_a_collapsed_encoder_is_that_in_double_precision(options: dict[str, Any]) -> None:
    for structure in ("diag", "kron"):
        found = []
        for dtype in (torch.float32, torch.float64):
            la = collapsed(dtype, 1e-4 if not options else 1e-2, structure=structure, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                la.optimize_prior_precision()
            found.append([float(la.cost), la.temperature, float(la(torch.eye(4, 6, dtype=dtype)).uncertainty.mean())])
        assert found[0] == pytest.approx(found[1], rel=2e-3)
        assert found[1][1] < 1e-4


@each("structure", ["kron_lowrank", "kron", "diag", "full"])
@each("dtype", [torch.float32, torch.float64])
def test_without_any_loss_the_temperature_is_said_to_stay(structure: str, dtype: torch.dtype) -> None:
    la = collapsed(dtype, 0.0, structure=structure)
    with pytest.warns(UserWarning, match=r"la\.cost is 0.*temperature stays 1:.*la\.temperature=") as caught:
        la.optimize_prior_precision()
    assert caught[0].filename == __file__
    assert (float(la.cost), la.temperature) == (0.0, 1.0)
    assert float(la.prior_precision) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collapsed(dtype, 0.0, structure=structure, temperature={"temperature": 0.5}).optimize_prior_precision()
        collapsed(dtype, 1e-3, structure=structure).optimize_prior_precision()
