"""Images of one data set, or its own with shuffled quarters, as the unknown inputs of an encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.photos import IMAGENET_DEVIATION, IMAGENET_MEAN
from benchmarks.experiments.data.registry import DATASETS, NONE, OUTSIDE, SHUFFLED
from benchmarks.experiments.data.split import RetrievalData, Split, TensorSplit
from contrastive_curvature.errors import InputError, UnsupportedError

_ORDERS = [order for order in permutations(range(4)) if all(new % 2 != old % 2 for new, old in enumerate(order))]
"""The four orders in which every quarter changes sides. (Swapping top and bottom only would leave a 1 a 1.)"""


def shuffle_quarters(images: Tensor, generator: torch.Generator) -> Tensor:
    """Cut each image into quarters, and put them back so that each left one stands on the right, and the reverse.

    Brightness, contrast and every stroke inside a quarter stay exactly the same; only the arrangement, which makes a
    digit a digit, is destroyed. So a detector cannot win by looking at the histogram of an image, as it can against
    noise, inverted images or digits of another data set, and the images are no digits any more, as rotated or shifted
    ones still are (and as mosaics of quarters of different digits, each in its own place, often are).

    Args:
        images: Shape (N, C, H, W), H and W even.
        generator: Chooses the order of each image.

    Returns:
        Shape (N, C, H, W).

    Raises:
        InputError: The shape is wrong.
    """
    if images.ndim != 4 or images.shape[2] % 2 or images.shape[3] % 2:
        raise InputError("images", "shape (N, C, H, W) with even H and W", tuple(images.shape))
    n, channels, height, width = images.shape
    half = (height // 2, width // 2)
    quarters = images.reshape(n, channels, 2, half[0], 2, half[1]).permute(0, 2, 4, 1, 3, 5).reshape(n, 4, -1)
    chosen = torch.randint(len(_ORDERS), (n,), generator=generator)
    order = torch.tensor(_ORDERS)[chosen].to(images.device)
    moved = quarters.gather(1, order.unsqueeze(2).expand_as(quarters))
    back = moved.reshape(n, 2, 2, channels, *half).permute(0, 3, 1, 4, 2, 5)
    return back.reshape(n, channels, height, width)


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
        raise InputError("ood", f"one of {', '.join(known)}", ood)
    if ood == name:
        hint = f"By default it is {DATASETS[name].ood}."
        raise InputError("ood", f"other images than those of {name!r}, which are in distribution", ood, hint)


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
        raise UnsupportedError(
            f"ood={SHUFFLED!r} for {name!r}: quarters are shuffled of images in memory. Name a data set instead."
        )
    # Of the test images, so that nothing but the arrangement of the quarters tells the two sets apart.
    moved = shuffle_quarters(test.pixels, torch.Generator().manual_seed(0))
    return TensorSplit(moved, test.targets, test.white)
