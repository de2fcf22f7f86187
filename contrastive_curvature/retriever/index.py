"""An index of the user's own that a retriever searches, and the checks of what it returns."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError

Hits = Tensor | NDArray[Any]

_LARGEST = 1.1
"""Cosines of unit vectors, also of those that an index has compressed, are smaller."""

_ROUNDING = 1e-6
"""Of distances in float32: by so much a distance may be less than the one before."""


class Index(Protocol):
    """An object that searches unit vectors by cosine: your own class around FAISS, LanceDB or a server."""

    def search(self, vectors: Tensor, k: int) -> tuple[Hits, Hits]:
        """Find the k nearest of the stored vectors.

        Args:
            vectors: Queries, unit vectors, shape (N, D).
            k: Number of hits for each query.

        Returns:
            Cosine distances ``1 - cosine``, nearest first, and the identifiers of the hits, whole numbers, each once a
            query; tensors or arrays, both of shape (N, k).
        """


def nearest(index: Index, vectors: Tensor, k: int) -> tuple[Tensor, NDArray[np.int64]]:
    """Search an index, and check what it returns.

    Returns:
        Cosines as a tensor like ``vectors``, and identifiers, both of shape (N, k).

    Raises:
        InputTypeError: The index returns no pair of tensors or arrays of numbers, or identifiers that are not integers.
        InputError: A shape is wrong, a distance is not finite, not that of unit vectors or less than the one before, or
            an identifier is negative or stands twice among the hits of a query.
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
    if int(ids.min()) < 0:
        hint = "Search more of an approximate index, such as nprobe or hnsw.efSearch of FAISS."
        raise InputError("index", f"{k} hits for each query", f"the identifier {int(ids.min())}", hint)
    cosine = 1 - distances.astype(np.float64)
    if not bool((np.abs(cosine) <= _LARGEST).all()):
        got = f"cosines of {cosine.min():.3g} to {cosine.max():.3g}"
        raise InputError("index", "distances 1 - cosine of unit vectors", got, "Add la(x).mu, not raw outputs.")
    if bool((np.diff(cosine, axis=1) > _ROUNDING).any()):
        hint = "Return 1 - cosine, not the cosine itself."
        raise InputError("index", "distances with the nearest first", "a smaller distance after a larger one", hint)
    ordered = np.sort(ids, axis=1)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InputError("index", "each identifier once a query", "one that stands twice")
    return torch.from_numpy(cosine).to(vectors), ids.astype(np.int64)
