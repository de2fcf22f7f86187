"""What ``fit`` computes: the posterior, its prior, its calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import Console
from contrastive_curvature.apps.cli.encoders import Encoder
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.sources import Columns, Source, open_source
from contrastive_curvature.errors import expected
from contrastive_curvature.io.pretrained.losses import KNOWN
from contrastive_curvature.losses import RowLoss
from contrastive_curvature.losses.cosine import CosineLoss

__all__ = ["check_options", "fit_posterior"]


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that exclude each other or have no effect, and make the loss: ``options["made_loss"]``.

    Raises:
        BadInputError: There are such options.
        InputError: A number is out of range.
    """
    if options["calibration"] is not None and options["calibration_share"] is not None:
        raise BadInputError(expected("--calibrate, --calibration-share", "one of them", "both"))
    if options["prior_strength"] is not None and options["prior_precision"] is not None:
        raise BadInputError(expected("--prior-strength, --prior-precision", "one of them", "both"))
    for name in ("prior_strength", "prior_precision"):
        value = options[name]
        if value is not None and not 0 < value < float("inf"):
            raise BadInputError(expected(f"--{name.replace('_', '-')}", "a number > 0", f"{value}"))
    given = dict(options["loss_option"])
    for name in ("margin", "temperature"):
        if options[name] is not None:
            if name in given:
                raise BadInputError(expected(f"--{name}, --loss-option {name}", "one of them", "both"))
            given[name] = options[name]
    if "loss" in options["curvature"]:
        raise BadInputError(expected("--option loss", "the loss as --loss", "it here"))
    options["made_loss"] = _made_loss(options["loss"], given)


def _made_loss(name: str, options: dict[str, Any]) -> Any:
    """The loss of a name, as ``supcon``: those that labels and plain options describe."""
    known = {key.removesuffix("Loss").lower(): kind for key, kind in KNOWN.items() if _needs_labels_alone(kind)}
    kind = known.get(name.replace("-", ""))
    if kind is None:
        raise BadInputError(expected("--loss", f"one of {', '.join(known)}", name))
    strange = [option for option in options if option not in kind.arguments()]
    if strange:
        raise BadInputError(expected(f"--loss {name}", f"options among {', '.join(kind.arguments())}", strange[0]))
    return kind(**options)


def _needs_labels_alone(kind: type[CosineLoss]) -> bool:
    return not kind.graded and all(p.default is not p.empty for p in kind.arguments().values())


def fit_posterior(
    console: Console, encoder: Encoder, source: Source, columns: Columns, options: dict[str, Any]
) -> tuple[Any, NDArray[np.int64], int]:
    """Fit, choose the prior, calibrate.

    Args:
        console: For notes and warnings.
        encoder: On its device.
        source: Training data.
        columns: Of a calibration table.
        options: Of the command, seen by :func:`check_options`.

    Returns:
        The posterior, the rows that it was fitted on, and the number of calibration inputs.

    Raises:
        BadInputError: The calibration data are malformed, or too few are left.
        ContrastiveCurvatureError: The library refuses the data or a combination of options.
    """
    torch.manual_seed(options["seed"])
    rows, held_out = _split(len(source), options["calibration_share"], options["seed"])
    known = _calibration_loader(encoder, source, held_out, columns, options)
    la: Any = Laplace(
        encoder.module,
        likelihood="contrastive",
        subset_of_weights=options["weights"],
        backend_kwargs={"loss": options["made_loss"], **options["curvature"]},
        **({} if options["structure"] is None else {"hessian_structure": options["structure"]}),
        **({} if options["prior_precision"] is None else {"prior_precision": options["prior_precision"]}),
    )
    console.note(f"fitting on {len(rows):,} inputs")
    # Candidates from the batch: sources that are sorted by class would give batches of one class.
    seed = options["seed"] if _takes_pairs_of_a_batch(options) else None
    la.fit(source.loader(options["batch_size"], rows, seed=seed), progress_bar=console.progress)
    if options["prior_precision"] is None:
        strength = options["prior_strength"]
        la.optimize_prior_precision(**({} if strength is None else {"strength": strength}))
    if known is None:
        console.warn(
            "no calibration data: score will have no novelty and no p-value. Give --calibrate SOURCE with inputs that "
            "the encoder was not trained on, or --calibration-share 0.2."
        )
        return la, rows, 0
    console.note(f"calibrating with {len(known.rows):,} inputs")
    la.calibrate(known, progress_bar=console.progress)
    return la, rows, len(known.rows)


def _takes_pairs_of_a_batch(options: dict[str, Any]) -> bool:
    given = options["curvature"]
    if isinstance(options["made_loss"], RowLoss):
        return given.get("candidates") != "dataset"
    return given.get("pairs") == "batch"


def _split(count: int, share: float | None, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    if share is None:
        return np.arange(count), None
    size = round(share * count)
    if size < 2 or count - size < 2:
        raise BadInputError(expected(f"--calibration-share {share}", "two inputs on either side", f"{size} of {count}"))
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


def _calibration_loader(
    encoder: Encoder, source: Source, held_out: NDArray[np.int64] | None, columns: Columns, options: dict[str, Any]
) -> Any:
    path: Path | None = options["calibration"]
    if held_out is not None:
        return source.loader(options["batch_size"], held_out)
    if path is None:
        return None
    return open_source(path, encoder, columns).loader(options["batch_size"])
