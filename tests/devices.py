"""The devices that tests run on."""

from __future__ import annotations

import os

import torch

__all__ = ["DEVICES"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

if os.environ.get("PRETEND_DEVICE"):
    import pretend_device

    DEVICES = [pretend_device.NAME]
    from contrastive_curvature.testing import contract

    contract.DEVICES[:] = DEVICES
