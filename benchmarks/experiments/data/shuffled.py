"""Out-of-distribution images from in-distribution ones."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

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
        raise InputError(expected("images", "shape (N, C, H, W) with even H and W", tuple(images.shape)))
    n, channels, height, width = images.shape
    half = (height // 2, width // 2)
    quarters = images.reshape(n, channels, 2, half[0], 2, half[1]).permute(0, 2, 4, 1, 3, 5).reshape(n, 4, -1)
    chosen = torch.randint(len(_ORDERS), (n,), generator=generator)
    order = torch.tensor(_ORDERS)[chosen].to(images.device)
    moved = quarters.gather(1, order.unsqueeze(2).expand_as(quarters))
    back = moved.reshape(n, 2, 2, channels, *half).permute(0, 3, 1, 4, 2, 5)
    return back.reshape(n, channels, height, width)
