"""Galleries in another search engine: an index of FAISS, a table of LanceDB, or an object of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.metrics._checks import check_embeddings

Ids = Tensor | NDArray[Any]
"""Identifiers (N, k): an int64 tensor of numbers, or an array of strings."""

_QUERIES = 64
"""Queries of one call of LanceDB, which makes a plan for each."""

_LARGEST = 1.1
"""Cosines of unit vectors, also of those that an index has compressed, are smaller."""


class Index(Protocol):
    """An object that searches unit vectors, such as ``la(x).mu``, by cosine.

    The adapters for FAISS and LanceDB have this one method; an object of your own needs no more.
    """

    def search(self, vectors: Tensor, k: int) -> tuple[Tensor, Ids]:
        """Find the k nearest of the stored vectors.

        Args:
            vectors: Queries, shape (N, D).
            k: Number of hits for each query.

        Returns:
            Cosine distances ``1 - cosine``, nearest first, and the identifiers of the hits, both of shape (N, k).
        """


class FaissIndex:
    """Searches an index of FAISS (``pip install faiss-cpu``) that holds unit vectors.

    The distances come from the index, in float32. The index itself sets the searched part of an approximate index:
    ``index.nprobe = 16``, ``index.hnsw.efSearch = 100``.

    Args:
        index: An index of inner products or of Euclidean distances, to which unit vectors were added.
        ids: Identifiers of the vectors, in the order in which they were added; by default the numbers that the index
            returns.

    Raises:
        InputTypeError: ``index`` is not an index of FAISS.
        InputError: The index has another metric, or the number of identifiers is not the number of vectors.
    """

    def __init__(self, index: Any, ids: Sequence[Any] | Tensor | NDArray[Any] | None = None) -> None:
        if not type(index).__module__.startswith("faiss"):
            raise InputTypeError("index", "an index of FAISS", f"a {type(index).__name__}")
        # faiss.METRIC_INNER_PRODUCT and faiss.METRIC_L2
        if index.metric_type not in (0, 1):
            wanted = "an index of inner products or Euclidean distances"
            raise InputError("index", wanted, f"metric_type {index.metric_type}")
        if ids is not None and type(index).__name__.startswith("IndexIDMap"):
            raise InputError("ids", "None for an index that has identifiers of its own", f"{len(ids)} of them")
        if ids is not None and len(ids) != index.ntotal:
            raise InputError("ids", f"{index.ntotal}, one for each vector of the index", len(ids))
        self.index, self.ids = index, None if ids is None else np.asarray(ids)

    def search(self, vectors: Tensor, k: int) -> tuple[Tensor, Ids]:
        """Find the k nearest of the vectors in the index, see :class:`.Index`.

        Raises:
            InputError: A shape is wrong, the index finds fewer than k vectors, or its vectors are not unit vectors.
        """
        queries = _unit(vectors, self.index.d)
        found, rows = self.index.search(queries.cpu().numpy(), validate.count("k", k))
        if (rows < 0).any():
            hint = "Ask for fewer hits, or search more of an approximate index: nprobe, hnsw.efSearch."
            raise InputError("k", f"at most {(rows >= 0).sum(1).min()}, the hits of the index", k, hint)
        distances = torch.from_numpy(1 - found if self.index.metric_type == 0 else found / 2)
        if float((1 - distances).abs().max()) > _LARGEST:
            hint = "Add la(x).mu, not raw outputs."
            got = f"a cosine of {float(1 - distances.max()):.3g} to {float(1 - distances.min()):.3g}"
            raise InputError("index", "unit vectors in it", got, hint)
        return distances.to(vectors.device), _at(rows if self.ids is None else self.ids[rows], vectors.device)


class LanceIndex:
    """Searches a table of LanceDB (``pip install lancedb``) by cosine.

    Args:
        table: The table, from ``lancedb.connect(folder).open_table(name)``.
        ids: Name of the column with the identifiers.
        vectors: Name of the column with the vectors.
        where: A condition in SQL on the columns; rows that do not meet it are left out before the search.

    Raises:
        InputTypeError: ``table`` is not a table of LanceDB.
        InputError: A column is missing.
    """

    def __init__(self, table: Any, ids: str = "id", vectors: str = "vector", *, where: str | None = None) -> None:
        if not type(table).__module__.startswith("lancedb"):
            raise InputTypeError("table", "a table of LanceDB", f"a {type(table).__name__}")
        for argument, name in (("ids", ids), ("vectors", vectors)):
            validate.choice(argument, name, tuple(table.schema.names))
        self.table, self.ids, self.vectors, self.where = table, ids, vectors, where

    def search(self, vectors: Tensor, k: int) -> tuple[Tensor, Ids]:
        """Find the k nearest of the vectors in the table, see :class:`.Index`.

        Raises:
            InputError: A shape or ``where`` is wrong, or there are fewer than k rows.
        """
        queries = _unit(vectors, self.table.schema.field(self.vectors).type.list_size).cpu().numpy()
        validate.count("k", k)
        distances, ids = [], []
        for start in range(0, len(queries), _QUERIES):
            block = list(queries[start : start + _QUERIES])
            ask = self.table.search(block, vector_column_name=self.vectors).distance_type("cosine").limit(k)
            ask = ask.select([self.ids, "_distance"])
            try:
                found = (ask if self.where is None else ask.where(self.where, prefilter=True)).to_arrow()
            except (ValueError, RuntimeError) as error:
                if self.where is None:
                    raise
                raise InputError("where", "a condition in SQL", f"{self.where!r} ({error})") from None
            if len(found) < k * len(block):
                raise InputError("k", f"at most {len(found) // len(block)}, the hits of the table", k)
            # The result of a single query has no such column.
            if "query_index" in found.column_names:
                found = found.sort_by([("query_index", "ascending"), ("_distance", "ascending")])
            distances.append(found.column("_distance").to_numpy().reshape(-1, k))
            ids.append(found.column(self.ids).to_numpy().reshape(-1, k))
        return torch.from_numpy(np.concatenate(distances)).to(vectors.device), _at(np.concatenate(ids), vectors.device)


def _unit(vectors: Tensor, dim: int) -> Tensor:
    """Normalise queries (N, D) to unit vectors in float32, as both libraries need."""
    points = check_embeddings("vectors", vectors)
    if points.shape[1] != dim:
        raise InputError("vectors", f"D = {dim}, that of the index", f"D = {points.shape[1]}")
    return torch.nn.functional.normalize(points.double(), dim=1).float().contiguous()


def _at(ids: NDArray[Any], device: torch.device) -> Ids:
    return torch.from_numpy(ids).long().to(device) if ids.dtype.kind in "iu" else ids
