"""What the predictions of a fitted posterior depend on besides its curvature, in a few numbers.

A calibration holds for one posterior. Whether it is still that one is seen from its prior precision and temperature,
and from the weights and buffers of the encoder; a new curvature drops the calibration by itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Stamp", "encoder_fingerprint", "fingerprint", "same_encoder", "same_posterior"]

_OWN = 5
"""Numbers of a posterior's fingerprint before those of the encoder."""

_AT_ONCE = 2**20
"""Entries of the encoder that are summed together, so that no second copy of it is in memory."""

_PERIOD = 4099
"""After so many entries their weights repeat. A prime, so that no axis of a tensor has this period."""


def encoder_fingerprint(model: nn.Module) -> Tensor:
    """Number, norm, sum and weighted sum of all parameters and buffers, float64 on the CPU, shape (4,).

    The weights depend on the place in a tensor, so that exchanged entries show. Nothing depends on the order of the
    modules, which wrappers around an encoder may list in another one.
    """
    return _summary([*model.parameters(), *model.buffers()])


def fingerprint(la: Any) -> Tensor:
    """The encoder's numbers after those of temperature and prior precision.

    Args:
        la: A fitted posterior.

    Returns:
        Shape (9,), float64 on the CPU.
    """
    temperature = torch.tensor([la.temperature], dtype=torch.float64)
    return torch.cat([temperature, _summary([la.prior_precision]), encoder_fingerprint(la.model)])


def same_encoder(first: Tensor, second: Tensor) -> bool:
    """Whether two fingerprints are of one encoder, up to the order of sums on another device."""
    if first.shape != second.shape or not torch.equal(first[:1], second[:1]):
        return False
    # Sums may cancel, so their rounding is that of the norm.
    size = float(first[1:].abs().max())
    return torch.allclose(first[1:], second[1:], rtol=0, atol=1e-11 * size)


def same_posterior(first: Tensor, second: Tensor) -> bool:
    """Whether two fingerprints are of one posterior, up to the order of sums on another device."""
    own = first.shape == second.shape and torch.allclose(first[:_OWN], second[:_OWN], rtol=1e-12, atol=0)
    return own and same_encoder(first[_OWN:], second[_OWN:])


@dataclass(frozen=True)
class Stamp:
    """State of a posterior at a prediction, cheap enough for every one of them.

    Attributes:
        fits: How often the curvature was set.
        temperature: Temperature.
        prior: Prior precision.
        versions: How often torch saw the prior precision and each parameter and buffer of the encoder change, and where
            in memory they are.
    """

    fits: int
    temperature: float
    prior: Tensor
    versions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, la: Any) -> Stamp:
        """The present state of a posterior."""
        prior = la.prior_precision
        tensors = (prior, *la.model.parameters(), *la.model.buffers())
        versions = tuple((0 if t.is_inference() else t._version, t.data_ptr()) for t in tensors)
        return cls(la._known.fits, la.temperature, prior, versions)

    def holds(self, la: Any) -> bool:
        """Whether a posterior is in this state still; the same prior precision may have been set once more."""
        now = Stamp.of(la)
        if (self.fits, self.temperature, self.versions[1:]) != (now.fits, now.temperature, now.versions[1:]):
            return False
        if now.prior is self.prior:
            return now.versions[0] == self.versions[0]
        return now.prior.shape == self.prior.shape and torch.equal(now.prior, self.prior)


def _summary(tensors: list[Tensor]) -> Tensor:
    """Number, norm, sum and weighted sum of the entries of tensors, float64 on the CPU, shape (4,)."""
    number, sums = 0, [torch.zeros(3, dtype=torch.float64)]
    for tensor in tensors:
        values = tensor.detach()
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
