"""Small images as ``data:`` addresses, so that a page needs no other file."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from contrastive_curvature.apps.report.data import is_image
from contrastive_curvature.apps.report.packages import check_packages
from contrastive_curvature.errors import InputError, expected

__all__ = ["SIDE", "thumbnails"]

SIDE = 112
"""Longest side in pixels; larger images are made smaller."""

_JPEG_FROM = 48
"""Smaller images are written as PNG, which keeps every pixel."""


def thumbnails(items: list[Any]) -> list[str | None]:
    """Addresses of images; ``None`` for what is no image.

    Arrays of whole numbers hold 0 to 255 (0 and 1 where nothing is larger). Others hold 0 to 1, or, where one is
    outside that, anything: then the smallest number of all the images is black, and the largest is white.

    Args:
        items: Images as :class:`~contrastive_curvature.apps.report.Data` takes them, and others.

    Raises:
        UnsupportedError: Pillow is not installed.
        InputError: A file is no image, or an array has no shape of one.
    """
    arrays = {i: _array(item) for i, item in enumerate(items) if is_image(item) and not _is_pillow(item)}
    floats = [a[np.isfinite(a)] for a in arrays.values() if a.dtype.kind == "f"]
    low = min((float(a.min(initial=0.0)) for a in floats), default=0.0)
    high = max((float(a.max(initial=1.0)) for a in floats), default=1.0)
    return [_address(item, arrays.get(i), low, high) if is_image(item) else None for i, item in enumerate(items)]


def _is_pillow(item: Any) -> bool:
    return isinstance(item, Path) or hasattr(item, "getbands")


def _array(item: Any) -> np.ndarray:
    array = item.detach().cpu().float().numpy() if isinstance(item, Tensor) and item.is_floating_point() else item
    array = np.asarray(array.cpu() if isinstance(array, Tensor) else array)
    shape = array.shape
    # Tensors have their channels first, arrays last, where both could be.
    if (
        array.ndim == 3
        and array.shape[0] in (1, 3, 4)
        and (isinstance(item, Tensor) or array.shape[2] not in (1, 3, 4))
    ):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or not array.size or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        wanted = "images of shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels"
        raise InputError(expected("items", wanted, f"an array of shape {shape}"))
    if array.dtype.kind not in "biuf":
        raise InputError(expected("items", "images of numbers", f"an array of {array.dtype}"))
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _address(item: Any, array: np.ndarray | None, low: float, high: float) -> str:
    check_packages("PIL")
    from PIL import Image, UnidentifiedImageError

    try:
        if array is not None:
            image = Image.fromarray(_bytes(array, low, high))
        else:
            image = Image.open(item) if isinstance(item, Path) else item.copy()
        image.thumbnail((SIDE, SIDE))
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except UnidentifiedImageError:
        raise InputError(expected("items", "files of images", str(item))) from None
    file = io.BytesIO()
    kind = "jpeg" if max(image.size) >= _JPEG_FROM else "png"
    image.save(file, kind, **({"quality": 82} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _bytes(array: np.ndarray, low: float, high: float) -> np.ndarray:
    if array.dtype.kind == "f":
        scaled = (np.nan_to_num(array, nan=low, posinf=high, neginf=low) - low) / (high - low or 1.0) * 255
        return scaled.round().clip(0, 255).astype(np.uint8)
    top = int(array.max())
    return (array.astype(np.int64) * (255 if top <= 1 else 1)).clip(0, 255).astype(np.uint8)
