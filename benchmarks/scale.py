"""A fit of the last layer against the number N of points: seconds, memory beyond the file mapping, and their growth.

From features on disk (512 numbers a point, saved by ``contrastive_curvature.features``), with embeddings of 128
dimensions: the contrastive loss with a margin of 0.7, all pairs and ``negative_samples=2000``, with the relative error
of the sample where all pairs are counted; and two processes of one thread beside one of two. Then the same two for
images, where the encoder dominates. Last, a fit in 100 parts, as on 100 machines, with few and with many classes:
seconds of a part and of all merges, and the size of what the parts hand on.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks import machine
from contrastive_curvature import FeatureFolder

FEATURES, DIMENSIONS, CLASSES = 512, 128, 1000
MARGIN = 0.7
SAMPLES = 2000
POINTS = (10_000, 31_600, 100_000, 316_000, 1_000_000)
MOST_EXACT = 100_000
IMAGES = 4096
PARTS, POINTS_IN_PARTS, MANY_CLASSES = 100, 316_000, 100_000
_BATCH = 8192
_LATENT = 8


class Synthetic:
    """Batches of features around class centres, made when they are asked for, always the same."""

    def __init__(self, n: int, classes: int) -> None:
        self.n, self.classes = n, classes

    def __len__(self) -> int:
        return math.ceil(self.n / _BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(self.classes, _LATENT, generator=generator)
        mixed = torch.randn(_LATENT, FEATURES, generator=generator)
        for start in range(0, self.n, _BATCH):
            count = min(_BATCH, self.n - start)
            labels = torch.randint(0, self.classes, (count,), generator=generator)
            latent = centres[labels] + 0.3 * torch.randn(count, _LATENT, generator=generator)
            yield torch.tanh(latent @ mixed / 3), labels


def encoder() -> nn.Module:
    """A last layer whose features are its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, DIMENSIONS), cc.L2Norm())


def folder_of(n: int, place: Path, classes: int) -> Path:
    """Features of n points on disk; written where they are not there yet."""
    path = place / f"features-{n}-{classes}"
    cc.features(encoder(), Synthetic(n, classes), path, dtype="float16")
    return path


