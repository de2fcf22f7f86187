"""Nearest neighbours by cosine similarity or by Euclidean distance, with faiss or scikit-learn."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.metrics._checks import check_embeddings, check_k

Backend = Literal["auto", "faiss", "sklearn"]
Metric = Literal["cosine", "euclidean"]

MORE = 32
"""Candidates of a search in float32 that are ranked again, beyond those that are asked for."""

_ENTRIES = 2**24
"""Numbers in one block of differences: 128 MiB in float64."""


def _choose_backend(backend: str, double: bool) -> str:
    validate.choice("backend", backend, ("auto", "faiss", "sklearn"))
    installed = importlib.util.find_spec("faiss") is not None
    if backend == "faiss" and not installed:
        raise UnsupportedError("backend", "an installed package", "'faiss'", "pip install faiss-cpu.")
    if backend == "auto":
        return "faiss" if installed and not double else "sklearn"
    return backend


def squared_distances(queries: Tensor, gallery: Tensor, rows: Tensor) -> Tensor:
    """Return squared distances of queries (N, D) to rows (N, C) of a gallery (M, D), in the queries' dtype.

    They are computed from differences. For unit vectors they are ``2 (1 - cosine)``; for close points, an inner product
    in float32 would lose the digits of this difference.
    """
    step = max(1, _ENTRIES // (rows.shape[1] * gallery.shape[1]))
    blocks = zip(queries.split(step), rows.split(step), strict=True)
    return torch.cat([(gallery[near].to(block) - block.unsqueeze(1)).square().sum(2) for block, near in blocks])


def _search(queries: Tensor, gallery: Tensor, k: int, backend: str) -> Tensor:
    """Return indices (N, k) by distance, nearest first; both are float64 on the CPU, around the mean of the gallery."""
    if backend == "sklearn":
        from sklearn.neighbors import NearestNeighbors  # imported at first use, because it takes a second

        # scikit-learn's search needs no N x M matrix.
        search = NearestNeighbors(n_neighbors=k, algorithm="brute", metric="euclidean").fit(gallery.numpy())
        return torch.from_numpy(search.kneighbors(queries.numpy(), return_distance=False)).long()
    index = importlib.import_module("faiss").IndexFlatL2(gallery.shape[1])
    index.add(gallery.float().contiguous().numpy())
    far, rows = index.search(queries.float().contiguous().numpy(), min(k + MORE, len(gallery)))
    candidates = torch.from_numpy(rows).long()
    apart, order = squared_distances(queries, gallery, candidates).sort(dim=1, stable=True)
    neighbors = candidates.gather(1, order[:, :k])
    # Points that faiss left out are at least as far as its last candidate, up to float32 rounding of |x|^2 + |y|^2 - 2
    # <x, y>.
    size = queries.square().sum(1) + gallery.square().sum(1).max()
    rounding = (2 + gallery.shape[1] ** 0.5) * 2**-22 * size
    unsure = apart[:, k - 1] > torch.from_numpy(far[:, -1]) - rounding
    if rows.shape[1] < len(gallery) and bool(unsure.any()):
        neighbors[unsure] = _search(queries[unsure], gallery, k, "sklearn")
    return neighbors


def _unit(embeddings: list[Tensor]) -> list[Tensor]:
    # Divide by the largest entry first, so that the squared norm neither overflows nor underflows.
    return [torch.nn.functional.normalize(x / x.abs().amax(1, keepdim=True), dim=1) for x in embeddings]


def _centred(embeddings: list[Tensor]) -> list[Tensor]:
    # After centring and scaling, |x|^2 + |y|^2 - 2 <x, y> does not overflow and cancels as little as possible.
    gallery = embeddings[-1]
    scale = max(float(x.abs().max()) for x in embeddings) or 1.0
    centre = (gallery / scale).mean(0)
    return [x / scale - centre for x in embeddings]


def _drop_self(neighbors: Tensor) -> Tensor:
    """Remove each query from its own row (N, k + 1); if duplicates have displaced it, drop the last neighbour."""
    own = neighbors == torch.arange(len(neighbors), device="cpu").unsqueeze(1)
    own[:, -1] |= ~own.any(1)
    return neighbors[~own].reshape(len(neighbors), -1)


def nearest_neighbors(
    queries: Tensor,
    gallery: Tensor | None = None,
    *,
    k: int,
    backend: Backend = "auto",
    metric: Metric = "cosine",
) -> Tensor:
    """Return the indices of the k gallery points that are nearest to each query.

    The search is exact and on the CPU. ``backend="auto"`` is faiss (``IndexFlatL2``) if it is installed and the
    embeddings are not float64, else scikit-learn (brute force). faiss computes in float32, so more than k candidates
    are ranked again in float64; if a result is still uncertain, scikit-learn searches. Only the order at equal
    distances depends on the backend.

    Args:
        queries: Embeddings of any norm, shape (N, D); without zero rows for the cosine.
        gallery: Embeddings to search, shape (M, D). ``None`` searches the queries, and excludes each query by its index
            (an exact duplicate stays in the result).
        k: Number of neighbours per query, 1 <= k <= M (``N - 1`` without a gallery).
        backend: ``"auto"``, ``"faiss"`` or ``"sklearn"``.
        metric: ``"cosine"``: largest cosine similarity. ``"euclidean"``: smallest distance of the embeddings without
            normalisation. Its relative error grows as ``|x|^2 / |x - y|^2``, with x and y relative to the mean of the
            gallery.

    Returns:
        int64 indices into the gallery, shape (N, k), nearest first, on the device of ``queries``.

    Raises:
        UnsupportedError: If ``backend="faiss"`` and faiss is not installed.
    """
    validate.choice("metric", metric, ("cosine", "euclidean"))
    zeros = metric == "euclidean"
    points = check_embeddings("queries", queries, zeros)
    leave_one_out = gallery is None
    searched_gallery = points if gallery is None else check_embeddings("gallery", gallery, zeros)
    if searched_gallery.shape[1] != points.shape[1]:
        raise InputError("gallery", f"D = {points.shape[1]}, that of queries", searched_gallery.shape[1])
    available = len(searched_gallery) - leave_one_out
    check_k(k, available, f"There are {available} gallery points per query.")
    chosen_backend = _choose_backend(backend, points.dtype == torch.float64)
    wide = [e.detach().to("cpu", torch.float64) for e in ((points,) if leave_one_out else (points, searched_gallery))]
    # For unit vectors the Euclidean order is the cosine order.
    prepared = _centred(_unit(wide) if metric == "cosine" else wide)
    neighbors = _search(prepared[0], prepared[-1], k + leave_one_out, chosen_backend)
    return (_drop_self(neighbors) if leave_one_out else neighbors).to(points.device)
