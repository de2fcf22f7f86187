"""What a fitted contrastive posterior says: marginal likelihood, priors, predictions in chunks, samples, files."""

import io
import math
import pickle
import warnings
from typing import Any

import laplace
import pytest
import torch
from laplace.utils.enums import LinkApprox
from strategies import close
from tables import covering, each
from test_laplace import (
    ALL,
    COMBINATIONS,
    DIM,
    INDICES,
    LAST,
    OPTIONS,
    POINTS,
    SUBNET,
    batches,
    body,
    data,
    dense_truth,
    fitted,
    for_every_combination,
    make,
)
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.network import pullback
from contrastive_curvature.posterior import predict as prediction
from contrastive_curvature.testing import dense_jacobian

PRIOR, TEMPERATURE = 3.0, 0.4


def posterior(weights: str, structure: str, device: str = "cpu", **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
    """A fitted object and its dense posterior precision, which is built from ``cc.ggn`` alone."""
    x, y = data(device)
    host = {"prior_precision": PRIOR, "temperature": TEMPERATURE, **kwargs.pop("host", {})}
    la = fitted(body(cc.L2Norm(), device=device), weights, structure, x, y, host=host, **kwargs)
    h = dense_truth(body(device=device), x, y, weights, structure, **kwargs)
    return la, h / TEMPERATURE + PRIOR * torch.eye(len(h), dtype=h.dtype, device=h.device), x


def jacobian_of(x: Tensor, weights: str) -> Tensor:
    """Dense Jacobian (N, D, P) of the raw outputs with respect to the parameters of the posterior."""
    dense = dense_jacobian(body(device=x.device.type), x)
    if weights == "last_layer":
        dense = dense[:, -21:]
    if weights == "subnetwork":
        dense = dense[:, INDICES.to(x.device)]
    return dense.view(len(x), DIM, -1)


@for_every_combination
def test_log_marginal_likelihood_by_hand(weights: str, structure: str, device: str) -> None:
    la, precision, x = posterior(weights, structure, device)
    y = data(device)[1]
    loss = cc.ContrastiveLoss(**OPTIONS)(body(device=device)(x), y).item()
    mean = la.mean[INDICES.to(device)] if weights == "subnetwork" else la.mean
    ratio = precision.logdet().item() - len(precision) * math.log(PRIOR)
    scatter = PRIOR * mean.square().sum().item()
    expected = -loss / TEMPERATURE - (ratio + scatter) / 2
    assert float(la.log_marginal_likelihood()) == pytest.approx(expected, rel=1e-10)
    assert torch.equal(la.log_marginal_likelihood(sigma_noise=torch.ones(1)), la.log_marginal_likelihood())
    with pytest.raises(cc.UnsupportedError, match="sigma_noise"):
        la.log_marginal_likelihood(2 * la.prior_precision, 2.0)
    assert la.prior_precision == PRIOR


@for_every_combination
def test_weights_are_sampled_from_the_posterior(weights: str, structure: str, device: str) -> None:
    la, precision, _ = posterior(weights, structure, device)
    count = 20_000
    samples = la.sample(count, generator=torch.Generator(device).manual_seed(0))
    offset = samples - la.mean
    if weights == "subnetwork":
        rest = torch.ones(len(la.mean), dtype=torch.bool, device=device)
        rest[INDICES] = False
        assert not offset[:, rest].any()
        offset = offset[:, INDICES.to(device)]
    white = offset @ torch.linalg.cholesky(precision)
    error = (white.T @ white / count - torch.eye(len(precision), dtype=white.dtype, device=device)).abs().max()
    # Entries have a standard deviation of at most sqrt(2 / count); 6 of them for 51 * 51 entries: p < 1e-5.
    assert float(error) < 6 * math.sqrt(2 / count)
    assert float(white.mean(0).abs().max()) < 6 / math.sqrt(count)


@for_every_combination
def test_predictions_have_the_linearised_covariance(weights: str, structure: str, device: str) -> None:
    la, precision, x = posterior(weights, structure, device)
    jacobian, covariance = jacobian_of(x, weights), torch.linalg.inv(precision)
    truth = jacobian @ covariance @ jacobian.mT
    distribution = la(x)
    mu, kappa = distribution.mu, distribution.kappa
    z = body(device=device)(x).detach()
    assert close(distribution.raw_mean, z)
    assert close(distribution.covariance, truth)
    assert close(distribution.variance, truth.diagonal(dim1=1, dim2=2))
    assert close(mu, z / z.norm(dim=1, keepdim=True))
    assert kappa.shape == (POINTS,)
    u = mu.unsqueeze(2)
    spread = (truth.diagonal(dim1=1, dim2=2).sum(1) - (u.mT @ truth @ u).flatten()) / z.norm(dim=1).square()
    assert close(distribution.tangential_variance, spread)
    typical = float(z.norm(dim=1).mean())
    centres = ClassCentres.of(z, data(device)[1])
    assert centres is not None
    angle = (spread * typical / z.norm(dim=1)).sqrt() * centres.factor(z)
    assert close(distribution.uncertainty, angle.arctan())
    # Sra (2012) with Rbar = 1 / sqrt(1 + tv).
    assert close(kappa, (1 + spread).rsqrt() * (DIM - 1 / (1 + spread)) * (1 + spread) / spread)
    flat = jacobian.flatten(0, 1)
    joint = la(x, joint=True)
    assert close(joint.joint_covariance, flat @ covariance @ flat.T)
    assert close(joint.covariance, truth)
    assert close(joint.kappa, kappa)
    assert la(x[:0], joint=True).joint_covariance.shape == (0, 0)
    assert la(x[:0]).uncertainty.shape == (0,)
    diagonal = la(x, diagonal_output=True)
    assert close(diagonal.covariance, torch.diag_embed(truth.diagonal(dim1=1, dim2=2)))


CALLS: list[dict[str, Any]] = [
    {},
    {"diagonal_output": True},
    {"joint": True},
    *({"link_approx": link} for link in LinkApprox),
    {"pred_type": "nn", "link_approx": "mc", "n_samples": 5},
]


@each("weights, structure", [("last_layer", "kron"), ("last_layer", "diag"), ("all", "full"), ("subnetwork", "diag")])
def test_what_unpacks_is_what_a_regression_of_laplace_torch_returns(weights: str, structure: str) -> None:
    """The shapes are from the host itself; the numbers are the linearised ones, and those of the sampled networks."""
    la, precision, x = posterior(weights, structure)
    host = {"subnetwork_indices": INDICES} if weights == "subnetwork" else {}
    regression = laplace.Laplace(body(), "regression", weights, structure, **host)
    regression.fit(batches(x, body()(x).detach()))
    z, jacobian = body()(x).detach(), jacobian_of(x, weights)
    truth = torch.einsum("bdp,pq,ceq->bdce", jacobian, torch.linalg.inv(precision), jacobian)
    own = torch.stack([truth[k, :, k] for k in range(len(x))])
    variance = own.diagonal(dim1=1, dim2=2)
    for call in CALLS:
        mean, covariance = la(x, **call, generator=torch.Generator().manual_seed(0))
        assert [tuple(part.shape) for part in (mean, covariance)] == [
            tuple(part.shape) for part in regression(x, **call)
        ]
        wanted = z, own
        if "diagonal_output" in call:
            wanted = z, variance
        if "joint" in call:
            wanted = z.flatten(), truth.reshape(covariance.shape)
        if "pred_type" in call:
            samples = la.functional_samples(x, "nn", n_samples=5, generator=torch.Generator().manual_seed(0))
            wanted = samples.mean(0), samples.var(0)
        assert close(mean, wanted[0])
        assert close(covariance, wanted[1])
    again = pickle.loads(pickle.dumps(la(x)))
    assert all(map(torch.equal, again, la(x)))


@for_every_combination
def test_joint_samples_are_networks(weights: str, structure: str, device: str) -> None:
    la, _, x = posterior(weights, structure, device)

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(5)

    def draw(part: Tensor, pred_type: str) -> Tensor:
        return la.functional_samples(part, pred_type, n_samples=7, generator=generator(), joint=True)

    theta = la.sample(7, generator=generator())
    raw = body(device=device)
    full = torch.nn.utils.parameters_to_vector(raw.parameters()).detach()
    jacobian = dense_jacobian(raw, x)[:, -theta.shape[1] :].view(POINTS, DIM, -1)
    shift = (theta - full[-theta.shape[1] :]) @ jacobian.flatten(0, 1).T
    assert close(draw(x, "glm"), raw(x).detach() + shift.view(7, POINTS, DIM))
    outputs = []
    for sample in theta:
        torch.nn.utils.vector_to_parameters(torch.cat([full[: -len(sample)], sample]), raw.parameters())
        outputs.append(raw(x).detach())
    assert close(draw(x, "nn"), torch.stack(outputs))
    for pred_type in ("glm", "nn"):
        # The same weights for both halves of a batch: nothing depends on which inputs come together.
        assert close(torch.cat([draw(x[:9], pred_type), draw(x[9:], pred_type)], dim=1), draw(x, pred_type))
        raw_samples = draw(x, pred_type)
        on_sphere = la.predictive_samples(x, pred_type, n_samples=7, generator=generator(), joint=True)
        assert close(on_sphere, raw_samples / raw_samples.norm(dim=2, keepdim=True), tolerance=1e-14)
    if weights == "last_layer":
        assert close(draw(x, "nn"), draw(x, "glm"))
    left = torch.nn.utils.parameters_to_vector(la.model.parameters())
    assert torch.equal(left, full), "sampling leaves the weights alone"


@for_every_combination
def test_marginal_samples_have_the_predicted_distribution(weights: str, structure: str, device: str) -> None:
    la, _, x = posterior(weights, structure, device)
    x, count = x[:3], 20_000
    gaussian = la(x)
    root = torch.linalg.cholesky(torch.linalg.inv(gaussian.covariance))
    raw = la.functional_samples(x, "glm", count, generator=torch.Generator(device).manual_seed(1))
    white = torch.einsum("sbd,bde->bse", raw - gaussian.raw_mean, root)
    eye = torch.eye(DIM, dtype=white.dtype, device=device)
    # Standard deviations of sqrt(2 / count) and less, six of them.
    assert float((white.mT @ white / count - eye).abs().max()) < 6 * math.sqrt(2 / count)
    assert float(white.mean(1).abs().max()) < 6 / math.sqrt(count)


@pytest.mark.parametrize("structure", ["kron", "kron_lowrank"])
def test_a_covariance_has_its_graph_wherever_it_is_asked_for_first(structure: str) -> None:
    la, _, x = posterior("last_layer", structure, host={"enable_backprop": True})
    out = la(x.requires_grad_())
    with torch.inference_mode():
        assert out.covariance.shape == (POINTS, DIM, DIM)
    assert out.covariance.requires_grad
    out.covariance.sum().backward()
    assert x.grad is not None


def test_sampled_networks_are_summarised(device: str) -> None:
    la, _, x = posterior("all", "diag", device)
    seeds = [torch.Generator(device).manual_seed(2) for _ in range(2)]
    out = la(x, pred_type="nn", n_samples=40, generator=seeds[0])
    z = la.predictive_samples(x, "nn", n_samples=40, generator=seeds[1])
    mean = z.mean(0)
    rbar = mean.norm(dim=1)
    assert close(out.mu, mean / rbar.unsqueeze(1))
    assert close(out.kappa, rbar * (DIM - rbar**2) / (1 - rbar**2), tolerance=1e-8)  # 1 - Rbar^2 loses digits here
    assert close(out.sample(40), z)
    assert out.covariance.shape == (POINTS, DIM, DIM)


def curvature_of(weights: str, structure: str) -> Tensor:
    return dense_truth(body(), *data(), weights, structure)


def well_determined(curvature: Tensor, prior: Tensor) -> float:
    """``tr(H (H + D)^-1)``, from the matrix itself."""
    return torch.linalg.solve(curvature + torch.diag(prior.expand(len(curvature))), curvature).trace().item()


@for_every_combination
def test_default_prior_is_a_hundredth_of_the_average_information(weights: str, structure: str) -> None:
    x, y = data()
    la = fitted(body(), weights, structure, x, y)
    cost = cc.ContrastiveLoss(**OPTIONS)(body()(x), y).item()  # with a margin, cost and loss are one
    curvature = curvature_of(weights, structure)
    mean = curvature.diagonal().mean()
    for strength in (None, 3.0, 1e-6, None):
        la.optimize_prior_precision(strength=strength)
        prior = (strength or 0.01) * mean
        determined = well_determined(curvature, prior)
        assert la.temperature == pytest.approx(2 * cost / (POINTS + determined), rel=1e-9)
        assert close(la.prior_precision, (prior / la.temperature).reshape(1))
        assert la.effective_parameters(prior.reshape(1)) == pytest.approx(determined, rel=1e-9)
    # A temperature that is given stays.
    la, _, _ = posterior(weights, structure)
    for how, share in (({}, 0.01), ({"method": "unit_information"}, 1 / POINTS)):
        la.optimize_prior_precision(**how)
        assert la.temperature == TEMPERATURE
        assert close(la.prior_precision, (share * mean / TEMPERATURE).reshape(1))


@each("structure", ["kron_lowrank", "diag"])
def test_choosing_the_prior_again_changes_nothing(structure: str) -> None:
    """Twice to the last bit, or a calibration would be out of date; and in any mode of torch."""
    x, y = data()
    la = fitted(body().float(), "last_layer", structure, x.float(), y)
    la.optimize_prior_precision()
    wanted = (la.temperature, la.prior_precision.tolist())
    la.temperature = 1e30
    with torch.inference_mode():
        la.optimize_prior_precision()
    assert (la.temperature, la.prior_precision.tolist()) == wanted


STRUCTURED = [
    (*combination, prior)
    for combination in COMBINATIONS
    for prior in ("scalar", "layerwise", "diag")
    if combination[0] != "subnetwork" and not (combination[1].startswith("kron") and prior == "diag")
]


@covering(1, method=["average_information", "marglik"], weights__structure__prior=STRUCTURED)
def test_structured_priors(weights: str, structure: str, prior: str, method: str) -> None:
    x, y = data()
    la = fitted(body(), weights, structure, x, y)
    evidence = float(la.log_marginal_likelihood())
    la.optimize_prior_precision(method=method, prior_structure=prior, n_steps=30)
    sizes = [p.numel() for p in body().parameters()][-2 if weights == "last_layer" else 0 :]
    assert len(la.prior_precision) == {"scalar": 1, "layerwise": len(sizes), "diag": sum(sizes)}[prior]
    assert bool(torch.isfinite(la(x).kappa).all())
    if method == "marglik":
        assert float(la.log_marginal_likelihood()) > evidence
        return
    diagonal = curvature_of(weights, structure).diagonal() / la.temperature
    truth = {
        "scalar": diagonal.mean().reshape(1),
        "layerwise": torch.stack([part.mean() for part in diagonal.split(sizes)]),
        "diag": (diagonal + diagonal.mean()) / 2,
    }
    assert close(la.prior_precision, 0.01 * truth[prior])


REFUSED = [("last_layer", "kron", "diag"), ("last_layer", "kron_lowrank", "diag"), ("all", "kron", "diag")]


REFUSED += [(*combination, prior) for combination in SUBNET for prior in ("layerwise", "diag")]


@each("weights, structure, prior", REFUSED)
def test_priors_without_room_are_refused_and_nothing_changes(weights: str, structure: str, prior: str) -> None:
    """Kronecker factors have no room for one precision a weight; a subnetwork has no layers."""
    la = fitted(body(), weights, structure, *data(), host={"prior_precision": PRIOR})
    with pytest.raises(cc.ContrastiveCurvatureError, match="prior_structure"):
        la.optimize_prior_precision(prior_structure=prior)
    assert (la.temperature, float(la.prior_precision)) == (1.0, PRIOR)


@covering(1, pred_type=["glm", "nn"], weights__structure=[LAST[0], SUBNET[1]])
def test_grid_search_takes_the_minimum_of_the_criterion(weights: str, structure: str, pred_type: str) -> None:
    la, _, x = posterior(weights, structure)
    y = data()[1]
    seen: list[Tensor] = []
    scores = [4.0, 1.0, 3.0, 2.0]

    def criterion(samples: Tensor, labels: Tensor) -> float:
        assert torch.equal(labels, y)
        assert close(samples.norm(dim=2), torch.ones_like(samples[..., 0]), tolerance=1e-14)
        seen.append(samples)
        return scores[len(seen) - 1]

    kwargs: dict[str, Any] = {"log_prior_prec_min": 0, "log_prior_prec_max": 3, "grid_size": 4, "n_samples": 6}
    loader = batches(x, y, shuffle=False)
    la.optimize_prior_precision(pred_type, "gridsearch", val_loader=loader, loss=criterion, **kwargs)
    assert float(la.prior_precision) == pytest.approx(10.0, rel=1e-6)  # the second of 1, 10, 100, 1000, in float32
    assert [s.shape for s in seen] == [(6, POINTS, DIM)] * 4
    spread = [float((s - s.mean(0)).square().sum()) for s in seen]
    assert spread == sorted(spread, reverse=True)  # the same noise, shrunk by the prior
    la.optimize_prior_precision(pred_type, "gridsearch", val_loader=loader, **kwargs)
    assert any(float(la.prior_precision) == pytest.approx(10.0**k, rel=1e-6) for k in range(4))


def test_grid_search_passes_over_nan_and_restores_the_prior_when_it_fails() -> None:
    la, _, x = posterior("last_layer", "diag")
    loader = batches(x, data()[1])
    scores = iter([float("nan"), 2.0, 1.0])
    la.optimize_prior_precision(
        method="gridsearch", val_loader=loader, loss=lambda *_: next(scores), grid_size=3, n_samples=2
    )
    assert float(la.prior_precision) == pytest.approx(1e4, rel=1e-6)

    def broken(samples: Tensor, labels: Tensor) -> float:
        raise RuntimeError("criterion")

    with pytest.raises(RuntimeError, match="criterion"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, loss=broken, n_samples=2)
    assert float(la.prior_precision) == pytest.approx(1e4, rel=1e-6)


def roundtrip(la: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.filterwarnings("ignore:override=False. this posterior was loaded")
@for_every_combination
def test_a_posterior_survives_a_file_and_goes_on(weights: str, structure: str, device: str) -> None:
    """Its numbers for every posterior are in the tests of folders, whose content is this state."""
    la, _, x = posterior(weights, structure, device)
    la.prior_precision = 5.0
    other = make(body(cc.L2Norm(), device=device), weights, structure, host={"temperature": TEMPERATURE})
    other.load_state_dict(roundtrip(la))
    assert torch.equal(other(x, joint=True).joint_covariance, la(x, joint=True).joint_covariance)
    assert float(other.log_marginal_likelihood()) == float(la.log_marginal_likelihood())
    more = batches(x[:8], data(device)[1][:8], shuffle=False)
    for one in (la, other):
        one.fit(more, override=False)
    assert other.n_data == la.n_data == POINTS + 8
    assert torch.equal(other(x).covariance, la(x).covariance)
    for one in (la, other):
        one.optimize_prior_precision()
    assert torch.equal(other.prior_precision, la.prior_precision)


@each("weights", ["last_layer", "all"])
def test_an_encoder_with_other_weights_is_noticed(weights: str) -> None:
    la, _, x = posterior(weights, "diag")
    state = roundtrip(la)
    other = body(cc.L2Norm())
    with torch.no_grad():
        # Far from the last layer, whose weights the posterior could compare by itself.
        next(other.parameters()).mul_(1.01)
    with pytest.warns(UserWarning, match="other weights than the one"):
        make(other, weights, "diag", host={"temperature": TEMPERATURE}).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la(x)
        la.load_state_dict(state)


@each(
    "other",
    [{"margin": 0.9}, {"pd_fix": "psd"}, {"distance": "euclidean"}, {"relation": lambda a, b: (a == b, a != b)}],
)
def test_a_file_of_other_options_is_refused(other: dict[str, Any]) -> None:
    la, _, x = posterior("last_layer", "diag")
    stranger = make(body(), "last_layer", "diag", host={"temperature": TEMPERATURE}, **other)
    with pytest.raises(cc.InputError, match="state_dict"):
        stranger.load_state_dict(la.state_dict())
    with pytest.raises(AttributeError, match="fit"):
        stranger(x)


@for_every_combination
def test_a_temperature_and_a_prior_count_when_they_are_set_later(weights: str, structure: str) -> None:
    """``P = H / T + prior``: nothing that was computed with the old ones may be kept."""
    la = fitted(body(), weights, structure, *data(), host={"temperature": 1.0, "prior_precision": 2.0})
    x, _ = data()
    before = la(x).covariance
    la.temperature = 0.5
    assert not close(la(x).covariance, before)
    la.prior_precision = 4.0
    assert close(la(x).covariance, before / 2)


@pytest.mark.parametrize(("weights", "structure"), [*LAST, *ALL])
def test_predictions_can_be_differentiated(weights: str, structure: str, device: str) -> None:
    x, y = data(device)
    host = {"enable_backprop": True, "prior_precision": PRIOR, "temperature": TEMPERATURE}
    la = fitted(body(cc.L2Norm(), device=device), weights, structure, x, y, host=host)
    point = x[:2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(point).kappa.sum(), point)
    step, truth = 1e-6, torch.zeros_like(gradient)
    with torch.no_grad():
        for index in range(point.numel()):
            shift = step * torch.eye(point.numel(), dtype=x.dtype, device=device)[index].view_as(point)
            truth.view(-1)[index] = (la(point + shift).kappa.sum() - la(point - shift).kappa.sum()) / (2 * step)
    # Central differences: truncation and rounding are both about 1e-9 of kappa's size here.
    assert close(gradient, truth, tolerance=1e-6)
    silent, _, _ = posterior(weights, structure, device)
    assert not silent(point).kappa.requires_grad


@pytest.mark.parametrize("backend", [cc.BackPackContrastiveGGN, cc.StochManContrastiveGGN])
@pytest.mark.parametrize(("weights", "structure"), [("last_layer", "kron"), ("all", "diag"), ("subnetwork", "full")])
def test_predictions_of_every_backend_can_be_differentiated(weights: str, structure: str, backend: type) -> None:
    x, y = data()
    host = {"enable_backprop": True, "prior_precision": PRIOR}
    gradients = []
    for chosen in (cc.ContrastiveGGN, backend):
        la = fitted(body(cc.L2Norm()), weights, structure, x, y, host={**host, "backend": chosen})
        point = x[:2].clone().requires_grad_()
        gradients.append(torch.autograd.grad(la(point).kappa.sum(), point)[0])
    assert close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:.*point by point")
def test_gradients_through_a_module_that_cannot_be_vectorised() -> None:
    """Its Jacobians are taken point by point; their part in the gradient must not get lost in silence."""

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = body()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum().item() > -1e9 else x

    x, y = data()
    gradients = []
    for model in (body(), Stubborn()):
        la = make(model, "all", "diag", host={"enable_backprop": True})
        la.fit(batches(x, y))
        point = x[:2].clone().requires_grad_()
        gradients.append(torch.autograd.grad(la(point).kappa.sum(), point)[0])
    assert close(gradients[1], gradients[0])


CHUNKED = [*ALL, *SUBNET]
"""Posteriors whose predictions take Jacobians."""


MODULES = (prediction, pullback)


@covering(1, elements=[1, 200, 400], weights__structure=CHUNKED)
def test_bounded_chunks_change_nothing(
    weights: str, structure: str, elements: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output of a point, a point, or some points at a time: the body has 51 parameters and 3 outputs."""
    la, precision, x = posterior(weights, structure, device)
    for module in MODULES:
        monkeypatch.setattr(module, "JACOBIAN_ELEMENTS", elements)
    monkeypatch.setattr(prediction, "_POINTS_AT_ONCE", 2)
    jacobian, covariance = jacobian_of(x, weights), torch.linalg.inv(precision)
    truth = jacobian @ covariance @ jacobian.mT
    assert close(la(x).covariance, truth)
    assert close(la(x, diagonal_output=True).variance, truth.diagonal(dim1=1, dim2=2))
    flat = jacobian.flatten(0, 1)
    assert close(la(x, joint=True).joint_covariance, flat @ covariance @ flat.T)


class Counting:
    """A pullback that notes the largest Jacobian it was asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.largest = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        out: Tensor = self.inner.vjp(context, cotangents)
        self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(("structure", "diagonal", "outputs"), [("kron", False, 6), ("kron", True, 1)])
def test_jacobians_stay_within_the_bound(
    structure: str, diagonal: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two points of three outputs each; of variances alone, one output."""
    la, _, x = posterior("all", structure)
    counting = Counting(la.backend.pullback(x))
    monkeypatch.setattr(la.backend, "pullback", lambda _: counting)
    for module in MODULES:
        monkeypatch.setattr(module, "JACOBIAN_ELEMENTS", outputs * counting.width)
    la(x, diagonal_output=diagonal)
    assert 0 < counting.largest <= outputs * counting.width


def test_a_graph_to_the_prior_precision_is_kept() -> None:
    la, _, x = posterior("all", "kron")
    prior = torch.ones(1, dtype=torch.float64, requires_grad=True)
    la.prior_precision = prior
    (gradient,) = torch.autograd.grad(la(x).variance.sum(), prior)
    step = 1e-5
    ends = []
    for value in (1 + step, 1 - step):
        la.prior_precision = value
        ends.append(float(la(x).variance.sum()))
    # Central differences have an error of step^2.
    assert float(gradient) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


def test_a_joint_covariance_that_does_not_fit_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    la, _, x = posterior("all", "diag")
    needed = (len(x) * la.n_outputs) ** 2 + len(x) * la.n_outputs * la.mean.numel()
    monkeypatch.setattr(prediction, "JOINT_ELEMENTS", needed)
    assert la(x, joint=True).joint_covariance.shape == (len(x) * la.n_outputs,) * 2
    monkeypatch.setattr(prediction, "JOINT_ELEMENTS", needed - 1)

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(nn.Linear, "forward", fail)
    with pytest.raises(cc.InputError, match=rf"joint=True: expected .*got {len(x)} inputs, {needed:,} numbers"):
        la(x, joint=True)
