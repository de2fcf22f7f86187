"""``evaluate``: all metrics of a posterior, plots, and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.apps import report
from contrastive_curvature.apps.cli import retriever
from contrastive_curvature.apps.cli.console import BadInputError, Console, Result
from contrastive_curvature.apps.cli.outputs import check_writable
from contrastive_curvature.apps.cli.saved import holds_retriever, open_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source, shared_labels
from contrastive_curvature.apps.report.folder import check_target


def evaluate(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    out: Path | None,
    title: str,
    batch_size: int,
    ks: Sequence[int],
    alphas: Sequence[float],
    samples: int,
    shown: int,
    **encoder: Any,
) -> Result:
    """Measure, and write the page; ``encoder`` has the options of :func:`.open_posterior`."""
    if holds_retriever(folder):
        if out is not None or "gallery" in sources:
            hint = "Its rates are printed, of the gallery that it holds."
            raise BadInputError("--out, --gallery", "neither for a saved retriever", "one", hint)
        return retriever.evaluate(console, sources=sources, folder=folder, batch_size=batch_size, **encoder)
    if out is None:
        raise BadInputError("--out", "a folder for the report", "none")
    check_writable(out, check_target(out, f"--out {out}"))
    for package in ("matplotlib", "PIL"):
        validate.package("evaluate", package, "report")
    la, _ = open_posterior(folder, sources, **encoder)
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
    values: dict[str, Any] = {"files": {name: str(path) for name, path in files.items()}, **plain}
    lines = [f"{name:<24} {value:.4f}" for name, value in found.metrics.items()]
    lines += [f"{name + ':':<24} not measured. {reason}" for name, reason in found.missing.items()]
    lines.append(f"page: {files['report.html']}")
    return values, *lines
