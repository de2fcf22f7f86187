"""Searches in a store of 10,000 real embeddings, against all cosines in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from digits_corpus import STORES, Corpus, make_store
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

import contrastive_curvature as cc

pytestmark = pytest.mark.parametrize("device", DEVICES)

ROUNDING = 1e-6
"""Of a float32 sum of 16 products of unit vectors, and of the rounding of the vectors themselves."""

APPROXIMATE = [("faiss", "hnsw", 0.95), ("faiss", "ivf", 0.9), ("lance", "ivf_pq", 0.9), ("lance", "ivf_hnsw_sq", 0.95)]

OPTIONS = {"ivf_hnsw_sq": {"build_effort": 60}, "ivf_pq": {"partitions": 16}}
"""Faster than the defaults to build."""


def cosines(corpus: Corpus) -> Tensor:
    return corpus.queries.mu.double() @ corpus.gallery.mu.double().T


def check_exact(result: cc.SearchResult, cosine: Tensor, k: int) -> None:
    """The hits are the k best; those that differ from the brute-force ones have the same cosine up to rounding."""
    best = cosine.topk(k).values
    ids = result.ids.cpu()
    assert ids.shape == (len(cosine), k)
    assert all(len(set(row)) == k for row in ids.tolist())
    torch.testing.assert_close(cosine.gather(1, ids), best, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(result.cosine.cpu().double(), best, rtol=0, atol=ROUNDING)


def recall(result: cc.SearchResult, cosine: Tensor, k: int) -> float:
    """Share of hits that are as near as the k-th best."""
    return float((cosine.gather(1, result.ids.cpu()) >= cosine.topk(k).values[:, -1:] - ROUNDING).double().mean())


def on(distribution: cc.EmbeddingDistribution, device: str) -> cc.StoredEmbeddings:
    s = cc.StoredEmbeddings.of(distribution)
    return cc.StoredEmbeddings(s.mu.to(device), s.kappa.to(device), s.uncertainty.to(device))


@pytest.mark.parametrize("kind", STORES)
def test_exact_search_finds_the_largest_cosines(device, kind, corpus, stores):
    result = stores[kind].search(on(corpus.queries, device), 10)
    check_exact(result, cosines(corpus), 10)
    assert result.cosine.device.type == result.ids.device.type == device
    ids = result.ids.cpu()
    assert torch.equal(result.kappa.cpu(), corpus.gallery.kappa[ids].float())
    assert torch.equal(result.uncertainty.cpu(), corpus.gallery.uncertainty[ids].float())
    torch.testing.assert_close(result.vectors.cpu(), corpus.gallery.mu[ids], rtol=0, atol=2e-7)
    assert result.size == 10_000
    assert bool((result.cosine.diff(dim=1) <= 0).all())


@pytest.mark.parametrize(("kind", "spread", "least"), [("faiss", 0.001, 0.55), ("lance", 0.01, 0.99)])
def test_close_embeddings_are_told_apart(device, kind, spread, least, tmp_path: Path):
    """As scikit-learn's brute force in float64 does; the cosines of an index, in float32, lose ``1 - cosine``."""
    g = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.eye(3)[0] + spread * torch.randn(3300, 3, generator=g), dim=1)
    queries, gallery = (x / x.norm(dim=1, keepdim=True) for x in points.double().split([300, 3000]))
    brute = NearestNeighbors(n_neighbors=10, algorithm="brute").fit(gallery.numpy())
    truth = torch.from_numpy(brute.kneighbors(queries.numpy(), return_distance=False))
    store = make_store(kind, tmp_path)
    store.add(range(3000), (points[300:], torch.ones(3000), torch.ones(3000)))
    found = store.search(points[:300].to(device), 10).ids
    assert isinstance(found, Tensor)
    # A store rounds what it normalises once more, to float32: one in a thousand may change places. And an index may not
    # return the nearest at all.
    there = (found.cpu().unsqueeze(2) == truth.unsqueeze(1)).any(2).double().mean()
    assert min(float(there), float((found.cpu()[:, 0] == truth[:, 0]).double().mean())) > least


