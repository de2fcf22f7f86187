"""Retrieval uncertainty: novelty gates, distance ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import each

from contrastive_curvature import InputError, InputTypeError, RetrievalUncertainty
from contrastive_curvature.embedding.gallery import neighbor_distance


def draw(n: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(n=st.integers(1, 12), m=st.integers(1, 15), dim=st.integers(2, 6), seed=st.integers(0, 99), data=st.data())
def test_distance_is_the_mean_of_the_smallest_cosine_distances(n, m, dim, seed, data):
    k = data.draw(st.integers(1, m))
    queries, gallery = draw(n, dim, seed), draw(m, dim, seed + 100)
    cosine = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), gallery, dim=2)
    wanted = (1 - cosine).sort(1).values[:, :k].mean(1)
    assert torch.allclose(neighbor_distance(queries, gallery, k), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 50, 100])
def test_blocks_of_queries_are_put_together_in_their_order(entries, monkeypatch):
    queries, gallery = draw(23, 4, 0), draw(15, 4, 1)
    whole = neighbor_distance(queries, gallery, 3)
    monkeypatch.setattr("contrastive_curvature.metrics.neighbors._ENTRIES", entries)
    assert torch.equal(neighbor_distance(queries, gallery, 3), whole)


@given(n=st.integers(2, 30), share=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_known_by_distance_unknown_last_by_novelty(device, n, share, seed):
    gallery, queries = draw(12, 4, seed).to(device), draw(n, 4, seed + 1).to(device)
    calibration = draw(40, 1, seed + 2).flatten().to(device)
    novelty = draw(n, 1, seed + 3).flatten().to(device)
    score = RetrievalUncertainty(gallery, calibration, k=3, share=share)
    out = score(queries, novelty)
    assert out.device == queries.device
    unknown = novelty > score.threshold
    near = (neighbor_distance(queries, gallery, 1) + neighbor_distance(queries, gallery, 3)) / 2
    assert torch.allclose(out[~unknown], near[~unknown], rtol=0, atol=1e-12)
    assert bool((out[unknown] > 2).all())
    assert bool((out[~unknown] <= 2).all())
    assert torch.equal(out[unknown].argsort(), novelty[unknown].argsort())


def test_no_more_than_the_share_of_new_known_inputs_is_flagged():
    """Exactly, on average over all ways to choose the new one of n + 1 exchangeable novelties."""
    for n in (4, 9, 20, 57):
        for share in (0.05, 0.2, 0.33, 0.7):
            novelty = torch.randperm(n + 1, generator=torch.Generator().manual_seed(n)).double()
            if n < 1 / share - 1 - 1e-9:
                continue
            flagged = 0
            for i in range(n + 1):
                others = novelty[torch.arange(n + 1) != i]
                flagged += float(novelty[i]) > RetrievalUncertainty(torch.eye(3), others, k=1, share=share).threshold
            assert share - 1 / (n + 1) < flagged / (n + 1) <= share + 1e-12


@given(m=st.integers(3, 15), seed=st.integers(0, 99), data=st.data())
def test_an_input_is_no_neighbour_of_itself(m, seed, data):
    k, gallery = data.draw(st.integers(1, m - 1)), draw(m, 4, seed)
    # With a double of one point, which may come before the point itself.
    gallery[1] = gallery[0]
    score = RetrievalUncertainty(gallery, torch.arange(5.0), k=k, share=0.5)
    rows = torch.arange(m)
    found = score(gallery, torch.zeros(m), itself=rows)
    for i in range(m):
        others = RetrievalUncertainty(gallery[rows != i], torch.arange(5.0), k=k, share=0.5)
        assert torch.allclose(found[i], others(gallery[i : i + 1], torch.zeros(1)), rtol=0, atol=1e-12)
    none = score(gallery, torch.zeros(m), itself=torch.full((m,), -1))
    assert torch.equal(none, score(gallery, torch.zeros(m)))


def test_equal_calibration_novelties_still_separate(device):
    score = RetrievalUncertainty(torch.eye(5, device=device), torch.ones(7, device=device), k=2, share=0.2)
    out = score(torch.eye(5, device=device), torch.tensor([0.0, 1.0, 1.5, 2.0, 9.0], device=device))
    assert torch.allclose(out.cpu(), torch.tensor([0.25, 0.25, 2.5, 3.0, 10.0]))


@each(
    "change, error, word",
    [
        ({"share": 0.0}, InputError, "share"),
        ({"share": 1.0}, InputError, "share"),
        ({"k": 0}, InputError, "k"),
        ({"k": 6}, InputError, "5 gallery points"),
        ({"calibration": torch.full((7,), float("nan"))}, InputError, "calibration"),
        ({"share": 0.1}, InputError, "at least 9 novelties"),
        ({"calibration": [1.0]}, InputTypeError, "calibration"),
        ({"gallery": torch.ones(5)}, InputError, "gallery"),
        ({"gallery": torch.zeros(5, 5)}, InputError, "gallery"),
        ({"labels": torch.zeros(5)}, InputTypeError, "labels.*an integer tensor"),
        ({"labels": [0] * 5}, InputTypeError, "labels.*an integer tensor"),
        ({"labels": torch.arange(4)}, InputError, r"labels.*shape \(5,\)"),
    ],
)
def test_refused(change, error, word):
    options = {"gallery": torch.eye(5), "calibration": torch.ones(7), "k": 2, "share": 0.2} | change
    with pytest.raises(error, match=word):
        RetrievalUncertainty(**options)


@each(
    "change, word",
    [
        ({"embeddings": torch.ones(5, 4)}, "embeddings"),
        ({"embeddings": torch.full((5, 5), torch.nan)}, "embeddings"),
        ({"novelty": torch.ones(4)}, "novelty"),
        ({"novelty": torch.full((5,), torch.nan)}, "novelty"),
        ({"itself": torch.zeros(5)}, "itself"),
        ({"itself": torch.arange(4)}, "itself"),
        ({"itself": torch.arange(5) - 2}, "itself"),
        ({"itself": torch.arange(5) + 1}, "itself"),
    ],
)
def test_queries_refused(change, word):
    score = RetrievalUncertainty(torch.eye(5), torch.ones(7), k=2, share=0.2)
    with pytest.raises(InputError, match=word):
        score(**({"embeddings": torch.eye(5), "novelty": torch.ones(5)} | change))
    with pytest.raises(InputError, match="at most 4"):
        RetrievalUncertainty(torch.eye(5), torch.ones(7), k=5, share=0.2)(torch.eye(5), torch.ones(5), torch.arange(5))
