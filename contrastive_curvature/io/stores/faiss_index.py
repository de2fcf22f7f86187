"""The indices of FAISS that a store can have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.stores.store import Rows

__all__ = ["KINDS", "all_vectors", "build", "needed_effort", "parameters", "restore"]

KINDS: Mapping[str, tuple[str, ...]] = {"flat": (), "hnsw": ("links", "build_effort"), "ivf": ("lists",)}
"""Indices, and the options of each."""

_POINTS_A_LIST = 39
"""Points that faiss wants for each centre; with fewer it prints a warning."""

_NEIGHBORS = 32
"""Points of a graph that are looked at for each candidate, about: the default number of links."""


def build(faiss: ModuleType, kind: str, vectors: NDArray[np.float32], options: dict[str, int]) -> Any:
    """Make an index of unit vectors (N, D).

    Raises:
        InputError: There are too few points for that many lists.
    """
    count, dim = vectors.shape
    if kind == "flat":
        index = faiss.IndexFlatIP(dim)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, options.get("links", 32), faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = options.get("build_effort", 100)
    else:
        most = max(1, count // _POINTS_A_LIST)
        lists = options.get("lists", min(most, max(1, round(4 * math.sqrt(count)))))
        if lists > most:
            wanted = f"at most {most}: {_POINTS_A_LIST} embeddings for each"
            raise InputError(expected("lists", wanted, lists, f"There are {count} embeddings."))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1
        index.train(vectors)
        index.set_direct_map_type(faiss.DirectMap.Array)
    index.add(vectors)
    return index


def all_vectors(index: Any) -> NDArray[np.float32]:
    """The vectors of an index, shape (N, D), in the order in which they were added."""
    return index.reconstruct_n(0, int(index.ntotal))


def needed_effort(index: Any, kind: str, k: int, effort: int | None, share: float) -> int | None:
    """How hard a search must look where only a share of the points passes a filter.

    FAISS counts the points that it looks at, whether they pass or not; so the effort grows as the share falls.

    Args:
        index: The index.
        kind: Its kind.
        k: Number of hits.
        effort: What was asked for without a filter, or ``None``.
        share: Share of the points that pass, in (0, 1].

    Returns:
        Candidates of a graph, or lists; ``None`` where looking at all points that pass takes no longer.
    """
    if kind == "flat":
        return None
    if kind == "ivf":
        return min(int(index.nlist), math.ceil((effort or max(1, index.nlist // 8)) / share))
    candidates = math.ceil(max(k, effort or 64) / share)
    return None if share < 1 and share * index.ntotal <= _NEIGHBORS * candidates else candidates


def parameters(faiss: ModuleType, kind: str, effort: int | None, selector: Any) -> Any:
    """What a search is told: which points it may find, and how hard it looks."""
    if kind == "flat":
        return faiss.SearchParameters(sel=selector)
    if kind == "hnsw":
        return faiss.SearchParametersHNSW(sel=selector, efSearch=effort)
    return faiss.SearchParametersIVF(sel=selector, nprobe=effort)


def restore(faiss: ModuleType, kind: str, rows: Rows, compressed: NDArray[np.uint8] | None, path: Path | str) -> Any:
    """The index of a file.

    Raises:
        InputError: faiss cannot read it, or it is none of so many vectors.
    """
    if compressed is None:
        return build(faiss, "flat", rows.vectors, {})
    try:
        index = faiss.deserialize_index(compressed)
    except RuntimeError as error:
        raise InputError(expected(str(path), "an index that faiss can read", str(error).splitlines()[0])) from None
    wanted = faiss.IndexHNSWFlat if kind == "hnsw" else faiss.IndexIVFFlat
    if type(index) is not wanted or index.ntotal != len(rows.ids) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        shown = f"a {type(index).__name__} of {index.ntotal}"
        raise InputError(expected(str(path), f"a {wanted.__name__} of {len(rows.ids)} embeddings", shown))
    return index
