"""Fits whose data come in parts, which are fitted one by one, and merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.fit.part_state import CURVATURE, STATISTICS, State
from contrastive_curvature.network.inputs import Inputs, asks_for_example, made_up_inputs
from contrastive_curvature.network.loader import check_loader, loader_parts
from contrastive_curvature.posterior.predict import moved_inputs
from contrastive_curvature.posterior.value import Posterior

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace


def run_pass(
    la: ContrastiveLaplace,
    loader: Iterable[Any],
    part: tuple[int, int],
    statistics: State | None,
    progress_bar: bool | None,
) -> State:
    """Run the first pass over a part of the data, or the second one if ``statistics`` of all parts are passed."""
    check_loader(loader, "loader", shares=True)
    _check_part(part, statistics)
    _check_sampler(loader, part)
    probes = la.first_inputs(loader)
    if not probes:
        la.renew_backend()
        return la.backend.fit_part(None, la.structure, part, statistics, progress_bar)
    la.prepare(probes[0])
    state = la.backend.fit_part(loader, la.structure, part, statistics, progress_bar)
    return replace(state, probe=(part[0], made_up_inputs(probes[0])))


def fit_parts(la: ContrastiveLaplace, statistics: State, curvature: State, example: Inputs | None) -> Posterior:
    """Return the posterior of both passes, see :meth:`.ContrastiveLaplace.fit_parts`."""
    check_kind("statistics", statistics, STATISTICS)
    check_kind("curvature", curvature, CURVATURE)
    if statistics.probe is None:
        raise InputError("statistics", "at least one point", "none in any part")
    probe = moved_inputs(la.model, statistics.probe[1] if example is None else example, la._device)
    with asks_for_example(example):
        la.prepare(probe)
    return la.after(la.backend.fit_of_parts(la.structure, statistics, curvature, probe))


def check_kind(argument: str, state: object, kind: str) -> None:
    """Refuse any object but a merged state of this kind over all parts."""
    if not isinstance(state, State):
        hint = "State.load(path) reads a file, State.merged(states) merges several."
        raise InputTypeError(argument, "a merged State", f"a {type(state).__name__}", hint)
    if state.kind != kind:
        raise InputError(argument, f"a state of kind {kind!r}", f"{state.kind!r}")
    state.check_complete()


def _check_part(part: Any, statistics: State | None) -> None:
    """Refuse ``part`` if it is not (index, number of parts), or disagrees with the statistics."""
    whole = isinstance(part, (tuple, list)) and len(part) == 2 and all(type(k) is int for k in part)
    if not whole or not 0 <= part[0] < part[1]:
        raise InputError("part", "an index from 0 and the number of all parts, as (0, 8)", part)
    if statistics is not None and statistics.count != part[1]:
        wanted = f"one of {statistics.count} parts, as in the statistics"
        raise InputError("part", wanted, f"one of {part[1]}")


def _check_sampler(loader: Any, part: tuple[int, int]) -> None:
    """Refuse a sampler that reads another part of the data than ``part``."""
    for sampler in loader_parts(loader):
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != part:
            got = f"rank {sampler.rank} of {sampler.num_replicas} in its DistributedSampler"
            raise InputError("loader", f"part {part[0]} of {part[1]}, as part= says", got)
