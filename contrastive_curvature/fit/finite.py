"""The check that every curvature is finite; its error names the layer and the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.network.pullback import KronFactors, Pullback

__all__ = ["check_finite", "is_finite"]


def is_finite(curvature: Tensor | KronFactors) -> Tensor:
    """Whether all entries are finite, as a boolean tensor with one entry."""
    return torch.stack([tensor.isfinite().all() for tensor in _tensors(curvature)]).all()


def check_finite(curvature: Tensor | KronFactors, pullback: Pullback, where: str) -> None:
    """Refuse a curvature with NaN or infinity.

    Args:
        curvature: (P,), (P, P) or (P, K), or Kronecker factors.
        pullback: Pullback to the parameters of the curvature.
        where: Description of the data of the curvature, for the message.

    Raises:
        InputError: An entry is not finite; the message names the layer of the first such entry.
    """
    # A sum takes a third of the time of asking every entry. It is finite only where all entries are; large ones may
    # overflow in it.
    total = torch.stack([tensor.sum() for tensor in _tensors(curvature)]).sum()
    if bool(total.isfinite()) or bool(is_finite(curvature)):
        return
    if isinstance(curvature, Tensor):
        bad = ~curvature.isfinite()
        entries = bad if bad.ndim == 1 else bad.any(dim=1)
        if bad.ndim == 2 and bad.shape[0] == bad.shape[1] and bool(bad.diagonal().any()):
            # A row also holds products with other layers; the diagonal entry belongs to one parameter alone.
            entries = bad.diagonal()
        name = pullback.parameter_at(int(entries.nonzero()[0]))
    else:
        groups = [not all(bool(factor.isfinite().all()) for factor in group) for group in curvature]
        name = pullback.parameter_name(groups.index(True))
    layer = name.rpartition(".")[0] or name
    hint = (
        "Check for inputs that are not finite, or whose squares overflow (beyond 1e19 in float32). Leave them out or "
        "scale them; float64 reaches 1e154."
    )
    received = f"NaN or infinity in layer {layer!r} (parameter {name!r}), first in {where}"
    raise InputError(expected("curvature", "finite numbers", received, hint))


def _tensors(curvature: Tensor | KronFactors) -> list[Tensor]:
    return [curvature] if isinstance(curvature, Tensor) else [factor for group in curvature for factor in group]
