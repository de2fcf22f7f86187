"""Neighbours and votes by Euclidean distance."""

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError

BACKENDS = ["sklearn"] + (["faiss"] if importlib.util.find_spec("faiss") else [])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distances(queries: torch.Tensor, gallery: torch.Tensor | None) -> torch.Tensor:
    held = queries if gallery is None else gallery
    found = (queries.double()[:, None] - held.double()).square().sum(2).sqrt()
    return found.fill_diagonal_(torch.inf) if gallery is None else found


@given(
    st.sampled_from(BACKENDS),
    st.integers(0, 10**6),
    st.sampled_from([torch.float16, torch.float32, torch.float64]),
    st.booleans(),
    st.integers(1, 6),
    st.sampled_from([0.0, 3.0]),
)
def test_neighbors_are_those_of_all_distances(device, backend, seed, dtype, leave_one_out, dim, shift) -> None:
    queries = (torch.randn(12, dim, generator=generator(seed)) + shift).to(device, dtype)
    gallery = None if leave_one_out else (torch.randn(9, dim, generator=generator(seed + 1)) + shift).to(device, dtype)
    found = metrics.nearest_neighbors(queries, gallery, k=4, backend=backend, metric="euclidean")
    every = distances(queries.cpu(), None if gallery is None else gallery.cpu())
    wanted = every.sort(dim=1).values[:, :4]
    # neighbours may change places where their distances differ by less than float32 tells: squares of norms up to 8
    torch.testing.assert_close(every.gather(1, found.cpu()).square(), wanted.square(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_decide_and_zero_is_a_point(backend: str) -> None:
    line = torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [7.0, 0.0]])
    found = metrics.nearest_neighbors(line, k=1, backend=backend, metric="euclidean")
    assert found.flatten().tolist() == [1, 0, 1, 2]
    with pytest.raises(InputError, match="zero rows"):
        metrics.nearest_neighbors(line, k=1, backend=backend)


def test_votes_and_calibration_follow_the_metric() -> None:
    line = torch.tensor([[1.0, 0.1], [1.2, 0.0], [5.0, 0.4], [6.0, 0.1]])
    labels = torch.tensor([0, 0, 1, 1])
    samples = line.repeat(3, 1, 1)
    by_distance = metrics.retrieval_votes(samples, labels, metric="euclidean")
    assert by_distance.tolist() == [[0, 0, 1, 1]] * 3
    by_angle = metrics.retrieval_votes(samples, labels)
    assert by_angle.tolist() != by_distance.tolist()
    assert metrics.retrieval_ece(samples, labels, metric="euclidean") == 0
    assert metrics.retrieval_brier(samples, labels, metric="euclidean") == 0
    assert metrics.retrieval_brier(samples, labels) > 0
