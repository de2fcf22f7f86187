"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.losses_worth.baselines import BASELINES
from benchmarks.losses_worth.curvatures import CHOSEN_FIX, FIXES, PAIR, SOFTMAX, loss_of_fixes
from benchmarks.losses_worth.numbers import FIGURES, Encoders, Figure, by_encoder, mean_over_families, spread_of
from benchmarks.transfer.markdown import head, line
from contrastive_curvature.options import PDFix

__all__ = ["markdown", "own_key"]

_FEWER = (
    "Of ArcFace, the loss without its margin. Coupled fixes (`ggn`, `full`, `positive`) of large diagonals are left "
    "out: rows of fewer encoders cannot be compared with the others."
)
_HEAD = [figure.title for figure in FIGURES]


def own_key(encoder: Mapping[str, Any], structure: str, fix: str | None = None) -> str | None:
    """Key of the curvature of the own loss, where it was fitted."""
    if encoder["own"] == PAIR:
        return PAIR
    there = encoder["curvatures"].get(structure, {})
    wanted = [fix] if fix else [CHOSEN_FIX, "psd"]
    return next((f"{encoder['own']}/{one}" for one in wanted if f"{encoder['own']}/{one}" in there), None)


def markdown(results: Encoders, machine: Mapping[str, Any]) -> str:
    """All tables.

    Args:
        results: Name -> figures of an encoder.
        machine: What it ran on.
    """
    structures = [s for s in ("kron_lowrank", "diag", "full") if any(s in e["curvatures"] for e in results.values())]
    parts = [
        "# What the curvature of the training loss is worth",
        "",
        f"Written by `python -m benchmarks.losses_worth` from {len(results)} encoders; {machine['cpu']}, "
        f"{machine['threads']} threads, torch {machine['torch']}. Means are over families (encoders of one data set "
        "and trunk), ranges over encoders. AUROC: unknown inputs against test inputs, mean over the kinds of unknown "
        "input. R-AUROC and AUSC: wrong nearest neighbours. The first columns are the library's `novelty` and "
        "`uncertainty`; `angle alone` is the variance of the direction under the posterior, without class centres or "
        "a typical norm. ECE: of the votes of 30 sampled last layers, on test classes that training had. Class centres "
        f"are the same for all curvatures. Softmax losses have `pd_fix={CHOSEN_FIX!r}` where not said otherwise.",
        "",
    ]
    for structure in structures:
        parts += [f"## `{structure}`: own loss minus pair loss", "", *_differences(results, structure), ""]
    for structure in structures:
        parts += [f"## `{structure}`: every loss's curvature, by training loss", "", *_matrix(results, structure), ""]
    for structure in structures:
        parts += [
            f"## `{structure}`: `pd_fix` of the own softmax loss",
            "",
            _FEWER,
            "",
            *_fixes(results, structure),
            "",
        ]
    parts += ["## Other strengths of the prior", "", *_strengths(results), ""]
    parts += ["## Every encoder", "", *_every(results)]
    return "\n".join(parts) + "\n"


def _differences(results: Encoders, structure: str) -> Iterator[str]:
    yield from head(["trained with", "encoders", *_HEAD])
    trained = sorted({encoder["trained"] for encoder in results.values() if encoder["own"] != PAIR})
    for loss in [*trained, "all"]:
        some = {n: e for n, e in results.items() if e["own"] != PAIR and loss in (e["trained"], "all")}
        some = {n: e for n, e in some.items() if own_key(e, structure) and PAIR in e["curvatures"].get(structure, {})}
        cells = [_difference(some, structure, figure) for figure in FIGURES]
        yield line([loss, str(len(some)), *cells])


def _difference(encoders: Encoders, structure: str, figure: Figure) -> str:
    def value(encoder: Mapping[str, Any]) -> float | None:
        there, key = encoder["curvatures"][structure], own_key(encoder, structure)
        own, pair = figure.of(there[key]), figure.of(there[PAIR])
        return None if own is None or pair is None else own - pair

    found = spread_of(by_encoder(encoders, value))
    if found is None:
        return ""
    spread = f" ({found.least:+.3f} to {found.most:+.3f})" if found.count > 1 else ""
    return f"{found.mean:+.3f}{spread}"


def _matrix(results: Encoders, structure: str) -> Iterator[str]:
    yield from head(["trained with", "curvature of", "encoders", *_HEAD])
    for trained in sorted({encoder["trained"] for encoder in results.values()}):
        some = {n: e for n, e in results.items() if e["trained"] == trained and structure in e["curvatures"]}
        keys = dict.fromkeys(key for e in some.values() for key in e["curvatures"][structure])
        for key in keys:
            loss, _, fix = key.partition("/")
            if loss in SOFTMAX and fix != CHOSEN_FIX:
                continue
            there = {n: e for n, e in some.items() if key in e["curvatures"][structure]}
            own = any(e["own"] == loss for e in there.values())
            title = f"**{loss}**" if own else loss
            yield line([trained, title, str(len(there)), *_means(there, structure, key)])
        for name, title in BASELINES.items():
            yield line([trained, title, str(len(some)), *_baseline_means(some, name)])


