"""Features on disk, the inputs of an encoder's last layer: :func:`features` writes them, ``fit`` reads the folder.

A folder has three files of consecutive rows, :class:`Arrays`, and a header that is written after them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header, folder_path, locked, read_header, target_folder, write_tensors
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.given_features import FeatureSource, difference, feature_inputs
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.loader import check_loader, check_model, first_batch, in_fixed_order, read_views
from contrastive_curvature.progress import Progress

__all__ = ["FeatureFolder", "features"]

HEADER = "header.safetensors"
"""The file that says what the others hold. It is written after them, so a folder whose header is complete is, too."""

Precision = Literal["float16", "bfloat16", "float32", "float64"]
"""torch's names of the types that features can be saved in."""

TargetType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]

_WRITE_AGAIN = "Call contrastive_curvature.features with the same arguments: it writes what is missing."

_PART_BYTES = 2**26
"""Features of one part: what is held in memory, written at once, and lost by an interruption."""

_PROBE = 8
"""Points of each part that is kept whose features are computed again."""

_ROUNDING = 1e-2
"""Largest difference of a point's features, relative to their norm: half precision, and batches of other sizes."""

_MOST_LOST = 0.01
"""Rounding error of a feature, relative to the largest of its point, that is let pass."""

_OTHER = "Use another path; nothing has been changed."


class FeatureHeader(Header):
    """The contents of a feature folder.

    Args:
        dtype: Dtype of the features.
        source: The encoder that computed the features.
        target_type: Name of the targets' dtype in torch and NumPy.
        target_shape: Shape of one target.
        identifiers: NumPy's name of the identifiers' dtype: ``int64``, or ``S`` and the length in bytes of the longest
            text in UTF-8.
        rows_per_part: Number of points of every part but the last.
        class_names: Names of the classes that the targets number; ``None`` without.
        parts: Checksums of the written parts.
        points: Number N of points; ``None`` until all points are written.
    """

    kind: ClassVar[str] = "features"
    described: ClassVar[str] = "a feature folder"
    made_by: ClassVar[str] = "contrastive_curvature.features(encoder, loader, path) writes one."
    repaired_by: ClassVar[str] = "Delete the folder, and write it again."

    dtype: Precision
    source: FeatureSource
    target_type: TargetType
    target_shape: tuple[PositiveInt, ...]
    identifiers: Annotated[str, Field(pattern="^(int64|S[1-9][0-9]*)$")]
    rows_per_part: PositiveInt
    class_names: tuple[str, ...] | None = None
    parts: tuple[str, ...] = ()
    points: PositiveInt | None = None


