"""The layers: each is the host's (or torch's, where the host has none) with :class:`SandwichLayer` before it.

Only what has a cheaper rule than ``torch.func`` is written out: element-wise layers, linear ones and the weights of
convolutions. The rules that the host wrote for these are replaced: its derivative of Softplus ignores the threshold,
those of its convolutions leave out the bias and strides, its pooling keeps state from the last call.
"""

from __future__ import annotations

import torch
from stochman import nnj
from torch import Tensor, nn
from torch.nn import functional as F

from contrastive_curvature.hessian import sphere
from contrastive_curvature.hosts.stochman.layer import SandwichLayer
from contrastive_curvature.network import pullback as limits

__all__ = [
    "ELU", "GELU", "AdaptiveAvgPool2d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d", "Dropout",
    "Flatten", "Identity", "L2Norm", "LayerNorm", "LeakyReLU", "Linear", "MaxPool2d", "ReLU", "Reshape", "SiLU",
    "Sigmoid", "Softplus", "Tanh", "Unflatten",
]  # fmt: skip


class ElementwiseLayer(SandwichLayer):
    """A layer whose Jacobian is diagonal."""

    def _derivative(self, x: Tensor) -> Tensor:
        """Derivative of every output by its own input, of the shape of ``x``."""
        pull = torch.func.vjp(self.forward, x)[1]
        return pull(torch.ones_like(x))[0]

    def _push(self, x: Tensor, tangents: Tensor) -> Tensor:
        return self._derivative(x).unsqueeze(1) * tangents

    def _pull_input(self, x: Tensor, cotangents: Tensor) -> Tensor:
        return self._derivative(x).unsqueeze(1) * cotangents

    def _jacobian_wrt_input_sandwich(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool = False, diag_out: bool = False
    ) -> Tensor:
        slope = self._derivative(x).flatten(1)
        if diag_inp or diag_out:
            diagonal = slope**2 * (tmp if diag_inp else tmp.diagonal(dim1=1, dim2=2))
            return diagonal if diag_out else torch.diag_embed(diagonal)
        return slope.unsqueeze(2) * tmp * slope.unsqueeze(1)


class ReLU(ElementwiseLayer, nnj.ReLU):
    """``max(x, 0)``."""


class LeakyReLU(ElementwiseLayer, nnj.LeakyReLU):
    """``max(x, 0) + slope min(x, 0)``."""


class ELU(ElementwiseLayer, nnj.ELU):
    """Exponential linear unit."""


class GELU(ElementwiseLayer, nn.GELU):
    """Gaussian error linear unit."""


class SiLU(ElementwiseLayer, nn.SiLU):
    """``x sigmoid(x)``."""


class Softplus(ElementwiseLayer, nnj.Softplus):
    """``log(1 + exp(beta x)) / beta``, linear above the threshold."""


class Sigmoid(ElementwiseLayer, nnj.Sigmoid):
    """Logistic function."""


class Tanh(ElementwiseLayer, nnj.Tanh):
    """Hyperbolic tangent."""


class Identity(ElementwiseLayer, nnj.Identity):
    """The input as it is."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; a view, so that its derivative is a tensor of its own."""
        return x.view_as(x)


class Dropout(Identity):
    """Dropout in evaluation mode: the identity."""


