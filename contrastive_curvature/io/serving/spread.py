"""Trace of the covariance of the raw outputs, and the variance along their mean, for every form of the posterior.

The norm and the direction of the output turn the two into all scores. Each form is a module whose buffers are the
arrays of :mod:`contrastive_curvature.io.serving.parts`, with no operation that a graph or ONNX does not have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["AxesSpread", "DenseSpread", "DiagonalSpread", "make_spread"]


class _Spread(nn.Module):
    """Keeps some arrays as buffers; one that is not there is ``None``."""

    names: tuple[str, ...] = ()

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name in self.names:
            self.register_buffer(name, arrays.get(name))


class DiagonalSpread(_Spread):
    """Independent weights."""

    names = ("variance", "bias_variance")
    variance: Tensor
    bias_variance: Tensor | None

    def forward(self, phi: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Trace, and variance along directions.

        Args:
            phi: Features, shape (B, F).
            u: Unit vectors, shape (B, D), float64.

        Returns:
            Float64, shape (B,) each.
        """
        values = phi.square() @ self.variance.to(phi.dtype).T
        if self.bias_variance is not None:
            values = values + self.bias_variance.to(phi.dtype)
        wide = values.double()
        return wide.sum(1), (wide * u.square()).sum(1)


class AxesSpread(_Spread):
    """Kronecker factors: every covariance is diagonal on the same axes, up to a common part."""

    names = ("axes", "lengths", "basis", "along", "across", "common", "common_trace")
    axes: Tensor
    lengths: Tensor
    basis: Tensor
    along: Tensor
    across: Tensor | None
    common: Tensor | None
    common_trace: Tensor | None

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        axes = arrays["axes"].double()
        # Rounding leaves the axes at lengths that are not quite one, which dense covariances have, too.
        wide = {"axes": axes, "lengths": axes.square().sum(0)}
        if "common" in arrays:
            wide["common"] = arrays["common"].double()
            wide["common_trace"] = wide["common"].trace()
        super().__init__({**arrays, **wide})

    def forward(self, phi: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`DiagonalSpread.forward`."""
        phi = phi.to(self.basis.dtype)
        coordinates = phi @ self.basis
        values = coordinates.square() @ self.along.T
        if self.across is not None:
            left = (phi - coordinates @ self.basis.T).square().sum(1, keepdim=True)
            values = values + left * self.across
        wide = values.double()
        total = wide @ self.lengths
        radial = (wide * (u @ self.axes).square()).sum(1)
        if self.common is not None and self.common_trace is not None:
            total = total + self.common_trace
            radial = radial + ((u @ self.common) * u).sum(1)
        return total, radial


class DenseSpread(_Spread):
    """A covariance of all weights of the layer; in float64, as :class:`.DensePosterior` computes."""

    names = ("covariance", "trace")
    covariance: Tensor
    trace: Tensor

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        dim, width = arrays["weight"].shape
        covariance = arrays["covariance"].double()
        # In the order of the layer's inputs first, with the bias as one more input that is always one.
        order = torch.arange(dim * width).view(dim, width)
        if len(covariance) > dim * width:
            order = torch.cat([order, torch.arange(dim * width, len(covariance)).unsqueeze(1)], dim=1)
        self.columns = order.shape[1]
        flat = order.flatten().to(covariance.device)
        covariance = covariance[flat][:, flat]
        blocks = covariance.view(dim, self.columns, dim, self.columns)
        super().__init__({"covariance": covariance, "trace": torch.einsum("kfkg->fg", blocks)})

    def forward(self, phi: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`DiagonalSpread.forward`."""
        wide = phi.double()
        if self.columns > wide.shape[1]:
            wide = torch.cat([wide, torch.ones_like(wide[:, :1])], dim=1)
        total = ((wide @ self.trace) * wide).sum(1)
        weights = (u.unsqueeze(2) * wide.unsqueeze(1)).flatten(1)
        return total, ((weights @ self.covariance) * weights).sum(1)


_FORMS: dict[str, type[_Spread]] = {"diagonal": DiagonalSpread, "axes": AxesSpread, "dense": DenseSpread}


def make_spread(form: str, arrays: Mapping[str, Tensor]) -> nn.Module:
    """The module of a form."""
    return _FORMS[form](arrays)
