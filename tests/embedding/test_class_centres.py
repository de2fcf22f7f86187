"""Class centres: the ratio of distances against a loop, sums of streams, and the factor of ``uncertainty``."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import refused
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.fit import class_centres
from contrastive_curvature.fit.class_centres import CAP, WEIGHT, CentreCollector, ClassCentres


def unit(v: Tensor) -> Tensor:
    return v / v.norm()


def ratio_by_hand(train: Tensor, labels: Tensor, outputs: Tensor) -> list[float]:
    centres = [unit(sum(unit(z) for z in train[labels == label])) for label in labels.unique()]
    found = []
    for z in outputs:
        first, second = sorted(float((unit(z) - c).norm()) for c in centres)[:2]
        found.append(first / second)
    return found


def typical_by_hand(train: Tensor, labels: Tensor) -> float:
    """Every input against the centres of all others."""
    found = []
    for i in range(len(train)):
        others = torch.arange(len(train)) != i
        if len(labels[others].unique()) < 2:
            found.append(1.0)
        else:
            found += ratio_by_hand(train[others], labels[others], train[i : i + 1])
    return sum(min(r, CAP) for r in found) / len(found)


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dim, n = draw(st.integers(2, 6)), draw(st.integers(2, 30))
    labels = torch.randint(-3, draw(st.integers(-1, 9)), (n,))
    labels[0], labels[1] = -5, 40  # two classes at least
    scale = draw(st.sampled_from([1e-6, 1.0, 1e6]))
    return scale * torch.randn(n, dim).double(), labels, scale * torch.randn(draw(st.integers(0, 9)), dim).double()


@given(case=labelled(), dtype=st.sampled_from([torch.float32, torch.float64]), entries=st.sampled_from([10, 2**22]))
def test_ratio_is_nearest_over_second_distance(case, dtype, entries) -> None:
    """In one block of outputs, or in several."""
    train, labels, outputs = case
    made = ClassCentres.of(train.to(dtype), labels)
    assert made.labels.tolist() == sorted(set(labels.tolist()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_centres, "_ENTRIES", entries)
        found = made.ratio(outputs.to(dtype))
    assert found.dtype == dtype
    # float32: of two distances that are sums of squares of differences of numbers of order one.
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    assert found.tolist() == pytest.approx(ratio_by_hand(train, labels, outputs), abs=tolerance)
    assert made.typical == pytest.approx(typical_by_hand(train, labels), abs=tolerance)
    assert torch.equal(made.factor(outputs.to(dtype)), (WEIGHT * (found.clamp(max=CAP) - made.typical)).exp())


def test_at_a_centre_between_two_and_on_the_other_side(device: str) -> None:
    made = ClassCentres.of(torch.eye(3, device=device), torch.arange(3, device=device))
    x = torch.tensor([[2.0, 0, 0], [1, 1, 0], [-1, -1, -1]], device=device, requires_grad=True)
    found = made.ratio(x)
    assert found.tolist() == pytest.approx([0, 1, 1], abs=1e-6)
    made.factor(x).sum().backward()
    assert bool(x.grad.isfinite().all())


def test_sums_of_zero_and_centres_in_one_place() -> None:
    opposite = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, 2]])
    made = ClassCentres.of(opposite, torch.tensor([0, 0, 1, 1]))
    # The first class has no direction: it is at a distance of one from everything.
    assert made.ratio(torch.tensor([[0.0, 1], [1, 0]])).tolist() == pytest.approx([0, 1 / math.sqrt(2)])
    same = ClassCentres.of(torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([0, 1]))
    assert same.ratio(torch.tensor([[1.0, 0], [0, 1]])).tolist() == [1, 1]


def test_one_class_is_typical_of_nothing_and_none_or_too_many_have_no_centres(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels, nothing, many = torch.randn(6, 3), torch.arange(6), CentreCollector(), CentreCollector()
    one = ClassCentres.of(z, torch.zeros(6, dtype=torch.int64))
    assert (one.typical, one.labels.tolist()) == (0, [0])
    assert nothing.centres() is None
    monkeypatch.setattr(class_centres, "MOST_NUMBERS", 15)
    for rows in (slice(0, 3), slice(3, 6)):
        many.add(z[rows], labels[rows])
    assert many.centres() is None
    few, others = ClassCentres.of(z[:3], labels[:3]), ClassCentres.of(z[3:], labels[3:])
    assert few.merged(others) is None


def test_many_alike_are_typical_at_the_cap() -> None:
    """In float32 the cap would be rounded up, and a state with it refused."""
    z = torch.ones(50, 4) + 1e-3 * torch.randn(50, 4)
    made = ClassCentres.of(z, torch.arange(50) % 2)
    assert made.typical <= CAP
    twice = made.merged(made)
    assert twice.typical <= CAP


def test_autocast_and_inference_mode_change_nothing() -> None:
    train, labels = torch.randn(400, 8), torch.arange(400) % 200
    made, x = ClassCentres.of(train, labels), torch.randn(50, 8)
    with torch.inference_mode():
        first = made.ratio(x).clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made.ratio(x), first)
    x.requires_grad_()
    made.factor(x).sum().backward()
    assert pickle.loads(pickle.dumps(made)).ratio(x.detach()).equal(first)


def test_outputs_of_another_dimension_are_refused() -> None:
    made = ClassCentres.of(torch.randn(4, 3), torch.arange(4))
    refused(lambda: made.ratio(torch.randn(2, 2)), "class_centres: expected D = 3", "D = 2")


@given(case=labelled(), cut=st.integers(1, 29))
def test_streams_and_merged_fits_have_the_centres_of_all(case: tuple[Tensor, Tensor, Tensor], cut: int) -> None:
    train, labels, _ = case
    whole, stream = ClassCentres.of(train, labels), CentreCollector()
    for rows in torch.arange(len(train)).split(cut):
        stream.add(train[rows], labels[rows])
    found = stream.centres()
    assert torch.equal(found.labels, whole.labels)
    assert torch.allclose(found.sums, whole.sums, rtol=1e-12, atol=1e-12)
    assert (found.n, found.typical) == (whole.n, pytest.approx(whole.typical, abs=1e-9))
    first = ClassCentres.of(train[:cut], labels[:cut])
    both = None if cut >= len(train) else first.merged(ClassCentres.of(train[cut:], labels[cut:]))
    if both is not None:
        assert torch.equal(both.labels, whole.labels)
        assert torch.allclose(both.sums, whole.sums, rtol=1e-12, atol=1e-12)
        assert (both.n, both.typical) == (whole.n, pytest.approx(whole.typical, abs=1e-9))


def test_what_is_typical_follows_from_the_inputs_alone() -> None:
    """Of more inputs than are kept: in another order, in batches, and merged of unequal parts."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(6000) % 7
    # Part by part less spread, so that a share too large or too small of one of them is noticed.
    noise = torch.randn(6000, 5, generator=generator) * torch.linspace(2, 0.1, 6000).unsqueeze(1)
    train = 3 * torch.randn(7, 5, generator=generator)[labels] + noise
    whole, mixed, stream = ClassCentres.of(train, labels), torch.randperm(6000, generator=generator), CentreCollector()
    for rows in mixed.split(700):
        stream.add(train[rows], labels[rows])
    first, second = ClassCentres.of(train[:5000], labels[:5000]), ClassCentres.of(train[5000:], labels[5000:])
    for found in (ClassCentres.of(train[mixed], labels[mixed]), stream.centres(), first.merged(second)):
        assert (found.n, found.typical) == (6000, pytest.approx(whole.typical, abs=1e-6))


@given(seed=st.integers(0, 2**16), typical=st.sampled_from([None, 0.5, 30.0]))
def test_uncertainty_is_the_angle_times_both_factors(seed: int, typical: float | None) -> None:
    torch.manual_seed(seed)
    mean, variance = torch.randn(5, 3).double(), torch.rand(5, 3).double()
    made = ClassCentres.of(torch.randn(12, 3).double(), torch.arange(12) % 4)
    embedding = cc.EmbeddingDistribution(mean, variance=variance)
    plain = embedding.tangential_variance.sqrt()
    found = embedding.relative_to(typical, made).uncertainty
    norm = mean.norm(dim=1)
    factor = made.factor(mean)
    wanted = plain * (1 if typical is None else (typical / norm).sqrt()) * factor
    assert torch.allclose(found, wanted.arctan(), rtol=1e-12)
    assert torch.allclose(embedding.relative_to(None).uncertainty, plain.arctan(), rtol=1e-12)
    assert factor.log().abs().max() <= WEIGHT * CAP
