"""``fit``, ``update``, ``calibrate`` and ``add``: commands that write the folder of a posterior or a retriever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.console import Console, Job, Result, printable
from contrastive_curvature.apps.cli.encoders import Encoder, check_device, encoder_for, use
from contrastive_curvature.apps.cli.saved import check_target, opened, opened_retriever, write_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source, shared_labels
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained import load_match, read_info
from contrastive_curvature.io.pretrained.save import KNOWN_LOSSES
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.progress import Progress
from contrastive_curvature.retriever.retriever import Retriever
from contrastive_curvature.retriever.saved import POSTERIOR

_RATES = ("wrong_answers", "false_matches", "false_alarms")

_NOT_OF_A_HEAD = {
    "loss": "contrastive",
    "loss_option": (),
    "weights": "last_layer",
    "structure": None,
    "prior_strength": None,
    "option": (),
    "calibrate": None,
    "calibration_share": None,
}
"""Defaults of the options of a posterior that ``--head`` fits itself."""


def fit(job: Job) -> Result:
    """Fit a posterior or a retriever, and write it."""
    o, console, sources = job.options, job.console, job.sources
    train, known, held_out = sources["source"], sources.get("calibrate"), sources.get("held_out")
    if known is not None and o.calibration_share is not None:
        raise InputError("--calibrate, --calibration-share", "one of them", "both")
    if held_out is None and "gallery" in sources:
        raise InputError("--gallery", "it with --held-out", "it alone")
    if o.head:
        other = [name for name, default in _NOT_OF_A_HEAD.items() if vars(o)[name] != default]
        if held_out is None or other:
            received = f"--{other[0].replace('_', '-')}" if other else "no --held-out"
            raise InputError("--head", "--held-out, and no option of the posterior or its calibration", received)
    check_target(o.out, overwrite=o.overwrite, retriever=held_out is not None)
    check_device(o.device)
    loss = _loss(o.loss, dict(o.loss_option))
    (labels, *_), names = shared_labels(*(s for name, s in sources.items() if name != "calibrate"))
    rows, kept = _split(len(train), o.calibration_share, o.seed)
    encoder = encoder_for(console, train, o.encoder, o.encoder_options, o.last_layer)
    encoder.classes = None if names is None else [_digest(name) for name in names]
    use(encoder, sources, o.device)

    torch.manual_seed(o.seed)
    calibration = None if kept is None else Loader(train, o.batch_size, kept)
    if known is not None:
        calibration = Loader(known, o.batch_size)
    console.note(f"fitting on {len(rows):,} inputs")
    if o.head:
        fitted: Any = _retriever(job, encoder, encoder.module)
        la = fitted.la
    else:
        structure = {} if o.structure is None else {"hessian_structure": o.structure}
        backend = {"loss": loss, **dict(o.option)}
        la = Laplace(encoder.module, "contrastive", subset_of_weights=o.weights, backend_kwargs=backend, **structure)
        # A random order for losses that compare within a batch, because sources sorted by class would give batches of
        # one class.
        seed = None if la.curvature_options.over_dataset else o.seed
        la.fit(Loader(train, o.batch_size, rows, labels, seed), progress_bar=console.progress)
        _choose_prior(la, o.prior_strength)
        if calibration is not None or held_out is None:
            _calibrate(console, la, calibration)
        fitted = la if held_out is None else _retriever(job, encoder, la)

    classes, count = len(np.unique(labels[rows])), 0 if calibration is None else len(calibration.dataset)
    words = f"score {_name(o.out)} SOURCE --out scores.csv"
    if held_out is not None:
        words = f"answer {_name(o.out)} SOURCE --out answers.csv"
    about = {
        "fitted_on": f"`{_name(train.path)}`: {len(rows)} inputs of {classes} classes",
        "notes": f"Fitted by the command line. `contrastive-curvature {words}` uses it.",
    }
    write_posterior(fitted, encoder, o.out, overwrite=o.overwrite, about=about)
    values = {
        "folder": str(o.out),
        "encoder": encoder.name,
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
    first = f"{o.out}: posterior of {values['weights']:,} weights from {len(rows):,} inputs of {classes:,} classes"
    if held_out is None:
        return values, f"{first}, {_calibrated(count)}"
    gallery = sources.get("gallery", train)
    values |= {"gallery": len(gallery), "held_out": len(held_out), "promise": repr(fitted)}
    return values, f"{first}; a gallery of {len(gallery):,} points", f"promised: {fitted!r}"


def update(job: Job) -> Result:
    """Add inputs to a saved posterior, and write it."""
    o, console = job.options, job.console
    check_target(o.out, overwrite=o.overwrite)
    la, encoder = opened(job)
    more, known = job.sources["source"], job.sources.get("calibrate")
    labels = _continued(more, encoder)
    earlier, info = la.n_data, read_info(o.folder)
    score = {} if known is None else _score_of(console, la)
    console.note(f"adding {len(more):,} inputs to {earlier:,}")
    # In a random order, because sources sorted by class would give batches of one class.
    la.update(Loader(more, o.batch_size, labels=labels, seed=0), progress_bar=console.progress)
    _choose_prior(la, o.prior_strength)
    _calibrate(console, la, None if known is None else Loader(known, o.batch_size), **score)
    if info.match:
        console.warn(f"{o.folder}: its MatchProbability is of the earlier posterior and is left out. Fit it again.")
    fitted_on = f"`{_name(more.path)}`: {len(more)} inputs, added to {earlier} earlier ones"
    # The metrics belonged to the earlier posterior.
    about = {**info.about, "fitted_on": fitted_on, "evaluated_on": None}
    write_posterior(la, encoder, o.out, overwrite=o.overwrite, about=about)
    count = 0 if known is None else len(known)
    values = {"folder": str(o.out), "added": len(more), "inputs": int(la.n_data), "calibration_inputs": count}
    return values, f"{o.out}: posterior from {la.n_data:,} inputs, {len(more):,} of them new, {_calibrated(count)}"


def calibrate(job: Job) -> Result:
    """Calibrate a saved posterior relative to other known inputs, without a fit, and write it."""
    o, known = job.options, job.sources["source"]
    target, overwrite = o.out or o.folder, o.overwrite or o.out is None
    check_target(target, overwrite=overwrite)
    la, encoder = opened(job)
    loader = Loader(known, o.batch_size)
    la.calibrate(loader, progress_bar=job.console.progress, score=o.score, by_class=o.by_class)
    info = read_info(o.folder)
    # Drop the shares that were flagged with the earlier calibration.
    metrics = {name: value for name, value in info.metrics.items() if not name.startswith("flagged_")}
    match = load_match(o.folder) if info.match else None
    about = {**info.about, "metrics": metrics, "match": match}
    write_posterior(la, encoder, target, overwrite=overwrite, about=about)
    least = 1 / (la.known.calibration.reference.fewest + 1)
    values = {"folder": str(target), "inputs": len(known), "score": o.score, "by_class": o.by_class}
    line = f"{target}: calibrated with {len(known):,} inputs, score {la.known.calibration.score}"
    return {**values, "smallest_alpha": least}, f"{line}; smallest alpha {least:.4g}"


def add(job: Job) -> Result:
    """Add inputs to the gallery of a saved retriever, and write it."""
    o, source = job.options, job.sources["source"]
    target, overwrite = o.out or o.folder, o.overwrite or o.out is None
    check_target(target, overwrite=overwrite, retriever=True)
    retriever, encoder = opened_retriever(job)
    loader = Progress(job.console.progress).over(named(source, encoder, o.batch_size), "[add]")
    added = retriever.add(loader)
    about = read_info(o.folder / POSTERIOR).about
    write_posterior(retriever, encoder, target, overwrite=overwrite, about=about)
    first, last = int(added[0]), int(added[-1])
    values = {"folder": str(target), "added": len(added), "first": first, "last": last, "promise": repr(retriever)}
    line = f"{target}: {len(added):,} points added to the gallery, identifiers {first} to {last}"
    return values, line, f"promised: {retriever!r}"


def _retriever(job: Job, encoder: Encoder, module: Any) -> Retriever:
    """Return the retriever of an encoder or a fitted posterior, with a head where ``--head`` asks for it."""
    o, sources = job.options, job.sources
    rates: dict[str, Any] = {name: None if vars(o)[name] == 1 else vars(o)[name] for name in _RATES}
    retriever = Retriever(module, **rates, confidence=o.confidence, head=o.head)
    loaders = {name: named(source, encoder, o.batch_size) for name, source in sources.items() if name != "calibrate"}
    gallery = loaders.get("gallery", None if o.head else loaders["source"])
    train = loaders["source"] if o.head else None
    return retriever.fit(train, held_out=loaders["held_out"], gallery=gallery, progress_bar=job.console.progress)


def named(source: Source, encoder: Encoder, batch_size: int) -> Loader:
    """Return batches with classes in the retriever's form: the numbers of the fit, or texts if the fit had texts."""
    assert source.classes is not None
    if encoder.classes is not None:
        return Loader(source, batch_size, labels=source.classes.astype(str))
    if source.classes.dtype.kind not in "iu":
        raise InputError(f"{source.path}", "the numbers that the classes have in the fit", "names")
    return Loader(source, batch_size, labels=source.classes)


