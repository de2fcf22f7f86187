"""``score``: what a posterior says of inputs, to CSV or Parquet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.cli.console import BadInputError, Console, Result, readable
from contrastive_curvature.apps.cli.outputs import check_output, write_table
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source
from contrastive_curvature.progress import Progress

_ALPHA = 0.01


def score(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    out: Path,
    mu: bool,
    alpha: float | None,
    batch_size: int,
    **encoder: Any,
) -> Result:
    """Write the scores; ``encoder`` has the options of :func:`.open_posterior`."""
    check_output(out, sources.values())
    la, _ = open_posterior(folder, sources, **encoder, note=console.note)
    source, calibration = sources["source"], la.known.calibration
    if calibration is None:
        alpha = None
        console.warn(
            f"{folder}: this posterior is not calibrated, so novelty, p_value and known are left out. Calibrate it: "
            f"contrastive-curvature calibrate {folder} SOURCE."
        )
    else:
        alpha = _checked_alpha(calibration.reference.fewest, alpha)
    batches = Progress(console.progress).over(Loader(source, batch_size), "[score]")
    parts = (
        {"id": source.ids[start : start + batch_size], **_scores(la(x), mu=mu, alpha=alpha)}
        for start, (x,) in zip(range(0, len(source), batch_size), batches, strict=True)
    )
    known = write_table(out, parts)["known"]
    values: dict[str, Any] = {"file": str(out), "inputs": len(source), "calibrated": calibration is not None}
    line = f"{readable(str(out))}: {len(source):,} inputs"
    if alpha is not None:
        unknown = len(source) - known
        values |= {"alpha": alpha, "unknown": unknown}
        line += f", {unknown:,} of them unknown (p-value at most {alpha:g})"
    return values, line


def _checked_alpha(count: int, given: float | None) -> float:
    """Return the share, the default if none is given; refuse one that takes more calibration inputs."""
    least = 1 / (count + 1)
    alpha = _ALPHA if given is None else given
    if alpha >= least:
        return alpha
    hint = f"Calibrate with at least {math.ceil(1 / alpha) - 1:,} inputs, or give a larger --alpha."
    wanted = f"at least {least:.4g}, the smallest p-value that {count} calibration inputs give"
    raise BadInputError("--alpha", wanted, f"{'the default ' if given is None else ''}{alpha:g}", hint)


def _scores(predicted: Any, *, mu: bool, alpha: float | None) -> dict[str, Any]:
    """Return the columns of a batch; with ``alpha``, those of a calibrated posterior too."""
    scores: dict[str, Any] = {}
    if mu:
        scores |= {f"mu_{axis}": column for axis, column in enumerate(predicted.mu.detach().cpu().T.numpy())}
    names = ["kappa", "uncertainty"] + ([] if alpha is None else ["novelty", "p_value"])
    scores |= {name: getattr(predicted, name).detach().cpu().numpy() for name in names}
    if alpha is not None:
        scores["known"] = predicted.is_known(alpha).cpu().numpy()
    return scores
