"""``SOURCE``: inputs from a feature folder, an ``.npz``, an image folder or a table of texts, read in batches.

torch is imported once inputs are read, so that a missing or malformed source is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import BadInputError, readable, their_code
from contrastive_curvature.apps.cli.readers import (
    STDIN,
    Columns,
    find_images,
    read_arrays,
    read_image,
    read_table,
    readable_images,
)

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.encoders import Encoder

_HEADER = "header.json"
"""The file that tells a feature folder from a folder of images."""

Batches = Iterator[tuple[Any, NDArray[np.int64]]]


class Source:
    """N inputs that were opened and checked, but not read.

    Attributes:
        path: Where they are.
        kind: ``"features"``, ``"inputs"``, ``"images"`` or ``"texts"``.
        classes_are: Where a source of this kind keeps classes, a sentence.
        ids: One text an input: the file's name, the row's number or what the source has.
        classes: Class of each input as the source has it, integers or texts, shape (N,); ``None`` without.
        shown: What a report shows of each input: an image file or a text; ``None`` for numbers.
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

    def check_classes(self, option: str) -> None:
        """Refuse a source without classes; ``option`` is the one that gave it."""
        if self.classes is None:
            wanted = "inputs with classes (labels)"
            raise BadInputError(f"{option} {self.path}", wanted, "none", self.classes_are)

    def prepare(self, encoder: Encoder) -> None:
        """Take the encoder that these inputs are for; refuse another one."""
        if self.kind not in encoder.takes:
            takes = " or ".join(encoder.takes)
            raise BadInputError(f"{self.path}", f"{takes} for {encoder.name}", self.kind)
        self.encoder = encoder
        self._check(encoder)

    def _check(self, encoder: Encoder) -> None:
        """Refuse features that are not those of the encoder."""

    def _read(self, rows: NDArray[np.int64]) -> Any:
        """Return some inputs as one batch of the encoder."""
        raise NotImplementedError

    def batches(self, rows: NDArray[np.int64], size: int, seed: int | None = None) -> Batches:
        """Yield inputs in batches, in a random order where there is a seed, and the rows that each batch has."""
        order = rows if seed is None else rows[np.random.default_rng(seed).permutation(len(rows))]
        for start in range(0, len(order), size):
            some = order[start : start + size]
            yield self._read(some), some


class ArraySource(Source):
    """An ``.npz``: ``features`` or ``embeddings`` (N, F), or ``inputs`` (N, ...), with ``labels`` and ``ids`` (N,)."""

    classes_are = "An .npz has them in the array labels."

    def __init__(self, path: Path) -> None:
        arrays, names = read_arrays(path)
        there = [name for name in ("features", "embeddings", "inputs") if name in arrays]
        if len(there) != 1:
            hint = "numpy.savez(file, inputs=X, labels=y) names them."
            holds = ", ".join(sorted(names)) or "nothing"
            raise BadInputError(f"{path}", "one of the arrays features, embeddings, inputs", holds, hint)
        self.name, self.values = there[0], arrays[there[0]]
        self.kind = "inputs" if self.name == "inputs" else "features"
        self.weight, self.bias = arrays.get("weight"), arrays.get("bias")
        for name in {"labels", "ids"} & set(arrays):
            if len(arrays[name]) != len(self.values):
                received = f"shape {arrays[name].shape}"
                raise BadInputError(f"{path}: {name}", f"{len(self.values)} of them", received)
        super().__init__(path, arrays.get("ids", range(len(self.values))), arrays.get("labels"))

    def _check(self, encoder: Encoder) -> None:
        if self.kind == "inputs":
            return
        if encoder.width is None:
            hint = "A feature folder says whose features it has; contrastive_curvature.features writes one."
            raise BadInputError(encoder.name, "its own inputs or a feature folder", "bare features", hint)
        wanted = "embeddings" if encoder.identity else "features"
        if self.name != wanted:
            received = f"the array {self.name}"
            raise BadInputError(f"{self.path}", f"the array {wanted} for {encoder.name}", received)
        if self.values.shape[1] != encoder.width:
            wanted = f"features of width {encoder.width} for {encoder.name}"
            raise BadInputError(f"{self.path}", wanted, f"{self.values.shape[1]}")
        if self.weight is not None and not encoder.has_last_layer(self.weight, self.bias):
            hint = "Fit again with that layer; leave weight and bias out where the features are of the same encoder."
            wanted = f"weight and bias of {encoder.name}"
            raise BadInputError(f"{self.path}", wanted, "those of another", hint)

    def _read(self, rows: NDArray[np.int64]) -> Any:
        import torch

        x = torch.from_numpy(self.values[rows])
        return x.to(self.encoder.dtype) if self.kind == "inputs" else x


