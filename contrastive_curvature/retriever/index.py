"""An index of the user's own that a retriever searches, and the checks of what it returns."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError

Hits = Tensor | NDArray[Any]

_NEAR, _SHARE = 3e-3, 0.1
"""By so much, and by this share of the distance, a distance may differ from that to the stored point. An index that
keeps 8 bits a number stays below; the point before or after in the gallery is mostly further off."""

_AT_ONCE = 20
"""Hits of a query that are compared with their stored points at once."""


class Index(Protocol):
    """An object that searches unit vectors by cosine: your own class around FAISS, LanceDB or a server."""

    def search(self, vectors: Tensor, k: int) -> tuple[Hits, Hits]:
        """Find the k nearest of the stored vectors.

        Args:
            vectors: Queries, unit vectors, shape (N, D).
            k: Number of hits for each query.

        Returns:
            Cosine distances ``1 - cosine``, and the identifiers of the hits, whole numbers, each once a query; tensors
            or arrays, both of shape (N, k). An approximate index that finds fewer returns the identifier -1 for the
            rest, with any distance.
        """


def nearest(
    index: Index, points: Tensor, identifiers: NDArray[np.int64], vectors: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Search an index, and compare what it returns with the points that it should hold.

    Args:
        index: The index.
        points: Unit vectors, shape (M, D).
        identifiers: Those of the points, ascending, shape (M,).
        vectors: Queries, unit vectors, shape (N, D).
        k: Number of hits for each query.

    Returns:
        Cosines, and rows of ``points``, both of shape (N, k). The cosine is minus infinity for a hit that is missing,
        or whose identifier is none of the points'.

    Raises:
        InputTypeError: The index returns no pair of tensors or arrays of numbers, or identifiers that are not integers.
        InputError: A shape is wrong, an identifier stands twice among the hits of a query, a distance is not that to
            the point with the identifier, or all points are asked for and a query gets other identifiers alone.
    """
    found = index.search(vectors, k)
    if not isinstance(found, tuple) or len(found) != 2:
        raise InputTypeError("index", "a pair (distances, identifiers) of a search", f"a {type(found).__name__}")
    distances, ids = (part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part) for part in found)
    for name, part, kinds in (("distances", distances, "iuf"), ("identifiers", ids, "iu")):
        if part.dtype.kind not in kinds:
            wanted = f"{name} that are {'integers' if kinds == 'iu' else 'numbers'}"
            raise InputTypeError("index", wanted, str(part.dtype))
        if part.shape != (len(vectors), k):
            raise InputError("index", f"{name} of shape ({len(vectors)}, {k})", part.shape)
    ids = ids.astype(np.int64)
    ordered = np.sort(ids, axis=1)
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise InputError("index", "each identifier once a query", "one that stands twice")
    rows = np.searchsorted(identifiers, ids).clip(max=len(identifiers) - 1)
    there = identifiers[rows] == ids
    if k == len(points) and bool((alone := ~there.any(1) & (ids >= 0).any(1)).any()):
        hint = "The points of a fit have the numbers from 0, in their order; add returns those of added points."
        raise InputError("index", "identifiers of the gallery", f"others, such as {ids[alone].max()}", hint)
    at = torch.from_numpy(rows).to(points.device)
    cosine = torch.cat([(points[part] @ vectors[:, :, None])[..., 0] for part in at.split(_AT_ONCE, dim=1)], dim=1)
    true = 1 - cosine.double().cpu().numpy()
    with np.errstate(invalid="ignore"):
        wrong = there & ~(np.abs(distances.astype(np.float64) - true) <= _NEAR + _SHARE * np.abs(true))
    if wrong.any():
        hint = (
            "Return 1 - cosine, of la(x).mu or of normalised embeddings, under the identifiers of the retriever. An "
            "index that numbers its points itself, as a flat one of FAISS does after a removal, needs an IndexIDMap; "
            "of one that compresses them further than to 8 bits a number, return recomputed distances."
        )
        got = f"{distances[wrong][0]:.3g} with the identifier {ids[wrong][0]}, whose point is at {true[wrong][0]:.3g}"
        raise InputError("index", "distances to the points with these identifiers", got, hint)
    return cosine.masked_fill(torch.from_numpy(~there).to(cosine.device), -torch.inf), at
