"""Votes of sampled networks: each votes, for every point, for the label of the point's nearest neighbour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.metrics._checks import check_embeddings, check_labels
from contrastive_curvature.metrics.neighbors import Backend, Metric, nearest_neighbors

__all__ = ["Samples", "retrieval_votes"]

Samples = Tensor | Iterable[Tensor]


_HINT = (
    "Sample s comes from one network for all points: pass la.predictive_samples(x, n_samples=..., joint=True), of "
    "shape (S, N, D)."
)


def _iterate_samples(name: str, samples: object) -> Iterator[Tensor]:
    wanted = "shape (S, N, D), or an iterable of (N, D): sampled embeddings"
    if isinstance(samples, Tensor):
        if samples.ndim != 3:
            raise InputError(expected(name, wanted, f"shape {tuple(samples.shape)}", _HINT))
        return iter(samples)
    # An EmbeddingDistribution is iterable too, but it iterates over mu and kappa, which are not samples.
    if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, Mapping)) and not hasattr(samples, "mu"):
        return iter(samples)
    wanted = "a tensor (S, N, D) or an iterable of (N, D): sampled embeddings"
    raise InputTypeError(expected(name, wanted, f"a {type(samples).__name__}", _HINT))


def _check_sample(name: str, sample: object, metric: str) -> Tensor:
    """Check one sample of an iterable; the error for a wrong shape names what to pass."""
    if isinstance(sample, Tensor) and sample.ndim != 2:
        wanted = "an iterable of tensors (N, D), one per sampled network"
        raise InputError(expected(name, wanted, f"one of shape {tuple(sample.shape)}", _HINT))
    return check_embeddings(name, sample, zeros=metric == "euclidean")


def _pair_with_gallery(samples: Samples, gallery: Samples | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    if gallery is None or (isinstance(gallery, Tensor) and gallery.ndim == 2):
        for sample in _iterate_samples("samples", samples):
            yield sample, gallery
        return
    galleries = _iterate_samples("gallery", gallery)
    for number, sample in enumerate(_iterate_samples("samples", samples)):
        searched = next(galleries, None)
        if searched is None:
            raise InputError(expected("gallery", "as many samples as `samples`", f"only {number}"))
        yield sample, searched
    if next(galleries, None) is not None:
        raise InputError(expected("gallery", "as many samples as `samples`", "more"))


def retrieval_votes(
    samples: Samples,
    labels: Tensor,
    gallery: Samples | None = None,
    gallery_labels: Tensor | None = None,
    *,
    backend: Backend = "auto",
    metric: Metric = "cosine",
) -> Tensor:
    """Return, for each sample and point, the label of the nearest neighbour under that sample.

    Only one sample is in memory at a time: if ``samples`` is an iterator, memory is O(N D + S N) and not O(S N D).

    Args:
        samples: Sampled embeddings: a tensor (S, N, D) or an iterable of S tensors (N, D). Sample s must come from ONE
            network (one draw of the weights) for all N points; samples from the marginal distribution of each
            point would give neighbours that no single network produces.
        labels: Labels of the points, int, shape (N,).
        gallery: Embeddings that are searched: (S, M, D) or an iterable of (M, D), sample s from the same network as
            sample s of ``samples``; or one (M, D) for all samples. ``None`` is leave-one-out among the points.
        gallery_labels: Labels of the gallery, int, shape (M,); needed with ``gallery`` only.
        backend: ``"auto"``, ``"faiss"`` or ``"sklearn"``, see ``nearest_neighbors``.
        metric: ``"cosine"`` or ``"euclidean"``, see there.

    Returns:
        int64 labels, shape (S, N), on the device of ``labels``.

    Raises:
        InputError: If a shape is wrong, there is no sample, an embedding is not finite, or zero and without a cosine,
            one of ``gallery`` and ``gallery_labels`` is missing, their numbers of samples differ, or ``metric`` is
            unknown.

    Source: Warburg et al. (2023), appendix G.3.
    """
    validate.choice("metric", metric, ("cosine", "euclidean"))
    points = check_labels("labels", labels)
    if (gallery is None) != (gallery_labels is None):
        raise InputError(expected("gallery, gallery_labels", "both or neither", "one of the two"))
    searched_labels = (
        points if gallery_labels is None else check_labels("gallery_labels", gallery_labels).to(points.device)
    )
    votes = []
    for sample, searched in _pair_with_gallery(samples, gallery):
        if len(_check_sample("samples", sample, metric)) != len(points):
            hint = "" if isinstance(samples, Tensor) else _HINT
            raise InputError(expected("samples", f"N = {len(points)} points, as labels", f"N = {len(sample)}", hint))
        if searched is not None and len(_check_sample("gallery", searched, metric)) != len(searched_labels):
            raise InputError(expected("gallery_labels", f"shape ({len(searched)},)", tuple(searched_labels.shape)))
        neighbors = nearest_neighbors(sample, searched, k=1, backend=backend, metric=metric).squeeze(1)
        votes.append(searched_labels[neighbors.to(points.device)])
    if not votes:
        raise InputError(expected("samples", "at least one sample", "none"))
    return torch.stack(votes)
