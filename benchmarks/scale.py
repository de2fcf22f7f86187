"""A fit of the last layer against the number N of points: seconds, memory beyond the file mapping, and their growth.

From features on disk (512 numbers a point, saved by ``contrastive_curvature.features``), with embeddings of 128
dimensions: the contrastive loss with a margin of 0.7, all pairs and ``negative_samples=2000``, with the relative
standard error that the library reports and, where all pairs are counted, the true one; InfoNCE and SupCon with all
points as candidates, of which a sample stands for the negatives; and two processes of one thread beside one of two.
Last, the same two for images, where the encoder dominates.

Every case runs in a process of its own. The points lie around the centres of 1,000 classes in a space of 8 dimensions,
so that many negatives are inside the margin.

    python -m benchmarks.scale [--points N ...] [--structures diag kron] [--folder FOLDER] [--device cuda]
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
from benchmarks.machine import (
    Case,
    describe,
    finished,
    machine_line,
    options,
    run_apart,
    table,
    watch_memory,
    write_results,
)
from contrastive_curvature import FeatureFolder

FEATURES, DIMENSIONS, CLASSES = 512, 128, 1000
MARGIN = 0.7
SAMPLES = 2000
POINTS = (10_000, 31_600, 100_000, 316_000, 1_000_000)
MOST_EXACT = 100_000
IMAGES = 4096
_BATCH = 8192
_LATENT = 8


class Synthetic:
    """Batches of features around class centres, made when they are asked for, always the same."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return math.ceil(self.n / _BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(CLASSES, _LATENT, generator=generator)
        mixed = torch.randn(_LATENT, FEATURES, generator=generator)
        for start in range(0, self.n, _BATCH):
            count = min(_BATCH, self.n - start)
            labels = torch.randint(0, CLASSES, (count,), generator=generator)
            latent = centres[labels] + 0.3 * torch.randn(count, _LATENT, generator=generator)
            yield torch.tanh(latent @ mixed / 3), labels


def encoder() -> nn.Module:
    """A last layer whose features are its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, DIMENSIONS), cc.L2Norm())


def folder_of(n: int, place: Path) -> Path:
    """Features of n points on disk; written where they are not there yet."""
    path = place / f"features-{n}"
    cc.features(encoder(), Synthetic(n), path, dtype="float16")
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
    """One fit, in this process, or in several of one thread each."""
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
    kwargs: dict[str, Any] = {"negative_samples": case["samples"]}
    if case["loss"] == "contrastive":
        kwargs["margin"] = MARGIN
    else:
        kwargs |= {"loss": getattr(cc, f"{case['loss']}Loss")(), "candidates": "dataset"}
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
        backend_kwargs=kwargs,
    )
    warnings.simplefilter("ignore")

    def run_fit() -> float:
        if processes > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        finished(lambda: la.fit(loader, progress_bar=False), device)()
        return time.perf_counter() - start

    seconds, mib = watch_memory(run_fit, "RssAnon")
    out: dict[str, Any] = {"seconds": seconds, "mib": mib, "error": la.curvature_error}
    if device.type == "cuda":
        out["gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
    if case["save"] is not None:
        curvature = la.H_raw if isinstance(la.H_raw, Tensor) else la.H_raw[0][0]
        np.save(case["save"], curvature.double().cpu().numpy())
    return out


def run(points: list[int], structures: list[str], place: Path, device: str) -> list[Case]:
    """All cases: sampled for all numbers of points, exact up to :data:`MOST_EXACT`."""
    rows: list[Case] = []
    # A process on a GPU has it alone.
    several = (1, 2) if device == "cpu" else (1,)

    def add(n: int, **case: Any) -> None:
        case = {"n": n, "save": None, "device": device, "threads": 2, **case}
        found = run_apart("benchmarks.scale", case)
        images = case["path"] is None
        shown = {name: case[name] for name in ("n", "loss", "structure", "samples", "processes")}
        rows.append({**shown, "images": images, **found})
        print(rows[-1], flush=True)

    for n in points:
        path = str(folder_of(n, place))
        for structure in structures:
            saved = {}
            for samples in (SAMPLES, None) if n <= MOST_EXACT else (SAMPLES,):
                saved[samples] = str(place / f"{structure}-{samples}.npy")
                same = {"path": path, "loss": "contrastive", "structure": structure, "samples": samples}
                add(n, **same, processes=1, save=saved[samples])
            if None in saved:
                sampled, exact = np.load(saved[SAMPLES]), np.load(saved[None])
                rows[-2]["true_error"] = float(np.linalg.norm(sampled - exact) / np.linalg.norm(exact))
        for loss in ("InfoNCE", "SupCon") if n <= MOST_EXACT else ():
            add(n, path=path, loss=loss, structure="kron", samples=SAMPLES, processes=1)
        for processes in several[1:]:
            add(n, path=path, loss="contrastive", structure="kron", samples=SAMPLES, processes=processes)
    for processes in several:
        add(
            min(IMAGES, max(points)), path=None, loss="contrastive", structure="kron", samples=None, processes=processes
        )
    return rows


def render(results: Case) -> str:
    """A table, and the powers of N that the seconds grow with."""
    rows, shown = results["rows"], []
    for row in rows:
        negatives = "all" if row["samples"] is None else f"{row['samples']:,}"
        errors = [f"{row[name]:.1e}" if row.get(name) is not None else "" for name in ("error", "true_error")]
        shown.append([_kind(row), f"{row['n']:,}", negatives, f"{row['seconds']:.2f}", f"{row['mib']:.0f}", *errors])
    head = ["fit", "points", "negatives", "seconds", "MiB beyond the mapping", "reported error", "true error"]
    lines = [
        "# A fit of the last layer against the number of points",
        "",
        f"`python -m benchmarks.scale`, {machine_line(results['machine'])}. {FEATURES} features (float16 on disk), "
        f"{DIMENSIONS} dimensions, {CLASSES} classes, margin {MARGIN}.",
        "",
        table(head, shown),
        "",
    ]
    for fitted, samples in dict.fromkeys((_kind(row), row["samples"]) for row in rows):
        mine = [row for row in rows if (_kind(row), row["samples"]) == (fitted, samples)]
        first, last = mine[0], mine[-1]
        if first["n"] < last["n"]:
            power = math.log(last["seconds"] / first["seconds"]) / math.log(last["n"] / first["n"])
            kind = "all pairs" if samples is None else f"{samples:,} negatives"
            lines.append(
                f"- {fitted}, {kind}: seconds grow with N to the power {power:.2f} from {first['n']:,} to "
                f"{last['n']:,} points."
            )
    return "\n".join(lines) + "\n"


def _kind(row: Case) -> str:
    """Loss, structure and processes of a case."""
    several = "" if row["processes"] == 1 else f", {row['processes']} processes"
    return f"{row['loss']} `{row['structure']}`{several}{', images' if row['images'] else ''}"


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--points", type=int, nargs="+", default=list(POINTS))
    parser.add_argument("--structures", nargs="+", default=["diag", "kron"])
    parser.add_argument("--folder", type=Path, help="where features are kept; a temporary one without it")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        print(json.dumps(measure(json.loads(given.case))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = given.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        results = {"machine": describe(given.device), "rows": run(given.points, given.structures, place, given.device)}
    write_results(given.out, "scale", results, render(results))


if __name__ == "__main__":
    main()
