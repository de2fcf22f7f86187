"""``answer``, ``add`` and ``evaluate`` of a saved retriever, whose answers are right at a stated rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.cli.console import BadInputError, Console, Result, readable
from contrastive_curvature.apps.cli.encoders import Encoder
from contrastive_curvature.apps.cli.outputs import Rows, check_output, write_table
from contrastive_curvature.apps.cli.saved import check_target, holds_retriever, open_posterior, write_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source
from contrastive_curvature.io.pretrained import read_info
from contrastive_curvature.progress import Progress
from contrastive_curvature.retriever.retriever import Retriever


def answer(
    console: Console, *, sources: Mapping[str, Source], folder: Path, out: Path, batch_size: int, **encoder: Any
) -> Result:
    """Answer queries, and write the answers; ``encoder`` has the options of :func:`.open_posterior`."""
    check_output(out, sources.values())
    retriever, _ = _opened(console, sources, folder, encoder)
    source, decisions = sources["source"], Counter[str]()

    def rows() -> Iterator[Rows]:
        batches = Progress(console.progress).over(Loader(source, batch_size), "[answer]")
        for start, (x,) in zip(range(0, len(source), batch_size), batches, strict=True):
            answers = retriever(x)
            decisions.update(answers.decision.tolist())
            yield {"id": source.ids[start : start + batch_size], **vars(answers)}

    write_table(out, rows())
    counts = {name: decisions[name] for name in ("answer", "unsure", "unknown")}
    values = {"file": str(out), "queries": len(source), **counts, "promise": repr(retriever)}
    counted = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return values, f"{readable(str(out))}: {len(source):,} queries: {counted}", printed(retriever)


def add(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    out: Path | None,
    overwrite: bool,
    batch_size: int,
    **encoder: Any,
) -> Result:
    """Add inputs to the gallery, and write the retriever; ``encoder`` has the options of :func:`.open_posterior`."""
    target = folder if out is None else out
    check_target(target, overwrite=overwrite or out is None, retriever=True)
    retriever, made = _opened(console, sources, folder, encoder)
    source = sources["source"]
    added = retriever.add(Progress(console.progress).over(named(source, made, batch_size), "[add]"))
    about = read_info(folder / "posterior").about
    write_posterior(retriever, made, target, overwrite=overwrite or out is None, about=about)
    first, last = int(added[0]), int(added[-1])
    values = {"folder": str(target), "added": len(added), "first": first, "last": last, "promise": repr(retriever)}
    line = f"{readable(str(target))}: {len(added):,} points added to the gallery, identifiers {first} to {last}"
    return values, line, printed(retriever)


def evaluate(
    console: Console, *, sources: Mapping[str, Source], folder: Path, batch_size: int, **encoder: Any
) -> Result:
    """Compare rates as asked for with those of test queries; ``encoder`` has the options of :func:`.open_posterior`."""
    sources["test"].check_classes("--test")
    retriever, made = _opened(console, sources, folder, encoder)
    progress, unknown = Progress(console.progress), sources.get("unknown")
    rates = retriever.evaluate(
        progress.over(named(sources["test"], made, batch_size), "[test]"),
        None if unknown is None else (x for (x,) in progress.over(Loader(unknown, batch_size), "[unknown]")),
    )
    lines = []
    for name, rate in rates.items():
        asked = "" if rate.asked is None else f"; asked for: at most {rate.asked:g}"
        interval = f"no queries{asked}" if not rate.queries else f"{rate.observed:.4f} of {rate.queries:,} queries"
        known = f", 95 % interval {rate.low:.4f} to {rate.high:.4f}{asked}" if rate.queries else ""
        lines.append(f"{name:<16} {interval}{known}")
    plain = {
        name: {**rate._asdict(), "observed": rate.observed if rate.queries else None} for name, rate in rates.items()
    }
    lines.append(printed(retriever))
    return {"rates": plain, "promise": repr(retriever)}, *lines


def named(source: Source, encoder: Encoder, batch_size: int) -> Loader:
    """Return batches with classes as the retriever has them: the numbers of the fit, or texts where it had texts."""
    assert source.classes is not None
    if encoder.classes is not None:
        return Loader(source, batch_size, labels=source.classes.astype(str))
    if source.classes.dtype.kind not in "iu":
        raise BadInputError(f"{source.path}", "the numbers that the classes have in the fit", "names")
    return Loader(source, batch_size, labels=source.classes)


def printed(retriever: Retriever) -> str:
    """Return the last line of a command: what is promised."""
    return f"promised: {retriever!r}"


def _opened(
    console: Console, sources: Mapping[str, Source], folder: Path, encoder: Mapping[str, Any]
) -> tuple[Retriever, Encoder]:
    if not holds_retriever(folder):
        hint = "contrastive-curvature fit SOURCE --held-out HELD_OUT --out FOLDER writes one."
        raise BadInputError(f"{folder}", "a saved retriever", "no retriever.safetensors in it", hint)
    return open_posterior(folder, sources, **encoder, note=console.note)
