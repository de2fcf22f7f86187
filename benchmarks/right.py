"""Which numbers does P(right) need, and which score should call inputs unknown? On feature files of encoders.

    python -m benchmarks.right FOLDER [--splits 10]

``FOLDER`` has the feature files of ``benchmarks.transfer``; encoders of the sets of ``benchmarks.new_classes`` are made
here and added to it. Prints the tables of benchmarks/results/right.md. Figures of an encoder are kept beside its
feature file. What would be chosen on all families but one is judged on the one that is left out. The last table is of
queries some of which have a class that the gallery lacks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import nn

from benchmarks import new_classes, promises
from benchmarks.machine import table
from benchmarks.transfer.answers import Encoded, encoded
from benchmarks.transfer.families import FAMILIES
from benchmarks.transfer.feature_file import FeatureFile, load_features, save_features
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.metrics import auroc
from contrastive_curvature.retriever import rule
from contrastive_curvature.retriever.evidence import COLUMNS, FLOOR, Embedded, Searched, evidence

Numbers = NDArray[np.float64]

_HELD_OUT, _CONFIDENCE, _MATCHES, _ALARMS = 500, 0.9, 0.05, 0.02
_WORST = 5
"""Level of corruption that counts as an unknown kind; only those of these kinds do."""
_MIXED = "(mixed features)"
"""Known inputs, each feature taken from another one of them: what a fit could make up in place of unknown kinds."""
_CORRUPTED = ("noise", "occlusion", "deletion", "typos")
_TEMPERATURE = 0.1
_SIGNS = {
    "match": -1,
    "mean": -1,
    "votes": 1,
    "gap": -1,
    "uncertainty": -1,
    "novelty": -1,
    "softmax": 1,
    "softmax of ten": 1,
}
_ALL = tuple(_SIGNS)
_SEARCH = _ALL[:4]
_FIVE = (*_SEARCH, "uncertainty")
VARIANTS = {
    "six": (*_FIVE, "novelty"),
    "no novelty": _FIVE,
    "no uncertainty": (*_SEARCH, "novelty"),
    "neither": _SEARCH,
    "six, softmax": (*_FIVE, "novelty", "softmax"),
    "no novelty, softmax": (*_FIVE, "softmax"),
    "neither, softmax": (*_SEARCH, "softmax"),
    "no novelty, softmax of ten": (*_FIVE, "softmax of ten"),
    "no novelty, softmax of ten for votes": ("match", "mean", "gap", "uncertainty", "softmax of ten"),
    "softmax alone": ("softmax",),
    "gap alone": ("gap",),
}
"""Columns of both regressions; six are the library's. The others are one number for all queries, which says nothing."""


def softmax_votes(queries: Embedded, points: Embedded, classes: torch.Tensor, without: torch.Tensor | None) -> Numbers:
    """Return the logits (N, 2) of the match's class under a softmax of cosines.

    The first is over the gallery; the second over ten hits and the nearest point of another class, which any index has.
    """
    # With one class in the gallery there is no other; then as far as two opposite points.
    parts, least = [], torch.tensor(-1 / _TEMPERATURE)
    for rows in torch.arange(len(queries)).split(1000):
        logits = (queries.directions[rows] @ points.directions.T) / _TEMPERATURE
        if without is not None:
            logits.masked_fill_(classes == without[rows, None], -torch.inf)
        same = classes == classes[logits.argmax(1)][:, None]
        sides = [logits.masked_fill(~side, -torch.inf) for side in (same, ~same)]
        tenth = logits.topk(min(10, len(classes)), dim=1).values[:, -1:]
        near = [side.masked_fill(side < torch.minimum(tenth, side.amax(1, keepdim=True)), -torch.inf) for side in sides]
        votes = [torch.sub(*(side.logsumexp(1).maximum(least) for side in both)) for both in (sides, near)]
        parts.append(torch.stack(votes, 1).double().numpy())
    return np.concatenate(parts)


