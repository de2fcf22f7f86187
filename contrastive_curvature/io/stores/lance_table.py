"""The Lance table of a store: how it is made and opened, and its indices."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.io.stores.checks import need
from contrastive_curvature.io.stores.lance_columns import KEY, OWN, VERSION

__all__ = ["KINDS", "Connection", "check_process", "check_schema", "ids_in", "index_config", "readable"]

KINDS: Mapping[str, tuple[str, ...]] = {
    "flat": (),
    "ivf_pq": ("partitions", "sub_vectors"),
    "ivf_hnsw_sq": ("partitions", "links", "build_effort"),
}
"""Indices, and the options of each."""

_FEWEST = 256
_users: list[int] = []
"""The process that used LanceDB first, and nothing else; a forked process inherits it."""
_WANTED = "a table that LanceStore made"


class Connection:
    """The folder of a table.

    Args:
        lancedb: The package.
        path: The folder.

    Raises:
        InputError: Its name does not end in ``.lance``, has other characters than letters, digits, ``_``, ``-`` and
            ``.``, or its parent does not exist.
        UnsupportedError: This process was forked from one that had used LanceDB.
    """

    def __init__(self, lancedb: ModuleType, path: Path | str) -> None:
        self.path, self.lancedb = Path(path), lancedb
        check_process(self.path)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.lance", self.path.name):
            wanted = "a folder NAME.lance, the name of letters, digits, '_', '-' and '.'"
            raise InputError(expected("path", wanted, repr(str(path))))
        # LanceDB would make the parent, too, even to look whether there is a table.
        if not self.path.parent.is_dir():
            raise InputError(expected(str(path), "a folder whose parent exists", f"no folder {self.path.parent}"))

    def open(self) -> Any:
        """Open the table.

        Raises:
            InputError: There is none, or it cannot be read.
        """
        if not self.path.is_dir():
            raise InputError(expected(str(self.path), _WANTED, "no such folder"))
        with readable(self.path):
            return self._database().open_table(self.path.stem)

    def create(self, rows: Any) -> Any:
        """Make the table of its first rows.

        Raises:
            InputError: It was made by somebody else meanwhile.
        """
        try:
            return self._database().create_table(self.path.stem, rows)
        except ValueError as error:
            hint = "LanceStore.open(path) opens it."
            raise InputError(expected(str(self.path), "a folder that does not exist yet", str(error), hint)) from None

    def _database(self) -> Any:
        return self.lancedb.connect(str(self.path.parent))


def check_process(path: Path) -> None:
    """Refuse a process that was forked from one that had used LanceDB.

    LanceDB's threads do not survive a fork. It repairs itself, but in a trial with torch in the same process 8 of 30
    forked processes crashed or stood still.

    Raises:
        UnsupportedError: It was forked.
    """
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        hint = "Start workers with 'spawn' or 'forkserver' (multiprocessing_context of a DataLoader)."
        wanted = "a process that was not forked from one that had used LanceDB"
        raise UnsupportedError(expected(str(path), wanted, "a forked one", hint))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what LanceDB raises about files that it cannot read into an error that names the folder.

    Raises:
        InputError: It cannot be read.
    """
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        hint = "Some of its files are damaged or missing; copy it again, or build the store anew."
        raise InputError(expected(str(path), _WANTED, f"{error}", hint)) from error


def check_schema(schema: Any, path: Path | str) -> None:
    """Refuse a table of something else, or of a newer version.

    Raises:
        InputError: It is no store.
        UnsupportedError: A newer version made it.
    """
    version = (schema.metadata or {}).get(KEY)
    if version is None or not set(OWN) <= set(schema.names):
        raise InputError(expected(str(path), _WANTED, f"one of something else, with columns {', '.join(schema.names)}"))
    if version != VERSION:
        hint = "Install the version of this library that made it, or a newer one."
        raise UnsupportedError(expected(str(path), f"version {VERSION.decode()}", version.decode(), hint))


def ids_in(table: Any, ids: Any) -> list[Any]:
    """Those of the identifiers that a table has.

    The whole column is read, in blocks: a condition with thousands of identifiers takes longer to parse.
    """
    pc = need("pyarrow.compute", "LanceStore", "lance")
    there: list[Any] = []
    for batch in table.search().select(["id"]).to_batches(2**16):
        column = batch.column("id")
        there += column.filter(pc.is_in(column, value_set=ids)).to_pylist()
    return there


def index_config(lancedb: ModuleType, kind: str, options: dict[str, int], dim: int, count: int) -> Any:
    """LanceDB's description of an index; ``None`` for ``"flat"``.

    Raises:
        InputError: There are too few embeddings, or ``sub_vectors`` does not divide the dimension.
    """
    if kind == "flat":
        return None
    if count < _FEWEST:
        hint = "An exact search of so few takes no time."
        raise InputError(expected("create_index", f"at least {_FEWEST} embeddings for {kind!r}", count, hint))
    common = {"distance_type": "cosine", "num_partitions": options.get("partitions")}
    if kind == "ivf_hnsw_sq":
        common["num_partitions"] = options.get("partitions", 1)
        graph = {"m": options.get("links", 20), "ef_construction": options.get("build_effort", 300)}
        return lancedb.index.IvfHnswSq(**common, **graph)
    most = max(1, dim // 4)
    parts = options.get("sub_vectors", max(n for n in range(1, most + 1) if dim % n == 0))
    if dim % parts:
        raise InputError(expected("sub_vectors", f"a divisor of D = {dim}", parts))
    if common["num_partitions"] is None:
        common["num_partitions"] = max(1, min(round(math.sqrt(count)), count // _FEWEST))
    return lancedb.index.IvfPq(**common, num_sub_vectors=parts)
