"""Retrieval uncertainty: novelty gates, distance and the labels of the gallery rank."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tables import each

from contrastive_curvature import InputError, InputTypeError, RetrievalUncertainty
from contrastive_curvature.embedding.gallery import _nearest_other, neighbor_distance


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


KNOWN = torch.arange(5.0)


"""Novelties of which none is above the threshold of a share of 0.2, nor is 0."""


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
def test_blocks_of_queries_are_put_together_with_labels_too(entries, monkeypatch):
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
