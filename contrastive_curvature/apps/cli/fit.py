"""``fit``: a posterior from a source, saved in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from contrastive_curvature.apps.cli.console import Console, common_options
from contrastive_curvature.apps.cli.errors import printable
from contrastive_curvature.apps.cli.options import (
    PATH,
    SHARE,
    check_device,
    computing_options,
    key_values,
    source_options,
    take_columns,
)

__all__ = ["fit"]


@click.command(
    epilog="Example: contrastive-curvature fit train.npz --out posterior --calibrate validation.npz --loss supcon"
)
@click.argument("source", type=PATH)
@click.option("--out", "folder", type=PATH, required=True, help="Folder of the posterior; it is made.")
@click.option("--overwrite", is_flag=True, help="Replace a saved posterior in that folder; other files in it stay.")
@click.option("--last-layer", type=PATH, help="An .npz with weight (D, F) and bias (D,), for a feature folder.")
@click.option("--calibrate", "calibration", type=PATH, help="Inputs that the encoder was not trained on: p-values.")
@click.option(
    "--calibration-share",
    type=SHARE,
    help="Calibrate with this share of SOURCE, which is then left out of the fit.",
)
@click.option(
    "--loss",
    default="contrastive",
    show_default=True,
    help="A loss of the library that needs labels only, as infonce, supcon, siglip, triplet or logistic.",
)
@click.option("--margin", type=float, help="Of the losses contrastive and triplet (defaults 0.7 and 0.2).")
@click.option("--temperature", type=float, help="Of the losses infonce and supcon.")
@click.option("--loss-option", multiple=True, metavar="NAME=VALUE", help="Another argument of the loss; repeatable.")
@click.option(
    "--weights",
    type=click.Choice(["last_layer", "all"]),
    default="last_layer",
    show_default=True,
    help="Which weights get a posterior.",
)
@click.option(
    "--structure",
    type=click.Choice(["kron_lowrank", "diag", "kron", "full", "lowrank"]),
    help="Of the posterior's precision (default: kron_lowrank for the last layer, kron for all weights).",
)
@click.option(
    "--prior-strength",
    type=float,
    help="Prior precision as a multiple of the mean curvature (default: 0.01, see docs/defaults.md).",
)
@click.option("--prior-precision", type=float, help="Prior precision itself, in place of --prior-strength.")
@click.option("--option", "curvature", multiple=True, metavar="NAME=VALUE", help="Another entry of backend_kwargs.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of every random choice.")
@source_options
@computing_options
@common_options
def fit(console: Console, source: Path, folder: Path, **options: Any) -> None:
    """Fit a posterior to a trained encoder with its training data SOURCE, and save it.

    SOURCE is one of:

    \b
    .npz           features (N, F) and labels (N,), with weight (D, F) and bias (D,) of the encoder's last layer
    .npz           embeddings (N, D) and labels (N,), where nothing of the encoder is known (see below)
    .npz           inputs (N, ...) and labels (N,), with --encoder
    feature folder what contrastive_curvature.features wrote, with --last-layer or --encoder
    image folder   one folder of images for each class, with --encoder
    .csv, .jsonl   columns text and label, with --encoder

    The features are what the last linear layer takes in; the embedding is features @ weight.T + bias. Give them where
    you can: this is what docs/transfer.md evaluates. Embeddings alone are taken as the features of a last layer that is
    the identity. That was not evaluated there: compare it on your own data before you rely on it.

    The losses infonce, supcon, siglip, multi-similarity and triplet compare an input with those of its batch, in a
    random order: give the --batch-size of the encoder's training. All others count all pairs of the data.

    --encoder module:function runs your own code, and only that. Give it again to score, search and evaluate.
    """  # noqa: D301
    from contrastive_curvature.apps.cli.fit_source import encoder_and_source
    from contrastive_curvature.apps.cli.fitting import check_options, fit_posterior
    from contrastive_curvature.apps.cli.saved import check_target, write_posterior

    overwrite = options.pop("overwrite")
    check_target(folder, overwrite=overwrite)
    columns, device = take_columns(options), check_device(options.pop("device"))
    text, given, last_layer = (options.pop(name) for name in ("encoder", "encoder_options", "last_layer"))
    options["loss_option"] = key_values("--loss-option", options["loss_option"])
    options["curvature"] = key_values("--option", options["curvature"])
    check_options(options)
    encoder, train = encoder_and_source(console, source, text, given, last_layer, columns)
    encoder.module.to(device).eval()
    la, rows, count = fit_posterior(console, encoder, train, columns, options)
    labels = train.need_labels("SOURCE")[rows]
    classes = len(labels.unique())
    about = {"fitted_on": f"`{_name(source)}`: {len(rows)} inputs of {classes} classes", "notes": _usage(folder)}
    write_posterior(la, encoder, folder, overwrite=overwrite, about=about)
    values = {
        "folder": str(folder),
        "encoder": encoder.name,
        "inputs": len(rows),
        "classes": classes,
        "calibration_inputs": count,
        "dimension": int(la.n_outputs),
        "weights": int(la.n_params),
        "structure": la._key[1],
        "prior_precision": float(la.prior_precision.flatten()[0]) if la.prior_precision.numel() == 1 else None,
        "temperature": float(la.temperature),
        "loss": float(la.loss),
    }
    known = f"calibrated with {count} inputs" if count else "not calibrated"
    first = f"{folder}: posterior of {values['weights']:,} weights from {len(rows):,} inputs of {classes:,} classes"
    console.result(values, f"{first}, {known}")


def _name(path: Path) -> str:
    """The name of a file or folder as code in the model card, where it must not end the code or the line."""
    name = printable(path.resolve().name.encode("utf-8", "replace").decode())
    return name.replace("`", "") or "data"


def _usage(folder: Path) -> str:
    command = f"contrastive-curvature score {_name(folder)} SOURCE --out scores.csv"
    return f"Fitted by the command line. `{command}` uses it."
