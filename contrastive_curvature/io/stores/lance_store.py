"""A corpus on disk, searched by LanceDB."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.stores.store import Columns, VectorStore

_OWN = ("id", "vector", "kappa", "uncertainty")
"""Columns of every table; further ones are payload."""

_HEADER = b"contrastive_curvature"
"""Where the schema of a table has its header."""

_INDEX = "vector_idx"

_QUERIES = 64
"""Queries of one call of LanceDB, which makes a plan for each."""

_REFINE = 10
"""Hits are chosen by their true cosines from so many times as many candidates of a compressed index."""

_POINTS_A_PARTITION = 256


class _Table(Header):
    kind: ClassVar[str] = "LanceStore"
    described: ClassVar[str] = "a table that LanceStore made"
    repaired_by: ClassVar[str] = "Some of its files are damaged or missing; copy it again, or build the store anew."


class LanceStore(VectorStore):
    """A corpus on disk, searched by LanceDB (``pip install lancedb pyarrow``); it may be larger than memory.

    It is the folder of one Lance table, with the columns ``id``, ``vector``, ``kappa``, ``uncertainty`` and those of
    the payload. Every change is complete or does not happen, also if the process is killed. One process writes at a
    time; a store that is open elsewhere shows the version that it opened. It refuses to work after a fork.

    Indices of :meth:`create_index`:

    - ``"flat"``: exact, the default: the whole table is read.
    - ``"ivf_pq"``: lists of compressed vectors. ``partitions`` (``sqrt(N)``, at most N / 256), ``sub_vectors`` (a
      divisor of D, by default the largest up to D / 4; a byte for each). ``effort`` of a search: lists that are looked
      through (20).
    - ``"ivf_hnsw_sq"``: lists, a graph of neighbours in each, a byte for each number. ``partitions`` (1), ``links``
      (20), ``build_effort`` (300). ``effort`` of a search: candidates in the graph (LanceDB's choice).

    Below 256 embeddings LanceDB refuses ``"ivf_pq"`` or goes on to search exactly. What is added later is searched
    exactly, in addition, until :meth:`optimize`.

    Args:
        path: A new folder, named ``NAME.lance``. :meth:`open` opens one that exists.

    Attributes:
        path: The folder.

    Raises:
        InputError: The folder exists, its parent does not, or the name is another.
        UnsupportedError: lancedb or pyarrow is not installed, or the process was forked from one that used LanceDB.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "flat": (),
        "ivf_pq": ("partitions", "sub_vectors"),
        "ivf_hnsw_sq": ("partitions", "links", "build_effort"),
    }

    def __init__(self, path: Path | str) -> None:
        self._connect(path)
        if self.path.exists():
            hint = "LanceStore.open(path) opens it."
            raise InputError(expected(str(path), "a folder that does not exist yet", "one that does", hint))

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a store that exists.

        Args:
            path: Its folder.

        Raises:
            InputError: There is none, it is damaged, of another version, or the folder holds something else.
            UnsupportedError: lancedb is not installed.
        """
        out = cls.__new__(cls)
        out._connect(path)
        if not out.path.is_dir():
            _Table.refuse(str(path), "no such folder")
        with out._readable():
            out._opened = out._database.open_table(out.path.stem)
        _Table.loads((out._opened.schema.metadata or {}).get(_HEADER, "{}"), str(path))
        return out

    def _connect(self, path: Path | str) -> None:
        self._arrow = validate.package("LanceStore", "pyarrow", "lance")
        self._lancedb = validate.package("LanceStore", "lancedb", "lance")
        self.path = Path(path)
        self._opened: Any = None
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.lance", self.path.name):
            wanted = "a folder NAME.lance, the name of letters, digits, '_', '-' and '.'"
            raise InputError(expected("path", wanted, repr(str(path))))
        # LanceDB would make the parent, too, even to look whether there is a table.
        if not self.path.parent.is_dir():
            raise InputError(expected(str(path), "a folder whose parent exists", f"no folder {self.path.parent}"))
        _check_process()
        self._database = self._lancedb.connect(str(self.path.parent))

    @property
    def _table(self) -> Any:
        """The table, or ``None`` before anything is added."""
        _check_process()
        return self._opened

    def __len__(self) -> int:
        """Return the number of embeddings."""
        return 0 if self._table is None else int(self._table.count_rows())

    @property
    def dim(self) -> int | None:
        """Dimension of the vectors; ``None`` before anything is added."""
        return None if self._table is None else int(self._table.schema.field("vector").type.list_size)

    @property
    def index(self) -> str:
        """Kind of the index."""
        indices = [] if self._table is None else self._table.list_indices()
        kinds = [index.index_type for index in indices if index.name == _INDEX]
        return {"IvfPq": "ivf_pq", "IvfHnswSq": "ivf_hnsw_sq"}.get(kinds[0], kinds[0]) if kinds else "flat"

    def optimize(self) -> None:
        """Join the files of many small additions, and bring what was added since :meth:`create_index` into the index.

        Older versions of the table stay for a week, for other processes that read them.
        """
        if self._table is not None:
            self._table.optimize()

    @property
    def _has_strings(self) -> bool | None:
        return None if self._table is None else self._table.schema.field("id").type == self._arrow.string()

    def _find(self, ids: NDArray[Any]) -> list[Any]:
        with self._readable():
            return self._table.search().where(_one_of(ids)).select(["id"]).to_arrow().column("id").to_pylist()

    def _append(self, columns: Columns, payload: Mapping[str, object]) -> None:
        count, dim = columns["vector"].shape
        arrays = {name: self._arrow.array(values.ravel()) for name, values in columns.items()}
        arrays["vector"] = self._arrow.FixedSizeListArray.from_arrays(arrays["vector"], dim)
        arrays |= {name: self._column(name, values, count) for name, values in payload.items()}
        table = self._arrow.table(arrays)
        if self._table is None:
            header = {_HEADER: _Table().dumps()}
            self._opened = self._database.create_table(self.path.stem, table.replace_schema_metadata(header))
            return
        names = self._table.schema.names
        # LanceDB would fill missing columns with nulls.
        if set(names) != set(arrays):
            wanted = f"columns {sorted(set(names) - set(_OWN))}, as in the store"
            raise InputError(expected("payload", wanted, f"{sorted(payload)}"))
        self._table.add(table.select(names))

    def _column(self, name: str, values: Any, count: int) -> Any:
        """Return a column of the payload, of the type that it has in the store."""
        arrow = self._arrow
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (*_OWN, "query_index"):
            wanted = f"names of small letters, digits and '_', other than {', '.join(_OWN)}"
            raise InputError(expected("payload", wanted, repr(name)))
        wanted = "numbers, strings or bools"
        try:
            column = arrow.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
            if self._table is not None and name in self._table.schema.names:
                wanted = f"{self._table.schema.field(name).type}, as in the store"
                # LanceDB's own cast would cut 1.5 to the whole number 1.
                column = column.cast(self._table.schema.field(name).type)
        except (arrow.ArrowException, TypeError) as error:
            raise InputTypeError(expected(f"payload[{name!r}]", wanted, f"{error}")) from None
        if arrow.types.is_null(column.type):
            hint = "Leave the column out, or give it a type: pyarrow.array(values, type)."
            raise InputTypeError(expected(f"payload[{name!r}]", "values that say the type", "None alone", hint))
        if len(column) != count:
            raise InputError(expected(f"payload[{name!r}]", f"{count} values, one for each embedding", len(column)))
        return column

    def _count(self, most: float, where: str | None) -> int:
        with self._readable(where):
            return int(self._table.count_rows(_condition(most, where)))

    def _nearest(
        self, queries: NDArray[np.float32], k: int, most: float, where: str | None, effort: int | None
    ) -> Columns:
        condition, kind = _condition(most, where), self.index
        tables = []
        for start in range(0, len(queries), _QUERIES):
            block = list(queries[start : start + _QUERIES])
            found = self._ask(block, k, condition, kind, effort)
            if len(found) < k * len(block):
                found = self._ask(block, k, condition, "flat", None)
            tables.append(found)
        table = self._arrow.concat_tables(tables)
        names = [name for name in self._table.schema.names if name != "vector"]
        columns = {name: table.column(name).to_numpy().reshape(-1, k) for name in names}
        vectors = table.column("vector").combine_chunks().flatten().to_numpy()
        return {**columns, "vector": vectors.reshape(len(queries), k, -1)}

    def _ask(
        self, queries: list[NDArray[np.float32]], k: int, condition: str | None, kind: str, effort: int | None
    ) -> Any:
        """Return the k nearest of each query, one query after another, or fewer if the index does not find them."""
        ask = self._table.search(queries).distance_type("cosine").limit(k)
        ask = ask.bypass_vector_index() if kind == "flat" else ask.refine_factor(_REFINE)
        if effort is not None:
            ask = ask.ef(max(effort, k)) if kind == "ivf_hnsw_sq" else ask.nprobes(effort)
        if condition is not None:
            ask = ask.where(condition, prefilter=True)
        with self._readable():
            found = ask.to_arrow()
        # A single query has no such column.
        if "query_index" in found.column_names:
            found = found.sort_by("query_index").drop_columns(["query_index"])
        return found

    def _remove(self, ids: NDArray[Any]) -> None:
        self._table.delete(_one_of(ids))

    def _create_index(self, kind: str, options: dict[str, int]) -> None:
        if kind != "flat":
            config = self._ivf_pq(**options) if kind == "ivf_pq" else self._ivf_hnsw_sq(**options)
            self._table.create_index("vector", config=config, replace=True, name=_INDEX)
        elif self.index != "flat":
            self._table.drop_index(_INDEX)

    def _ivf_hnsw_sq(self, partitions: int = 1, links: int = 20, build_effort: int = 300) -> Any:
        return self._lancedb.index.IvfHnswSq(
            distance_type="cosine", num_partitions=partitions, m=links, ef_construction=build_effort
        )

    def _ivf_pq(self, partitions: int | None = None, sub_vectors: int | None = None) -> Any:
        count, dim = len(self), self.dim or 0
        partitions = partitions or max(1, min(round(math.sqrt(count)), count // _POINTS_A_PARTITION))
        sub_vectors = sub_vectors or max(parts for parts in range(1, max(1, dim // 4) + 1) if dim % parts == 0)
        if dim % sub_vectors:
            msg = f"sub_vectors must divide {dim}"
            raise ValueError(msg)
        return self._lancedb.index.IvfPq(distance_type="cosine", num_partitions=partitions, num_sub_vectors=sub_vectors)

    @contextlib.contextmanager
    def _readable(self, where: str | None = None) -> Iterator[None]:
        """Turn LanceDB's errors into one that names the condition, or else the folder."""
        try:
            yield
        except (ValueError, RuntimeError, OSError) as error:
            if where is None:
                _Table.refuse(str(self.path), str(error), _Table.repaired_by)
            columns = ", ".join(name for name in self._table.schema.names if name != "vector")
            raise InputError(expected("where", f"a condition in SQL on {columns}", f"{where!r} ({error})")) from None


