"""``negative_samples`` of a posterior: what every value does, what is said about it, and what is refused."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from strategies import close
from tables import each
from tiny import data, encoder, in_batches

import contrastive_curvature as cc
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit import dataset
from contrastive_curvature.fit.part_state import State
from contrastive_curvature.losses.logistic import LogisticLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning"),
    pytest.mark.filterwarnings("ignore:.*K-FAC leaves"),
    pytest.mark.filterwarnings("ignore::contrastive_curvature.laplace.advice.FeatureNormWarning"),
]


def make(device: str, structure: str = "diag", weights: str = "last_layer", **options: Any) -> Any:
    return Laplace(encoder(device), "contrastive", weights, structure, backend_kwargs=options)


def fitted(device: str, given: Any, structure: str = "diag", weights: str = "last_layer", **options: Any) -> Any:
    la = make(device, structure, weights, **options)
    la.fit(given)
    return la


@pytest.mark.parametrize(
    ("weights", "structure", "fix"),
    [
        ("last_layer", "kron_lowrank", "fixed"),
        ("all", "diag", "full"),
    ],
)
def test_posteriors_of_all_points_as_the_sample(weights: str, structure: str, fix: str, device: str) -> None:
    x, y = data(22, device, 4)
    given, probe = [(x[:9], y[:9]), (x[9:], y[9:])], x[:5]
    options: dict[str, Any] = {"margin": 0.9, "pd_fix": fix}
    whole = fitted(device, given, structure, weights, negative_samples=None, **options)
    sampled = fitted(device, given, structure, weights, negative_samples=22, **options)
    assert close(sampled(probe).raw_mean, whole(probe).raw_mean)
    assert close(sampled(probe).covariance, whole(probe).covariance, None, 1e-8)
    assert float(sampled.loss) == pytest.approx(float(whole.loss), rel=1e-12)
    assert float(sampled.cost) == pytest.approx(float(whole.cost), rel=1e-12)
    assert sampled.typical_norm == pytest.approx(whole.typical_norm, rel=1e-12)
    assert sampled.n_data == whole.n_data


def as_if_many(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(dataset, "MANY_POINTS", n)


def test_from_thirty_thousand_points_on_a_sample_stands_for_all_negatives(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every machine, however fast."""
    assert (dataset.MANY_POINTS, dataset.NEGATIVE_SAMPLES) == (30_000, 2000)
    as_if_many(monkeypatch, 2100)
    given, la = in_batches(*data(2100, device, 4), 700), make(device, margin=0.9)
    la.fit(given)
    explicit = fitted(device, given, margin=0.9, negative_samples=2000)
    assert torch.allclose(la.H, explicit.H, rtol=1e-13, atol=0)
    exact = fitted(device, given, margin=0.9, negative_samples=None)
    assert 1e-6 < float((la.H - exact.H).norm() / exact.H.norm()) < 0.01


EXACT: list[tuple[int, str, dict[str, Any]]] = [
    (301, "diag", {"margin": 0.9}),
    (301, "diag", {"loss": LogisticLoss()}),
    (300, "diag", {"margin": 0.9, "negative_samples": None}),
    (300, "kron", {"margin": 0.9, "pd_fix": "full"}),
    (300, "diag", {"margin": None}),
]


