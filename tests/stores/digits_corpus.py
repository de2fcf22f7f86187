"""10,000 embeddings of real images with uncertainties, and queries from images that are not among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

# A machine without a network may lack them; `make test` installs both.
pytest.importorskip("faiss")
pytest.importorskip("lancedb")

__all__ = ["STORES", "Corpus", "digits", "make_store", "small"]

STORES = ("faiss", "lance")
_IMAGES = 1112
_SHIFTS = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Predictions and classes of the gallery (10,000) and of queries (300)."""

    gallery: cc.EmbeddingDistribution
    labels: Tensor
    queries: cc.EmbeddingDistribution
    query_labels: Tensor
    calibration: Tensor


@cache
def digits() -> Corpus:
    """Digits shifted by up to one pixel, embedded by a small network with the posterior of its last layer."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = (images.float() / 16).view(-1, 8, 8)
    train, classes = images[:_IMAGES].flatten(1), labels[:_IMAGES]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
        loss = cc.ContrastiveLoss(margin=0.7, normalization="type")
        for _ in range(60):
            rows = torch.randint(_IMAGES, (256,))
            optimizer.zero_grad()
            loss(encoder(train[rows]), classes[rows]).backward()
            optimizer.step()
        la: Any = Laplace(encoder, likelihood="contrastive")
        la.fit(DataLoader(TensorDataset(train, classes), batch_size=278))
        la.optimize_prior_precision()
        la.calibrate(DataLoader(TensorDataset(images[1500:].flatten(1), labels[1500:]), batch_size=297))
        shifted = torch.stack([torch.roll(images[:_IMAGES], shift, (1, 2)) for shift in _SHIFTS], 1)
        gallery = la(shifted.reshape(-1, 64)[:10_000])
        queries = la(images[1112:1412].flatten(1))
        known = la(images[1500:].flatten(1)).novelty
    return Corpus(gallery, classes.repeat_interleave(9)[:10_000], queries, labels[1112:1412], known)


def small(n: int = 40, dim: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, concentrations and uncertainties of no meaning."""
    g = torch.Generator().manual_seed(seed)
    vectors = torch.randn(n, dim, generator=g)
    return vectors, 100 * torch.rand(n, generator=g) + 1, torch.rand(n, generator=g)


def make_store(kind: str, folder: Path) -> cc.FaissStore | cc.LanceStore:
    """An empty store."""
    return cc.FaissStore() if kind == "faiss" else cc.LanceStore(folder / "corpus.lance")
