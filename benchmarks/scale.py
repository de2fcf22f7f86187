"""A fit of the last layer against the number N of points: seconds, memory beyond the file mapping, and their growth.

From features in a file (512 numbers of float16 a point, as ``docs/large_data.md#features-once`` writes them), with
embeddings of 128 dimensions: the contrastive loss with a margin of 0.7, all pairs and ``negative_samples=2000``, with
the relative error of the sample where all pairs are counted. Then a fit in 100 parts, as on 100 machines, with few and
with many classes: seconds of a part and of all merges, and the size of what the parts hand on.

Every case runs in a process of its own. The points lie around the centres of 1,000 classes in a space of 8 dimensions,
so that many negatives are inside the margin.

    python -m benchmarks.scale [--points N ...] [--structures diag kron_lowrank] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks import machine

FEATURES, DIMENSIONS, CLASSES = 512, 128, 1000
MARGIN = 0.7
SAMPLES = 2000
POINTS = (10_000, 31_600, 100_000, 316_000, 1_000_000)
MOST_EXACT = 100_000
PARTS, POINTS_IN_PARTS, MANY_CLASSES = 100, 316_000, 100_000
_BATCH = 8192
_LATENT = 8


class Wide(nn.Module):
    """Takes half precision to float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def encoder() -> nn.Module:
    """A last layer whose features are its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(Wide(), nn.Linear(FEATURES, DIMENSIONS), cc.L2Norm())


def write(n: int, place: Path, classes: int) -> Path:
    """Write features of n points around class centres, always the same, and their labels."""
    path = place / f"features-{n}-{classes}.npy"
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, _LATENT, generator=generator)
    mixed = torch.randn(_LATENT, FEATURES, generator=generator)
    file = np.lib.format.open_memmap(path, "w+", np.float16, (n, FEATURES))
    labels = torch.empty(n, dtype=torch.int64)
    for start in range(0, n, _BATCH):
        some = labels[start : start + _BATCH]
        some[:] = torch.randint(0, classes, (len(some),), generator=generator)
        latent = centres[some] + 0.3 * torch.randn(len(some), _LATENT, generator=generator)
        file[start : start + _BATCH] = torch.tanh(latent @ mixed / 3)
    file.flush()
    np.save(path.with_suffix(".labels.npy"), labels)
    return path


def read(path: str, index: int = 0, count: int = 1) -> list[tuple[Tensor, Tensor]]:
    """One of ``count`` parts of the points of :func:`write`, as batches; features are read when they are used."""
    arrays = np.load(path, mmap_mode="c"), np.load(Path(path).with_suffix(".labels.npy"))
    n = len(arrays[1])
    rows = slice(n * index // count, n * (index + 1) // count)
    return list(zip(*(torch.from_numpy(array[rows]).split(_BATCH) for array in arrays), strict=True))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One fit in this process, whole or in parts one after the other."""
    torch.set_num_threads(case["threads"])
    return fit_in_parts(case) if "parts" in case else fit(case)


