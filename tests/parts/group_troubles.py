"""What goes wrong in one process of several, and what all of them are to say then."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from group_cases import BATCH, batches, data, made, parts, share
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler

from contrastive_curvature.fit.state import State
from contrastive_curvature.structures import Diagonal

LOOK, FIRST, SECOND = 0, 1, 2
"""The passes of a fit over its loader."""


class Faulty:
    """A loader that does something at the first batch of one of its passes."""

    def __init__(self, loader: Any, at: int, act: Callable[[Any], Any]) -> None:
        self.loader, self.at, self.act = loader, at, act
        self.passes = -1

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, batch in enumerate(self.loader):
            yield self.act(batch) if (self.passes, number) == (self.at, 0) else batch


def broken(batch: Any) -> Any:
    raise OSError("the disk has gone")


def not_numbers(batch: Any) -> Any:
    return torch.full_like(batch[0], torch.nan), batch[1]


def other_points(batch: Any) -> Any:
    return batch[0] + 1, batch[1]


def interrupted(batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    return batch


def killed(batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return batch


# The pass and what the last process finds in it: what it says itself.
FAULTS: dict[str, tuple[int, Callable[[Any], Any], str]] = {
    "broken at once": (LOOK, broken, "OSError: the disk has gone"),
    "broken in the second pass": (SECOND, broken, "OSError: the disk has gone"),
    "not numbers later": (SECOND, not_numbers, "InputError: model(x)"),
    "other points": (SECOND, other_points, "InputError: train_loader: expected the same data in every pass"),
    "interrupted": (SECOND, interrupted, "KeyboardInterrupt"),
}

OTHERS = "ProcessError: the fit failed in process {last} of {world}; its own error says why"


def attempt(act: Callable[[], Any]) -> str:
    try:
        act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ordinary(device: str, seed: int = 0, **options: Any) -> Any:
    return made(device, "last_layer", "diag", options, seed)


def refusals(rank: int, world: int, device: str) -> Iterator[tuple[str, str]]:
    """What is wrong with the arguments: all processes say so."""
    points = data("points", device)
    mine = share("points", rank, world, device)
    last = rank == world - 1

    def sampler(replicas: int = world, seed: int = 0, place: int = rank) -> Any:
        return DataLoader(points, BATCH, sampler=DistributedSampler(points, replicas, place, seed=seed))

    yield "encoders", attempt(lambda: ordinary(device, seed=int(last)).fit(mine))
    yield "options", attempt(lambda: ordinary(device, margin=0.5 if last else 0.6).fit(mine))
    yield "structures", attempt(lambda: made(device, "last_layer", "diag" if last else "kron", {}).fit(mine))
    yield "seeds", attempt(lambda: ordinary(device).fit(sampler(seed=rank)))
    yield "nothing", attempt(lambda: ordinary(device).fit([]))
    yield "only one flag", attempt(lambda: ordinary(device).fit(mine, override=3 if last else True))
    yield "cross terms", attempt(lambda: ordinary(device, pd_fix="full").fit(mine))
    if world > 2:
        chosen = parts("points", world, points)
        own = batches(points, chosen[max(0, rank - 1)])
        yield "two with the same", attempt(lambda: ordinary(device).fit(own))
    unequal = ordinary(device)
    unequal.fit(mine)
    unequal.loss = unequal.loss + rank
    yield "earlier fits", attempt(lambda: unequal.fit(mine, override=False))


def alone(rank: int, world: int, device: str) -> Iterator[tuple[str, str]]:
    """What one process does, without the others."""
    points = data("points", device)
    mine = share("points", rank, world, device)
    for structure in ("lowrank", "gp"):
        more = {"n_subset": 10} if structure == "gp" else {}
        weights = "all" if structure == "lowrank" else "last_layer"
        la = made(device, weights, structure, {"pd_fix": "psd"}, **more)
        yield f"{structure}, divided", attempt(lambda la=la: la.fit(mine))
        yield f"{structure}, whole", attempt(lambda la=la: la.fit(DataLoader(points, BATCH)))
    la.fit(DataLoader(points, BATCH))
    yield "classes, divided", attempt(lambda: la.measure_classes(mine))
    yield "classes, whole", attempt(lambda: la.measure_classes(DataLoader(points, BATCH)))
    yield "calibration, divided", attempt(lambda: la.calibrate(mine))
    yield "calibration, whole", attempt(lambda: la.calibrate(DataLoader(points, BATCH)))


def faults(la: Any, rank: int, world: int, device: str) -> Iterator[tuple[str, str]]:
    """What fails in the last process only."""
    mine, last = share("points", rank, world, device), rank == world - 1
    for name, (at, act, _) in FAULTS.items():
        loader = Faulty(mine, at, act) if last else mine
        yield name, attempt(lambda loader=loader: la.fit(loader))

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no more")

    for name, thing, attribute in (("taking", Diagonal, "clamped"), ("merging", State, "merge")):
        with mock.patch.object(thing, attribute, fails) if last else mock.MagicMock():
            yield name, attempt(lambda: la.fit(mine))

    # The first process has nothing to do, and is interrupted while it waits.
    waiting: list[Any] = [None] * world
    distributed.all_gather_object(waiting, os.getpid())

    def interrupt(batch: Any) -> Any:
        time.sleep(0.3)
        os.kill(waiting[0], signal.SIGINT)
        time.sleep(0.3)
        return batch

    loader = share("empty", rank, world, device)
    yield "interrupted while waiting", attempt(lambda: la.fit(Faulty(loader, SECOND, interrupt) if last else loader))
