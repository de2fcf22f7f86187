"""Saved posteriors: one folder with a safetensors file and a model card.

``la.save_pretrained(folder)`` writes it, :func:`load_pretrained` reads it back around the encoder, :func:`read_info`
describes its contents without an encoder. Nothing in such a folder is executed.
"""

from contrastive_curvature.io.pretrained.hub import PushOptions
from contrastive_curvature.io.pretrained.load import load_pretrained, read_info
from contrastive_curvature.io.pretrained.save import PosteriorInfo, PretrainedInfo, SaveOptions
from contrastive_curvature.removed import refuse_removed

__all__ = [
    "PosteriorInfo",
    "PretrainedInfo",
    "PushOptions",
    "SaveOptions",
    "load_pretrained",
    "read_info",
]

__getattr__ = refuse_removed(__name__)
