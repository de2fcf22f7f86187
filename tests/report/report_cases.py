"""A posterior of a small trained encoder, and data of known and unknown kinds to evaluate it on."""

import functools

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

KNOWN_CLASSES = 4


def inputs(n, seed, unknown=False):
    """Images of shape (1, 4, 4) around a centre for each class, and their classes."""
    random = torch.Generator().manual_seed(99)
    centres = 0.8 * torch.randn(2 * KNOWN_CLASSES, 1, 4, 4, generator=random)
    labels = torch.arange(n) % KNOWN_CLASSES + (KNOWN_CLASSES if unknown else 0)
    return centres[labels] + torch.randn(n, 1, 4, 4, generator=random.manual_seed(seed)), labels


def loader(x, labels=None, batch_size=64):
    return DataLoader(TensorDataset(x) if labels is None else TensorDataset(x, labels), batch_size=batch_size)


@functools.cache
def fitted(device="cpu", calibrated=300):
    """A posterior; with ``calibrated=0`` without a calibration."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    x, labels = inputs(200, seed=1)
    loss = cc.ContrastiveLoss()
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss(encoder(x), labels).backward()
        optimizer.step()
    la = Laplace(encoder.to(device), likelihood="contrastive")
    la.fit(loader(x, labels))
    la.optimize_prior_precision()
    if calibrated:
        la.calibrate(loader(inputs(calibrated, seed=2)[0]))
    return la