class FeatureFolderSource(Source):
    """A folder that ``contrastive_curvature.features``, or the command, wrote."""

    kind = "features"
    classes_are = "A feature folder has them as its targets, one whole number a point."

    def __init__(self, path: Path) -> None:
        from contrastive_curvature.io.feature_folder import FeatureFolder
        from contrastive_curvature.io.feature_folder.header import read_header

        folder = FeatureFolder(path)
        self.encoder_of = read_header(path).source
        targets = folder.targets.numpy()
        classes = targets if targets.ndim == 1 and targets.dtype.kind in "iu" else None
        if folder.class_names is not None:
            classes = np.array(folder.class_names)[targets]
        super().__init__(path, folder.identifiers, classes)

    def _check(self, encoder: Encoder) -> None:
        # The library compares the weights of a whole encoder with every batch.
        if encoder.width is not None and self.encoder_of.width != encoder.width:
            wanted = f"features of width {encoder.width}"
            raise BadInputError(f"{self.path}", wanted, f"{self.encoder_of.width}")
        if encoder.feature_source not in (None, self.encoder_of):
            wanted, hint = "features of the encoder of the fit", "Write them with that encoder."
            raise BadInputError(f"{self.path}", wanted, "those of another", hint)

    def batches(self, rows: NDArray[np.int64], size: int, seed: int | None = None) -> Batches:
        """Do what :meth:`Source.batches` says; batches of which rows are left out are smaller."""
        import torch

        from contrastive_curvature.io.feature_folder import FeatureFolder
        from contrastive_curvature.network.given_features import FEATURES, feature_inputs

        wanted, start = np.zeros(len(self), dtype=bool), 0
        wanted[rows] = True
        folder = FeatureFolder(self.path, size, seed=seed)
        numbers = folder.numbers.numpy()
        for x, _ in folder:
            some = numbers[start : start + len(x[FEATURES])]
            start += len(some)
            here = wanted[some]
            if here.any():
                phi = x[FEATURES][torch.from_numpy(here)]
                # A last layer that was given alone takes the numbers, a whole encoder a batch with its source.
                yield (feature_inputs(phi, self.encoder_of) if self.encoder.width is None else phi), some[here]


class ImageSource(Source):
    """One folder for each class, as torchvision's ``ImageFolder`` has it; or images alone, without classes."""

    kind = "images"
    classes_are = "An image folder has one folder for each class."

    def __init__(self, path: Path, *, skip_unreadable: bool = False) -> None:
        files = find_images(path)
        if skip_unreadable:
            files = readable_images(path, files)
        self.shown = self.files = files
        parts = [file.relative_to(path).parts for file in self.files]
        flat = sum(len(each) == 1 for each in parts)
        if 0 < flat < len(parts):
            hint = "Each class has a folder of its own."
            raise BadInputError(f"{path}", "images in folders or without", f"{flat} beside folders", hint)
        super().__init__(path, ["/".join(p) for p in parts], None if flat else np.array([p[0] for p in parts]))

    def _read(self, rows: NDArray[np.int64]) -> Any:
        import torch

        images = [read_image(self.files[row], self.encoder) for row in rows]
        for row, image in zip(rows, images, strict=True):
            if image.shape != images[0].shape:
                shapes = f"{tuple(images[0].shape)} and {tuple(image.shape)} ({self.files[row]})"
                hint = "Give a transform that resizes: --encoder's function may return (module, transform)."
                raise BadInputError(f"{self.path}", "images of one shape", shapes, hint)
        return torch.stack(images)


