"""``SOURCE``: inputs from a feature folder, an ``.npz``, an image folder or a table of texts, read in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.texts import readable
from contrastive_curvature.errors import expected
from contrastive_curvature.io.feature_folder.header import HEADER

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.encoders import Encoder

__all__ = ["Columns", "Loader", "Source", "check_takes", "kind_of", "open_source", "shared_labels"]

FEATURES, INPUTS, IMAGES, TEXTS = "features", "inputs", "images", "texts"
TABLES = (".csv", ".jsonl")


@dataclass(frozen=True)
class Columns:
    """Columns of a table of texts (or keys of its JSON lines).

    Attributes:
        text: Of the text.
        label: Of the class; may be absent where classes are not needed.
        id: Of the identifier; ``None`` numbers the rows from 0.
    """

    text: str = "text"
    label: str = "label"
    id: str | None = None


class Source(ABC):
    """N inputs that were opened and checked, but not read.

    Attributes:
        path: Where they are.
        kind: ``"features"``, ``"inputs"``, ``"images"`` or ``"texts"``.
        ids: One text an input: the file's name, the row's number or what the source has.
        classes: Class of each input as the source has it, integers or texts, shape (N,); ``None`` without.
    """

    kind: str

    def __init__(self, path: Path, ids: list[str], classes: NDArray[Any] | None) -> None:
        self.path, self.ids, self.classes = path, [readable(each) for each in ids], classes
        if classes is not None and classes.dtype.kind not in "iu":
            self.classes = np.array([readable(str(each)) for each in classes])

    def __len__(self) -> int:
        """Number of inputs."""
        return len(self.ids)

    @property
    def labels(self) -> Tensor | None:
        """Classes as integers, int64, shape (N,): as they are, or numbers of the sorted texts."""
        return None if self.classes is None else shared_labels(self)[0]

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of :attr:`labels`' numbers, where the source has texts; else ``None``."""
        if self.classes is None or self.classes.dtype.kind in "iu":
            return None
        return [str(name) for name in np.unique(self.classes)]

    def need_labels(self, option: str) -> Tensor:
        """The classes as integers.

        Raises:
            BadInputError: There are none.
        """
        found = self.labels
        if found is None:
            raise BadInputError(expected(f"{option} {self.path}", "inputs with classes (labels)", "none", self.where()))
        return found

    @abstractmethod
    def where(self) -> str:
        """Where a source of this kind keeps classes, a sentence."""

    @abstractmethod
    def prepare(self, encoder: Encoder) -> None:
        """Take what turns these inputs into the batches of an encoder that :func:`check_takes` has seen.

        Raises:
            BadInputError: They do not fit it.
            InputError: They are features of another encoder.
        """

    @abstractmethod
    def batches(
        self, rows: NDArray[np.int64], size: int, seed: int | None = None
    ) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        """Inputs of some rows, which are given ascending, and which rows each batch has.

        Args:
            rows: Which inputs.
            size: Inputs of a batch.
            seed: Of a random order; ``None`` for that of the source.
        """

    def loader(
        self,
        batch_size: int,
        rows: NDArray[np.int64] | None = None,
        labels: Tensor | None = None,
        seed: int | None = None,
    ) -> Loader:
        """Batches ``(x, labels)``, the same in every pass.

        Args:
            batch_size: Inputs of a batch.
            rows: Which inputs, ascending; ``None`` for all.
            labels: In place of the source's own, shape (N,).
            seed: Of a random order; ``None`` for that of the source.
        """
        return Loader(self, batch_size, np.arange(len(self)) if rows is None else rows, labels, seed)