class Linear(SandwichLayer, nnj.Linear):
    """``x W^T + b`` on the last axis."""

    weight: Tensor
    bias: Tensor | None

    def _push(self, x: Tensor, tangents: Tensor) -> Tensor:
        return tangents @ self.weight.T

    def _pull_input(self, x: Tensor, cotangents: Tensor) -> Tensor:
        return cotangents @ self.weight

    def _pull_weight(self, x: Tensor, cotangents: Tensor) -> Tensor:
        at = cotangents.flatten(2, -2) if x.ndim > 2 else cotangents.unsqueeze(2)
        inputs = x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)
        found = torch.einsum("bmto,bti->bmoi", at, inputs).flatten(2)
        return found if self.bias is None else torch.cat([found, at.sum(2)], dim=2)

    def _jacobian_wrt_input_sandwich(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool = False, diag_out: bool = False
    ) -> Tensor:
        if x.ndim > 2:
            return SandwichLayer._jacobian_wrt_input_sandwich(self, x, val, tmp, diag_inp, diag_out)
        w = self.weight
        curved = tmp.unsqueeze(2) * w if diag_inp else tmp @ w
        return (w * curved).sum(1) if diag_out else w.T @ curved

    def _jacobian_wrt_weight_sandwich(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool = False, diag_out: bool = False
    ) -> Tensor | None:
        if x.ndim > 2 or not diag_out:
            return SandwichLayer._jacobian_wrt_weight_sandwich(self, x, val, tmp, diag_inp, diag_out)
        diagonal = tmp if diag_inp else tmp.diagonal(dim1=1, dim2=2)
        out = (diagonal.unsqueeze(2) * x.unsqueeze(1) ** 2).flatten(1)
        return out if self.bias is None else torch.cat([out, diagonal], dim=1)

    def _weight_diagonal(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if x.ndim > 2:
            return SandwichLayer._weight_diagonal(self, x, left, right)
        diagonal = (left * right).sum(1)
        out = (diagonal.T @ x**2).flatten()
        return out if self.bias is None else torch.cat([out, diagonal.sum(0)])

    def _cross_diagonal(self, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        (x, left), (w, right) = rows, columns
        if x.ndim > 2:
            return SandwichLayer._cross_diagonal(self, rows, columns, y)
        weights, biases = [], []
        step = max(1, limits.JACOBIAN_ELEMENTS // max(1, len(x) * max(len(w), x.shape[1])))
        for start in range(0, left.shape[2], step):
            chosen = slice(start, start + step)
            # One matrix over the pairs for every output: the cotangents meet before the inputs do.
            pairs = y * torch.einsum("rmo,cmo->orc", left[..., chosen], right[..., chosen])
            weights.append((x * (pairs @ w)).sum(1))
            biases.append(pairs.sum((1, 2)))
        out = torch.cat(weights).flatten()
        return out if self.bias is None else torch.cat([out, *biases])


class _Convolution(SandwichLayer):
    """What both convolutions share: weights from unfolded inputs."""

    weight: Tensor
    bias: Tensor | None
    groups: int
    padding_mode: str

    def _pull_weight(self, x: Tensor, cotangents: Tensor) -> Tensor:
        if self.groups != 1 or self.padding_mode != "zeros":
            return SandwichLayer._pull_weight(self, x, cotangents)
        at = cotangents.flatten(3)
        found = torch.einsum("bmct,bkt->bmck", at, self.patches(x)).flatten(2)
        return found if self.bias is None else torch.cat([found, at.sum(3)], dim=2)

    def patches(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with at every position, shape (B, inputs, positions)."""
        # Padding is applied first, so that 'same' needs no case of its own.
        x = F.pad(x, self._reversed_padding_repeated_twice)  # type: ignore[arg-type]
        sizes = [getattr(self, name) for name in ("kernel_size", "dilation", "stride")]
        if x.ndim == 3:
            x, sizes = x.unsqueeze(2), [(1, *size) for size in sizes]
        kernel, dilation, stride = sizes
        return F.unfold(x, kernel, dilation, 0, stride)


class Conv1d(_Convolution, nnj.Conv1d):
    """Convolution over one axis."""


class Conv2d(_Convolution, nnj.Conv2d):
    """Convolution over two axes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        # The host's own constructor takes no padding given by name.
        nn.Conv2d.__init__(self, *args, **kwargs)  # type: ignore[arg-type]


class MaxPool2d(SandwichLayer, nn.MaxPool2d):
    """Largest of each window."""


class AvgPool2d(SandwichLayer, nn.AvgPool2d):
    """Mean of each window."""


class AdaptiveAvgPool2d(SandwichLayer, nn.AdaptiveAvgPool2d):
    """Mean of each of a given number of windows."""


class Flatten(SandwichLayer, nn.Flatten):
    """Several axes as one."""


class Unflatten(SandwichLayer, nn.Unflatten):
    """One axis as several."""


class Reshape(SandwichLayer, nnj.Reshape):
    """Another shape of every point."""


class _BatchNorm(ElementwiseLayer):
    """By running statistics in either mode: with those of a batch, a point would have no Jacobian of its own."""

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift every channel."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class BatchNorm1d(_BatchNorm, nnj.BatchNorm1d):
    """Batch normalisation of (B, C) or (B, C, L), with trainable scale and shift."""


class BatchNorm2d(_BatchNorm, nnj.BatchNorm2d):
    """Batch normalisation of (B, C, H, W), with trainable scale and shift."""


class LayerNorm(SandwichLayer, nn.LayerNorm):
    """Normalisation of every point by its own mean and variance."""


class L2Norm(SandwichLayer, sphere.L2Norm):
    """``z / |z|``, value and Jacobian of the same function (the authors' layer adds 1e-6 to the value's norm only)."""
