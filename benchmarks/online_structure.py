"""Which structure of the posterior online training should have: diagonal, or Kronecker factors of low rank.

Encoders of the paper's network are trained with online LAM from the same seeds, once with each structure. Training
images are held out to be judged on, and those of another data set are the unknown inputs, so that no test image has a
say. ``uncertainty`` is judged by whether it tells a wrong nearest neighbour (R-AUROC), ``novelty``, calibrated with
training images, by whether it tells the unknown inputs (AUROC).

Run: ``python -m benchmarks.online_structure --data-root ../shared/data [--dims D ...] [--seeds S ...] [--out FOLDER]``.
It goes on where it was interrupted: trainings and finished scores are kept in ``--work``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split, loader
from benchmarks.experiments.figures import r_auroc
from benchmarks.experiments.methods import Setting
from benchmarks.experiments.methods.embed import image_batches
from benchmarks.experiments.methods.training import train
from benchmarks.experiments.ranking import retrieve
from benchmarks.machine import describe, mean_and_deviation, write_results
from benchmarks.online_temperature import held_out
from contrastive_curvature import OnlineLaplace, metrics
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.laplace import ContrastiveLaplace

RESULTS = Path(__file__).parent / "results"
STRUCTURES: dict[str, dict[str, Any]] = {
    "diag": {"hessian_structure": "diag"},
    "kron_lowrank": {"hessian_structure": "kron_lowrank"},
    "kron_lowrank, rank 32": {"hessian_structure": "kron_lowrank", "backend_kwargs": {"rank": 32}},
}
DATA = {"fashionmnist": "mnist", "mnist": "fashionmnist"}
"""Known images and unknown ones."""
FIGURES = {
    "map_at_1": "mAP@1",
    "r_auroc": "R-AUROC, uncertainty",
    "auroc": "AUROC, novelty",
    "step": "CPU seconds a step",
}
_CALIBRATION = 2_000
_DIGITS = {"step": 4}
Cells = dict[str, dict[str, list[float]]]


def measure(data: RetrievalData, setting: Setting, structure: str, seed: int, folder: Path) -> dict[str, float]:
    """Train once, and judge.

    Args:
        data: From :func:`benchmarks.online_temperature.held_out`.
        setting: Network and training.
        structure: One of :data:`STRUCTURES`.
        seed: Of the training.
        folder: For the checkpoint; removed at the end.

    Returns:
        Figure -> value.
    """
    options = {"margin": setting.margin, **STRUCTURES[structure].get("backend_kwargs", {})}

    def make_step(encoder: nn.Module, probe: Tensor) -> nn.Module:
        return OnlineLaplace(
            encoder,
            probe=probe,
            n_data=len(data.train),
            memory_factor=setting.memory_factor,
            hessian_structure=STRUCTURES[structure]["hessian_structure"],
            backend_kwargs=options,
        )

    folder.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    online = train(setting, data, seed, folder / "training.pt", make_step=make_step)
    seconds = time.process_time() - started
    la = online.laplace()
    rows = torch.randperm(len(data.plain), generator=torch.Generator().manual_seed(0))[:_CALIBRATION]
    la.calibrate(loader(data.plain.take(rows), setting.eval_batch, generator=torch.Generator()))
    (mean, uncertainty, novelty), (_, _, unknown) = (_scores(la, setting, split) for split in (data.test, data.ood))
    retrieval = retrieve(data, mean, None)
    right = metrics.average_precision_at_k(retrieval.ranking, 1)
    shutil.rmtree(folder)
    found = {
        "map_at_1": metrics.map_at_k(retrieval.ranking, 1),
        "r_auroc": r_auroc(uncertainty, right),
        "auroc": metrics.auroc(novelty, unknown),
        "step": seconds / int(online.discounted.steps),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _scores(la: ContrastiveLaplace, setting: Setting, split: Split | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (N, D), uncertainty (N,) and novelty (N,)."""
    parts = []
    with torch.no_grad():
        for x in [] if split is None else image_batches(split, setting):
            out = la(x)
            parts.append((out.raw_mean, out.uncertainty, out.novelty))
    mean, uncertainty, novelty = (torch.cat(part) for part in zip(*parts, strict=True))
    return mean, uncertainty, novelty


