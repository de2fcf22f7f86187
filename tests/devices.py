"""The devices that tests run on."""

from __future__ import annotations

import torch

__all__ = ["DEVICES"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
