"""Votes of sampled networks, calibration bins, ECE and Brier score."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import refuses
from torchmetrics.functional.classification import binary_calibration_error

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, InputTypeError


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_shares(votes: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(votes, classes).double().mean(0)


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
    assert metrics.retrieval_ece(samples, labels) == metrics.retrieval_ece(list(samples), labels)
    votes = metrics.retrieval_votes(samples, labels)
    assert metrics.retrieval_ece(samples, labels, n_bins=5) == pytest.approx(
        metrics.calibration_bins(votes, labels, 5).expected_calibration_error
    )
    assert metrics.retrieval_brier(iter(samples), labels) == metrics.brier_score(votes, labels)


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


POINTS = torch.tensor([0, 0, 1])
SAMPLES = torch.ones(2, 3, 2)


test_refusals = refuses(
    InputError,
    (lambda: metrics.retrieval_votes(SAMPLES[0], POINTS), r"samples: expected shape \(S, N, D\)"),
    (lambda: metrics.retrieval_votes([], POINTS), "at least one sample"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS[:2]), "N = 2 points"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS.float()), "labels: expected an integer", InputTypeError),
    (lambda: metrics.retrieval_votes(SAMPLES * torch.nan, POINTS), "samples: expected finite"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES), "both or neither"),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS, SAMPLES[:1], POINTS), "shorter", ValueError),
    (lambda: metrics.retrieval_votes(SAMPLES, POINTS, metric="l1"), "metric: expected one of 'cosine'"),
    (lambda: metrics.retrieval_ece(SAMPLES, POINTS, n_bins=0), "n_bins: expected a positive"),
    (lambda: metrics.calibration_bins(torch.ones(2, 3), POINTS), "votes: expected an integer", InputTypeError),
    (lambda: metrics.brier_score(torch.ones(2, 0).long(), POINTS[:0]), "not empty"),
)
