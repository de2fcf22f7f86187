"""``score``: what a posterior says of inputs, to CSV or Parquet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from contrastive_curvature.apps.cli.console import Console, common_options
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.options import (
    PATH,
    SHARE,
    check_device,
    computing_options,
    source_options,
    take_columns,
)
from contrastive_curvature.errors import expected

__all__ = ["is_calibrated", "number_type", "score"]

_ALPHA = 0.01


@click.command(epilog="Example: contrastive-curvature score posterior new.npz --out scores.csv --alpha 0.05")
@click.argument("folder", type=PATH)
@click.argument("source", type=PATH)
@click.option("--out", type=PATH, required=True, help="File that is written: .csv or .parquet.")
@click.option("--mu/--no-mu", default=True, show_default=True, help="Whether the embedding itself is written.")
@click.option(
    "--alpha",
    type=SHARE,
    help="Share of known inputs that may be flagged as unknown, in the column known (default: 0.01).",
)
@source_options
@computing_options
@common_options
def score(
    console: Console, folder: Path, source: Path, out: Path, mu: bool, alpha: float | None, **options: Any
) -> None:
    """Write what the posterior in FOLDER says of the inputs SOURCE.

    \b
    id               name of the image in its folder, number of the row, or the identifiers that SOURCE has
    mu_0, mu_1, ...  the embedding, of norm 1
    kappa            its concentration
    uncertainty      how far it may turn, in radians; rank inputs by it
    novelty          how unlike the known inputs it is; rank unknown inputs by it
    p_value          share of known inputs that are at least as unlike them
    known            p_value > alpha

    The last three need a posterior that was calibrated, and are left out otherwise. Inputs are read and written in
    batches. SOURCE needs no classes; what it may be: contrastive-curvature fit --help.
    """  # noqa: D301
    from contrastive_curvature.apps.cli.outputs import check_output, write_table
    from contrastive_curvature.apps.cli.saved import open_posterior
    from contrastive_curvature.apps.cli.sources import open_source
    from contrastive_curvature.apps.cli.texts import readable
    from contrastive_curvature.progress import Progress

    check_output(out, source)
    columns, device = take_columns(options), check_device(options["device"])
    open_source(source, columns=columns)
    la, encoder = open_posterior(folder, options["encoder"], options["encoder_options"], device, console.note)
    opened = open_source(source, encoder, columns)
    calibrated = is_calibrated(la)
    alpha = _checked_alpha(console, folder, alpha) if calibrated else None
    flagged: list[int] = []

    def rows() -> Iterator[Mapping[str, Sequence[Any]]]:
        done = 0
        for x, _ in Progress(console.progress).over(opened.loader(options["batch_size"]), "[score]"):
            part = _scores(la(x), mu=mu, calibrated=calibrated, alpha=alpha)
            n = len(part["kappa"])
            flagged.append(0 if alpha is None else n - int(part["known"].sum()))
            yield {"id": opened.ids[done : done + n], **part}
            done += n

    if not calibrated:
        console.warn(
            f"{folder}: this posterior is not calibrated, so novelty, p_value and known are left out. Fit it with "
            "--calibrate SOURCE or --calibration-share 0.2."
        )
    write_table(out, lambda: _table(la, mu, calibrated, alpha, rows()))
    values: dict[str, Any] = {"file": str(out), "inputs": len(opened), "calibrated": calibrated}
    line = f"{readable(str(out))}: {len(opened):,} inputs"
    if alpha is not None:
        values |= {"alpha": alpha, "unknown": sum(flagged)}
        line += f", {sum(flagged):,} of them unknown (p-value at most {alpha:g})"
    console.result(values, line)


def is_calibrated(la: Any) -> bool:
    """Whether predictions of a saved posterior have p-values."""
    return la.known.calibration is not None


def _checked_alpha(console: Console, folder: Path, given: float | None) -> float | None:
    """The share that the calibration inputs are enough for; ``None`` where they are too few for the default."""
    from contrastive_curvature.io.pretrained import read_info

    count = read_info(folder).posteriors[0].n_calibration
    least = 1 / ((count or 0) + 1)
    alpha = _ALPHA if given is None else given
    if alpha >= least:
        return alpha
    hint = f"Fit with at least {math.ceil(1 / alpha) - 1:,} calibration inputs, or give a larger --alpha."
    wanted = f"at least {least:.4g}, the smallest p-value that {count} calibration inputs give"
    if given is not None:
        raise BadInputError(expected("--alpha", wanted, f"{alpha:g}", hint))
    console.warn(expected("--alpha", wanted, f"the default {alpha:g}", f"The column known is left out. {hint}"))
    return None


def number_type(la: Any) -> str:
    """Type of the columns whose numbers have the encoder's precision."""
    return "float64" if str(la._dtype) == "torch.float64" else "float32"


def _table(
    la: Any, mu: bool, calibrated: bool, alpha: float | None, parts: Iterator[Mapping[str, Sequence[Any]]]
) -> Any:
    from contrastive_curvature.apps.cli.outputs import Table

    types, number = {"id": "text"}, number_type(la)
    if mu:
        types |= {f"mu_{axis}": number for axis in range(la.n_outputs)}
    types |= {"kappa": number, "uncertainty": number}
    if calibrated:
        types |= {"novelty": "float64", "p_value": "float64"}
    if alpha is not None:
        types["known"] = "bool"
    return Table(types, parts)


def _scores(predicted: Any, *, mu: bool, calibrated: bool, alpha: float | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if mu:
        out |= {f"mu_{axis}": column for axis, column in enumerate(predicted.mu.detach().cpu().T.numpy())}
    names = ["kappa", "uncertainty"] + (["novelty", "p_value"] if calibrated else [])
    out |= {name: getattr(predicted, name).detach().cpu().numpy() for name in names}
    if alpha is not None:
        out["known"] = predicted.is_known(alpha).cpu().numpy()
    return out
