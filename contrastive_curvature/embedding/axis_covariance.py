"""Covariances of outputs that share their axes, as a Kronecker-factored posterior of a last layer gives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["AxisCovariance", "same_axes"]


@dataclass(frozen=True)
class AxisCovariance:
    """Covariances ``U diag(v_b) U^T + C`` of B outputs, kept as their parts.

    The B matrices of D^2 numbers each may take longer than the encoder itself, and the variance across a direction
    needs none of them.

    Attributes:
        axes: ``U``, orthonormal columns, shape (D, D).
        values: ``v``, not negative, shape (B, D).
        common: ``C``, positive semidefinite, shape (D, D), or ``None`` for zero.
        dtype: Of the covariances.
    """

    axes: Tensor
    values: Tensor
    common: Tensor | None
    dtype: torch.dtype

    def dense(self) -> Tensor:
        """The covariances, shape (B, D, D); with the graph of the parts, whatever the present mode."""
        with self._as_made():
            out = (self.axes * self.values.unsqueeze(1)) @ self.axes.T
            return (out if self.common is None else out + self.common).to(self.dtype)

    def variance(self) -> Tensor:
        """Their diagonals, shape (B, D)."""
        with self._as_made():
            out = self.values @ self.axes.square().T
            return (out if self.common is None else out + self.common.diagonal()).to(self.dtype)

    def isfinite(self) -> bool:
        """Whether all entries are finite."""
        total = self.values.detach().sum(1)
        if self.common is not None:
            total = total + self.common.detach().diagonal().sum()
        # No entry is larger than the trace, but the trace may overflow where no entry does.
        return bool(total.to(self.dtype).isfinite().all()) or bool(self.dense().detach().isfinite().all())

    def total_and_radial(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trace, and variance along directions.

        Args:
            u: Unit vectors, shape (B, D), float64.

        Returns:
            The largest of the parts' entries, without a graph, and with it divided out ``tr Cov`` and ``u^T Cov u``;
            float64, shape (B,) each.
        """
        axes, values = self.axes.double(), self.values.double()
        size = values.detach().amax(1)
        common = None if self.common is None else self.common.double()
        if common is not None:
            size = torch.maximum(size, common.detach().abs().amax())
        scale = torch.where(size > 0, size, 1)
        values = values / scale.unsqueeze(1)
        total = values @ axes.square().sum(0)
        radial = (values * (u @ axes).square()).sum(1)
        if common is not None:
            total = total + common.diagonal().sum() / scale
            radial = radial + ((u @ common) * u).sum(1) / scale
        return size, total, radial

    def detach(self) -> AxisCovariance:
        """The same without a graph."""
        common = None if self.common is None else self.common.detach()
        return replace(self, values=self.values.detach(), common=common)

    def with_values(self, values: Tensor) -> AxisCovariance:
        """Covariances with other variances along the same axes, shape (N, D)."""
        return replace(self, values=values)

    def rows(self, rows: Tensor) -> AxisCovariance:
        """Those of some of the outputs."""
        return self.with_values(self.values[rows])

    def to(self, device: torch.device, dtype: torch.dtype) -> AxisCovariance:
        """The same on another device; ``dtype`` is that of the covariances, the parts keep theirs."""
        common = None if self.common is None else self.common.to(device)
        return AxisCovariance(self.axes.to(device), self.values.to(device), common, dtype)

    @contextmanager
    def _as_made(self) -> Iterator[None]:
        """Without autocast, and with a graph where the parts have one."""
        graph = self.values.requires_grad or (self.common is not None and self.common.requires_grad)
        # What inference mode makes has no graph, whatever the parts have.
        inference = torch.is_inference_mode_enabled() and not graph
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(graph),
            torch.autocast(self.values.device.type, enabled=False),
        ):
            yield


def same_axes(one: AxisCovariance | None, other: AxisCovariance | None) -> bool:
    """Whether two covariances differ in their values alone."""
    if one is None or other is None or one.dtype != other.dtype or one.values.dtype != other.values.dtype:
        return False
    if (one.common is None) != (other.common is None):
        return False
    common = one.common is None or other.common is None or _equal(one.common, other.common)
    return _equal(one.axes, other.axes) and common


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.device == other.device and torch.equal(one, other))
