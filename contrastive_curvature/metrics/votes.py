"""Votes of sampled networks: for every point, each network votes for the label of the nearest neighbour."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.metrics._checks import check_embeddings, check_labels
from contrastive_curvature.metrics.neighbors import Backend, Metric, nearest_neighbors

Samples = Tensor | Iterable[Tensor]


_HINT = (
    "Sample s comes from one network for all points: pass la.predictive_samples(x, n_samples=..., joint=True), of "
    "shape (S, N, D)."
)


def _iterate(name: str, samples: object) -> Iterator[Tensor]:
    # An EmbeddingDistribution is iterable too, but it iterates over mu and kappa, which are not samples.
    several = isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, Mapping, Tensor))
    if (isinstance(samples, Tensor) and samples.ndim == 3) or (several and not hasattr(samples, "mu")):
        return iter(samples)  # type: ignore[call-overload]
    got = f"shape {tuple(samples.shape)}" if isinstance(samples, Tensor) else f"a {type(samples).__name__}"
    raise InputTypeError(name, "shape (S, N, D), or an iterable of (N, D): sampled embeddings", got, _HINT)


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
            network (one draw of the weights) for all N points, not from the marginal distribution of each.
        labels: Labels of the points, int, shape (N,).
        gallery: Embeddings to search: (S, M, D) or an iterable of (M, D), sample s from the same network as sample s of
            ``samples``; or one (M, D) for all samples. ``None`` is leave-one-out among the points.
        gallery_labels: Labels of the gallery, int, shape (M,); needed only with ``gallery``.
        backend: ``"auto"``, ``"faiss"`` or ``"sklearn"``, see ``nearest_neighbors``.
        metric: ``"cosine"`` or ``"euclidean"``, see ``nearest_neighbors``.

    Returns:
        int64 labels, shape (S, N), on the device of ``labels``.

    Source: Warburg et al. (2023), appendix G.3.
    """
    validate.choice("metric", metric, ("cosine", "euclidean"))
    points = check_labels("labels", labels)
    if (gallery is None) != (gallery_labels is None):
        raise InputError("gallery, gallery_labels", "both or neither", "one of the two")
    searched_labels = (
        points if gallery_labels is None else check_labels("gallery_labels", gallery_labels).to(points.device)
    )
    one_gallery = gallery is None or (isinstance(gallery, Tensor) and gallery.ndim == 2)
    galleries = itertools.repeat(gallery) if one_gallery else _iterate("gallery", gallery)
    zeros, votes = metric == "euclidean", []
    for sample, each in zip(_iterate("samples", samples), galleries, strict=not one_gallery):
        if len(check_embeddings("samples", sample, zeros, _HINT)) != len(points):
            raise InputError("samples", f"N = {len(points)} points, as labels", f"N = {len(sample)}", _HINT)
        searched = None if each is None else check_embeddings("gallery", each, zeros, _HINT)
        if searched is not None and len(searched) != len(searched_labels):
            raise InputError("gallery_labels", f"shape ({len(searched)},)", tuple(searched_labels.shape))
        neighbors = nearest_neighbors(sample, searched, k=1, backend=backend, metric=metric).squeeze(1)
        votes.append(searched_labels[neighbors.to(points.device)])
    if not votes:
        raise InputError("samples", "at least one sample", "none")
    return torch.stack(votes)
