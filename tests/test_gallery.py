"""Retrieval uncertainty: novelty gates, distance ranks."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st

from contrastive_curvature import InputError, InputTypeError, RetrievalUncertainty, metrics
from contrastive_curvature.gallery import neighbor_distance


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
    monkeypatch.setattr("contrastive_curvature.gallery._ENTRIES", entries)
    assert torch.equal(neighbor_distance(queries, gallery, 3), whole)


@pytest.mark.parametrize("device", DEVICES)
@given(n=st.integers(2, 30), share=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_known_by_distance_unknown_last_by_uncertainty(device, n, share, seed):
    gallery, queries = draw(12, 4, seed).to(device), draw(n, 4, seed + 1).to(device)
    calibration = draw(40, 1, seed + 2).flatten().abs().to(device) + 0.1
    uncertainty = draw(n, 1, seed + 3).flatten().abs().to(device)
    score = RetrievalUncertainty(gallery, calibration, k=3, share=share)
    out = score(queries, uncertainty)
    assert out.device == queries.device
    unknown = uncertainty > score.threshold
    assert torch.equal(out[~unknown], neighbor_distance(queries, gallery, 3)[~unknown])
    assert bool((out[unknown] > 3).all())
    assert bool((out[~unknown] <= 2).all())
    assert torch.equal(out[unknown].argsort(), uncertainty[unknown].argsort())
    # no more than the share of the calibration set itself lies beyond its threshold
    assert float((calibration > score.threshold).double().mean()) <= share + 1 / len(calibration)


@given(factor=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_units_of_the_uncertainty_do_not_matter(factor, seed):
    gallery, queries = draw(20, 3, seed), draw(9, 3, seed + 1)
    calibration, uncertainty = draw(50, 1, seed + 2).flatten().abs(), draw(9, 1, seed + 3).flatten().abs()
    one = RetrievalUncertainty(gallery, calibration)(queries, uncertainty)
    other = RetrievalUncertainty(gallery, factor * calibration)(queries, factor * uncertainty)
    assert torch.allclose(one, other, rtol=1e-9, atol=0)


def test_it_does_both_jobs_where_each_part_does_one():
    """Two classes on a circle; between them ambiguous inputs, and unknown ones that embed exactly on a class."""
    generator = torch.Generator().manual_seed(0)
    known = torch.rand(400, generator=generator).double() * torch.pi / 2
    labels = (known > torch.pi / 4).long()
    wrong = ((known - torch.pi / 4).abs() < 0.2) & (torch.rand(400, generator=generator) < 0.5)
    gallery_angles = torch.cat([torch.zeros(20), torch.full((20,), torch.pi / 2)]).double()
    circle = lambda a: torch.stack([a.cos(), a.sin()], 1)  # noqa: E731
    known_u, unknown_u = torch.rand(400, generator=generator).double(), torch.full((100,), 2.0).double()
    score = RetrievalUncertainty(circle(gallery_angles), known_u)
    inside, outside = score(circle(known), known_u), score(circle(torch.zeros(100).double()), unknown_u)
    right = (~wrong).double()
    assert len(labels.unique()) == 2
    assert metrics.auroc(inside, outside) == 1.0
    assert metrics.auroc(neighbor_distance(circle(known), circle(gallery_angles)), torch.zeros(100)) == 0.0
    assert metrics.ausc(inside, right) > metrics.ausc(known_u, right) + 0.05


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"share": 0.0}, InputError, "share"),
        ({"share": 1.0}, InputError, "share"),
        ({"k": 0}, InputError, "k"),
        ({"k": 6}, InputError, "5 gallery points"),
        ({"calibration": torch.zeros(7)}, InputError, "positive quantile"),
        ({"calibration": torch.full((7,), float("nan"))}, InputError, "calibration"),
        ({"calibration": [1.0]}, InputTypeError, "calibration"),
        ({"gallery": torch.ones(5)}, InputError, "gallery"),
    ],
)
def test_refused(change, error, word):
    options = {"gallery": torch.eye(5), "calibration": torch.ones(7), "k": 2} | change
    with pytest.raises(error, match=word):
        RetrievalUncertainty(**options)


def test_lengths_must_agree():
    score = RetrievalUncertainty(torch.eye(5), torch.ones(7), k=2)
    with pytest.raises(InputError, match="uncertainty"):
        score(torch.eye(5), torch.ones(4))