def test_one_query_and_raw_vectors(device, corpus, stores):
    one = stores["faiss"].search(3 * corpus.queries.raw_mean[:1].to(device), 4)
    check_exact(one, cosines(corpus)[:1], 4)


@pytest.mark.parametrize(("kind", "share"), [("faiss", 0.002), ("lance", 0.002), ("lance", 0.3)])
def test_filter_on_uncertainty_is_the_filter_of_all_cosines(device, kind, share, corpus, stores):
    # A value that occurs: an embedding of exactly this uncertainty passes.
    most = float(corpus.gallery.uncertainty.sort().values[int(share * 10_000)])
    result = stores[kind].search(on(corpus.queries, device), 10, max_uncertainty=most)
    passes = corpus.gallery.uncertainty <= most
    check_exact(result, cosines(corpus).masked_fill(~passes, -2), 10)
    assert result.size == int(passes.sum())


def test_lance_filters_by_payload(device, corpus, stores):
    most = float(corpus.gallery.uncertainty.median())
    result = stores["lance"].search(on(corpus.queries, device), 5, max_uncertainty=most, where="label = 3 OR label = 5")
    passes = ((corpus.labels == 3) | (corpus.labels == 5)) & (corpus.gallery.uncertainty <= most)
    check_exact(result, cosines(corpus).masked_fill(~passes, -2), 5)
    assert torch.equal(torch.from_numpy(result.payload["label"]), corpus.labels[result.ids.cpu()])
    assert result.size == int(passes.sum())


@pytest.mark.parametrize(("kind", "index", "least"), APPROXIMATE)
def test_approximate_search_reaches_its_recall(device, kind, index, least, corpus, tmp_path: Path):
    store: Any = make_store(kind, tmp_path)
    store.add(range(10_000), corpus.gallery)
    store.create_index(index, **OPTIONS.get(index, {}))
    assert store.index == index
    cosine, queries = cosines(corpus), on(corpus.queries, device)
    found = recall(store.search(queries, 10), cosine, 10)
    assert found >= least
    more = recall(store.search(queries, 10, effort=1000), cosine, 10)
    assert more >= max(found - 0.005, 0.95)
    # So few pass that the index alone finds fewer than ten: every row is complete nevertheless.
    most = float(corpus.gallery.uncertainty.sort().values[14])
    passes = corpus.gallery.uncertainty <= most
    few = store.search(queries, 10, max_uncertainty=most)
    assert recall(few, cosine.masked_fill(~passes, -2), 10) >= least
    assert bool((few.uncertainty <= most).all())
    # What comes later is found, too.
    new = -corpus.gallery.mu[:1]
    store.add([20_000], (new, torch.ones(1), torch.zeros(1)))
    assert int(store.search(new.to(device), 1).ids) == 20_000
    store.create_index("flat")
    assert store.index == "flat"
    check_exact(store.search(queries, 10), cosine_with(cosine, corpus), 10)


def cosine_with(cosine: Tensor, corpus: Corpus) -> Tensor:
    """The cosines to 10,000 embeddings; the one that was added is opposite to the first and far from the best ten."""
    assert float((-cosine[:, 0]).max()) < float(cosine.topk(10).values.min())
    return cosine


@pytest.mark.parametrize(("index", "share"), [("hnsw", 0.02), ("ivf", 0.05)])
def test_a_filter_costs_an_index_of_faiss_no_recall(device, index, share, corpus):
    store = cc.FaissStore()
    store.add(range(10_000), corpus.gallery)
    store.create_index(index)
    most = float(corpus.gallery.uncertainty.sort().values[int(share * 10_000)])
    wanted = cosines(corpus).masked_fill(corpus.gallery.uncertainty > most, -2)
    queries = on(corpus.queries, device)
    assert recall(store.search(queries, 10, max_uncertainty=most), wanted, 10) >= 0.999
