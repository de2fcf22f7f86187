"""What the vector stores share: their interface, the checks of arguments, and the order of hits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.stores.embeddings import StoredEmbeddings
from contrastive_curvature.io.stores.result import SearchResult
from contrastive_curvature.metrics._checks import check_embeddings
from contrastive_curvature.metrics.neighbors import MORE, squared_distances

Corpus = EmbeddingDistribution | tuple[Tensor, Tensor, Tensor]
"""A prediction ``la(x)``, or vectors (N, D), concentrations (N,) and uncertainties (N,)."""

Columns = dict[str, NDArray[Any]]
"""Embeddings on their way into a store or out of it: ``id``, ``vector``, ``kappa``, ``uncertainty``, and payload.

The first axes are (N,) on their way in, and (N, C) for C candidates of N queries; vectors have one axis more.
"""


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
        """Return the number of embeddings."""

    @property
    @abstractmethod
    def dim(self) -> int | None:
        """Dimension of the vectors; ``None`` before anything is added."""

    @property
    @abstractmethod
    def index(self) -> str:
        """Kind of the index: ``"flat"`` for exact search, or another of :attr:`kinds`."""

    def __repr__(self) -> str:
        """Return the number and the dimension of the embeddings, and the index."""
        return f"{type(self).__name__}({len(self)} embeddings in {self.dim} dimensions, {self.index})"

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
            UnsupportedError: The store keeps no payload.
        """
        given = _read("embeddings", embeddings)
        # Once more in float32, because numbers that it cannot hold are refused before anything is written.
        given = StoredEmbeddings(given.mu.float(), given.kappa, given.uncertainty)
        names = _read_ids(ids)
        if len(names) != len(given):
            raise InputError(expected("ids", f"{len(given)}, one for each embedding", len(names)))
        self._check_dim("embeddings", given.mu)
        if there := self._known(names):
            hint = "Delete them first to replace them."
            raise InputError(expected("ids", "identifiers that are not in the store yet", f"{there[:5]}", hint))
        numbers = {"vector": given.mu, "kappa": given.kappa, "uncertainty": given.uncertainty}
        self._append({"id": names, **{name: _numpy(values) for name, values in numbers.items()}}, payload or {})

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
            The hits. Some more candidates than k (32) come from the index, which computes in float32, and are ranked by
            differences in float64. If an approximate index finds fewer that pass the filter, these queries are searched
            again exactly.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: A shape or a number is wrong, the dimension is not that of the store, or fewer than k embeddings
                are in the store or pass the filter.
            UnsupportedError: The store has no ``where``, or an exact index is given an ``effort``.
        """
        asked = _read("queries", queries) if isinstance(queries, tuple) else queries
        points = check_embeddings("queries", asked.mu if isinstance(asked, EmbeddingDistribution) else asked)
        if not len(self):
            raise InputError(expected("search", "embeddings in the store", "an empty one", "Call add(...) first."))
        self._check_dim("queries", points)
        validate.count("k", k)
        most = np.inf if max_uncertainty is None else validate.number("max_uncertainty", max_uncertainty)
        most = float(np.float32(most))
        if effort is not None and self.index == "flat":
            hint = "An exact search looks at everything; create_index(...) makes it approximate."
            raise UnsupportedError(expected("effort", "None for a 'flat' index", effort, hint))
        if effort is not None:
            validate.count("effort", effort)
        size = self._count(most, where)
        if size < k:
            filtered = max_uncertainty is not None or where is not None
            wanted = f"at most {size}, the number of embeddings" + (" that pass the filter" if filtered else "")
            raise InputError(expected("k", wanted, k, "Ask for fewer hits."))
        unit = torch.nn.functional.normalize(points.double(), dim=1)
        candidates = self._nearest(_numpy(unit.float()), min(k + MORE, size), most, where, effort)
        return _best(candidates, unit, k, asked if isinstance(asked, EmbeddingDistribution) else points, size)

    def delete(self, ids: object) -> None:
        """Remove embeddings; all of them, or none if anything is refused.

        Args:
            ids: Their identifiers.

        Raises:
            InputError: An identifier is not in the store.
            UnsupportedError: The index cannot forget.
        """
        names = _read_ids(ids)
        if not len(names):
            return
        known = set(self._known(names))
        if missing := [name for name in names.tolist() if name not in known]:
            raise InputError(expected("ids", "identifiers that are in the store", f"{missing[:5]}"))
        self._remove(names)

    def create_index(self, kind: str, **options: int) -> None:
        """Make an index of what is in the store, in place of the present one. See the store for what each kind is.

        Args:
            kind: One of :attr:`kinds`; ``"flat"`` goes back to exact search.
            options: Its options, positive whole numbers.

        Raises:
            InputError: The kind or an option is unknown or does not fit what is in the store, which is empty or small.
        """
        validate.choice("kind", kind, tuple(self.kinds))
        for name, value in options.items():
            if name not in self.kinds[kind]:
                known = ", ".join(self.kinds[kind]) or "no options"
                raise InputError(expected("create_index", f"{kind!r} with {known}", name))
            validate.count(name, value)
        if not len(self):
            raise InputError(expected("create_index", "embeddings in the store", "an empty one", "Add them first."))
        try:
            self._create_index(kind, options)
        except (ValueError, RuntimeError) as error:
            wanted = f"options of {kind!r} for {len(self)} embeddings in {self.dim} dimensions"
            raise InputError(expected("create_index", wanted, f"{options} ({error})")) from None

    def _check_dim(self, argument: str, vectors: Tensor) -> None:
        dim = vectors.shape[1]
        if self.dim not in (None, dim):
            raise InputError(expected(argument, f"D = {self.dim}, that of the store", f"D = {dim}"))

    def _known(self, ids: NDArray[Any]) -> list[Any]:
        """Return those of some identifiers that are in the store; refuse identifiers of another type."""
        if self._has_strings is None:
            return []
        if self._has_strings != (ids.dtype == object):
            kind = "strings" if self._has_strings else "whole numbers"
            raise InputTypeError(expected("ids", f"{kind}, as those in the store", f"{ids[0]!r}"))
        return self._find(ids)

    @property
    @abstractmethod
    def _has_strings(self) -> bool | None:
        """Whether identifiers are strings; ``None`` before anything is added."""

    @abstractmethod
    def _find(self, ids: NDArray[Any]) -> list[Any]:
        """Return those of some identifiers that are in the store."""

    @abstractmethod
    def _append(self, columns: Columns, payload: Mapping[str, object]) -> None:
        """Add embeddings that are not in the store yet."""

    @abstractmethod
    def _count(self, most: float, where: str | None) -> int:
        """Return the number of embeddings that pass a filter; ``most`` is infinite for none."""

    @abstractmethod
    def _nearest(
        self, queries: NDArray[np.float32], k: int, most: float, where: str | None, effort: int | None
    ) -> Columns:
        """Return the k nearest that pass a filter, for each of the unit vectors (N, D)."""

    @abstractmethod
    def _remove(self, ids: NDArray[Any]) -> None:
        """Remove embeddings that are in the store."""

    @abstractmethod
    def _create_index(self, kind: str, options: dict[str, int]) -> None:
        """Make an index."""


def _read(argument: str, value: object) -> StoredEmbeddings:
    """Return a prediction, or a tuple of vectors, concentrations and uncertainties, as a store keeps it."""
    if isinstance(value, EmbeddingDistribution):
        return StoredEmbeddings.of(value)
    if isinstance(value, tuple) and len(value) == 3:
        return StoredEmbeddings(*value)
    wanted = "an EmbeddingDistribution, such as la(x), or a tuple (vectors, kappa, uncertainty)"
    raise InputTypeError(expected(argument, wanted, f"a {type(value).__name__}"))


def _read_ids(ids: object) -> NDArray[Any]:
    """Return identifiers, which must all be different, as an int64 array or an object array of strings."""
    wanted = "a tensor, array or list of N whole numbers, or of N strings"
    # A set has no order.
    if isinstance(ids, str) or not isinstance(ids, Sequence | Tensor | np.ndarray):
        raise InputTypeError(expected("ids", wanted, f"a {type(ids).__name__}"))
    values = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)
    types = {type(value) for value in values}
    strings = all(issubclass(kind, str) for kind in types)
    if not strings and not all(issubclass(kind, int | np.integer) and kind is not bool for kind in types):
        shown = "values of type " + ", ".join(sorted(kind.__name__ for kind in types))
        raise InputTypeError(expected("ids", wanted, shown))
    if twice := [name for name, times in Counter(values).items() if times > 1]:
        raise InputError(expected("ids", "identifiers that are all different", f"{twice[:5]} more than once"))
    try:
        return np.array(values, dtype=object if strings else np.int64)
    except OverflowError:
        raise InputError(expected("ids", "numbers that int64 can hold", max(values, key=abs))) from None


def _numpy(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().contiguous().numpy()


def _best(
    candidates: Columns, unit: Tensor, k: int, queries: EmbeddingDistribution | Tensor, size: int
) -> SearchResult:
    """Return the k best hits, ranked again: an index may have compressed the vectors, and works in float32."""
    vectors = torch.tensor(candidates["vector"], device=unit.device)
    places = torch.arange(vectors.shape[:2].numel(), device=unit.device).view(vectors.shape[:2])
    apart, order = squared_distances(unit, vectors.flatten(0, 1), places).sort(dim=1, stable=True)
    apart, order = apart[:, :k], order[:, :k]
    rows = order.cpu().numpy()
    hits = {name: np.take_along_axis(values, rows, 1) for name, values in candidates.items() if name != "vector"}
    ids, kappa, uncertainty = hits.pop("id"), hits.pop("kappa"), hits.pop("uncertainty")
    return SearchResult(
        ids if ids.dtype == object else torch.from_numpy(ids).to(unit.device),
        (1 - apart / 2).clamp(-1, 1).float(),
        torch.from_numpy(kappa).to(unit.device),
        torch.from_numpy(uncertainty).to(unit.device),
        vectors.gather(1, order.unsqueeze(2).expand(-1, -1, vectors.shape[2])),
        queries,
        size,
        hits,
    )
