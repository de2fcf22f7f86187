"""``SOURCE``: inputs from a feature folder, an ``.npz``, an image folder or a table of texts, read in batches.

Nothing in these files is executed. torch is imported only when inputs are read, so a missing or malformed source is
refused immediately.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import needed, readable, their_code
from contrastive_curvature.errors import InputError

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.encoders import Encoder

STDIN = Path("-")
"""Where a table is read from stdin."""

_AXES = {"features": 2, "embeddings": 2, "inputs": None, "weight": 2, "bias": 1, "labels": 1, "ids": 1}
_IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_HEADER = "header.safetensors"
"""The file that tells a feature folder from a folder of images."""

_NAMED = 10
"""Broken images that a warning names."""

Batches = Iterator[tuple[Any, NDArray[np.int64]]]

csv.field_size_limit(2**31 - 1)  # a text may be longer than Python's own limit of 131,072 characters


class Columns(NamedTuple):
    """Names of a table's columns from the options; by default ``text``, ``label``, and the number of the row."""

    text: str | None = None
    label: str | None = None
    id: str | None = None


class Source:
    """N inputs that are opened and checked, but not read.

    Attributes:
        path: Path of the file or folder.
        kind: ``"features"``, ``"inputs"``, ``"images"`` or ``"texts"``.
        classes_are: Sentence that says where a source of this kind keeps classes.
        ids: One text for each input: the file's name, the row's number or an identifier from the source.
        classes: Class of each input from the source, integers or texts, shape (N,); ``None`` without classes.
        shown: Image file or text of each input for a report; ``None`` for numbers.
    """

    kind: str
    classes_are: str
    shown: Sequence[Any] | None = None

    def __init__(self, path: Path, ids: Iterable[Any], classes: NDArray[Any] | None) -> None:
        self.path, self.ids, self.classes = path, [readable(str(each)) for each in ids], classes
        if classes is not None and classes.dtype.kind not in "iu":
            self.classes = np.array([readable(str(each)) for each in classes])

    def __len__(self) -> int:
        return len(self.ids)

    def check_classes(self) -> None:
        """Refuse a source without classes."""
        if self.classes is None:
            raise InputError(f"{self.path}", "inputs with classes (labels)", "none", self.classes_are)

    def prepare(self, encoder: Encoder) -> None:
        """Store the encoder of these inputs; refuse an encoder that does not fit them."""
        if self.kind not in encoder.takes:
            raise InputError(f"{self.path}", f"{' or '.join(encoder.takes)} for {encoder.name}", self.kind)
        self.encoder = encoder

    def _read(self, rows: NDArray[np.int64]) -> Any:
        """Return some inputs as one batch of the encoder."""
        raise NotImplementedError

    def batches(self, rows: NDArray[np.int64], size: int, seed: int | None = None) -> Batches:
        """Yield inputs in batches with their rows, in a random order if there is a seed."""
        order = rows if seed is None else rows[np.random.default_rng(seed).permutation(len(rows))]
        for start in range(0, len(order), size):
            some = order[start : start + size]
            yield self._read(some), some


class ArraySource(Source):
    """An ``.npz``: ``features`` or ``embeddings`` (N, F), or ``inputs`` (N, ...), with ``labels`` and ``ids`` (N,)."""

    classes_are = "An .npz has them in the array labels."

    def __init__(self, path: Path) -> None:
        arrays = read_arrays(path)
        names = [name for name in ("features", "embeddings", "inputs") if name in arrays]
        if len(names) != 1:
            hint = "numpy.savez(file, inputs=X, labels=y) names them."
            with np.load(path) as archive:
                holds = ", ".join(sorted(archive.files)) or "nothing"
            raise InputError(f"{path}", "one of the arrays features, embeddings, inputs", holds, hint)
        self.name, self.values = names[0], arrays[names[0]]
        self.kind = "inputs" if self.name == "inputs" else "features"
        self.weight, self.bias = arrays.get("weight"), arrays.get("bias")
        for name in {"labels", "ids"} & set(arrays):
            if len(arrays[name]) != len(self.values):
                raise InputError(f"{path}: {name}", f"{len(self.values)} of them", f"{len(arrays[name])}")
        super().__init__(path, arrays.get("ids", range(len(self.values))), arrays.get("labels"))

    def prepare(self, encoder: Encoder) -> None:
        """See :meth:`Source.prepare`; refuse features that do not belong to the encoder."""
        super().prepare(encoder)
        if self.kind == "inputs":
            return
        if encoder.width is None:
            hint = "A feature folder says whose features it has; contrastive_curvature.features writes one."
            raise InputError(encoder.name, "its own inputs or a feature folder", "bare features", hint)
        got, wanted = (self.name, self.values.shape[1]), (encoder.array, encoder.width)
        if got != wanted:
            texts = [f"the array {name} of width {width}" for name, width in (wanted, got)]
            raise InputError(f"{self.path}", f"{texts[0]} for {encoder.name}", texts[1])
        if self.weight is not None and not encoder.has_last_layer(self.weight, self.bias):
            hint = "Fit again with that layer; leave weight and bias out where the features are of the same encoder."
            raise InputError(f"{self.path}", f"weight and bias of {encoder.name}", "those of another", hint)

    def _read(self, rows: NDArray[np.int64]) -> Any:
        import torch

        x = torch.from_numpy(self.values[rows])
        return x.to(self.encoder.dtype) if self.kind == "inputs" else x


