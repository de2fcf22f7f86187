"""A corpus in memory, searched by FAISS."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.io.stores.store import Columns, VectorStore

_POINTS_A_LIST = 39
"""Points that FAISS wants for each centre."""

_NEIGHBORS = 32
"""Points of a graph that are looked at for each candidate, about: the default number of links."""


class _File(Header):
    kind: ClassVar[str] = "FaissStore"
    described: ClassVar[str] = "a file that FaissStore.save wrote"
    repaired_by: ClassVar[str] = "Copy it again, or build the store anew."

    index: str
    encoder: str | None = None


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

    Attributes:
        encoder: Digest of the encoder of the embeddings, saved with them; the command line sets and compares it.

    Raises:
        UnsupportedError: faiss is not installed.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "flat": (),
        "hnsw": ("links", "build_effort"),
        "ivf": ("lists",),
    }

    def __init__(self) -> None:
        self._faiss = validate.package("FaissStore", "faiss", "faiss")
        self.encoder: str | None = None
        self._kind = "flat"
        self._index: Any = None
        # The rows of the index, in its order; the vectors are in the index alone.
        self._columns: Columns = {}
        self._ids: set[Any] = set()

    def __len__(self) -> int:
        """Return the number of embeddings."""
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
        if not len(self):
            raise InputError(expected("save", "embeddings in the store", "an empty one", "Call add(...) first."))
        arrays = dict(self._columns)
        if self._has_strings:
            text = json.dumps(arrays["id"].tolist())
            arrays["id"] = np.frombuffer(bytearray(text, "ascii"), dtype=np.uint8)
        if self._kind == "flat":
            arrays["vector"] = self._vectors()
        else:
            arrays["index"] = self._faiss.serialize_index(self._index)
        write_tensors(
            path,
            _File(index=self._kind, encoder=self.encoder),
            {name: torch.from_numpy(array) for name, array in arrays.items()},
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a store that :meth:`save` wrote.

        Nothing in the file is executed. Its checksum guards against damage, not against malice: the structure of an
        approximate index is read by faiss itself, so load such files from people whom you trust.

        Args:
            path: The file.

        Raises:
            InputError: There is no such file, it is damaged, of another version, or something else.
            UnsupportedError: faiss is not installed.
        """
        out = cls()
        header, tensors = read_tensors(path, _File)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        if arrays["id"].dtype == np.uint8:
            arrays["id"] = np.array(json.loads(arrays["id"].tobytes()), dtype=object)
        out._kind, out.encoder = header.index, header.encoder
        if out._kind == "flat":
            out._index = out._build("flat", arrays.pop("vector"))
        else:
            out._index = out._faiss.deserialize_index(arrays.pop("index"))
        out._columns, out._ids = arrays, set(arrays["id"].tolist())
        return out

    @property
    def _has_strings(self) -> bool | None:
        return None if not len(self) else self._columns["id"].dtype == object

    def _find(self, ids: NDArray[Any]) -> list[Any]:
        return [name for name in ids.tolist() if name in self._ids]

    def _append(self, columns: Columns, payload: Mapping[str, object]) -> None:
        if payload:
            hint = "Keep other columns by identifier, or take a LanceStore."
            raise UnsupportedError(expected("payload", "None for a FaissStore", f"columns {list(payload)}", hint))
        vectors = columns.pop("vector")
        self._ids.update(columns["id"].tolist())
        if len(self):
            columns = {name: np.concatenate([self._columns[name], more]) for name, more in columns.items()}
        if self._index is None:
            self._index = self._build("flat", vectors)
        else:
            self._index.add(vectors)
        self._columns = columns

    def _count(self, most: float, where: str | None) -> int:
        if where is not None:
            hint = "max_uncertainty works here; conditions on other columns need a LanceStore."
            raise UnsupportedError(expected("where", "None for a FaissStore", where, hint))
        return int((self._columns["uncertainty"] <= most).sum())

    def _nearest(
        self, queries: NDArray[np.float32], k: int, most: float, where: str | None, effort: int | None
    ) -> Columns:
        passes = self._columns["uncertainty"] <= most
        parameters = self._parameters(k, passes, effort)
        if parameters is None:
            rows = np.full((len(queries), k), -1)
        else:
            # That of faiss.contrib.torch_utils takes no parameters.
            search = getattr(self._index, "search_numpy", self._index.search)
            _, rows = search(queries, k, params=parameters)
        short = (rows < 0).any(1)
        if short.any():
            allowed = np.flatnonzero(passes)
            vectors = self._index.reconstruct_batch(allowed)
            _, found = self._faiss.knn(queries[short], vectors, k, self._faiss.METRIC_INNER_PRODUCT)
            rows[short] = allowed[found]
        hits = {name: values[rows] for name, values in self._columns.items()}
        return {**hits, "vector": self._index.reconstruct_batch(rows.ravel()).reshape(*rows.shape, -1)}

    def _parameters(self, k: int, passes: NDArray[np.bool_], effort: int | None) -> Any:
        """Return what a search is told; ``None`` where comparing all points that pass takes no longer.

        FAISS counts the points that it looks at, whether they pass or not; so the effort grows as fewer pass.
        """
        share = passes.mean()
        selector = None if share == 1 else self._faiss.IDSelectorBitmap(np.packbits(passes, bitorder="little"))
        if self._kind == "flat":
            return self._faiss.SearchParameters(sel=selector)
        if self._kind == "ivf":
            lists = math.ceil((effort or max(1, self._index.nlist // 8)) / share)
            return self._faiss.SearchParametersIVF(sel=selector, nprobe=min(lists, self._index.nlist))
        candidates = math.ceil(max(k, effort or 64) / share)
        if selector is not None and passes.sum() <= _NEIGHBORS * candidates:
            return None
        return self._faiss.SearchParametersHNSW(sel=selector, efSearch=candidates)

    def _remove(self, ids: NDArray[Any]) -> None:
        if self._kind != "flat":
            hint = "Call create_index('flat'), delete, and make the other index again."
            raise UnsupportedError(expected("delete", "a 'flat' index", repr(self._kind), hint))
        self._ids -= set(ids.tolist())
        kept = np.array([name in self._ids for name in self._columns["id"].tolist()], dtype=bool)
        self._index.remove_ids(np.flatnonzero(~kept))
        self._columns = {name: values[kept] for name, values in self._columns.items()}

    def _create_index(self, kind: str, options: dict[str, int]) -> None:
        self._index, self._kind = self._build(kind, self._vectors(), **options), kind

    def _vectors(self) -> NDArray[np.float32]:
        # faiss.contrib.torch_utils, which pytorch-metric-learning imports, makes it a tensor.
        return np.asarray(self._index.reconstruct_n(0, len(self)))

    def _build(self, kind: str, vectors: Any, links: int = 32, build_effort: int = 100, lists: int = 0) -> Any:
        """Return an index of vectors (N, D); 0 lists are those for so many vectors."""
        count, dim = vectors.shape
        if links < 2:
            msg = "FAISS needs two links"  # and crashes with one
            raise ValueError(msg)
        lists = lists or max(1, min(count // _POINTS_A_LIST, round(4 * math.sqrt(count))))
        factory = {"flat": "Flat", "hnsw": f"HNSW{links}", "ivf": f"IVF{lists},Flat"}[kind]
        index = self._faiss.index_factory(dim, factory, self._faiss.METRIC_INNER_PRODUCT)
        if kind == "hnsw":
            index.hnsw.efConstruction = build_effort
        if kind == "ivf":
            index.train(vectors)
            index.set_direct_map_type(self._faiss.DirectMap.Array)
        index.add(vectors)
        return index
