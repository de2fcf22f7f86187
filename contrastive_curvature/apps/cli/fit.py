"""``fit`` and ``update``: the encoder that a source is for, its posterior, its prior, its calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import BadInputError, Console, Result, printable
from contrastive_curvature.apps.cli.encoders import Encoder, check_device, encoder_of, last_layer_encoder
from contrastive_curvature.apps.cli.readers import read_arrays
from contrastive_curvature.apps.cli.retriever import named, printed
from contrastive_curvature.apps.cli.saved import check_target, open_posterior, write_posterior
from contrastive_curvature.apps.cli.sources import ArraySource, FeatureFolderSource, Loader, Source, shared_labels
from contrastive_curvature.io.pretrained import read_info
from contrastive_curvature.io.pretrained.posterior import KNOWN_LOSSES
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.retriever.retriever import Retriever

_RATES = ("wrong_answers", "false_matches", "false_alarms")

_UNIT = 1e-3
"""How far norms are from 1 that were rounded to half precision."""


def fit(
    console: Console,
    *,
    sources: Mapping[str, Source],
    out: Path,
    overwrite: bool,
    encoder: str | None,
    encoder_options: Mapping[str, Any],
    last_layer: Path | None,
    device: str,
    **options: Any,
) -> Result:
    """Fit a posterior or a retriever and write it; the other options are those of :func:`_posterior`."""
    train, known, held_out = sources["source"], sources.get("calibrate"), sources.get("held_out")
    check_target(out, overwrite=overwrite, retriever=held_out is not None)
    check_device(device)
    options["made_loss"] = _made_loss(options)
    labelled = {name: sources[name] for name in ("held_out", "gallery") if name in sources}
    for name, source in labelled.items():
        source.check_classes(f"--{name.replace('_', '-')}")
    (labels, *_), names = shared_labels(train, *labelled.values())
    rows, kept = _split(len(train), options["calibration_share"], options["seed"])
    made = _encoder_for(console, train, encoder, encoder_options, last_layer)
    made.module.to(device).eval()
    for source in sources.values():
        source.prepare(made)
    calibration = None if kept is None else Loader(train, options["batch_size"], kept)
    if known is not None:
        calibration = Loader(known, options["batch_size"])
    la = _posterior(console, made, Loader(train, options["batch_size"], rows, labels), options)
    if calibration is not None or held_out is None:
        _calibrate(console, la, calibration)
    made.classes = None if names is None else [_digest(name) for name in names]
    classes, count = len(np.unique(labels[rows])), 0 if calibration is None else len(calibration.dataset)
    words = (
        f"score {_name(out)} SOURCE --out scores.csv"
        if held_out is None
        else f"answer {_name(out)} SOURCE --out answers.csv"
    )
    usage = f"contrastive-curvature {words}"
    about = {
        "fitted_on": f"`{_name(train.path)}`: {len(rows)} inputs of {classes} classes",
        "notes": f"Fitted by the command line. `{usage}` uses it.",
    }
    fitted = la
    if held_out is not None:
        searched = sources.get("gallery", train)
        rates: dict[str, Any] = {name: None if options[name] == 1 else options[name] for name in _RATES}
        fitted = Retriever(la, **rates, confidence=options["confidence"])
        fitted.fit(
            gallery=named(searched, made, options["batch_size"]),
            held_out=named(held_out, made, options["batch_size"]),
            progress_bar=console.progress,
        )
    write_posterior(fitted, made, out, overwrite=overwrite, about=about)
    values = {
        "folder": str(out),
        "encoder": made.name,
        "inputs": len(rows),
        "classes": classes,
        "calibration_inputs": count,
        "dimension": int(la.n_outputs),
        "weights": int(la.n_params),
        "structure": la.hessian_structure,
        "prior_precision": float(la.prior_precision.flatten()[0]) if la.prior_precision.numel() == 1 else None,
        "temperature": float(la.temperature),
        "loss": float(la.loss),
    }
    first = f"{out}: posterior of {values['weights']:,} weights from {len(rows):,} inputs of {classes:,} classes"
    if held_out is not None:
        values |= {"gallery": len(searched), "held_out": len(held_out), "promise": repr(fitted)}
        return values, f"{first}; a gallery of {len(searched):,} points", printed(fitted)
    calibrated = f"calibrated with {count} inputs" if count else "not calibrated"
    return values, f"{first}, {calibrated}"


def update(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    out: Path,
    overwrite: bool,
    prior_strength: float | None,
    prior_precision: float | None,
    batch_size: int,
    **encoder: Any,
) -> Result:
    """Add inputs to a saved posterior and write it; ``encoder`` has the options of :func:`.open_posterior`."""
    check_target(out, overwrite=overwrite)
    la, made = open_posterior(folder, sources, **encoder, note=console.note)
    more, known = sources["source"], sources.get("calibrate")
    labels = _continued(more, made)
    earlier, info = la.n_data, read_info(folder)
    score = {} if known is None else _score_of(console, la)
    console.note(f"adding {len(more):,} inputs to {earlier:,}")
    # In a random order: sources that are sorted by class would give batches of one class.
    la.update(Loader(more, batch_size, labels=labels, seed=0), progress_bar=console.progress)
    _choose_prior(la, prior_precision, prior_strength)
    calibration = None if known is None else Loader(known, batch_size)
    _calibrate(console, la, calibration, **score)
    if info.match:
        console.warn(f"{folder}: its MatchProbability belongs to the earlier posterior and is left out. Fit it again.")
    fitted_on = f"`{_name(more.path)}`: {len(more)} inputs, added to {earlier} earlier ones"
    # The metrics were those of the earlier posterior.
    about = {**info.about, "fitted_on": fitted_on, "evaluated_on": None}
    write_posterior(la, made, out, overwrite=overwrite, about=about)
    count = 0 if known is None else len(known)
    values = {"folder": str(out), "added": len(more), "inputs": int(la.n_data), "calibration_inputs": count}
    calibrated = f"calibrated with {count} inputs" if count else "not calibrated"
    return values, f"{out}: posterior from {la.n_data:,} inputs, {len(more):,} of them new, {calibrated}"


def _score_of(console: Console, la: Any) -> dict[str, Any]:
    """Return the options of the calibration that a posterior has."""
    if la.known.calibration is None:
        return {}
    score = la.known.calibration.score
    if score.probe is None:
        return {"score": score.name, "by_class": score.by_class}
    console.warn(f"the posterior was calibrated for the function {score.name!r}, which no file holds: now for novelty.")
    return {"by_class": score.by_class}


def _continued(more: Source, made: Encoder) -> NDArray[np.int64]:
    """Return classes by the numbers that they have in the fit, new ones after them; ``made`` takes note of those."""
    (labels,), names = shared_labels(more)
    if made.classes is None:
        if names is not None:
            hint = "Class 3 is then class 3 of the fit, whatever its name."
            raise BadInputError(f"{more.path}", "the numbers that the classes have in the fit", "names", hint)
        return labels
    if names is None:
        numbers, labels = np.unique(labels, return_inverse=True)
        names = [str(number) for number in numbers]
    digests, known = [_digest(name) for name in names], set(made.classes)
    made.classes = [*made.classes, *(digest for digest in digests if digest not in known)]
    place = {digest: number for number, digest in enumerate(made.classes)}
    return np.array([place[digest] for digest in digests])[labels]


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _made_loss(options: Mapping[str, Any]) -> CosineLoss:
    """Return the loss of a name, as ``supcon``: one that labels and plain options describe."""
    if "loss" in options["curvature"]:
        raise BadInputError("--option loss", "the loss as --loss", "it here")
    name, given = options["loss"], dict(options["loss_option"])
    for short in ("margin", "temperature"):
        if options[short] is not None:
            if short in given:
                raise BadInputError(f"--{short}, --loss-option {short}", "one of them", "both")
            given[short] = options[short]
    losses = {key.removesuffix("Loss").lower(): kind for key, kind in KNOWN_LOSSES.items() if _needs_labels_alone(kind)}
    kind = losses.get(name.replace("-", ""))
    if kind is None:
        raise BadInputError("--loss", f"one of {', '.join(losses)}", name)
    strange = [option for option in given if option not in kind.arguments()]
    if strange:
        raise BadInputError(f"--loss {name}", f"options among {', '.join(kind.arguments())}", strange[0])
    return kind(**given)


def _needs_labels_alone(kind: type[CosineLoss]) -> bool:
    return kind.compares != "grades" and all(p.default is not p.empty for p in kind.arguments().values())


def _split(count: int, share: float | None, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the rows to fit, and those to calibrate with."""
    if share is None:
        return np.arange(count), None
    size = round(share * count)
    if size < 2 or count - size < 2:
        raise BadInputError(f"--calibration-share {share}", "two inputs on either side", f"{size} of {count}")
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