class FeatureFolderSource(Source):
    """A folder written by ``contrastive_curvature.features`` or by the command ``features``."""

    kind = "features"
    classes_are = "A feature folder has them as its targets, one whole number a point."

    def __init__(self, path: Path) -> None:
        from contrastive_curvature.io.feature_folder import FeatureFolder

        folder = FeatureFolder(path)
        self.encoder_of = folder.source
        targets = folder.targets.numpy()
        classes = targets if targets.ndim == 1 and targets.dtype.kind in "iu" else None
        if folder.class_names is not None:
            classes = np.array(folder.class_names)[targets]
        super().__init__(path, folder.identifiers, classes)

    def prepare(self, encoder: Encoder) -> None:
        """See :meth:`Source.prepare`; for a whole encoder the library checks every batch."""
        super().prepare(encoder)
        if encoder.width not in (None, self.encoder_of.width):
            raise InputError(f"{self.path}", f"features of width {encoder.width}", f"{self.encoder_of.width}")
        if encoder.feature_source not in (None, self.encoder_of):
            hint = "Write them with that encoder."
            raise InputError(f"{self.path}", "features of the encoder of the fit", "those of another", hint)

    def batches(self, rows: NDArray[np.int64], size: int, seed: int | None = None) -> Batches:
        """See :meth:`Source.batches`; batches are smaller if rows are left out."""
        import torch

        from contrastive_curvature.io.feature_folder import FeatureFolder
        from contrastive_curvature.network.given_features import FEATURES

        folder = FeatureFolder(self.path, size, seed=seed)
        parts = np.split(folder.numbers.numpy(), range(size, len(self), size))
        for (x, _), numbers in zip(folder, parts, strict=True):
            here = np.isin(numbers, rows)
            if here.any():
                x[FEATURES] = x[FEATURES][torch.from_numpy(here)]
                # A last layer takes the features, a whole encoder takes a batch with its source.
                yield (x if self.encoder.width is None else x[FEATURES]), numbers[here]


class ImageSource(Source):
    """One folder for each class, as in torchvision's ``ImageFolder``; or images alone, without classes."""

    kind = "images"
    classes_are = "An image folder has one folder for each class."

    def __init__(self, path: Path, *, skip_unreadable: bool = False) -> None:
        self.shown = self.files = find_images(path)
        if skip_unreadable:
            self.shown = self.files = _readable_images(path, self.files)
        parts = [file.relative_to(path).parts for file in self.files]
        flat = sum(len(each) == 1 for each in parts)
        if 0 < flat < len(parts):
            hint = "Each class has a folder of its own."
            raise InputError(f"{path}", "images in folders or without", f"{flat} beside folders", hint)
        super().__init__(path, ["/".join(p) for p in parts], None if flat else np.array([p[0] for p in parts]))

    def _read(self, rows: NDArray[np.int64]) -> Any:
        import torch

        argument, transform = f"the transform of {self.encoder.name}", self.encoder.transform
        assert transform is not None
        images: list[Any] = []
        shapes: dict[tuple[int, ...], Path] = {}
        for file in (self.files[row] for row in rows):
            picture = _picture(file)
            with their_code(argument, f"a tensor for {file}"):
                image = transform(picture)
            if not isinstance(image, torch.Tensor):
                raise InputError(argument, f"a torch.Tensor for {file}", f"a {type(image).__name__}")
            images.append(image)
            shapes.setdefault(tuple(image.shape), file)
        if len(shapes) > 1:
            got = ", ".join(f"{shape} ({file})" for shape, file in shapes.items())
            hint = "Give a transform that resizes: --encoder's function may return (module, transform)."
            raise InputError(f"{self.path}", "images of one shape", got, hint)
        return torch.stack(images)


