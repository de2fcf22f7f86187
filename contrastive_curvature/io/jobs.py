"""Fits and embeddings of data that many machines share: in parts, on Ray or as a job array.

Importing this needs neither ray nor pyarrow; what needs one of them says so when it is used.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import folder_path, write_whole
from contrastive_curvature.errors import InputError, InputTypeError, ProcessError
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, State
from contrastive_curvature.io.feature_folder import FeatureFolder
from contrastive_curvature.io.feature_folder.folder import FeatureHeader
from contrastive_curvature.io.states import load_state, save_state
from contrastive_curvature.laplace.calibration import present_calibration
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.progress import Progress

__all__ = ["EmbeddingFolder", "ParquetParts", "StateFolder", "embed_on_ray", "fit_on_ray"]

Reader = Callable[[dict[str, Any]], Any]
"""Turns the columns of a batch, numpy arrays by name, into ``(x, targets)``, or for embedding ``x`` alone."""

Posterior = ContrastiveLaplace | Callable[[], Any]

_ROWS, _FEWEST, _MOST = 50_000, 16, 1_000

_OWN = ("identifier", "mu", "kappa", "uncertainty", "p_value")
"""Columns of embeddings; the last one where the posterior is calibrated. Others are passed through."""

_JOB = b"contrastive_curvature.job"

_REPAIR = "Use another folder, or delete this one to start over."

_log = logging.getLogger("contrastive_curvature")


class _Group(NamedTuple):
    """A row group of a Parquet file, and its first row among those of all files."""

    file: Path
    number: int
    start: int
    rows: int


class ParquetParts:
    """Parquet files, divided into contiguous parts of whole row groups; ``parts[k]`` is a loader of part ``k``.

    The parts depend on the files and the number of parts only, so that a job that goes on later finds the same ones.

    Args:
        path: A Parquet file, a folder of them, or a list of files; all with the same columns.
        parts: How many, at most one a row group; ``None`` for one per 50,000 rows, at least 16 and at most 1,000.
        batch_size: Rows of a batch, at most; a batch ends with its file.
        read: Turns a batch, a dictionary of numpy arrays, into ``(x, targets)``: tensors, or for ``x`` a mapping of
            them. ``None``: ``x`` is the column ``features``, lists of floating-point numbers of a fixed length, that
            the posterior's encoder takes as its inputs.
        columns: Columns to read for batches; ``None`` for all, or without ``read`` for features and target.
        features: Name of the column of features.
        target: Name of the column of targets: whole numbers, or what a relation takes.
        identifier: Name of the column of identifiers, for embeddings; without it, rows are numbered.

    Attributes:
        rows: Number of all rows.
        fingerprint: A text that other files, rows or columns change: names, sizes and footers of the files, which have
            the least and the largest value of every column and row group. It does not see a change between these.

    Raises:
        InputError: No such file or column, other columns in another file, no row, or more parts than row groups.
        InputTypeError: A column has another type.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: str | PathLike[str] | Sequence[str | PathLike[str]],
        parts: int | None = None,
        *,
        batch_size: int = 4096,
        read: Reader | None = None,
        columns: Sequence[str] | None = None,
        features: str = "features",
        target: str = "target",
        identifier: str = "identifier",
    ) -> None:
        self.batch_size = validate.count("batch_size", batch_size)
        self.read, self.columns = read, columns
        self.features, self.target, self.identifier = features, target, identifier
        files = _files(path)
        self.schema: Any = None
        self.rows, self._groups = 0, list[_Group]()
        digest = hashlib.sha256(repr(None if read else (features, target)).encode())
        parquet = _pyarrow("parquet")
        for file in files:
            try:
                with parquet.ParquetFile(file) as opened:
                    metadata, schema = opened.metadata, opened.schema_arrow
            except (OSError, ValueError) as error:
                raise InputError(str(file), "a Parquet file", f"what cannot be read ({error})") from None
            self.schema = self.schema or schema
            if not schema.equals(self.schema):
                raise InputError(str(file), f"the columns of {files[0].name}: {self.schema}", str(schema))
            digest.update(f"{file.name} {file.stat().st_size} {metadata.to_dict()}".encode())
            for number in range(metadata.num_row_groups):
                self._groups.append(_Group(file, number, self.rows, metadata.row_group(number).num_rows))
                self.rows += self._groups[-1].rows
        self._groups = [group for group in self._groups if group.rows]
        self.fingerprint = digest.hexdigest()[:32]
        if not self.rows:
            raise InputError("source", "at least one row", f"{len(files)} Parquet files without any")
        names = self.schema.names
        if columns is not None and (read is None or isinstance(columns, str) or set(columns) - {*names}):
            wanted = f"a list of columns of the files ({', '.join(names)}), together with read"
            raise InputError("columns", wanted, repr(columns))
        if read is None:
            self._check_numbers(features)
        self._count = _number_of_parts(parts, self.rows, len(self._groups))

    def __len__(self) -> int:
        """Number of parts."""
        return self._count

    def __getitem__(self, part: int) -> ParquetPart:
        """The loader of a part, by its index from 0."""
        if not 0 <= part < self._count:
            # An IndexError ends a loop over the parts.
            raise IndexError(f"part: expected an index from 0 to {self._count - 1}, got {part}.")
        n = len(self._groups)
        return ParquetPart(self, self._groups[n * part // self._count : n * (part + 1) // self._count])

    def kept_types(self) -> dict[str, Any]:
        """Return the types of the columns that can be passed through, and of identifiers as ``"identifier"``."""
        types = {field.name: field.type for field in self.schema if field.name != self.features}
        return {**types, "identifier": types.pop(self.identifier, _pyarrow().int64())}

    def inputs(self, table: Any) -> Any:
        """Return what ``read`` makes of the rows of a table; without it, their features."""
        if self.read is None:
            return self._numbers(table, self.features)
        return self.read({name: _array(table.column(name)) for name in self.columns or table.column_names})

    def batch(self, table: Any) -> Any:
        """Return a batch of a fit."""
        x = self.inputs(table)
        return x if self.read is not None else (x, self._numbers(table, self.target))

    def to_embed(self, part: int, keep: Sequence[str]) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield inputs, identifiers and further columns of the batches of a part."""
        named = self.identifier in self.schema.names
        reads_all = self.read is not None and self.columns is None
        wanted = [*(self.columns or [self.features]), *([self.identifier] if named else []), *keep]
        loader = self[part]
        start = loader.dataset.start
        for table in loader.tables(None if reads_all else list(dict.fromkeys(wanted))):
            numbers = _pyarrow().array(range(start, start + len(table)))
            start += len(table)
            yield self.inputs(table), table.column(self.identifier) if named else numbers, [*map(table.column, keep)]

    def _check_numbers(self, name: str) -> None:
        """Refuse a column that has neither numbers nor lists of them of a fixed length."""
        names = self.schema.names
        if name not in names:
            hint = "Name the columns with features=, target= and identifier=, or say what batches are with read=."
            raise InputError("source", f"a column {name!r}", f"the columns {', '.join(names)}", hint)
        kind, types = self.schema.field(name).type, _pyarrow("types")
        plain = kind.value_type if types.is_fixed_size_list(kind) else kind
        if not (types.is_integer(plain) or types.is_floating(plain) or types.is_boolean(plain)):
            wanted = f"numbers, or lists of them of a fixed length, in the column {name!r}"
            hint = "Number the classes; pyarrow.FixedSizeListArray.from_arrays makes a column of lists."
            raise InputTypeError("source", wanted, str(kind), hint)

    def _numbers(self, table: Any, name: str) -> Tensor:
        """Return a column of numbers, or of lists of them, as a tensor; half precision lifted to float32."""
        self._check_numbers(name)
        column = table.column(name).combine_chunks()
        missing = column.null_count + (column.flatten().null_count if hasattr(column.type, "list_size") else 0)
        if missing:
            raise InputError("source", f"a value in every row of the column {name!r}", f"{missing} missing")
        values = _array(column)
        return torch.from_numpy(values.astype(np.float32) if values.dtype == np.float16 else values)


class ParquetPart:
    """Batches ``(x, targets)`` of consecutive rows; iterated as often as needed."""

    def __init__(self, parts: ParquetParts, groups: list[_Group]) -> None:
        self._parts, self._groups = parts, groups
        self.dataset = range(groups[0].start, groups[-1].start + groups[-1].rows)

    def __iter__(self) -> Iterator[Any]:
        """Batches, as ``read`` makes them, or of features and targets."""
        parts = self._parts
        columns = parts.columns if parts.read is not None else [parts.features, parts.target]
        yield from map(parts.batch, self.tables(columns))

    @property
    def numbers(self) -> Tensor:
        """Numbers of the rows among those of all parts, int64, shape (N,): a fit samples by them."""
        return torch.arange(self.dataset.start, self.dataset.stop)

    def tables(self, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield Arrow tables of one batch each, of some columns or of all."""
        rows = 0
        for path, groups in groupby(self._groups, key=lambda group: group.file):
            with _pyarrow("parquet").ParquetFile(path) as file:
                numbers = [group.number for group in groups]
                for batch in file.iter_batches(self._parts.batch_size, row_groups=numbers, columns=columns):
                    rows += len(batch)
                    yield _pyarrow().Table.from_batches([batch]).replace_schema_metadata()
        if rows != len(self.dataset):
            hint = "The files have changed since they were opened."
            raise InputError("source", f"{len(self.dataset):,} rows", f"{rows:,}", hint)


class _FolderParts:
    """A feature folder in parts, with the interface of :class:`ParquetParts`."""

    def __init__(self, folder: FeatureFolder, parts: int | None) -> None:
        self._folder = folder
        self._count = _number_of_parts(parts, len(folder.dataset), len(folder.dataset))
        rows, header = folder.dataset, (folder.path / FeatureHeader.file_name).read_bytes()
        # The header has a checksum of every part of the folder.
        self.fingerprint = f"{hashlib.sha256(header).hexdigest()[:32]} {rows.start}:{rows.stop}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: int) -> FeatureFolder:
        return self._folder.shard(part, self._count)

    def kept_types(self) -> dict[str, Any]:
        """Return the type of identifiers; nothing else can be passed through."""
        whole_numbers = self[0].identifiers.dtype.kind in "iu"
        return {"identifier": _pyarrow().int64() if whole_numbers else _pyarrow().string()}

    def to_embed(self, part: int, keep: Sequence[str]) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield inputs, identifiers and no further columns of the batches of a part."""
        del keep
        loader, start = self[part], 0
        # Batches are in another order than identifiers where the folder has a seed.
        order = loader.numbers.numpy() - loader.dataset.start
        identifiers = _pyarrow().array(loader.identifiers[order])
        for x, y in loader:
            yield x, identifiers.slice(start, len(y)), []
            start += len(y)


Parts = ParquetParts | _FolderParts
Source = ParquetParts | FeatureFolder | str | PathLike[str] | Sequence[str | PathLike[str]]


class StateFolder:
    """Where the states of the parts of one fit are kept, ``statistics-00003-of-00008-1f2e3d4c.safetensors`` and so on.

    Each is written completely or not at all, so a process that is killed leaves no half of one, and what is there is
    there once, however often a part was started.

    Args:
        path: The folder; it is made if need be, inside a folder that exists.
        count: Number of parts.
        source: What tells the data from other data, as ``ParquetParts(...).fingerprint``; may be empty. The names of
            the files end in its digest.

    Raises:
        InputError: The folder has something else in it, as states of another source or number of parts.
    """

    def __init__(self, path: str | PathLike[str], count: int, source: str = "") -> None:
        self.count = validate.count("count", count)
        self._source = hashlib.sha256(source.encode()).hexdigest()[:8]
        self.path = folder_path("folder", path)
        _open(self.path, "folder", [self.file(kind, part) for kind in (STATISTICS, CURVATURE) for part in range(count)])

    def save(self, state: State) -> None:
        """Keep the state of one part.

        Raises:
            InputError: It is of several parts, or counts the parts differently.
        """
        if len(state.origins) != 1 or state.count != self.count:
            received = f"parts {sorted(state.origins)[:5]} of {state.count}"
            raise InputError("state", f"the state of one of {self.count} parts", received)
        # Somebody else may have put a link into the folder: it is replaced, and never written through.
        save_state(state, self.file(state.kind, next(iter(state.origins))), follow=False)

    def load(self, kind: str, part: int) -> State:
        """Return the state of a part.

        Args:
            kind: ``"statistics"`` or ``"curvature"``.
            part: Index of the part.

        Raises:
            InputError: It is not there or damaged.
        """
        return load_state(self.file(kind, part))

    def has(self, kind: str, part: int) -> bool:
        """Whether the state of a part is there and whole; arguments as of :meth:`load`."""
        file = self.file(kind, part)
        try:
            load_state(file)
        except InputError as error:
            if file.exists():
                _log.warning("%s It is computed again.", error)
            return False
        return True

    def missing(self, kind: str) -> list[int]:
        """Parts whose state is not there or damaged, to be computed (again)."""
        return [part for part in range(self.count) if not self.has(kind, part)]

    def merged(self, kind: str) -> State:
        """Merge the states of all parts; one after the other is in memory.

        Raises:
            InputError: One is missing or damaged, or they do not fit together.
        """
        return reduce(State.merge, (self.load(kind, part) for part in range(self.count)))

    def file(self, kind: str, part: int) -> Path:
        """Name of the file of a part."""
        validate.choice("kind", kind, (STATISTICS, CURVATURE))
        return self.path / f"{kind}-{part:05d}-of-{self.count:05d}-{self._source}.safetensors"


class EmbeddingFolder:
    """Where the embeddings of a corpus are written, ``part-00003-of-00008.parquet`` and so on.

    Columns ``identifier``, ``mu`` (a list of D float32), ``kappa``, ``uncertainty``, and ``p_value`` of a calibrated
    posterior (see :class:`~contrastive_curvature.EmbeddingDistribution`), then those that are passed through. Each file
    is written completely or not at all, so every input is there once, however often a part was started.

    Args:
        path: The folder; it is made if need be, inside a folder that exists.
        la: The fitted posterior.
        source: A :class:`ParquetParts`, a feature folder, or the path of one.
        keep: Columns of the source to pass through; ``None`` for all but features.
        parts: Number of parts, where the source does not say it.

    Raises:
        NotFittedError: Before ``fit``, or the calibration is of another posterior.
        InputError: The folder has something else in it, or embeddings of another posterior, source or number of parts;
            or a column to pass through is not there, or has the name of a result.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        la: Any,
        source: Source | Parts,
        keep: Sequence[str] | None = None,
        parts: int | None = None,
    ) -> None:
        la.check_fitted()
        calibrated = present_calibration(la) is not None
        self._parts = _parts_of(source, parts)
        self.count = len(self._parts)
        types = self._parts.kept_types()
        self._keep = _names_to_keep([name for name in types if name != "identifier"], keep)
        arrow = _pyarrow()
        columns = [
            ("identifier", types["identifier"]),
            ("mu", arrow.list_(arrow.float32(), int(la.n_outputs))),
            ("kappa", arrow.float32()),
            ("uncertainty", arrow.float32()),
            *([("p_value", arrow.float64())] if calibrated else []),
            *((name, types[name]) for name in self._keep),
        ]
        of_la = hashlib.sha256(f"{encoder_digest(la.model)} {la.state_dict()['checksum']}".encode()).hexdigest()
        job = f"posterior {of_la[:32]}, source {self._parts.fingerprint}"
        self._schema = arrow.schema(columns, {_JOB: job.encode()})
        self.path = folder_path("destination", path)
        _open(self.path, "destination", list(map(self.file, range(self.count))))
        self.missing()

    def has(self, part: int) -> bool:
        """Whether the file of a part is there, with all its rows.

        Raises:
            InputError: It has embeddings of another posterior, of another source or with other columns.
        """
        try:
            metadata = _pyarrow("parquet").read_metadata(self.file(part))
            schema = metadata.schema.to_arrow_schema()
        except (OSError, ValueError):
            return False
        if not schema.equals(self._schema) or (schema.metadata or {}).get(_JOB) != self._schema.metadata[_JOB]:
            wanted = "a folder for the same posterior, source and columns"
            raise InputError("destination", wanted, f"others in {self.file(part)}", _REPAIR)
        return bool(metadata.num_rows == len(self._parts[part].dataset))

    def missing(self) -> list[int]:
        """Parts that are not there, or cannot be read, to be written (again)."""
        return [part for part in range(self.count) if not self.has(part)]

    def write(self, la: Any, part: int) -> None:
        """Embed a part, and write its file.

        Args:
            la: The posterior of this folder.
            part: Index of the part.

        Raises:
            InputError: A batch is malformed, or the encoder gives no finite output for it.
        """

        def write(file: Any) -> None:
            with _pyarrow("parquet").ParquetWriter(file, self._schema, write_page_checksum=True) as writer:
                for table in self._embedded(la, part):
                    writer.write_table(table)

        write_whole(self.file(part), write, follow=False)

    def file(self, part: int) -> Path:
        """Name of the file of a part."""
        return self.path / f"part-{part:05d}-of-{self.count:05d}.parquet"

    def _embedded(self, la: Any, part: int) -> Iterator[Any]:
        """Yield an Arrow table for every batch of a part."""
        arrow = _pyarrow()
        for x, identifiers, others in self._parts.to_embed(part, self._keep):
            with torch.no_grad():
                embedded = la(x[0] if isinstance(x, (tuple, list)) and len(x) == 2 else x)
                numbers = [embedded.mu.flatten(), embedded.kappa, embedded.uncertainty]
                mu, *own = [arrow.array(values.float().cpu().numpy()) for values in numbers]
                if "p_value" in self._schema.names:
                    own.append(arrow.array(embedded.p_value.double().cpu().numpy()))
            n, dim = embedded.mu.shape
            if n != len(identifiers):
                raise InputError("read", f"{len(identifiers)} inputs, one a row", f"{n}")
            mu = arrow.FixedSizeListArray.from_arrays(mu, dim)
            yield arrow.Table.from_arrays([identifiers, mu, *own, *others], schema=self._schema)


def fit_on_ray(
    posterior: Posterior,
    source: Source,
    *,
    folder: str | PathLike[str],
    parts: int | None = None,
    progress_bar: bool | None = None,
    **options: Any,
) -> Any:
    """Fit a posterior to data that many processes read, a part at a time.

    Every part's state is written to ``folder`` as soon as it is computed. The part of a process that dies is computed
    again; after the death of this process, the same call goes on with the missing parts. Ray is started if it does not
    run, and then stopped at the end.

    Args:
        posterior: A posterior that is not fitted yet, copied to every process; or a function without arguments that
            makes one, in every process and here. On GPUs use a function that brings the encoder to ``"cuda"``.
        source: A :class:`ParquetParts`, Parquet files with the columns ``features`` and ``target`` (a path, or a list
            of them), or a feature folder or its path; on a file system that all machines see.
        folder: Where the states are kept, on such a file system.
        parts: Number of parts of files or a folder; ``None`` for one per 50,000 rows, at least 16 and at most 1,000.
        progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.
        **options: Of ``ray.remote``, such as ``num_cpus`` (1), ``num_gpus`` (0) and ``memory``, what a part needs, and
            ``max_retries`` (3), how often a part is started again whose process has died.

    Returns:
        The fitted posterior: the given one, or the one that the function has made.

    Raises:
        InputError: An argument, a file or a batch is malformed; this machine has no room for a process; or the folder
            has states of another encoder, other options, other data or another number of parts.
        UnsupportedError: The posterior has no fit in parts, or ray or pyarrow is not installed.
        ProcessError: A process has died too often. What is done is kept.
    """
    ray = validate.package("jobs", "ray", "ray")
    data = _parts_of(source, parts)
    count = len(data)
    la = _made(posterior)
    # A first pass without data has only what the states of all parts have in common: encoder and options.
    identity = sorted(la.part_statistics([], (0, count)).identity.items())
    states = StateFolder(folder, count, f"{data.fingerprint} {identity}")

    def first_pass(la: Any, part: int) -> None:
        states.save(la.part_statistics(data[part], (part, count), progress_bar=False))

    def second_pass(la: Any, part: int) -> None:
        states.save(la.part_curvature(data[part], (part, count), statistics, progress_bar=False))

    with _running(ray, options):
        _run(ray, posterior, first_pass, states.missing(STATISTICS), STATISTICS, progress_bar, options)
        statistics = states.merged(STATISTICS)
        _run(ray, posterior, second_pass, states.missing(CURVATURE), CURVATURE, progress_bar, options)
    la.fit_parts(statistics, states.merged(CURVATURE))
    return la


def embed_on_ray(
    posterior: Posterior,
    source: Source,
    destination: str | PathLike[str],
    *,
    parts: int | None = None,
    keep: Sequence[str] | None = None,
    progress_bar: bool | None = None,
    **options: Any,
) -> EmbeddingFolder:
    """Embed a corpus in processes of Ray that hold encoder and posterior once.

    Writes one Parquet file a part (:class:`EmbeddingFolder`). The part of a process that dies is computed again; after
    the death of this process, the same call goes on with the missing parts. Ray is started if it does not run, and then
    stopped at the end.

    Args:
        posterior: The fitted posterior, which every process gets a copy of; or a function without arguments that makes
            it in every process and here, as on GPUs.
        source: See :func:`fit_on_ray`; targets are not used, and ``read`` may return ``x`` alone. Identifiers are the
            column ``identifier``, or else the numbers of the rows.
        destination: A folder, on a file system that all machines see.
        parts: Number of parts, each a file; ``None`` as in :func:`fit_on_ray`.
        keep: Columns of the source to pass through; ``None`` for all but ``features``.
        progress_bar: See :func:`fit_on_ray`.
        **options: See :func:`fit_on_ray`.

    Returns:
        The folder.

    Raises:
        NotFittedError: Before ``fit``, or the calibration is of another posterior.
        InputError: An argument, a file or a batch is malformed; this machine has no room for a process; or the folder
            has something else in it.
        UnsupportedError: ray or pyarrow is not installed.
        ProcessError: A process has died too often. What is done is kept.
    """
    ray = validate.package("jobs", "ray", "ray")
    folder = EmbeddingFolder(destination, _made(posterior), _parts_of(source, parts), keep)
    with _running(ray, options):
        _run(ray, posterior, folder.write, folder.missing(), "embeddings", progress_bar, options)
    return folder


@contextmanager
def _running(ray: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Let Ray run: the one that does, or one that is started here and stopped at the end."""
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        # A cluster may grow, this machine does not: a task without room would wait for ever.
        if "RAY_ADDRESS" not in os.environ:
            there = ray.cluster_resources()
            for option, name in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
                if (wanted := options.get(option, 0)) > there.get(name, 0):
                    raise InputError(option, f"at most what Ray has, {there.get(name, 0):g}", wanted)
        yield
    finally:
        ray.shutdown()


def _run(
    ray: Any,
    posterior: Posterior,
    work: Callable[[Any, int], None],
    parts: Sequence[int],
    name: str,
    progress_bar: bool | None,
    options: Mapping[str, Any],
) -> None:
    """Call ``work`` with the posterior and every part, in processes of Ray; it writes its result itself.

    Raises:
        ProcessError: A process has died too often.
        Exception: What a part raised, as it is, with a note that names the part.
    """
    # Ray starts a new process for every task on a GPU, unless max_calls says that a process may go on.
    task = ray.remote(max_calls=0, **options)(_part)
    # Once in Ray's store, however many processes take it; in a list, because Ray reads it for every part otherwise.
    stored = [ray.put((posterior, work))]
    running = {task.remote(stored, part): part for part in parts}
    try:
        with Progress(progress_bar).bar(f"[{name}]", len(parts)) as bar:
            while running:
                (done,), _ = ray.wait(list(running))
                part = running.pop(done)
                try:
                    ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    error.cause.add_note(f"{name} of part {part}, in a process of Ray")
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    raise ProcessError(
                        f"{name} of part {part}: its process has died more than max_retries times, or its error cannot "
                        f"be pickled: {error}\nWhat is done is kept: call this again with the same arguments, and only "
                        "the rest is computed. A process that needs too much memory wants smaller batches, or more "
                        "num_cpus, so that fewer run at once."
                    ) from error
                bar.update(1)
    finally:
        for task_of_part in running:
            ray.cancel(task_of_part, force=True)


def _part(stored: list[Any], part: int) -> None:
    """Compute a part in a process of Ray, and write it."""
    la, work = _held(stored[0])
    work(la, part)


@lru_cache(maxsize=1)
def _held(stored: Any) -> tuple[Any, Callable[[Any, int], None]]:
    """Return the posterior and the work of a process, which are read or made once for all its parts."""
    posterior, work = validate.package("jobs", "ray", "ray").get(stored)
    return _made(posterior), work


def _made(posterior: Any) -> Any:
    """Return the posterior, or what a function without arguments makes."""
    # A posterior is callable, too.
    la = posterior() if callable(posterior) and not isinstance(posterior, ContrastiveLaplace) else posterior
    if not isinstance(la, ContrastiveLaplace):
        wanted = "a posterior of likelihood='contrastive', or a function that returns one"
        hint = "laplace.Laplace(encoder, likelihood='contrastive', ...) makes one."
        raise InputTypeError("posterior", wanted, f"a {type(la).__name__}", hint)
    return la


def _parts_of(source: Source | Parts, parts: int | None = None) -> Parts:
    """Divide what a user gave as ``source``."""
    if isinstance(source, (ParquetParts, _FolderParts)):
        if parts is not None:
            raise InputError("parts", f"None with a {type(source).__name__}, which has its own", parts)
        return source
    if isinstance(source, (str, os.PathLike)) and (Path(source) / FeatureHeader.file_name).is_file():
        source = FeatureFolder(source)
    return _FolderParts(source, parts) if isinstance(source, FeatureFolder) else ParquetParts(source, parts)


def _number_of_parts(parts: int | None, rows: int, most: int) -> int:
    """Return the number of parts, by default one for 50,000 rows, at least 16 and at most 1,000."""
    if parts is None:
        return min(most, max(_FEWEST, min(_MOST, -(-rows // _ROWS))))
    if validate.count("parts", parts) > most:
        hint = "A part has whole row groups of Parquet files: write them with a smaller row_group_size."
        raise InputError("parts", f"at most {most:,}", parts, hint)
    return parts


def _open(folder: Path, argument: str, files: list[Path]) -> None:
    """Make the folder of a job if need be; refuse one with other files than these."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError(argument, "a folder in one that exists", f"no folder {folder.parent}") from None
    names = {file.name for file in files}
    # Unfinished files of killed writers begin with a dot.
    others = sorted(name for name in os.listdir(folder) if name not in names and not name.startswith("."))
    if others:
        wanted = f"a new or an empty folder, or one of this job in {len(files)} files"
        raise InputError(argument, wanted, f"{folder}, which has {others[0]!r} in it", _REPAIR)


def _names_to_keep(known: list[str], keep: Sequence[str] | None) -> list[str]:
    """Return the names of the columns to pass through."""
    names = known if keep is None else list(dict.fromkeys(keep))
    if isinstance(keep, str) or set(names) - set(known):
        raise InputError("keep", f"a list of columns of the source: {', '.join(known)}", repr(keep))
    if twice := [name for name in names if name in _OWN]:
        hint = "Name the columns to pass through with keep=."
        raise InputError("source", f"columns other than {', '.join(_OWN)}", str(twice), hint)
    return names


def _files(path: Any) -> list[Path]:
    """Return the files, absolute, because processes elsewhere have other working directories."""
    if isinstance(path, (str, os.PathLike)):
        one = Path(path).absolute()
        # Other tools skip names that begin with a dot or an underscore, too.
        files = [file for file in sorted(one.glob("*.parquet")) if file.name[0] not in "._"] if one.is_dir() else [one]
    else:
        files = [Path(part).absolute() for part in path]
    if not files or len(set(files)) < len(files):
        raise InputError("source", "different files *.parquet, at least one", f"{len(files)} in {path!r}")
    return files


def _array(column: Any) -> NDArray[Any]:
    """Return a column as an array: lists of a fixed length as rows, what numpy has no type for as objects."""
    whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if _pyarrow("types").is_fixed_size_list(whole.type) and not whole.null_count:
        flat = _array(whole.flatten())
        return flat.reshape(len(whole), whole.type.list_size, *flat.shape[1:])
    return np.array(whole.to_numpy(zero_copy_only=False))


def _pyarrow(module: str = "") -> Any:
    return validate.package("jobs", f"pyarrow.{module}" if module else "pyarrow", "parquet")
