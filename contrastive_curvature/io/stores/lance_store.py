"""A corpus on disk, searched by LanceDB."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.stores.checks import Ids, need
from contrastive_curvature.io.stores.lance_columns import as_ids, check_payload, make_schema, to_arrow, to_found
from contrastive_curvature.io.stores.lance_table import (
    KINDS,
    Connection,
    check_process,
    check_schema,
    ids_in,
    index_config,
    readable,
)
from contrastive_curvature.io.stores.store import Found, Rows, VectorStore
from contrastive_curvature.metrics.neighbors import MORE

__all__ = ["LanceStore"]

_QUERIES = 64
"""Queries of one call of LanceDB, which makes a plan for each."""

_REFINE = 10
"""Hits are chosen by their true cosines from so many times as many candidates of a compressed index."""


class LanceStore(VectorStore):
    """A corpus on disk, searched by LanceDB (``pip install lancedb pyarrow``); it may be larger than memory.

    It is the folder of one Lance table, with the columns ``id``, ``vector``, ``kappa``, ``uncertainty`` and those of
    the payload, which every program that knows Lance can read. Every change is complete or does not happen, also if the
    process is killed. One process writes at a time; a store that is open elsewhere shows what was there when it was
    opened. A process that was forked from one that had used LanceDB is refused: its threads do not survive that.

    Indices of :meth:`create_index`:

    - ``"flat"``: exact, the default: the whole table is read.
    - ``"ivf_pq"``: lists of compressed vectors. ``partitions`` (``sqrt(N)``, at most N / 256), ``sub_vectors`` (a
      divisor of D, by default the largest up to D / 4; a byte for each). ``effort`` of a search: lists that are looked
      through (20).
    - ``"ivf_hnsw_sq"``: lists, a graph of neighbours in each, a byte for each number. ``partitions`` (1), ``links``
      (20), ``build_effort`` (300). ``effort`` of a search: candidates in the graph (LanceDB's choice).

    Both need 256 embeddings. What is added later is searched exactly, in addition, until :meth:`optimize`.

    Args:
        path: A new folder, named ``NAME.lance``. :meth:`open` opens one that exists.

    Raises:
        InputError: The folder exists, its parent does not, or the name is another.
        UnsupportedError: lancedb or pyarrow is not installed.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = KINDS

    def __init__(self, path: Path | str) -> None:
        need("pyarrow", "LanceStore", "lance")
        self._connection = Connection(need("lancedb", "LanceStore", "lance"), path)
        self._opened: Any = None
        if self._connection.path.exists():
            hint = "LanceStore.open(path) opens it."
            raise InputError(expected(str(path), "a folder that does not exist yet", "one that does", hint))

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a store that exists.

        Raises:
            InputError: There is none, it is damaged, or the folder holds something else.
            UnsupportedError: A newer version wrote it, or lancedb is not installed.
        """
        out = cls.__new__(cls)
        need("pyarrow", "LanceStore", "lance")
        out._connection = Connection(need("lancedb", "LanceStore", "lance"), path)
        out._opened = out._connection.open()
        check_schema(out._table.schema, path)
        return out

    @property
    def _table(self) -> Any:
        check_process(self.path)
        return self._opened

    @property
    def path(self) -> Path:
        """The folder."""
        return self._connection.path

    def __len__(self) -> int:
        """Number of embeddings."""
        if self._table is None:
            return 0
        with readable(self.path):
            return int(self._table.count_rows())

    @property
    def dim(self) -> int | None:
        """Dimension of the vectors; ``None`` before anything is added."""
        return None if self._table is None else int(self._table.schema.field("vector").type.list_size)

    @property
    def index(self) -> str:
        """Kind of the index."""
        if self._table is None:
            return "flat"
        with readable(self.path):
            found = [index.index_type for index in self._table.list_indices() if index.columns == ["vector"]]
        return {"IvfPq": "ivf_pq", "IvfHnswSq": "ivf_hnsw_sq"}.get(found[0], found[0]) if found else "flat"

    def optimize(self) -> None:
        """Join the files of many small additions, and bring what was added since :meth:`create_index` into the index.

        Older versions of the table stay for a week, for other processes that read them.
        """
        if self._table is not None:
            self._table.optimize()

    def __repr__(self) -> str:
        """Number and dimension of the embeddings, the index and the folder."""
        return f"LanceStore({len(self)} embeddings in {self.dim} dimensions, {self.index}, {str(self.path)!r})"

    def _append(self, rows: Rows, payload: Mapping[str, object]) -> None:
        columns = check_payload(payload, len(rows.ids))
        if self._table is None:
            made = to_arrow(rows, columns, make_schema(rows, columns))
            self._opened = self._connection.create(made)
            return
        made = to_arrow(rows, columns, self._table.schema)
        if there := ids_in(self._table, made.column("id")):
            hint = "Delete them first to replace them."
            raise InputError(expected("ids", "identifiers that are not in the store yet", f"{there[:5]}", hint))
        self._table.add(made)

    def _nearest(
        self, queries: NDArray[np.float32], k: int, most: float | None, where: str | None, effort: int | None
    ) -> Found:
        # A line of its own, because a comment in the condition would swallow the closing bracket.
        parts = [] if most is None else [f"uncertainty <= CAST({most!r} AS FLOAT)"]
        parts += [] if where is None else [f"({where}\n)"]
        condition = " AND ".join(parts) or None
        size = self._count(condition, where)
        self._check_enough(k, size, "" if condition is None else " that pass the filter")
        k = min(k + MORE, size)
        tables = []
        for start in range(0, len(queries), _QUERIES):
            block = list(queries[start : start + _QUERIES])
            found = self._ask(block, k, condition, effort, exact=False)
            if len(found) < k * len(block):
                found = self._ask(block, k, condition, None, exact=True)
            tables.append(found)
        return to_found(tables, k, size)

    def _count(self, condition: str | None, where: str | None) -> int:
        if where is not None and (not isinstance(where, str) or not where.strip()):
            shown = "an empty string" if isinstance(where, str) else f"a {type(where).__name__}"
            raise InputTypeError(expected("where", "a condition in SQL, such as 'label = 3'", shown))
        try:
            return int(self._table.count_rows(condition))
        except (ValueError, RuntimeError, OSError) as error:
            if where is None:
                raise InputError(expected(str(self.path), "a table that can be read", str(error))) from None
            columns = ", ".join(name for name in self._table.schema.names if name != "vector")
            raise InputError(expected("where", f"a condition in SQL on {columns}", f"{where!r} ({error})")) from None

    def _ask(
        self, queries: list[NDArray[np.float32]], k: int, condition: str | None, effort: int | None, *, exact: bool
    ) -> Any:
        ask = self._table.search(queries).distance_type("cosine").limit(k)
        kind = self.index
        if exact or kind == "flat":
            ask = ask.bypass_vector_index()
        else:
            ask = ask.refine_factor(_REFINE)
            if effort is not None:
                ask = ask.ef(max(effort, k)) if kind == "ivf_hnsw_sq" else ask.nprobes(effort)
        if condition is not None:
            ask = ask.where(condition, prefilter=True)
        with readable(self.path):
            found = ask.to_arrow()
        if len(queries) == 1 and "query_index" not in found.column_names:
            found = found.append_column("query_index", [np.zeros(len(found), dtype=np.int32)])
        return found

    def _remove(self, ids: Ids) -> None:
        there = set() if self._table is None else set(ids_in(self._table, as_ids(ids, self._table.schema)))
        if missing := [name for name in ids.tolist() if name not in there]:
            raise InputError(expected("ids", "identifiers that are in the store", f"{missing[:5]}"))
        texts = [str(name) if isinstance(name, int) else "'" + name.replace("'", "''") + "'" for name in ids.tolist()]
        self._table.delete(f"id IN ({', '.join(texts)})")

    def _create_index(self, kind: str, options: dict[str, int]) -> None:
        dim = self.dim or 0
        config = index_config(self._connection.lancedb, kind, options, dim, len(self))
        if config is not None:
            self._table.create_index("vector", config=config, replace=True, name="vector_idx")
            return
        for index in self._table.list_indices():
            if index.columns == ["vector"]:
                self._table.drop_index(index.name)