def _continued(more: Source, encoder: Encoder) -> NDArray[np.int64]:
    """Return classes by the numbers of the fit; new classes follow, and the encoder also keeps their digests."""
    (labels,), names = shared_labels(more)
    if encoder.classes is None:
        if names is not None:
            hint = "Class 3 is then class 3 of the fit, whatever its name."
            raise InputError(f"{more.path}", "the numbers that the classes have in the fit", "names", hint)
        return labels
    if names is None:
        numbers, labels = np.unique(labels, return_inverse=True)
        names = [str(number) for number in numbers]
    digests = [_digest(name) for name in names]
    encoder.classes = list(dict.fromkeys([*encoder.classes, *digests]))
    return np.array([encoder.classes.index(digest) for digest in digests])[labels]


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _loss(name: str, options: Mapping[str, Any]) -> CosineLoss:
    """Return the loss with this name, such as ``supcon``; only losses with labels and plain options."""
    losses = {
        key.removesuffix("Loss").lower(): kind
        for key, kind in KNOWN_LOSSES.items()
        if kind.compares != "grades" and all(p.default is not p.empty for p in kind.arguments().values())
    }
    kind = losses.get(name.replace("-", ""))
    if kind is None:
        raise InputError("--loss", f"one of {', '.join(losses)}", name)
    strange = [option for option in options if option not in kind.arguments()]
    if strange:
        raise InputError("--loss-option", f"one of {', '.join(kind.arguments())} for {name}", strange[0])
    return kind(**options)


