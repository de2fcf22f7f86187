"""StochMan's own rules for one layer, each compared with autograd before its first use.

For a few layers, StochMan implements ``J^T M J`` by hand, four times each (from and to a full matrix or a diagonal);
for elementwise layers it has the derivative. Some of these rules are wrong or incomplete in 0.3.0
(``docs/migration.md``), so a rule is used only if it agrees with autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Rule = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""``J^T M J`` from a layer, its input (B, *input), its output (B, *output) and ``M``: (B, O, O), or its diagonal."""

_PROBES = 32
"""Outputs of a layer that a rule for diagonals is compared on."""


class RefusedError(Exception):
    """StochMan has no rule for a layer that agrees with autograd; the message says why."""


class _InTypeOf(TorchFunctionMode):
    """Makes ``torch.zeros`` and similar functions create tensors of the network's dtype and device, in this thread.

    StochMan sets no dtype for its work buffers: without this mode, float64 networks with convolutions raise errors or
    lose half of their digits.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self._made = {"dtype": like.dtype, "device": like.device}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**self._made, **kwargs} if func in (torch.zeros, torch.ones, torch.eye) else kwargs))


def find_rule(of: str, layer: nn.Module, x: Tensor, *, diag_inp: bool, diag_out: bool) -> Rule:
    """Return StochMan's rule for ``J^T M J``, checked against autograd on the first point and on random points.

    Args:
        of: Variables of the Jacobian: ``"input"``, or ``"weight"`` for all parameters of the layer, in order.
        layer: A layer of StochMan, used only by the caller, because pooling layers keep the indices of their last run.
        x: Inputs (B, *input) of the layer.
        diag_inp: Whether ``M`` is passed as its diagonal.
        diag_out: Whether to return only the diagonal of the result.

    Raises:
        RefusedError: There is no rule, or no rule agrees with autograd.
    """
    name = f"_jacobian_wrt_{of}_sandwich"

    def sandwich(layer: Any, x: Tensor, val: Tensor, m: Tensor) -> Tensor:
        out: Tensor = getattr(layer, name)(x, val, m, diag_inp=diag_inp, diag_out=diag_out)
        return out

    def from_full(layer: Any, x: Tensor, val: Tensor, m: Tensor) -> Tensor:
        out: Tensor = getattr(layer, name)(x, val, torch.diag_embed(m) if diag_inp else m)
        return out.diagonal(dim1=1, dim2=2) if diag_out else out

    def slope(layer: Any, x: Tensor, val: Tensor, m: Tensor) -> Tensor:
        d = layer._jacobian_wrt_input_mult_left_vec(x, val, torch.ones_like(x)).flatten(1)
        if diag_inp or diag_out:
            m = d**2 * (m if diag_inp else m.diagonal(dim1=1, dim2=2))
            return m if diag_out else torch.diag_embed(m)
        return d.unsqueeze(2) * m * d.unsqueeze(1)

    reason = _wrong_for_some(layer)
    if reason is not None:
        raise RefusedError(reason)
    rules: list[Rule] = []
    if hasattr(layer, name):
        # StochMan lacks some of the four rules with one diagonal; a diagonal may be too long for a matrix.
        rules += [sandwich, from_full] if diag_inp != diag_out else [sandwich]
    if of == "input" and hasattr(layer, "_jacobian_wrt_input_mult_left_vec") and x.shape == layer(x).shape:
        rules.append(slope)
    # The user's points may be empty images, on which a wrong rule can agree.
    drawn = torch.randn(2, *x.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu").to(x)
    probes = torch.cat([x[:1], drawn])
    reasons = []
    for rule in rules:
        typed = _in_type(rule)
        reason = _compare(typed, layer, probes, of, diag_inp, diag_out)
        if reason is None:
            return typed
        reasons.append(reason)
    raise RefusedError([*reasons, f"StochMan has no sandwich of its {'parameters' if of == 'weight' else 'inputs'}"][0])


def _in_type(rule: Rule) -> Rule:
    def run(layer: Any, x: Tensor, val: Tensor, m: Tensor) -> Tensor:
        with _InTypeOf(val):
            return rule(layer, x, val, m)

    return run


def _wrong_for_some(layer: nn.Module) -> str | None:
    """Return a known error of a rule that occurs only for some inputs, so that a few points may not show it."""
    if isinstance(layer, nn.MaxPool2d):
        sizes = [nn.modules.utils._pair(size) for size in (layer.stride, layer.kernel_size, layer.dilation)]
        if any(stride <= dilation * (kernel - 1) for stride, kernel, dilation in zip(*sizes, strict=True)):
            return "StochMan's sandwich has an input that is the largest of two windows in one of them"
    if isinstance(layer, nn.Softplus) and layer.threshold < 20:
        return "StochMan's derivative does not know its threshold"
    if isinstance(layer, nn.Hardtanh) and (layer.min_val, layer.max_val) != (-1.0, 1.0):
        return "StochMan's derivative is that of the limits -1 and 1"
    if isinstance(layer, (nn.LeakyReLU, nn.PReLU)):
        return "StochMan's derivative at zero is not torch's"
    return None


def _compare(rule: Rule, layer: nn.Module, x: Tensor, of: str, diag_inp: bool, diag_out: bool) -> str | None:
    """Return the reason why a rule cannot be used, or ``None``."""
    val = layer(x)
    size = val[0].numel()
    generator = torch.Generator().manual_seed(0)
    if diag_inp:
        # The first and the last position are at the edges of an image.
        places = torch.linspace(0, size - 1, min(size, _PROBES), device="cpu").round().long()
        axes, factors = (
            torch.eye(size, device="cpu")[places].to(val),
            torch.rand(len(places), 1, generator=generator, device="cpu").to(val) + 0.5,
        )
        m = (factors * axes).sum(0).expand(len(x), size)
    else:
        axes, factors = torch.randn(1, size, generator=generator, device="cpu").to(val), val.new_ones(1, 1)
        m = (axes.T @ axes).expand(len(x), size, size)
    rows = torch.stack([_products(layer, point.unsqueeze(0), axes, of) for point in x])
    truth = (rows * factors * rows).sum(1) if diag_out else rows.mT @ (factors * rows)
    try:
        # Run the layer again, because pooling layers keep the indices of their last run.
        sandwich = rule(layer, x, layer(x), m)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"StochMan's rule raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not isinstance(sandwich, Tensor) or sandwich.shape != truth.shape:
        got = tuple(sandwich.shape) if isinstance(sandwich, Tensor) else sandwich
        return f"StochMan's rule gives {got} where there is {tuple(truth.shape)}"
    tolerance = 1e-8 if val.dtype == torch.float64 else 1e-2 if val.is_cuda else 1e-3
    if not truth.numel() or bool((sandwich - truth).abs().max() <= tolerance * truth.abs().max()):
        return None
    return f"StochMan's rule is off by {float((sandwich - truth).abs().max() / truth.abs().max()):.0%}"


def _products(layer: nn.Module, point: Tensor, axes: Tensor, of: str) -> Tensor:
    """Return ``J^T v`` of one point by autograd for vectors (K, O): (K, I), or (K, P)."""
    with torch.inference_mode(False), torch.enable_grad():
        point = point.detach().clone().requires_grad_()
        params = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
        out = torch.func.functional_call(layer, params, (point,))
        wanted = [point] if of == "input" else list(params.values())
        cotangents = axes.clone().reshape(len(axes), *out.shape)
        gradients = torch.autograd.grad(out, wanted, cotangents, is_grads_batched=True, allow_unused=True)
    zeros = [axes.new_zeros(len(axes), v.numel()) for v in wanted]
    return torch.cat([z if g is None else g.flatten(1) for g, z in zip(gradients, zeros, strict=True)], 1)
