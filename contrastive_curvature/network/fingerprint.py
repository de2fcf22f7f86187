"""Fingerprints of encoders: a few numbers that tell whether the weights are still the ones they were."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from contrastive_curvature.network.digest import dense_parts, state_tensors

__all__ = ["encoder_fingerprint", "same_encoder", "summary", "trunk_fingerprint", "trunk_tensors"]

_AT_ONCE = 2**20
"""Entries of the encoder that are summed together, so that no second copy of it is in memory."""

_PERIOD = 4099
"""After so many entries their weights repeat. A prime, so that no axis of a tensor has this period."""


def encoder_fingerprint(model: nn.Module) -> Tensor:
    """Number, norm, sum and weighted sum of all parameters and buffers, float64 on the CPU, shape (4,).

    Buffers that ``state_dict`` leaves out do not count, see :func:`.state_tensors`. The weights depend on the place in
    a tensor, so that exchanged entries show. Nothing depends on the order of the modules, which wrappers around an
    encoder may list in another one.
    """
    return summary([tensor for _, tensor in state_tensors(model)])


def trunk_fingerprint(model: nn.Module, last_layer_name: str) -> Tensor:
    """The same of everything but the last layer, which what the last layer takes in does not depend on.

    A weight of the last layer that another layer uses, too, counts.

    Args:
        model: The encoder.
        last_layer_name: Name of the last layer in ``model.named_modules()``.

    Returns:
        Shape (4,), float64 on the CPU.
    """
    return summary(trunk_tensors(model, last_layer_name))


def trunk_tensors(model: nn.Module, last_layer_name: str) -> list[Tensor]:
    """Parameters and buffers that :func:`trunk_fingerprint` summarises."""
    prefix = f"{last_layer_name}." if last_layer_name else ""
    named = list(model.named_parameters(remove_duplicate=False))
    own = {id(p) for name, p in named if name in (f"{prefix}weight", f"{prefix}bias")}
    shared = {id(p) for name, p in named if name not in (f"{prefix}weight", f"{prefix}bias")}
    return [t for _, t in state_tensors(model) if id(t) not in own - shared]


def same_encoder(first: Tensor, second: Tensor) -> bool:
    """Whether two fingerprints are of one encoder, up to the order of sums on another device."""
    if first.shape != second.shape or not torch.equal(first[:1], second[:1]):
        return False
    # Sums may cancel, so their rounding is that of the norm.
    size = float(first[1:].abs().max())
    return torch.allclose(first[1:], second[1:], rtol=0, atol=1e-11 * size)


def summary(tensors: list[Tensor]) -> Tensor:
    """Number, norm, sum and weighted sum of the entries of tensors, float64 on the CPU, shape (4,)."""
    number, sums = 0, [torch.zeros(3, dtype=torch.float64)]
    for values in (part for tensor in tensors for part in dense_parts(tensor)):
        flat = (torch.view_as_real(values) if values.is_complex() else values).flatten()
        number += flat.numel()
        weights = _weights().to(flat.device)
        for part in flat.split(_AT_ONCE):
            wide = part.double()
            rows, rest = len(wide) // _PERIOD, len(wide) % _PERIOD
            weighted = wide[len(wide) - rest :] @ weights[:rest]
            if rows:
                weighted = weighted + (wide[: rows * _PERIOD].view(rows, -1) @ weights).sum()
            sums.append(torch.stack([wide @ wide, wide.sum(), weighted]).cpu())
    squares, total, weighted = torch.stack(sums).sum(0)
    return torch.stack([torch.tensor(float(number), dtype=torch.float64), squares.sqrt(), total, weighted])


@functools.cache
def _weights() -> Tensor:
    """Weights of the entries by their place: fractions of the multiples of the golden mean, shape (_PERIOD,)."""
    return torch.arange(1, _PERIOD + 1, dtype=torch.float64) * 0.6180339887498949 % 1
