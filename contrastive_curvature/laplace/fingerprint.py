"""What the predictions of a fitted posterior depend on besides its curvature, in a few numbers.

A calibration holds for one posterior. Whether it is still that one is seen from its prior precision and temperature,
and from the weights and buffers of the encoder; a new curvature drops the calibration by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Stamp", "encoder_fingerprint", "fingerprint", "same_encoder", "same_posterior"]

_OWN = 4
"""Numbers of a posterior's fingerprint before those of the encoder."""

_AT_ONCE = 2**20
"""Entries of the encoder that are summed together, so that no second copy of it is in memory."""


def encoder_fingerprint(model: nn.Module) -> Tensor:
    """Number, norm and sum of all parameters and floating-point buffers, float64 on the CPU, shape (3,).

    None depends on the order of the modules, which wrappers around an encoder may list in another one.
    """
    return _summary([*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())])


def fingerprint(la: Any) -> Tensor:
    """The encoder's numbers after those of temperature and prior precision.

    Args:
        la: A fitted posterior.

    Returns:
        Shape (7,), float64 on the CPU.
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
        versions: How often torch saw the prior precision and each parameter of the encoder change.
    """

    fits: int
    temperature: float
    prior: Tensor
    versions: tuple[int, ...]

    @classmethod
    def of(cls, la: Any) -> Stamp:
        """The present state of a posterior."""
        prior = la.prior_precision
        versions = tuple(0 if t.is_inference() else t._version for t in (prior, *la.model.parameters()))
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
    """Number, norm and sum of the entries of tensors, float64 on the CPU, shape (3,)."""
    parts = []
    for flat in _joined(tensors):
        wide = flat.double()
        parts.append(torch.stack([wide.square().sum(), wide.sum()]))
    squares, total = torch.stack([part.cpu() for part in parts]).sum(0)
    number = sum(t.numel() for t in tensors)
    return torch.stack([torch.tensor(float(number), dtype=torch.float64), squares.sqrt(), total])


def _joined(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The entries of many tensors in few: an encoder has hundreds of small ones, and each step has its cost."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        values = tensor.detach()
        flat = (torch.view_as_real(values) if values.is_complex() else values).flatten()
        key = (flat.dtype, flat.device)
        group = groups.setdefault(key, [])
        group.append(flat)
        sizes[key] += flat.numel()
        if sizes[key] >= _AT_ONCE:
            yield torch.cat(group)
            group.clear()
            sizes[key] = 0
    yield from (torch.cat(group) for group in groups.values() if group)
