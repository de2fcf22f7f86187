"""``features(encoder, loader, path)``: one pass of the encoder over the data, kept on disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.artifact import ArtifactFolder
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.io.feature_folder.columns import check_identifiers, decode, encode, target_type
from contrastive_curvature.io.feature_folder.folder import FeatureFolder
from contrastive_curvature.io.feature_folder.header import FORMATS, PRECISIONS, FeatureHeader
from contrastive_curvature.io.feature_folder.storage import storage_of, without_damaged
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.given_features import FeatureSource, difference
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.loader import check_loader, check_model, first_batch, in_fixed_order, read_views
from contrastive_curvature.progress import Progress

_PART_BYTES = 2**26
"""Features of one part: what is held in memory, written at once, and lost by an interruption."""

_PROBE = 8
"""Points that the encoder is analysed with, and of each part that is kept those that are computed again."""

_ROUNDING = 1e-2
"""Largest difference of a point's features, relative to their norm: half precision, and batches of other sizes."""

_OTHER = "Use another path; nothing has been changed."


def features(
    encoder: nn.Module,
    loader: Iterable[Any],
    path: str | PathLike[str],
    *,
    dtype: str | torch.dtype = "float32",
    format: str = "memmap",
    identifiers: Sequence[int] | Sequence[str] | NDArray[Any] | Tensor | None = None,
    last_layer_name: str | None = None,
    label_key: str = "labels",
    rows_per_part: int | None = None,
    class_names: Sequence[str] | None = None,
    progress_bar: bool | None = None,
) -> FeatureFolder:
    """Write what the last linear layer of an encoder takes in, with targets and identifiers, into a folder.

    ``fit``, ``optimize_prior_precision``, ``calibrate`` and ``measure_classes`` of a last-layer posterior take the
    folder in place of the loader. The last layer may be trained further; everything before it must stay as it is.

    A run that was interrupted goes on when it is called again with the same arguments. A complete folder is checked and
    returned. Features of another encoder, other options or other data overwrite nothing.

    Args:
        encoder: Any module that maps a batch to (N, D) and ends in a linear layer, after which only an l2-normalisation
            module may follow. It runs in evaluation mode.
        loader: Batches ``(x, targets)`` or mappings; run over once. A shuffling ``DataLoader`` is read in the order of
            its data set. Targets are tensors with one entry a point: class labels, or whatever a relation takes.
        path: The folder; it is made if need be, inside a folder that exists.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` (at most 65504 in absolute value) or ``"float64"``.
        format: ``"memmap"``: plain arrays, which are mapped into memory. ``"parquet"``: Parquet files, for other tools;
            needs pyarrow.
        identifiers: One whole number or one text a point, all different; ``None`` numbers the points from 0.
        last_layer_name: Name of the last layer, ``None`` to find it.
        label_key: Where batches that are mappings keep the targets; ``dict_key_y`` of laplace-torch.
        rows_per_part: Points of one part, which is written, checked and lost as a whole; ``None`` for 64 MiB of
            features.
        class_names: Names of the classes 0, 1, ... that the targets number, for the command line, which compares names.
        progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

    Returns:
        The folder, with batches of 4,096 points.

    Raises:
        InputError: An argument or a batch is malformed; a feature is not finite, or too large for ``dtype``; the loader
            is empty; the folder is of another encoder, of other options or of other data, or somebody else writes it.
        UnsupportedError: Batches of two views; a loader that leaves points out; no last linear layer, or raw outputs
            that cannot be reached; pyarrow is missing.
    """
    check_model(encoder, half=True)
    dtype = str(dtype).removeprefix("torch.")
    validate.choice("dtype", dtype, PRECISIONS)
    validate.choice("format", format, FORMATS)
    if rows_per_part is not None:
        validate.count("rows_per_part", rows_per_part)
    progress = Progress(progress_bar)
    names = None if class_names is None else _check_names(class_names)
    numbers = None if identifiers is None else check_identifiers(identifiers)
    kind = f"S{numbers.itemsize}" if numbers is not None and numbers.dtype.kind == "S" else "int64"
    check_loader(loader, "loader", once=True)
    if getattr(loader, "drop_last", False) is True:
        raise UnsupportedError("loader: drop_last=True leaves out the last points of the data. Use drop_last=False.")
    loader = in_fixed_order(loader)
    n = _length(loader)
    if numbers is not None and n is not None:
        _check_number(numbers, n)
    folder = ArtifactFolder(path, FeatureHeader)
    folder.make()
    given = {
        "format": format,
        "dtype": dtype,
        "identifiers": kind,
        "rows_per_part": rows_per_part,
        "last_layer_name": last_layer_name,
        "class_names": names,
    }
    with folder.locked(wait=False), evaluation_mode(encoder), torch.no_grad():
        header = folder.read() if folder.exists else None
        if header is not None:
            _check_same(folder, header, encoder, given)
            last_layer_name = header.source.last_layer
        batches = _batches(encoder, progress.over(loader, "[features]"), label_key)
        x, y = first = first_batch(batches, "loader")
        analysed = Encoder(encoder, x, last_layer_name, label_key=label_key)
        analysed.require_last_layer()
        if header is None:
            source = FeatureSource.of(encoder, str(analysed.last_layer_name))
            header = FeatureHeader(
                format=format,
                dtype=dtype,
                source=source,
                target_type=target_type(y),
                target_shape=tuple(y.shape[1:]),
                identifiers=kind,
                class_names=names,
                rows_per_part=rows_per_part or max(1, _PART_BYTES // (source.width * getattr(torch, dtype).itemsize)),
            )
        writer = _Writer(folder, header, analysed, numbers)
        # Of a folder that is complete, the first batch alone is compared.
        complete = writer.header.complete and writer.header.points == n
        for x, y in itertools.chain([first], batches):
            if names is not None and not _numbers_classes(y, len(names)):
                wanted = f"targets that are whole numbers from 0 to {len(names) - 1}, one a point, as class_names has"
                raise InputError("loader", wanted, f"{y.dtype}, shape {tuple(y.shape)}, up to {y.max()}")
            writer.add(x, y)
            if complete:
                break
        else:
            writer.finish()
    return FeatureFolder(folder.path)


def _check_names(names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputTypeError("class_names", "a list of texts", f"a {type(names).__name__}")
    return tuple(names)


def _numbers_classes(y: Tensor, count: int) -> bool:
    whole = y.ndim == 1 and not y.is_floating_point() and not y.is_complex()
    return whole and int(y.min()) >= 0 and int(y.max()) < count


def _check_same(
    folder: ArtifactFolder[FeatureHeader], header: FeatureHeader, encoder: nn.Module, given: dict[str, Any]
) -> None:
    """Refuse to go on with a folder of another encoder or other options."""
    there = {**header.model_dump(), "last_layer_name": header.source.last_layer}
    for name, value in given.items():
        if value not in (None, there[name]):
            wanted = f"{there[name]!r}, that of the folder {folder.path}"
            raise InputError(name, wanted, repr(value), _OTHER)
    reason = difference(encoder, header.source)
    if reason is not None:
        raise InputError("path", f"features of this encoder in {folder.path}", reason, _OTHER)


def _batches(encoder: nn.Module, loader: Iterable[Any], label_key: str) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield inputs and targets on the encoder's device."""
    for batch in loader:
        views = read_views(encoder, batch, label_key, "loader")
        x, y = views.first, views.targets
        if views.second is not None or y is None:
            raise UnsupportedError(
                "loader: batches of two views. A folder keeps one view of every input: yield (x, targets), or fit with "
                "the loader itself."
            )
        n, shape = input_length(x), f"shape {tuple(y.shape)}"
        if y.ndim == 0 or len(y) != n:
            raise InputError("loader", f"one target for each of the {n} points of a batch", shape)
        if 0 in y.shape:
            raise InputError("loader", "targets of at least one number", shape)
        yield x, y


class _Writer:
    """Takes batches in order, computes the features of those that are not there, and writes whole parts.

    Args:
        folder: The folder.
        header: What an earlier run wrote of it, or one without parts.
        encoder: The encoder, in evaluation mode.
        identifiers: Of all points; ``None`` for their numbers.
    """

    def __init__(
        self,
        folder: ArtifactFolder[FeatureHeader],
        header: FeatureHeader,
        encoder: Encoder,
        identifiers: NDArray[Any] | None,
    ) -> None:
        self.folder, self.encoder, self.identifiers = folder, encoder, identifiers
        self.storage = storage_of(folder.path, header)
        self.header = without_damaged(self.storage, header)
        if not folder.exists or self.header != header:
            folder.write(self.header)
        self.points = 0
        self.waiting: list[dict[str, NDArray[Any]]] = []

    def add(self, x: Inputs, y: Tensor) -> None:
        """Take one batch."""
        header, n, phi = self.header, input_length(x), None
        if target_type(y) != header.target_type or tuple(y.shape[1:]) != header.target_shape:
            known = f"targets of {header.target_type} and shape (B, {', '.join(map(str, header.target_shape))})"
            raise InputError("loader", f"{known}, as before", f"{y.dtype} and shape {tuple(y.shape)}")
        if self.identifiers is not None and self.points + n > len(self.identifiers):
            _check_number(self.identifiers, self.points + n, "at least ")
        start = 0
        while start < n:
            part, place = divmod(self.points + start, header.rows_per_part)
            rows = slice(start, min(n, start + header.rows_per_part - place))
            start = rows.stop
            if part < len(header.parts) and header.parts[part] is not None:
                self._compare(x, y, rows, probe=place == 0)
                continue
            phi = self._features(x) if phi is None else phi
            stored = encode(phi[rows], header.dtype, self.points + rows.start)
            self.waiting.append({"features": stored, **self._known(y, rows)})
            if (self.points + rows.stop) % header.rows_per_part == 0:
                self._write(part)
        self.points += n

    def finish(self) -> None:
        """Write the last part, and close the folder."""
        header, points = self.header, self.points
        if self.identifiers is not None:
            _check_number(self.identifiers, points)
        parts = -(-points // header.rows_per_part)
        if len(header.parts) > parts or header.points not in (None, points):
            there = header.points or f"at least {len(header.parts) * header.rows_per_part}"
            self._refuse(f"{points} points, and {there} are there")
        if self.waiting:
            self._write(parts - 1, last=True)
        self.header = self.header.model_copy(update={"points": points})
        self.storage.finish(self.header)
        self.folder.write(self.header)

    def _features(self, x: Inputs) -> Tensor:
        phi = self.encoder.forward_with_features(x).features
        wanted = (input_length(x), self.header.source.width)
        if phi.shape != wanted:
            raise InputError("encoder", f"features of shape {wanted}", f"shape {tuple(phi.shape)}")
        return phi

    def _known(self, y: Tensor, rows: slice) -> dict[str, NDArray[Any]]:
        """Return targets and identifiers of rows of the batch as they are stored."""
        start, stop = self.points + rows.start, self.points + rows.stop
        numbers = np.arange(start, stop) if self.identifiers is None else self.identifiers[start:stop]
        return {"targets": y[rows].detach().cpu().numpy(), "identifiers": numbers}

    def _compare(self, x: Inputs, y: Tensor, rows: slice, *, probe: bool) -> None:
        """Refuse other data than that of a part that is kept; features of a few points only."""
        start, stop = self.points + rows.start, self.points + rows.stop
        if self.header.points is not None and stop > self.header.points:
            self._refuse(f"more than the {self.header.points} points that are there")
        for name, values in self._known(y, rows).items():
            # By their bytes: NaN is a target like any other.
            if self.storage.read(name, slice(start, stop)).tobytes() != values.tobytes():
                self._refuse(f"other {name} for the points from row {start} on")
        if probe:
            some = slice(rows.start, min(rows.stop, rows.start + _PROBE))
            now = self._features(slice_inputs(x, some)).detach().cpu().double()
            stored = self.storage.read("features", slice(start, start + len(now)))
            before = decode(stored, self.header.dtype).double()
            apart = torch.linalg.vector_norm(before - now, dim=1)
            if bool((apart > _ROUNDING * torch.linalg.vector_norm(before, dim=1)).any()):
                hint = " Random augmentation must be off."
                self._refuse(f"other features for the points from row {start} on", hint)

    def _write(self, part: int, *, last: bool = False) -> None:
        """Write what is waiting as one part, onto the disk and then into the header; of the last part, later."""
        rows = {name: np.concatenate([some[name] for some in self.waiting]) for name in self.header.columns}
        self.header = self.header.with_part(part, self.storage.write(part, rows))
        self.waiting = []
        if not last:
            self.folder.write(self.header)

    def _refuse(self, received: str, hint: str = "") -> NoReturn:
        wanted = f"the data of the folder {self.folder.path}, in the same order"
        raise InputError("loader", wanted, received, _OTHER + hint)


def _check_number(identifiers: NDArray[Any], points: int, at_least: str = "") -> None:
    """Refuse another number of identifiers than of points."""
    if len(identifiers) != points:
        received = f"{len(identifiers)} identifiers, and {at_least}{points} points"
        raise InputError("identifiers", "one for each point of the loader", received)


def _length(loader: Any) -> int | None:
    """Return the number of points of a loader's data set, ``None`` where it is not known."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