def searched(parts: Encoded, queries: Embedded, without: torch.Tensor | None = None) -> Searched:
    """Search, and append to the evidence what the posterior says of the query alone, and the softmax vote."""
    columns, match = evidence(queries, parts.points.directions, parts.classes, without)
    votes = softmax_votes(queries, parts.points, parts.classes, without)
    of = parts.truth if queries is parts.known else torch.full((len(match),), -1)
    right = (parts.classes[match] == of) & (without is None)
    alone = np.log(np.stack([queries.uncertainty, queries.novelty], axis=1).clip(FLOOR))
    return Searched(
        np.column_stack([columns[:, : len(_SEARCH)], alone, votes]), queries.novelty, right.numpy(), of.numpy()
    )


def only(found: Searched, names: Sequence[str]) -> Searched:
    """Return what was found with all columns but these the same for all."""
    kept = np.where(np.isin(_ALL, names), found.evidence, 0)
    return Searched(kept, found.novelty, found.right, found.classes)


def unknown_of(content: FeatureFile) -> dict[str, Any]:
    """Return the features of unknown kinds, with the worst of the corruptions among them, and made-up ones."""
    worst = {kind: content.corrupted[kind, _WORST] for kind in _CORRUPTED if (kind, _WORST) in content.corrupted}
    random = np.random.default_rng(0)
    mixed = random.permuted(content.test_features[:1000].astype("float32"), axis=0)
    return {**content.unknown, **worst, _MIXED: mixed}


