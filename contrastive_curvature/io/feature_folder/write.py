"""``features(encoder, loader, path)``: one pass of the encoder over the data, stored on disk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.artifact import locked, read_header, target_folder, write_tensors
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.io.feature_folder.folder import (
    HEADER,
    Arrays,
    FeatureFolder,
    FeatureHeader,
    Precision,
    TargetType,
    decode,
)
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.given_features import FeatureSource, difference
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.loader import check_loader, check_model, first_batch, in_fixed_order, read_views
from contrastive_curvature.progress import Progress

_PART_BYTES = 2**26
"""Features of one part: what is held in memory, written at once, and lost by an interruption."""

_PROBE = 8
"""Points of each part that is kept whose features are computed again."""

_ROUNDING = 1e-2
"""Largest difference of a point's features, relative to their norm: half precision, and batches of other sizes."""

_MOST_LOST = 0.01
"""Rounding error of a feature, relative to the largest of its point, that is let pass."""

_OTHER = "Use another path; nothing has been changed."


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
    """Yield inputs and targets on the encoder's device."""
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

    def _refuse(self, received: str, hint: str = "") -> NoReturn:
        wanted = f"the data of the folder {self.folder}, in the same order"
        raise InputError("loader", wanted, received, _OTHER + hint)


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
        received = f"{len(identifiers)} identifiers, and {points} points"
        raise InputError("identifiers", "one for each point of the loader", received)


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
