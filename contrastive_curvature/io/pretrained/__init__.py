"""Saved posteriors: a folder with one safetensors file.

``la.save_pretrained(folder)`` writes it, :func:`load_pretrained` reads it back around the encoder, :func:`read_info`
describes its contents without an encoder. Nothing in such a folder is executed.
"""

from contrastive_curvature.io.pretrained.load import load_pretrained, read_info
from contrastive_curvature.io.pretrained.save import PosteriorInfo, PretrainedInfo
from contrastive_curvature.removed import refuse_removed

__all__ = [
    "PosteriorInfo",
    "PretrainedInfo",
    "load_pretrained",
    "read_info",
]

__getattr__ = refuse_removed(__name__)
