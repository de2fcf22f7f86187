"""The devices that tests run on."""

import torch

__all__ = ["DEVICES"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
