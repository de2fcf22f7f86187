"""Small images as ``data:`` URLs, so that a page needs no other file."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError

SIDE = 112
"""Longest side in pixels; larger images are made smaller."""

_JPEG_FROM = 48
"""Smaller images are written as PNG, which keeps every pixel."""


def thumbnails(items: list[Any]) -> list[str | None]:
    """Return ``data:`` URLs of the items of a :class:`.Data`; ``None`` for items that are not images.

    Arrays of whole numbers hold 0 to 255 (or only 0 and 1). Other arrays hold 0 to 1; if a number is outside this
    range, the smallest number of all images becomes black and the largest white.
    """
    pictures = {i for i, item in enumerate(items) if isinstance(item, Path) or hasattr(item, "getbands")}
    arrays = {
        i: _array(item)
        for i, item in enumerate(items)
        if isinstance(item, Tensor) or (i not in pictures and hasattr(item, "__array_interface__"))
    }
    floats = [a[np.isfinite(a)] for a in arrays.values() if a.dtype.kind == "f"]
    low = min((float(a.min(initial=0.0)) for a in floats), default=0.0)
    high = max((float(a.max(initial=1.0)) for a in floats), default=1.0)
    pixels = {i: _grey_values(array, low, high) for i, array in arrays.items()}
    return [_address(pixels.get(i, item)) if i in pictures | pixels.keys() else None for i, item in enumerate(items)]


def _array(item: Any) -> np.ndarray:
    """Return an image as (H, W) or (H, W, C)."""
    if isinstance(item, Tensor):
        item = item.detach().cpu()
        item = item.float() if item.is_floating_point() else item
    array = np.asarray(item)
    # If both axes could be channels, tensors have them first and arrays last.
    first, last = (array.ndim == 3 and array.shape[axis] in (1, 3, 4) for axis in (0, 2))
    if first and (isinstance(item, Tensor) or not last):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or not array.size or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        wanted = "images of shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels"
        raise InputError("items", wanted, f"an array of shape {np.shape(item)}")
    if array.dtype.kind not in "biuf":
        raise InputError("items", "images of numbers", f"an array of {array.dtype}")
    return array


def _grey_values(array: np.ndarray, low: float, high: float) -> np.ndarray:
    if array.dtype.kind == "f":
        scaled = (np.nan_to_num(array.astype(np.float32), nan=low, posinf=high, neginf=low) - low) / (high - low) * 255
        return scaled.round().clip(0, 255).astype(np.uint8)
    return (array.astype(np.int64) * (255 if array.max() <= 1 else 1)).clip(0, 255).astype(np.uint8)


def _address(item: Any) -> str:
    """Return the ``data:`` URL of an array of grey values, a Pillow image or an image file."""
    validate.package("pictures of inputs (n_shown=0 shows none)", "PIL", "report")
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(item, np.ndarray):
            image = Image.fromarray(item)
        else:
            image = Image.open(item) if isinstance(item, Path) else item.copy()
        image.thumbnail((SIDE, SIDE))
        image = _as_seen(image)
    except UnidentifiedImageError:
        raise InputError("items", "files of images", str(item)) from None
    file = io.BytesIO()
    kind = "jpeg" if max(image.size) >= _JPEG_FROM else "png"
    image.save(file, kind, **({"quality": 82} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _as_seen(image: Any) -> Any:
    """Return a picture in grey or RGB as a person sees it.

    Its EXIF orientation is applied, transparent places are white, and 16 bits and fractions become 8 bits by value,
    where Pillow alone would clip them.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image).astype(np.float64)
        white = 65535 if image.mode != "F" else 1 if values.max() <= 1 else 255
        image = Image.fromarray((values / white * 255).round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")
