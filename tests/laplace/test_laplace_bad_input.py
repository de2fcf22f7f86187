"""Arguments of the Laplace classes that cannot be right, and use before fitting: our errors, and nothing changed."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import laplace
import pytest
import torch
from laplace import Laplace, Likelihood
from laplace.curvature import CurvlinopsGGN
from laplace_cases import INDICES, fitted, make
from laplace_combinations import COMBINATIONS
from tables import each, refused
from tiny import data, encoder
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace.registry import means_contrastive

NAN, X = math.nan, data()[0]


@pytest.fixture(scope="module")
def every() -> dict[tuple[str, str], Any]:
    """A fitted posterior of every kind."""
    return {(weights, structure): fitted(weights, structure) for weights, structure in COMBINATIONS}


@pytest.fixture(scope="module")
def la(every: dict[tuple[str, str], Any]) -> Any:
    return every["last_layer", "diag"]


@each("weights, structure", COMBINATIONS)
def test_use_before_fitting_is_one_error(weights: str, structure: str) -> None:
    la, x = make(weights, structure), data()[0]
    for use in (
        lambda: la(x),
        lambda: la.sample(2),
        lambda: la.functional_samples(x, n_samples=2),
        lambda: la.predictive_samples(x, n_samples=2),
        lambda: la.log_marginal_likelihood(torch.ones(1)),
        lambda: la.log_prob(torch.zeros(3)),
        lambda: la.square_norm(torch.zeros(3)),
        lambda: la.optimize_prior_precision(),
        lambda: la.state_dict(),
        lambda: la.log_likelihood,
        lambda: la.log_det_ratio,
        lambda: la.log_det_posterior_precision,
        lambda: la.scatter,
        lambda: pickle.loads(pickle.dumps(la))(x),
    ):
        refused(use, "not fitted", "fit(train_loader)", kind=cc.NotFittedError)
    assert float(la.prior_precision) == 1


@each(
    "name, call",
    [
        ("n_samples", lambda la: la.sample(0)),
        ("n_samples", lambda la: la(X, pred_type="nn", n_samples=2.5)),
        ("n_samples", lambda la: la.functional_samples(X, n_samples=0)),
        ("n_samples", lambda la: la.predictive_samples(X, n_samples=0, joint=True)),
        ("n_samples", lambda la: la.optimize_prior_precision(n_samples=0)),
        ("generator", lambda la: la.sample(2, generator=3)),
        ("generator", lambda la: la(X, generator=3)),
        ("joint", lambda la: la(X, joint=1)),
        ("joint", lambda la: la.functional_samples(X, joint=1)),
        ("diagonal_output", lambda la: la(X, diagonal_output=1)),
        ("normalized", lambda la: la.log_prob(la.mean, normalized=1)),
        ("'glm' or 'nn'", lambda la: la(X, pred_type="probit")),
        ("link_approx", lambda la: la(X, link_approx="logit")),
        ("samples", lambda la: la(X, pred_type="nn", n_samples=1)),
        ("n_samples", lambda la: la.predictive_samples(X, n_samples=0, pred_type="nn")),
        ("joint=True", lambda la: la(X).joint_covariance),
    ],
)
def test_options_of_predictions(name: str, call: Callable[[Any], Any], la: Any) -> None:
    refused(lambda: call(la), name, kind=cc.ContrastiveCurvatureError)


PRIORS = [
    *(("prior_precision", bad) for bad in (NAN, -1.0, [1.0, 2.0], torch.tensor([1.0, -1.0]))),
    *(("prior_mean", bad) for bad in ("0", NAN, torch.ones(2, 2))),
    *(("temperature", bad) for bad in (NAN, 0, torch.ones(2))),
]


@each("name, bad", PRIORS)
def test_prior_and_temperature(name: str, bad: Any, every: dict[tuple[str, str], Any]) -> None:
    for one in every.values():
        before = one.prior_precision.clone(), one.prior_mean, one.temperature
        refused(lambda one=one: setattr(one, name, bad), name)
        assert (one.prior_precision, one.prior_mean, one.temperature) == before
    refused(lambda: make(**{name: bad}), name)
    if name == "prior_precision":
        la = every["last_layer", "diag"]
        refused(lambda: la.log_marginal_likelihood(prior_precision=bad), name)
        refused(lambda: la.optimize_prior_precision(method="marglik", n_steps=1, init_prior_prec=bad), "prior_prec")


@each(
    "weights, structure, size",
    [("last_layer", "kron", 18), ("subnetwork", "diag", 5), ("all", "full", 5)],
)
def test_sizes_that_a_structure_has_no_room_for(
    weights: str, structure: str, size: int, every: dict[tuple[str, str], Any]
) -> None:
    one = every[weights, structure]
    refused(lambda: setattr(one, "prior_precision", torch.ones(size)), "prior_precision", str(size))
    assert one.prior_precision.numel() == 1


def test_sizes_are_held_against_the_data() -> None:
    refused(lambda: make(prior_precision=torch.ones(7)).fit([data()]), "prior_precision", "7")
    la = make()
    la.prior_precision, la.prior_mean = torch.full((18,), 2.0), torch.full((18,), 3.0)
    la.fit([data()])
    assert la.prior_precision.tolist() == [2] * 18
    assert la.prior_mean.tolist() == [3] * 18


def test_arguments_of_the_constructor() -> None:
    def made(*args: Any, **kwargs: Any) -> Any:
        return laplace.Laplace(encoder(), "contrastive", *args, **kwargs)

    refused(lambda: made("last_layer", "diag", backend_kwargs="margin"), "backend_kwargs")
    refused(lambda: make(temprature=2.0), "temprature", "temperature")
    refused(lambda: made("all", "diag", *range(1, 20)), "Laplace", "each argument once")
    refused(lambda: made("all", "diag", 1.0, 2.0, prior_precision=3.0), "prior_precision")
    # The order that the host's classes have, and its enumerations, which are strings.
    assert made("all", "diag", 1.0, 2.0).prior_precision == 2
    made(laplace.SubsetOfWeights.ALL, laplace.HessianStructure.DIAG)


@each("weights, structure", COMBINATIONS)
def test_inputs(weights: str, structure: str, every: dict[tuple[str, str], Any]) -> None:
    """Linear layers take any number of axes, so the encoder itself refuses no shape."""
    la, x = every[weights, structure], data()[0].clone()
    x[[3, 7], 1] = NAN
    for call in (la, lambda x: la(x, joint=True), lambda x: la.functional_samples(x, n_samples=2, joint=True)):
        refused(lambda call=call: call(x), "x:", "[3, 7]", "NaN or infinity themselves")
        refused(lambda call=call: call(data()[0][None]), "x", "shape (1, 12, 4)", "outputs of shape (1, 12, 3)")
        refused(lambda call=call: call([1.0]), "x:", "a tensor, an array, a mapping")
    refused(lambda: la("x"), "x:", "a list of texts")


@each("weights, structure", COMBINATIONS)
def test_values_of_densities(weights: str, structure: str, every: dict[tuple[str, str], Any]) -> None:
    la = every[weights, structure]
    good = la.mean[INDICES] if weights == "subnetwork" else la.mean
    for call in (la.log_prob, la.square_norm):
        refused(lambda call=call: call(good[:-1]), "value", f"({len(good)})")
        refused(lambda call=call: call(good * NAN), "value", "finite")
    assert float(la.square_norm(good)) == 0
    assert float(la.square_norm(good + 1)) > 0
    step = la.log_prob(good) - la.log_prob(good + 1)
    assert float(step) == pytest.approx(float(la.square_norm(good + 1)) / 2, rel=1e-9)
    for call in (la.functional_variance, la.functional_covariance):
        refused(lambda call=call: call(torch.ones(2, 3, len(good) + 1)), "Js", str(len(good)))


@each("structure", ["full", "diag"])
def test_densities_of_a_subnetwork_are_gaussian(structure: str, every: dict[tuple[str, str], Any]) -> None:
    """The host mixes sizes: against the dense precision."""
    la = every["subnetwork", structure]
    precision, mean = la.posterior_precision, la.mean_subnet
    precision = precision if precision.ndim == 2 else precision.diag()
    value = mean + torch.linspace(-1, 1, len(mean))
    truth = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    assert float(la.log_prob(value)) == pytest.approx(float(truth.log_prob(value)), rel=1e-9)


@each(
    "options, words",
    [
        ({"strength": 0}, "strength: expected a finite number > 0"),
        ({"method": "unit_information", "strength": 1.0}, "strength for 'unit_information': expected None"),
        ({"method": "marglik", "n_steps": 0}, "n_steps"),
        ({"method": "marglik", "lr": 0}, "lr"),
        ({"method": "marglik", "n_steps": 4, "lr": 1e3}, "lr"),
        ({"method": "gridsearch", "grid_size": 0}, "grid_size"),
        ({"method": "gridsearch", "log_prior_prec_base": 0}, "log_prior_prec_base"),
        ({"method": "gridsearch", "log_prior_prec_min": NAN}, "log_prior_prec_min"),
        ({"method": "gridsearch", "log_prior_prec_max": 400}, "log_prior_prec_max"),
        ({"method": "gridsearch", "val_loader": 3}, "val_loader"),
        ({"method": "gridsearch", "loss": "brier"}, "callable"),
        ({"method": "cv"}, "method"),
        ({"method": "gridsearch", "val_loader": None}, "val_loader"),
        ({"method": "gridsearch", "val_loader": []}, "empty"),
        ({"method": "gridsearch", "prior_structure": "diag"}, "prior_structure"),
        ({"method": "marglik", "pred_type": "probit"}, "pred_type"),
        ({"prior_structure": "bogus"}, "prior_structure"),
    ],
)
def test_options_of_the_prior_search(options: dict[str, Any], words: str, la: Any) -> None:
    before, temperature = la.prior_precision.clone(), la.temperature
    loader = {"val_loader": [data()]} if options.get("method") == "gridsearch" else {}
    refused(lambda: la.optimize_prior_precision(**{**loader, **options}), words)
    assert torch.equal(la.prior_precision, before)
    assert la.temperature == temperature


def test_a_prior_that_is_no_number_leaves_the_temperature() -> None:
    la = fitted(dtype=torch.float32)
    before = la.temperature, float(la.prior_precision)
    refused(lambda: la.optimize_prior_precision(strength=1e-300), "prior_precision")
    assert (la.temperature, float(la.prior_precision)) == before


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


@each(
    "call, words",
    [
        (
            lambda net: Laplace(net, "contrastive", hessian_structure="krno"),
            ("hessian_structure", "'kron'", "got krno"),
        ),
        (lambda net: Laplace(net, "contrastive", hessian_structure=None), ("hessian_structure", "'kron'", "got None")),
        (lambda net: Laplace(net, "contrastive", "lastlayer"), ("subset_of_weights", "'last_layer'", "got lastlayer")),
        (lambda net: Laplace(net, "contrastive", "diag", "all"), ("subset_of_weights", "'all'", "got diag")),
        (
            lambda net: Laplace("contrastive", net),
            ("likelihood", "'contrastive'", "got a Sequential", "Laplace(model,"),
        ),
        (lambda net: Laplace(net, "all", "contrastive"), ("likelihood", "'contrastive'", "got all", "Laplace(model,")),
        (lambda net: Laplace(net, "diag", "all", "contrastive"), ("likelihood", "'contrastive'", "got diag")),
        (lambda net: Laplace(net, "contrastiv"), ("likelihood", "'contrastive'", "got contrastiv")),
        (lambda net: Laplace(net, "Constrastive", "all"), ("likelihood", "'contrastive'", "got Constrastive")),
        (
            lambda net: Laplace(net, "contrastive", hessian_struct="diag"),
            ("got hessian_struct", "mean hessian_structure?"),
        ),
        (lambda net: Laplace(net, "contrastive", prior_precison=2.0), ("got prior_precison", "mean prior_precision?")),
        (lambda net: Laplace(net, "contrastive", margin=0.5), ("margin=0.5", "backend_kwargs=dict(margin=0.5)")),
        (
            lambda net: Laplace(net, "contrastive", backend=CurvlinopsGGN),
            ("ContrastiveGGN", "CurvlinopsGGN", "Leave it"),
        ),
        (lambda net: Laplace(net, "contrastive").fit([(X, X + 1, X - 1)]), ("train_loader", "torch.cat([a, p, n])")),
    ],
)
def test_the_front_door_speaks_before_laplace_torch_does(
    call: Callable[[nn.Module], Any], words: tuple[str, ...]
) -> None:
    refused(lambda: call(encoder()), *words)


def test_no_other_likelihood_is_taken_for_a_misspelling() -> None:
    for likelihood in Likelihood:
        assert not means_contrastive(likelihood)
    for name in ("krno", "Contrastive likelihood of mine"):
        with pytest.raises(ValueError, match="Invalid likelihood type"):
            Laplace(encoder(), name)
