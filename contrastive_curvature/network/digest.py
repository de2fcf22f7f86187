"""A short text that tells encoders apart, the same on every machine; and what of an encoder is its state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["dense_parts", "encoder_digest", "is_transient", "state_tensors", "tensor_bytes"]


def encoder_digest(model: nn.Module) -> str:
    """A short text that any change of a parameter or buffer changes, see :func:`state_tensors`."""
    digest = hashlib.sha256()
    for _, tensor in state_tensors(model):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in tensor_bytes(tensor):
            digest.update(part)
    return digest.hexdigest()[:16]


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the parameters, then of the buffers, each tensor once.

    Buffers that ``state_dict`` leaves out (``persistent=False``) are left out here, too: they are made from the rest,
    often late and of the size of the inputs, as the tables of rotary positions are.
    """
    yield from model.named_parameters()
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is None or is_transient(module, name) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, tensor


def is_transient(module: nn.Module, name: str) -> bool:
    """Whether ``state_dict`` leaves this buffer of a module out."""
    return name in getattr(module, "_non_persistent_buffers_set", ())


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor itself, or the dense tensors that a sparse one consists of."""
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
    """The entries of a tensor as bytes, the same on every device."""
    for part in dense_parts(tensor):
        yield part.cpu().contiguous().flatten().view(torch.uint8).numpy().data
