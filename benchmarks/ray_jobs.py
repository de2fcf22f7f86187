"""What two processes of a local Ray take for a fit and for embeddings, against one process, and what a death costs.

Features of N points with 512 numbers each in Parquet files, 1,000 classes; a last layer with 128 outputs,
``kron``, ``negative_samples=2000``. One process reads the same files and runs the same passes, on one core as every
process of Ray. Ray is started before the clock, its processes (which import torch and this library) after it. Then the
same with a process that kills itself once in the middle of a part of the fit, and once in the embeddings.

    python -m benchmarks.ray_jobs [--points N] [--parts K]
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from laplace import Laplace
from torch import nn

import contrastive_curvature as cc
from benchmarks.machine import describe, machine_line, options, table, write_results

WIDTH, DIM, CLASSES, FILES, GROUP = 512, 128, 1_000, 4, 5_000
_STORE = 200_000_000


def write_features(folder: Path, points: int) -> None:
    """Parquet files with features around the centres of their classes."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((CLASSES, WIDTH), dtype=np.float32)
    folder.mkdir()
    ends = [points * k // FILES for k in range(FILES + 1)]
    for number, (start, end) in enumerate(pairwise(ends)):
        target = generator.integers(CLASSES, size=end - start)
        features = centres[target] + 2 * generator.standard_normal((end - start, WIDTH), dtype=np.float32)
        columns = {
            "features": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), WIDTH),
            "target": pa.array(target),
            "identifier": pa.array(np.arange(start, end)),
        }
        path = folder / f"{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=GROUP, compression="none")


def posterior() -> Any:
    """Not fitted, the same at every call."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(WIDTH, DIM), cc.L2Norm())
    return Laplace(encoder, "contrastive", hessian_structure="kron", backend_kwargs={"negative_samples": 2000})


def reader(place: Path, row: int | None) -> Callable[[dict[str, Any]], Any]:
    """A ``read`` whose process kills itself once, at the batch that has a row."""

    def read(batch: dict[str, Any]) -> Any:
        first, mark = int(batch["identifier"][0]), place / "died"
        if row is not None and first <= row < first + len(batch["identifier"]) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.from_numpy(batch["features"]), torch.from_numpy(batch["target"])

    return read


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the seconds that it took."""
    start = time.perf_counter()
    out = function()
    return out, time.perf_counter() - start


def in_one_process(source: Path, place: Path, parts: int) -> tuple[Any, dict[str, Any]]:
    """Fit and embeddings without Ray."""
    la, threads = posterior(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, fit = timed(lambda: la.fit(cc.jobs.ParquetParts(source, 1)[0], progress_bar=False))
        la.optimize_prior_precision()
        data = cc.jobs.ParquetParts(source, parts)

        def embed() -> None:
            folder = cc.jobs.EmbeddingFolder(place / "one", la, data)
            for part in folder.missing():
                folder.write(la, part)

        _, embedded = timed(embed)
    finally:
        torch.set_num_threads(threads)
    return la, {"case": "one process", "fit": fit, "embed": embedded}


def on_ray(source: Path, place: Path, parts: int, exact: Any, *, killed: bool, points: int) -> dict[str, Any]:
    """Fit and embeddings with two processes of Ray, compared with those of one process."""
    place.mkdir()
    data = cc.jobs.ParquetParts(source, parts, read=reader(place, points // 2 + GROUP if killed else None))
    la, fit = timed(lambda: cc.jobs.fit_on_ray(posterior(), data, folder=place / "states"))
    _, again = timed(lambda: cc.jobs.fit_on_ray(posterior(), data, folder=place / "states"))
    died = (place / "died").exists()
    (place / "died").unlink(missing_ok=True)
    la.optimize_prior_precision()
    folder, embedded = timed(lambda: cc.jobs.embed_on_ray(exact, data, place / "embeddings"))
    rows = pq.read_table(folder.path, columns=["identifier"]).column("identifier").to_numpy()
    x = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(1))
    mine, theirs = la(x).uncertainty, exact(x).uncertainty
    sizes = {kind: max(p.stat().st_size for p in (place / "states").glob(f"{kind}-*")) for kind in KINDS}
    return {
        "case": "Ray, one killed" if killed else "Ray, two processes",
        "fit": fit,
        "embed": embedded,
        "again": again,
        "died": [died, (place / "died").exists()],
        "difference": float(((mine - theirs) / theirs).abs().max()),
        "points": la.n_data,
        "rows": len(rows),
        "different_rows": len(np.unique(rows)),
        "bytes": sizes,
    }


KINDS = ("statistics", "curvature")


def render(result: dict[str, Any]) -> str:
    """A table of the cases."""
    one, sizes = result["rows"][0], result["rows"][1]["bytes"]
    rows = [
        [row["case"], f"{row['fit']:.1f}", f"{row['embed']:.1f}"]
        + [f"{row[name] / one[name]:.2f}" for name in ("fit", "embed")]
        + [f"{row[name]:,}" for name in ("points", "rows", "different_rows")]
        + [f"{row['difference']:.1e}"]
        for row in result["rows"]
    ]
    head = ["", "fit, s", "embeddings, s", "fit, times one process", "embeddings, times one process"]
    head += ["points of the fit", "rows written", "different ones", "uncertainty, largest relative difference"]
    parts = [
        "# Fits and embeddings on a local Ray",
        f"`python -m benchmarks.ray_jobs`, {machine_line(result['machine'])}, Ray {result['ray']}: "
        f"{result['points']:,} points of {WIDTH} features in Parquet, a last layer with {DIM} outputs, `kron`, "
        f"`negative_samples=2000`, {result['parts']} parts. Starting Ray took {result['start']:.1f} s, which is "
        "not in the table; starting its processes is, once for each pass of the fit and once for the embeddings.",
        table(head, rows),
        f"A fit whose states are all there, called again: {result['rows'][1]['again']:.1f} s. The state of a part "
        f"has {sizes['statistics'] / 2**20:.1f} MiB after the first pass and {sizes['curvature'] / 2**20:.1f} MiB "
        "after the second, whatever its number of points.",
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON and Markdown."""
    import ray

    parser = options(__doc__)
    parser.add_argument("--points", type=int, default=200_000)
    parser.add_argument("--parts", type=int, default=8)
    given = parser.parse_args(arguments)
    machine = describe()
    with tempfile.TemporaryDirectory() as name:
        place, source = Path(name), Path(name) / "features"
        write_features(source, given.points)
        la, one = in_one_process(source, place, given.parts)
        counted = pq.read_table(place / "one", columns=["identifier"]).num_rows
        rows = [one | {"points": la.n_data, "rows": counted, "different_rows": counted, "difference": 0.0}]
        print(rows[-1], flush=True)
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
        _, start = timed(lambda: ray.init(num_cpus=2, object_store_memory=_STORE, **quiet))
        try:
            for killed in (False, True):
                case = place / f"ray{killed}"
                rows.append(on_ray(source, case, given.parts, la, killed=killed, points=given.points))
                print(rows[-1], flush=True)
        finally:
            ray.shutdown()
    result = {"machine": machine, "ray": ray.__version__, "points": given.points, "parts": given.parts}
    result |= {"start": start, "rows": rows}
    write_results(given.out, "ray_jobs", result, render(result))


if __name__ == "__main__":
    main()
