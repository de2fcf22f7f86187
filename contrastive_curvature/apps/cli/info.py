"""``info``: what is in a saved posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contrastive_curvature.apps.cli.console import Console, Result
from contrastive_curvature.apps.cli.saved import read_encoder
from contrastive_curvature.io.pretrained import read_info


def info(_: Console, *, folder: Path) -> Result:
    """Return what is in a saved posterior."""
    found, spec = read_info(folder), read_encoder(folder)[0]
    encoder = _encoder(spec)
    values = {**found.to_plain(), "encoder": encoder}
    lines = [str(folder)]
    for one in found.posteriors:
        lines += [
            f"  posterior     {one.name}: {one.hessian_structure} of {one.n_params:,} weights, {one.subset_of_weights}",
            f"  dimension     {one.n_outputs}",
            f"  fitted on     {one.n_data:,} inputs"
            + ("" if one.n_classes is None else f", {one.n_classes:,} classes"),
            f"  loss          {one.loss}",
            f"  prior         precision {_prior(one)}, temperature {one.temperature:.4g}",
            "  p-values      "
            + (f"of {one.score}, from {one.n_calibration:,} inputs" if one.calibrated else "not calibrated"),
        ]
    lines += [f"  P(match)      {'saved' if found.match else 'not saved; search --validation learns it'}"]
    lines += [f"  {name:<13} {value}" for name, value in found.metrics.items()]
    lines += [f"  encoder       {encoder or 'not named: give --encoder to score and search'}"]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines += [f"  written by    {versions}; format {found.format_version}, {found.size:,} bytes"]
    return values, *lines


def _encoder(spec: dict[str, Any] | None) -> str | None:
    if spec is None:
        return None
    if spec["encoder"] is None:
        return "identity, for embeddings" if spec["identity"] else "last layer, for features"
    return str(spec["encoder"])


def _prior(one: Any) -> str:
    if one.prior_precision is not None:
        return f"{one.prior_precision:.4g}"
    count, least, most = one.prior_precisions
    return f"{least:.4g} to {most:.4g} ({count:,} of them)"
