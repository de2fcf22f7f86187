"""What ``search`` computes: neighbours by cosine, and whether the nearest is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature import metrics
from contrastive_curvature.apps.cli.console import Console
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.sources import Source, shared_labels
from contrastive_curvature.errors import expected
from contrastive_curvature.io.pretrained import load_match, read_info
from contrastive_curvature.progress import Progress

__all__ = ["Found", "find"]

_AT_ONCE = 2**26
"""Numbers in the covariances of predictions that are held at once: 512 MiB in float64."""


_SAME = 1e-5
"""How far embeddings of norm 1 are apart at most that one input has in batches of two sizes."""


@dataclass(frozen=True, eq=False)
class Found:
    """Hits of N queries, on the CPU.

    Attributes:
        index: Positions in the gallery, the nearest first, shape (N, k).
        cosine: Shape (N, k).
        uncertainty: Of the queries, shape (N,).
        right: Probability that the nearest is of the query's class, shape (N,); ``None`` where nothing says it.
    """

    index: Tensor
    cosine: Tensor
    uncertainty: Tensor
    right: Tensor | None


def find(
    console: Console,
    la: Any,
    folder: Path,
    gallery: Source,
    queries: Source,
    validation: Source | None,
    k: int,
    batch_size: int,
) -> Found:
    """Search.

    Args:
        console: For progress and warnings.
        la: The posterior.
        folder: Where it was saved: a MatchProbability may be there.
        gallery: Points that are searched.
        queries: What is searched for.
        validation: Labelled queries for P(match), or ``None``.
        k: Neighbours of each query.
        batch_size: Inputs at once.

    Raises:
        BadInputError: Validation data need classes, and so does the gallery.
        InputError: There are too few right or wrong neighbours to learn from.
    """
    labels = None
    if validation is not None:
        for name, source in (("--validation", validation), ("--gallery", gallery)):
            source.need_labels(name)
        labels = shared_labels(validation, gallery)
    searched, _ = _directions(console, la, gallery, batch_size, "[gallery]")
    asking, uncertainty = _directions(console, la, queries, batch_size, "[queries]")
    index = metrics.nearest_neighbors(asking, searched, k=k)
    _warn_of_itself(console, f"--queries {queries.path}", asking, searched[index[:, 0]])
    cosine = torch.einsum("nd,nkd->nk", asking, searched[index]).clamp(-1, 1)
    match = None
    if validation is not None and labels is not None:
        match = _fitted(console, la, searched, gallery, validation, labels, batch_size)
    elif read_info(folder).match:
        match = load_match(folder)
    else:
        console.warn(
            "no validation data: match_probability and no_match are left out. Give --validation SOURCE with labelled "
            "inputs that the encoder was not trained on."
        )
    right = None
    if match is not None:
        # A fit of this search saw the gallery's hits only: its number of points is no other size.
        size = len(gallery) if validation is None else match._gallery_size
        if match.use_uncertainty:
            right = _right(la, match, gallery, queries, index[:, 0], batch_size, size)
        else:
            right = match.hits(asking, searched[index[:, 0]], gallery_size=size)
    return Found(index, cosine, uncertainty, right)


def _directions(console: Console, la: Any, source: Source, batch_size: int, name: str) -> tuple[Tensor, Tensor]:
    """Embeddings (N, D) of norm 1 and uncertainties (N,), on the CPU."""
    mu, uncertainty = [], []
    for x, _ in Progress(console.progress).over(source.loader(batch_size), name):
        predicted = la(x)
        mu.append(predicted.mu.detach().cpu())
        uncertainty.append(predicted.uncertainty.detach().cpu())
    return torch.cat(mu), torch.cat(uncertainty)


def _fitted(
    console: Console,
    la: Any,
    searched: Tensor,
    gallery: Source,
    validation: Source,
    labels: list[Tensor],
    batch_size: int,
) -> cc.MatchProbability:
    """P(match) from the validation queries. Only those points of the gallery are predicted that are a hit."""
    if len(gallery) < 2:
        raise BadInputError(expected(f"--gallery {gallery.path}", "at least two points for P(match)", len(gallery)))
    if len(validation) * la.n_outputs**2 > 8 * _AT_ONCE:
        limit = 8 * _AT_ONCE // la.n_outputs**2
        console.warn(
            f"--validation {validation.path}: match_probability is learned from the cosine alone, because the "
            f"covariances of {len(validation):,} inputs in {la.n_outputs:,} dimensions do not fit into memory; with "
            f"{limit:,} they do."
        )
        plain, _ = _directions(console, la, validation, batch_size, "[validation]")
        nearest = metrics.nearest_neighbors(plain, searched, k=1).squeeze(1)
        _warn_of_itself(console, f"--validation {validation.path}", plain, searched[nearest])
        return cc.MatchProbability(use_uncertainty=False).fit_retrieval(plain, labels[0], searched, labels[1])
    asking = _predicted(la, validation, np.arange(len(validation)), batch_size)
    nearest = metrics.nearest_neighbors(asking.mu.cpu(), searched, k=1).squeeze(1)
    _warn_of_itself(console, f"--validation {validation.path}", asking.mu.cpu(), searched[nearest])
    hits = nearest.unique()
    if len(hits) == 1:
        # A search needs two points: any other one, which no query is nearest to.
        hits = torch.cat([hits, torch.tensor([0 if int(hits) else 1])]).sort().values
    found = _predicted(la, gallery, hits.numpy(), batch_size)
    device = asking.mu.device
    return cc.MatchProbability().fit_retrieval(asking, labels[0].to(device), found, labels[1][hits].to(device))


def _warn_of_itself(console: Console, name: str, mu: Tensor, nearest: Tensor) -> None:
    """Warn where most inputs are their own nearest neighbours: all would seem right."""
    if float(((mu - nearest).abs().amax(1) < _SAME).double().mean()) > 0.5:
        console.warn(
            f"{name}: most of these inputs are in the gallery too, so that each is its own nearest neighbour and seems "
            "right. Leave them out of the gallery."
        )


def _right(
    la: Any,
    match: cc.MatchProbability,
    gallery: Source,
    queries: Source,
    nearest: Tensor,
    batch_size: int,
    gallery_size: int,
) -> Tensor:
    size = max(1, _AT_ONCE // la.n_outputs**2)
    parts = []
    for start in range(0, len(queries), size):
        rows = np.arange(start, min(start + size, len(queries)))
        mine = nearest[start : start + size]
        hits, place = mine.unique(return_inverse=True)
        found = _predicted(la, gallery, hits.numpy(), batch_size)
        asking = _predicted(la, queries, rows, batch_size)
        parts.append(match.hits(asking, found[place], gallery_size=gallery_size).cpu())
    return torch.cat(parts)


def _predicted(la: Any, source: Source, rows: Any, batch_size: int) -> cc.EmbeddingDistribution:
    """Predictions for some rows as one distribution."""
    return cc.EmbeddingDistribution.cat([la(x) for x, _ in source.loader(batch_size, rows)])
