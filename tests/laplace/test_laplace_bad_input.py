"""Arguments of the Laplace classes that cannot be right, and use before fitting: our errors, and nothing changed."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import laplace
import pytest
import torch
from devices import DEVICES
from laplace_combinations import COMBINATIONS, for_every_combination
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace import ContrastiveDiagLaplace

on_every_device = pytest.mark.parametrize("device", DEVICES)
NAN, INF = math.nan, math.inf
NO_COUNT = [-3, 0, True, 2.5, "3", None, NAN, [2]]
NO_BOOL = ["x", 1, None, 0.0]


def encoder(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def data(device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(12, 4, generator=generator).to(device), (torch.arange(12) % 3).to(device)


def make(weights: str = "last_layer", structure: str = "diag", device: str = "cpu", **host: Any) -> Any:
    if weights == "subnetwork":
        host.setdefault("subnetwork_indices", torch.tensor([0, 3, 26, 30, 41]))
    if structure == "gp":
        host.setdefault("n_subset", 4)
    options = {"margin": 1.2, "pd_fix": "psd"}
    return laplace.Laplace(encoder(device), "contrastive", weights, structure, backend_kwargs=options, **host)


_FITTED: dict[Any, Any] = {}


def fitted(weights: str = "last_layer", structure: str = "diag", device: str = "cpu") -> Any:
    if (weights, structure, device) not in _FITTED:
        la = make(weights, structure, device)
        la.fit([data(device)])
        _FITTED[weights, structure, device] = la
    return _FITTED[weights, structure, device]


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = cc.InputError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, cc.ContrastiveCurvatureError)
    message = str(caught.value)
    assert all(word in message for word in words), message
    return message


METHODS: list[Callable[[Any], Any]] = [
    lambda la: la(data()[0]),
    lambda la: la.sample(2),
    lambda la: la.functional_samples(data()[0], n_samples=2),
    lambda la: la.predictive_samples(data()[0], n_samples=2),
    lambda la: la.log_marginal_likelihood(),
    lambda la: la.log_marginal_likelihood(torch.ones(1)),
    lambda la: la.log_prob(torch.zeros(3)),
    lambda la: la.square_norm(torch.zeros(3)),
    lambda la: la.optimize_prior_precision(),
    lambda la: la.state_dict(),
    lambda la: la.log_likelihood,
    lambda la: la.log_det_ratio,
    lambda la: la.log_det_posterior_precision,
    lambda la: la.scatter,
]


@for_every_combination
def test_use_before_fitting_is_one_error(weights: str, structure: str) -> None:
    la = make(weights, structure)
    for method in METHODS:
        refused(lambda method=method: method(la), "not fitted", "fit(train_loader)", kind=cc.NotFittedError)
    assert float(la.prior_precision) == 1


@for_every_combination
def test_properties_before_fitting(weights: str, structure: str) -> None:
    """Also those that only some structures have; and what asks an object for attributes still works."""
    la, done = make(weights, structure), fitted(weights, structure)
    for name in ("posterior_precision", "posterior_variance", "posterior_covariance", "posterior_scale", "V", "Kinv"):
        if structure == "gp" and name == "posterior_precision":
            continue
        assert not hasattr(la, name)
        if hasattr(done, name):
            refused(lambda name=name: getattr(la, name), "not fitted", kind=cc.NotFittedError)
    if structure != "gp":
        refused(lambda: la.functional_variance(torch.ones(1, 3, 2)), "not fitted", kind=cc.NotFittedError)
        refused(lambda: la.functional_covariance(torch.ones(1, 3, 2)), "not fitted", kind=cc.NotFittedError)
    for copied in (copy.copy(la), copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert type(copied) is type(la)
        with pytest.raises(cc.NotFittedError):
            copied(data()[0])
    assert type(la).__name__ in repr(la)
    copied = copy.deepcopy(done)
    assert torch.equal(copied(data()[0]).kappa, done(data()[0]).kappa)


def test_the_error_is_what_callers_of_laplace_torch_expect() -> None:
    assert issubclass(cc.NotFittedError, (AttributeError, ValueError))
    assert issubclass(cc.NotFittedError, AttributeError)
    assert issubclass(cc.NotFittedError, ValueError)


def test_numbers_of_samples_sources_of_randomness_and_flags() -> None:
    la, x = fitted(), data()[0]
    for bad in NO_COUNT:
        for call in (
            lambda n: la.sample(n),
            lambda n: la(x, n_samples=n),
            lambda n: la(x, pred_type="nn", n_samples=n),
            lambda n: la.functional_samples(x, n_samples=n),
            lambda n: la.predictive_samples(x, n_samples=n, joint=True),
            lambda n: la.optimize_prior_precision(n_samples=n),
        ):
            refused(lambda call=call, bad=bad: call(bad), "n_samples", "positive whole number")
    for bad in (3, "seed", torch.ones(1)):
        for draw in (la.sample, lambda n, generator: la.functional_samples(x, n_samples=n, generator=generator)):
            refused(lambda draw=draw, bad=bad: draw(2, generator=bad), "generator", "torch.Generator")
        refused(lambda bad=bad: la(x, generator=bad), "generator")
    for name, call in (
        ("joint", lambda bad: la(x, joint=bad)),
        ("diagonal_output", lambda bad: la(x, diagonal_output=bad)),
        ("fitting", lambda bad: la(x, fitting=bad)),
        ("joint", lambda bad: la.functional_samples(x, joint=bad)),
        ("diagonal_output", lambda bad: la.predictive_samples(x, diagonal_output=bad)),
        ("normalized", lambda bad: la.log_prob(la.mean, normalized=bad)),
    ):
        for bad in NO_BOOL:
            refused(lambda call=call, bad=bad: call(bad), name, "True or False")


PRECISIONS = ["1", None, NAN, -1.0, 0, INF, True, [1.0, 2.0], torch.empty(0), torch.ones(2, 2), torch.tensor([NAN])]
PRECISIONS += [torch.tensor([1.0, -1.0]), torch.tensor(True), torch.tensor(1j), 1e300, 1e-300, range(2), 1j]


MEANS = ["0", None, NAN, INF, True, [0.0], torch.empty(0), torch.ones(2, 2), 1e300]
TEMPERATURES = ["1", None, NAN, INF, 0, -1, True, [1.0], torch.ones(2), 1e-60, 1e60, 10**400]


@for_every_combination
def test_prior_and_temperature(weights: str, structure: str) -> None:
    """Every value for one posterior, one value for the others, which have the same checks."""
    la = fitted(weights, structure)
    before = la.prior_precision.clone(), la.prior_mean, la.temperature
    unfit = make(weights, structure)
    for name, values in (("prior_precision", PRECISIONS), ("prior_mean", MEANS), ("temperature", TEMPERATURES)):
        for bad in values if (weights, structure) == ("last_layer", "diag") else values[2:4]:
            given: dict[str, Any] = {name: bad}
            refused(lambda given=given: make(weights, structure, **given), name)
            for one in (la, unfit):
                refused(lambda one=one, name=name, bad=bad: setattr(one, name, bad), name)
            if name != "prior_precision":
                continue
            if bad is not None:
                refused(lambda bad=bad: la.log_marginal_likelihood(prior_precision=bad), name)
            search = {"method": "marglik", "n_steps": 1, "init_prior_prec": bad}
            refused(lambda search=search: la.optimize_prior_precision(**search), "prior_prec")
    refused(lambda: setattr(la, "prior_mean", torch.zeros(7)), "prior_mean", "entries", "7")
    assert torch.equal(la.prior_precision, before[0])
    assert la.prior_mean is before[1]
    assert la.temperature == before[2]


def test_sizes_that_a_structure_has_no_room_for() -> None:
    for (weights, structure), size in {
        ("last_layer", "kron"): 18,
        ("all", "kron"): 43,
        ("subnetwork", "diag"): 5,
        ("all", "gp"): 43,
        ("all", "full"): 5,
    }.items():
        la = fitted(weights, structure)
        refused(lambda la=la, size=size: setattr(la, "prior_precision", torch.ones(size)), "prior_precision", str(size))
        assert la.prior_precision.numel() == 1
    la = make("last_layer", "diag", prior_precision=torch.ones(7))  # how many there are shows with the data
    refused(lambda: la.fit([data()]), "prior_precision", "7")
    la = make("last_layer", "diag")
    la.prior_precision, la.prior_mean = torch.full((18,), 2.0), torch.full((18,), 3.0)
    la.fit([data()])
    assert torch.equal(la.prior_precision, torch.full((18,), 2.0))
    assert torch.equal(la.prior_mean, torch.full((18,), 3.0))


def test_other_arguments_of_the_constructor() -> None:
    for argument, bad in (
        ("backend_kwargs", "margin"),
        ("backend_kwargs", [1]),
        ("backend_kwargs", 3),
    ):
        with pytest.raises(cc.InputTypeError, match=argument):
            laplace.Laplace(encoder(), "contrastive", "last_layer", "diag", **{argument: bad})
    refused(lambda: make(temprature=2.0), "temprature", "temperature")
    refused(lambda: laplace.Laplace(encoder(), "contrastive", "all", "diag", *range(1, 20)), "arguments")
    refused(lambda: ContrastiveDiagLaplace(encoder(), "contrastive", 1.0, 2.0, prior_precision=3.0), "prior_precision")
    for bad in ("2", NAN, torch.tensor(2.0), None, True):
        refused(lambda bad=bad: make(sigma_noise=bad), "sigma_noise", kind=cc.UnsupportedError)
        refused(lambda bad=bad: setattr(fitted(), "sigma_noise", bad), "sigma_noise", kind=cc.UnsupportedError)
    with pytest.raises(ValueError, match="sigma_noise"):
        fitted().log_marginal_likelihood(sigma_noise=2.0)
    for bad in (None, 0, -1, 2.5, "4", True):
        refused(lambda bad=bad: make("all", "gp", n_subset=bad), "n_subset")
    # The order that the host's classes have.
    assert ContrastiveDiagLaplace(encoder(), "contrastive", 1.0, 2.0).prior_precision == 2


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_indices_of_a_subnetwork(structure: str) -> None:
    for bad in (
        None,
        [0, 1],
        3,
        "all",
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([True, False]),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([[0, 1]]),
        torch.tensor(3),
        torch.tensor([0, 43]),
        torch.tensor([-1, 3]),
        torch.tensor([1, 1]),
    ):
        # laplace-torch's own check.
        with pytest.raises(ValueError, match="Subnetwork indices"):
            make("subnetwork", structure, subnetwork_indices=bad)
    with pytest.raises(TypeError, match="subnetwork_indices"):
        laplace.Laplace(encoder(), "contrastive", "subnetwork", structure)


@on_every_device
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_indices_from_any_device_are_taken(structure: str, device: str) -> None:
    indices = torch.tensor([0, 3, 26], device=device)
    la = make("subnetwork", structure, device, subnetwork_indices=indices)
    la.fit([data(device)])
    moved = la.sample(50) - la.mean
    assert moved[:, indices].abs().min() > 0
    kept = torch.ones(43, dtype=torch.bool)
    kept[[0, 3, 26]] = False
    assert not moved[:, kept.to(device)].any()


def test_combinations_that_there_are_not() -> None:
    def made(*args: Any, **kwargs: Any) -> Any:
        return laplace.Laplace(encoder(), "contrastive", *args, **kwargs)

    for structure in ("bogus", None, 3):
        with pytest.raises(ValueError, match="Unsupported Laplace combination"):
            made("all", structure)
        with pytest.raises(ValueError, match="Unsupported Laplace combination"):
            made(structure)
    for structure in ("kron", "lowrank", "gp"):
        with pytest.raises(ValueError, match="Subnetwork Laplace requires a full or diagonal Hessian"):
            made("subnetwork", structure)
    refused(lambda: made("last_layer", "lowrank"), "lowrank", "last_layer", "'kron'", kind=cc.UnsupportedError)
    for approximation in ("bogus", "nystrom"):
        with pytest.raises(ValueError, match="functional_approximation"):
            made("all", "diag", functional_approximation=approximation)
    # laplace-torch's enumerations, which are strings.
    made(laplace.SubsetOfWeights.ALL, laplace.HessianStructure.DIAG)


def test_the_lookup_is_the_hosts_own_for_everything_else() -> None:
    for likelihood in ("classification", "regression", "bogus", None):
        with pytest.raises(ValueError, match="Unsupported Laplace combination") as caught:
            laplace.Laplace(encoder(), likelihood, hessian_structure="bogus")
        assert not isinstance(caught.value, cc.ContrastiveCurvatureError)
    with pytest.raises(
        TypeError, match=r"Laplace\(\) missing 2 required positional arguments: 'model' and 'likelihood'"
    ):
        laplace.Laplace()


@for_every_combination
@on_every_device
def test_inputs_without_finite_outputs_are_named(weights: str, structure: str, device: str) -> None:
    la, x = fitted(weights, structure, device), data(device)[0].clone()
    x[[3, 7], 1] = NAN
    x[:, 2:] = 0
    for call in (
        lambda: la(x),
        lambda: la(x, joint=True),
        lambda: la(x, diagonal_output=True),
        lambda: la(x, pred_type="nn", n_samples=2),
        lambda: la.functional_samples(x, n_samples=2),
        lambda: la.predictive_samples(x, n_samples=2, joint=True),
    ):
        refused(call, "x:", "[3, 7]", "NaN or infinity themselves")
    # A layer that saturates takes infinity: then there is an answer, and it is a finite one, or an error of ours.
    for bad in (INF, -INF):
        x[[3, 7], 1] = bad
        with contextlib.suppress(cc.InputError):
            found = la(x)
            assert bool(found.mu.isfinite().all() & found.kappa.isfinite().all())


def test_inputs_are_tensors_or_mappings() -> None:
    for weights, structure in COMBINATIONS:
        la = fitted(weights, structure)
        for bad in (None, 3, "x", [1.0], 2.5, range(2)):
            wanted = "a list of texts" if isinstance(bad, str) else "a tensor or a mapping"
            refused(lambda la=la, bad=bad: la(bad), "x:", wanted)
            refused(lambda la=la, bad=bad: la.functional_samples(bad, pred_type="nn", n_samples=2), "x:")


@for_every_combination
def test_values_of_densities(weights: str, structure: str) -> None:
    la = fitted(weights, structure)
    size = 5 if weights == "subnetwork" else la.mean.numel()
    good = la.mean[torch.tensor([0, 3, 26, 30, 41])] if weights == "subnetwork" else la.mean
    for call in (la.log_prob, la.square_norm):
        refused(lambda call=call: call(good[:-1]), "value", f"({size})")
        refused(lambda call=call: call(good.unsqueeze(0)), "value")
        refused(lambda call=call: call(good * NAN), "value", "finite")
        refused(lambda call=call: call(good.tolist()), "value", "list")
        refused(lambda call=call: call(good.double()), "value", "float64")
    assert float(la.square_norm(good)) == 0
    assert float(la.square_norm(good + 1)) > 0
    step = la.log_prob(good) - la.log_prob(good + 1)
    assert float(step) == pytest.approx(float(la.square_norm(good + 1)) / 2, rel=1e-4)
    if structure == "gp":
        refused(lambda: la.functional_variance(torch.ones(1, 3, size)), "la(x)", kind=cc.UnsupportedError)
        return
    for call in (la.functional_variance, la.functional_covariance):
        refused(lambda call=call: call(torch.ones(2, 3, size + 1)), "Js", str(size))
        refused(lambda call=call: call(torch.ones(3, size)), "Js")
        refused(lambda call=call: call([1.0]), "Js", "list")


@pytest.mark.parametrize(("weights", "structure"), [("all", "lowrank"), ("subnetwork", "full"), ("subnetwork", "diag")])
def test_densities_that_the_host_has_not_are_gaussian(weights: str, structure: str) -> None:
    """Low rank, for which the host refuses, and subnetworks, where it mixes sizes: against the dense precision."""
    la = fitted(weights, structure)
    if structure == "lowrank":
        (vectors, values), prior = la.posterior_precision
        precision, mean = (vectors * values) @ vectors.T + prior.diag(), la.mean
    else:
        precision, mean = la.posterior_precision, la.mean_subnet
        precision = precision if precision.ndim == 2 else precision.diag()
    value = mean + torch.linspace(-1, 1, len(mean))
    truth = torch.distributions.MultivariateNormal(mean.double(), precision_matrix=precision.double())
    assert float(la.log_prob(value)) == pytest.approx(float(truth.log_prob(value.double())), rel=1e-4)


def test_options_of_the_prior_search() -> None:
    la = fitted()
    before, temperature = la.prior_precision.clone(), la.temperature
    loader = [data()]

    def tune(**options: Any) -> Callable[[], Any]:
        return lambda: la.optimize_prior_precision(**options)

    for bad in NO_COUNT:
        refused(tune(method="marglik", n_steps=bad), "n_steps")
        refused(tune(method="gridsearch", val_loader=loader, grid_size=bad), "grid_size")
    for bad in (0, -1, NAN, INF, "x", None, True):
        refused(tune(method="marglik", lr=bad), "lr")
        refused(tune(method="gridsearch", val_loader=loader, log_prior_prec_base=bad), "log_prior_prec_base")
    for bad in (NAN, INF, "x", None, True):
        refused(tune(method="gridsearch", val_loader=loader, log_prior_prec_min=bad), "log_prior_prec_min")
        refused(tune(method="gridsearch", val_loader=loader, log_prior_prec_max=bad), "log_prior_prec_max")
    refused(tune(method="gridsearch", val_loader=loader, log_prior_prec_max=400), "log_prior_prec_max", "400")
    for bad in (3, "loader", torch.ones(2)):
        refused(tune(method="gridsearch", val_loader=bad), "val_loader")
    refused(tune(method="gridsearch", val_loader=loader, loss="brier"), "loss", "callable")
    refused(tune(method="marglik", n_steps=4, lr=1e3), "lr")
    for method in (3, None, ["marglik"], "cv"):
        refused(tune(method=method), "method")
    for structure in (3, None, "bogus"):
        refused(tune(prior_structure=structure), "prior_structure")
    assert torch.equal(la.prior_precision, before)
    assert la.temperature == temperature


def test_a_prior_that_is_no_number_leaves_the_temperature() -> None:
    la = make()
    la.fit([data()])
    before = la.temperature, la.prior_precision.clone()
    refused(lambda: la.optimize_prior_precision(strength=1e-300), "prior_precision")
    assert (la.temperature, float(la.prior_precision)) == (before[0], float(before[1]))


@on_every_device
@for_every_combination
def test_inputs_that_are_no_batch_of_points(weights: str, structure: str, device: str) -> None:
    """Linear layers take any number of axes, so the encoder itself refuses none of these."""
    la, x = fitted(weights, structure, device), data(device)[0]
    shapes = {(1, 12, 4): (1, 12, 3), (4,): (3,)}
    for shape, of_outputs in shapes.items():
        bad = x.flatten()[: math.prod(shape)].view(shape)
        assert encoder(device)(bad).shape == of_outputs
        for call in (
            la,
            lambda x: la(x, joint=True),
            lambda x: la(x, diagonal_output=True),
            lambda x: la(x, pred_type="nn", n_samples=2),
            lambda x: la.functional_samples(x, n_samples=2, joint=True),
        ):
            refused(lambda call=call, bad=bad: call(bad), "x", f"shape {shape}", f"outputs of shape {of_outputs}")


def test_an_error_of_the_encoder_is_its_own() -> None:
    """Of points like those of the fit; of others it is the cause of an error that names them."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 100).any()) or x.ndim > 2:
                msg = "too much"
                raise RuntimeError(msg)
            out: Tensor = self.inner(x)
            return out

    la, (x, y) = laplace.Laplace(Picky(), "contrastive"), data()
    la.fit([(x, y)])
    with pytest.raises(RuntimeError, match="too much") as caught:
        la(x + 1000)
    assert not isinstance(caught.value, cc.ContrastiveCurvatureError)
    with pytest.raises(cc.InputError, match=r"shape \(12, 4\).*too much") as caught_too:
        la(x[None])
    assert isinstance(caught_too.value.__cause__, RuntimeError)
