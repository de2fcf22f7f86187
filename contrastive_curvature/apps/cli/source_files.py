"""The kinds of source: feature folder, arrays, images, texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.apps.cli.archive import read_archive
from contrastive_curvature.apps.cli.encoders import their_error
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.images import find_images, read_image
from contrastive_curvature.apps.cli.sources import FEATURES, IMAGES, INPUTS, TEXTS, Columns, Source
from contrastive_curvature.apps.cli.tables import read_table
from contrastive_curvature.errors import expected
from contrastive_curvature.io.feature_folder import FeatureFolder
from contrastive_curvature.io.feature_folder.header import read_header
from contrastive_curvature.network import given_features

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.encoders import Encoder

__all__ = ["ArraySource", "FeatureFolderSource", "ImageSource", "TextSource"]


class ArraySource(Source):
    """An ``.npz``: ``features`` or ``embeddings`` (N, F), or ``inputs`` (N, ...), with ``labels`` and ``ids`` (N,)."""

    def __init__(self, path: Path) -> None:
        arrays = read_archive(path)
        self.kind = INPUTS if "inputs" in arrays.values else FEATURES
        self.are_embeddings = "embeddings" in arrays.values
        self.values, self.weight, self.bias = arrays.inputs(), arrays.weight(), arrays.bias()
        super().__init__(path, arrays.ids(len(self.values)), arrays.classes(len(self.values)))

    def where(self) -> str:
        """See :meth:`Source.where`."""
        return "An .npz has them in the array labels."

    def prepare(self, encoder: Encoder) -> None:
        """Check the width and the weights where the encoder is a last layer."""
        self._wrap: Callable[[Tensor], Any] = encoder.wrap_features
        if self.kind == INPUTS:
            self._wrap = lambda x: x.to(encoder.dtype)
        names = ("features", "embeddings")
        if self.kind == FEATURES and encoder.width is not None and self.are_embeddings != encoder.identity:
            wanted, came = names[encoder.identity], names[self.are_embeddings]
            raise BadInputError(expected(f"{self.path}", f"the array {wanted} for {encoder.name}", f"the array {came}"))
        if self.kind == FEATURES and encoder.width is not None and self.values.shape[1] != encoder.width:
            wanted = f"features of width {encoder.width} for {encoder.name}"
            raise BadInputError(expected(f"{self.path}", wanted, f"{self.values.shape[1]}"))
        if self.kind == FEATURES and encoder.width is not None and self.weight is not None:
            self._check_last_layer(encoder, self.weight)

    def _check_last_layer(self, encoder: Encoder, weight: NDArray[np.float32]) -> None:
        theirs: Any = encoder.module
        bias = np.zeros(len(weight), np.float32) if self.bias is None else self.bias
        pairs = ((weight, theirs.weight), (bias, theirs.bias))
        if not all(np.array_equal(mine, other.detach().float().cpu().numpy()) for mine, other in pairs):
            hint = (
                "Fit again with that layer; if these are features of the encoder of the fit, leave weight and bias out."
            )
            raise BadInputError(
                expected(f"{self.path}", f"weight and bias of {encoder.name}", "those of another", hint)
            )

    def batches(
        self, rows: NDArray[np.int64], size: int, seed: int | None = None
    ) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        """See :meth:`Source.batches`."""
        for some in _parts(rows, size, seed):
            yield self._wrap(torch.from_numpy(self.values[some])), some


class FeatureFolderSource(Source):
    """What ``contrastive_curvature.features`` wrote."""

    kind = FEATURES

    def __init__(self, path: Path) -> None:
        self.folder = FeatureFolder(path)
        self.encoder_of = read_header(path).source
        targets = self.folder.targets.numpy()
        classes = targets if targets.ndim == 1 and targets.dtype.kind in "iu" else None
        super().__init__(path, [str(name) for name in self.folder.identifiers], classes)

    def where(self) -> str:
        """See :meth:`Source.where`."""
        return "A feature folder has them as its targets, one whole number a point."

    def prepare(self, encoder: Encoder) -> None:
        """Refuse features of another encoder."""
        encoder.check_features(self.encoder_of, str(self.path))
        # A whole encoder takes a batch with its source; a last layer that was given alone takes the numbers.
        self._whole = encoder.width is None

    def batches(
        self, rows: NDArray[np.int64], size: int, seed: int | None = None
    ) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        """See :meth:`Source.batches`; batches of which rows were left out are smaller."""
        wanted, start = np.zeros(len(self), dtype=bool), 0
        wanted[rows] = True
        folder = FeatureFolder(self.path, size, seed=seed)
        numbers = folder.numbers.numpy()
        for x, _ in folder:
            phi = x[given_features.FEATURES]
            some = numbers[start : start + len(phi)]
            here, start = wanted[some], start + len(phi)
            some = some[here]
            if len(some):
                phi = phi[torch.from_numpy(here)]
                yield (given_features.feature_inputs(phi, self.encoder_of) if self._whole else phi), some


class ImageSource(Source):
    """One folder for each class, as torchvision's ``ImageFolder`` has it; or images alone, without classes."""

    kind = IMAGES

    def __init__(self, path: Path) -> None:
        found = find_images(path)
        parts = [file.relative_to(path).parts for file in found]
        flat = sum(len(each) == 1 for each in parts)
        if 0 < flat < len(parts):
            hint = "Each class has a folder of its own."
            raise BadInputError(expected(f"{path}", "images in folders or without", f"{flat} beside folders", hint))
        self.files = found
        super().__init__(path, ["/".join(p) for p in parts], None if flat else np.array([p[0] for p in parts]))

    def where(self) -> str:
        """See :meth:`Source.where`."""
        return "An image folder has one folder for each class."

    def prepare(self, encoder: Encoder) -> None:
        """Take the transform of the encoder."""
        assert encoder.image_transform is not None
        self._transform, self._encoder = encoder.image_transform, encoder.name

    def batches(
        self, rows: NDArray[np.int64], size: int, seed: int | None = None
    ) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        """See :meth:`Source.batches`."""
        for some in _parts(rows, size, seed):
            images = [read_image(self.files[row], self._transform, self._encoder) for row in some]
            odd = next((k for k, each in enumerate(images) if each.shape != images[0].shape), None)
            if odd is not None:
                shapes = f"{tuple(images[0].shape)} and {tuple(images[odd].shape)} ({self.files[some[odd]]})"
                hint = "Give a transform that resizes: --encoder's function may return (module, transform)."
                raise BadInputError(expected(f"{self.path}", "images of one shape", shapes, hint))
            yield torch.stack(images), some


