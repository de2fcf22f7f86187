"""A small encoder of short texts: words, pairs of words and parts of words, each with a vector of its own, averaged."""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_BUCKETS = 20_000
_LENGTH = 160
"""Parts of a text that count; the queries of CLINC150 have fewer, but for a few of the longest."""
_EMBEDDED, _FEATURES = 128, 256
_LETTERS = (3, 4)
_DROPPED = 0.2


def parts_of(texts: Sequence[str]) -> Tensor:
    """Numbers of the parts of texts: its words, pairs of words that follow each other, and runs of 3 and 4 letters.

    Parts are numbered by a checksum, so that a new word has a number, too, which it may share with another part.

    Args:
        texts: N texts; case and punctuation do not count.

    Returns:
        int64, shape (N, 160), filled up with 0.
    """
    found = torch.zeros(len(texts), _LENGTH, dtype=torch.int64)
    for row, text in enumerate(texts):
        numbers = [1 + zlib.crc32(part.encode()) % _BUCKETS for part in _parts(text)][:_LENGTH]
        found[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return found


def _parts(text: str) -> list[str]:
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())
    ends = ["<", *words, ">"]
    runs = [
        f"run {marked[start : start + length]}"
        for marked in (f"<{word}>" for word in words)
        for length in _LETTERS
        for start in range(len(marked) - length + 1)
    ]
    return [*(f"word {word}" for word in words), *(f"pair {a} {b}" for a, b in pairwise(ends)), *runs]


def make_text_encoder(dim: int) -> nn.Sequential:
    """Make an encoder of texts.

    Args:
        dim: Latent dimension D.

    Returns:
        The encoder in training mode, int64 (N, L) from :func:`parts_of` -> float32 (N, D), not normalised. Its last
        part is the ``nn.Linear`` named ``"head"``; the 256 features before it are at least 0.
    """
    vectors = nn.EmbeddingBag(_BUCKETS + 1, _EMBEDDED, mode="mean", padding_idx=0)
    with torch.no_grad():
        vectors.weight.mul_(0.5)
    return nn.Sequential(
        OrderedDict(
            vectors=vectors,
            norm=nn.LayerNorm(_EMBEDDED),
            drop=nn.Dropout(_DROPPED),
            hidden=nn.Linear(_EMBEDDED, _FEATURES),
            relu=nn.ReLU(),
            head=nn.Linear(_FEATURES, dim),
        )
    )
