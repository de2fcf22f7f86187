"""What is asked about hits, against the same question about the whole gallery in memory."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from digits_corpus import Corpus
from hypothesis import given
from hypothesis import strategies as st

import contrastive_curvature as cc
from contrastive_curvature.io.stores.embeddings import tangential_variance_of

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def match(corpus: Corpus) -> cc.MatchProbability:
    gallery, queries = cc.StoredEmbeddings.of(corpus.gallery), corpus.queries
    match = cc.MatchProbability().fit_retrieval(queries, corpus.query_labels, gallery, corpus.labels)
    rows = torch.randint(10_000, (300,), generator=torch.Generator().manual_seed(0))
    rows[:150] = torch.tensor([int((corpus.labels == y).nonzero()[i]) for i, y in enumerate(corpus.query_labels[:150])])
    other = cc.StoredEmbeddings(gallery.mu[rows], gallery.kappa[rows], gallery.uncertainty[rows])
    return match.fit_pairs(queries, other, corpus.query_labels == corpus.labels[rows])


def on(corpus: Corpus, device: str) -> cc.EmbeddingDistribution:
    q = corpus.queries
    moved = cc.EmbeddingDistribution(q.raw_mean.to(device), variance=q.variance.to(device))
    return moved.relative_to(q._typical_norm, None)


@pytest.mark.parametrize(("kind", "k"), [("faiss", 1), ("lance", 5)])
def test_the_best_hit_is_as_probable_as_in_memory(device, kind, k, corpus, stores, match):
    queries = on(corpus, device)
    whole = cc.StoredEmbeddings.of(corpus.gallery)
    gallery = cc.StoredEmbeddings(*(t.to(device) for t in (whole.mu, whole.kappa, whole.uncertainty)))
    wanted = match.nearest(queries, gallery)
    result = stores[kind].search(queries, k)
    got = result.match_probability(match)
    assert got.shape == (300,)
    same = result.ids[:, 0].cpu() == wanted.index.cpu()
    # Another embedding of the same cosine up to rounding may have another uncertainty.
    assert int(same.sum()) > 290
    torch.testing.assert_close(got[same.to(device)], wanted.right[same.to(device)], rtol=1e-4, atol=1e-6)
    assert 0 < float(got.min()) < 0.5 < float(got.max()) < 1


def test_every_hit_has_the_probability_of_its_pair(device, corpus, stores, match):
    queries = on(corpus, device)
    result = stores["faiss"].search(queries, 3)
    got = result.same_probability(match)
    every = result.hits()
    repeated = cc.EmbeddingDistribution(
        queries.raw_mean.repeat_interleave(3, 0), variance=queries.variance.repeat_interleave(3, 0)
    ).relative_to(queries._typical_norm, None)
    torch.testing.assert_close(got, match.same(repeated, every).view(300, 3), rtol=1e-5, atol=1e-7)


def test_retrieval_uncertainty_is_that_of_the_whole_gallery(device, corpus, stores):
    novelty, calibration = corpus.queries.novelty.to(device), corpus.calibration.to(device)
    points = corpus.queries.mu.to(device)
    whole = cc.RetrievalUncertainty(corpus.gallery.mu.to(device), calibration, k=7, share=0.05)
    wanted = whole(points, novelty)
    got = stores["lance"].search(points, 7).retrieval_uncertainty(novelty, calibration, share=0.05)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert bool((wanted > 2).any())


def test_a_store_of_another_size_than_the_fit_warns(device, corpus, match):
    store = cc.FaissStore()
    store.add(range(10), tuple(t[:10] for t in _parts(corpus)))
    result = store.search(on(corpus, device), 2)
    with pytest.warns(UserWarning, match=r"gallery_size: .* fitted with 10000 points to search, 10 were searched"):
        result.match_probability(match)


def test_questions_that_hits_cannot_answer_are_refused(device, corpus, stores, match):
    plain = stores["faiss"].search(corpus.queries.mu.to(device), 2)
    with pytest.raises(cc.InputTypeError, match="queries: expected an EmbeddingDistribution"):
        plain.match_probability(match)
    full = stores["faiss"].search(on(corpus, device), 2)
    with pytest.raises(cc.NotFittedError, match="fit_retrieval"):
        full.match_probability(cc.MatchProbability())
    with pytest.raises(cc.NotFittedError, match="fit_pairs"):
        full.same_probability(cc.MatchProbability())
    with pytest.raises(cc.InputError, match="rank: expected a whole number from 0 to 1, got 2"):
        full.hits(2)
    cosine_only = cc.MatchProbability(use_uncertainty=False)
    cosine_only.fit_retrieval(corpus.queries, corpus.query_labels, corpus.gallery, corpus.labels)
    assert plain.match_probability(cosine_only).shape == (300,)


@given(dim=st.integers(2, 40), log_kappa=st.floats(-5, 15), seed=st.integers(0, 99))
def test_stored_embeddings_have_the_concentration_they_were_given(device, dim, log_kappa, seed):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(3, dim, dtype=torch.float64, generator=g).to(device)
    kappa = dim * torch.full((3,), 10.0**log_kappa, dtype=torch.float64, device=device)
    stored = cc.StoredEmbeddings(mu, kappa, torch.ones(3, device=device))
    # The concentration of the Gaussian itself; the variance along the mean, of its size, does not count.
    of_gaussian = cc.vmf.concentration_from_gaussian(stored.raw_mean, variance=stored.variance)
    torch.testing.assert_close(of_gaussian, kappa, rtol=1e-9, atol=0)
    assert torch.equal(stored.kappa, kappa)


def _parts(corpus: Corpus) -> tuple[torch.Tensor, ...]:
    s = cc.StoredEmbeddings.of(corpus.gallery)
    return s.mu, s.kappa, s.uncertainty


def test_the_variance_of_no_concentration_is_finite(device):
    variance = tangential_variance_of(torch.tensor([0.0, 1e300], dtype=torch.float64, device=device), 3)
    assert bool(variance.isfinite().all())
    assert bool((variance > 0).all())
