"""The losses whose curvature is compared, and the posterior that each of them gives."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.losses_worth.encoder import Encoder
from benchmarks.transfer.fitted import Fitted
from benchmarks.transfer.train import order_of_epoch
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.proxy import ProxyLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.supcon import SupConLoss
from contrastive_curvature.losses.triplet_hinge import TripletLoss

__all__ = [
    "CHOSEN_FIX",
    "FIXES",
    "LOSSES",
    "OWN",
    "PAIR",
    "SOFTMAX",
    "fit",
    "loss_of_fixes",
    "losses_for",
    "own_loss",
]

TEMPERATURE = 0.1
"""Of the softmax losses, as in benchmarks/transfer/train.py."""

TRIPLET_MARGIN = 0.2
"""Training there has the distance and not its square, and the semi-hard triplets: its hinge is another, close by."""

SCALE, FACE_SCALE, FACE_MARGIN = 16.0, 64.0, 0.5
MARGIN = 0.3

PAIR = "pair"
"""The library's default: the contrastive loss over all pairs of the data set."""

OWN = {
    "contrastive": PAIR,
    "supcon": "supcon",
    "triplet": "triplet",
    "ntxent": "infonce",
    "proxies": "proxies",
    "arcface": "arcface",
}
"""What an encoder was trained with -> that loss here."""

FIXES = ("psd_parts", "psd", "ggn_fixed", "ggn", "fixed", "full", "positive")
CHOSEN_FIX = "psd_parts"
"""The default of the losses of anchors: where fixes are not what is compared."""

LOSSES: dict[str, Callable[[Encoder, str], CosineLoss]] = {
    "supcon": lambda _, fix: SupConLoss(TEMPERATURE, pd_fix=fix),
    "infonce": lambda _, fix: InfoNCELoss(TEMPERATURE, pd_fix=fix),
    "proxies": lambda encoder, fix: ProxyLoss(encoder.proxies, _scale(encoder), pd_fix=fix),
    "triplet": lambda _, fix: TripletLoss(TRIPLET_MARGIN, pd_fix=fix),
    "arcface": lambda encoder, fix: _arcface(encoder, fix),
}
"""Losses besides :data:`PAIR`, by the encoder and the fix."""

SOFTMAX = ("supcon", "infonce", "proxies")
"""Losses that are convex in the cosines, so that all of :data:`FIXES` are defined."""

_BATCH = 1024


def _scale(encoder: Encoder) -> float:
    return FACE_SCALE if encoder.name == "faces" else SCALE


def _arcface(encoder: Encoder, fix: str) -> CosineLoss:
    margin = FACE_MARGIN if encoder.name == "faces" else MARGIN
    # With a margin it is not convex in the cosines, which fixes that keep the second derivatives as they are need.
    fix = fix if fix in ("fixed", "full", "positive") else "psd"
    return ProxyLoss(encoder.proxies, _scale(encoder), margin, "arcface", pd_fix=fix)


def own_loss(encoder: Encoder) -> str:
    """Name of the loss here that an encoder was trained with."""
    return OWN[encoder.loss]


def losses_for(encoder: Encoder) -> list[str]:
    """Losses that make sense for an encoder: without labels, those of two views; ArcFace's where it was trained so."""
    if encoder.views is not None:
        return [PAIR, "infonce"]
    return [PAIR, *(name for name in LOSSES if name != "arcface" or encoder.loss == "arcface")]


def loss_of_fixes(own: str) -> str | None:
    """The loss that all fixes are tried with: the own one, if it is a softmax, and for ArcFace that without a margin.

    Args:
        own: Of :func:`own_loss`.
    """
    return "proxies" if own == "arcface" else own if own in SOFTMAX else None


def fit(encoder: Encoder, fitted: Fitted, loss: str, structure: str, fix: str = CHOSEN_FIX) -> tuple[Any, float]:
    """A posterior of the last layer with the curvature of a loss, and the library's prior and temperature.

    Args:
        encoder: What it is fitted to.
        fitted: The same encoder's last layer.
        loss: :data:`PAIR`, or one of :data:`LOSSES`.
        structure: ``hessian_structure``.
        fix: ``pd_fix`` of a loss of :data:`LOSSES`.

    Returns:
        The posterior, and the seconds of processor time that its fit took.
    """
    made = None if loss == PAIR else LOSSES[loss](encoder, fix)
    options: dict[str, Any] = {} if made is None else {"loss": made}
    loader = _loader(encoder, made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        la: Any = Laplace(fitted.encoder, likelihood="contrastive", hessian_structure=structure, backend_kwargs=options)
        la.fit(loader, progress_bar=False)
        la.optimize_prior_precision()
        return la, time.process_time() - start


def _loader(encoder: Encoder, loss: CosineLoss | None) -> DataLoader[Any]:
    """The data as the loss takes it: batches as in training for a loss of anchors, all pairs for the pair loss."""
    generator = torch.Generator().manual_seed(0)
    if encoder.views is not None:
        first, second = encoder.views
        if isinstance(loss, RowLoss):
            views = TensorDataset(first, second)
            return DataLoader(views, encoder.batch, shuffle=True, drop_last=True, generator=generator)
        number = torch.arange(len(first)).repeat(2)
        return DataLoader(TensorDataset(torch.cat([first, second]), number), _BATCH)
    features, labels = torch.from_numpy(encoder.content.train_features), torch.from_numpy(encoder.content.train_labels)
    if not isinstance(loss, RowLoss):
        return DataLoader(TensorDataset(features, labels), _BATCH)
    rows = order_of_epoch(labels, encoder.together, generator)
    # A last, smaller batch would have fewer negatives; a set that is smaller than one batch is one.
    batches = [part.tolist() for part in rows.split(encoder.batch)]
    batches = batches[:-1] if len(batches) > 1 and len(batches[-1]) < encoder.batch else batches
    return DataLoader(TensorDataset(features, labels), batch_sampler=batches)
