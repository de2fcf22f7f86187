"""Images of one data set as the unknown inputs of an encoder that was trained on another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.registry import DATASETS, NONE, OUTSIDE, SHUFFLED
from benchmarks.experiments.data.shuffled import shuffle_quarters
from benchmarks.experiments.data.split import RetrievalData, Split, TensorSplit
from benchmarks.experiments.data.transforms import IMAGENET_DEVIATION, IMAGENET_MEAN
from contrastive_curvature.errors import InputError, UnsupportedError, expected

_LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey value (ITU-R BT.601, as Pillow and torchvision)."""


class SizedSplit(Split):
    """Images of another size, another number of channels or another normalisation than the encoder takes.

    Args:
        source: The images.
        shape: Channels, height and width of the encoder's input; 1 or 3 channels.
        normalised: Whether the source has ImageNet's normalisation.
        wanted: Whether the encoder's input has.
    """

    def __init__(self, source: Split, shape: tuple[int, int, int], normalised: bool, wanted: bool) -> None:
        self.source, self.shape, self.normalised, self.wanted = source, shape, normalised, wanted
        self.targets = source.targets

    def images(self, rows: Sequence[int]) -> Tensor:
        """Scaled without aliasing to the encoder's height and width, in colour or as grey values."""
        x = self.source.images(rows)
        mean, deviation = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_DEVIATION))
        if self.normalised:
            x = x * deviation + mean
        if x.shape[2:] != self.shape[1:]:
            x = interpolate(x, self.shape[1:], mode="bilinear", antialias=True).clamp(0, 1)
        if x.shape[1] < self.shape[0]:
            x = x.expand(-1, 3, -1, -1)
        elif x.shape[1] > self.shape[0]:
            x = torch.einsum("nchw,c->nhw", x, torch.tensor(_LUMINANCE)).unsqueeze(1)
        return (x - mean) / deviation if self.wanted else x

    def fingerprint(self) -> str:
        """See :meth:`Split.fingerprint`."""
        how = f"{self.shape} {self.normalised} {self.wanted}"
        return hashlib.sha256(f"{self.source.fingerprint()} {how}".encode()).hexdigest()

    def take(self, rows: Tensor) -> SizedSplit:
        """See :meth:`Split.take`."""
        return SizedSplit(self.source.take(rows), self.shape, self.normalised, self.wanted)


def check_ood(name: str, ood: str | None) -> None:
    """Refuse a name of no images, or of the known ones.

    Args:
        name: Of the data set.
        ood: What shall be out of distribution; ``None`` for the data set's own.

    Raises:
        InputError: It is unknown, or the data set itself.
    """
    known = [*OUTSIDE, SHUFFLED, NONE]
    if ood is not None and ood not in known:
        raise InputError(expected("ood", f"one of {', '.join(known)}", ood))
    if ood == name:
        hint = f"By default it is {DATASETS[name].ood}."
        raise InputError(expected("ood", f"other images than those of {name!r}, which are in distribution", ood, hint))


def with_ood(name: str, data: RetrievalData, ood: str | None, root: Path, options: LoadOptions) -> RetrievalData:
    """Put images beside a data set that its encoder has not seen the kind of.

    Args:
        name: Of the data set.
        data: The data set, with all its test images.
        ood: See :func:`check_ood`.
        root: The data root.
        options: ``download`` counts.

    Returns:
        The data with ``ood`` and ``ood_title``; the images fit the encoder's input.

    Raises:
        InputError: Files are missing or damaged.
        UnsupportedError: Quarters can only be shuffled of images in memory.
    """
    if ood is None and (data.ood is not None or DATASETS[name].ood == NONE):
        return data
    chosen = DATASETS[name].ood if ood is None else ood
    if chosen == NONE:
        return replace(data, ood=None, ood_title="")
    if chosen == SHUFFLED:
        return replace(data, ood=_shuffled(name, data.test), ood_title=f"{name} with shuffled quarters")
    source, wanted = OUTSIDE[chosen], DATASETS[name].photos
    channels, height, width = data.test.images([0]).shape[1:]
    size = min(height, source.largest) if source.largest else None
    split = source.load(root, LoadOptions(download=options.download, image_size=size))
    shape = (channels, height, width)
    if tuple(split.images([0]).shape[1:]) != shape or source.photos != wanted:
        split = SizedSplit(split, shape, source.photos, wanted)
    return replace(data, ood=split, ood_title=source.title)


def _shuffled(name: str, test: Split) -> TensorSplit:
    if not isinstance(test, TensorSplit):
        msg = f"ood={SHUFFLED!r} for {name!r}: quarters are shuffled of images in memory. Name a data set instead."
        raise UnsupportedError(msg)
    # Of the test images, so that nothing but the arrangement of the quarters tells the two sets apart.
    moved = shuffle_quarters(test.pixels, torch.Generator().manual_seed(0))
    return TensorSplit(moved, test.targets, test.white)
