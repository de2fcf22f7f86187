"""The devices that tests run on, and how tests start processes."""

import os
import sys

import torch

__all__ = ["DEVICES", "PRETENDED", "START_METHOD"]

PRETENDED = "PRETEND_DEVICE" in os.environ

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

if PRETENDED:
    import pretend_device

    from contrastive_curvature.testing import contract

    DEVICES = [pretend_device.NAME]
    contract.DEVICES[:] = DEVICES

START_METHOD = "fork" if sys.platform == "linux" and DEVICES == ["cpu"] else "spawn"
"""A forked process has imported torch already, which takes longer than what most processes do; CUDA allows no fork."""