class TextSource(Source):
    """A ``.csv`` with a header, or a ``.jsonl``: a column of texts, perhaps one of classes and one of identifiers."""

    kind = TEXTS

    def __init__(self, path: Path, columns: Columns) -> None:
        self.texts, classes, ids = read_table(path, columns)
        self._columns = columns
        super().__init__(path, ids, classes)

    def where(self) -> str:
        """See :meth:`Source.where`."""
        return f"A table has them in the column that --label-column names (here {self._columns.label!r})."

    def prepare(self, encoder: Encoder) -> None:
        """Take the tokeniser of the encoder."""
        assert encoder.collate is not None
        self._collate, self._encoder = encoder.collate, encoder.name

    def batches(
        self, rows: NDArray[np.int64], size: int, seed: int | None = None
    ) -> Iterator[tuple[Any, NDArray[np.int64]]]:
        """See :meth:`Source.batches`."""
        for some in _parts(rows, size, seed):
            try:
                batch = self._collate([self.texts[row] for row in some])
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:  # whatever the user's own transform raises
                argument = f"the transform of {self._encoder}"
                wanted = f"a batch for texts of {self.path}, from row {some[0]} on"
                raise their_error(argument, wanted, error) from error
            yield batch, some


def _parts(rows: NDArray[np.int64], size: int, seed: int | None) -> Iterator[NDArray[np.int64]]:
    order = rows if seed is None else rows[np.random.default_rng(seed).permutation(len(rows))]
    return (order[start : start + size] for start in range(0, len(rows), size))