class TextSource(Source):
    """A ``.csv`` with a header, or a ``.jsonl``: a column of texts, optionally columns of classes and identifiers."""

    kind = "texts"

    def __init__(self, path: Path, columns: Columns) -> None:
        label = columns.label or "label"
        self.classes_are = f"A table has them in the column that --label-column names (here {label!r})."
        rows = _table_rows(path)
        self.shown = self.texts = _column(path, rows, "text", columns.text)
        ids = range(len(rows)) if columns.id is None else _column(path, rows, "id", columns.id)
        classes = None
        if any(row.get(label) not in (None, "") for row in rows):
            classes = _column(path, rows, "label", label)
            if not all(type(value) is int for value in classes):
                classes = [str(value) for value in classes]
        super().__init__(path, ids, None if classes is None else np.array(classes))

    def _read(self, rows: NDArray[np.int64]) -> Any:
        assert self.encoder.transform is not None
        wanted = f"a batch for texts of {self.path}, from row {rows[0]} on"
        with their_code(f"the transform of {self.encoder.name}", wanted):
            return self.encoder.transform([self.texts[row] for row in rows])


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays with known names in an ``.npz``, checked; numbers in float32."""
    try:
        # An array of objects would be unpickled, which can run any code.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in _AXES if name in archive.files}
    except Exception as error:  # numpy, zipfile and decompressors raise many kinds of errors for damaged files
        wanted = "an .npz with the arrays features, embeddings or inputs"
        hint = "Save numbers or texts, as labels.astype(str)." if "Object arrays" in str(error) else ""
        raise InputError(f"{path}", wanted, f"what cannot be read ({error!r})", hint) from error
    if "bias" in arrays and "weight" not in arrays:
        raise InputError(f"{path}", "weight beside bias", "bias alone")
    for name, array in arrays.items():
        kinds, wanted = ("iuU", "whole numbers or texts") if name in ("labels", "ids") else ("fiu", "real numbers")
        axes = _AXES[name] or max(1, array.ndim)
        if array.dtype.kind not in kinds or array.ndim != axes or 0 in array.shape:
            got = f"{array.dtype}, shape {array.shape}"
            raise InputError(f"{path}: {name}", f"{wanted}, {axes} axes, none empty", got)
        if "f" in kinds:
            with np.errstate(over="ignore"):
                arrays[name] = np.ascontiguousarray(array, dtype=np.float32)
            finite = np.isfinite(arrays[name]).reshape(len(array), -1).all(1)
            if not finite.all():
                raise InputError(f"{path}: {name}", "finite numbers", f"NaN or infinity in row {np.argmin(finite)}")
    return arrays


def _table_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``.csv`` or a ``.jsonl`` by the names of their columns."""
    is_csv = path.suffix.lower() == ".csv"
    try:
        with (
            contextlib.nullcontext(io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline=""))
            if path == STDIN
            else path.open(encoding="utf-8-sig", newline="")
        ) as file:
            if is_csv:
                table = csv.DictReader(file, strict=True)
                rows, names = list(table), [name for name in table.fieldnames or () if name]
            else:
                rows, names = [json.loads(line) for line in file if line.strip()], []
    except (ValueError, csv.Error) as error:
        kind = "a CSV file with a header" if is_csv else "one JSON object a line"
        raise InputError(f"{path}", f"{kind} in UTF-8", f"what cannot be read ({error})") from error
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}", "a name for each column", f"{twice[0]!r} twice in the header")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"{path}", f"a JSON object in row {number}", row)
        if None in row:
            wanted = f"{len(names)} fields in row {number}, as in the header"
            raise InputError(f"{path}", wanted, "more", "Quote texts that hold commas.")
    if not rows:
        raise InputError(f"{path}", "at least one row", "none")
    return rows


def _column(path: Path, rows: list[dict[str, Any]], kind: str, name: str | None) -> list[Any]:
    """Return the entries of a column; refuse empty entries, and texts that are not strings."""
    name = name or kind
    what = {"text": "a text", "label": "a class", "id": "an identifier"}[kind]
    for number, row in enumerate(rows):
        value = row.get(name)
        if value is None or not str(value).strip() or (kind == "text" and not isinstance(value, str)):
            hint = f"The row has {', '.join(row) or 'nothing'}; --{kind}-column names another column."
            raise InputError(f"{path}", f"{what} in {name!r} of row {number}", value, hint)
    return [row[name] for row in rows]


