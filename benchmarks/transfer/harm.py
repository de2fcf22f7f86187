"""Images made worse by degrees: five kinds of harm, each at five strengths that grow with the image's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from contrastive_curvature.errors import InputError, expected

Images = NDArray[np.uint8]

LEVELS = (1, 2, 3, 4, 5)
"""Strengths; 5 is the worst."""

_BLUR = (0.02, 0.04, 0.06, 0.09, 0.13)
_NOISE = (0.05, 0.10, 0.18, 0.28, 0.40)
_SQUARE = (0.20, 0.32, 0.44, 0.56, 0.70)
_CONTRAST = (0.70, 0.50, 0.33, 0.20, 0.08)
_DEGREES = (10.0, 20.0, 35.0, 55.0, 85.0)
_GREY = 128.0
_LEAST_SIDE = 8


def harm(images: Images, kind: str, level: int, seed: int) -> Images:
    """Make images worse.

    What is drawn at random (noise, place of the square, sense of the turn) depends on the seed and the kind alone, so
    that the five levels of one image differ in their strength and in nothing else.

    Args:
        images: Grey values (N, H, W), or (N, H, W, C) with channels; sides of at least 8 pixels.
        kind: ``"blur"``: Gaussian, its standard deviation 2 to 13 % of the shorter side. ``"noise"``: Gaussian, its
            standard deviation 5 to 40 % of white. ``"occlusion"``: a grey square of 20 to 70 % of the shorter side,
            within the image. ``"contrast"``: 70 to 8 % of the distance to the image's mean. ``"rotation"``: by 10 to 85
            degrees to either side, the edge repeated.
        level: 1 to 5.
        seed: Of what is random.

    Returns:
        uint8, of the same shape.

    Raises:
        InputError: An argument is out of range.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim not in (3, 4):
        came = f"an array of {images.dtype}, shape {images.shape}" if isinstance(images, np.ndarray) else repr(images)
        raise InputError(expected("images", "uint8 of shape (N, H, W) or (N, H, W, C)", came))
    if min(images.shape[1:3]) < _LEAST_SIDE or 0 in images.shape[3:]:
        raise InputError(expected("images", f"sides of at least {_LEAST_SIDE} pixels", f"shape {images.shape}"))
    if kind not in KINDS:
        raise InputError(expected("kind", f"one of {', '.join(KINDS)}", kind))
    if isinstance(level, bool) or level not in LEVELS:
        raise InputError(expected("level", f"one of {LEVELS}", level))
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(expected("seed", "a whole number, at least 0", seed))
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    if not len(images):
        return images.copy()
    return np.stack([_rounded(_HARMS[kind](image.astype(np.float32), level - 1, rng)) for image in images])


def _rounded(image: NDArray[np.float32]) -> Images:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def _blur(image: Any, at: int, _rng: np.random.Generator) -> Any:
    sigma = _BLUR[at] * min(image.shape[:2])
    return ndimage.gaussian_filter(image, sigma, mode="nearest", axes=(0, 1))


def _noise(image: Any, at: int, rng: np.random.Generator) -> Any:
    return image + 255 * _NOISE[at] * rng.standard_normal(image.shape, dtype=np.float32)


def _occlusion(image: Any, at: int, rng: np.random.Generator) -> Any:
    side = max(1, round(_SQUARE[at] * min(image.shape[:2])))
    # A point of the unit square, not of the pixels: each level's square then lies within the next one's.
    top, left = (int(share * (length - side + 1)) for share, length in zip(rng.random(2), image.shape[:2], strict=True))
    image[top : top + side, left : left + side] = _GREY
    return image


def _contrast(image: Any, at: int, _rng: np.random.Generator) -> Any:
    mean = image.mean()
    return mean + _CONTRAST[at] * (image - mean)


def _rotation(image: Any, at: int, rng: np.random.Generator) -> Any:
    degrees = _DEGREES[at] * rng.choice((-1, 1))
    return ndimage.rotate(image, degrees, axes=(0, 1), reshape=False, order=1, mode="nearest")


_HARMS: dict[str, Callable[[Any, int, np.random.Generator], Any]] = {
    "blur": _blur,
    "noise": _noise,
    "occlusion": _occlusion,
    "contrast": _contrast,
    "rotation": _rotation,
}
KINDS = tuple(_HARMS)
"""Names of the harms."""