def image_encoder() -> nn.Module:
    """A small convolutional network, next to which pairs and sums cost nothing."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, DIMENSIONS), cc.L2Norm())


def images(first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of images of noise, a share of all."""
    generator = torch.Generator().manual_seed(first)
    return [
        (torch.randn(64, 3, 32, 32, generator=generator), torch.randint(0, 10, (64,), generator=generator))
        for _ in range(count // 64)
    ]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One fit, in this process, in several of one thread each, or in parts one after the other."""
    if "parts" in case:
        torch.set_num_threads(case["threads"])
        return fit_in_parts(case)
    if case["processes"] == 1:
        torch.set_num_threads(case["threads"])
        return fit(case, 0)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one_of_several, (case, folder), nprocs=case["processes"])
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return {**found[0], "seconds": max(f["seconds"] for f in found), "mib": sum(f["mib"] for f in found)}


def _one_of_several(rank: int, case: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=case["processes"])
    found = fit(case, rank)
    torch.distributed.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def fit(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """The share of one process."""
    device, processes = torch.device(case["device"]), case["processes"]
    loader: Any
    if case["path"] is None:
        model = image_encoder()
        loader = images(rank, case["n"] // processes)
    else:
        model = encoder()
        whole = FeatureFolder(case["path"], batch_size=_BATCH)
        loader = whole if processes == 1 else whole.shard(rank, processes)
    la = Laplace(
        model.to(device),
        "contrastive",
        subset_of_weights="last_layer",
        hessian_structure=case["structure"],
        backend_kwargs={"margin": MARGIN, "negative_samples": case["samples"]},
    )
    warnings.simplefilter("ignore")

    def run_fit() -> float:
        if processes > 1:
            torch.distributed.barrier()
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
    whole = FeatureFolder(case["path"], batch_size=_BATCH)
    pairs = {"margin": MARGIN, "negative_samples": SAMPLES}
    la: Any = Laplace(encoder().to(case["device"]), "contrastive", backend_kwargs=pairs)
    out: dict[str, Any] = {}
    statistics = None
    with tempfile.TemporaryDirectory() as place:
        states = cc.jobs.StateFolder(place, count, case["path"])
        for step in ("statistics", "curvature"):
            start = time.perf_counter()
            for index in range(count):
                part = whole.shard(index, count), (index, count)
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
        path = str(folder_of(n, place, classes))
        case = {"path": path, "parts": PARTS, "device": device, "threads": 2}
        rows.append({"n": n, "classes": classes, "parts": PARTS, **machine.run_apart("benchmarks.scale", case)})
        print(rows[-1], flush=True)
    return rows


def run(points: list[int], structures: list[str], place: Path, device: str) -> list[machine.Case]:
    """All cases: sampled for all numbers of points, exact up to :data:`MOST_EXACT`."""
    rows: list[machine.Case] = []
    # A process on a GPU has it alone.
    several = (1, 2) if device == "cpu" else (1,)

    def add(n: int, **case: Any) -> None:
        case = {"n": n, "save": None, "device": device, "threads": 2, **case}
        found = machine.run_apart("benchmarks.scale", case)
        images = case["path"] is None
        shown = {name: case[name] for name in ("n", "structure", "samples", "processes")}
        rows.append({**shown, "images": images, **found})
        print(rows[-1], flush=True)

    for n in points:
        path = str(folder_of(n, place, CLASSES))
        for structure in structures:
            saved = {}
            for samples in (SAMPLES, None) if n <= MOST_EXACT else (SAMPLES,):
                saved[samples] = str(place / f"{structure}-{samples}.npy")
                same = {"path": path, "structure": structure, "samples": samples}
                add(n, **same, processes=1, save=saved[samples])
            if None in saved:
                sampled, exact = np.load(saved[SAMPLES]), np.load(saved[None])
                rows[-2]["error"] = float(np.linalg.norm(sampled - exact) / np.linalg.norm(exact))
        for processes in several[1:]:
            add(n, path=path, structure="kron_lowrank", samples=SAMPLES, processes=processes)
    for processes in several:
        same = {"path": None, "structure": "kron_lowrank", "samples": None}
        add(min(IMAGES, max(points)), **same, processes=processes)
    return rows


def render(results: machine.Case) -> str:
    """A table, and the powers of N that the seconds grow with."""
    rows, shown = results["rows"], []
    for row in rows:
        negatives = "all" if row["samples"] is None else f"{row['samples']:,}"
        error = f"{row['error']:.1e}" if "error" in row else ""
        shown.append([_kind(row), f"{row['n']:,}", negatives, f"{row['seconds']:.2f}", f"{row['mib']:.0f}", error])
    head = ["fit", "points", "negatives", "seconds", "MiB beyond the mapping", "error"]
    grows = []
    parts = [
        "# A fit of the last layer against the number of points",
        f"`python -m benchmarks.scale`, {machine.machine_line(results['machine'])}. {FEATURES} features (float16 on "
        f"disk), {DIMENSIONS} dimensions, {CLASSES} classes, margin {MARGIN}.",
        machine.table(head, shown),
    ]
    for fitted, samples in dict.fromkeys((_kind(row), row["samples"]) for row in rows):
        mine = [row for row in rows if (_kind(row), row["samples"]) == (fitted, samples)]
        first, last = mine[0], mine[-1]
        if first["n"] < last["n"]:
            power = math.log(last["seconds"] / first["seconds"]) / math.log(last["n"] / first["n"])
            kind = "all pairs" if samples is None else f"{samples:,} negatives"
            sizes = f"from {first['n']:,} to {last['n']:,} points"
            grows.append(f"- {fitted}, {kind}: seconds grow with N to the power {power:.2f} {sizes}.")
    shown = [
        [f"{row['n']:,}", f"{row['classes']:,}", step, *(f"{value:.2f}" for value in row[step].values())]
        for row in results["parts"]
        for step in ("statistics", "curvature")
    ]
    head = ["points", "classes", "pass", "seconds a part", "seconds of all merges", "MiB a part", "MiB merged"]
    title = f"In {PARTS} parts, one after the other, `kron_lowrank`, {SAMPLES:,} negatives:"
    return "\n\n".join([*parts, "\n".join(grows), title, machine.table(head, shown)]) + "\n"


def _kind(row: machine.Case) -> str:
    """Structure and processes of a case."""
    several = "" if row["processes"] == 1 else f", {row['processes']} processes"
    return f"`{row['structure']}`{several}{', images' if row['images'] else ''}"


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
