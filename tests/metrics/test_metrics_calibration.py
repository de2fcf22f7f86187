"""Votes of sampled networks, calibration bins, ECE and Brier score."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from torchmetrics.functional.classification import binary_calibration_error

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, InputTypeError


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_shares(votes: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(votes, classes).double().mean(0)


@pytest.mark.parametrize("device", DEVICES)
def test_votes_by_hand(device: str) -> None:
    # in the first sample 0 pairs with 1 and 2 with 3, in the second 0 with 2 and 1 with 3
    east, north, near = [1.0, 0.0], [0.0, 1.0], 0.1
    first = torch.tensor([east, [1.0, near], north, [near, 1.0]], device=device)
    samples = torch.stack([first, first[[0, 2, 1, 3]]])
    labels = torch.tensor([10, 10, 20, 30], device=device)
    votes = metrics.retrieval_votes(samples, labels)
    assert votes.tolist() == [[10, 10, 30, 20], [20, 30, 10, 10]]
    assert votes.device == labels.device
    held = torch.tensor([5, 6], device=device)
    gallery = metrics.retrieval_votes(samples, labels, torch.tensor([east, north], device=device), held)
    assert gallery.tolist() == [[5, 5, 6, 6], [5, 6, 5, 6]]


def test_a_stack_an_iterator_and_single_samples_agree() -> None:
    samples, gallery = torch.randn(4, 15, 3, generator=generator(0)), torch.randn(4, 9, 3, generator=generator(1))
    labels, held = torch.randint(3, (15,), generator=generator(2)), torch.randint(3, (9,), generator=generator(3))
    stack = metrics.retrieval_votes(samples, labels, gallery, held)
    assert torch.equal(stack, metrics.retrieval_votes((s for s in samples), labels, iter(gallery), held))
    for s in range(4):
        found = metrics.nearest_neighbors(samples[s], gallery[s], k=1)[:, 0]
        assert torch.equal(stack[s], held[found])
    assert metrics.retrieval_ece(samples, labels) == metrics.retrieval_ece(list(samples), labels)
    votes = metrics.retrieval_votes(samples, labels)
    assert metrics.retrieval_ece(samples, labels, n_bins=5) == pytest.approx(
        metrics.calibration_bins(votes, labels, 5).expected_calibration_error
    )
    assert metrics.retrieval_brier(iter(samples), labels) == metrics.brier_score(votes, labels)


def test_one_sample_is_held_at_a_time() -> None:
    drawn: list[weakref.ref[torch.Tensor]] = []

    def draws() -> Iterator[torch.Tensor]:
        for s in range(5):
            # the caller may still hold the one that it has just finished with
            assert sum(ref() is not None for ref in drawn) <= 1
            sample = torch.randn(6, 2, generator=generator(s))
            drawn.append(weakref.ref(sample))
            yield sample
            del sample

    assert metrics.retrieval_votes(draws(), torch.tensor([0, 0, 0, 1, 1, 1])).shape == (5, 6)


def test_calibration_by_hand() -> None:
    # confidences 1, 0.75, 0.5 (a tie, which the smaller label wins), right, wrong, right
    votes = torch.tensor([[3, 3, 4], [3, 3, 4], [3, 3, 9], [3, 1, 9]])
    labels = torch.tensor([3, 1, 4])
    bins = metrics.calibration_bins(votes, labels, 4)
    assert bins.count.tolist() == [0, 1, 1, 1]
    nan = math.nan
    torch.testing.assert_close(bins.confidence, torch.tensor([nan, 0.5, 0.75, 1]).double(), equal_nan=True)
    torch.testing.assert_close(bins.accuracy, torch.tensor([nan, 1.0, 0.0, 1.0]).double(), equal_nan=True)
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert bins.expected_calibration_error == pytest.approx((0.5 + 0.75 + 0) / 3)
    # Brier: 0; (3/4)^2 + (3/4)^2; (1/2)^2 + (1/2)^2
    assert metrics.brier_score(votes, labels) == pytest.approx((0 + 9 / 8 + 1 / 2) / 3)


def test_full_agreement_counts() -> None:
    # the authors' released code drops it: its last bin excludes 1
    votes = torch.zeros(10, 4, dtype=torch.long)
    bins = metrics.calibration_bins(votes, torch.tensor([0, 0, 0, 1]))
    assert bins.count.tolist() == [0] * 9 + [4]
    assert bins.expected_calibration_error == pytest.approx(0.25)


@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 20), st.integers(1, 5), st.integers(1, 12))
def test_bins_and_brier_agree_with_a_table_of_shares(seed: int, s: int, n: int, classes: int, n_bins: int) -> None:
    votes = torch.randint(classes, (s, n), generator=generator(seed))
    labels = torch.randint(classes, (n,), generator=generator(seed + 1))
    shares = naive_shares(votes, classes)
    target = torch.nn.functional.one_hot(labels, classes)
    assert metrics.brier_score(votes, labels) == pytest.approx(
        (shares - target).square().sum(1).mean().item(), abs=1e-12
    )
    bins = metrics.calibration_bins(votes, labels, n_bins)
    assert int(bins.count.sum()) == n
    held = bins.count > 0
    assert bool((bins.confidence[held] > bins.edges[:-1][held] - 1e-12).all())
    assert bool((bins.confidence[held] <= bins.edges[1:][held] + 1e-12).all())
    prediction = shares.argmax(1)  # the first of equals
    right = (prediction == labels).double().mean().item()
    assert (bins.count * bins.accuracy.nan_to_num()).sum().item() / n == pytest.approx(right)
    assert 0 <= bins.expected_calibration_error <= 1


@given(st.integers(0, 10**6), st.integers(1, 10))
def test_ece_agrees_with_torchmetrics(seed: int, n_bins: int) -> None:
    # torchmetrics bins [low, high), we (low, high]: confidences on an edge are kept out
    votes = torch.randint(2, (16, 60), generator=generator(seed))
    labels = torch.randint(2, (60,), generator=generator(seed + 1))
    shares = naive_shares(votes, 2)
    inside = (shares.max(1).values * n_bins % 1 > 1e-9).nonzero().flatten()
    if len(inside) == 0:
        return
    votes, labels, shares = votes[:, inside], labels[inside], shares[inside]
    right = (shares.argmax(1) == labels).long()
    theirs = binary_calibration_error(shares.max(1).values.float(), right, n_bins=n_bins, norm="l1")
    # torchmetrics computes in float32
    ours = metrics.calibration_bins(votes, labels, n_bins).expected_calibration_error
    assert ours == pytest.approx(theirs.item(), abs=1e-5)


@given(st.integers(0, 10**6))
def test_order_of_samples_and_points_does_not_matter(seed: int) -> None:
    votes = torch.randint(4, (7, 12), generator=generator(seed))
    labels = torch.randint(4, (12,), generator=generator(seed + 1))
    rows, columns = torch.randperm(7, generator=generator(seed)), torch.randperm(12, generator=generator(seed))
    mixed, mixed_labels = votes[rows][:, columns], labels[columns]
    assert metrics.brier_score(mixed, mixed_labels) == pytest.approx(metrics.brier_score(votes, labels), abs=1e-12)
    ece = metrics.calibration_bins(votes, labels).expected_calibration_error
    assert metrics.calibration_bins(mixed, mixed_labels).expected_calibration_error == pytest.approx(ece, abs=1e-12)


def test_honest_votes_are_calibrated() -> None:
    # Each point has its own chance p of class 1, with which both its label and its votes are drawn. The binned gap of
    # 1,000 points or more has a deviation below 0.016; the mode of 400 votes is biased by less than 0.03 near p = 0.5.
    p = torch.rand(20_000, generator=generator(8))
    labels = (torch.rand(20_000, generator=generator(9)) < p).long()
    votes = (torch.rand(400, 20_000, generator=generator(10)) < p).long()
    assert metrics.calibration_bins(votes, labels).expected_calibration_error < 0.05
    # a proper score: E[2 p (1 - p)] = 1/3 at best
    assert metrics.brier_score(votes, labels) == pytest.approx(1 / 3, abs=0.01)
    over = (votes.double().mean(0) > 0.5).long().expand(400, -1)
    assert metrics.brier_score(over, labels) > 0.45


POINTS = torch.tensor([0, 0, 1])
SAMPLES = torch.ones(2, 3, 2)


@each(
    "call, error_type, message",
    [
        (lambda: metrics.retrieval_votes(SAMPLES[0], POINTS), InputError, r"samples: expected shape \(S, N, D\)"),
        (lambda: metrics.retrieval_votes(3, POINTS), InputTypeError, "samples: expected shape"),
        (lambda: metrics.retrieval_votes([], POINTS), InputError, "at least one sample"),
        (lambda: metrics.retrieval_votes(SAMPLES, POINTS[:2]), InputError, "N = 2 points"),
        (lambda: metrics.retrieval_votes(SAMPLES, POINTS.float()), InputTypeError, "labels: expected an integer"),
        (lambda: metrics.retrieval_votes(SAMPLES * torch.nan, POINTS), InputError, "samples: expected finite"),
        (lambda: metrics.retrieval_votes([1.0], POINTS), InputTypeError, "samples: expected a torch.Tensor"),
        (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES), InputError, "both or neither"),
        (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES[:1], POINTS), ValueError, "shorter"),
        (lambda: metrics.retrieval_votes(SAMPLES[:1], POINTS, SAMPLES, POINTS), ValueError, "longer"),
        (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES, POINTS[:2]), InputError, r"gallery_labels.*\(3,\)"),
        (lambda: metrics.retrieval_ece(SAMPLES, POINTS, n_bins=0), InputError, "n_bins: expected a positive"),
        (lambda: metrics.calibration_bins(torch.ones(2, 3), POINTS), InputTypeError, "votes: expected an integer"),
        (lambda: metrics.calibration_bins(POINTS, POINTS), InputError, r"votes: expected shape \(S, N\)"),
        (
            lambda: metrics.brier_score(torch.ones(2, 3).long(), POINTS[:2]),
            InputError,
            r"labels: expected shape \(3,\)",
        ),
        (lambda: metrics.brier_score(torch.ones(2, 0).long(), POINTS[:0]), InputError, "not empty"),
    ],
)
def test_refusals(call, error_type, message) -> None:
    with pytest.raises(error_type, match=message):
        call()