@each("many, structure, options", EXACT)
def test_all_pairs_of_fewer_points_count_and_where_that_is_asked_for_or_no_sample_serves(
    many: int, structure: str, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_many(monkeypatch, many)
    given = in_batches(*data(300, device, 4), 700)
    la = fitted(device, given, structure, **options)
    exact, probe = fitted(device, given, structure, **{**options, "negative_samples": None}), given[0][0][:3]
    assert torch.equal(la(probe).covariance, exact(probe).covariance)


@each("options", [{"margin": None}, {"margin": 0.9, "negative_weight": 0.0}, {"margin": 2.0}])
def test_where_sums_over_classes_suffice_a_number_is_of_no_effect(options: dict[str, Any], device: str) -> None:
    la, exact = (fitted(device, [data(40, device, 4)], negative_samples=m, **options) for m in (5, None))
    assert close(la.H, exact.H)


REFUSED: list[tuple[dict[str, Any], str, type[Exception]]] = [
    *(
        ({"negative_samples": value}, "negative_samples: expected None, 'auto' or a whole", InputError)
        for value in (1, "many")
    ),
    ({"pairs": "batch"}, "negative_samples.*pairs='batch'", InputError),
    ({"loss": cc.InfoNCELoss()}, "negative_samples: expected nothing with InfoNCELoss.*within their batch", InputError),
    ({"relation": lambda a, b: (a == b, a != b)}, "negative_samples.*relation", InputError),
    ({"loss": LogisticLoss(pd_fix="full")}, "negative_samples with pd_fix='full'.*LogisticLoss", UnsupportedError),
]


@each("options, message, kind", REFUSED)
def test_combinations_are_refused_when_they_are_made(
    options: dict[str, Any], message: str, kind: type[Exception], device: str
) -> None:
    with pytest.raises(kind, match=message):
        make(device, **{"negative_samples": 10, **options})


def test_training_refuses_at_once(device: str) -> None:
    with pytest.raises(InputError, match="negative_samples"):
        cc.OnlineLaplace(
            encoder(device),
            probe=data(4, device, 4)[0],
            n_data=40,
            backend_kwargs={"negative_samples": 10},
        )


@each("loss", [None, LogisticLoss(pd_fix="psd")])
def test_a_sample_of_one_class_is_refused(loss: Any, device: str) -> None:
    x, _ = data(400, device, 4)
    y = torch.zeros(400, dtype=torch.int64, device=device)
    y[-2:] = 1
    options: dict[str, Any] = {} if loss is None else {"loss": loss}
    words = "negative_samples: expected a sample with points of two of the 2 classes.*or negative_samples=None"
    with pytest.raises(InputError, match=words):
        fitted(device, [(x, y)], negative_samples=2, **options)


def test_parts_refuse_a_sample_of_one_class_and_its_remedy_fits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_many(monkeypatch, 300)
    monkeypatch.setattr(dataset, "NEGATIVE_SAMPLES", 5)
    x, _ = data(400, device, 4)
    y = torch.zeros(400, dtype=torch.int64, device=device)
    y[-2:] = 1
    halves = [[(x[:200], y[:200])], [(x[200:], y[200:])]]

    def in_parts(**options: Any) -> Any:
        la = make(device, margin=0.9, **options)
        first = State.merged([la.part_statistics(half, (k, 2)) for k, half in enumerate(halves)])
        second = [la.part_curvature(half, (k, 2), first) for k, half in enumerate(halves)]
        la.fit_parts(first, State.merged(second))
        return la

    with pytest.raises(InputError, match="or negative_samples=None: all negatives"):
        in_parts()
    whole = fitted(device, [(x, y)], margin=0.9, negative_samples=None)
    torch.testing.assert_close(in_parts(negative_samples=None).H, whole.H)


@each("loss", [None, LogisticLoss(pd_fix="psd")])
@each("weights", ["last_layer", "all"])
def test_all_pairs_count_where_a_sample_that_nobody_asked_for_misses_a_rare_class(
    loss: Any, weights: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_many(monkeypatch, 300)
    monkeypatch.setattr(dataset, "NEGATIVE_SAMPLES", 5)
    x, _ = data(400, device, 4)
    y = torch.zeros(400, dtype=torch.int64, device=device)
    y[-2:] = 1
    given = in_batches(x, y, 150)
    options: dict[str, Any] = {"margin": 0.9} if loss is None else {"loss": loss}
    la, exact = (fitted(device, given, weights=weights, **options, **more) for more in ({}, {"negative_samples": None}))
    assert torch.equal(la.H, exact.H)
    assert (la.n_data, float(la.loss)) == (400, float(exact.loss))