class Loader:
    """What :meth:`Source.loader` gives; ``fit``, ``calibrate`` and the like take it."""

    def __init__(
        self, source: Source, batch_size: int, rows: NDArray[np.int64], labels: Tensor | None, seed: int | None
    ) -> None:
        found = source.labels if labels is None else labels
        # Predictions and calibration take inputs without classes.
        self._labels = torch.zeros(len(source), dtype=torch.int64) if found is None else found
        self.source, self.batch_size, self.rows, self.seed = source, batch_size, rows, seed

    @property
    def dataset(self) -> NDArray[np.int64]:
        """The rows, under the name that a ``DataLoader`` has for what tells how long a fit will take."""
        return self.rows

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Inputs, and their classes (zeros where the source has none)."""
        for x, rows in self.source.batches(self.rows, self.batch_size, self.seed):
            yield x, self._labels[torch.from_numpy(rows)]


def shared_labels(*sources: Source) -> list[Tensor]:
    """Classes of several sources as integers that mean the same in all of them, int64, shape (N,) each.

    Where some have numbers and others the same numbers as texts, all of these sources have texts from then on.

    Raises:
        BadInputError: One has no classes, or one has texts and another numbers, none of which is one of the texts.
    """
    for source in sources:
        if source.classes is None:
            source.need_labels("SOURCE")
    found: list[NDArray[Any]] = [np.asarray(source.classes) for source in sources]
    numbers = [classes.dtype.kind in "iu" for classes in found]
    if all(numbers):
        return [torch.from_numpy(classes.astype(np.int64)) for classes in found]
    if any(numbers):
        # A .csv cannot tell the number 3 from the text "3".
        found = [classes.astype(str) for classes in found]
        texts = np.concatenate([classes for classes, number in zip(found, numbers, strict=True) if not number])
        if not any(np.isin(classes, texts).any() for classes, number in zip(found, numbers, strict=True) if number):
            paths = ", ".join(str(source.path) for source in sources)
            hint = "Name a class the same in all."
            raise BadInputError(expected(paths, "classes of one kind", "numbers and texts", hint))
        for source, classes in zip(sources, found, strict=True):
            source.classes = classes
    names = np.unique(np.concatenate(found))
    return [torch.from_numpy(np.searchsorted(names, classes)) for classes in found]


def kind_of(path: Path) -> str:
    """What a path holds, from its name alone and the names in it: ``"features"``, ``"npz"``, ``"images"``, ``"texts"``.

    Raises:
        BadInputError: There is nothing, or something else.
    """
    wanted = "a feature folder, an image folder with one folder for each class, an .npz, a .csv or a .jsonl"
    if not path.exists():
        raise BadInputError(expected(f"{path}", wanted, "a path where nothing is"))
    if path.is_dir():
        return FEATURES if (path / HEADER).exists() else IMAGES
    if path.suffix.lower() == ".npz":
        return "npz"
    if path.suffix.lower() in TABLES:
        return TEXTS
    raise BadInputError(expected(f"{path}", wanted, "a file of another kind"))


def open_source(path: Path | str, encoder: Encoder | None = None, columns: Columns | None = None) -> Source:
    """Open inputs, check their form, and read classes and identifiers; the inputs themselves stay where they are.

    Args:
        path: A feature folder, an ``.npz``, an image folder, or a ``.csv`` or ``.jsonl`` with texts.
        encoder: What they will go through: it knows how an image or a text becomes its input.
        columns: Of a table.

    Raises:
        BadInputError: The path is missing, damaged, of another kind, or nothing that this encoder takes.
        InputError: A feature folder is damaged, or of another encoder.
    """
    from contrastive_curvature.apps.cli import source_files

    path = Path(path)
    kind = kind_of(path)
    opened: Source
    if kind == FEATURES:
        opened = source_files.FeatureFolderSource(path)
    elif kind == "npz":
        opened = source_files.ArraySource(path)
    elif kind == IMAGES:
        opened = source_files.ImageSource(path)
    else:
        opened = source_files.TextSource(path, columns or Columns())
    if encoder is not None:
        check_takes(opened, encoder)
        opened.prepare(encoder)
    return opened


def check_takes(source: Source, encoder: Encoder) -> None:
    """Refuse inputs of a kind that an encoder does not take.

    Raises:
        BadInputError: They are.
    """
    if source.kind not in encoder.takes:
        takes = " or ".join(encoder.takes)
        raise BadInputError(expected(f"{source.path}", f"{takes} for {encoder.name}", source.kind))
