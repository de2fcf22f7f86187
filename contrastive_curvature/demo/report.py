"""The run folder, the figures as JSON and the table as Markdown."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import tempfile
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from contrastive_curvature.demo.config import DemoConfig
from contrastive_curvature.demo.evaluate import Evaluation
from contrastive_curvature.demo.methods import FIGURES, METHODS, PAPER, SECONDS
from contrastive_curvature.errors import InputError, expected

__all__ = ["collect", "make_run_folder", "markdown", "write_atomically", "write_report"]

_PACKAGES = ("contrastive-curvature", "torch", "laplace-torch", "numpy", "scipy", "scikit-learn", "faiss-cpu")


def make_run_folder(config: DemoConfig) -> Path:
    """Create the folder before the work, so that a path that cannot be written fails at once.

    Args:
        config: ``out`` names the folder; without, it is ``runs/<dataset>-d<dim>-<time>``.

    Returns:
        The empty folder.

    Raises:
        InputError: The folder that was named holds something, is a file, or cannot be made.
    """
    if config.out is None:
        stem = f"{config.dataset}-d{config.dim}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        return _make(_free(Path("runs") / stem))
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        came = "a folder that holds something" if config.out.is_dir() else "a file"
        hint = "Nothing is overwritten; name another one, or leave --out away to get one named by the time."
        raise InputError(expected(f"--out {config.out}", "a new or empty folder", came, hint))
    return _make(config.out)


def collect(config: DemoConfig, runs: dict[int, tuple[float, Evaluation]]) -> dict[str, Any]:
    """Everything that goes into ``results.json``.

    Args:
        config: What was asked for.
        runs: Seed -> seconds of training and evaluation.

    Returns:
        Configuration, environment, every seed's figures, their means and, from two seeds up, standard deviations.
    """
    seeds = {
        str(seed): {
            "methods": run.figures,
            "seconds": {"training": training} | run.seconds,
            "prior_precision": run.prior_precision,
            "temperature": run.temperature,
            "calibration": {
                "edges": run.calibration.edges.tolist(),
                "count": run.calibration.count.tolist(),
                # NaN, the value of an empty bin, is not JSON.
                "confidence": _finite(run.calibration.confidence.tolist()),
                "accuracy": _finite(run.calibration.accuracy.tolist()),
            },
        }
        for seed, (training, run) in runs.items()
    }
    results = {
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()},
        "environment": _environment(config),
        "seeds": seeds,
        "mean": _over(list(seeds.values()), statistics.fmean),
    }
    if len(seeds) > 1:
        results["std"] = _over(list(seeds.values()), statistics.stdev)
    return results


def markdown(results: dict[str, Any]) -> str:
    """The tables.

    Args:
        results: From :func:`collect`.

    Returns:
        Markdown: one table a seed, and from two seeds up one of mean ± standard deviation; then the seconds.
    """
    config, seeds = results["config"], results["seeds"]
    sizes = f"latent dimension {config['dim']}, {config['epochs']} epochs"
    parts = [f"# contrastive_curvature demo: {config['dataset']}, {sizes}\n"]
    with_paper = config["dataset"] == "fashionmnist"
    for seed, run in seeds.items():
        parts += [f"Seed {seed}\n", _table(run, None, with_paper and len(seeds) == 1)]
    if len(seeds) > 1:
        title = f"Mean ± standard deviation over {len(seeds)} seeds\n"
        parts += [title, _table(results["mean"], results["std"], with_paper)]
    parts += [_notes(config), _seconds(results["mean"], results.get("std"))]
    machine = results["environment"]
    parts.append(
        f"{machine['processor']}, {machine['cores']} cores; device {config['device']}; torch {machine['torch']}\n"
    )
    return "\n".join(parts)


def write_report(folder: Path, results: dict[str, Any]) -> str:
    """Write ``results.json`` and ``results.md``, and return the latter."""
    text = markdown(results)
    write_atomically(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / "results.md", text)
    return text


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it.

    Args:
        path: The file.
        text: Its content.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp gives a file that nobody else may read; figures are no secret.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _free(wanted: Path) -> Path:
    number, path = 2, wanted
    while path.exists():
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def _make(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InputError(expected(f"--out {path}", "a folder that can be written", str(error))) from None


def _finite(values: list[float]) -> list[float | None]:
    return [None if value != value else value for value in values]


def _over(runs: list[dict[str, Any]], summary: Any) -> dict[str, Any]:
    """Apply a summary to every figure of several runs of the same form."""
    return {
        part: {
            key: _over([{part: run[part][key]} for run in runs], summary)[part]
            if isinstance(value, dict)
            else summary([run[part][key] for run in runs])
            for key, value in runs[0][part].items()
        }
        for part in runs[0]
        if part not in ("calibration", "prior_precision", "temperature")
    }


def _table(mean: dict[str, Any], std: dict[str, Any] | None, with_paper: bool) -> str:
    lines = ["| uncertainty | " + " | ".join(FIGURES.values()) + " |", "|---|" + "---:|" * len(FIGURES)]
    for method, title in METHODS.items():
        spread = None if std is None else std["methods"][method]
        cells = [_cell(key, mean["methods"][method], spread) for key in FIGURES]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    if with_paper:
        for title, figures in PAPER.items():
            cells = [f"{figures[key]:.2f}" if key in figures else "–" for key in FIGURES]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(key: str, mean: dict[str, float], std: dict[str, float] | None) -> str:
    if key not in mean:
        return "–"
    digits = 1 if key == "seconds" else 3
    return f"{mean[key]:.{digits}f}" + ("" if std is None else f" ± {std[key]:.{digits}f}")


def _seconds(mean: dict[str, Any], std: dict[str, Any] | None) -> str:
    lines = ["| step | seconds |", "|---|---:|"]
    for key, title in SECONDS.items():
        spread = "" if std is None else f" ± {std['seconds'][key]:.2f}"
        lines.append(f"| {title} | {mean['seconds'][key]:.2f}{spread} |")
    return "\n".join(lines) + "\n"


def _notes(config: dict[str, Any]) -> str:
    return (
        "mAP: leave-one-out among the test images. AUROC, AUPRC: out of distribution is positive. AUSC: of mAP@1. ECE: "
        f"of the votes of {config['n_samples']} sampled networks. Seconds: for all test images, in and out of "
        "distribution, forward passes included; the 10-NN rows include embedding the training images that they search, "
        f"in feature space at most {config['baseline_features']:,} of them.\n"
    )


def _environment(config: DemoConfig) -> dict[str, Any]:
    device = torch.device(config.device)
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": versions,
        "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """The processor's name, which Python itself does not know on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
