"""Every sampled network votes for the label of each point, by that point's nearest neighbour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.metrics._checks import check_embeddings, check_labels
from contrastive_curvature.metrics.neighbors import Backend, nearest_neighbors

__all__ = ["Samples", "retrieval_votes"]

Samples = Tensor | Iterable[Tensor]


_HOW = (
    "Sample s comes from one network for all points: pass la.predictive_samples(x, n_samples=..., joint=True), of "
    "shape (S, N, D)."
)


def _iterate(name: str, samples: object) -> Iterator[Tensor]:
    wanted = "shape (S, N, D), or an iterable of (N, D): sampled embeddings"
    if isinstance(samples, Tensor):
        if samples.ndim != 3:
            raise InputError(expected(name, wanted, f"shape {tuple(samples.shape)}", _HOW))
        return iter(samples)
    # A distribution unpacks into its mean and concentration, which are no samples.
    if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, Mapping)) and not hasattr(samples, "mu"):
        return iter(samples)
    wanted = "a tensor (S, N, D) or an iterable of (N, D): sampled embeddings"
    raise InputTypeError(expected(name, wanted, f"a {type(samples).__name__}", _HOW))


def _check_sample(name: str, sample: object) -> Tensor:
    """One of an iterable's samples; the message of a wrong shape says what to pass."""
    if isinstance(sample, Tensor) and sample.ndim != 2:
        wanted = "an iterable of tensors (N, D), one a sampled network"
        raise InputError(expected(name, wanted, f"one of shape {tuple(sample.shape)}", _HOW))
    return check_embeddings(name, sample)


def _pair(samples: Samples, gallery: Samples | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    if gallery is None or (isinstance(gallery, Tensor) and gallery.ndim == 2):
        for sample in _iterate("samples", samples):
            yield sample, gallery
        return
    galleries = _iterate("gallery", gallery)
    for number, sample in enumerate(_iterate("samples", samples)):
        held = next(galleries, None)
        if held is None:
            raise InputError(expected("gallery", "as many samples as `samples`", f"only {number}"))
        yield sample, held
    if next(galleries, None) is not None:
        raise InputError(expected("gallery", "as many samples as `samples`", "more"))


def retrieval_votes(
    samples: Samples,
    labels: Tensor,
    gallery: Samples | None = None,
    gallery_labels: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return, for each sample and point, the label of the nearest neighbour under that sample.

    One sample is held at a time: memory is O(N D + S N), not O(S N D), when ``samples`` is an iterator.

    Args:
        samples: Sampled embeddings: a tensor (S, N, D) or an iterable of S tensors (N, D). Sample s must come from ONE
            network (one draw of the weights) for all N points; marginal samples of each point's own distribution would
            give neighbours that no network ever produces.
        labels: Labels of the points, int, shape (N,).
        gallery: Where to look for neighbours: (S, M, D) or an iterable of (M, D), sample s from the same network as
            sample s of ``samples``; or one (M, D) for all. ``None`` is leave-one-out among the points.
        gallery_labels: Labels of the gallery, int, shape (M,); needed with ``gallery`` only.
        backend: As for ``nearest_neighbors``.

    Returns:
        int64 labels, shape (S, N), on the device of ``labels``.

    Raises:
        InputTypeError: If an argument has a wrong type.
        InputError: If a shape is wrong, there is no sample, an embedding is zero or not finite, one of ``gallery`` and
            ``gallery_labels`` is missing, or their numbers of samples differ.

    Source: Warburg et al. (2023), appendix G.3.
    """
    points = check_labels("labels", labels)
    if (gallery is None) != (gallery_labels is None):
        raise InputError(expected("gallery, gallery_labels", "both or neither", "one of the two"))
    held_labels = points if gallery_labels is None else check_labels("gallery_labels", gallery_labels).to(points.device)
    votes = []
    for sample, held in _pair(samples, gallery):
        if len(_check_sample("samples", sample)) != len(points):
            hint = "" if isinstance(samples, Tensor) else _HOW
            raise InputError(expected("samples", f"N = {len(points)} points, as labels", f"N = {len(sample)}", hint))
        if held is not None and len(_check_sample("gallery", held)) != len(held_labels):
            raise InputError(expected("gallery_labels", f"shape ({len(held)},)", tuple(held_labels.shape)))
        found = nearest_neighbors(sample, held, k=1, backend=backend).squeeze(1)
        votes.append(held_labels[found.to(points.device)])
    if not votes:
        raise InputError(expected("samples", "at least one sample", "none"))
    return torch.stack(votes)
