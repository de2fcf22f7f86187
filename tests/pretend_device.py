"""A device that computes on the CPU and refuses what a GPU would refuse: tensors of two devices in one operation.

On a machine without a GPU, ``PRETEND_DEVICE=1 PYTHONPATH=tests pytest -p devices ...`` runs tests on it, slowly. What
it cannot do: generators of its own, torch.compile, and whatever reads a tensor's memory without moving it first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["NAME", "Pretended"]

NAME = "pretend"

_aten = torch.ops.aten
_BETWEEN_DEVICES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}


class Pretended(Tensor):
    """A tensor that says it is elsewhere."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.held!r})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_as_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_as_tensors(index), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = Pretended(self.held.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made.detach(), requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        msg = f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() first."
        raise TypeError(msg)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return run(func, args, kwargs or {})


def _as_tensors(index: Any) -> Any:
    """Lists of numbers among indices as tensors, which torch would make on the device, without asking it."""
    if isinstance(index, tuple):
        return tuple(_as_tensors(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) and index else index


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, on what the tensors hold."""
    there = is_elsewhere(kwargs.get("device"))
    given: list[Tensor] = []
    tree_map_only(Tensor, given.append, (args, kwargs))
    check(func, args, given)
    wrapped = there or (any(isinstance(t, Pretended) for t in given) and kwargs.get("device") is None)
    if func is _aten.copy_.default:
        wrapped = isinstance(args[0], Pretended)
    plain_args, plain_kwargs = tree_map(unwrap, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if not wrapped:
        return args[0] if func is _aten.copy_.default else out
    out = tree_map_only(Tensor, Pretended, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if given else out


def is_elsewhere(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def unwrap(value: Any) -> Any:
    if isinstance(value, Pretended):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def check(func: Any, args: Any, given: list[Tensor]) -> None:
    """Refuse tensors of two devices, where a GPU refuses them.

    Raises:
        RuntimeError: They are of two devices.
    """
    here = [t for t in given if not isinstance(t, Pretended)]
    if len(here) in (0, len(given)) or func in _BETWEEN_DEVICES:
        return
    if func in _INDEXING and isinstance(args[0], Pretended):
        indices = [t for t in args[1] if t is not None]
        here = [t for t in here if not any(t is index for index in indices)]
    # A number in a tensor may come from the CPU.
    if any(t.ndim for t in here) or (func in _INDEXING and not isinstance(args[0], Pretended)):
        msg = f"Expected all tensors to be on the same device, but found at least two devices, {NAME} and cpu! ({func})"
        raise RuntimeError(msg)


def _made(func: Any, *args: Any, **kwargs: Any) -> Any:
    return run(func, args, kwargs)


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self, _: Any = None) -> None:
        """Nothing is under way."""


_setup_privateuseone_for_python_backend(NAME, _Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(_made, "PrivateUse1")


def _moved(function: Any) -> Any:
    """Torch makes these without asking the device, or resizes what the device gave it."""

    def call(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        out = function(*args, **kwargs)
        if device is not None:
            out = out.to(device)
        return out.requires_grad_() if requires_grad else out

    return call


for _name in ("tensor", "as_tensor", "arange", "linspace", "logspace", "eye", "randperm"):
    setattr(torch, _name, _moved(getattr(torch, _name)))
_new_tensor = Tensor.new_tensor


def _new_tensor_there(self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    if not isinstance(self, Pretended):
        return _new_tensor(self, data, dtype=dtype, device=device, **kwargs)
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)


Tensor.new_tensor = _new_tensor_there
