"""Runs the steps of a fit: in this process alone, or together with others that have other parts of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from contrastive_curvature.fit.dataset import DatasetCurvature
from contrastive_curvature.laplace.backends.shares import Head, all_the_same, check_shares
from contrastive_curvature.laplace.backends.steps import PointSteps, Steps
from contrastive_curvature.losses.sampled_data import needs_sample
from contrastive_curvature.parts.exchange import Alone, Exchange
from contrastive_curvature.parts.files import from_bytes, to_bytes
from contrastive_curvature.parts.state import State, merged

__all__ = ["run_steps"]

_log = logging.getLogger("contrastive_curvature")


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
    fits = steps.fits
    if isinstance(steps, PointSteps) and fits.samples(statistics.n) is None and needs_sample(fits.loss):
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


def _device(steps: Steps) -> Any:
    return next(steps.encoder.parameters()).device
