"""A short text that tells encoders apart, the same on every machine."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

__all__ = ["encoder_digest"]


def encoder_digest(model: nn.Module) -> str:
    """A short text that any change of a parameter or buffer changes."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        part = tensor.detach().cpu().contiguous()
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
