"""A fit in two processes of one thread each against one such process, where the encoder takes most of the time.

python -m benchmarks.processes [--points 2000]

Prints seconds of ``la.fit`` alone, the shortest of three fits in turns, and the part of it that is the encoder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise

import torch
from laplace import Laplace
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature  # noqa: F401  teaches Laplace the likelihood "contrastive"
from benchmarks.machine import describe, machine_line


def encoder() -> nn.Module:
    """Return four convolutions and two linear layers, of some 90 million multiplications an image."""
    torch.manual_seed(0)
    widths, layers = [3, 32, 64, 128, 128], []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=1 if before == 3 else 2, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32)
    )


def fit(rank: int, count: int, points: int, store: str, times: object) -> None:
    """Fit this process's share three times, and put the seconds of the first process into the queue."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    model, draw = encoder(), torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(points, 3, 48, 48, generator=draw), torch.arange(points) % 50)
    sampler = DistributedSampler(data, count, rank, shuffle=False)
    loader = DataLoader(data, batch_size=100, sampler=sampler)
    for _ in range(3):
        distributed.barrier()
        start = time.perf_counter()
        Laplace(model, "contrastive", backend_kwargs={"negative_samples": 2000}).fit(loader, progress_bar=False)
        distributed.barrier()
        whole = time.perf_counter() - start
        start = time.perf_counter()
        with torch.no_grad():
            for x, _ in loader:
                model(x)
        if rank == 0:
            times.put((whole, time.perf_counter() - start))  # type: ignore[attr-defined]
    distributed.destroy_process_group()


def main() -> None:
    """Print a line for one and for two processes, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=2000)
    points = parser.parse_args().points
    print(machine_line(describe()))
    shortest = {}
    for count in (1, 2):
        times = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(fit, (count, points, f"{folder}/store", times), nprocs=count)
        runs = [times.get() for _ in range(3)]
        shortest[count], encoding = min(runs)
        print(f"{count} processes of one thread: {shortest[count]:.2f} s, of which {encoding:.2f} s are the encoder's")
    print(f"two processes are {shortest[1] / shortest[2]:.2f} times as fast")


if __name__ == "__main__":
    main()
