"""Images with targets: one part (training, test, gallery, out of distribution) of a data set."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.experiments.data.files import file_size, open_file
from contrastive_curvature.errors import InputError
from contrastive_curvature.pairs import RelationFunction


class Split(Dataset[tuple[Tensor, Tensor]]):
    """N images and one target each.

    Attributes:
        targets: Class labels, int64 of shape (N,); or positions in metres, float64 of shape (N, 2).
    """

    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def images(self, rows: Sequence[int]) -> Tensor:
        """Some images, float32, shape (B, C, H, W)."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of targets and images (of files, their names and sizes), hexadecimal."""

    @abstractmethod
    def take(self, rows: Tensor) -> Split:
        """The split that has only these images, in this order."""

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.images([row])[0], self.targets[row]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """A batch at once, which is what DataLoader asks for where it can."""
        # channels_last: convolutions on the CPU run in less than half the time, and no slower on a GPU.
        return self.images(rows).contiguous(memory_format=torch.channels_last), self.targets[rows]


class TensorSplit(Split):
    """Images in memory.

    Args:
        pixels: uint8, shape (N, C, H, W).
        targets: See :class:`Split`.
        white: The largest value that a pixel can have.
    """

    def __init__(self, pixels: Tensor, targets: Tensor, white: int = 255) -> None:
        self.pixels, self.targets, self.white = pixels, targets, white

    def images(self, rows: Sequence[int]) -> Tensor:
        """In [0, 1] (paper, G.1)."""
        return self.pixels[torch.as_tensor(rows)].float() / self.white

    def fingerprint(self) -> str:
        """See :meth:`Split.fingerprint`."""
        return _hash(self.targets.numpy().tobytes(), self.pixels.numpy().tobytes())

    def take(self, rows: Tensor) -> TensorSplit:
        """See :meth:`Split.take`."""
        return TensorSplit(self.pixels[rows], self.targets[rows], self.white)


class FileSplit(Split):
    """Images in files, read when they are asked for.

    Args:
        paths: N files that Pillow can read, in folders or in zip archives (:mod:`benchmarks.experiments.data.files`).
        targets: See :class:`Split`.
        transform: Image -> float32 tensor (C, H, W).
    """

    def __init__(self, paths: Sequence[Path], targets: Tensor, transform: Callable[[Any], Tensor]) -> None:
        self.paths, self.targets, self.transform = list(paths), targets, transform

    def images(self, rows: Sequence[int]) -> Tensor:
        """See :meth:`Split.images`.

        Raises:
            InputError: A file is missing or damaged.
        """
        return torch.stack([self.transform(_open(self.paths[row])) for row in rows])

    def fingerprint(self) -> str:
        """See :meth:`Split.fingerprint`; three folders of each path, so that a data root may be moved."""
        listed = [f"{'/'.join(path.parts[-3:])} {file_size(path)}" for path in self.paths]
        return _hash(self.targets.numpy().tobytes(), "\n".join(listed).encode())

    def take(self, rows: Tensor) -> FileSplit:
        """See :meth:`Split.take`."""
        return FileSplit([self.paths[row] for row in rows.tolist()], self.targets[rows], self.transform)


@dataclass(frozen=True)
class RetrievalData:
    """What an experiment needs of its data sets.

    Args:
        name: As on the command line.
        title: As in a table.
        ood_title: The same of what is out of distribution.
        train: Training images.
        test: Queries.
        ood: Images out of distribution, or ``None``.
        gallery: Images to retrieve from; ``None`` for leave-one-out among the queries.
        relation: On positions, which images show the same place; ``None`` for class labels.
        open_set: Whether no class of the queries occurs in training.
        classes: Names of the queries' classes, where there are few.
        train_plain: The training images without augmentation; ``None`` where there is none. :attr:`plain` has either.
        relevance: On positions, which images (its positives) are right answers to a query, where that differs from
            ``relation``, which trains; else ``None``.
        calibration: Known images that nothing was trained on, for thresholds; ``None`` where none are held out.
    """

    name: str
    title: str
    ood_title: str
    train: Split
    test: Split
    ood: Split | None = None
    gallery: Split | None = None
    relation: RelationFunction | None = None
    open_set: bool = False
    classes: tuple[str, ...] = ()
    train_plain: Split | None = None
    relevance: RelationFunction | None = None
    calibration: Split | None = None

    @property
    def plain(self) -> Split:
        """The training images without augmentation."""
        return self.train if self.train_plain is None else self.train_plain

    def fingerprint(self) -> str:
        """A hash of all its parts, hexadecimal."""
        parts = (self.train, self.test, self.ood, self.gallery, self.calibration)
        return _hash(*(b"none" if part is None else part.fingerprint().encode() for part in parts))


def loader(
    split: Split,
    batch_size: int,
    *,
    shuffle: bool = False,
    sampler: Sampler[int] | None = None,
    generator: torch.Generator | None = None,
    workers: int = 0,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches ``(images, targets)`` on the CPU, which may be iterated again and again.

    Args:
        split: The images.
        batch_size: Images a batch; the last one may be smaller.
        shuffle: Whether each pass has its own order.
        sampler: Instead of ``shuffle``, an order of one's own.
        generator: Source of the order.
        workers: Processes that read images.

    Returns:
        torch's loader.
    """
    return DataLoader(
        split,
        batch_size=batch_size,
        shuffle=shuffle if sampler is None else None,
        sampler=sampler,
        generator=generator,
        num_workers=workers,
        collate_fn=_same,
        persistent_workers=False,
    )


def _open(path: Path) -> Any:
    """An image in colour, read to its end."""
    from PIL import Image  # data sets in memory do without

    try:
        with open_file(path) as file, Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        came = f"one that cannot be read ({error})"
        raise InputError(str(path), "an image file", came, "Fetch the file again.") from None


def _hash(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _same(batch: Any) -> Any:
    return batch