def _means(encoders: Encoders, structure: str, key: str) -> list[str]:
    return [
        _mean(by_encoder(encoders, lambda e, figure=figure: figure.of(e["curvatures"][structure][key])))  # type: ignore[misc]
        for figure in FIGURES
    ]


def _baseline_means(encoders: Encoders, name: str) -> list[str]:
    cells = [_mean(by_encoder(encoders, lambda e, f=f: e["baselines"][name][f])) for f in ("auroc", "r_auroc", "ausc")]  # type: ignore[misc]
    # One score answers both questions, so it stands where the posterior's angle does.
    return ["", "", "", *cells, ""]


def _mean(values: Mapping[str, float]) -> str:
    return f"{mean_over_families(values):.3f}" if values else ""


def _fixes(results: Encoders, structure: str) -> Iterator[str]:
    uncoupled = [fix for fix in FIXES if not PDFix(fix).coupled]
    some = {
        name: encoder
        for name, encoder in results.items()
        if all(_fixed(encoder, fix) in encoder["curvatures"].get(structure, {}) for fix in uncoupled)
    }
    yield from head(["pd_fix", "encoders", *_HEAD, "seconds of processor time (largest)"])
    for fix in (PAIR, *FIXES):
        there = {}
        for name, encoder in some.items():
            key = PAIR if fix == PAIR else _fixed(encoder, fix)
            if key not in encoder["curvatures"][structure]:
                continue
            there[name] = {**encoder, "curvatures": {structure: {"one": encoder["curvatures"][structure][key]}}}
        if not there:
            continue
        seconds = by_encoder(there, lambda e: float(e["curvatures"][structure]["one"]["seconds"]))
        cells = _means(there, structure, "one")
        most = f"{mean_over_families(seconds):.1f} ({max(seconds.values()):.1f})"
        yield line(["pair loss, for scale" if fix == PAIR else fix, str(len(there)), *cells, most])


def _strengths(results: Encoders) -> Iterator[str]:
    """Encoders whose features are few, by curvature and strength."""
    titles = ["`novelty`: AUROC", "angle alone: AUROC", "R-AUROC"]
    yield from head(["curvature", "encoders", "prior precision, times", *titles])
    titles_of = (PAIR, "ggn_fixed", CHOSEN_FIX)
    tried: dict[str, dict[str, Any]] = {}
    for name, encoder in results.items():
        there = encoder["curvatures"]["kron_lowrank"]
        keys = {t: PAIR if t == PAIR else own_key(encoder, "kron_lowrank", t) for t in titles_of}
        # The same encoders in every row: those whose own loss has both fixes.
        if encoder["own"] in SOFTMAX and all("strengths" in there.get(key, {}) for key in keys.values()):
            tried[name] = {title: there[key] for title, key in keys.items()}
    for title in titles_of:
        found = {name: by_title[title] for name, by_title in tried.items()}
        for strength in ("0.01", "0.1", "1", "10"):
            cells = []
            for figure in (("novelty", "auroc"), ("angle", "auroc"), ("angle", "r_auroc")):
                values = by_encoder(found, lambda c, s=strength, f=figure: _at(c, s, f))  # type: ignore[misc]
                cells.append(_mean(values))
            yield line([title if title == PAIR else f"own loss, {title}", str(len(found)), strength, *cells])


def _at(found: Mapping[str, Any], strength: str, figure: tuple[str, str]) -> float | None:
    if strength == "1":
        return float(found[figure[0]][figure[1]])
    if strength not in found.get("strengths", {}):
        return None
    there = found["strengths"][strength]
    return float(there["novelty"] if figure[0] == "novelty" else there[figure[1]])


def _fixed(encoder: Mapping[str, Any], fix: str) -> str:
    return f"{loss_of_fixes(encoder['own'])}/{fix}"


def _every(results: Encoders) -> Iterator[str]:
    yield from head(["encoder", "mAP@1", "curvature", *_HEAD, "seconds"])
    for name, encoder in results.items():
        for structure, there in encoder["curvatures"].items():
            for key, found in there.items():
                loss, _, fix = key.partition("/")
                if loss in SOFTMAX and fix != CHOSEN_FIX:
                    continue
                cells = ["" if (v := figure.of(found)) is None else f"{v:.3f}" for figure in FIGURES]
                title = f"`{structure}`, {loss}{' (own)' if loss == encoder['own'] else ''}"
                yield line([name, f"{encoder['map_at_1']:.3f}", title, *cells, f"{found['seconds']:.1f}"])
        for key, title in BASELINES.items():
            found = encoder["baselines"][key]
            cells = [f"{found[f]:.3f}" if found[f] is not None else "" for f in ("auroc", "r_auroc", "ausc")]
            yield line([name, f"{encoder['map_at_1']:.3f}", title, "", "", "", *cells, "", ""])
