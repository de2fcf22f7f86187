"""Runs the steps of a fit: in this process alone, or together with others that have other parts of the data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.laplace.backends.shares import Head, all_the_same, check_shares
from contrastive_curvature.laplace.backends.steps import PointSteps, Steps
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.effort import FEWEST_POINTS, labelled_seconds
from contrastive_curvature.losses.sampled_data import needs_sample, sums_suffice
from contrastive_curvature.parts.exchange import Alone, Exchange
from contrastive_curvature.parts.files import from_bytes, to_bytes
from contrastive_curvature.parts.state import State, merged

__all__ = ["NEGATIVE_SAMPLES", "run_steps"]

_BRIEF = 10.0
"""Seconds that all pairs may take in any case."""

_log = logging.getLogger("contrastive_curvature")

NEGATIVE_SAMPLES = 2000
"""Points that stand for all negatives where counting all pairs takes longer than the passes over the data."""


def run_steps(steps: Steps, loader: Any, exchange: Exchange, identity: Mapping[str, str]) -> DatasetCurvature | None:
    """Both passes over this process's part of the data, and the curvature of all of it.

    Args:
        steps: Of the fit.
        loader: The part of this process.
        exchange: The processes.
        identity: See :class:`~contrastive_curvature.parts.state.State`.

    Returns:
        The curvature; ``None`` where a loss of anchors shall count all candidates, which are not these steps.

    Raises:
        InputError: Two processes have the same points, other options or another encoder; or what the steps raise.
        ProcessError: Another process has failed.
    """
    part = exchange.rank, exchange.count
    statistics = _gathered(exchange, loader, lambda: steps.first(loader, part, identity))
    if statistics is None:
        return _whole(steps, loader, identity)
    statistics = statistics.to(_device(steps))
    _choose_samples(steps, statistics, exchange)
    if isinstance(steps, PointSteps) and steps.samples is None and needs_sample(steps.fits.loss):
        return None
    curvature = _gathered(exchange, loader, lambda: steps.second(loader, part, statistics, identity))
    if curvature is None:
        return _whole(steps, loader, identity)
    return steps.finish(statistics, curvature.to(_device(steps)))


def _gathered(exchange: Exchange, loader: Any, make: Callable[[], State]) -> State | None:
    """The state of all processes; ``None`` where every one has all the data."""
    if exchange.count == 1:
        return make()
    state = make()
    heads = [Head.of_text(text) for text in exchange.gather(Head.of(state, loader, exchange.rank).text)]
    if all_the_same(heads):
        return None
    check_shares(heads)
    # One at a time, since the states of all together may be all embeddings of the data set, or many matrices.
    found: list[State] = []

    def take(content: bytes) -> None:
        found[:] = [merged([*found, from_bytes(content)])]

    exchange.each(to_bytes(state), take)
    return found[0]


def _whole(steps: Steps, loader: Any, identity: Mapping[str, str]) -> DatasetCurvature | None:
    """The fit of this process alone, which has all the data."""
    _log.warning(
        "every process has the same points, so each fits alone; a DistributedSampler gives each a share of the work"
    )
    return run_steps(steps, loader, Alone(), identity)


def _choose_samples(steps: Steps, statistics: State, exchange: Exchange) -> None:
    """Decide whether a sample stands for all negatives, where the user leaves it open; the same in all processes."""
    fits = steps.fits
    if not isinstance(steps, PointSteps) or steps.found is None:
        return
    if isinstance(fits.negative_samples, int) and sums_suffice(fits.loss):
        _log.info("negative_samples is of no effect: sums over classes say everything about the negatives")
    n = statistics.n
    if fits.negative_samples != "auto" or fits.relation is not None or n < FEWEST_POINTS or sums_suffice(fits.loss):
        return
    loss, like = fits.loss, steps.found.like
    exact = loss._labelled_seconds(n, like) if isinstance(loss, PairLoss) else labelled_seconds(n, like)
    # Every process has its share of the pairs.
    times = exact / exchange.count, 2 * steps.found.seconds
    every = [json.loads(text) for text in exchange.gather(lambda: json.dumps(times).encode())]
    pairs, passes = (max(column) for column in zip(*every, strict=True))
    if pairs <= max(passes, _BRIEF):
        return
    by_class = isinstance(loss, ContrastiveLoss) and loss.pd_fix.attracting_only
    if loss.coupled and not by_class:
        # Cross terms with a sample need its inputs, which the first pass has not kept.
        _log.info(
            "all pairs of %d points will take about %.0f s; backend_kwargs=dict(negative_samples=%d) is faster",
            n,
            pairs,
            NEGATIVE_SAMPLES,
        )
        return
    steps.chosen = min(NEGATIVE_SAMPLES, n)
    _log.warning(
        "all pairs of %d points would take about %.0f s, the two passes over the data take about %.0f s: %d points, "
        "drawn at random, stand for all negatives; backend_kwargs=dict(negative_samples=None) counts all pairs",
        n,
        pairs,
        passes,
        steps.samples,
    )


def _device(steps: Steps) -> Any:
    return next(steps.encoder.parameters()).device