def measured(
    data: dict[str, RetrievalData], settings: dict[int, Setting], seeds: list[int], work: Path
) -> dict[str, Cells]:
    """All cells, those that are missing computed: ``"DATA DIM"`` -> structure -> figure -> values of the seeds."""
    found: dict[str, Cells] = {}
    for seed in seeds:
        for name, images in data.items():
            for dim, setting in settings.items():
                identity = {**asdict(setting), "train": len(images.train), "test": len(images.test)}
                for structure in STRUCTURES:
                    kept = work / f"{name}-{dim}" / f"{structure.replace(', ', '-').replace(' ', '')}-{seed}.json"
                    if not kept.is_file():
                        figures = measure(images, setting, structure, seed, kept.with_suffix(""))
                        kept.write_text(json.dumps({"setting": identity, "figures": figures}), encoding="utf-8")
                    content = json.loads(kept.read_text(encoding="utf-8"))
                    if content["setting"] != identity:
                        hint = "Choose another one."
                        raise InputError(expected("--work", "a folder of the same setting", str(kept), hint))
                    row = found.setdefault(f"{name} {dim}", {}).setdefault(structure, {})
                    for figure, value in content["figures"].items():
                        row.setdefault(figure, []).append(value)
    return found


def overall(rows: dict[str, Cells]) -> dict[str, dict[str, float]]:
    """Structure -> figure -> mean over data sets, dimensions and seeds."""
    means: dict[str, dict[str, float]] = {}
    for structure in STRUCTURES:
        for figure in FIGURES:
            values = [value for cells in rows.values() for value in cells[structure].get(figure, [])]
            if values:
                means.setdefault(structure, {})[figure] = sum(values) / len(values)
    return means


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    lines = [
        "# Structure of the posterior in online training",
        "",
        f"`{result['command']}` on {machine['cpu']}, torch {machine['torch']}, {machine['threads']} "
        f"thread{'s' if machine['threads'] != 1 else ''}, {machine['date']}: {result['train']:,} training images, "
        f"{result['epochs']} epochs in batches of {result['batch_size']}, memory factor {result['memory_factor']:g}, "
        f"seeds {', '.join(map(str, result['seeds']))}; {result['test']:,} held-out training images, and those of the "
        "other data set as unknown inputs. Mean ± standard deviation over the seeds.",
        "",
        "| data | dimensions | structure | " + " | ".join(FIGURES.values()) + " |",
        "|---|---:|---|" + "---:|" * len(FIGURES),
    ]
    for key, cells in result["rows"].items():
        name, dim = key.split()
        for structure, figures in cells.items():
            shown = [mean_and_deviation(figures[figure]) if figure in figures else "–" for figure in FIGURES]
            lines.append(f"| {name} | {dim} | {structure} | {' | '.join(shown)} |")
    for structure, figures in result["overall"].items():
        shown = [f"{figures[name]:.{_DIGITS.get(name, 3)}f}" if name in figures else "–" for name in FIGURES]
        lines.append(f"| mean | | {structure} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``online_structure.json`` and ``online_structure.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--dims", type=int, nargs="+", default=[3, 32])
    parser.add_argument("--train-size", type=int, default=8_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--memory-factor", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/online_structure"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    machine = describe()
    data = {name: held_out(given.data_root, given.train_size, name, DATA[name]) for name in given.data}
    common = {"epochs": given.epochs, "n_samples": 0, "memory_factor": given.memory_factor}
    settings = {dim: Setting(dim=dim, **common) for dim in given.dims}
    rows = measured(data, settings, given.seeds, given.work)
    first = next(iter(data.values()))
    result = {
        "command": "python -m benchmarks.online_structure",
        "machine": machine,
        "dims": given.dims,
        "train": len(first.train),
        "test": len(first.test),
        "epochs": given.epochs,
        "batch_size": settings[given.dims[0]].batch_size,
        "seeds": given.seeds,
        "memory_factor": given.memory_factor,
        "rows": rows,
        "overall": overall(rows),
    }
    write_results(given.out, "online_structure", result, render(result))


if __name__ == "__main__":
    main()
