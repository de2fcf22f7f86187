"""Class centres of a posterior: from every fit, in its state, measured apart from a fit."""

import copy
import io
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each
from test_laplace import batches, body, data, fitted, for_every_combination, make
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.codec import sealed
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.laplace.state_dict import SEALED


def truth() -> ClassCentres:
    x, y = data()
    made = ClassCentres.of(body()(x), y)
    assert made is not None
    return made


def same(found: ClassCentres | None, wanted: ClassCentres) -> bool:
    assert found is not None
    close = torch.allclose(found.sums, wanted.sums, rtol=1e-9, atol=1e-12) and torch.equal(found.labels, wanted.labels)
    return close and found.n == wanted.n and found.typical == pytest.approx(wanted.typical, abs=1e-9)


@for_every_combination
def test_every_fit_takes_the_centres_of_its_data(weights: str, structure: str) -> None:
    la = fitted(body(cc.L2Norm()), weights, structure, *data())
    assert same(la.class_centres, truth())
    x, _ = data()
    angle = la(x).tangential_variance.sqrt() * (la.typical_norm / la(x).raw_mean.norm(dim=1)).sqrt()
    assert torch.allclose(la(x).uncertainty, (angle * truth().factor(la(x).raw_mean)).arctan(), rtol=1e-9)
    la.class_centres = None
    assert torch.allclose(la(x).uncertainty, angle.arctan(), rtol=1e-9)


def test_targets_that_are_no_class_labels_have_no_centres() -> None:
    x, _ = data()

    def near(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        distance = torch.cdist(a, b)
        return distance < 1, distance > 2

    places = 3 * torch.randn(len(x), 2, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    for pairs in ("dataset", "batch"):
        options = {"relation": near, "pairs": pairs, "pd_fix": "positive"}
        la = Laplace(body(), "contrastive", "last_layer", "diag", backend_kwargs=options)
        la.fit(batches(x, places, size=20))
        assert la.class_centres is None
        with pytest.raises(cc.InputError, match="labels"):
            la.measure_classes(batches(x, torch.randn(len(x), 2)))
        la.measure_classes(batches(*data()))
        assert same(la.class_centres, truth())


def test_a_second_fit_adds_its_classes() -> None:
    x, y = data()
    la = fitted(body(), "last_layer", "diag", x, y)
    la.fit(batches(x[:8], y[:8] + 100), override=False)
    wanted = ClassCentres.of(body()(torch.cat([x, x[:8]])), torch.cat([y, y[:8] + 100]))
    assert wanted is not None
    assert same(la.class_centres, wanted)
    la.class_centres = None
    la.fit(batches(x, y), override=False)
    assert la.class_centres is None
    la.fit(batches(x, y))
    assert same(la.class_centres, truth())


def test_fits_of_one_class_each_have_the_centres_of_both() -> None:
    x, _ = data()
    half = len(x) // 2
    y = torch.arange(len(x)) // half
    la = Laplace(body(), "contrastive", "last_layer", "diag", backend_kwargs={"pairs": "batch", "pd_fix": "psd"})
    la.fit([(x[:half], y[:half])])
    assert la.class_centres is None
    la.fit([(x[half:], y[half:])], override=False)
    wanted = ClassCentres.of(body()(x), y)
    assert wanted is not None
    assert same(la.class_centres, wanted)


def test_a_loaded_posterior_says_that_it_lost_what_is_typical() -> None:
    x, y = data()
    la, other = fitted(body(), "last_layer", "diag", x, y), make(body(), "last_layer", "diag")
    other.load_state_dict(la.state_dict())
    with pytest.warns(UserWarning, match="was loaded.*measure_classes"):
        other.fit(batches(x, y + 100), override=False)


def test_they_are_saved_and_loaded() -> None:
    x, y = data()
    extreme = torch.tensor([-(2**63), -1, 0, 2**63 - 1])[y]
    la, other = fitted(body(), "last_layer", "diag", x, extreme), make(body(), "last_layer", "diag")
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert la.class_centres is not None
    assert same(other.class_centres, la.class_centres)
    assert torch.equal(other(x).uncertainty, la(x).uncertainty)
    la.class_centres = None
    other.load_state_dict(la.state_dict())
    assert other.class_centres is None


@each("key, value, message", [("labels", torch.tensor([0.0, 1.0, 2.0]), "int64"), ("n", 0, "a number of points")])
def test_a_malformed_state_is_refused_and_nothing_changes(key: str, value: Any, message: str) -> None:
    la = fitted(body(), "last_layer", "diag", *data())
    state = copy.deepcopy(la.state_dict())
    state["class_centres"][key] = value
    with pytest.raises(cc.InputError, match=rf"class_centres.*{message}"):
        la.load_state_dict(sealed(state, SEALED))
    assert same(la.class_centres, truth())


def test_measured_apart_from_a_fit_and_refused_with_everything_as_it_was() -> None:
    x, y = data()
    la = fitted(body(), "last_layer", "diag", x, y)
    la.class_centres = None
    before = la(x).uncertainty
    la.measure_classes(batches(x, y), progress_bar=False)
    assert same(la.class_centres, truth())
    assert not torch.allclose(la(x).uncertainty, before)
    for bad in ([], batches(x, torch.zeros_like(y)), batches(x, y.float() + 0.5)):
        with pytest.raises(cc.InputError):
            la.measure_classes(bad)
        assert same(la.class_centres, truth())
    with pytest.raises(cc.NotFittedError):
        Laplace(body(), "contrastive", "last_layer", "diag").measure_classes(batches(x, y))


def test_online_posteriors_have_none_until_they_are_measured() -> None:
    x, y = data()
    online = cc.OnlineLaplace(body(), probe=x, n_data=len(x))
    online(x, y)
    la = online.laplace()
    assert la.class_centres is None
    la.measure_classes(batches(x, y))
    assert same(la.class_centres, truth())
