"""Passing a split through a network, batch by batch; mean direction and spread of sampled embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.experiments.data.split import Split, loader
from benchmarks.experiments.methods.base import Prediction, Setting
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.vmf.estimation import sra

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


class SphereSpread:
    """Takes in samples one after the other; equals :func:`contrastive_curvature.vmf.fit` of all of them.

    Means and sums of squared deviations are updated as Welford (1962) does, which keeps the digits of samples that
    almost agree. Three arrays of a sample's size are held.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first = self._mean = self._squares = torch.empty(0)

    def add(self, u: Tensor) -> None:
        """Take in one sample.

        Args:
            u: Unit embeddings, shape (N, D).

        """
        if not self.count:
            self._first, self._mean, self._squares = u, torch.zeros_like(u), torch.zeros_like(u)
        self.count += 1
        change = u - self._mean
        self._mean += change / self.count
        self._squares += change * (u - self._mean)

    def prediction(self) -> Prediction:
        """Summary of the samples.

        Returns:
            Mean directions (N, D); uncertainty ``1 / kappa`` (N,) of the von Mises-Fisher distribution fitted to the
            samples (paper, Eq. 42-43); variant ``"sum_std"`` (N,), the sum over dimensions of the (unbiased) standard
            deviation, which the code released with the paper scores by.
        """
        length = self._mean.norm(dim=1)
        # Samples that cancel have no mean direction; the first stands in, as in vmf.fit.
        cancelled = (length <= torch.finfo(length.dtype).eps).unsqueeze(1)
        mean = torch.where(cancelled, self._first, self._mean / length.unsqueeze(1))
        spread = self._squares.sum(1) / self.count
        kappa = sra(length.clamp(max=1), spread.clamp(min=0, max=1), self._mean.shape[1])
        sum_std = (self._squares.clamp(min=0) / (self.count - 1)).sqrt().sum(1)
        return Prediction(mean, 1 / kappa, {"sum_std": sum_std})
