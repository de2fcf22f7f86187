"""Fits that several processes do together, what goes wrong in one of them, and the processes, which go through both."""

import contextlib
import datetime
import logging
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from devices import START_METHOD
from laplace import Laplace
from torch import Tensor, distributed, multiprocessing, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.fit import dataset
from contrastive_curvature.fit.state import State
from contrastive_curvature.structures import Diagonal

N, MANY, WIDTH, BATCH = 25, 2307, 5, 5
"""25 points are no multiple of two or three processes; of 2,307 a fit keeps some."""

FULL = {"pd_fix": "full", "margin": None}
SAMPLED = {"negative_samples": 7}

# Part of the weights, structure, options of the backend, and what the points are given as.
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "last layer, diag": ("last_layer", "diag", {}, "points"),
    "last layer, kron": ("last_layer", "kron", {}, "points"),
    "last layer, full": ("last_layer", "full", {}, "points"),
    "last layer, kron_lowrank": ("last_layer", "kron_lowrank", {}, "points"),
    "all, kron": ("all", "kron", {}, "points"),
    "all, full": ("all", "full", {}, "points"),
    "subnetwork, full": ("subnetwork", "full", {}, "points"),
    "shuffled": ("last_layer", "diag", {}, "shuffled"),
    "uneven": ("last_layer", "full", {}, "uneven"),
    "empty": ("last_layer", "kron", {}, "empty"),
    "many, sampled": ("last_layer", "kron", SAMPLED, "many"),
    "negatives": ("last_layer", "diag", SAMPLED, "points"),
    "negatives, full": ("all", "full", {**SAMPLED, "pd_fix": "full"}, "points"),
    "batches": ("last_layer", "diag", {"pairs": "batch"}, "points"),
    "batches, sum": ("last_layer", "full", {"pairs": "batch", "normalization": "sum"}, "points"),
    "infonce, kron": ("all", "kron", {"loss": cc.InfoNCELoss(0.5)}, "views"),
    "full": ("all", "full", FULL, "points"),
    "full, empty": ("last_layer", "full", FULL, "empty"),
    "whole": ("last_layer", "diag", {}, "whole"),
    "whole, infonce": ("last_layer", "diag", {"loss": cc.InfoNCELoss(0.5)}, "whole views in order"),
}


def numbers(n: int, seed: int, device: str) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def data(given: str, device: str) -> TensorDataset:
    n = MANY if given == "many" else N
    x, second = numbers(n, 0, device), numbers(n, 1, device)
    # The same numbers of every class in every share, as they often are in large data sets.
    return TensorDataset(x, second if "views" in given else (torch.arange(n) // 6 % 3).to(device))


def made(device: str, weights: str, structure: str, options: dict[str, Any], seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3)).double().to(device)
    if weights == "subnetwork":
        more["subnetwork_indices"] = torch.tensor([0, 3, 11, 26, 30], device=device)
    return Laplace(encoder, "contrastive", weights, structure, backend_kwargs=options, **more)


def fitted(device: str, case: str, loader: Any) -> Any:
    weights, structure, options, _ = CASES[case]
    la = made(device, weights, structure, options)
    la.fit(loader)
    return la


def parts(given: str, world: int, points: TensorDataset) -> list[list[int]]:
    """The points of every process."""
    every = list(range(len(points)))
    if given == "uneven":
        return [every[:4], every[4:]] + [[]] * (world - 2)
    if given == "empty":
        return [[], *(every[rank :: world - 1] for rank in range(world - 1))]
    return [every[rank::world] for rank in range(world)]


def batches(points: TensorDataset, chosen: list[int]) -> list[tuple[Tensor, ...]]:
    return [points[chosen[start : start + BATCH]] for start in range(0, len(chosen), BATCH)]


def size(given: str) -> int:
    return 200 if given == "many" else BATCH


def share(given: str, rank: int, world: int, device: str) -> Any:
    points = data(given, device)
    if given.startswith("whole"):
        return DataLoader(points, BATCH, shuffle="order" not in given)
    if given in ("uneven", "empty"):
        return batches(points, parts(given, world, points)[rank])
    return DataLoader(points, size(given), sampler=DistributedSampler(points, world, rank, shuffle=given == "shuffled"))


def together(case: str, world: int, device: str) -> Any:
    """All the data for one process, in the same batches where these matter."""
    _, _, options, given = CASES[case]
    points = data(given, device)
    if options.get("pairs") == "batch" or "infonce" in case:
        whole = given.startswith("whole")
        return [
            batch for chosen in (parts(given, world, points) if not whole else []) for batch in batches(points, chosen)
        ] or DataLoader(points, BATCH)
    return DataLoader(points, size(given))


def values(la: Any) -> dict[str, Tensor]:
    """What a posterior says, all of it."""
    device = str(la._device)
    out = {f"raw {k}": part.detach().clone() for k, part in enumerate(flat(la.H_raw))}
    found = {"loss": la.loss, "cost": la.cost, "n": la.n_data, "norm": la.typical_norm, "error": la.curvature_error}
    out |= {name: torch.tensor(-1.0 if x is None else float(x), dtype=torch.float64) for name, x in found.items()}
    centres = la.class_centres
    if centres is not None:
        out |= {"labels": centres.labels, "sums": centres.sums, "typical": torch.tensor(centres.typical)}
    la.calibrate([numbers(11, 2, device)])
    prediction = la(3 * numbers(6, 3, device))
    out |= {"p": prediction.p_value, "kappa": prediction.kappa, "uncertainty": prediction.uncertainty}
    return {name: part.detach().cpu() for name, part in out.items()}


def flat(raw: Any) -> Iterator[Tensor]:
    if isinstance(raw, Tensor):
        yield raw
        return
    for part in raw:
        yield from flat(part)


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
