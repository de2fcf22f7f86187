"""What the commands do: each function computes and writes, and returns the result of the command with its name."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from laplace import Laplace
from numpy.typing import NDArray

import contrastive_curvature as cc
from contrastive_curvature import validate
from contrastive_curvature.apps import report
from contrastive_curvature.apps.cli.console import Console, Job, Result, needed, printable
from contrastive_curvature.apps.cli.encoders import NO_ENCODER, Encoder, check_device, encoder_for, encoder_of, use
from contrastive_curvature.apps.cli.saved import (
    EncoderFile,
    check_target,
    check_writable,
    holds_retriever,
    opened,
    opened_retriever,
    read_encoder,
    write_posterior,
)
from contrastive_curvature.apps.cli.sources import Loader, Source, shared_labels
from contrastive_curvature.apps.report.evaluation import check_target as check_report
from contrastive_curvature.artifact import final_target, read_header, write_whole
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained import load_match, read_info
from contrastive_curvature.io.pretrained.save import KNOWN_LOSSES
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.progress import Progress
from contrastive_curvature.retriever.retriever import Retriever
from contrastive_curvature.retriever.saved import ARRAYS, POSTERIOR, RetrieverHeader

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

_ALPHA = 0.01
_STDOUT = Path("-")

Rows = Mapping[str, Any]
"""Columns of some rows, by name: arrays or lists."""


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
            got = f"--{other[0].replace('_', '-')}" if other else "no --held-out"
            raise InputError("--head", "--held-out, and no option of the posterior or its calibration", got)
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


def score(job: Job) -> Result:
    """Write the scores of inputs under a posterior."""
    o, source = job.options, job.sources["source"]
    _check_table(job)
    la, _ = opened(job)
    calibration, alpha, counts = la.known.calibration, o.alpha, Counter[str]()
    if calibration is None:
        alpha = None
        job.console.warn(
            f"{o.folder}: this posterior is not calibrated, so novelty, p_value and known are left out. Calibrate it: "
            f"contrastive-curvature calibrate {o.folder} SOURCE."
        )
    else:
        alpha = _checked_alpha(calibration.reference.fewest, alpha)

    def rows() -> Iterator[Rows]:
        for ids, x in _batches(job):
            predicted = la(x)
            columns: dict[str, Any] = {"id": ids}
            if o.mu:
                columns |= {f"mu_{axis}": column for axis, column in enumerate(_array(predicted.mu).T)}
            names = ("kappa", "uncertainty", *(() if alpha is None else ("novelty", "p_value")))
            columns |= {name: _array(getattr(predicted, name)) for name in names}
            if alpha is not None:
                columns["known"] = _array(predicted.is_known(alpha))
                counts["unknown"] += int((~columns["known"]).sum())
            yield columns

    _write_table(o.out, rows())
    values: dict[str, Any] = {"file": str(o.out), "inputs": len(source), "calibrated": calibration is not None}
    line = f"{o.out}: {len(source):,} inputs"
    if alpha is not None:
        values |= {"alpha": alpha, "unknown": counts["unknown"]}
        line += f", {counts['unknown']:,} of them unknown (p-value at most {alpha:g})"
    return values, line


def answer(job: Job) -> Result:
    """Write the answers of a retriever to queries."""
    o, source = job.options, job.sources["source"]
    _check_table(job)
    retriever, _ = opened_retriever(job)
    counts = Counter({"answer": 0, "unsure": 0, "unknown": 0})

    def rows() -> Iterator[Rows]:
        for ids, x in _batches(job):
            answers = retriever(x)
            counts.update(answers.decision.tolist())
            yield {"id": ids, **vars(answers)}

    _write_table(o.out, rows())
    values = {"file": str(o.out), "queries": len(source), **counts, "promise": repr(retriever)}
    counted = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return values, f"{o.out}: {len(source):,} queries: {counted}", f"promised: {retriever!r}"


def _batches(job: Job) -> Iterator[tuple[list[str], Any]]:
    """Yield the identifiers and the inputs of each batch of SOURCE."""
    source, size = job.sources["source"], job.options.batch_size
    batches = Progress(job.console.progress).over(Loader(source, size), "[inputs]")
    for start, (x,) in zip(range(0, len(source), size), batches, strict=True):
        yield source.ids[start : start + size], x


def _array(values: Any) -> Any:
    return values.detach().cpu().numpy()


def _checked_alpha(count: int, asked: float | None) -> float:
    """Return the share, or the default; refuse a share that needs more calibration inputs."""
    least, alpha = 1 / (count + 1), _ALPHA if asked is None else asked
    if alpha >= least:
        return alpha
    hint = f"Calibrate with at least {math.ceil(1 / alpha) - 1:,} inputs, or give a larger --alpha."
    wanted = f"at least {least:.4g}, the smallest p-value that {count} calibration inputs give"
    raise InputError("--alpha", wanted, f"{'the default ' if asked is None else ''}{alpha:g}", hint)


def _check_table(job: Job) -> None:
    """Refuse an output file that cannot be written or is an input, before anything is computed."""
    path = job.options.out
    if path == _STDOUT:
        return
    if path.suffix.lower() not in (".csv", ".parquet"):
        wanted = "a name that ends in .csv or .parquet, or - for stdout"
        raise InputError(f"--out {path}", wanted, f"{path.name!r}")
    target = final_target(path)
    if any(target.exists() and s.path.exists() and s.path.samefile(target) for s in job.sources.values()):
        raise InputError(f"--out {path}", "another file than the inputs", "one of them")
    if path.suffix.lower() == ".parquet":
        needed("pyarrow", f"--out {path}", "pyarrow; or name a .csv")


def _write_table(path: Path, parts: Iterable[Rows]) -> None:
    """Write a table whose rows come in parts; after an error, an existing file does not change."""
    write = _write_parquet if path.suffix.lower() == ".parquet" else _write_csv
    if path == _STDOUT:
        write(sys.stdout.buffer, iter(parts))
    else:
        write_whole(path, lambda file: write(file, iter(parts)))


def _write_csv(file: BinaryIO, parts: Iterator[Rows]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        rows = csv.writer(text, lineterminator="\n")
        first = next(parts)
        rows.writerow(first)
        for part in itertools.chain([first], parts):
            # As in JSON and SQL; pandas and others also read these as booleans.
            columns = (np.where(c, "true", "false") if np.asarray(c).dtype == bool else c for c in part.values())
            rows.writerows(zip(*columns, strict=True))
    finally:
        # Detach, because the wrapper would close the file before its owner can flush it.
        text.detach()


def _write_parquet(file: BinaryIO, parts: Iterator[Rows]) -> None:
    pa, parquet = (needed(module, "--out", "pyarrow") for module in ("pyarrow", "pyarrow.parquet"))
    first = pa.table(next(parts))
    with parquet.ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(pa.table(part, schema=first.schema))


def evaluate(job: Job) -> Result:
    """Measure a posterior and write the report; for a retriever, print the rates."""
    o, sources = job.options, job.sources
    if holds_retriever(o.folder):
        return _rates(job)
    if o.out is None:
        raise InputError("--out", "a folder for the report", "none")
    check_writable(check_report(o.out, f"--out {o.out}"))
    for package in ("matplotlib", "PIL"):
        validate.package("evaluate", package, "report")
    la, _ = opened(job)
    labelled = [name for name in ("test", "gallery") if name in sources and sources[name].classes is not None]
    numbers, class_names = shared_labels(*(sources[name] for name in labelled))
    labels = dict(zip(labelled, numbers, strict=True))
    data = {
        name: report.Data(Loader(source, o.batch_size, labels=labels.get(name)), items=source.shown, ids=source.ids)
        for name, source in sources.items()
    }
    evaluation = report.evaluate(
        la,
        data["test"],
        unknown=data.get("unknown"),
        gallery=data.get("gallery"),
        ks=o.ks,
        alphas=o.alphas,
        n_samples=o.samples,
        n_shown=o.shown,
        class_names=class_names,
        progress_bar=job.console.progress,
    )
    files = evaluation.save(o.out, title=o.title)
    plain = evaluation.to_plain()
    del plain["curves"]
    lines = [f"{name:<24} {value:.4f}" for name, value in evaluation.metrics.items()]
    lines += [f"{name + ':':<24} not measured. {reason}" for name, reason in evaluation.missing.items()]
    values: dict[str, Any] = {"files": {name: str(path) for name, path in files.items()}, **plain}
    lines.append(f"page: {files['report.html']}")
    return values, *lines


def _rates(job: Job) -> Result:
    """Compare the rates that a retriever promises with the rates of test queries."""
    o, test, unknown = job.options, job.sources["test"], job.sources.get("unknown")
    if o.out is not None or "gallery" in job.sources:
        hint = "Its rates are printed, of the gallery that it holds."
        raise InputError("--out, --gallery", "neither for a saved retriever", "one", hint)
    test.check_classes()
    retriever, encoder = opened_retriever(job)
    progress = Progress(job.console.progress)
    others = progress.over(() if unknown is None else Loader(unknown, o.batch_size), "[unknown]")
    queries = progress.over(named(test, encoder, o.batch_size), "[test]")
    rates = retriever.evaluate(queries, None if unknown is None else (x for (x,) in others))
    lines: list[str] = []
    values: dict[str, Any] = {}
    for name, rate in rates.items():
        observed, asked = f"{rate.observed:.4f} of {rate.queries:,} queries", ""
        known = f"{observed}, 95 % interval {rate.low:.4f} to {rate.high:.4f}" if rate.queries else "no queries"
        if rate.asked is not None:
            asked = f"; asked for: at most {rate.asked:g}"
        lines.append(f"{name:<16} {known}{asked}")
        values[name] = {**rate._asdict(), "observed": rate.observed if rate.queries else None}
    lines.append(f"promised: {retriever!r}")
    return {"rates": values, "promise": repr(retriever)}, *lines


def export(job: Job) -> Result:
    """Write a posterior as a graph or a scorer, and a retriever as a scorer that answers."""
    o, few = job.options, None
    la, _ = opened(job)
    if isinstance(la, Retriever):
        if "example" in job.sources or o.dynamic_axes or o.p_value is not None:
            hint = f"Its posterior can be a graph: contrastive-curvature export {o.folder / POSTERIOR} --out model.onnx"
            raise InputError("export", "no --example, --p-value and --dynamic-axes for a retriever", "one", hint)
        la.export(o.out)
        size = o.out.stat().st_size
        return {"file": str(o.out), "bytes": size}, f"{o.out}: answers of a retriever; {size:,} bytes"
    if "example" in job.sources:
        few, *_ = next(iter(Loader(job.sources["example"], min(2, o.batch_size))))
    outputs = la.export(o.out, few, p_value=o.p_value, dynamic_axes=o.dynamic_axes)
    values = {"file": str(o.out), "outputs": outputs, "bytes": o.out.stat().st_size}
    return values, f"{o.out}: {', '.join(outputs)}; {values['bytes']:,} bytes"


def features(job: Job) -> Result:
    """Write a feature folder of a source."""
    o, source = job.options, job.sources["source"]
    if source.kind == "features":
        raise InputError(f"{source.path}", "inputs of an encoder", "features that are there already")
    if o.encoder is None:
        raise InputError("--encoder", f"an encoder for {source.kind}", "none", NO_ENCODER)
    check_device(o.device)
    encoder = encoder_of(o.encoder, o.encoder_options or {})
    use(encoder, job.sources, o.device)
    (labels,), names = shared_labels(source)
    loader, options = Loader(source, o.batch_size, labels=labels), {"class_names": names, "dtype": o.dtype}
    progress_bar = job.console.progress
    folder = cc.features(encoder.module, loader, o.out, identifiers=source.ids, progress_bar=progress_bar, **options)
    values = {"folder": str(o.out), "inputs": len(source), "width": folder.width, "dtype": o.dtype}
    return values, f"{o.out}: {len(source):,} x {folder.width} features in {o.dtype}"


def info(job: Job) -> Result:
    """Return the content of a saved posterior."""
    folder, lines = job.options.folder, [str(job.options.folder)]
    retriever = None
    if holds_retriever(folder):
        retriever = read_header(folder / ARRAYS, RetrieverHeader)
        rates = ", ".join(f"{name} {rate}" for name, rate in retriever.rates._asdict().items())
        lines.append(f"  retriever     answers {retriever.answered:.1%} of the held-out queries; {rates}")
        if not retriever.posterior:
            return {"retriever": retriever.model_dump(mode="json", exclude={"tree"})}, *lines
        folder = folder / POSTERIOR
    info, encoder = read_info(folder), _encoder(read_encoder(folder)[0])
    for one in info.posteriors:
        count, least, most = one.prior_precisions
        prior = f"{least:.4g} to {most:.4g} ({count:,} of them)"
        if one.prior_precision is not None:
            prior = f"{one.prior_precision:.4g}"
        classes = "" if one.n_classes is None else f", {one.n_classes:,} classes"
        p_values = f"of {one.score}, from {one.n_calibration:,} inputs" if one.calibrated else "not calibrated"
        lines += [
            f"  posterior     {one.name}: {one.hessian_structure} of {one.n_params:,} weights, {one.subset_of_weights}",
            f"  dimension     {one.n_outputs}",
            f"  fitted on     {one.n_data:,} inputs{classes}",
            f"  loss          {one.loss}",
            f"  prior         precision {prior}, temperature {one.temperature:.4g}",
            f"  p-values      {p_values}",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    lines += [
        f"  P(match)      {'saved' if info.match else 'not saved'}",
        *(f"  {name:<13} {value}" for name, value in info.metrics.items()),
        f"  encoder       {encoder or 'not named: give --encoder to score and evaluate'}",
        f"  written by    {versions}; format {info.format_version}, {info.size:,} bytes",
    ]
    values: dict[str, Any] = {**info.to_plain(), "encoder": encoder}
    if retriever is not None:
        values["retriever"] = retriever.model_dump(mode="json", exclude={"tree"})
    return values, *lines


def _encoder(header: EncoderFile | None) -> str | None:
    if header is None or header.spec["encoder"] is not None:
        return None if header is None else str(header.spec["encoder"])
    return "identity, for embeddings" if header.spec["identity"] else "last layer, for features"
