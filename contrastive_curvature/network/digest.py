"""Whether an encoder has the weights that it had: all of this library's answers.

In one process, :func:`versions` of the same tensors tell, at no cost. A file holds a digest, which any change of a bit
changes; or, where a conversion or another device is to be no change, the few numbers of :func:`summary`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def encoder_digest(model: nn.Module) -> str:
    """Return a short text that any change of a parameter or buffer changes, see :func:`state_tensors`."""
    digest = hashlib.sha256()
    for _, tensor in state_tensors(model):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in tensor_bytes(tensor):
            digest.update(part)
    return digest.hexdigest()[:16]


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return how often torch saw each tensor change, and where it is in memory: enough for the same objects."""
    return [
        (
            0 if t.is_inference() else t._version,
            (t if t.layout is torch.strided else dense_parts(t)[-1]).data_ptr(),
        )
        for t in tensors
    ]


class ModuleTables:
    """The tables of a module tree, in which :meth:`present` finds its parts in a fraction of the time of a walk.

    Args:
        model: The module. What is added to it later under a new name is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        for module in model.modules():
            transient = getattr(module, "_non_persistent_buffers_set", ())
            for table in (module._modules, module._parameters):
                self._places += [(table, name) for name in table]
            self._places += [(module._buffers, name) for name in module._buffers if name not in transient]

    def present(self) -> list[Any]:
        """Return the submodules, parameters and buffers that are there now; ``None`` for what is gone."""
        return [table.get(name) for table, name in self._places]


def trunk_tensors(model: nn.Module, last_layer_name: str) -> list[Tensor]:
    """Return the parameters and buffers before the last layer; with a weight of it that another layer uses, too."""
    prefix = f"{last_layer_name}." if last_layer_name else ""
    named = list(model.named_parameters(remove_duplicate=False))
    own = {id(p) for name, p in named if name in (f"{prefix}weight", f"{prefix}bias")}
    shared = {id(p) for name, p in named if name not in (f"{prefix}weight", f"{prefix}bias")}
    return [t for _, t in state_tensors(model) if id(t) not in own - shared]


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the parameters, then of the buffers, each tensor once.

    Buffers that ``state_dict`` leaves out (``persistent=False``) are left out here, too: they are made from the rest,
    often late and of the size of the inputs, as the tables of rotary positions are.
    """
    yield from model.named_parameters()
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            transient = name in getattr(module, "_non_persistent_buffers_set", ())
            if tensor is None or transient or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, tensor


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor itself, or the dense tensors that a sparse one consists of."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the entries of a tensor as bytes, the same on every device."""
    for part in dense_parts(tensor):
        yield part.cpu().contiguous().flatten().view(torch.uint8).numpy().data


_PERIOD = 65521
"""After so many entries their weights repeat. A prime, so that no axis of a tensor has this period."""


def encoder_fingerprint(model: nn.Module) -> Tensor:
    """Return number, norm, sum and weighted sum of the entries of :func:`state_tensors`, see :func:`summary`."""
    return summary(tensor for _, tensor in state_tensors(model))


def trunk_fingerprint(model: nn.Module, last_layer_name: str) -> Tensor:
    """Return the same of all that the inputs of the last layer depend on."""
    return summary(trunk_tensors(model, last_layer_name))


def same_encoder(first: Tensor, second: Tensor) -> bool:
    """Return whether two fingerprints are of one encoder, up to the order of sums on another device."""
    if first.shape != second.shape or not torch.equal(first[:1], second[:1]):
        return False
    # Sums may cancel, so their rounding is that of the norm.
    size = float(first[1:].abs().max())
    return torch.allclose(first[1:], second[1:], rtol=0, atol=1e-11 * size)


def summary(tensors: Iterable[Tensor]) -> Tensor:
    """Return number, norm, sum and weighted sum of the entries of tensors, float64 on the CPU, shape (4,).

    The weights depend on the place in a tensor, so that exchanged entries show. Nothing depends on the order of the
    tensors, which wrappers around an encoder may list in another one, and on their precision.
    """
    number, sums = 0, [torch.zeros(3, dtype=torch.float64)]
    for values in (part for tensor in tensors for part in dense_parts(tensor)):
        flat = (torch.view_as_real(values) if values.is_complex() else values).flatten()
        number += flat.numel()
        weights = _weights().to(flat.device)
        # A part at a time, so that no second copy of the encoder is in memory.
        for part in flat.split(_PERIOD):
            wide = part.double()
            sums.append(torch.stack([wide @ wide, wide.sum(), wide @ weights[: len(wide)]]).cpu())
    squares, total, weighted = torch.stack(sums).sum(0)
    return torch.stack([torch.tensor(float(number), dtype=torch.float64), squares.sqrt(), total, weighted])


@functools.cache
def _weights() -> Tensor:
    """Return weights of the entries by their place: fractions of the multiples of the golden mean, shape (_PERIOD,)."""
    return torch.arange(1, _PERIOD + 1, dtype=torch.float64) * 0.6180339887498949 % 1


def weight_norms(model: nn.Module) -> Tensor:
    """Return the norms of all parameters, float64 on the CPU: enough to tell one trained encoder from another."""
    # Sorted, because wrappers around an encoder may list its modules in another order.
    return torch.stack([p.detach().norm().cpu().double() for p in model.parameters()]).sort().values
