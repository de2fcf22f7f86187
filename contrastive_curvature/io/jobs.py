"""Fits and embeddings of data in parts, by many machines: on Ray or as a job array.

Importing this module needs neither ray nor pyarrow; a function that needs one of them raises an error without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from contrastive_curvature.fit.part_state import CURVATURE, STATISTICS, State
from contrastive_curvature.io.states import load_state, save_state
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.posterior.p_values import present_calibration
from contrastive_curvature.progress import Progress

__all__ = ["EmbeddingFolder", "ParquetParts", "StateFolder", "embed_on_ray", "fit_on_ray"]

Reader = Callable[[dict[str, Any]], Any]
"""Turns the columns of a batch, numpy arrays by name, into ``(x, targets)``, or for embedding ``x`` alone."""

Posterior = ContrastiveLaplace | Callable[[], Any]

_ROWS, _FEWEST, _MOST = 50_000, 16, 1_000

_OWN = ("identifier", "mu", "kappa", "uncertainty", "p_value")
"""Columns of embeddings; the last one where the posterior is calibrated. Others are passed through."""


class _Group(NamedTuple):
    """A row group of a Parquet file, with its first row counted over all files."""

    file: Path
    number: int
    start: int
    rows: int


class ParquetParts:
    """Parquet files, divided into contiguous parts of whole row groups; ``parts[k]`` is a loader of part ``k``.

    The parts depend only on the files and the number of parts, so a continued job has the same parts.

    Args:
        path: A Parquet file, a folder of them, or a list of files; all with the same columns.
        parts: Number of parts, at most one per row group; ``None`` for one per 50,000 rows, at least 16 and at most
            1,000.
        batch_size: Largest number of rows in a batch; a batch ends with its file.
        read: Function that turns a batch, a dictionary of numpy arrays, into ``(x, targets)``: tensors, or for ``x`` a
            mapping of tensors. With ``None``, ``x`` is the column ``features``: lists of floating-point numbers of a
            fixed length, as inputs of the posterior's encoder.
        columns: Columns to read for batches; ``None`` for all columns, or without ``read`` for features and target.
        features: Name of the column of features.
        target: Name of the column of targets: integers, or targets of a relation.
        identifier: Name of the column of identifiers, for embeddings; without this column, rows are numbered.

    Attributes:
        rows: Number of all rows.
        fingerprint: A text that changes with the files, rows or columns: it covers names, sizes and footers of the
            files. The footers hold the smallest and the largest value of every column and row group; a change between
            these values goes unnoticed.

    Raises:
        InputError: A file is missing, files have different columns, there is no row, or there are more parts than row
        groups; at reading, a column is missing or does not hold numbers.
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
        self.rows, groups = 0, list[_Group]()
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
                groups.append(_Group(file, number, self.rows, metadata.row_group(number).num_rows))
                self.rows += groups[-1].rows
        self._groups = [group for group in groups if group.rows]
        self.fingerprint = digest.hexdigest()[:32]
        if not self.rows:
            raise InputError("source", "at least one row", f"{len(files)} Parquet files without any")
        most = len(self._groups)
        self._count = min(most, max(_FEWEST, min(_MOST, -(-self.rows // _ROWS))))
        if parts is not None:
            self._count = validate.count("parts", parts)
            if parts > most:
                hint = "A part has whole row groups of Parquet files: write them with a smaller row_group_size."
                raise InputError("parts", f"at most {most:,}", parts, hint)

    def __len__(self) -> int:
        """Return the number of parts."""
        return self._count

    def __getitem__(self, part: int) -> ParquetPart:
        """Return the loader of a part, by its index from 0."""
        if not 0 <= part < self._count:
            # An IndexError ends a loop over the parts.
            raise IndexError(f"part: expected an index from 0 to {self._count - 1}, got {part}.")
        n = len(self._groups)
        return ParquetPart(self, self._groups[n * part // self._count : n * (part + 1) // self._count])

    def inputs(self, table: Any) -> Any:
        """Apply ``read`` to the rows of a table; without ``read``, return their features."""
        if self.read is None:
            return _numbers(table, self.features)
        return self.read({name: _array(table.column(name)) for name in self.columns or table.column_names})


class ParquetPart:
    """Batches ``(x, targets)`` of consecutive rows; iterated as often as needed."""

    def __init__(self, parts: ParquetParts, groups: list[_Group]) -> None:
        self._parts, self._groups = parts, groups
        self.dataset = range(groups[0].start, groups[-1].start + groups[-1].rows)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of ``read``, or batches of features and targets."""
        parts = self._parts
        for table in self.tables(parts.columns if parts.read else [parts.features, parts.target]):
            x = parts.inputs(table)
            yield x if parts.read else (x, _numbers(table, parts.target))

    @property
    def numbers(self) -> Tensor:
        """Return the numbers of the rows among all parts, int64, shape (N,): a fit samples by them."""
        return torch.arange(self.dataset.start, self.dataset.stop, device="cpu")

    def tables(self, columns: Sequence[str] | None) -> Iterator[Any]:
        """Yield Arrow tables of one batch each, with some columns or all."""
        names, rows = self._parts.schema.names, 0
        if missing := [name for name in columns or () if name not in names]:
            hint = "Name the columns with features=, target= and identifier=, or say what batches are with read=."
            raise InputError("source", f"a column {missing[0]!r}", f"the columns {', '.join(names)}", hint)
        for path, groups in groupby(self._groups, key=lambda group: group.file):
            with _pyarrow("parquet").ParquetFile(path) as file:
                numbers = [group.number for group in groups]
                for batch in file.iter_batches(self._parts.batch_size, row_groups=numbers, columns=columns):
                    rows += len(batch)
                    yield _pyarrow().Table.from_batches([batch]).replace_schema_metadata()
        if rows != len(self.dataset):
            hint = "The files have changed since they were opened."
            raise InputError("source", f"{len(self.dataset):,} rows", f"{rows:,}", hint)


Source = ParquetParts | str | PathLike[str]


class StateFolder:
    """The folder of a fit's states by part, ``statistics-00003-of-00008-1f2e3d4c.safetensors`` and so on.

    Each state is written completely or not at all, so a killed process leaves no incomplete state, and a part that was
    started several times still has one state.

    Args:
        path: The folder; created if missing, inside an existing folder.
        count: Number of parts.
        source: A text that identifies the data, such as ``ParquetParts(...).fingerprint``; may be empty. The file names
            end in its digest.

    Raises:
        InputError: The folder contains other files, such as states of another source or another number of parts.
    """

    def __init__(self, path: str | PathLike[str], count: int, source: str = "") -> None:
        self.count, self._digest = validate.count("count", count), _digest(source)
        self.path = folder_path("folder", path)
        _open(self.path, "folder", [self.file(kind, part) for kind in (STATISTICS, CURVATURE) for part in range(count)])

    def save(self, state: State) -> None:
        """Write the state of one part."""
        # A symbolic link in the folder is replaced, and never written through.
        save_state(state, self.file(state.kind, next(iter(state.origins))), follow=False)

    def load(self, kind: str, part: int) -> State:
        """Return the state of a part.

        Args:
            kind: ``"statistics"`` or ``"curvature"``.
            part: Index of the part.

        Raises:
            InputError: The state is missing or damaged.
        """
        return load_state(self.file(kind, part))

    def has(self, kind: str, part: int) -> bool:
        """Return whether the state of a part exists and is undamaged; arguments as for :meth:`load`."""
        try:
            self.load(kind, part)
        except InputError:
            return False
        return True

    def missing(self, kind: str) -> list[int]:
        """Return the parts whose state is missing or damaged."""
        return [part for part in range(self.count) if not self.has(kind, part)]

    def merged(self, kind: str) -> State:
        """Merge the states of all parts, reading one at a time.

        Raises:
            InputError: A state is missing or damaged, or the states do not fit together.
        """
        return reduce(State.merge, (self.load(kind, part) for part in range(self.count)))

    def file(self, kind: str, part: int) -> Path:
        """Name of the file of a part."""
        return self.path / f"{kind}-{part:05d}-of-{self.count:05d}-{self._digest}.safetensors"


class EmbeddingFolder:
    """The folder of a corpus's embeddings, ``part-00003-of-00008-1f2e3d4c.parquet`` and so on.

    Columns ``identifier``, ``mu`` (a list of D float32), ``kappa``, ``uncertainty``, and ``p_value`` for a calibrated
    posterior (see :class:`~contrastive_curvature.EmbeddingDistribution`), then the columns passed through. Each file is
    written completely or not at all, so every input appears once, even if a part was started several times. The file
    names end in a digest of posterior, source and columns.

    Args:
        path: The folder; created if missing, inside an existing folder.
        la: The fitted posterior.
        source: The data.
        keep: Columns of the source to pass through; ``None`` for all except features.

    Raises:
        NotFittedError: Before ``fit``, or the calibration is of another posterior.
        InputError: The folder contains other files, or embeddings of another posterior, source or number of parts; or a
        column to pass through is missing, or has the name of a result.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(
        self, path: str | PathLike[str], la: Any, source: ParquetParts, keep: Sequence[str] | None = None
    ) -> None:
        calibrated = present_calibration(la.posterior, la.read) is not None
        self._parts, self.count = source, len(source)
        arrow = _pyarrow()
        types = {field.name: field.type for field in source.schema if field.name != source.features}
        identifier = types.pop(source.identifier, arrow.int64())
        self._keep = list(types if keep is None else dict.fromkeys(keep))
        if isinstance(keep, str) or set(self._keep) - set(types):
            raise InputError("keep", f"a list of columns of the source: {', '.join(types)}", repr(keep))
        if twice := [name for name in self._keep if name in _OWN]:
            hint = "Name the columns to pass through with keep=."
            raise InputError("source", f"columns other than {', '.join(_OWN)}", str(twice), hint)
        columns = [
            ("identifier", identifier),
            ("mu", arrow.list_(arrow.float32(), int(la.n_outputs))),
            ("kappa", arrow.float32()),
            ("uncertainty", arrow.float32()),
            *([("p_value", arrow.float64())] if calibrated else []),
            *((name, types[name]) for name in self._keep),
        ]
        self._schema = arrow.schema(columns)
        # The checksum in its state identifies the posterior.
        self._digest = _digest(
            f"{encoder_digest(la.model)} {la.state_dict()['checksum']} {self._parts.fingerprint} {columns}"
        )
        self.path = folder_path("destination", path)
        _open(self.path, "destination", list(map(self.file, range(self.count))))

    def has(self, part: int) -> bool:
        """Return whether the file of a part exists with all its rows."""
        try:
            rows = _pyarrow("parquet").read_metadata(self.file(part)).num_rows
        except (OSError, ValueError):
            return False
        return bool(rows == len(self._parts[part].dataset))

    def missing(self) -> list[int]:
        """Return the parts whose file is missing or cannot be read."""
        return [part for part in range(self.count) if not self.has(part)]

    def write(self, la: Any, part: int) -> None:
        """Embed a part, and write its file.

        Args:
            la: The posterior of this folder.
            part: Index of the part.

        Raises:
            InputError: A batch is malformed, or the encoder's outputs for it are not finite.
        """

        def write(file: Any) -> None:
            with _pyarrow("parquet").ParquetWriter(file, self._schema, write_page_checksum=True) as writer:
                for table in self._embedded(la, part):
                    writer.write_table(table)

        write_whole(self.file(part), write, follow=False)

    def file(self, part: int) -> Path:
        """Name of the file of a part."""
        return self.path / f"part-{part:05d}-of-{self.count:05d}-{self._digest}.parquet"

    def _embedded(self, la: Any, part: int) -> Iterator[Any]:
        """Yield an Arrow table for every batch of a part."""
        arrow, source, loader = _pyarrow(), self._parts, self._parts[part]
        named, start = source.identifier in source.schema.names, loader.dataset.start
        wanted = [*(source.columns or [source.features]), *([source.identifier] if named else []), *self._keep]
        for table in loader.tables(None if source.read and not source.columns else list(dict.fromkeys(wanted))):
            x, stop = source.inputs(table), start + len(table)
            identifiers = table.column(source.identifier) if named else arrow.array(range(start, stop))
            start = stop
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
            yield arrow.Table.from_arrays([identifiers, mu, *own, *map(table.column, self._keep)], schema=self._schema)


def fit_on_ray(
    posterior: Posterior,
    source: Source | Sequence[Iterable[Any]],
    *,
    folder: str | PathLike[str],
    parts: int | None = None,
    progress_bar: bool | None = None,
    **options: Any,
) -> Any:
    """Fit a posterior on Ray: many processes read the data, one part at a time.

    Every part's state is written to ``folder`` as soon as it is computed. The part of a process that dies is computed
    again; after the death of this process, the same call continues with the missing parts. Ray is started if it does
    not run, and then stopped at the end.

    Args:
        posterior: A posterior that is not fitted yet, copied to every process; or a function without arguments that
            makes the posterior, in every process and here. On GPUs use a function that moves the encoder to ``"cuda"``.
        source: A :class:`ParquetParts`; the path of a Parquet file or a folder of them, with the columns ``features``
            and ``target``, on a file system that all machines share; or a list of loaders, one per part, such as the
            slices of an array.
        folder: Folder of the states, on such a file system. For a list of loaders, stored states are not compared with
            the loaders: use another folder for other data.
        parts: Number of parts for a path; ``None`` for one per 50,000 rows, at least 16 and at most 1,000.
        progress_bar: Whether to show a progress bar; ``None`` shows it after ten seconds.
        **options: Options of ``ray.remote``: the needs of a part, such as ``num_cpus`` (1), ``num_gpus`` (0) and
            ``memory``; and ``max_retries`` (3), the number of restarts of a part whose process has died.

    Returns:
        The fitted posterior: ``posterior`` itself, or the result of the function.

    Raises:
        InputError: An argument, a file or a batch is malformed; this machine has no room for a process; or the folder
            has states of another encoder, other options, other data or another number of parts.
        UnsupportedError: The posterior has no fit in parts, or ray or pyarrow is not installed.
        ProcessError: A process has died too often. What is done is kept.
    """
    ray = validate.package("jobs", "ray", "ray")
    data: Any = _divided(source, parts)
    count = len(data)
    la = _called(posterior)
    # A first pass without data has only the identity that the states of all parts share: encoder and options.
    identity = sorted(la.part_statistics([], (0, count)).identity.items())
    states = StateFolder(folder, count, f"{getattr(data, 'fingerprint', '')} {identity}")

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

    Each part becomes one Parquet file (:class:`EmbeddingFolder`). The part of a process that dies is computed again;
    after the death of this process, the same call continues with the missing parts. Ray is started if it does not run,
    and then stopped at the end.

    Args:
        posterior: The fitted posterior, copied to every process; or a function without arguments that makes it in every
            process and here, for example on GPUs.
        source: A :class:`ParquetParts` or a path, see :func:`fit_on_ray`; targets are not used, and ``read`` may return
            ``x`` alone. The column ``identifier`` holds the identifiers; without it, the row numbers are used.
        destination: A folder, on a file system that all machines share.
        parts: Number of parts, and so of files; ``None`` as in :func:`fit_on_ray`.
        keep: Columns of the source to pass through; ``None`` for all except ``features``.
        progress_bar: See :func:`fit_on_ray`.
        **options: See :func:`fit_on_ray`.

    Returns:
        The folder.

    Raises:
        NotFittedError: Before ``fit``, or the calibration is of another posterior.
        InputError: An argument, a file or a batch is malformed; this machine has no room for a process; or the folder
        contains other files.
        UnsupportedError: ray or pyarrow is not installed.
        ProcessError: A process has died too often. What is done is kept.
    """
    ray = validate.package("jobs", "ray", "ray")
    data = _divided(source, parts)
    if not isinstance(data, ParquetParts):
        raise InputTypeError("source", "a ParquetParts or a path", f"a {type(data).__name__}")
    folder = EmbeddingFolder(destination, _called(posterior), data, keep)
    with _running(ray, options):
        _run(ray, posterior, folder.write, folder.missing(), "embeddings", progress_bar, options)
    return folder


@contextmanager
def _running(ray: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Use the running Ray, or start Ray here and stop it at the end."""
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        # A cluster may grow, but this machine does not: a task without room would wait forever.
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
    """Call ``work`` with the posterior and every part, in processes of Ray; ``work`` writes its own result.

    Raises:
        ProcessError: A process has died too often.
        Exception: The error of a part, unchanged, with a note that names the part.
    """
    # Ray starts a new process for every task on a GPU, unless max_calls=0 lets a process continue.
    task = ray.remote(max_calls=0, **options)(_part)
    # Stored once for all processes; in a list, because otherwise Ray reads it again for every part.
    stored = [ray.put((posterior, work))]
    running = {task.remote(stored, part): part for part in parts}
    try:
        with Progress(progress_bar).bar(f"[{name}]", len(parts)) as advance:
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
                advance(1)
    finally:
        for task_of_part in running:
            ray.cancel(task_of_part, force=True)


def _part(stored: list[Any], part: int) -> None:
    """Compute a part in a process of Ray, and write it."""
    la, work = _held(stored[0])
    work(la, part)


@lru_cache(maxsize=1)
def _held(stored: Any) -> tuple[Any, Callable[[Any, int], None]]:
    """Return the posterior and the work, which a process reads or makes once for all its parts."""
    posterior, work = validate.package("jobs", "ray", "ray").get(stored)
    return _called(posterior), work


def _divided(source: Any, parts: int | None) -> Any:
    """Return data in parts; a path is divided into parts."""
    if isinstance(source, (str, PathLike)):
        return ParquetParts(source, parts)
    if parts is not None:
        raise InputError("parts", "None beside a source that is in parts", parts)
    return source


def _called(posterior: Any) -> Any:
    """Return the posterior, or the result of a function without arguments."""
    # A posterior is also callable.
    la = posterior() if callable(posterior) and not isinstance(posterior, ContrastiveLaplace) else posterior
    if not isinstance(la, ContrastiveLaplace):
        wanted = "a posterior of likelihood='contrastive', or a function that returns one"
        hint = "laplace.Laplace(encoder, likelihood='contrastive', ...) makes one."
        raise InputTypeError("posterior", wanted, f"a {type(la).__name__}", hint)
    return la


def _open(folder: Path, argument: str, files: list[Path]) -> None:
    """Create the folder of a job if missing; refuse a folder with files other than these."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError(argument, "a folder in one that exists", f"no folder {folder.parent}") from None
    # Unfinished files of killed writers begin with a dot.
    names = {name for name in os.listdir(folder) if not name.startswith(".")}
    if others := sorted(names - {file.name for file in files}):
        wanted = f"a new or an empty folder, or one of this job in {len(files)} files"
        hint = "Use another folder, or delete this one to start over."
        raise InputError(argument, wanted, f"{folder}, which has {others[0]!r} in it", hint)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _files(path: Any) -> list[Path]:
    """Return the files with absolute paths, since other processes may have other working directories."""
    if isinstance(path, (str, os.PathLike)):
        one = Path(path).absolute()
        # Other tools also skip names that begin with a dot or an underscore.
        files = [file for file in sorted(one.glob("*.parquet")) if file.name[0] not in "._"] if one.is_dir() else [one]
    else:
        files = [Path(part).absolute() for part in path]
    if not files or len(set(files)) < len(files):
        raise InputError("source", "different files *.parquet, at least one", f"{len(files)} in {path!r}")
    return files


def _numbers(table: Any, name: str) -> Tensor:
    """Convert a column of numbers, or lists of numbers, to a tensor; half precision becomes float32."""
    column = table.column(name).combine_chunks()
    missing = column.null_count + (column.flatten().null_count if hasattr(column.type, "list_size") else 0)
    if missing:
        raise InputError("source", f"a value in every row of the column {name!r}", f"{missing} missing")
    values = _array(column)
    if values.dtype.kind not in "biuf":
        wanted = f"numbers, or lists of them of a fixed length, in the column {name!r}"
        hint = "Number the classes; pyarrow.FixedSizeListArray.from_arrays makes a column of lists."
        raise InputTypeError("source", wanted, str(column.type), hint)
    return torch.from_numpy(values.astype(np.float32) if values.dtype == np.float16 else values)


def _array(column: Any) -> NDArray[Any]:
    """Convert a column to an array: lists of a fixed length become rows, types unknown to numpy objects."""
    whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if _pyarrow("types").is_fixed_size_list(whole.type) and not whole.null_count:
        flat = _array(whole.flatten())
        return flat.reshape(len(whole), whole.type.list_size, *flat.shape[1:])
    return np.array(whole.to_numpy(zero_copy_only=False))


def _pyarrow(module: str = "") -> Any:
    return validate.package("jobs", f"pyarrow.{module}" if module else "pyarrow", "parquet")
