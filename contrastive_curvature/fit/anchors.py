"""The curvature of a loss of anchors over a data set; each anchor is compared within its batch, as in training.

Batches need no data of other batches, so inputs may be augmented again, and one pass is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from contrastive_curvature.errors import InputError
from contrastive_curvature.fit import loop
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, Source, nothing
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.network.loader import check_not_empty

_log = logging.getLogger("contrastive_curvature")


def parts(f: Fit, pairs: Any, passes: Passes) -> Iterator[Part | Total]:
    """Yield the Hessian of every batch as its part of the data set."""
    del pairs
    loss = f.options.loss
    for batch, z, context in passes.again(f.progress, "[curvature]"):
        hessian = loss.data_hessian(z, loss.relate(z, batch.labels, batch.pairs))
        yield Part.of_batch(hessian, context, batch.classes)


def closed(f: Fit, pairs: Any, totals: list[Total]) -> list[DatasetCurvature]:
    """Return the sum over all batches."""
    (total,) = totals
    check_compared(total)
    if total.curvature is not None and not bool(total.curvature.traces().any()):
        hint = (
            "In a batch of one input nothing has to be told apart; triplets outside their margin, and comparisons "
            "that float32 takes for certain add nothing either. Use larger batches, or the pair loss. Weights that no "
            "gradient reaches (torch.no_grad() in forward) have no curvature at all."
        )
        wanted = "batches in which the loss changes with the embeddings"
        raise InputError("train_loader", wanted, "a curvature that is zero everywhere", hint)
    return loop.closed(f, pairs, totals)


ANCHORS = Source(nothing, nothing, parts, closed)


def check_compared(total: Total) -> None:
    """Report how many anchors had no candidates."""
    check_not_empty(total.n)
    anchors, skipped = (int(total.terms[name]) for name in ("anchors", "skipped"))
    if not anchors:
        hint = "An anchor needs a positive among the candidates of its batch: larger batches, or several of each class."
        wanted = "at least one anchor with positives and candidates as the loss compares them"
        raise InputError("train_loader", wanted, f"none of {skipped}", hint)
    if skipped:
        _log.info(
            "%d of %d anchors had no positive, or nothing to be compared with, and add nothing to the curvature",
            skipped,
            anchors + skipped,
        )
