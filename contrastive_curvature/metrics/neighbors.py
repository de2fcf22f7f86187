"""Nearest neighbours by cosine similarity, on faiss or scikit-learn."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.metrics._checks import check_count, check_embeddings

__all__ = ["nearest_neighbors"]

Backend = Literal["auto", "faiss", "sklearn"]


def _choose(backend: str, double: bool) -> str:
    if not isinstance(backend, str) or backend not in ("auto", "faiss", "sklearn"):
        raise InputError(expected("backend", "'auto', 'faiss' or 'sklearn'", backend))
    installed = importlib.util.find_spec("faiss") is not None
    if backend == "faiss" and not installed:
        raise UnsupportedError(expected("backend", "an installed package", "'faiss'", "pip install faiss-cpu."))
    if backend == "auto":
        return "faiss" if installed and not double else "sklearn"
    return backend


def _search(queries: Tensor, gallery: Tensor, k: int, backend: str) -> Tensor:
    """Return indices (N, k), most similar first; the rows of both are unit vectors on the CPU."""
    if backend == "faiss":
        faiss = importlib.import_module("faiss")
        index = faiss.IndexFlatIP(gallery.shape[1])
        index.add(gallery.float().contiguous().numpy())
        _, found = index.search(queries.float().contiguous().numpy(), k)
    else:
        from sklearn.neighbors import NearestNeighbors  # costs a second; not needed by every import

        # on unit vectors the Euclidean order is the cosine order, and its search is chunked and needs no N x M matrix
        search = NearestNeighbors(n_neighbors=k, algorithm="brute", metric="euclidean").fit(gallery.numpy())
        found = search.kneighbors(queries.numpy(), return_distance=False)
    return torch.from_numpy(found).long()


def _drop_self(found: Tensor) -> Tensor:
    """Remove each query from its own row (N, k + 1), by index; where duplicates crowded it out, drop the last entry."""
    own = found == torch.arange(len(found)).unsqueeze(1)
    own[:, -1] |= ~own.any(1)
    return found[~own].reshape(len(found), -1)


def nearest_neighbors(queries: Tensor, gallery: Tensor | None = None, *, k: int, backend: Backend = "auto") -> Tensor:
    """Return the indices of the k gallery points with the largest cosine similarity to each query.

    Exact search on the CPU. With ``backend="auto"``: faiss (``IndexFlatIP``) if it is installed and the embeddings are
    not float64, because faiss computes in float32; else scikit-learn (brute force), in the dtype given. The order of
    exactly equal similarities is the backend's.

    Args:
        queries: Embeddings, shape (N, D); need not be normalised, no zero row. Half precision is lifted to float32.
        gallery: Embeddings to search, shape (M, D). ``None`` searches the queries themselves, leaving each query out of
            its
            own result: by index, so an exact duplicate of a query is still found.
        k: Neighbours per query, 1 <= k <= M (``N - 1`` without a gallery).
        backend: ``"auto"``, ``"faiss"`` or ``"sklearn"``.

    Returns:
        int64 indices into the gallery, shape (N, k), most similar first, on the device of ``queries``.

    Raises:
        InputTypeError: If the embeddings are not floating-point tensors or ``k`` is not an int.
        InputError: If a shape is wrong, an entry is not finite, a row is zero, D disagrees, or ``k`` is too large.
        UnsupportedError: If ``backend="faiss"`` and faiss is not installed.
    """
    searched = check_embeddings("queries", queries)
    leave_one_out = gallery is None
    held = searched if gallery is None else check_embeddings("gallery", gallery)
    if held.shape[1] != searched.shape[1]:
        raise InputError(expected("gallery", f"D = {searched.shape[1]}, that of queries", held.shape[1]))
    available = len(held) - leave_one_out
    k = check_count("k", k, 1, available, f"There are {available} gallery points per query.")
    chosen = _choose(backend, searched.dtype == torch.float64)
    dtype = torch.float64 if searched.dtype == torch.float64 else torch.float32
    # the largest entry goes first, so that the squared norm neither overflows nor underflows
    units = [
        torch.nn.functional.normalize(x / x.abs().amax(1, keepdim=True), dim=1)
        for x in (e.to("cpu", dtype) for e in ((searched,) if leave_one_out else (searched, held)))
    ]
    found = _search(units[0], units[-1], k + leave_one_out, chosen)
    return (_drop_self(found) if leave_one_out else found).to(searched.device)
