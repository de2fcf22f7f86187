"""``score`` and ``answer``: commands that write a table, CSV or Parquet, row by row."""

from __future__ import annotations

import csv
import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from contrastive_curvature.apps.cli.console import Job, Result, needed
from contrastive_curvature.apps.cli.saved import opened, opened_retriever
from contrastive_curvature.apps.cli.sources import Loader
from contrastive_curvature.artifact import final_target, write_whole
from contrastive_curvature.errors import InputError
from contrastive_curvature.progress import Progress

_ALPHA = 0.01
_STDOUT = Path("-")

Rows = Mapping[str, Any]
"""Columns of some rows, by name: arrays or lists."""


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
