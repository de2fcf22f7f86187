"""``la(x, n_samples=S)``: covariances from samples of the linearised encoder, without a Jacobian."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network.module import ModulePullback

KINDS = [
    ("all", "diag", {}),
    ("all", "kron", {}),
    ("all", "full", {}),
    ("subnetwork", "full", {"indices": [0, 3, 20, 41]}),
]
S = 7


def inputs(n: int, seed: int, device: str) -> Tensor:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device)


def fitted(weights: str, structure: str, options: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), cc.L2Norm()).double().to(device)
    more = {"subnetwork_indices": torch.tensor(options["indices"])} if options else {}
    la: Any = Laplace(encoder, "contrastive", weights, structure, backend_kwargs={"pd_fix": "psd"}, **more)
    la.fit([(inputs(24, 0, device), (torch.arange(24) % 3).to(device))])
    la.optimize_prior_precision()
    return la


@pytest.mark.parametrize(("weights", "structure", "options"), KINDS)
def test_the_covariance_is_that_of_the_moved_outputs(weights: str, structure: str, options: Any, device: str) -> None:
    la, x = fitted(weights, structure, options, device), inputs(6, 1, device)

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(3)

    out = la(x, n_samples=S, generator=generator())
    every = Laplace(la.model, "contrastive", "all", "diag")
    jacobians, z = every.backend.jacobians(x)
    moves = la.sample(S, generator()) - la.mean
    moved = torch.einsum("bdp,sp->bsd", jacobians, moves)
    truth = moved.mT @ moved / S
    torch.testing.assert_close(out.covariance, truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.raw_mean, z)
    dense = cc.EmbeddingDistribution(z, covariance=truth).relative_to(la.typical_norm, la.class_centres)
    torch.testing.assert_close(out.uncertainty, dense.uncertainty, rtol=1e-8, atol=0)
    parts = cc.EmbeddingDistribution.cat([out[:2], out[2:], la(x[:1])])
    torch.testing.assert_close(parts.covariance[:6], truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.predict([x], n_samples=S, generator=generator()).covariance, out.covariance)
    with pytest.raises(cc.UnsupportedError, match=r"p_value.*from samples"):
        _ = out.p_value


def test_the_standard_error_is_how_far_repetitions_scatter(device: str) -> None:
    la, x = fitted(*KINDS[0], device), inputs(3, 1, device)
    generator = torch.Generator(device).manual_seed(0)
    outs = [la(x, n_samples=60, generator=generator) for _ in range(150)]
    angles = torch.stack([out.uncertainty for out in outs])
    error = torch.stack([out.uncertainty_error for out in outs]).mean(0)
    torch.testing.assert_close(error, angles.std(0), rtol=0.2, atol=0)
    # Unbiased in the variance, of which the angle is a concave function.
    exact = la(x)
    spread = torch.stack([out.tangential_variance for out in outs]).mean(0)
    torch.testing.assert_close(spread, exact.tangential_variance, rtol=0.08, atol=0)
    assert torch.equal(exact.uncertainty_error, torch.zeros_like(error))
    assert torch.isinf(la(x, n_samples=1, generator=generator).uncertainty_error).all()


def test_a_last_layer_keeps_its_closed_form(device: str) -> None:
    la, x = fitted("last_layer", "kron", {}, device), inputs(3, 1, device)
    assert torch.equal(la(x, n_samples=2).covariance, la(x).covariance)


class WithoutForwardMode(torch.autograd.Function):
    """The tangent hyperbolic, in reverse mode only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 - ctx.saved_tensors[0] ** 2)


