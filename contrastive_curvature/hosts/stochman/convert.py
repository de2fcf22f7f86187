"""From a torch network to a StochMan one with the same parameter objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from stochman import nnj
from torch import nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian import sphere
from contrastive_curvature.hosts.stochman import layers
from contrastive_curvature.hosts.stochman.composite import Residual, Sequential
from contrastive_curvature.hosts.stochman.layer import SandwichLayer
from contrastive_curvature.network.threads import users_hooks

__all__ = ["to_nnj"]

_NAMES = (
    "Linear", "Conv1d", "Conv2d", "ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Softplus", "Sigmoid", "Tanh",
    "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "Flatten", "Unflatten", "BatchNorm1d", "BatchNorm2d", "LayerNorm",
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_SAME: dict[type, type] = {getattr(nn, name): getattr(layers, name) for name in _NAMES}
_SAME |= {getattr(nnj, name): getattr(layers, name) for name in _NAMES if hasattr(nnj, name) and name != "Flatten"}
_SAME |= {nnj.Reshape: layers.Reshape, sphere.L2Norm: layers.L2Norm}

_INSTEAD = "Use backend=ContrastiveGGN (torch.func), which takes any module."


def to_nnj(module: nn.Module) -> Sequential:
    """Make a StochMan network of a torch (or StochMan) one.

    Args:
        module: ``nn.Sequential``, nested as deeply as wished, of the layers of this package's ``layers`` and
            :class:`Residual`; or one of these layers. A subclass of :class:`SandwichLayer` of one's own, without
            modules inside, is a layer too.

    Returns:
        A network without nesting, in evaluation mode, that shares parameters and buffers with the original and
        nothing else: in-place layers work out of place, and the original is left as it was.

    Raises:
        UnsupportedError: A layer has no counterpart; the message names it.
    """
    return Sequential(*(made for _, made in convert(module))).eval()


def convert(
    module: nn.Module, name: str = "", until: nn.Module | None = None, run: int = -1
) -> list[tuple[nn.Module, SandwichLayer]]:
    """The layers that a module runs one after another, each with its counterpart.

    Args:
        module: See :func:`to_nnj`.
        name: What to call it in a message.
        until: Where to stop: a run of this layer, and what follows it, is left out.
        run: Which of its runs; the last by default.

    Returns:
        The pairs.

    Raises:
        UnsupportedError: See :func:`to_nnj`; or ``until`` is not one of the layers.
    """
    leaves = list(_flatten(module, name))
    if until is not None:
        runs = [k for k, (_, leaf) in enumerate(leaves) if leaf is until]
        if not runs:
            _refuse(name, until, "normalises the outputs in the midst of another layer")
        leaves = leaves[: runs[run]]
    return [(leaf, _counterpart(leaf, at)) for at, leaf in leaves]


def _flatten(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Layers and their names, nested sequences taken apart."""
    if isinstance(module, nn.Sequential) and type(module).forward in _PLAIN_FORWARD:
        _check_hooks(module, name)
        for key, child in module._modules.items():
            if child is not None:
                yield from _flatten(child, _join(name, key))
    else:
        yield name, module


def _counterpart(module: Any, name: str) -> SandwichLayer:
    _check_hooks(module, name)
    kind = type(module)
    if kind is Residual:
        return Residual(Sequential(*(made for _, made in convert(module.inner, _join(name, "inner")))))
    if kind in (nn.Identity, nnj.Identity, layers.Identity):
        return layers.Identity()
    if kind in (*_DROPOUTS, layers.Dropout):
        return layers.Dropout()
    if kind is nnj.Flatten:
        return layers.Flatten()
    own = isinstance(module, SandwichLayer) and next(module.children(), None) is None
    if kind not in _SAME and not own:
        _refuse(name, module, "has no counterpart there")
    _check_layer(module, name)
    return _share(module, _SAME.get(kind, kind))


_PLAIN_FORWARD = (nn.Sequential.forward, nnj.Sequential.forward, Sequential.forward)


def _share(module: nn.Module, kind: Any) -> SandwichLayer:
    """The same settings, parameters and buffers under another class, in dictionaries of its own."""
    made: SandwichLayer = kind.__new__(kind)
    for key, value in vars(module).items():
        made.__dict__[key] = value.copy() if isinstance(value, dict) else value
    # In-place work would overwrite inputs that are still needed.
    if hasattr(made, "inplace"):
        made.__dict__["inplace"] = False
    made.training = False
    return made


def _check_hooks(module: nn.Module, name: str) -> None:
    if users_hooks(module):
        _refuse(name, module, "has a forward hook, which may change what it computes; remove the hook")
    if "forward" in vars(module):
        _refuse(name, module, "has a forward of its own")


def _check_layer(module: Any, name: str) -> None:
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        _refuse(name, module, "normalises by the statistics of the batch; set track_running_stats=True")
    if isinstance(module, (nn.Flatten, nn.Unflatten)):
        axis = module.start_dim if isinstance(module, nn.Flatten) else module.dim
        if not isinstance(axis, int) or axis == 0:
            _refuse(name, module, "reshapes the axis of the batch, or names it")
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        _refuse(name, module, "returns indices too; set return_indices=False")


def _refuse(name: str, module: nn.Module, why: str) -> NoReturn:
    msg = f"StochMan: the layer {name or 'model'!r} ({type(module).__name__}) {why}. {_INSTEAD}"
    raise UnsupportedError(msg)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
