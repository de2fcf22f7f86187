"""``evaluate``: all metrics of a posterior, plots, and one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from contrastive_curvature.apps.cli.console import Console, common_options
from contrastive_curvature.apps.cli.folders import check_writable
from contrastive_curvature.apps.cli.options import (
    PATH,
    SHARE,
    check_device,
    computing_options,
    source_options,
    take_columns,
)

if TYPE_CHECKING:
    from torch import Tensor

    from contrastive_curvature.apps.cli.sources import Source
    from contrastive_curvature.apps.report import Data, Evaluation

__all__ = ["evaluate"]


@click.command(
    epilog="Example: contrastive-curvature evaluate posterior --test test.npz --unknown other.npz --gallery train.npz "
    "--out report"
)
@click.argument("folder", type=PATH)
@click.option("--test", type=PATH, required=True, help="Known inputs with classes, neither fitted nor calibrated on.")
@click.option("--unknown", type=PATH, help="Inputs of kinds that the encoder does not know.")
@click.option("--gallery", type=PATH, help="Inputs with classes that are searched (default: the other test inputs).")
@click.option("--out", type=PATH, required=True, help="Folder of its own for the report; an earlier one is replaced.")
@click.option(
    "-k", "ks", type=click.IntRange(min=1), multiple=True, default=(1, 5, 10), show_default=True, help="Ranks."
)
@click.option(
    "--alpha",
    "alphas",
    type=SHARE,
    multiple=True,
    default=(0.01, 0.02, 0.05, 0.1),
    show_default=True,
    help="Thresholds of the p-value.",
)
@click.option(
    "--samples", type=click.IntRange(min=0), default=30, show_default=True, help="Networks that vote; 0 for none."
)
@click.option("--shown", type=click.IntRange(min=0), default=12, show_default=True, help="Inputs of each group shown.")
@click.option("--title", default="How sure is this encoder?", show_default=True, help="Heading of the page.")
@source_options
@computing_options
@common_options
def evaluate(
    console: Console,
    folder: Path,
    test: Path,
    unknown: Path | None,
    gallery: Path | None,
    out: Path,
    title: str,
    **options: Any,
) -> None:
    """Measure the posterior in FOLDER, and write a page that shows it.

    \b
    report.html       one page that needs no network: threshold slider, curves, the most and least certain inputs
    metrics.json      every number, and why a number is missing
    novelty, sparsification, reliability    the plots, each as .png and .svg

    Repeat -k and --alpha for several values. Without classes, unknown inputs or a calibration, the parts that need them
    say so, and the others are there. What each number means: docs/metrics.md; what a SOURCE may be:
    contrastive-curvature fit --help.
    """  # noqa: D301
    from contrastive_curvature import report
    from contrastive_curvature.apps.cli.saved import open_posterior
    from contrastive_curvature.apps.cli.sources import open_source
    from contrastive_curvature.apps.report.folder import check_packages, check_target

    check_writable(out, check_target(out, f"--out {out}"))
    check_packages("jinja2", "matplotlib", "PIL")
    columns, device = take_columns(options), check_device(options["device"])
    paths = {"test": test, "unknown": unknown, "gallery": gallery}
    for path in paths.values():
        if path is not None:
            open_source(path, columns=columns)
    la, encoder = open_posterior(folder, options["encoder"], options["encoder_options"], device)
    opened = {name: open_source(path, encoder, columns) for name, path in paths.items() if path is not None}
    labels, names = _classes(opened)
    data = {name: _data(source, options["batch_size"], labels.get(name)) for name, source in opened.items()}
    found = report.evaluate(
        la,
        data["test"],
        unknown=data.get("unknown"),
        gallery=data.get("gallery"),
        ks=options["ks"],
        alphas=options["alphas"],
        n_samples=options["samples"],
        n_shown=options["shown"],
        class_names=names,
        progress_bar=console.progress,
    )
    files = found.save(out, title=title)
    written = {"files": {name: str(path) for name, path in files.items()}}
    values = {**written, **{name: value for name, value in found.to_plain().items() if name != "curves"}}
    console.result(values, *_lines(found), f"page: {files['report.html']}")


def _classes(opened: dict[str, Source]) -> tuple[dict[str, Tensor], list[str] | None]:
    """Labels of the sources that have classes, the same number for the same class, and the classes' names."""
    import numpy as np

    from contrastive_curvature.apps.cli.sources import shared_labels

    found = {name: source for name, source in opened.items() if name != "unknown" and source.classes is not None}
    if not found:
        return {}, None
    labels = dict(zip(found, shared_labels(*found.values()), strict=True))
    columns = [np.asarray(source.classes) for source in found.values()]
    texts = columns[0].dtype.kind not in "iu"
    return labels, [str(name) for name in np.unique(np.concatenate(columns))] if texts else None


def _data(source: Source, batch_size: int, labels: Tensor | None) -> Data:
    """Batches of a source, with what a person should see of each input."""
    from contrastive_curvature.apps.cli.source_files import ImageSource, TextSource
    from contrastive_curvature.apps.report import Data

    items: list[Any] | None = source.files if isinstance(source, ImageSource) else None
    if isinstance(source, TextSource):
        items = source.texts
    return Data(_Batches(source.loader(batch_size, labels=labels), labels is not None), items=items, ids=source.ids)


class _Batches:
    """Batches ``(x, labels)`` of a loader, or, where the source has no classes, ``(x,)``."""

    def __init__(self, loader: Any, labelled: bool) -> None:
        self._loader, self._labelled = loader, labelled

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for x, labels in self._loader:
            yield (x, labels) if self._labelled else (x,)


def _lines(found: Evaluation) -> list[str]:
    """The metrics for people, and what is missing."""
    lines = [f"{name:<24} {value:.4f}" for name, value in found.metrics.items()]
    return lines + [f"{name + ':':<24} not measured. {reason}" for name, reason in found.missing.items()]
