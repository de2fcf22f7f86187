"""A corpus in memory, searched by FAISS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.stores.checks import Ids, need
from contrastive_curvature.io.stores.faiss_file import read, write
from contrastive_curvature.io.stores.faiss_index import KINDS, all_vectors, build, needed_effort, parameters, restore
from contrastive_curvature.io.stores.store import Found, Rows, VectorStore
from contrastive_curvature.metrics.neighbors import MORE

__all__ = ["FaissStore"]


class FaissStore(VectorStore):
    """A corpus in memory, searched by FAISS on the CPU (``pip install faiss-cpu``).

    It takes 4 D + 100 bytes for an embedding. Identifiers are numbers or strings. There is no further payload and no
    ``where``: keep other columns elsewhere, by identifier, or take a :class:`.LanceStore`.

    Indices of :meth:`create_index`; what is added later goes into the same index:

    - ``"flat"``: exact, the default.
    - ``"hnsw"``: a graph of neighbours. ``links`` (32) of each point, ``build_effort`` (100) candidates while it is
      built. ``effort`` of a search: candidates (64, and at least k + 32).
    - ``"ivf"``: lists of points around centres. ``lists`` (``4 sqrt(N)``, at most N / 39). ``effort`` of a search:
      lists that are looked through (an eighth).

    Where a filter lets few pass, the effort is raised by as much, or all that pass are compared if that is faster.
    :meth:`delete` works on a ``"flat"`` index only.

    Raises:
        UnsupportedError: faiss is not installed.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = KINDS

    def __init__(self) -> None:
        self._faiss: ModuleType = need("faiss", "FaissStore", "faiss")
        self._kind = "flat"
        self._index: Any = None
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self._kappa = self._uncertainty = np.empty(0, dtype=np.float32)
        self._later: list[Rows] = []
        self._known: set[Any] = set()

    def __len__(self) -> int:
        """Number of embeddings."""
        return 0 if self._index is None else int(self._index.ntotal)

    @property
    def dim(self) -> int | None:
        """Dimension of the vectors; ``None`` before anything is added."""
        return None if self._index is None else int(self._index.d)

    @property
    def index(self) -> str:
        """Kind of the index."""
        return self._kind

    def save(self, path: Path | str) -> None:
        """Write the store into one safetensors file, which is replaced as a whole or not at all.

        Args:
            path: The file.

        Raises:
            InputError: The store is empty, the folder does not exist, or the path is no file.
        """
        if self._index is None:
            raise InputError(expected("save", "embeddings in the store", "an empty one", "Call add(...) first."))
        self._join()
        compressed = None if self._kind == "flat" else self._faiss.serialize_index(self._index)
        vectors = all_vectors(self._index) if compressed is None else None
        write(path, self._kind, Rows(self._ids, vectors, self._kappa, self._uncertainty), compressed)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a store that :meth:`save` wrote.

        Nothing in the file is executed. Its checksum guards against damage, not against malice: the structure of an
        approximate index is read by faiss itself, so load such files from people whom you trust.

        Args:
            path: The file.

        Raises:
            InputError: There is no such file, it is damaged, or it is something else.
            UnsupportedError: A newer version wrote it, or faiss is not installed.
        """
        out = cls()
        out._kind, rows, compressed = read(path)
        out._index = restore(out._faiss, out._kind, rows, compressed, path)
        out._ids, out._kappa, out._uncertainty = rows.ids, rows.kappa, rows.uncertainty
        out._known = set(rows.ids.tolist())
        return out

    def __repr__(self) -> str:
        """Number and dimension of the embeddings, and the index."""
        return f"FaissStore({len(self)} embeddings in {self.dim} dimensions, {self._kind})"

    def _append(self, rows: Rows, payload: Mapping[str, object]) -> None:
        if payload:
            hint = "Keep other columns by identifier, or take a LanceStore."
            raise UnsupportedError(expected("payload", "None for a FaissStore", f"columns {list(payload)}", hint))
        self._check_kind_of(rows.ids)
        names = rows.ids.tolist()
        if there := [name for name in names if name in self._known]:
            hint = "Delete them first to replace them."
            raise InputError(expected("ids", "identifiers that are not in the store yet", f"{there[:5]}", hint))
        if self._index is None:
            self._index = build(self._faiss, "flat", rows.vectors, {})
        else:
            self._index.add(rows.vectors)
        self._later.append(Rows(rows.ids, np.empty(0, dtype=np.float32), rows.kappa, rows.uncertainty))
        self._known.update(names)

    def _nearest(
        self, queries: NDArray[np.float32], k: int, most: float | None, where: str | None, effort: int | None
    ) -> Found:
        if where is not None:
            hint = "max_uncertainty works here; conditions on other columns need a LanceStore."
            raise UnsupportedError(expected("where", "None for a FaissStore", where, hint))
        self._join()
        size, selector = len(self), None
        if most is not None:
            passes = self._uncertainty <= most
            size = int(passes.sum())
            self._check_enough(k, size, f" of uncertainty <= {most:g}")
            selector = self._faiss.IDSelectorBitmap(np.packbits(passes, bitorder="little"))
        k = min(k + MORE, size)
        needed = needed_effort(self._index, self._kind, k, effort, size / len(self))
        if needed is None and self._kind != "flat":
            rows = self._exact(queries, k, most)
        else:
            told = parameters(self._faiss, self._kind, needed, selector)
            # faiss.contrib.torch_utils, which pytorch-metric-learning imports, has a search without parameters.
            search = getattr(self._index, "search_numpy", self._index.search)
            _, rows = search(queries, k, params=told)
            short = np.flatnonzero((rows < 0).any(1))
            if len(short):
                rows[short] = self._exact(queries[short], k, most)
        vectors = self._index.reconstruct_batch(rows.ravel()).reshape(*rows.shape, -1)
        return Found(self._ids[rows], vectors, self._kappa[rows], self._uncertainty[rows], size, {})

    def _exact(self, queries: NDArray[np.float32], k: int, most: float | None) -> NDArray[np.int64]:
        allowed = np.arange(len(self)) if most is None else np.flatnonzero(self._uncertainty <= most)
        flat = build(self._faiss, "flat", self._index.reconstruct_batch(allowed), {})
        return allowed[flat.search(queries, k)[1]]

    def _remove(self, ids: Ids) -> None:
        self._check_kind_of(ids)
        if missing := [name for name in ids.tolist() if name not in self._known]:
            raise InputError(expected("ids", "identifiers that are in the store", f"{missing[:5]}"))
        if self._kind != "flat":
            hint = "Call create_index('flat'), delete, and make the other index again."
            raise UnsupportedError(expected("delete", "a 'flat' index", repr(self._kind), hint))
        self._join()
        gone = set(ids.tolist())
        drop = np.fromiter((name in gone for name in self._ids.tolist()), dtype=bool, count=len(self._ids))
        self._index.remove_ids(self._faiss.IDSelectorBitmap(np.packbits(drop, bitorder="little")))
        self._ids, self._kappa, self._uncertainty = self._ids[~drop], self._kappa[~drop], self._uncertainty[~drop]
        self._known -= gone

    def _create_index(self, kind: str, options: dict[str, int]) -> None:
        self._index, self._kind = build(self._faiss, kind, all_vectors(self._index), options), kind

    def _check_kind_of(self, ids: Ids) -> None:
        self._join()
        if len(self._ids) and ids.dtype != self._ids.dtype:
            kind = "strings" if self._ids.dtype == object else "whole numbers"
            raise InputTypeError(expected("ids", f"{kind}, as those in the store", f"{ids[0]!r}"))

    def _join(self) -> None:
        """Join what was added since the last time: all at once, because after every chunk would be quadratic."""
        if self._later:
            if len(self._ids):
                self._later.insert(0, Rows(self._ids, np.empty(0, np.float32), self._kappa, self._uncertainty))
            self._ids = np.concatenate([part.ids for part in self._later])
            self._kappa = np.concatenate([part.kappa for part in self._later])
            self._uncertainty = np.concatenate([part.uncertainty for part in self._later])
            self._later = []
