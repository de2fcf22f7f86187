"""Convert a torch network to StochMan's layers with the same parameter objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from stochman import nnj
from torch import nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.network.threads import users_hooks

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_HOST = [kind for kind in vars(nnj).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
_SAME: dict[type, type] = {kind: kind for kind in _HOST if kind is not nnj.Sequential}
_SAME |= {getattr(nn, kind.__name__): kind for kind in _HOST if issubclass(kind, getattr(nn, kind.__name__, ()))}
_SAME |= dict.fromkeys((nn.Identity, *_DROPOUTS), nnj.Identity)
_PLAIN_FORWARD = (nn.Sequential.forward, nnj.Sequential.forward)
_INSTEAD = "Use backend=ContrastiveGGN (torch.func), which takes any module."


def to_nnj(module: nn.Module) -> nnj.Sequential:
    """Convert a torch network to a StochMan network.

    Args:
        module: One layer or an ``nn.Sequential`` of layers, nested to any depth: every layer that ``stochman.nnj`` has
            under torch's name, ``nn.Flatten()``, ``nn.Unflatten`` of vectors, ``nn.Dropout`` and ``nn.Identity``.
            :class:`~contrastive_curvature.L2Norm` is not converted, because StochMan has no rule for it.

    Returns:
        A network without nesting, in evaluation mode, that shares only parameters and buffers with the original: its
        in-place layers work out of place, and the original does not change.

    Raises:
        UnsupportedError: StochMan has no such layer; the message names it.
    """
    return nnj.Sequential(*(counterpart(layer, name) for name, layer in leaves(module))).eval()


def leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and layers that a module runs one after another; nested sequences are flattened."""
    if isinstance(module, nn.Sequential) and type(module).forward in _PLAIN_FORWARD:
        _check_hooks(module, name)
        for key, child in module._modules.items():
            if child is not None:
                yield from leaves(child, f"{name}.{key}" if name else key)
    else:
        yield name, module


def refuse(name: str, module: nn.Module, why: str) -> NoReturn:
    """Raise an error that names a layer, says why it is refused, and names another backend."""
    raise UnsupportedError(f"StochMan: the layer {name or 'model'!r} ({type(module).__name__}) {why}. {_INSTEAD}")


def counterpart(module: Any, name: str) -> nn.Module:
    """Return a layer of StochMan with the same parameters; see :func:`to_nnj`."""
    _check_hooks(module, name)
    kind = type(module)
    if kind is L2Norm:
        return L2Norm()
    if kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return nnj.Flatten()
    # With an axis of unknown length, StochMan's layer would accept images too, and return another result.
    if kind is nn.Unflatten and module.dim == 1 and all(isinstance(n, int) and n > 0 for n in module.unflattened_size):
        return nnj.Reshape(*module.unflattened_size)
    if kind not in _SAME:
        reshapes = isinstance(module, (nn.Flatten, nn.Unflatten))
        detail = " with these axes: StochMan flattens whole points, and gives vectors a shape without -1"
        refuse(name, module, f"has no counterpart there{detail if reshapes else ''}")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        refuse(name, module, "normalises by the statistics of the batch; set track_running_stats=True")
    if getattr(module, "return_indices", False):
        refuse(name, module, "returns indices too; set return_indices=False")
    return _share(module, _SAME[kind])


def _share(module: Any, kind: Any) -> nn.Module:
    """Return a layer of another class with the same settings, parameters and buffers, in its own dictionaries."""
    if kind is nnj.Identity:
        return nnj.Identity()
    shared: nn.Module = kind.__new__(kind)
    for key, value in vars(module).items():
        shared.__dict__[key] = value.copy() if isinstance(value, dict) else value
    # An in-place operation would overwrite inputs that are still needed.
    if hasattr(shared, "inplace"):
        shared.__dict__["inplace"] = False
    if kind is nnj.Conv2d and not isinstance(module.padding, str):
        # An attribute that StochMan's constructor sets in addition to torch's.
        pairs = zip(module.padding, module.kernel_size, strict=True)
        shared.__dict__["dw_padding"] = tuple(nnj.compute_reversed_padding(p, kernel_size=k) for p, k in pairs)
    shared.training = False
    return shared


def _check_hooks(module: nn.Module, name: str) -> None:
    if users_hooks(module):
        refuse(name, module, "has a forward hook, which may change what it computes; remove the hook")
    if "forward" in vars(module):
        refuse(name, module, "has a forward of its own")