def _encoder_for(
    console: Console, train: Source, text: str | None, options: Mapping[str, Any], last_layer: Path | None
) -> Encoder:
    """Return the encoder that ``--encoder`` names, or the last layer that comes with features."""
    if last_layer is not None and (text is not None or not isinstance(train, FeatureFolderSource)):
        raise BadInputError("--last-layer", "it for a feature folder, without --encoder", "another use")
    if text is not None:
        return encoder_of(text, options)
    if options:
        raise BadInputError("--encoder-options", "them with --encoder", "no encoder")
    if isinstance(train, FeatureFolderSource):
        return _last_layer_of_folder(train, last_layer)
    if isinstance(train, ArraySource) and train.kind == "features":
        return _last_layer_of_arrays(console, train)
    hint = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."
    raise BadInputError(f"{train.path}", f"an encoder for {train.kind}", "none", hint)


def _last_layer_of_folder(train: FeatureFolderSource, last_layer: Path | None) -> Encoder:
    if last_layer is None:
        hint = "Give --last-layer FILE.npz with weight and bias, or --encoder module:function."
        wanted = "the last layer of the encoder of these features"
        raise BadInputError(f"{train.path}", wanted, "none", hint)
    arrays, _ = read_arrays(last_layer)
    argument, source = f"--last-layer {last_layer}", train.encoder_of
    if "weight" not in arrays:
        raise BadInputError(argument, "the arrays weight and bias", "no weight")
    if len(arrays["weight"]) != source.outputs:
        wanted = f"{source.outputs} outputs, as the encoder of {train.path} has"
        raise BadInputError(argument, wanted, f"{len(arrays['weight'])}")
    return last_layer_encoder(arrays["weight"], arrays.get("bias"), width=source.width, source=source)


