"""The error that a threshold was asked for beside the one observed, on every encoder of ``benchmarks.transfer``.

Each decision is fitted on one part of the test inputs and judged on another, over many random splits: by class where
training has not seen the classes (``*``), so that no person has a part in both; else by input.

    python -m benchmarks.thresholds --cache FOLDER [--only NAME ...]

A further decision is one function in :data:`DECISIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import false_discovery_control
from torch import Tensor
from torch.nn.functional import normalize

import contrastive_curvature as cc
from benchmarks.machine import Case, machine_line, table
from benchmarks.threshold import judge_files
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.figures import retrieve
from benchmarks.transfer.fitted import DEFAULT, Fitted, Points
from contrastive_curvature.decisions.drift import EXPONENTS, grow, sequential_p_values
from contrastive_curvature.embedding.known import Reference

SPLITS = 100
STREAMS = 500
"""Of inputs that stay the same, for drift."""
FALSE_MATCH_RATES = (0.01, 0.001)
CONFIDENCE = 0.9
ALPHA, FDR = 0.05, 0.1
_BATCH = 500

Rows = NDArray[np.int64]


class Found(NamedTuple):
    """One decision on one encoder.

    Args:
        asked: Error.
        observed: Mean over the splits, on what did not fit; ``None`` where every fit was refused.
        above: Share of the splits with an observed error above the one asked for.
        use: Mean share of queries answered (none where the fit was refused), or of pairs of one class missed.
        refused: Share of the splits whose fit was refused.
    """

    asked: float
    observed: float | None
    above: float
    use: float
    refused: float = 0.0


class Encoder:
    """An encoder's test inputs, and splits of them."""

    def __init__(self, content: FeatureFile) -> None:
        self.content = content
        self.labels = content.test_labels
        self.unseen = not set(self.labels.tolist()) & set(content.train_labels.tolist())

    @cached_property
    def fitted(self) -> Fitted:
        """Its posteriors and inputs."""
        return Fitted(self.content)

    def score(self, name: str, points: Points | None = None) -> NDArray[Any]:
        """A score of the test or other inputs, from the posterior that the library takes when nobody asks for one."""
        return self.fitted.answers(DEFAULT, self.fitted.test if points is None else points)[name].numpy()

    @cached_property
    def scores(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Three scores of known and unknown inputs; the distance is to the nearest of 5,000 training embeddings."""
        fitted, content = self.fitted, self.content
        some = np.random.default_rng(0).permutation(len(content.train_features))[:5000]
        gallery = normalize(torch.from_numpy(content.outputs(content.train_features[some])), dim=1)
        kinds = [fitted.test, *(fitted.points(x) for name, x in content.unknown.items())]
        found: dict[str, list[Tensor]] = {"novelty": [], "uncertainty": [], "distance": []}
        for points in kinds:
            answers = fitted.answers(DEFAULT, points)
            mu = normalize(torch.from_numpy(content.outputs(points.features.numpy())), dim=1)
            answers["distance"] = torch.cat([1 - (part @ gallery.T).amax(1) for part in mu.split(_BATCH)]).double()
            for name, parts in found.items():
                parts.append(answers[name])
        return {name: (parts[0], torch.cat(parts[1:])) for name, parts in found.items()}

    @cached_property
    def predicted(self) -> Tensor:
        """Nearest class centre of each test input."""
        centres = self.fitted.posterior(DEFAULT).class_centres
        return centres.nearest(torch.from_numpy(self.content.outputs(self.content.test_features)))

    @cached_property
    def right(self) -> NDArray[Any]:
        """Whether each test input's nearest other test input is of its class; NaN without another one of it."""
        outputs = torch.from_numpy(self.content.outputs(self.content.test_features))
        return retrieve(outputs, torch.from_numpy(self.labels)).right.numpy()

    def halves(self, rows: Rows) -> Iterator[tuple[Rows, Rows]]:
        """Random halves of rows of the test inputs, by class where training has not seen the classes."""
        rng = np.random.default_rng(0)
        units = self.labels[rows] if self.unseen else np.arange(len(rows))
        every = np.unique(units)
        for _ in range(SPLITS):
            first = np.isin(units, rng.permutation(every)[: len(every) // 2])
            yield rows[first], rows[~first]


def wrong_answers(encoder: Encoder) -> dict[str, Found]:
    """``RetrievalThreshold`` on the uncertainty, asked for half of the encoder's error."""
    rows = np.flatnonzero(~np.isnan(encoder.right))
    right, score = encoder.right == 1, encoder.score("uncertainty")
    risk = float(f"{max(0.5 * (~right[rows]).mean(), 0.005):.2g}")
    out = {}
    for among in ("answered", "all"):
        observed, use, refused = [], [], 0
        for fit, judge in encoder.halves(rows):
            try:
                limit = cc.RetrievalThreshold(risk, among, CONFIDENCE).fit(score[fit], right[fit])  # type: ignore[arg-type]
            except cc.InputError:
                refused += 1
                use.append(0.0)
                continue
            accepted = limit.accept(score[judge])
            of = max(int(accepted.sum()), 1) if among == "answered" else len(judge)
            observed.append(float((accepted & ~right[judge]).sum() / of))
            use.append(float(accepted.mean()))
        out[f"wrong among {among}"] = _found(risk, observed, use, refused)
    return out


def same_or_not(encoder: Encoder) -> dict[str, Found]:
    """``MatchThreshold`` on the cosine of all pairs among the inputs of a half."""
    outputs = encoder.content.outputs(encoder.content.test_features)
    mu = normalize(torch.from_numpy(outputs), dim=1).numpy()

    def pairs(rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
        left, right = np.triu_indices(len(rows), 1)
        return (mu[rows] @ mu[rows].T)[left, right], encoder.labels[rows][left] == encoder.labels[rows][right]

    every = np.arange(len(mu))
    if len(every) > 1000:
        every = np.sort(np.random.default_rng(0).permutation(every)[:1000])
    splits = [(pairs(fit), pairs(judge)) for fit, judge in encoder.halves(every)]
    return {f"FMR {rate:g}, cosine": _matches(rate, splits) for rate in FALSE_MATCH_RATES}


def listed_pairs(encoder: Encoder) -> dict[str, Found]:
    """``MatchThreshold`` on the cosine of the file's own pairs (LFW).

    Of ten folds, whose people are disjoint, four fit the threshold and three judge.
    """
    listed = encoder.content.pairs
    if listed is None:
        return {}
    features = encoder.content.test_features if listed.features is None else listed.features
    mu = normalize(torch.from_numpy(encoder.content.outputs(features)), dim=1)
    cosine = (mu[listed.left] * mu[listed.right]).sum(1).numpy()
    splits: list[Any] = []
    rng = np.random.default_rng(0)
    for _ in range(SPLITS):
        order = rng.permutation(np.unique(listed.fold))
        parts = (np.isin(listed.fold, some) for some in (order[3:7], order[7:]))
        splits.append([(cosine[part], listed.same[part]) for part in parts])
    return {f"LFW's pairs, FMR {rate:g}, cosine": _matches(rate, splits) for rate in FALSE_MATCH_RATES}


def drift(encoder: Encoder) -> dict[str, Found]:
    """``DriftMonitor``: alarms on streams of test inputs without a shift, then of inputs of another kind after them.

    Halves by input, whose order is random, so that nothing changes; with unseen classes also by class, where the stream
    has other people or letters than the calibration, which is a shift. Missed: the other kind, within 100 inputs.
    """
    known, rng = encoder.score("novelty"), np.random.default_rng(0)
    _, features = next(iter(encoder.content.unknown.items()))
    other = encoder.score("novelty", encoder.fitted.points(features))
    rows = np.arange(len(known))
    orders = [rng.permutation(rows)[:1500] for _ in range(STREAMS)]
    ways = {"": [np.split(order, [len(order) // 2]) for order in orders]}
    if encoder.unseen:
        ways = {"": ways[""], ", other classes": [(fit, rng.permutation(judge)) for fit, judge in encoder.halves(rows)]}
    out = {}
    for way, splits in ways.items():
        highest, later = [], []
        for fit, judge in splits:
            scores = np.concatenate([known[judge], rng.permutation(other)[:100]])
            pool, nothing = np.sort(known[fit]).tolist(), np.full(len(EXPONENTS), -np.inf)
            evidence = grow(nothing, 0, sequential_p_values(pool, scores, 1 - rng.random(len(scores))))[1]
            highest.append(evidence[: len(judge)].max())
            later.append(evidence.max())
        for delta in (0.01, 0.1):
            alarms, missed = (np.array(each) >= -np.log(delta) for each in (highest, later))
            out[f"drift {delta:g}{way}"] = _found(
                delta, alarms.astype(float).tolist(), (~missed).astype(float).tolist()
            )
    return out


def unknown_inputs(encoder: Encoder) -> dict[str, Found]:
    """Conformal p-values of three scores; those by predicted class; and a selection of unknown inputs, one in ten.

    Of "worst class", the observed error is that of the predicted class that is flagged most often over all splits,
    among those with 20 test inputs or more, and the share above is that of the classes.
    """
    if not encoder.content.unknown:
        return {}
    every, rng, out = np.arange(len(encoder.labels)), np.random.default_rng(1), {}
    for score, (known, unknown) in encoder.scores.items():
        flagged, caught = [], []
        for fit, judge in encoder.halves(every):
            reference = _reference(known[fit])
            flagged.append(float((reference.p_value(known[judge]) <= ALPHA).double().mean()))
            caught.append(float((reference.p_value(unknown) <= ALPHA).double().mean()))
        out[f"known flagged, {score}"] = _found(ALPHA, flagged, caught)
    known, unknown = encoder.scores["uncertainty"]
    classes, count = encoder.predicted, int(encoder.predicted.max()) + 1
    large = np.bincount(classes, minlength=count) >= 20
    for by_class in (False, True) if large.any() else ():
        total, hits = np.zeros(count), np.zeros(count)
        for fit, judge in encoder.halves(every):
            reference = _reference(known[fit], classes[fit] if by_class else None, count)
            p_values = reference.p_value(known[judge], classes[judge]).numpy()
            total += np.bincount(classes[judge], minlength=count)
            hits += np.bincount(classes[judge], p_values <= ALPHA, count)
        shares = hits[large] / np.maximum(total[large], 1)
        name = "worst class, by class" if by_class else "worst class"
        above = float((shares > ALPHA).mean())
        out[name] = Found(ALPHA, float(shares.max()), above, float(hits.sum() / total.sum()))
    false, power = [], []
    known, unknown = encoder.scores["novelty"]
    for fit, judge in encoder.halves(every):
        rows, others = rng.choice(judge, min(180, len(judge))), rng.choice(len(unknown), 20)
        p_values = _reference(known[fit]).p_value(torch.cat([known[rows], unknown[others]])).numpy()
        selected = false_discovery_control(p_values) <= FDR
        false.append(float(selected[: len(rows)].sum() / max(1, selected.sum())))
        power.append(float(selected[len(rows) :].mean()))
    return {**out, "false among selected, novelty": _found(FDR, false, power)}


def _reference(scores: Tensor, classes: Tensor | None = None, n_classes: int = 1) -> Reference:
    nothing = torch.zeros(len(scores), 1, dtype=torch.float64)
    return Reference.of(nothing, nothing, classes, n_classes, scores, "score")


DECISIONS: tuple[Callable[[Encoder], dict[str, Found]], ...] = (
    wrong_answers,
    same_or_not,
    listed_pairs,
    drift,
    unknown_inputs,
)
"""Each gives the decisions that it tried on an encoder, by name."""


def _matches(rate: float, splits: Sequence[Any]) -> Found:
    observed, missed = [], []
    for (scores, same), (new, so) in splits:
        decided = cc.MatchThreshold(rate).fit(scores, same).same(new)
        observed.append(float(decided[~so].mean()))
        missed.append(float((~decided[so]).mean()))
    return _found(rate, observed, missed)


def _found(asked: float, observed: list[float], use: list[float], refused: int = 0) -> Found:
    above = sum(one > asked for one in observed) / len(use)
    return Found(asked, float(np.mean(observed)) if observed else None, above, float(np.mean(use)), refused / len(use))


def judge(content: FeatureFile) -> dict[str, Any]:
    """All decisions on one feature file, as plain numbers."""
    encoder = Encoder(content)
    found = {name: one._asdict() for decide in DECISIONS for name, one in decide(encoder).items()}
    return {"unseen_classes": encoder.unseen, "decisions": found}


def render(results: Case) -> str:
    """One table, a line for each encoder; decisions that some encoders have no data for stand below."""
    encoders = results["encoders"]
    every = list(dict.fromkeys(name for one in encoders.values() for name in one["decisions"]))
    wide = [name for name in every if all(name in one["decisions"] for one in encoders.values())]
    rows = [
        [f"{name}{'*' if one['unseen_classes'] else ''}", *(_cell(one["decisions"][decision]) for decision in wide)]
        for name, one in encoders.items()
    ]
    alone = [
        [name, decision, _cell(found)]
        for name, one in encoders.items()
        for decision, found in one["decisions"].items()
        if decision not in wide
    ]
    parts = [
        "# Asked and observed errors of thresholds",
        f"`python -m benchmarks.thresholds`, {machine_line(results['machine'])}; {SPLITS} splits of the test\n"
        "inputs, by class where training has not seen the classes (`*`), else by input.",
        "Each cell: error asked for / observed on average (share of splits above the one asked for: a half, by\n"
        "chance, where an error holds on average); after the semicolon the share of queries answered, or of pairs\n"
        "of one class missed. Wrong answers: half of the encoder's error is asked for; among the answered with a\n"
        f"confidence of {CONFIDENCE:g}. Drift: share of {STREAMS} streams of test inputs with a false alarm (asked\n"
        "/ observed); missed: streams without an alarm within 100 inputs of another kind.",
        table(["encoder", *wide], rows),
        *([table(["encoder", "decision", "result"], alone)] if alone else []),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(found: Case) -> str:
    asked, observed, above, use, refused = (found[name] for name in Found._fields)
    if observed is None:
        return f"{asked:.2g}; all refused"
    note = f"; {refused:.0%} refused" if refused else ""
    return f"{asked:.2g} / {observed:.2g} ({above:.0%}); {use:.1%}{note}"


def main(arguments: Sequence[str] | None = None) -> None:
    judge_files("thresholds", __doc__, judge, render, {"splits": SPLITS}, arguments)


if __name__ == "__main__":
    main()
