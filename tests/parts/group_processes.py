"""Starts processes of one group, each of which goes through all cases, and collects what they found."""

import contextlib
import datetime
import logging
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from devices import START_METHOD
from group_cases import CASES, fitted, share, values
from group_troubles import SECOND, Faulty, alone, attempt, faults, killed, ordinary, refusals
from torch import distributed, multiprocessing

from contrastive_curvature.fit import dataset

_LIMIT = 900
"""Seconds after which processes that have not ended count as hanging, on the slowest machine."""


@contextlib.contextmanager
def group(backend: str, rank: int, world: int, file: Path, seconds: float) -> Iterator[None]:
    limit = datetime.timedelta(seconds=seconds)
    distributed.init_process_group(backend, f"file://{file}", rank=rank, world_size=world, timeout=limit)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def work(rank: int, worlds: tuple[int, ...], backend: str, device: str, folder: Path) -> None:
    """One process, in groups of several sizes, of each of which the last process is killed at the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    if device == "cuda":
        device = f"cuda:{rank if backend == 'nccl' else 0}"
        torch.cuda.set_device(device)
    for world in worlds:
        if rank < world:
            in_group(rank, world, backend, device, folder)


def in_group(rank: int, world: int, backend: str, device: str, folder: Path) -> None:
    said: dict[str, Any] = {}

    def save() -> None:
        torch.save(said, folder / f"{rank} of {world}.pt")

    with group(backend, rank, world, folder / f"first{world}", 300):
        said["fits"] = {
            name: values(fitted(device, name, share(given, rank, world, device)))
            for name, (_, _, _, given) in CASES.items()
        }
        said["refusals"] = dict(refusals(rank, world, device))
        said["alone"] = dict(alone(rank, world, device)) if not rank else {}
        # From here on there is a second pass, in which something may happen.
        dataset.FEATURES_KEPT = 0
        la = ordinary(device)
        la.fit(share("points", rank, world, device))
        said["before"] = values(la)
        said["faults"], said["left"] = {}, {}
        for name, text in faults(la, rank, world, device):
            said["faults"][name] = text
            said["left"][name] = values(la)
        # The processes are still in step.
        la.fit(share("shuffled", rank, world, device))
        said["after"] = values(la)
    over = folder / f"over{world}"
    with group(backend, rank, world, folder / f"second{world}", 2):
        said["absent"] = attempt(lambda: la.fit(share("points", rank, world, device))) if not rank else ""
        # The others are there, but do something else.
        while rank and not over.exists():
            time.sleep(0.05)
        over.touch()
    save()
    with group(backend, rank, world, folder / f"third{world}", 60):
        loader = share("points", rank, world, device)
        said["killed"] = attempt(lambda: la.fit(Faulty(loader, SECOND, killed) if rank == world - 1 else loader))
        said["left"]["killed"] = values(la)
        save()


def run(worlds: tuple[int, ...], backend: str, device: str) -> dict[int, list[dict[str, Any]]]:
    """What every process said in groups of several sizes.

    Args:
        worlds: Sizes of the groups, descending.
        backend: Of torch.distributed.
        device: Of the encoders.

    Raises:
        AssertionError: A process hangs, or did not end as it should.
    """
    context = multiprocessing.get_context(START_METHOD)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [(rank, worlds, backend, device, folder) for rank in range(worlds[0])]
        processes = [context.Process(target=work, args=given) for given in arguments]
        for process in processes:
            process.start()
        end = time.monotonic() + _LIMIT
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in hanging:
            processes[rank].kill()
            processes[rank].join()
        files = {world: [folder / f"{rank} of {world}.pt" for rank in range(world)] for world in worlds}
        found = {
            world: [torch.load(file, weights_only=True) if file.exists() else {} for file in files[world]]
            for world in worlds
        }
    assert not hanging, f"the processes {hanging} hang"
    codes = [process.exitcode for process in processes]
    ended = [-signal.SIGKILL if rank + 1 in worlds else 0 for rank in range(worlds[0])]
    # The watchdog of nccl may end a process that has lost another one.
    assert codes == ended or (backend == "nccl" and codes[-1] == ended[-1]), codes
    return found