class Arrays:
    """``features.bin``, ``targets.bin`` and ``identifiers.bin``: consecutive rows, without a header.

    Args:
        folder: Folder of the files.
        header: Header with the dtypes, all stored little-endian; ``bfloat16``, unknown to NumPy, is stored as its bits,
            ``uint16``.
    """

    def __init__(self, folder: Path, header: FeatureHeader) -> None:
        features = np.dtype("uint16" if header.dtype == "bfloat16" else header.dtype)
        self.kinds = {
            "features": np.dtype((features.newbyteorder("<"), (header.source.width,))),
            "targets": np.dtype((np.dtype(header.target_type).newbyteorder("<"), header.target_shape)),
            "identifiers": np.dtype(header.identifiers).newbyteorder("<"),
        }
        self.paths = {name: folder / f"{name}.bin" for name in self.kinds}
        self._rows_per_part = header.rows_per_part
        self._mapped: dict[str, NDArray[Any]] = {}

    def keep(self, parts: int) -> None:
        """Truncate the files to this number of parts; :meth:`write` appends to them."""
        for name, path in self.paths.items():
            if path.is_symlink():
                got = "a symbolic link, which would be written through"
                raise InputError(str(path), "a file of this folder", got, "Put the file in its place.")
            path.touch()
            os.truncate(path, parts * self._rows_per_part * self.kinds[name].itemsize)

    def write(self, rows: dict[str, NDArray[Any]]) -> None:
        """Append a part to the files."""
        self._mapped.clear()
        for name, path in self.paths.items():
            with path.open("ab") as file:
                file.write(rows[name].astype(self.kinds[name].base, copy=False).tobytes())
                file.flush()
                os.fsync(file.fileno())

    def checksum(self, part: int) -> str:
        """Return the checksum of a part on disk, even of an incomplete part."""
        digest = hashlib.sha256()
        for name, path in self.paths.items():
            size = self._rows_per_part * self.kinds[name].itemsize
            if path.is_file():
                digest.update(np.fromfile(path, np.uint8, size, offset=part * size).data)
        return digest.hexdigest()

    def whole(self, header: FeatureHeader) -> tuple[str, ...]:
        """Return the checksums of the parts before the first damaged one."""
        damaged = (part for part, checksum in enumerate(header.parts) if self.checksum(part) != checksum)
        return header.parts[: next(damaged, None)]

    def read(self, name: str, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Return rows of an array."""
        if name not in self._mapped:
            # Copy-on-write: torch warns about read-only arrays, and the file must not change.
            self._mapped[name] = np.memmap(self.paths[name], dtype=self.kinds[name], mode="c")
        mapped = self._mapped[name]
        if isinstance(rows, slice):
            return mapped[rows]
        # Read in the order on disk, then restored to the requested order.
        order = rows.argsort()
        return mapped[rows[order]][order.argsort()]


def decode(stored: NDArray[Any], dtype: str) -> Tensor:
    """Copy stored features to float32; float64 stays float64."""
    features = _as_tensor(stored)
    if dtype == "bfloat16":
        features = features.view(torch.bfloat16)
    return features.to(torch.float64 if dtype == "float64" else torch.float32)


class FeatureFolder:
    """The folder of :func:`contrastive_curvature.features`, as a loader of batches ``(inputs, targets)``.

    A last-layer posterior accepts the folder wherever it accepts a loader, any number of times, and ``la(inputs)``
    accepts the inputs of one batch. Batches are read on demand: a batch of B points needs 4 B F bytes.

    Args:
        path: The folder.
        batch_size: Points of a batch.
        seed: ``None`` for the order in which the points were written. An integer for a random order, the same in every
            pass; needed if pairs or candidates come from one batch (``pairs="batch"``, losses of anchors).

    Attributes:
        path: The absolute path of the folder, since other processes may have other working directories.
        batch_size: Points of a batch.
        seed: Seed of the order of the points.
        dtype: torch's dtype of the stored features.
        width: Number F of features of a point.
        last_layer_name: Name of the layer whose inputs the features are.
        source: The encoder that computed the features.
        class_names: Names of the classes that the targets number; ``None`` without.

    Raises:
        InputError: The folder is not a feature folder, is incomplete or damaged, or has files of the wrong size.
    """

    def __init__(self, path: str | PathLike[str], batch_size: int = 4096, *, seed: int | None = None) -> None:
        self.path = folder_path("path", path)
        self._header = read_header(self.path / HEADER, FeatureHeader)
        self.batch_size = validate.count("batch_size", batch_size)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InputTypeError("seed", "a whole number or None", f"a {type(seed).__name__}")
        self.seed = seed
        if self._header.points is None:
            got = f"one with {len(self._header.parts)} parts"
            raise InputError(str(self.path), "a complete feature folder", got, _WRITE_AGAIN)
        self._arrays, self._rows = Arrays(self.path, self._header), range(self._header.points)
        for name, path in self._arrays.paths.items():
            wanted = self._header.points * self._arrays.kinds[name].itemsize
            size = path.stat().st_size if path.is_file() else None
            if size != wanted:
                got = "no such file" if size is None else f"{size:,} bytes"
                raise InputError(str(path), f"{wanted:,} bytes", got, _WRITE_AGAIN)
        self.dtype: torch.dtype = getattr(torch, self._header.dtype)
        self.source, self.class_names = self._header.source, self._header.class_names
        self.width, self.last_layer_name = self.source.width, self.source.last_layer

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self._rows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield batches of features, converted to float32 (float64 stays float64), and targets."""
        order = None if self.seed is None else self.numbers.numpy()
        for start in range(0, len(self._rows), self.batch_size):
            stop = start + self.batch_size
            rows = self._slice(start, stop) if order is None else order[start:stop]
            features = decode(self._arrays.read("features", rows), self._header.dtype)
            yield feature_inputs(features, self.source), _as_tensor(self._arrays.read("targets", rows))

    def __repr__(self) -> str:
        """Show path, shape and dtype."""
        rows = self._rows
        some = "" if len(rows) == self._header.points else f", points {rows.start} to {rows.stop}"
        shape = f"{self._header.points} x {self.width}, {self._header.dtype}"
        return f"FeatureFolder({str(self.path)!r}: {shape}{some})"

    @property
    def dataset(self) -> range:
        """Return the rows of the folder, named as in a ``DataLoader``: a fit estimates its duration from it."""
        return self._rows

    @property
    def numbers(self) -> Tensor:
        """Return the row of every point in the folder, in the order of the batches, int64, shape (N,).

        Fits in several processes identify the points of their shards by these numbers.
        """
        if self.seed is None:
            return torch.arange(self._rows.start, self._rows.stop)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(len(self._rows), generator=generator) + self._rows.start

    @property
    def targets(self) -> Tensor:
        """Return the targets of all points, shape (N, ...), in the order in which they were written."""
        return _as_tensor(self._arrays.read("targets", self._slice()))

    @property
    def identifiers(self) -> NDArray[Any]:
        """Return the identifiers of all points, shape (N,): int64, or texts."""
        stored = self._arrays.read("identifiers", self._slice())
        return np.char.decode(stored, "utf-8") if stored.dtype.kind == "S" else stored.copy()

    @property
    def features(self) -> NDArray[Any]:
        """Return the stored features, shape (N, F), mapped into memory; ``bfloat16`` as its bits, ``uint16``.

        The array is a private copy-on-write mapping: writing to it does not change the file.
        """
        # A separate mapping, so that writing to it does not change a batch either.
        return Arrays(self.path, self._header).read("features", self._slice())

    def numpy(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return the features of some points, shape (stop - start, F), as float32 (float64 stays float64).

        Args:
            start: First point, counted from the first of this folder or shard.
            stop: The point after the last one; ``None`` for all.

        Raises:
            InputError: ``start`` or ``stop`` is out of range.
        """
        n = len(self._rows)
        stop = n if stop is None else stop
        if not 0 <= start <= stop <= n:
            raise InputError("start, stop", f"numbers of points from 0 to {n}", f"{start!r}, {stop!r}")
        features: NDArray[Any] = decode(
            self._arrays.read("features", self._slice(start, stop)), self._header.dtype
        ).numpy()
        return features

    def shard(self, index: int, count: int) -> FeatureFolder:
        """Return one of ``count`` contiguous parts of nearly equal size, for example one per process.

        Args:
            index: Number of the part, from 0.
            count: Number of parts. With more parts than points, some parts are empty.

        Returns:
            A folder of these points alone; its :attr:`numbers` are their rows in the whole folder.

        Raises:
            InputError: ``index`` is out of range.
        """
        validate.count("count", count)
        if not 0 <= index < count:
            raise InputError("index", f"a whole number from 0 to {count - 1}", index)
        n, first = len(self._rows), self._rows.start
        rows = range(first + n * index // count, first + n * (index + 1) // count)
        return _opened(self.path, self.batch_size, self.seed, rows)

    def verify(self) -> None:
        """Read the whole folder, and compare it with the checksums from its writing.

        Raises:
            InputError: A part is damaged; the message names its points.
        """
        part = len(self._arrays.whole(self._header))
        if part < len(self._header.parts):
            start = part * self._header.rows_per_part
            stop = min(start + self._header.rows_per_part, self._header.points or 0)
            got = f"points {start} to {stop - 1} are damaged (part {part})"
            raise InputError(str(self.path), "the content that was written", got, _WRITE_AGAIN)

    def _slice(self, start: int = 0, stop: int | None = None) -> slice:
        """Return rows of the folder for points of this shard."""
        some = self._rows[start:stop]
        return slice(some.start, some.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments to open the same points in another process, without features."""
        return _opened, (self.path, self.batch_size, self.seed, self._rows)


def _opened(path: Path, batch_size: int, seed: int | None, rows: range) -> FeatureFolder:
    folder = FeatureFolder(path, batch_size, seed=seed)
    folder._rows = rows
    return folder


def _as_tensor(stored: NDArray[Any]) -> Tensor:
    """Copy an array into memory, in the byte order of the machine."""
    return torch.from_numpy(np.array(stored, dtype=stored.dtype.newbyteorder("=")))


def features(
    encoder: nn.Module,
    loader: Iterable[Any],
    path: str | PathLike[str],
    *,
    dtype: str | torch.dtype = "float32",
    identifiers: Sequence[int] | Sequence[str] | NDArray[Any] | Tensor | None = None,
    last_layer_name: str | None = None,
    label_key: str = "labels",
    rows_per_part: int | None = None,
    class_names: Sequence[str] | None = None,
    progress_bar: bool | None = None,
) -> FeatureFolder:
    """Write the inputs of an encoder's last linear layer, with targets and identifiers, into a folder.

    ``fit``, ``optimize_prior_precision``, ``calibrate`` and ``measure_classes`` of a last-layer posterior accept the
    folder in place of the loader. The last layer may be trained further; the layers before it must not change.

    After an interruption, the same call continues the run. A complete folder is checked and returned. A call with
    another encoder, other options or other data overwrites nothing.

    Args:
        encoder: Any module that maps a batch to (N, D) and ends in a linear layer, after which only an l2-normalisation
            module may follow. It runs in evaluation mode.
        loader: Batches ``(x, targets)`` or mappings, read once. A shuffling ``DataLoader`` is read in the order of its
            data set. Targets are tensors with one entry per point: class labels, or targets of a relation.
        path: The folder; created if missing, inside an existing folder.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` (at most 65504 in absolute value) or ``"float64"``.
        identifiers: One integer or one text per point, all different; ``None`` numbers the points from 0.
        last_layer_name: Name of the last layer; ``None`` detects it.
        label_key: Key of the targets in batches that are mappings; ``dict_key_y`` of laplace-torch.
        rows_per_part: Number of points in a part, which is written, checked and lost as a whole; ``None`` for 64 MiB of
            features.
        class_names: Names of the classes 0, 1, ... that the targets number, for the command line, which compares the
            names.
        progress_bar: Whether to show a progress bar; ``None`` shows it after ten seconds.

    Returns:
        The folder, with batches of 4,096 points.

    Raises:
        InputError: An argument or a batch is malformed; a feature is not finite, or too large for ``dtype``; the loader
            is empty; the folder belongs to another encoder, other options or other data, or another process is writing
            it.
        UnsupportedError: Batches have two views; the loader leaves points out; there is no last linear layer, or the
            raw outputs cannot be reached.
    """
    check_model(encoder, half=True)
    dtype = str(dtype).removeprefix("torch.")
    validate.choice("dtype", dtype, get_args(Precision))
    if rows_per_part is not None:
        validate.count("rows_per_part", rows_per_part)
    if isinstance(class_names, str) or not all(isinstance(name, str) for name in class_names or ()):
        raise InputTypeError("class_names", "a list of texts", repr(class_names))
    progress = Progress(progress_bar)
    numbers = None if identifiers is None else _stored_identifiers(identifiers)
    check_loader(loader, "loader", once=True)
    if getattr(loader, "drop_last", False) is True:
        raise UnsupportedError("loader: drop_last=True leaves out the last points of the data. Use drop_last=False.")
    loader = in_fixed_order(loader)
    try:
        n = len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        n = None
    if n is not None:
        _check_number(numbers, n)
    folder = target_folder("path", path, HEADER, FeatureHeader.described, overwrite=True)
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise InputError("path", "a folder in one that exists", f"no folder {folder.parent}") from None
    options: dict[str, Any] = {
        "dtype": dtype,
        "identifiers": f"S{numbers.itemsize}" if numbers is not None and numbers.dtype.kind == "S" else "int64",
        "rows_per_part": rows_per_part,
        "class_names": None if class_names is None else tuple(class_names),
    }
    with locked(folder), evaluation_mode(encoder), torch.no_grad():
        header = read_header(folder / HEADER, FeatureHeader) if (folder / HEADER).is_file() else None
        if header is not None:
            _check_same(folder, header, encoder, {**options, "last_layer_name": last_layer_name})
            last_layer_name = header.source.last_layer
        batches = _batches(encoder, progress.over(loader, "[features]"), label_key)
        x, y = first = first_batch(batches, "loader")
        analysed = Encoder(encoder, x, last_layer_name, label_key=label_key)
        analysed.require_last_layer()
        if header is None:
            source = FeatureSource.of(encoder, str(analysed.last_layer_name))
            rows = max(1, _PART_BYTES // (source.width * getattr(torch, dtype).itemsize))
            options |= {"rows_per_part": rows_per_part or rows, "source": source, "target_type": _target_type(y)}
            header = FeatureHeader(target_shape=tuple(y.shape[1:]), **options)
        writer = _Writer(folder, header, analysed, numbers)
        for x, y in itertools.chain([first], batches):
            writer.add(x, y)
            # For a complete folder, only the first batch is compared.
            if writer.header.points is not None and writer.header.points == n:
                break
        else:
            writer.finish()
    return FeatureFolder(folder)


def _check_same(folder: Path, header: FeatureHeader, encoder: nn.Module, options: dict[str, Any]) -> None:
    """Refuse to continue with a folder of another encoder or other options."""
    there = {**header.model_dump(), "last_layer_name": header.source.last_layer}
    for name, value in options.items():
        if value not in (None, there[name]):
            wanted = f"{there[name]!r}, that of the folder {folder}"
            raise InputError(name, wanted, repr(value), _OTHER)
    if (reason := difference(encoder, header.source)) is not None:
        raise InputError("path", f"features of this encoder in {folder}", reason, _OTHER)


def _batches(encoder: nn.Module, loader: Iterable[Any], label_key: str) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield inputs on the encoder's device, and targets."""
    for batch in loader:
        views = read_views(encoder, batch, label_key, "loader")
        x, y = views.first, views.targets
        if views.second is not None or y is None:
            raise UnsupportedError(
                "loader: batches of two views. A folder keeps one view of every input: yield (x, targets), or fit with "
                "the loader itself."
            )
        n, shape = input_length(x), tuple(y.shape)
        if y.ndim == 0 or len(y) != n or 0 in shape:
            raise InputError("loader", f"one target for each of the {n} points of a batch", f"shape {shape}")
        yield x, y


class _Writer:
    """Accepts batches in order, computes the missing features, and writes whole parts.

    Args:
        folder: The folder.
        header: Header of an earlier run, or a header without parts.
        encoder: The encoder, in evaluation mode.
        identifiers: Identifiers of all points; ``None`` for their numbers.
    """

    def __init__(self, folder: Path, header: FeatureHeader, encoder: Encoder, identifiers: NDArray[Any] | None) -> None:
        self.folder, self.header, self.encoder, self.identifiers = folder, header, encoder, identifiers
        self.arrays = Arrays(folder, header)
        whole = self.arrays.whole(header)
        if header.points is None or whole != header.parts:
            self._update(parts=whole, points=None)
            self.arrays.keep(len(whole))
        self.kept = self.header.points or len(whole) * header.rows_per_part
        self.points, self.waiting = 0, list[dict[str, NDArray[Any]]]()

    def add(self, x: Inputs, y: Tensor) -> None:
        """Add one batch."""
        header, start, n = self.header, self.points, input_length(x)
        if (_target_type(y), tuple(y.shape[1:])) != (header.target_type, header.target_shape):
            known = f"targets of {header.target_type} and shape (B, {', '.join(map(str, header.target_shape))})"
            raise InputError("loader", f"{known}, as before", f"{y.dtype} and shape {tuple(y.shape)}")
        if header.class_names is not None:
            last = len(header.class_names) - 1
            if y.ndim != 1 or y.is_floating_point() or int(y.min()) < 0 or int(y.max()) > last:
                wanted = f"targets that are whole numbers from 0 to {last}, one a point, as class_names has"
                raise InputError("loader", wanted, f"{y.dtype}, shape {tuple(y.shape)}, up to {y.max()}")
        if self.identifiers is None:
            identifiers = np.arange(start, start + n, dtype=np.int64)
        else:
            identifiers = self.identifiers[start : start + n]
            if len(identifiers) < n:
                _check_number(self.identifiers, start + n)
        rows = {"targets": y.detach().cpu().numpy(), "identifiers": identifiers}
        kept = min(n, max(0, self.kept - start))
        if kept:
            self._compare(x, {name: values[:kept] for name, values in rows.items()})
        if kept < n:
            if header.points is not None:
                self._refuse(f"more than the {header.points} points that are there")
            rows = {name: values[kept:] for name, values in rows.items()}
            self.waiting.append({**rows, "features": _encoded(self._features(x)[kept:], header.dtype, start + kept)})
        self.points += n
        while self.points - self.kept >= header.rows_per_part:
            self._write(header.rows_per_part)

    def finish(self) -> None:
        """Write the last part, and complete the folder."""
        _check_number(self.identifiers, self.points)
        if self.points < self.kept:
            self._refuse(f"{self.points} points, and {self.kept} are there")
        if self.points > self.kept:
            self._write(self.points - self.kept)
        if self.header.points is None:
            self._update(points=self.points)

    def _features(self, x: Inputs) -> Tensor:
        phi = self.encoder.forward_with_features(x).features
        wanted = (input_length(x), self.header.source.width)
        if phi.shape != wanted:
            raise InputError("encoder", f"features of shape {wanted}", f"shape {tuple(phi.shape)}")
        return phi.detach().cpu()

    def _compare(self, x: Inputs, rows: dict[str, NDArray[Any]]) -> None:
        """Refuse data other than the stored points; for features, compare a few points per part."""
        start, kept = self.points, len(rows["targets"])
        for name, values in rows.items():
            # Compared as bytes, so that NaN targets are equal too.
            if self.arrays.read(name, slice(start, start + kept)).tobytes() != values.tobytes():
                self._refuse(f"other {name} for the points from row {start} on")
        first = -start % self.header.rows_per_part
        if first >= kept:
            return
        now = self._features(slice_inputs(x, slice(first, min(first + _PROBE, kept)))).double()
        stored = self.arrays.read("features", slice(start + first, start + first + len(now)))
        before = decode(stored, self.header.dtype).double()
        apart = torch.linalg.vector_norm(before - now, dim=1)
        if bool((apart > _ROUNDING * torch.linalg.vector_norm(before, dim=1)).any()):
            hint = " Random augmentation must be off."
            self._refuse(f"other features for the points from row {start + first} on", hint)

    def _write(self, count: int) -> None:
        """Write ``count`` waiting points as one part, first to the disk and then into the header."""
        rows = {name: np.concatenate([some[name] for some in self.waiting]) for name in self.arrays.kinds}
        self.arrays.write({name: values[:count] for name, values in rows.items()})
        self.waiting = [{name: values[count:] for name, values in rows.items()}]
        self.kept += count
        self._update(parts=(*self.header.parts, self.arrays.checksum(len(self.header.parts))))

    def _update(self, **changes: Any) -> None:
        self.header = self.header.model_copy(update=changes)
        write_tensors(self.folder / HEADER, self.header, {}, follow=False)

    def _refuse(self, got: str, hint: str = "") -> NoReturn:
        wanted = f"the data of the folder {self.folder}, in the same order"
        raise InputError("loader", wanted, got, _OTHER + hint)


def _target_type(targets: Tensor) -> str:
    """Return the name of the dtype of the stored targets."""
    name = str(targets.dtype).removeprefix("torch.")
    if name not in get_args(TargetType):
        wanted = f"targets of one of the types {', '.join(get_args(TargetType))}"
        raise InputTypeError("loader", wanted, str(targets.dtype))
    return name


def _stored_identifiers(value: Sequence[int] | Sequence[str] | NDArray[Any] | Tensor) -> NDArray[Any]:
    """Convert a user's identifiers to their stored form: int64, or texts in UTF-8."""
    plain: list[Any] = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)
    stored = np.asarray(plain)
    if stored.ndim == 1 and stored.dtype.kind in "iu" and np.can_cast(stored.dtype, np.int64):
        stored = stored.astype(np.int64)
    else:
        wanted = "whole numbers below 2^63 or texts, one for each point"
        other = next((one for one in plain if not isinstance(one, str)), None)
        if other is not None or not plain:
            raise InputTypeError("identifiers", wanted, f"a {type(other).__name__} among them" if plain else "none")
        if any(one.endswith("\0") for one in plain):
            # NumPy pads texts with zero bytes.
            raise InputError("identifiers", "texts that do not end in a zero byte", "one that does")
        stored = np.array([one.encode() for one in plain])
    different, counts = np.unique(stored, return_counts=True)
    if len(different) < len(stored):
        shown = different[counts > 1][0]
        shown = shown.decode() if isinstance(shown, bytes) else int(shown)
        raise InputError("identifiers", "a different one for each point", f"{shown!r} twice")
    return stored


def _check_number(identifiers: NDArray[Any] | None, points: int) -> None:
    """Refuse a number of identifiers that differs from the number of points."""
    if identifiers is not None and len(identifiers) != points:
        got = f"{len(identifiers)} identifiers, and {points} points"
        raise InputError("identifiers", "one for each point of the loader", got)


def _encoded(wide: Tensor, dtype: str, first_row: int) -> NDArray[Any]:
    """Convert features (B, F) to their stored form; refuse numbers that the precision cannot hold.

    ``first_row`` is the row of the first point in the data.
    """
    rounded = wide.to(getattr(torch, dtype)).contiguous()
    sizes = wide.abs().amax(dim=1)
    lost = (wide - rounded.to(wide.dtype)).abs().amax(dim=1)
    # In this form, NaN and infinity count too.
    bad = ~(lost <= _MOST_LOST * sizes)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        size, where = float(sizes[row]), f"in row {first_row + row} (counted from 0)"
        if not math.isfinite(size):
            raise InputError("loader", "finite features", f"NaN or infinity {where}", "Look at that input.")
        largest = torch.finfo(rounded.dtype).max
        wanted = "features that are rounded by less than a hundredth of the largest of their point"
        if size > largest:
            wanted = f"features of at most {largest:.6g} in absolute value"
        hint = "Use dtype='bfloat16', of the same size, or 'float32'." if dtype == "float16" else "Use dtype='float64'."
        raise InputError(f"dtype={dtype!r}", wanted, f"a largest feature of {size:.6g} {where}", hint)
    # NumPy does not know bfloat16.
    return rounded.view(torch.uint16).numpy() if dtype == "bfloat16" else rounded.numpy()
