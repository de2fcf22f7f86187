"""``evaluate``, ``export``, ``features`` and ``info``: commands that measure, export and describe a posterior."""

from __future__ import annotations

from typing import Any

import contrastive_curvature as cc
from contrastive_curvature import validate
from contrastive_curvature.apps import report
from contrastive_curvature.apps.cli.console import Job, Result
from contrastive_curvature.apps.cli.encoders import NO_ENCODER, check_device, encoder_of, use
from contrastive_curvature.apps.cli.fit import named
from contrastive_curvature.apps.cli.saved import (
    EncoderFile,
    check_writable,
    holds_retriever,
    opened,
    opened_retriever,
    read_encoder,
)
from contrastive_curvature.apps.cli.sources import Loader, shared_labels
from contrastive_curvature.apps.report.evaluation import check_target
from contrastive_curvature.artifact import read_header
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.pretrained import read_info
from contrastive_curvature.progress import Progress
from contrastive_curvature.retriever.retriever import Retriever
from contrastive_curvature.retriever.saved import ARRAYS, POSTERIOR, RetrieverHeader


def evaluate(job: Job) -> Result:
    """Measure a posterior and write the report; for a retriever, print the rates."""
    o, sources = job.options, job.sources
    if holds_retriever(o.folder):
        return _rates(job)
    if o.out is None:
        raise InputError("--out", "a folder for the report", "none")
    check_writable(check_target(o.out, f"--out {o.out}"))
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
