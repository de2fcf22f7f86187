"""Passing a split through a network, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.experiments.data.split import Split, loader
from benchmarks.experiments.methods.base import Setting
from contrastive_curvature.hessian.sphere import check_outputs, normalize

CACHE_BYTES = 2**30
"""Memory that intermediate results of a split may fill; where they need more they are computed again."""


def image_batches(split: Split, setting: Setting) -> Iterator[Tensor]:
    """Images on the device, (B, C, H, W), in their order.

    Args:
        split: Images.
        setting: Size of a batch, device and workers.

    Yields:
        Batches.
    """
    # A generator of its own: torch's loader draws a number at its start, which would move the global random state.
    for x, _ in loader(split, setting.eval_batch, generator=torch.Generator(), workers=setting.workers):
        yield x.to(setting.device)


def map_batches(encode: Callable[[Tensor], Tensor], split: Split, setting: Setting, what: str) -> Tensor:
    """What a network says of every image.

    Args:
        encode: Images (B, C, H, W) -> (B, ...), both on the device.
        split: N images.
        setting: Size of a batch, device, workers and progress.
        what: For the progress bar.

    Returns:
        Shape (N, ...), on the CPU.
    """
    total = -(-len(split) // setting.eval_batch)
    shown = tqdm(
        image_batches(split, setting), desc=f"[{what}]", total=total, leave=False, disable=not setting.progress
    )
    with torch.no_grad():
        return torch.cat([encode(x).cpu() for x in shown])


def unit(z: Tensor) -> Tensor:
    """Unit embeddings.

    Args:
        z: Raw outputs, shape (N, D).

    Raises:
        InputError: One is zero or not finite.
    """
    return normalize(check_outputs(z, "raw outputs"))[0]