class Reading(nn.Module):
    """Two uses of a convolution, and tokens; ``kind`` says what forward and reverse mode read differently."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(5, 4, padding_idx=0 if kind == "padding index" else None)
        self.layer, self.last = nn.Conv1d(4, 4, 1), nn.Linear(4, 3)
        nn.init.normal_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).mean(1, keepdim=True).mT
        if self.kind == "no_grad":
            with torch.no_grad():
                more = self.layer(x)
            x = x + more
        x = self.layer(x).flatten(1)
        return self.last(WithoutForwardMode.apply(x) if self.kind == "no forward mode" else x.tanh())


@pytest.mark.parametrize("kind", ["as usual", "no_grad", "padding index", "no forward mode"])
def test_samples_take_the_derivatives_of_reverse_mode(kind: str, device: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    encoder = Reading(kind).double().to(device)
    tokens = torch.randint(0, 5, (24, 3), generator=torch.Generator().manual_seed(1)).to(device)
    la: Any = Laplace(encoder, "contrastive", "all", "diag")
    la.fit([(tokens, (torch.arange(24) % 3).to(device))])
    reverse: list[str] = []
    real = ModulePullback._reverse_mode
    monkeypatch.setattr(ModulePullback, "_reverse_mode", lambda *a: (reverse.append(kind), real(*a))[1])
    out = la(tokens[:6], n_samples=S, generator=torch.Generator(device).manual_seed(3))
    moves = la.sample(S, torch.Generator(device).manual_seed(3)) - la.mean
    jacobians = torch.stack([jacobian_of(encoder, tokens[i : i + 1]) for i in range(6)])
    moved = torch.einsum("bdp,sp->bsd", jacobians, moves)
    torch.testing.assert_close(out.covariance, moved.mT @ moved / S, rtol=1e-9, atol=1e-12)
    assert reverse == ([] if kind == "as usual" else [kind])


def jacobian_of(encoder: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian (D, P) of one input by autograd, row by row."""
    params = list(encoder.parameters())
    rows = [torch.autograd.grad(out, params, retain_graph=True) for out in encoder(x)[0]]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_rounding_is_no_difference_between_forward_and_reverse_mode(device: str, monkeypatch: Any) -> None:
    """Samples that move a million weights mostly where no input reaches, so that products are small sums of large."""
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv1d(1, 8, 1),
        nn.Conv1d(8, 8, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 1024),
        nn.Tanh(),
        nn.Linear(1024, 3),
    )
    x, labels = torch.randn(16, 1, 32).to(device), (torch.arange(16) % 4).to(device)
    la: Any = Laplace(
        encoder.to(device), "contrastive", "all", "kron", prior_precision=1e-8, backend_kwargs={"pd_fix": "psd"}
    )
    la.fit([(x, labels)])
    la.prior_precision = 1e-8
    monkeypatch.setattr(ModulePullback, "_reverse_mode", lambda *_: pytest.fail("forward mode was given up"))
    la(x, n_samples=20, generator=torch.Generator(device).manual_seed(0))


def test_parts_of_the_directions_go_on_in_reverse_mode_after_a_difference(device: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    encoder = Reading("as usual").double().to(device)
    tokens = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(1)).to(device)
    pullback = ModulePullback(Laplace(encoder, "contrastive", "all", "diag").backend.encoder(tokens))
    directions = torch.randn(S, pullback.n_params, dtype=torch.float64).to(device)
    jacobians = torch.stack([jacobian_of(encoder, tokens[i : i + 1]) for i in range(6)])
    allowed, used = iter([1e-9, -1.0]), []
    monkeypatch.setattr("contrastive_curvature.network.module.rounding", lambda *_: used.append(0) or next(allowed))
    with torch.no_grad():
        z, moved = pullback.jvps(tokens, directions.split([1, 2, S - 3]))
    torch.testing.assert_close(moved, torch.einsum("bdp,sp->sbd", jacobians, directions))
    torch.testing.assert_close(z, encoder(tokens).detach())
    assert len(used) == 2


def test_a_network_of_linear_layers_with_a_convolution_takes_reverse_mode(device: str, monkeypatch: Any) -> None:
    encoder = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
    x = inputs(6, 1, device).float()[:, None]
    pullback = ModulePullback(Laplace(encoder, "contrastive", "all", "diag").backend.encoder(x))
    monkeypatch.setattr(ModulePullback, "_forward_mode", lambda *_: pytest.fail("twice as slow for a transformer"))
    with torch.no_grad():
        pullback.jvps(x, [torch.ones(1, pullback.n_params, device=device)])
