"""The interface that all vector stores share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.io.stores.checks import Ids, check_ids, check_options
from contrastive_curvature.io.stores.embeddings import StoredEmbeddings, read_embeddings
from contrastive_curvature.io.stores.result import SearchResult
from contrastive_curvature.metrics._checks import check_embeddings
from contrastive_curvature.metrics.neighbors import squared_distances

__all__ = ["Corpus", "Found", "Rows", "VectorStore"]

Corpus = EmbeddingDistribution | tuple[Tensor, Tensor, Tensor]
"""A prediction ``la(x)``, or vectors (N, D), concentrations (N,) and uncertainties (N,)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """N embeddings on their way into a store, float32; unit vectors (N, D), ``kappa`` (N,), ``uncertainty`` (N,)."""

    ids: Ids
    vectors: NDArray[np.float32]
    kappa: NDArray[np.float32]
    uncertainty: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Found:
    """Candidates of N queries, at least k: ``vectors`` (N, C, D), all others (N, C); ``size`` embeddings passed."""

    ids: Ids
    vectors: NDArray[np.float32]
    kappa: NDArray[np.float32]
    uncertainty: NDArray[np.float32]
    size: int
    payload: dict[str, NDArray[Any]]


class VectorStore(ABC):
    """A corpus of embeddings, each with an identifier, a concentration and an uncertainty.

    The vectors are mean directions, unit vectors in float32; concentrations and uncertainties are float32. A store
    takes its dimension, and whether identifiers are numbers or strings, from what is added first. It searches by cosine
    and exactly, until :meth:`create_index` makes it approximate.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]]
    """Indices, and the options of each."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of embeddings."""

    @property
    @abstractmethod
    def dim(self) -> int | None:
        """Dimension of the vectors; ``None`` before anything is added."""

    @property
    @abstractmethod
    def index(self) -> str:
        """Kind of the index: ``"flat"`` for exact search, or another of :attr:`kinds`."""

    def add(self, ids: object, embeddings: Corpus, *, payload: Mapping[str, object] | None = None) -> None:
        """Add embeddings; all of them, or none if anything is refused. Call it as often as you like.

        Args:
            ids: Identifier of each, shape (N,): whole numbers or strings, different from each other and from those in
                the store.
            embeddings: A prediction ``la(x)``, or a tuple ``(vectors, kappa, uncertainty)`` of shapes (N, D), (N,) and
                (N,). Vectors of any norm are normalised.
            payload: Further columns, N values each, in stores that keep some.

        Raises:
            InputTypeError: An argument has a wrong type, or identifiers are of another type than those in the store.
            InputError: A shape is wrong, a number is not finite, a concentration or an uncertainty is negative, a
                vector is zero, the dimension is not that of the store, or an identifier is there already.
            UnsupportedError: The store keeps no payload, or its package is not installed.
        """
        given = read_embeddings("embeddings", embeddings)
        names = check_ids(ids, len(given.raw_mean))
        if self.dim is not None and given.raw_mean.shape[1] != self.dim:
            raise InputError(
                expected("embeddings", f"D = {self.dim}, that of the store", f"D = {given.raw_mean.shape[1]}")
            )
        # Rounded once more, because kappa and uncertainty beyond float32 must be refused before anything is written.
        given = StoredEmbeddings(given.raw_mean.float(), given.kappa, given.uncertainty)
        self._append(Rows(names, *(_numpy(t) for t in (given.raw_mean, given.kappa, given.uncertainty))), payload or {})

    def search(
        self,
        queries: Corpus | Tensor,
        k: int = 10,
        *,
        max_uncertainty: float | None = None,
        where: str | None = None,
        effort: int | None = None,
    ) -> SearchResult:
        """Find the k embeddings of largest cosine to each query.

        Args:
            queries: A prediction ``la(x)``, or vectors of any norm, shape (N, D), or a tuple as in :meth:`add`.
            k: Number of hits.
            max_uncertainty: Only embeddings of at most this uncertainty are searched. It is rounded to float32, as the
                stored ones are.
            where: A condition in SQL on further columns, in stores that keep some.
            effort: How much of an approximate index is searched, for more recall at more time; see
                :meth:`create_index`.

        Returns:
            The hits. Some more candidates than k (32) come from the index, which computes in
            float32, and are ranked by differences in float64. If an approximate index finds fewer that pass the filter,
            these queries are searched again exactly.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: A shape or a number is wrong, the dimension is not that of the store, or fewer than k embeddings
                are in the store or pass the filter.
            UnsupportedError: The store has no ``where``, or an exact index is given an ``effort``.
        """
        asked = read_embeddings("queries", queries) if isinstance(queries, tuple) else queries
        points = check_embeddings("queries", asked.mu if isinstance(asked, EmbeddingDistribution) else asked)
        if self.dim is None or not len(self):
            raise InputError(expected("search", "embeddings in the store", "an empty one", "Call add(...) first."))
        if points.shape[1] != self.dim:
            raise InputError(expected("queries", f"D = {self.dim}, that of the store", f"D = {points.shape[1]}"))
        self._check_enough(validate.count("k", k), len(self), "")
        most = (
            None if max_uncertainty is None else float(np.float32(validate.number("max_uncertainty", max_uncertainty)))
        )
        if effort is not None and self.index == "flat":
            hint = "An exact search looks at everything; create_index(...) makes it approximate."
            raise UnsupportedError(expected("effort", "None for a 'flat' index", effort, hint))
        if effort is not None:
            validate.count("effort", effort)
        unit = torch.nn.functional.normalize(points.double(), dim=1)
        found = self._nearest(_numpy(unit.float()), k, most, where, effort)
        return _result(found, unit, k, asked if isinstance(asked, EmbeddingDistribution) else points)

    def delete(self, ids: object) -> None:
        """Remove embeddings; all of them, or none if anything is refused.

        Args:
            ids: Their identifiers.

        Raises:
            InputError: An identifier is not in the store.
            UnsupportedError: The index cannot forget.
        """
        names = check_ids(ids)
        if len(names):
            self._remove(names)

    def create_index(self, kind: str, **options: int) -> None:
        """Make an index of what is in the store, in place of the present one. See the store for what each kind is.

        Args:
            kind: One of :attr:`kinds`; ``"flat"`` goes back to exact search.
            options: Its options, positive whole numbers.

        Raises:
            InputError: The kind or an option is unknown, or the store has too few embeddings.
        """
        validate.choice("kind", kind, tuple(self.kinds))
        check_options(kind, options, self.kinds[kind])
        if not len(self):
            raise InputError(expected("create_index", "embeddings in the store", "an empty one", "Add them first."))
        self._create_index(kind, options)

    @staticmethod
    def _check_enough(k: int, size: int, of_filter: str) -> None:
        """Refuse more hits than there are embeddings.

        Raises:
            InputError: There are fewer than ``k``.
        """
        if size < k:
            hint = "Ask for fewer" + (", or let more pass the filter." if of_filter else ".")
            raise InputError(expected("k", f"at most {size}, the number of embeddings{of_filter}", k, hint))

    @abstractmethod
    def _append(self, rows: Rows, payload: Mapping[str, object]) -> None: ...

    @abstractmethod
    def _nearest(
        self, queries: NDArray[np.float32], k: int, most: float | None, where: str | None, effort: int | None
    ) -> Found: ...

    @abstractmethod
    def _remove(self, ids: Ids) -> None: ...

    @abstractmethod
    def _create_index(self, kind: str, options: dict[str, int]) -> None: ...


def _numpy(value: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(value.detach().cpu().float().numpy())


def _result(found: Found, unit: Tensor, k: int, queries: EmbeddingDistribution | Tensor) -> SearchResult:
    """The k best hits, ranked again by differences: an index may have compressed the vectors, and works in float32."""
    vectors = torch.from_numpy(found.vectors).to(unit.device)
    rows = torch.arange(vectors.shape[:2].numel(), device=unit.device).view(vectors.shape[:2])
    apart, order = squared_distances(unit, vectors.flatten(0, 1), rows).sort(dim=1, stable=True)
    order = order[:, :k]
    cpu = order.cpu().numpy()

    def sort(values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(np.take_along_axis(values, cpu, 1)).to(unit.device)

    ids: Any = np.take_along_axis(found.ids, cpu, 1)
    return SearchResult(
        ids if ids.dtype == object else torch.from_numpy(ids).to(unit.device),
        (1 - apart[:, :k] / 2).clamp(-1, 1).float(),
        sort(found.kappa),
        sort(found.uncertainty),
        vectors.gather(1, order.unsqueeze(2).expand(-1, -1, vectors.shape[2])),
        queries,
        found.size,
        {name: np.take_along_axis(values, cpu, 1) for name, values in found.payload.items()},
    )
