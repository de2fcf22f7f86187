"""``calibrate``: p-values of a saved posterior relative to other known inputs, without a fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.cli.console import Console, Result, readable
from contrastive_curvature.apps.cli.saved import check_target, open_posterior, write_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source
from contrastive_curvature.io.pretrained import load_match, read_info


def calibrate(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    out: Path | None,
    overwrite: bool,
    score: str,
    by_class: bool,
    batch_size: int,
    **encoder: Any,
) -> Result:
    """Calibrate, and write the posterior; ``encoder`` has the options of :func:`.open_posterior`."""
    target = folder if out is None else out
    overwrite = overwrite or out is None
    check_target(target, overwrite=overwrite)
    la, made = open_posterior(folder, sources, **encoder, note=console.note)
    known = sources["source"]
    la.calibrate(Loader(known, batch_size), progress_bar=console.progress, score=score, by_class=by_class)
    info = read_info(folder)
    # Shares that were flagged with the earlier calibration say nothing of this one.
    metrics = {name: value for name, value in info.metrics.items() if not name.startswith("flagged_")}
    match = load_match(folder) if info.match else None
    write_posterior(la, made, target, overwrite=overwrite, about={**info.about, "metrics": metrics, "match": match})
    fewest = la.known.calibration.reference.fewest
    least = 1 / (fewest + 1)
    about = {"score": score, "by_class": by_class, "smallest_alpha": least}
    values = {"folder": str(target), "inputs": len(known), **about}
    line = f"{readable(str(target))}: calibrated with {len(known):,} inputs, score {la.known.calibration.score}"
    return values, f"{line}; smallest alpha {least:.4g}"
