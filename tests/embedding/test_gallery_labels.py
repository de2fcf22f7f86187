"""Retrieval uncertainty with the labels of the gallery, against a loop over single points."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from contrastive_curvature import RetrievalUncertainty
from contrastive_curvature.embedding.gallery import _nearest_other

KNOWN = torch.arange(5.0)
"""Novelties of which none is above the threshold of a share of 0.2, nor is 0."""


def draw(n: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw_labels(m: int, classes: int, seed: int) -> torch.Tensor:
    """Of any numbers, not 0 to C - 1."""
    return 7 * torch.randint(classes, (m,), generator=torch.Generator().manual_seed(seed)) - 3


def by_loop(query: list[float], gallery: list[list[float]], labels: list[int], k: int) -> float:
    """The score of one query, in plain Python."""

    def unit(x: list[float]) -> list[float]:
        return [v / math.hypot(*x) for v in x]

    def chord(x: list[float]) -> float:
        return math.dist(unit(query), unit(x))

    near = sorted(range(len(gallery)), key=lambda i: chord(gallery[i]))
    match, chords = labels[near[0]], [chord(gallery[i]) for i in near]
    others = [c for c, i in zip(chords, near, strict=True) if labels[i] != match]
    agree = sum(labels[i] == match for i in near[:k]) / min(k, labels.count(match))
    s = math.log(chords[0] + sum(chords[:k]) / k) + 2 * (chords[0] / others[0] if others else 0.0) - 4 * agree
    return 2 / (1 + math.exp(-s))


def test_close_points_are_told_apart() -> None:
    """In float32, as by the loop in float64."""
    gallery = torch.tensor([1.0, 0.0, 0.0]) + 0.01 * draw(1000, 3, 0).float()
    queries, labels = torch.tensor([1.0, 0.0, 0.0]) + 0.01 * draw(60, 3, 1).float(), torch.arange(1000) % 5
    found = RetrievalUncertainty(gallery, KNOWN, k=3, share=0.2, labels=labels)(queries, torch.zeros(60))
    wanted = [by_loop(query, gallery.tolist(), labels.tolist(), 3) for query in queries.tolist()]
    # Float32 rounds unit vectors by 6e-8, chords here are some 1e-4.
    assert found.tolist() == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@given(m=st.integers(1, 12), classes=st.integers(1, 4), dim=st.integers(2, 5), seed=st.integers(0, 99), data=st.data())
def test_score_is_that_of_a_loop_over_points(device, dtype, tolerance, m, classes, dim, seed, data):
    n, k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, m))
    queries, gallery = draw(n, dim, seed), draw(m, dim, seed + 100)
    cosine = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), gallery, dim=2).sort(1).values
    # Nearly equal distances may come in any order in float32.
    assume(m == 1 or bool((cosine.diff(dim=1) > 1e-5).all()))
    labels = draw_labels(m, classes, seed)
    score = RetrievalUncertainty(gallery.to(device, dtype), KNOWN, k=k, share=0.2, labels=labels)
    found = score(queries.to(device, dtype), torch.zeros(n))
    wanted = [by_loop(query, gallery.tolist(), labels.tolist(), k) for query in queries.tolist()]
    assert found.dtype == dtype
    assert found.device.type == device.split(":")[0]
    torch.testing.assert_close(found.cpu(), torch.tensor(wanted, dtype=dtype), rtol=0, atol=tolerance)


@given(m=st.integers(2, 12), classes=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
def test_an_input_counts_neither_as_neighbour_nor_for_its_class(m, classes, seed, data):
    k, gallery, labels = data.draw(st.integers(1, m - 1)), draw(m, 3, seed), draw_labels(m, classes, seed)
    rows = torch.arange(m)
    # Some queries are not in the gallery, though they equal a point of it.
    itself = torch.where(draw(m, 1, seed + 1).flatten() > 1, -1, rows)
    score = RetrievalUncertainty(gallery, KNOWN, k=k, share=0.2, labels=labels)
    found = score(gallery, torch.zeros(m), itself)
    for i, row in enumerate(itself.tolist()):
        kept = rows != row
        others = RetrievalUncertainty(gallery[kept], KNOWN, k=k, share=0.2, labels=labels[kept])
        torch.testing.assert_close(found[i], others(gallery[i : i + 1], torch.zeros(1))[0], rtol=1e-9, atol=1e-12)


@given(m=st.integers(1, 12), classes=st.integers(1, 3), doubles=st.integers(0, 12), seed=st.integers(0, 99))
def test_known_inputs_stay_below_two_and_unknown_ones_above(m, classes, doubles, seed):
    gallery, labels = draw(m, 2, seed).float(), draw_labels(m, classes, seed)
    # One direction, which rounds to several unit vectors.
    gallery[:doubles] = gallery[0] * torch.linspace(1, 9, m).unsqueeze(1)[:doubles]
    queries = torch.cat([gallery, -gallery, draw(4, 2, seed + 1).float()])
    novelty = draw(len(queries), 1, seed + 2).flatten().mul(4).abs()
    score = RetrievalUncertainty(gallery, KNOWN, k=m, share=0.2, labels=labels)
    found = score(queries, novelty)
    unknown = novelty > score.threshold
    assert bool(found.isfinite().all())
    assert bool((found[~unknown] > 0).all() and (found[~unknown] < 2).all())
    plain = RetrievalUncertainty(gallery, KNOWN, k=m, share=0.2)(queries, novelty)
    assert torch.equal(found[unknown], plain[unknown])


def test_duplicates_of_one_class_are_certain_and_those_of_two_are_not():
    point, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    gallery = torch.cat([point, point, far])
    alike, split, lone = (
        float(RetrievalUncertainty(gallery, KNOWN, k=2, share=0.2, labels=torch.tensor(labels))(point, torch.zeros(1)))
        for labels in ([0, 0, 1], [0, 1, 1], [0, 0, 0])
    )
    # log(2 sqrt(tiny)); the ratio of a point to its double of another class is 1.
    base = math.log(2) + math.log(torch.finfo(torch.float32).tiny) / 2
    assert math.log(alike / 2) == pytest.approx(base - 4, abs=1e-4)
    assert math.log(lone / 2) == pytest.approx(base - 4, abs=1e-4)
    # Whichever of the two is found first: one of two agrees, of one or of two that could.
    assert min(abs(math.log(split / 2) - (base + 2 - share)) for share in (2, 4)) < 1e-4


@pytest.mark.parametrize("entries", [1, 30, 100])
def test_blocks_of_queries_are_put_together_in_their_order(entries, monkeypatch):
    queries, gallery, labels = draw(23, 4, 0), draw(15, 4, 1), draw_labels(15, 3, 2)
    itself = torch.where(torch.arange(23) < 15, torch.arange(23), -1)
    score = RetrievalUncertainty(gallery, KNOWN, k=3, share=0.2, labels=labels)
    whole = score(queries, torch.zeros(23), itself)
    monkeypatch.setattr("contrastive_curvature.embedding.gallery._ENTRIES", entries)
    torch.testing.assert_close(score(queries, torch.zeros(23), itself), whole, rtol=1e-12, atol=0)


def test_autocast_changes_nothing():
    gallery, labels, queries = torch.randn(60, 6), torch.arange(60) % 20, torch.randn(30, 6)
    score = RetrievalUncertainty(gallery, torch.arange(99.0), labels=labels)
    wanted = score(queries, torch.zeros(30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(queries, torch.zeros(30)), wanted)


def test_the_nearest_of_another_class_is_searched_beyond_the_k_nearest():
    angles = torch.tensor([0.1, 0.2, 0.3, 1.0, 2.0]).double()
    gallery = torch.stack([angles.cos(), angles.sin()], 1)
    index, match, own = torch.tensor([0, 0, 0, 1, 0]), torch.tensor([0, 0, 1]), torch.tensor([-1, 3, -1])
    found = _nearest_other(torch.tensor([[1.0, 0.0]] * 3).double(), gallery, index, match, own)
    # The second query is the only point of class 9 itself; the third has a match of that class.
    torch.testing.assert_close(found, torch.tensor([2 * math.sin(0.5), math.inf, 2 * math.sin(0.05)]).double())


def test_gradients_are_finite_where_a_query_is_its_match():
    gallery = draw(6, 3, 0)
    queries = torch.cat([gallery[:2], draw(2, 3, 1)]).requires_grad_()
    score = RetrievalUncertainty(gallery, KNOWN, k=2, share=0.2, labels=torch.tensor([0, 0, 0, 1, 1, 1]))
    score(queries, torch.zeros(4)).sum().backward()
    assert bool(queries.grad.isfinite().all())
    assert bool((queries.grad[2:] != 0).any())
