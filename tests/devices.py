"""The devices that tests run on, and how tests start processes."""

import sys

import torch

__all__ = ["DEVICES", "START_METHOD"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

START_METHOD = "fork" if sys.platform == "linux" and DEVICES == ["cpu"] else "spawn"
"""A forked process has imported torch already, which takes longer than what most processes do; CUDA allows no fork."""
