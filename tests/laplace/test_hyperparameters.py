"""The marginal likelihood's gradient in the numbers of the loss and in the temperature, against finite differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace_combinations import COMBINATIONS
from tables import each
from tiny import data, encoder, in_batches
from torch import Tensor, nn

import contrastive_curvature as cc

pytestmark = [
    pytest.mark.filterwarnings("ignore:hessian_structure='kron"),
    pytest.mark.filterwarnings("ignore::contrastive_curvature.FeatureNormWarning"),
]

LOSSES: list[tuple[Callable[..., Any], dict[str, float]]] = [
    (cc.ContrastiveLoss, {"margin": 1.1}),
    (cc.SoftContrastiveLoss, {"a": 1.3, "b": 0.4}),
    (cc.LogisticLoss, {"scale": 4.0, "bias": -1.0}),
    (cc.InfoNCELoss, {"temperature": 0.3}),
    (cc.InfoNCELoss, {"scale": 3.0}),
    (cc.SupConLoss, {"temperature": 0.4}),
    (cc.SigLIPLoss, {"scale": 3.0, "bias": -1.0}),
    (cc.MultiSimilarityLoss, {"alpha": 2.0, "beta": 5.0, "base": 0.4}),
    (cc.TripletLoss, {"margin": 0.3}),
]
KINDS = [(*loss, *COMBINATIONS[k % len(COMBINATIONS)]) for k, loss in enumerate(LOSSES)]
KINDS += [(cc.InfoNCELoss, {"temperature": 0.3}, *combination) for combination in COMBINATIONS]


def evidence(loss: Any, weights: str, structure: str, temperature: Any = 0.7, prior: Any = 2.0) -> Tensor:
    more = {"subnetwork_indices": torch.tensor([0, 3, 17, 30, 41])} if weights == "subnetwork" else {}
    la: Any = Laplace(encoder(), "contrastive", weights, structure, backend_kwargs={"loss": loss}, **more)
    la.fit(in_batches(*data(), 6))
    la.prior_precision, la.temperature = prior, temperature
    return la.log_marginal_likelihood()


def differences(function: Callable[..., Tensor], values: list[float], step: float = 1e-5) -> Tensor:
    def at(k: int, shift: float) -> Tensor:
        return function(*(value + shift * (place == k) for place, value in enumerate(values)))

    return torch.stack([(at(k, step) - at(k, -step)) / (2 * step) for k in range(len(values))])


@each("kind, options, weights, structure", KINDS)
def test_numbers_of_a_loss(kind: Any, options: dict[str, float], weights: str, structure: str) -> None:
    def of(*values: Any) -> Tensor:
        return evidence(kind(**dict(zip(options, values, strict=True))), weights, structure)

    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in options.values()]
    stated = of(*numbers)
    found = torch.stack(torch.autograd.grad(stated, numbers))
    wanted = differences(of, list(options.values()))
    assert stated.item() == pytest.approx(of(*options.values()).item(), rel=1e-12)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-8 * abs(stated.item()))
    assert bool((found != 0).all())


@each("structure", ["diag", "kron", "full"])
def test_numbers_of_a_loss_through_a_convolution(structure: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(20, 2, 4, 4, dtype=torch.float64), torch.arange(20) % 4

    def of(temperature: Any) -> Tensor:
        loss = cc.InfoNCELoss(temperature)
        la: Any = Laplace(net, "contrastive", "all", structure, prior_precision=2.0, backend_kwargs={"loss": loss})
        la.fit([(x, y)])
        return la.log_marginal_likelihood()

    number = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(of(number), number)
    assert torch.allclose(found, differences(of, [0.4]), rtol=1e-6)


def test_temperature_prior_precision_and_margin_together() -> None:
    def of(margin: Any, temperature: Any, prior: Any) -> Tensor:
        return evidence(cc.ContrastiveLoss(margin, pd_fix="psd"), "all", "kron", temperature, prior)

    values = [1.1, 0.7, 2.0]
    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
    found = torch.stack(torch.autograd.grad(of(*numbers), numbers))
    assert torch.allclose(found, differences(of, values), rtol=1e-6)


def test_a_continued_fit_keeps_the_gradient_of_both_data_sets() -> None:
    x, y = data()

    def of(scale: Any) -> Tensor:
        loss = cc.LogisticLoss(scale=scale)
        la: Any = Laplace(encoder(), "contrastive", "all", "diag", backend_kwargs={"loss": loss})
        la.fit([(x[:6], y[:6])])
        la.fit([(x[6:], y[6:])], override=False)
        return la.log_marginal_likelihood()

    scale = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(of(scale), scale)[0]
    assert torch.allclose(found, differences(of, [4.0])[0], rtol=1e-6)


def test_a_posterior_with_such_a_number_is_like_any_other(tmp_path: Any) -> None:
    """It predicts and saves without a graph, and loads into an object with plain numbers."""
    margin = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
    x, y = data()
    made = [
        Laplace(encoder(), "contrastive", backend_kwargs={"loss": cc.ContrastiveLoss(value)}) for value in (margin, 1.1)
    ]
    for la in made:
        la.fit(in_batches(x, y, 6))
        la.optimize_prior_precision()
    a, b = made
    assert torch.equal(a(x).kappa, b(x).kappa)
    assert not a(x).kappa.requires_grad
    b.load_state_dict(a.state_dict())
    a.temperature = torch.tensor(0.4, requires_grad=True)
    assert a.state_dict()["temperature"] == pytest.approx(0.4)
    a.save_pretrained(tmp_path / "folder")
    assert cc.load_pretrained(tmp_path / "folder", encoder()).temperature == pytest.approx(0.4)


def test_what_has_no_gradient_is_refused() -> None:
    margin = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)
    prior = torch.linspace(1, 2, 4, dtype=torch.float64)
    with pytest.raises(cc.UnsupportedError, match="only for one prior precision"):
        evidence(cc.ContrastiveLoss(margin), "all", "full", prior=prior)
    for wrong in (torch.ones(2), torch.tensor(1), torch.tensor(3.0), torch.tensor(float("nan"))):
        with pytest.raises(cc.InputError, match=r"^margin: "):
            cc.ContrastiveLoss(wrong)
