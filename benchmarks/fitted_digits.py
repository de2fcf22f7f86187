"""A posterior of a small encoder (64-64-8) that was trained on the digits 0 to 7; 8 and 9 are unknown to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

_KNOWN_DIGITS = 8
_TRAIN = 600


class FittedDigits(NamedTuple):
    """A calibrated posterior, the images (N, 64) with their digits (N,), and which rows of them are what."""

    la: Any
    images: Tensor
    digits: Tensor
    train: Tensor
    test: Tensor
    unknown: Tensor


def fit_digits(n_calibrate: int, epochs: int = 60) -> FittedDigits:
    """Train with the contrastive loss on 600 images of scikit-learn's digits, fit, and calibrate with others."""
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    known = (y < _KNOWN_DIGITS).nonzero().flatten()
    known = known[torch.randperm(len(known))]
    train, calibrate, test = known.tensor_split([_TRAIN, _TRAIN + n_calibrate])

    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=100, shuffle=True)
    contrastive_loss = cc.ContrastiveLoss(margin=0.7, normalization="type")
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            contrastive_loss(encoder(images), labels).backward()
            optimizer.step()

    la = Laplace(encoder, likelihood="contrastive")
    la.fit(loader)
    la.optimize_prior_precision()
    la.calibrate([x[calibrate]])
    return FittedDigits(la, x, y, train, test, (y >= _KNOWN_DIGITS).nonzero().flatten())
