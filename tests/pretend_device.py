"""A device that computes on the CPU and refuses what a GPU would refuse: tensors of two devices in one operation.

It counts what would wait for a GPU, too. ``make test-device`` runs the tests that take a ``device`` on it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["CANNOT", "NAME", "WAITS", "Pretended"]

NAME = "pretend"

CANNOT = {
    "test_mapping_inputs_and_modules_that_cannot_be_vectorised": "torch has GRU cells of the CPU and of known devices",
    "test_an_encoder_in_half_precision_may_round_otherwise": "torch registers no autocast for it",
    "test_backpack": "an error in a backward pass, whose thread is the device's, ends the process",
    "test_a_taken_posterior_is_saved_and_stays": "torch.save writes the name of its class",
    "test_a_posterior_survives_a_file_and_goes_on": "torch.save writes the name of its class",
    "test_compiled": "torch.compile knows no such device",
}
"""Tests, and why they cannot run there."""

WAITS: list[str] = []
"""The operations since it was cleared that would have waited for a GPU."""

_aten = torch.ops.aten
_BETWEEN_DEVICES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_READS = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "bincount", "masked_select",
    "equal", "_linalg_eigh", "_linalg_svd", "_linalg_check_errors",
}  # fmt: skip
"""Operations that read numbers: for Python, for the shape of their result, or for errors of a decomposition."""


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

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Pretended) -> None:
        self.held = value.held

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        WAITS.append("tolist")
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        msg = f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() first."
        raise TypeError(msg)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return run(func, args, kwargs or {})


# Messages name the type, and opt_einsum looks at the module.
Pretended.__name__, Pretended.__module__, torch.Pretended = "Tensor", "torch", Pretended
# A module's conversion makes new parameters: ``.data = ...`` would leave the dtype as it was.
torch.__future__.set_overwrite_module_params_on_conversion(True)


def _as_tensors(index: Any) -> Any:
    """Lists of numbers among indices as tensors, which torch would make on the device, without asking it."""
    if isinstance(index, tuple):
        return tuple(_as_tensors(part) for part in index)
    return torch.as_tensor(index, dtype=None if index else torch.int64) if isinstance(index, list) else index


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, on what the tensors hold."""
    if func is _aten._efficientzerotensor.default:
        func = _aten.zeros.default  # the tensor around it would not say that it holds no numbers
    device = kwargs.get("device")
    given: list[Tensor] = []
    held_args, held_kwargs = (unwrap(args, given), {name: unwrap(value, given) for name, value in kwargs.items()})
    check(func, args, given)
    wrapped = any(isinstance(t, Pretended) for t in given) if device is None else is_elsewhere(device)
    if func is _aten.copy_.default:
        wrapped = isinstance(args[0], Pretended)
    if waits(func, args, kwargs, given, wrapped):
        WAITS.append(func.overloadpacket.__name__)
    out = func(*held_args, **held_kwargs)
    written = _written(func)
    if torch.Tag.inplace_view in func.tags and wrapped:
        return return_and_correct_aliasing(func, args, kwargs, wrap(out))
    if written is not None:
        return args[written] if isinstance(written, int) else kwargs[written]
    return wrap(out) if wrapped else out


@cache
def _written(func: Any) -> int | str | None:
    """The argument that an operation writes into and returns."""
    returns = func._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    (found,) = (i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    argument = func._schema.arguments[found]
    return argument.name if argument.kwarg_only else found


def waits(func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], wrapped: bool) -> bool:
    """Whether an operation waits until a GPU has done all its work."""
    there = [isinstance(t, Pretended) for t in given]
    if func in _BETWEEN_DEVICES:
        moved = there[-1] != wrapped
        return moved and not (wrapped and (args[2:] == (True,) or kwargs.get("non_blocking", False)))
    if func in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        return wrapped and any(index.dtype == torch.bool or not isinstance(index, Pretended) for index in indices)
    if func is _aten.repeat_interleave.Tensor:
        return wrapped and kwargs.get("output_size") is None
    return any(there) and func.overloadpacket.__name__ in _READS


def is_elsewhere(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def unwrap(value: Any, given: list[Tensor]) -> Any:
    """An argument as the CPU takes it; its tensors are added to those that were given."""
    if isinstance(value, Tensor):
        given.append(value)
        return value.held if isinstance(value, Pretended) else value
    if isinstance(value, (list, tuple)):
        return type(value)([unwrap(part, given) for part in value])
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def wrap(out: Any) -> Any:
    if isinstance(out, Tensor):
        return Pretended(out)
    return type(out)([wrap(part) for part in out]) if isinstance(out, (list, tuple)) else out


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

    def get_rng_state(self, _: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _: Any = None) -> None:
        torch.set_rng_state(state)


_setup_privateuseone_for_python_backend(NAME, _Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(_made, "PrivateUse1")


def _moved(function: Any, waits: bool) -> Any:
    """Torch makes these without asking the device, or resizes what the device gave it."""

    def call(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        out = function(*args, **kwargs)
        if device is not None:
            out = out.to(device, non_blocking=not waits)
        return out.requires_grad_() if requires_grad else out

    return call


for _name in ("tensor", "as_tensor", "arange", "linspace", "logspace", "eye", "randperm"):
    setattr(torch, _name, _moved(getattr(torch, _name), waits="tensor" in _name))
_Generator = torch.Generator


class _GeneratorThere(_Generator):
    device = torch.device(NAME, 0)


class _AnyGenerator(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)

    def __call__(cls, device: Any = "cpu") -> _Generator:
        return _GeneratorThere() if is_elsewhere(device) else _Generator(device)


torch.Generator = _AnyGenerator("Generator", (), {})
_new_tensor = Tensor.new_tensor


def _new_tensor_there(self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    if not isinstance(self, Pretended):
        return _new_tensor(self, data, dtype=dtype, device=device, **kwargs)
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)


Tensor.new_tensor = _new_tensor_there