class TextSource(Source):
    """A ``.csv`` with a header, or a ``.jsonl``: a column of texts, perhaps one of classes and one of identifiers."""

    kind = "texts"

    def __init__(self, path: Path, columns: Columns) -> None:
        self.texts, classes, ids = read_table(path, columns)
        self.shown = self.texts
        label = columns.label or "label"
        self.classes_are = f"A table has them in the column that --label-column names (here {label!r})."
        super().__init__(path, ids, classes)

    def _read(self, rows: NDArray[np.int64]) -> Any:
        assert self.encoder.transform is not None
        wanted = f"a batch for texts of {self.path}, from row {rows[0]} on"
        with their_code(f"the transform of {self.encoder.name}", wanted):
            return self.encoder.transform([self.texts[row] for row in rows])


class Loader:
    """Batches ``(x, labels)``, or ``(x,)`` without labels, the same in every pass; ``fit`` and the like take it.

    Args:
        source: Prepared for an encoder.
        batch_size: Inputs of a batch.
        rows: Which inputs, ascending; ``None`` for all.
        labels: Class of each input of the source, as integers or texts.
        seed: Of a random order; ``None`` for that of the source.
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
        # The name that a DataLoader has for what tells how long a fit will take.
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
    """Return the classes of sources as numbers that mean the same in all of them, and their names if they have some.

    A ``.csv`` cannot tell the number 3 from the text "3": where only some sources have numbers, these are texts too.
    """
    found = [np.asarray(source.classes) for source in sources]
    numbers = [classes.dtype.kind in "iu" for classes in found]
    if all(numbers):
        return [classes.astype(np.int64) for classes in found], None
    found = [classes.astype(str) for classes in found]
    texts = np.concatenate([classes for classes, number in zip(found, numbers, strict=True) if not number])
    if any(numbers) and not any(
        np.isin(classes, texts).any() for classes, number in zip(found, numbers, strict=True) if number
    ):
        paths, hint = ", ".join(str(source.path) for source in sources), "Name a class the same in all."
        raise BadInputError(paths, "classes of one kind", "numbers and texts", hint)
    names = np.unique(np.concatenate(found))
    return [np.searchsorted(names, classes) for classes in found], names.tolist()


def open_source(path: Path, columns: Columns, *, skip_unreadable: bool = False) -> Source:
    """Open inputs, check their form, and read classes and identifiers; the inputs themselves stay where they are."""
    if path.is_dir() and (path / _HEADER).exists():
        return FeatureFolderSource(path)
    if path.is_dir():
        return ImageSource(path, skip_unreadable=skip_unreadable)
    if path.suffix.lower() == ".npz":
        return ArraySource(path)
    if path == STDIN or path.suffix.lower() in (".csv", ".jsonl"):
        return TextSource(path, columns)
    wanted = "a feature folder, an image folder with one folder for each class, an .npz, a .csv or a .jsonl"
    raise BadInputError(f"{path}", wanted, "a file of another kind")


def open_sources(
    paths: Mapping[str, Path | None], columns: Columns, *, skip_unreadable: bool = False
) -> dict[str, Source]:
    """Open the sources of a command by the names of its options; refuse names of columns that none of them has."""
    there = {name: path for name, path in paths.items() if path is not None}
    if list(there.values()).count(STDIN) > 1:
        raise BadInputError("-", "one source from stdin", "several")
    opened = {name: open_source(path, columns, skip_unreadable=skip_unreadable) for name, path in there.items()}
    tables = [source for source in opened.values() if isinstance(source, TextSource)]
    given = [name for name, column in columns._asdict().items() if column is not None]
    if given and not tables:
        received = ", ".join(str(source.path) for source in opened.values())
        raise BadInputError(f"--{given[0]}-column", "it with a .csv or .jsonl", received)
    if columns.label is not None and all(source.classes is None for source in tables):
        wanted = f"a column with classes in {', '.join(str(source.path) for source in tables)}"
        raise BadInputError("--label-column", wanted, f"{columns.label!r}, which has none")
    return opened
