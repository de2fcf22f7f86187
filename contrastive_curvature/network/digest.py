"""Whether an encoder has the weights that it had: all of this library's answers.

In one process, :func:`versions` of the same tensors tell, at no cost. A file holds a digest, which any change of a bit
changes; or, where a conversion or another device is to be no change, the few numbers of :func:`summary`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from operator import is_not
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
    """Return the tensor itself, or indices and values of a sparse one."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return (tensor,)
    tensor = tensor.to_sparse_coo().coalesce()
    return tensor.indices(), tensor.values()


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the entries of a tensor as bytes, the same on every device."""
    for part in dense_parts(tensor):
        yield part.cpu().contiguous().flatten().view(torch.uint8).numpy().data


_PERIOD = 65521
"""After so many entries their weights repeat. A prime, so that no axis of a tensor has this period."""


class Watch:
    """The fingerprint of an encoder, computed again only where its weights may have changed.

    Torch counts the changes of a tensor, but neither those of fused optimizers nor of writes to ``.data``. Where an
    encoder is trained elsewhere (``shared``), the norms of all tensors tell these.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self._seen: tuple[list[Tensor], list[Any], Tensor] | None = None

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the fingerprint: the same object as long as the weights are the same."""
        tensors = _held(model)
        norms = [dense_parts(t)[-1].norm() for t in tensors if self.shared and t.is_floating_point()]
        counted = [versions(tensors), torch.stack([n.double().cpu() for n in norms]).tolist() if norms else None]
        last = self._seen
        if last is not None and last[1] == counted and not any(map(is_not, last[0], tensors)):
            return last[2]
        fingerprint = summary(tensor for _, tensor in state_tensors(model))
        if last is not None and same_encoder(last[2], fingerprint):
            fingerprint = last[2]
        # The tensors are held, so that no other object has their identity or memory.
        self._seen = tensors, counted, fingerprint
        return fingerprint


def _held(model: nn.Module) -> list[Tensor]:
    """Return the tensors of :func:`state_tensors`, some of them twice, in a fraction of its time."""
    held: list[Tensor | None] = []
    for module in model.modules():
        held += module._parameters.values()
        transient = getattr(module, "_non_persistent_buffers_set", ())
        held += [buffer for name, buffer in module._buffers.items() if name not in transient]
    return [tensor for tensor in held if tensor is not None]


def trunk_fingerprint(model: nn.Module, last_layer_name: str) -> Tensor:
    """Return the :func:`summary` of all that the inputs of the last layer depend on."""
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
