"""``hessian_structure="gp"``: with all points kept it is the ``full`` structure, computed through kernels."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from strategies import close
from tiny import data, encoder
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.laplace import functional

POINTS = 12
PSD: list[dict[str, Any]] = [
    {"pd_fix": "psd"},
    {"pd_fix": "positive", "distance": "euclidean", "normalization": "type"},
    {"pd_fix": "fixed", "distance": "euclidean", "negative_weight": 0.1, "margin": None},
]

for_both = pytest.mark.parametrize("weights", ["all", "last_layer"])
for_every_psd = pytest.mark.parametrize("options", PSD, ids=lambda o: "-".join(map(str, o.values())))


def loader(shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*data(POINTS)), batch_size=5, shuffle=shuffle)


def pair(weights: str, options: dict[str, Any], device: str, **kwargs: Any) -> tuple[Any, Any]:
    """The Gaussian process over all points, and the dense posterior."""
    kwargs["backend_kwargs"] = options
    gp = Laplace(encoder(device, cc.L2Norm()), "contrastive", weights, "gp", n_subset=POINTS, **kwargs)
    full = Laplace(encoder(device, cc.L2Norm()), "contrastive", weights, "full", **kwargs)
    for la in (gp, full):
        la.fit(loader())
    return gp, full


@for_both
@for_every_psd
def test_equals_full_with_all_points(weights: str, options: dict[str, Any], device: str) -> None:
    gp, full = pair(weights, options, device, prior_precision=0.3, temperature=0.5)
    x = torch.randn(4, 4, dtype=torch.float64, device=device)
    assert close(gp(x).covariance, full(x).covariance)
    assert close(gp(x, joint=True).joint_covariance, full(x, joint=True).joint_covariance)
    assert close(gp(x, diagonal_output=True).variance, full(x, diagonal_output=True).variance)
    assert close(gp.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert close(gp.log_prob(gp.mean + 0.1), full.log_prob(full.mean + 0.1))
    for la in (gp, full):
        la.optimize_prior_precision()
    assert close(gp.prior_precision, full.prior_precision)
    assert gp.temperature == pytest.approx(full.temperature, rel=1e-12)
    assert close(gp(x).covariance, full(x).covariance)
    gp.optimize_prior_precision(method="marglik", n_steps=3)
    full.optimize_prior_precision(method="marglik", n_steps=3)
    assert close(gp.prior_precision.detach(), full.prior_precision.detach())


@for_both
@pytest.mark.parametrize("options", PSD[:2], ids=["block-diagonal", "coupled"])
def test_samples_have_the_posterior_covariance(weights: str, options: dict[str, Any], device: str) -> None:
    """Matheron's rule is linear in its random numbers: fed the axes one by one, it gives a root of the covariance."""
    gp, full = pair(weights, options, device, prior_precision=0.7, temperature=2.0)
    n_noise = gp.H["values"].numel()
    sizes = [gp.n_params, n_noise]
    axes = torch.eye(sum(sizes), dtype=torch.float64, device=device)
    fed = iter(axes.split(sizes, dim=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional.torch, "randn", lambda *_, **__: next(fed).clone())
        root = gp.sample(sum(sizes)) - gp.mean
    assert close(root.T @ root, full.posterior_covariance)
    x = torch.randn(2, 4, dtype=torch.float64, device=device)
    assert gp.predictive_samples(x, n_samples=3, joint=True).shape == (3, 2, 3)


def test_a_subset_stands_for_the_data(device: str) -> None:
    """Block-diagonal curvatures of subsets average to that of the data; loss and cost are those of the data."""
    full = Laplace(encoder(device, cc.L2Norm()), "contrastive", "last_layer", "full", backend_kwargs=PSD[0])
    full.fit(loader())
    gp = Laplace(encoder(device, cc.L2Norm()), "contrastive", "last_layer", "gp", n_subset=5, backend_kwargs=PSD[0])
    gp.fit(loader(shuffle=True))
    assert close(gp.loss, full.loss)
    assert gp.cost == pytest.approx(full.cost, rel=1e-12)
    assert gp.n_data == POINTS
    assert len(gp.H["inputs"]) == 5
    total = torch.zeros((), dtype=torch.float64, device=device)
    for seed in range(100):
        subset, *_ = gp.backend.fit_subset(loader(), POINTS - 1, seed)
        total = total + subset.factor.square().sum() / 100
    everything, *_ = gp.backend.fit_subset(loader(), POINTS, 0)
    truth = everything.factor.square().sum()
    leave_out = everything.factor.square().sum((1, 2))
    # The weight of the one point left out has this standard deviation; four of them over 100 draws.
    spread = POINTS / (POINTS - 1) * leave_out.std(correction=0) / 10
    assert abs(float(total - truth)) < 4 * float(spread)


class Passes:
    """A loader that gives other batches from the third look on, which is the second pass over the data."""

    def __init__(self, first: list[Any], then: list[Any]) -> None:
        self.first, self.then, self.looks = first, then, 0

    def __iter__(self) -> Any:
        self.looks += 1
        return iter(self.first if self.looks <= 2 else self.then)


def test_other_data_in_the_second_pass_are_refused() -> None:
    batches = list(loader())
    moved = [(x + 0.1, y) for x, y in batches]
    for then in (batches[:1], moved):
        gp = Laplace(encoder("cpu", cc.L2Norm()), "contrastive", "all", "gp", n_subset=8, backend_kwargs=PSD[0])
        with pytest.raises(cc.InputError, match="the same data in every pass"):
            gp.fit(Passes(batches, then))
        assert gp.H is None


@for_both
def test_single_precision_survives_a_weak_prior(weights: str) -> None:
    """The posterior is a small difference of large kernels."""
    kwargs: dict[str, Any] = {"prior_precision": 1e-5, "temperature": 1e-3, "backend_kwargs": PSD[0]}
    single = Laplace(encoder("cpu", cc.L2Norm()).float(), "contrastive", weights, "gp", n_subset=POINTS, **kwargs)
    single.fit([(x.float(), y) for x, y in loader()])
    full = Laplace(encoder("cpu", cc.L2Norm()), "contrastive", weights, "full", **kwargs)
    full.fit(loader())
    x = torch.cat([x for x, _ in loader()])
    found = single(x.float()).covariance
    assert found.dtype == torch.float32
    assert close(found.double(), full(x).covariance, tolerance=1e-4)


def test_gradients_reach_the_input() -> None:
    for weights in ("all", "last_layer"):
        gp = Laplace(
            encoder("cpu", cc.L2Norm()),
            "contrastive",
            weights,
            "gp",
            n_subset=6,
            backend_kwargs=PSD[0],
            enable_backprop=True,
        )
        gp.fit(loader())
        x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        gp(x).covariance.sum().backward()
        assert x.grad is not None
        assert bool((x.grad != 0).any())


def test_refusals() -> None:
    def make(**kwargs: Any) -> Any:
        return Laplace(encoder("cpu", cc.L2Norm()), "contrastive", "all", "gp", **kwargs)

    with pytest.raises(cc.InputError, match="n_subset: expected a positive whole number"):
        make()
    with pytest.raises(cc.UnsupportedError, match="independent_outputs"):
        make(n_subset=3, independent_outputs=True)
    with pytest.raises(cc.InputError, match="at most the 12 points"):
        make(n_subset=13, backend_kwargs=PSD[0]).fit(loader())
    with pytest.raises(cc.UnsupportedError, match="pd_fix='psd'"):
        make(n_subset=12, backend_kwargs={"pd_fix": "full"}).fit(loader())
    with pytest.raises(cc.UnsupportedError, match="pairs='dataset'"):
        make(n_subset=3, backend_kwargs={"pairs": "batch"}).fit(loader())
    with pytest.raises(cc.UnsupportedError, match="override=False"):
        make(n_subset=3).fit(loader(), override=False)
    gp = make(n_subset=12, backend_kwargs=PSD[0])
    gp.fit(loader())
    with pytest.raises(cc.UnsupportedError, match="'full'"):
        _ = gp.posterior_precision
    with pytest.raises(cc.InputError, match="n_subset"):
        make(n_subset=11, backend_kwargs=PSD[0]).load_state_dict(gp.state_dict())