def _split(count: int, share: float | None, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the rows to fit and the rows to calibrate with."""
    if share is None:
        return np.arange(count), None
    size = round(share * count)
    if size < 2 or count - size < 2:
        raise InputError(f"--calibration-share {share}", "two inputs on either side", f"{size} of {count}")
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


def _choose_prior(la: Any, strength: float | None) -> None:
    la.optimize_prior_precision(**({} if strength is None else {"strength": strength}))


def _score_of(console: Console, la: Any) -> dict[str, Any]:
    """Return the options of a posterior's calibration."""
    if la.known.calibration is None:
        return {}
    score = la.known.calibration.score
    if score.probe is None:
        return {"score": score.name, "by_class": score.by_class}
    console.warn(f"the posterior was calibrated for the function {score.name!r}, which no file holds: now for novelty.")
    return {"by_class": score.by_class}


def _calibrate(console: Console, la: Any, calibration: Loader | None, **score: Any) -> None:
    if calibration is None:
        console.warn(
            "no calibration data: score will have no novelty and no p-value. Give --calibrate SOURCE with inputs that "
            "the encoder was not trained on, or to fit --calibration-share 0.2."
        )
        return
    console.note(f"calibrating with {len(calibration.dataset):,} inputs")
    la.calibrate(calibration, progress_bar=console.progress, **score)


def _calibrated(count: int) -> str:
    return f"calibrated with {count} inputs" if count else "not calibrated"


def _name(path: Path) -> str:
    """Return the name of a file or folder for code in the model card; it must not end the code or the line."""
    return printable(path.resolve().name).replace("`", "") or "data"
