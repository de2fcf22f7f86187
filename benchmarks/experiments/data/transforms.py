"""From a photograph to the input of a residual network (paper, G.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.options import LoadOptions

PHOTO_SIZE = 224
"""Side of the images in pixels (paper, G.1)."""

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels, which networks with ImageNet weights expect to be normalised by."""
_BORDER = 256 / 224
"""The shorter side before the crop, in sides of the crop: what torchvision's ImageNet weights were evaluated with."""


def photo_size(options: LoadOptions) -> int:
    """The side that is asked for, else the paper's."""
    return PHOTO_SIZE if options.image_size is None else options.image_size


def augmented(size: int) -> Callable[[Any], Tensor]:
    """For training: a random resized crop, with torchvision's default scale and ratio, and a random horizontal flip.

    The paper names the two operations without their parameters. Random numbers come from torch's global generator.

    Args:
        size: Side in pixels.

    Returns:
        Image -> float32 (3, size, size) with ImageNet's normalisation.
    """
    from torchvision.transforms import v2

    return _compose(v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip())


def cropped(size: int) -> Callable[[Any], Tensor]:
    """For all else: the centre of the image, which was scaled so that its shorter side is 256/224 of the crop's.

    Args:
        size: Side in pixels.

    Returns:
        See :func:`augmented`.
    """
    from torchvision.transforms import v2

    return _compose(v2.Resize(round(size * _BORDER), antialias=True), v2.CenterCrop(size))


def squeezed(size: int) -> Callable[[Any], Tensor]:
    """For street scenes: the whole image, as what tells two places apart may stand at its edge.

    Args:
        size: Side in pixels.

    Returns:
        See :func:`augmented`.
    """
    from torchvision.transforms import v2

    return _compose(v2.Resize((size, size), antialias=True))


def _compose(*geometry: Any) -> Callable[[Any], Tensor]:
    from torchvision.transforms import v2

    pixels = (
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_DEVIATION),
        v2.ToPureTensor(),
    )
    return v2.Compose([*geometry, *pixels])