def find_images(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted; follow links, and skip hidden names."""
    files = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if name.lower().endswith(_IMAGES) and not name.startswith(".")]
    if not files:
        hint = "A feature folder has a header.safetensors."
        raise InputError(f"{folder}", f"images ({', '.join(_IMAGES)}) or saved features", "none", hint)
    return sorted(files)


def _readable_images(folder: Path, files: list[Path]) -> list[Path]:
    """Return the images that can be read, and warn about the others."""
    whole = []
    for file in files:
        with contextlib.suppress(UnreadableError):
            _picture(file)
            whole.append(file)
    broken = [readable(str(file.relative_to(folder))) for file in sorted(set(files) - set(whole))]
    if not whole:
        raise InputError(f"{folder}", "images", f"{len(broken):,} files, none of which can be read")
    if broken:
        rest = f" and {len(broken) - _NAMED:,} more" if len(broken) > _NAMED else ""
        msg = f"{folder}: {len(broken):,} of {len(files):,} images cannot be read and are left out: "
        warnings.warn(f"{msg}{', '.join(broken[:_NAMED])}{rest}", UserWarning, stacklevel=2)
    return whole


class UnreadableError(InputError):
    """An image file that is damaged, or not an image."""


def _picture(file: Path) -> Any:
    """Return an image from Pillow, in RGB."""
    image = needed("PIL.Image", f"{file}", "pillow")
    try:
        with image.open(file) as opened:
            return opened.convert("RGB")
    except Exception as error:  # PIL raises many kinds of errors for damaged files
        hint = "--skip-unreadable leaves such files out."
        raise UnreadableError(f"{file}", "an image", f"what cannot be read ({error!r})", hint) from error


class Loader:
    """Batches ``(x, labels)``, or ``(x,)`` without labels, the same in every pass; for ``fit`` and similar methods.

    Args:
        source: Inputs that are prepared for an encoder.
        batch_size: Number of inputs in a batch.
        rows: Rows of the inputs to read, ascending; ``None`` for all.
        labels: Class of each input of the source, integers or texts.
        seed: Seed of a random order; ``None`` for the order of the source.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        rows: NDArray[np.int64] | None = None,
        labels: NDArray[Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self.source, self.batch_size, self.labels, self.seed = source, batch_size, labels, seed
        # Named as in a DataLoader, because the library reads its length to estimate the time of a fit.
        self.dataset = np.arange(len(source)) if rows is None else rows

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        import torch

        for x, rows in self.source.batches(self.dataset, self.batch_size, self.seed):
            if self.labels is None:
                yield (x,)
            else:
                labels = self.labels[rows]
                yield x, torch.from_numpy(labels) if labels.dtype.kind in "iu" else labels.tolist()


def shared_labels(*sources: Source) -> tuple[list[NDArray[np.int64]], list[str] | None]:
    """Return the classes of sources as numbers that agree between sources, and the names of the classes if any.

    A ``.csv`` cannot distinguish the number 3 from the text "3": if only some sources have numbers, these count as
    texts.
    """
    columns = [np.asarray(source.classes) for source in sources]
    numbers = [classes.dtype.kind in "iu" for classes in columns]
    if all(numbers):
        return [classes.astype(np.int64) for classes in columns], None
    columns = [classes.astype(str) for classes in columns]
    of_numbers, of_texts = set[str](), set[str]()
    for classes, is_number in zip(columns, numbers, strict=True):
        (of_numbers if is_number else of_texts).update(classes)
    if of_numbers and of_numbers.isdisjoint(of_texts):
        paths, hint = ", ".join(str(source.path) for source in sources), "Name a class the same in all."
        raise InputError(paths, "classes of one kind", "numbers and texts", hint)
    names = np.unique(np.concatenate(columns))
    return [np.searchsorted(names, classes) for classes in columns], names.tolist()


def open_source(path: Path, columns: Columns, *, skip_unreadable: bool = False) -> Source:
    """Open inputs, check their form, and read classes and identifiers, but not the inputs."""
    if path.is_dir() and (path / _HEADER).exists():
        return FeatureFolderSource(path)
    if path.is_dir():
        return ImageSource(path, skip_unreadable=skip_unreadable)
    if path.suffix.lower() == ".npz":
        return ArraySource(path)
    if path == STDIN or path.suffix.lower() in (".csv", ".jsonl"):
        return TextSource(path, columns)
    wanted = "a feature folder, an image folder with one folder for each class, an .npz, a .csv or a .jsonl"
    raise InputError(f"{path}", wanted, "a file of another kind")


def open_sources(paths: Mapping[str, Path], columns: Columns, *, skip_unreadable: bool = False) -> dict[str, Source]:
    """Open the sources of a command by option name; refuse column names that no source has."""
    if list(paths.values()).count(STDIN) > 1:
        raise InputError("-", "one source from stdin", "several")
    opened = {name: open_source(path, columns, skip_unreadable=skip_unreadable) for name, path in paths.items()}
    tables = [source for source in opened.values() if isinstance(source, TextSource)]
    named = [name for name, column in columns._asdict().items() if column is not None]
    if named and not tables:
        got = ", ".join(str(source.path) for source in opened.values())
        raise InputError(f"--{named[0]}-column", "it with a .csv or .jsonl", got)
    if columns.label is not None and all(source.classes is None for source in tables):
        wanted = f"a column with classes in {', '.join(str(source.path) for source in tables)}"
        raise InputError("--label-column", wanted, f"{columns.label!r}, which has none")
    return opened
