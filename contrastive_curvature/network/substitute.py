"""What an encoder makes of other values in the place of a module's output: equal numbers alone may be a coincidence.

An adapter that starts at zero adds nothing to a layer's output, and a momentum copy of a layer puts out the same. Only
the layer whose output the embeddings are made of carries other values on to them, and nothing else has a gradient then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.call import entry_of
from contrastive_curvature.network.compiled import eager
from contrastive_curvature.network.threads import evaluation_mode, users_hooks, watched

__all__ = ["Key", "carries", "other_values", "substituted"]

Key = str | int | None
"""Name of an entry of a mapping that a module takes and returns; ``None`` where it takes and returns tensors."""


def carries(
    model: nn.Module,
    run: Callable[[], Tensor],
    place: tuple[nn.Module, int, Key],
    matches: Callable[[Tensor, Tensor], bool],
    *,
    direction_only: bool,
) -> bool:
    """Whether the result of a run comes from one output of a module, and from nothing beside it.

    Args:
        model: The encoder.
        run: Runs it on a few points.
        place: The module, which run of it, and the name of the tensor among its outputs.
        matches: Whether the values in the place of that output (N, D), and the result (N, D), belong together.
        direction_only: Whether parameters that change nothing but the norms of the result may lie beside it, such as a
            learned temperature.

    An encoder with hooks of the user's runs without a graph, so that only the values are compared.
    """
    put = list[Tensor]()

    def passes() -> Tensor | None:
        put.clear()
        with evaluation_mode(model), eager(model), substituted(*place, put):
            out = run()
        return out if put and matches(put[0], out.detach()) else None

    # A hook, such as those of a module that BackPACK extended, may keep what belongs to the user's own backward pass.
    hooked = any(users_hooks(m) or m._backward_hooks or m._backward_pre_hooks for m in model.modules())
    try:
        with torch.set_grad_enabled(not hooked), _attributes_kept(model):
            out = passes()
            found = out is not None and not _has_gradient(model, out, direction_only)
        del out
    except UnsupportedError:
        found = False
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # Some encoders run without a graph only, and have no gradients that could go astray.
        with torch.no_grad(), suppress(UnsupportedError):
            return passes() is not None
        return False
    # A module may keep what it computed last: other values, with a graph that cannot be copied.
    with torch.no_grad(), evaluation_mode(model), eager(model):
        run()
    return found


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Remove attributes that a run gives the modules, such as the tensors that BackPACK's extensions keep of it."""
    before = {module: set(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, names in before.items():
            for name in set(vars(module)) - names:
                with suppress(AttributeError):  # another thread was faster
                    delattr(module, name)


@contextmanager
def substituted(module: nn.Module, run: int, key: Key, put: list[Tensor]) -> Iterator[None]:
    """Put other values in the place of one output of a module, and append them to ``put``."""
    runs, generator = Counter[int](), torch.Generator().manual_seed(0)

    def replace(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        runs[0] += 1
        if runs[0] != run + 1:
            return None
        put.append(other_values(entry_of(out, key) if key is not None else out, generator))
        # A copy, because an in-place operation may change what goes on.
        values = put[0].clone()
        if key is None:
            return values
        if isinstance(out, MutableMapping):
            out[key] = values
            return None
        return {**out, key: values}

    with watched([module], after=replace):
        yield


def other_values(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of the shape, type and root mean square of a tensor, without a graph."""
    size = like.detach().float().square().mean().sqrt()
    size = torch.where(size.isfinite() & (size > 0), size, torch.ones_like(size))
    return (torch.randn(like.shape, generator=generator).to(like.device) * size).to(like.dtype)


def _has_gradient(model: nn.Module, out: Tensor, direction_only: bool) -> bool:
    """Whether parameters change the result though what it should be made of is a constant."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not out.requires_grad or not parameters:
        return False
    v = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    if direction_only:
        values = out.detach().float()
        unit = nn.functional.normalize(values, dim=1)
        v = nn.functional.normalize(v - (v * unit).sum(1, keepdim=True) * unit, dim=1)
        v = v / values.norm(dim=1, keepdim=True).clamp(min=1e-12)
    found = torch.autograd.grad(out, parameters, v.to(out.dtype), allow_unused=True)
    # The gradient of a temperature is zero but for the rounding of v; that of a weight of a layer has no such excuse.
    rounding = 32 * torch.finfo(out.dtype).eps if direction_only else 0.0
    return any(
        float(g.coalesce().values().norm() if g.is_sparse else g.norm()) > (rounding if g.numel() == 1 else 0.0)
        for g in found
        if g is not None
    )
