"""What the predictions of a fitted posterior depend on besides its curvature, in a few numbers.

A calibration holds for one posterior. Whether it is still that one is seen from its prior precision and temperature,
and from the weights and buffers of the encoder; a new curvature drops the calibration by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.network.digest import dense_parts, encoder_fingerprint, is_transient, same_encoder, summary

__all__ = ["Stamp", "encoder_fingerprint", "fingerprint", "same_encoder", "same_posterior"]

_OWN = 5
"""Numbers of a posterior's fingerprint before those of the encoder."""


def fingerprint(la: Any) -> Tensor:
    """The encoder's numbers after those of temperature and prior precision.

    Args:
        la: A fitted posterior.

    Returns:
        Shape (9,), float64 on the CPU.
    """
    temperature = torch.tensor([la.temperature], dtype=torch.float64)
    return torch.cat([temperature, summary([la.prior_precision]), encoder_fingerprint(la.model)])


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
        tensors = [prior, *_tensors(la.model)]
        versions = tuple((0 if t.is_inference() else t._version, _address(t)) for t in tensors)
        return cls(la._known.fits, la.temperature, prior, versions)

    def holds(self, la: Any) -> bool:
        """Whether a posterior is in this state still; the same prior precision may have been set once more."""
        return self.equals(Stamp.of(la))

    def equals(self, now: Stamp) -> bool:
        """Whether another state of the same posterior is this one."""
        if (self.fits, self.temperature, self.versions[1:]) != (now.fits, now.temperature, now.versions[1:]):
            return False
        if now.prior is self.prior:
            return now.versions[0] == self.versions[0]
        return now.prior.shape == self.prior.shape and torch.equal(now.prior, self.prior)


def _address(tensor: Tensor) -> int:
    """Where the entries of a tensor are in memory."""
    return (tensor if tensor.layout is torch.strided else dense_parts(tensor)[-1]).data_ptr()


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and saved buffers; torch's own iterators take longer than some encoders' forward pass."""
    out: list[Tensor] = []
    waiting: list[nn.Module] = [model]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        # A module may stand in several places, also in a circle.
        if id(module) in seen:
            continue
        seen.add(id(module))
        out.extend(t for t in module._parameters.values() if t is not None)
        out.extend(t for name, t in module._buffers.items() if t is not None and not is_transient(module, name))
        waiting.extend(child for child in module._modules.values() if child is not None)
    return out
