"""``evaluate``: all metrics of a posterior, plots, and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.apps import report
from contrastive_curvature.apps.cli.console import Console
from contrastive_curvature.apps.cli.outputs import check_writable
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source, shared_labels
from contrastive_curvature.apps.report.folder import check_target


def evaluate(
    console: Console,
    sources: Mapping[str, Source],
    *,
    folder: Path,
    out: Path,
    title: str,
    batch_size: int,
    ks: Sequence[int],
    alphas: Sequence[float],
    samples: int,
    shown: int,
    **encoder: Any,
) -> None:
    """Measure, and write the page; ``encoder`` has the options of :func:`.open_posterior`."""
    check_writable(out, check_target(out, f"--out {out}"))
    for package in ("matplotlib", "PIL"):
        validate.package("evaluate", package, "report")
    la, made = open_posterior(folder, **encoder)
    for source in sources.values():
        source.prepare(made)
    labelled = [name for name in ("test", "gallery") if name in sources and sources[name].classes is not None]
    numbers, names = shared_labels(*(sources[name] for name in labelled))
    labels = dict(zip(labelled, numbers, strict=True))
    data = {
        name: report.Data(Loader(source, batch_size, labels=labels.get(name)), items=source.shown, ids=source.ids)
        for name, source in sources.items()
    }
    found = report.evaluate(
        la,
        data["test"],
        unknown=data.get("unknown"),
        gallery=data.get("gallery"),
        ks=ks,
        alphas=alphas,
        n_samples=samples,
        n_shown=shown,
        class_names=names,
        progress_bar=console.progress,
    )
    files = found.save(out, title=title)
    plain = found.to_plain()
    del plain["curves"]
    values = {"files": {name: str(path) for name, path in files.items()}, **plain}
    lines = [f"{name:<24} {value:.4f}" for name, value in found.metrics.items()]
    lines += [f"{name + ':':<24} not measured. {reason}" for name, reason in found.missing.items()]
    console.result(values, *lines, f"page: {files['report.html']}")