def _condition(most: float, where: str | None) -> str | None:
    """Return a filter in SQL, ``None`` for none."""
    parts = [] if math.isinf(most) else [f"uncertainty <= CAST({most!r} AS FLOAT)"]
    if where is not None:
        # A line of its own, because a comment in the condition would swallow the closing bracket.
        parts.append(f"({where}\n)")
    return " AND ".join(parts) or None


def _one_of(ids: NDArray[Any]) -> str:
    """Return the condition in SQL that an identifier is one of these."""
    texts = [str(name) if isinstance(name, int) else "'" + name.replace("'", "''") + "'" for name in ids.tolist()]
    return f"id IN ({', '.join(texts)})"


@functools.cache
def _first_user() -> int:
    """Return the process that used LanceDB first; a forked process inherits the answer."""
    return os.getpid()


def _check_process() -> None:
    """Refuse a process that was forked from one that had used LanceDB.

    LanceDB's threads do not survive a fork. It repairs itself, but in a trial with torch in the same process 8 of 30
    forked processes crashed or stood still.
    """
    if _first_user() != os.getpid():
        hint = "Start workers with 'spawn' or 'forkserver' (multiprocessing_context of a DataLoader)."
        wanted = "a process that was not forked from one that had used LanceDB"
        raise UnsupportedError(expected("LanceStore", wanted, "a forked one", hint))
