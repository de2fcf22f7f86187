"""Checks whether the weights of an encoder have changed.

Within one process, :func:`versions` of the same tensors show it at no cost. A file stores a digest, which changes with
any bit; or, if a conversion or another device should not count as a change, the few numbers of :func:`summary`.
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
    """Return a short text that changes with any parameter or buffer, see :func:`state_tensors`."""
    digest = hashlib.sha256()
    for _, tensor in state_tensors(model):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in tensor_bytes(tensor):
            digest.update(part)
    return digest.hexdigest()[:16]


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return torch's count of changes and the memory address of each tensor: enough to compare the same objects."""
    return [
        (
            0 if t.is_inference() else t._version,
            (t if t.layout is torch.strided else dense_parts(t)[-1]).data_ptr(),
        )
        for t in tensors
    ]


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the parameters, then of the buffers, each tensor once.

    Buffers that ``state_dict`` omits (``persistent=False``) are omitted here too: they are computed from the other
    tensors, often late and with a size that depends on the inputs, such as tables of rotary positions.
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
    """Return a dense tensor itself, or the indices and values of a sparse tensor."""
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
    """The fingerprint of an encoder, computed again only if its weights may have changed.

    Torch counts the changes of a tensor, but not changes by fused optimizers or by writes to ``.data``. If an encoder
    is trained elsewhere (``shared``), the norms of all tensors show these changes.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self._seen: tuple[list[Tensor], list[Any], Tensor] | None = None

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the fingerprint: the same object while the weights are the same."""
        tensors = _held(model)
        norms = [dense_parts(t)[-1].norm() for t in tensors if self.shared and t.is_floating_point()]
        counted = [versions(tensors), torch.stack([n.double().cpu() for n in norms]).tolist() if norms else None]
        last = self._seen
        if last is not None and last[1] == counted and not any(map(is_not, last[0], tensors)):
            return last[2]
        fingerprint = summary(tensor for _, tensor in state_tensors(model))
        if last is not None and same_encoder(last[2], fingerprint):
            fingerprint = last[2]
        # The tensors are kept alive, so that no other object reuses their identity or memory.
        self._seen = tensors, counted, fingerprint
        return fingerprint


def _held(model: nn.Module) -> list[Tensor]:
    """Return the tensors of :func:`state_tensors` in a fraction of its time; a tensor may appear twice."""
    held: list[Tensor | None] = []
    for module in model.modules():
        held += module._parameters.values()
        transient = getattr(module, "_non_persistent_buffers_set", ())
        held += [buffer for name, buffer in module._buffers.items() if name not in transient]
    return [tensor for tensor in held if tensor is not None]


def same_encoder(first: Tensor, second: Tensor) -> bool:
    """Return whether two fingerprints belong to one encoder, up to the order of sums on another device."""
    if first is second:
        return True
    if first.shape != second.shape or not torch.equal(first[:1], second[:1]):
        return False
    # Sums may cancel, so their rounding error is measured against the norm.
    size = float(first[1:].abs().max())
    return torch.allclose(first[1:], second[1:], rtol=0, atol=1e-11 * size)


def summary(tensors: Iterable[Tensor]) -> Tensor:
    """Return number, norm, sum and weighted sum of the entries of tensors, float64 on the CPU, shape (4,).

    The weights depend on the place in a tensor, so exchanged entries change the result. The result does not depend on
    the precision of the tensors or on their order, which wrappers around an encoder may change.
    """
    number, sums = 0, [torch.zeros(3, dtype=torch.float64, device="cpu")]
    for values in (part for tensor in tensors for part in dense_parts(tensor)):
        flat = (torch.view_as_real(values) if values.is_complex() else values).flatten()
        number += flat.numel()
        weights = _weights().to(flat.device)
        # One part at a time, so that memory holds no second copy of the encoder.
        for part in flat.split(_PERIOD):
            wide = part.double()
            sums.append(torch.stack([wide @ wide, wide.sum(), wide @ weights[: len(wide)]]).cpu())
    squares, total, weighted = torch.stack(sums).sum(0)
    return torch.stack(
        [torch.tensor(float(number), dtype=torch.float64, device="cpu"), squares.sqrt(), total, weighted]
    )


@functools.cache
def _weights() -> Tensor:
    """Return the weights of the entries by place: fractional parts of multiples of the golden mean, (_PERIOD,)."""
    return torch.arange(1, _PERIOD + 1, dtype=torch.float64, device="cpu") * 0.6180339887498949 % 1


def weight_norms(model: nn.Module) -> Tensor:
    """Return the norms of all parameters, float64 on the CPU: enough to distinguish trained encoders."""
    # Sorted, because wrappers around an encoder may change the order of its modules.
    return torch.stack([p.detach().norm().cpu().double() for p in model.parameters()]).sort().values