def judged(content: FeatureFile, splits: int, strangers: str | None = None) -> dict[str, Any]:
    """Return figures of each split, by variant and measure, and those of the scores of unknown inputs.

    Inputs of the unknown kind ``strangers`` are queries like the others, whose class the gallery lacks.
    """
    parts = encoded(content, unknown_of(content))
    if strangers is not None:
        more = parts.unknown.pop(strangers)
        truth = torch.cat([parts.truth, torch.full((len(more),), -1)])
        parts = parts._replace(known=Embedded.cat([parts.known, more]), truth=truth)
    queries, absent = searched(parts, parts.known), searched(parts, parts.known, parts.truth)
    kinds = {kind: searched(parts, inputs) for kind, inputs in parts.unknown.items()}
    n, error = len(queries), float(1 - queries.right.mean())
    both = queries.evidence[:, [_ALL.index("novelty"), _ALL.index("mean")]]
    dim, width = content.weight.shape
    fit = {
        "features": width,
        "dimensions": dim,
        "features over dimensions": width / dim,
        "gallery": len(parts.classes),
        "classes": len(parts.classes.unique()),
        "error": error,
        "correlation of both": float(spearmanr(*both.T).statistic),
        "spread of log novelty over that of ten nearest": float(both[:, 0].std() / both[:, 1].std()),
        "right? by novelty, less by ten nearest": float(
            np.subtract(*(_auroc(part[queries.right], part[~queries.right]) for part in both.T))
        ),
    }
    rates = rule.Rates(error / 2, _MATCHES, _ALARMS, _CONFIDENCE)
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in VARIANTS}
    unknown: dict[str, dict[str, dict[str, list[float]]]] = {}
    for seed in range(splits):
        held, new = np.split(np.random.default_rng(seed).permutation(n), [min(_HELD_OUT, n // 2)])
        for name, columns in VARIANTS.items():
            known = {kind: found for kind, found in kinds.items() if kind != _MIXED}
            for key, value in _rule_figures(rates, queries, absent, known, held, new, columns).items():
                figures[name].setdefault(key, []).append(value)
        for kind, found in kinds.items():
            for score, cells in _unknown_figures(queries[held], queries[new], found).items():
                for key, value in cells.items():
                    unknown.setdefault(kind, {}).setdefault(score, {}).setdefault(key, []).append(value)
    of_mixed = (mean(unknown[_MIXED][score]["found"]) for score in ("novelty", "ten nearest"))
    fit["mixed features found by novelty, less by ten nearest"] = float(np.subtract(*of_mixed))
    return {"error": error, "queries": n, "fit": fit, "variants": figures, "unknown": unknown}


def _rule_figures(
    rates: rule.Rates,
    queries: Searched,
    absent: Searched,
    kinds: dict[str, Searched],
    held: NDArray[np.int64],
    new: NDArray[np.int64],
    columns: Sequence[str],
) -> dict[str, float]:
    queries, absent = only(queries, columns), only(absent, columns)
    # The gap, or a single number, earns its weight freely, as in the library.
    free = [name == "gap" or len(columns) == 1 for name in _ALL]
    with (
        patch.dict(COLUMNS, _SIGNS, clear=True),
        patch.object(rule, "RIGHT", (0.1, np.where(free, 0.1, 10.0))),
        patch.object(rule, "PRESENT", (1.0, np.ones(len(_ALL)))),
    ):
        fitted = rule.certified(rates, queries[held], absent[held])
        alone = rule.certified(rates._replace(false_matches=None, false_alarms=None), queries[held], absent[held])
    now, lacking = queries[new], absent[new]
    score, right = fitted.right(now.evidence), now.right
    logits = -np.concatenate([score, fitted.right(lacking.evidence)])
    so = np.append(right, np.zeros(len(new), bool))
    weight = np.repeat([1, 0.1], len(new))
    losses = np.logaddexp(0, np.where(so, -logits, logits))
    both, one = promises.answered(fitted, now), promises.answered(alone, now)
    of_unknown = [promises.answered(fitted, only(found, columns)).mean() for found in kinds.values()]
    return {
        "right": _auroc(score[right], score[~right]),
        "absent": _auroc(fitted.present(now.evidence[right]), fitted.present(lacking.evidence)),
        "log loss": float(weight @ losses / weight.sum()),
        "answered": float(both.mean()),
        "answered, wrong alone": float(one.mean()),
        "wrong": float((~right[both]).mean()) if both.any() else 0.0,
        "wrong, alone": float((~right[one]).mean()) if one.any() else 0.0,
        "matches": float(promises.answered(fitted, lacking).mean()),
        "unknown": float(np.mean(of_unknown)) if of_unknown else float("nan"),
        **{f"weight of {name}": abs(float(fitted.right.weights[k])) for k, name in enumerate(_ALL)},
        **{f"present: weight of {name}": abs(float(fitted.present.weights[k])) for k, name in enumerate(_ALL)},
    }


def _ranks(held: Numbers, values: Numbers) -> Numbers:
    """Return the p-values (N,) of values among those of held-out queries."""
    return (1 + len(held) - np.searchsorted(np.sort(held), values)) / (len(held) + 1)


SCORES: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "novelty": lambda a, _: a,
    "ten nearest": lambda _, b: b,
    "sum of ranks": lambda a, b: a + b,
    "product of ranks": lambda a, b: np.log(a) + np.log(b),
    "smaller rank": np.minimum,
}
"""From the p-values of both scores to one score, which is compared with that of the held-out queries."""


def _unknown_figures(held: Searched, new: Searched, found: Searched) -> dict[str, dict[str, float]]:
    raw = [(some.novelty, some.evidence[:, _ALL.index("mean")]) for some in (held, new, found)]
    ranks = [tuple(_ranks(raw[0][k], part[k]) for k in range(2)) for part in raw]
    out = {}
    for name, score in SCORES.items():
        parts = [tuple(-one for one in part) for part in raw] if name in ("novelty", "ten nearest") else ranks
        base, known, other = (-score(*part) for part in parts)
        alarms, caught = (float((_ranks(base, values) <= _ALARMS).mean()) for values in (known, other))
        out[name] = {"auroc": _auroc(known, other), "found": caught, "alarms": alarms}
    known, other = (2 * np.minimum(*part) for part in ranks[1:])
    alarms, caught = (float((values <= _ALARMS).mean()) for values in (known, other))
    out["Bonferroni"] = {"auroc": _auroc(-known, -other), "found": caught, "alarms": alarms}
    return out


def _auroc(low: Numbers, high: Numbers) -> float:
    if not len(low) or not len(high):
        return float("nan")
    return auroc(torch.from_numpy(low), torch.from_numpy(high))


_MADE = ("digits", "characters", "functions", "names")
_DIM = 32
_TRAINING = Training(epochs=30, rate=2e-3, together=4)


def _texts(name: str, change: Callable[[str], str]) -> NDArray[np.float32]:
    """Return the inputs of a set with changed texts."""
    hashed = new_classes._hashed
    with patch.object(new_classes, "_hashed", lambda texts, classes: hashed([change(text) for text in texts], classes)):
        return new_classes.SETS[name].read()[0]


def _unknown_inputs(name: str, x: NDArray[np.float32], rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Return inputs of other kinds: of another set, noise, and inputs that were cut."""
    random = np.random.default_rng(0)
    if name in ("digits", "characters"):
        side = int(x.shape[1] ** 0.5)
        if name == "digits":
            other = new_classes.characters()[0].reshape(-1, 8, 2, 8, 2).mean((2, 4)).reshape(-1, 64)
        else:
            other = new_classes.digits()[0].reshape(-1, 8, 8).repeat(2, 1).repeat(2, 2).reshape(-1, 256)
        cut = x[rows].reshape(-1, side, side).copy()
        cut[:, :, side // 2 :] = 0
        noise = random.random((1000, x.shape[1]), dtype=np.float32)
        return {"another set": other, "noise": noise, "cut": cut.reshape(len(rows), -1)}
    another = {"functions": "names", "names": "functions"}[name]
    length = {"functions": 60, "names": 10}[name]
    return {
        "another set": new_classes.SETS[another].read()[0],
        "noise": _texts(name, lambda text: "".join(random.permutation(list(text))))[rows],
        "cut": _texts(name, lambda text: text[:length])[rows],
    }


@cache
def _inputs(name: str) -> tuple[Any, ...]:
    """Return inputs, classes, the rows of two halves, and inputs of unknown kinds."""
    x, y = new_classes.SETS[name].read()
    order = np.random.default_rng(0).permutation(len(y))
    return x, y, order[::2], order[1::2], _unknown_inputs(name, x, order[1::2][:1000])


_STRANGERS = "new classes"


def _make_without(name: str, seed: int) -> FeatureFile:
    """Train the encoder of ``benchmarks.new_classes`` without some classes, whose inputs are a sixth of all queries."""
    read, unseen = new_classes.SETS[name]
    split = list(new_classes.splits(*read(), unseen, seed + 1))[seed]
    encoder = new_classes.supcon(*split.train)

    def features(values: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.no_grad():
            return encoder[:-1](torch.from_numpy(np.ascontiguousarray(values))).numpy()

    known, labels = (np.concatenate(both) for both in zip(split.held, split.test, strict=True))
    rows = np.random.default_rng(0).permutation(len(split.unseen[0]))[: len(known) // 5]
    return FeatureFile(
        features(split.train[0]),
        split.train[1],
        features(known),
        labels,
        encoder[-1].weight.detach().numpy(),
        encoder[-1].bias.detach().numpy(),
        {_STRANGERS: features(split.unseen[0][rows])},
    )


def _make(name: str, loss: str) -> FeatureFile:
    """Train an encoder of two layers on half of a set, and return its features."""
    x, y, known, new, unknown = _inputs(name)
    with seeded(0):
        encoder = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, _DIM))
        inputs = torch.from_numpy(x[known])
        train(encoder, lambda rows: inputs[rows], torch.from_numpy(y[known]), loss, _TRAINING, 0)

    def features(values: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.no_grad():
            return encoder[:-1](torch.from_numpy(np.ascontiguousarray(values))).numpy()

    return FeatureFile(
        features(x[known]),
        y[known],
        features(x[new]),
        y[new],
        encoder[-1].weight.detach().numpy(),
        encoder[-1].bias.detach().numpy(),
        {kind: features(inputs) for kind, inputs in unknown.items()},
    )


def family_of(name: str) -> str:
    """Return the family of an encoder, by the beginning of its name."""
    return next((title for start, title in FAMILIES.items() if name.startswith(start)), name.split("-")[0])


Results = dict[str, dict[str, Any]]
_NOW = "six"
_MEASURES = {
    "right": ("right?", 1),
    "log loss": ("log loss", -1),
    "answered": ("answered, three rates", 1),
    "answered, wrong alone": ("answered, wrong answers alone", 1),
    "absent": ("class absent", 1),
}
"""Measures of a variant, and whether more is better."""


def _families(results: Results) -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for name in results:
        named.setdefault(family_of(name), []).append(name)
    return named


def _of_splits(results: Results, names: Sequence[str], variant: str, measure: str) -> Numbers:
    """Return the mean over encoders in each split."""
    return np.mean([results[name]["variants"][variant][measure] for name in names], 0)


def _gain(results: Results, names: Sequence[str], variant: str, measure: str) -> tuple[float, float]:
    """Return the gain over all six, mean over the encoders' splits and its scatter between splits."""
    apart = _of_splits(results, names, variant, measure) - _of_splits(results, names, _NOW, measure)
    apart = apart * _MEASURES[measure][1]
    return float(apart.mean()), float(apart.std(ddof=1))


def _shown(gains: Sequence[float]) -> str:
    """Return a mean over families, and its standard error."""
    return f"{np.mean(gains):+.4f} ± {np.std(gains, ddof=1) / len(gains) ** 0.5:.4f}"


def tables(results: Results) -> Iterator[str]:
    """Yield the tables, in Markdown."""
    families = _families(results)
    kept = []
    for variant in VARIANTS:
        means = {
            key: mean(float(_of_splits(results, names, variant, key).mean()) for names in families.values())
            for key in ("right", "log loss", "answered", "answered, wrong alone", "absent", "matches", "unknown")
        }
        kept.append([variant, *(f"{value:.3f}" for value in means.values())])
    yield table(["columns", *(title for title, _ in _MEASURES.values()), "absent answered", "unknown answered"], kept)
    yield table(
        ["gain over six", *(title for title, _ in _MEASURES.values())],
        [
            [
                variant,
                *(_shown([_gain(results, names, variant, key)[0] for names in families.values()]) for key in _MEASURES),
            ]
            for variant in VARIANTS
            if variant != _NOW
        ],
    )
    tried = ("no novelty", "no uncertainty", "neither", "no novelty, softmax", "no novelty, softmax of ten")
    for measure in ("log loss", "answered", "answered, wrong alone"):
        rows = []
        for family, names in families.items():
            gains = (_gain(results, names, variant, measure) for variant in tried)
            now = float(_of_splits(results, names, _NOW, measure).mean())
            rows.append([f"{family} ({len(names)})", f"{now:.3f}", *(f"{gain:+.3f} ± {by:.3f}" for gain, by in gains)])
        yield table([f"{_MEASURES[measure][0]}: gain, scatter of splits", "six", *tried], rows)
    rows = []
    for family, names in families.items():
        shown = [
            float(_of_splits(results, names, _NOW, f"{side}weight of {name}").mean())
            for side in ("", "present: ")
            for name in ("uncertainty", "novelty")
        ]
        rates = [
            float(_of_splits(results, names, variant, key).mean())
            for key in ("wrong", "matches", "unknown")
            for variant in (_NOW, "no novelty")
        ]
        error = mean(results[name]["error"] for name in names)
        cells = (*(f"{weight:.2f}" for weight in shown), f"{error / 2:.3f}", *(f"{rate:.3f}" for rate in rates))
        rows.append([f"{family} ({len(names)})", *cells])
    head = ["family", "weight in P(right): uncertainty", "novelty", "in the other score: uncertainty", "novelty"]
    head += ["wrong asked", "wrong, six", "no novelty", "class absent, six", "no novelty"]
    yield table([*head, "unknown kinds answered, six", "no novelty"], rows)
    yield table(*_left_out(results, families))
    yield from _unknown_tables(results, families)


def strangers_table(results: Results) -> str:
    """Return gains where queries are held out whose class the gallery lacks."""
    measures, tried = ("right", "log loss", "answered, wrong alone"), ("no novelty", "no uncertainty", "neither")
    rows = []
    for family, names in _families(results).items():
        weights = (
            float(_of_splits(results, names, _NOW, f"weight of {name}").mean()) for name in ("uncertainty", "novelty")
        )
        gains = (_gain(results, names, variant, measure) for measure in measures for variant in tried)
        shown = (f"{gain:+.3f} ± {scatter:.3f}" for gain, scatter in gains)
        rows.append([f"{family} ({len(names)})", *(f"{weight:.2f}" for weight in weights), *shown])
    head = [f"{_MEASURES[measure][0]}: {variant}" for measure in measures for variant in tried]
    return table(["classes that the gallery lacks among the queries", "weight: uncertainty", "novelty", *head], rows)


def _left_out(results: Results, families: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return what is chosen by each measure without a family, and its gain over six there."""
    rows = []
    for measure, (title, _) in _MEASURES.items():
        gains = {
            variant: {family: _gain(results, names, variant, measure)[0] for family, names in families.items()}
            for variant in VARIANTS
        }
        chosen = {
            left: max(VARIANTS, key=lambda name: mean(gains[name][other] for other in families if other != left))
            for left in families
        }
        found = [gains[variant][left] for left, variant in chosen.items()]
        names = {name: list(chosen.values()).count(name) for name in VARIANTS if name in chosen.values()}
        worst = min(zip(found, families, strict=True))
        shown = ", ".join(f"{name} {count}" for name, count in names.items())
        rows.append([title, shown, _shown(found), f"{worst[0]:+.3f} {worst[1]}"])
    return ["chosen by", "choices", "gain over six where left out", "worst"], rows


_UNKNOWN = (*SCORES, "Bonferroni")


def _found(results: Results, names: Sequence[str], score: str, what: str, only: str | None = None) -> float:
    """Return the mean over encoders, and over kinds or one of them."""
    values = []
    for name in names:
        kinds = results[name]["unknown"]
        chosen = [kind for kind in kinds if (kind != _MIXED if only is None else kind == only)]
        values += [mean(mean(kinds[kind][score][what]) for kind in chosen)] if chosen else []
    return mean(values) if values else float("nan")


def _unknown_tables(results: Results, families: dict[str, list[str]]) -> Iterator[str]:
    rows = [
        [
            family,
            *(
                f"{_found(results, names, score, 'auroc'):.3f}, {_found(results, names, score, 'found'):.3f}"
                for score in _UNKNOWN
            ),
        ]
        for family, names in families.items()
    ]
    every = {
        score: [
            mean(_found(results, names, score, what) for names in families.values())
            for what in ("auroc", "found", "alarms")
        ]
        for score in _UNKNOWN
    }
    rows.append(["mean of families", *(f"{every[score][0]:.3f}, {every[score][1]:.3f}" for score in _UNKNOWN)])
    rows.append(["false alarms", *(f"{every[score][2]:.4f}" for score in _UNKNOWN)])
    yield table(["AUROC, share found", *_UNKNOWN], rows)
    rows = []
    for kind in ("noise", "cut", "occlusion", "deletion", "typos", _MIXED):
        having = {
            family: names
            for family, names in families.items()
            if any(kind in results[name]["unknown"] for name in names)
        }
        if having:
            cells = (
                f"{mean(_found(results, names, score, 'auroc', kind) for names in having.values()):.3f}, "
                f"{mean(_found(results, names, score, 'found', kind) for names in having.values()):.3f}"
                for score in _UNKNOWN
            )
            rows.append([f"{kind} ({len(having)} families)", *cells])
    yield table(["one kind: AUROC, share found", *_UNKNOWN], rows)
    yield table(*_told(results, families))


def _told(results: Results, families: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return what choosing between both scores finds, by one number of the fit, its limit set on the other families."""
    gain = {
        name: _found(results, [name], "novelty", "found") - _found(results, [name], "ten nearest", "found")
        for name in results
    }
    of = {name: family for family, names in families.items() for name in names}
    weight = {name: 1 / len(families[of[name]]) for name in results}

    def stump(number: str, names: Sequence[str]) -> tuple[float, int]:
        # Which side of which limit takes novelty; all of one kind are among them.
        values = [results[name]["fit"][number] for name in names]
        limits = [-np.inf, *np.sort(values), np.inf]
        return max(
            ((float(limit), sign) for limit in limits for sign in (1, -1)),
            key=lambda rule: sum(
                weight[name] * gain[name] for name in names if rule[1] * (results[name]["fit"][number] - rule[0]) > 0
            ),
        )

    base = mean(_found(results, names, "ten nearest", "found") for names in families.values())

    def worth(picked: dict[str, bool]) -> str:
        return f"{base + sum(weight[name] * gain[name] for name in results if picked[name]) / len(families):.3f}"

    rows = [
        ["novelty, always", worth(dict.fromkeys(results, True))],
        ["ten nearest, always", worth(dict.fromkeys(results, False))],
        ["the better one, in hindsight", worth({name: gain[name] > 0 for name in results})],
    ]
    for number in next(iter(results.values()))["fit"]:
        picked = {}
        for family, names in families.items():
            limit, sign = stump(number, [name for name in results if of[name] != family])
            picked |= {name: sign * (results[name]["fit"][number] - limit) > 0 for name in names}
        rows.append([number, worth(picked)])
    return ["chosen by", "share found"], rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.right", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of feature files; figures are kept beside them")
    parser.add_argument("--splits", type=int, default=10, help="of each encoder's queries (default: 10)")
    given = parser.parse_args(arguments)
    for name in _MADE:
        made = {f"{name}-{loss}": partial(_make, name, loss) for loss in LOSSES}
        made |= {f"{name}-without-{seed}": partial(_make_without, name, seed) for seed in range(2)}
        for title, make in made.items():
            path = given.folder / f"{title}.npz"
            if not path.is_file():
                save_features(path, make())
    results: Results = {}
    with_strangers: Results = {}
    for path in sorted(given.folder.glob("*.npz")):
        content = load_features(path)
        left_out = _STRANGERS in content.unknown
        # With intents left out, the queries are the left-out ones.
        beyond = "outofscope" if "outofscope" in content.unknown and "unseen" not in path.stem else None
        if not left_out:
            results[path.stem] = _kept(path, ".right.json", content, given.splits, None)
        if strangers := _STRANGERS if left_out else beyond:
            with_strangers[path.stem] = _kept(path, ".strangers.json", content, given.splits, strangers)
    print("\n\n".join([*tables(results), strangers_table(with_strangers)]))


def _kept(path: Path, ending: str, content: FeatureFile, splits: int, strangers: str | None) -> dict[str, Any]:
    """Return the figures beside a feature file, which are made if they are not there."""
    kept = path.with_suffix(ending)
    if not kept.is_file():
        kept.write_text(json.dumps(judged(content, splits, strangers)))
        print(f"{kept.stem}: judged", flush=True)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


if __name__ == "__main__":
    main()