def _last_layer_of_arrays(console: Console, train: ArraySource) -> Encoder:
    width = train.values.shape[1]
    if train.weight is not None:
        return last_layer_encoder(train.weight, train.bias, width=width)
    if train.name != "embeddings":
        hint = "Add them, or name the array embeddings if it holds the encoder's outputs."
        wanted = "weight (and bias, if there is one) beside features"
        raise BadInputError(f"{train.path}", wanted, "none", hint)
    unit = np.allclose(np.linalg.norm(train.values, axis=1), 1, atol=_UNIT)
    hint = " All of them have norm 1, so novelty cannot see a norm, which may help or harm: if you can, try both."
    console.warn(
        f"{train.path}: the embeddings are taken as features of a last layer that is the identity, which the library's "
        f"evaluation does not cover; with features, weight and bias it does.{hint if unit else ''}"
    )
    return last_layer_encoder(np.eye(width, dtype=np.float32), None, width=width, identity=True)


def _posterior(
    console: Console,
    encoder: Encoder,
    train: Loader,
    options: Mapping[str, Any],
) -> Any:
    """Fit, and choose the prior."""
    torch.manual_seed(options["seed"])
    structure, precision, strength = (options[name] for name in ("structure", "prior_precision", "prior_strength"))
    la: Any = Laplace(
        encoder.module,
        likelihood="contrastive",
        subset_of_weights=options["weights"],
        backend_kwargs={"loss": options["made_loss"], **options["curvature"]},
        **({} if structure is None else {"hessian_structure": structure}),
    )
    console.note(f"fitting on {len(train.dataset):,} inputs")
    # Candidates from the batch: sources that are sorted by class would give batches of one class.
    train.seed = None if la.curvature_options.over_dataset else options["seed"]
    la.fit(train, progress_bar=console.progress)
    _choose_prior(la, precision, strength)
    return la


def _choose_prior(la: Any, precision: float | None, strength: float | None) -> None:
    if precision is None:
        la.optimize_prior_precision(**({} if strength is None else {"strength": strength}))
    else:
        la.prior_precision = precision


def _calibrate(console: Console, la: Any, calibration: Loader | None, **score: Any) -> None:
    if calibration is None:
        console.warn(
            "no calibration data: score will have no novelty and no p-value. Give --calibrate SOURCE with inputs that "
            "the encoder was not trained on, or to fit --calibration-share 0.2."
        )
        return
    console.note(f"calibrating with {len(calibration.dataset):,} inputs")
    la.calibrate(calibration, progress_bar=console.progress, **score)


def _name(path: Path) -> str:
    """Return the name of a file or folder as code in the model card, where it must not end the code or the line."""
    return printable(path.resolve().name).replace("`", "") or "data"