def fit(case: dict[str, Any]) -> dict[str, Any]:
    """A fit of all points: seconds, MiB beyond the mapping, and the reported error."""
    device = torch.device(case["device"])
    la = Laplace(
        encoder().to(device),
        "contrastive",
        subset_of_weights="last_layer",
        hessian_structure=case["structure"],
        backend_kwargs={"margin": MARGIN, "negative_samples": case["samples"]},
    )
    loader = read(case["path"])
    warnings.simplefilter("ignore")

    def run_fit() -> float:
        start = time.perf_counter()
        machine.finished(lambda: la.fit(loader, progress_bar=False), device)()
        return time.perf_counter() - start

    seconds, mib = machine.watch_memory(run_fit, "RssAnon")
    out: dict[str, Any] = {"seconds": seconds, "mib": mib}
    if device.type == "cuda":
        out["gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
    if case["save"] is not None:
        curvature = la.H_raw if isinstance(la.H_raw, Tensor) else la.H_raw[0][0]
        np.save(case["save"], curvature.double().cpu().numpy())
    return out


def fit_in_parts(case: dict[str, Any]) -> dict[str, Any]:
    """A fit in parts: seconds of a part in both passes, of all merges, and MiB of what is handed on."""
    count = case["parts"]
    pairs = {"margin": MARGIN, "negative_samples": SAMPLES}
    la: Any = Laplace(encoder().to(case["device"]), "contrastive", backend_kwargs=pairs)
    out: dict[str, Any] = {}
    statistics = None
    with tempfile.TemporaryDirectory() as place:
        states = cc.jobs.StateFolder(place, count, case["path"])
        for step in ("statistics", "curvature"):
            start = time.perf_counter()
            for index in range(count):
                part = read(case["path"], index, count), (index, count)
                states.save(la.part_curvature(*part, statistics) if statistics else la.part_statistics(*part))
            between = time.perf_counter()
            merged = states.merged(step)
            after = time.perf_counter()
            merged.save(Path(place, "merged"))
            sizes = [path.stat().st_size / 2**20 for path in Path(place).rglob(f"*{step}*") if path.is_file()]
            out[step] = {
                "part": (between - start) / count,
                "merges": after - between,
                "part_mib": sum(sizes) / len(sizes),
                "merged_mib": Path(place, "merged").stat().st_size / 2**20,
            }
            statistics = statistics or merged
    la.fit_parts(statistics, merged)
    return out


def run_parts(place: Path, device: str, most: int) -> list[machine.Case]:
    """The fits in parts, with few and with many classes."""
    rows = []
    n = min(POINTS_IN_PARTS, most)
    for classes in (CLASSES, min(MANY_CLASSES, n // 3)):
        path = str(write(n, place, classes))
        case = {"path": path, "parts": PARTS, "device": device, "threads": 2}
        rows.append({"n": n, "classes": classes, "parts": PARTS, **machine.run_apart("benchmarks.scale", case)})
        print(rows[-1], flush=True)
    return rows


def run(points: list[int], structures: list[str], place: Path, device: str) -> list[machine.Case]:
    """All cases: sampled for all numbers of points, exact up to :data:`MOST_EXACT`."""
    rows: list[machine.Case] = []

    def add(n: int, **case: Any) -> None:
        case = {"n": n, "device": device, "threads": 2, **case}
        found = machine.run_apart("benchmarks.scale", case)
        rows.append({**{name: case[name] for name in ("n", "structure", "samples")}, **found})
        print(rows[-1], flush=True)

    for n in points:
        path = str(write(n, place, CLASSES))
        for structure in structures:
            saved = {}
            for samples in (SAMPLES, None) if n <= MOST_EXACT else (SAMPLES,):
                saved[samples] = str(place / f"{structure}-{samples}.npy")
                add(n, path=path, structure=structure, samples=samples, save=saved[samples])
            if None in saved:
                sampled, exact = np.load(saved[SAMPLES]), np.load(saved[None])
                rows[-2]["error"] = float(np.linalg.norm(sampled - exact) / np.linalg.norm(exact))
    return rows


def render(results: machine.Case) -> str:
    """A table, and the powers of N that the seconds grow with."""
    rows, shown = results["rows"], []
    for row in rows:
        negatives = "all" if row["samples"] is None else f"{row['samples']:,}"
        error = f"{row['error']:.1e}" if "error" in row else ""
        cells = [f"`{row['structure']}`", f"{row['n']:,}", negatives, f"{row['seconds']:.2f}", f"{row['mib']:.0f}"]
        shown.append([*cells, error])
    head = ["fit", "points", "negatives", "seconds", "MiB beyond the mapping", "error"]
    grows = []
    parts = [
        "# A fit of the last layer against the number of points",
        f"`python -m benchmarks.scale`, {machine.machine_line(results['machine'])}. {FEATURES} features (float16 on "
        f"disk), {DIMENSIONS} dimensions, {CLASSES} classes, margin {MARGIN}.",
        machine.table(head, shown),
    ]
    for fitted, samples in dict.fromkeys((row["structure"], row["samples"]) for row in rows):
        mine = [row for row in rows if (row["structure"], row["samples"]) == (fitted, samples)]
        first, last = mine[0], mine[-1]
        if first["n"] < last["n"]:
            power = math.log(last["seconds"] / first["seconds"]) / math.log(last["n"] / first["n"])
            kind = "all pairs" if samples is None else f"{samples:,} negatives"
            sizes = f"from {first['n']:,} to {last['n']:,} points"
            grows.append(f"- `{fitted}`, {kind}: seconds grow with N to the power {power:.2f} {sizes}.")
    shown = [
        [f"{row['n']:,}", f"{row['classes']:,}", step, *(f"{value:.2f}" for value in row[step].values())]
        for row in results["parts"]
        for step in ("statistics", "curvature")
    ]
    head = ["points", "classes", "pass", "seconds a part", "seconds of all merges", "MiB a part", "MiB merged"]
    title = f"In {PARTS} parts, one after the other, `kron_lowrank`, {SAMPLES:,} negatives:"
    return "\n\n".join([*parts, "\n".join(grows), title, machine.table(head, shown)]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = machine.options(__doc__)
    parser.add_argument("--points", type=int, nargs="+", default=list(POINTS))
    parser.add_argument("--structures", nargs="+", default=["diag", "kron_lowrank"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        print(json.dumps(measure(json.loads(given.case))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        results = {
            "machine": machine.describe(given.device),
            "rows": run(given.points, given.structures, place, given.device),
            "parts": run_parts(place, given.device, max(given.points)),
        }
    machine.write_results(given.out, "scale", results, render(results))


if __name__ == "__main__":
    main()
