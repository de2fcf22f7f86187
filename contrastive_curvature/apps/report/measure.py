"""From the scores of the inputs to the parts of an evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.apps.report.parts import (
    Bin,
    Card,
    Compared,
    Detection,
    Errors,
    Flagged,
    Group,
    Missing,
    Pairs,
    Reliability,
    Retrieval,
    Thresholds,
)
from contrastive_curvature.apps.report.scored import Extreme, Judged, Scored
from contrastive_curvature.embedding.known import NOVELTY

ClassNames = Mapping[int, str] | Sequence[str] | None

_SAME = 1e-5
"""Entries of the directions of one input in another batch differ less, in float32."""

_GROUPS = {
    "certain": ("Most certain", "The smallest uncertainty: few errors should be here."),
    "uncertain": ("Least certain", "The largest uncertainty: errors should gather here."),
    "unusual": (
        "Known, but unusual",
        "Known test inputs with the largest novelty: a threshold flags them first, by mistake.",
    ),
    "usual": ("Unknown, but usual", "Unknown inputs with the smallest novelty: a threshold misses them first."),
}

_VOTERS = 10
"""Neighbours whose classes are compared."""

_MOST_PAIRS = 100_000
"""Pairs of one class, and as many of two."""

_MOST_FOUND = 0.5
_MOST_POINTS = 200
_N_BINS = 40
_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_LARGEST_ALPHA = 0.5


@dataclass(frozen=True)
class Search:
    """The neighbours of every test input.

    Attributes:
        ranking: Which of them are right.
        labels: Of the test inputs, shape (N,).
        match: Labels of the nearest neighbours, shape (N,).
        size: Number of points that each input was compared with.
    """

    ranking: metrics.Ranking
    labels: Tensor
    match: Tensor
    size: int


def search(test: Scored, gallery: Scored | None, most: int) -> Search | Missing:
    """Find up to ``most`` neighbours of the test inputs: in the gallery, or among the other test inputs."""
    if test.labels is None:
        return Missing("The test inputs have no labels, so no neighbour is right or wrong.")
    if gallery is not None and gallery.labels is None:
        return Missing("The gallery has no labels, so no neighbour is right or wrong.")
    size = len(test) - 1 if gallery is None else len(gallery)
    if not size:
        return Missing("There is one test input and no gallery, so it has no neighbour. Give more inputs or a gallery.")
    theirs = None if gallery is None else gallery.labels
    if theirs is None:
        alone = len(test.labels.unique()) == len(test)
    else:
        alone = not bool(torch.isin(test.labels, theirs).any())
    if alone:
        where = "another test input" if gallery is None else "a gallery point"
        return Missing(f"No test input has {where} of its class, so there is nothing right to find.")
    found = metrics.nearest_neighbors(test.mu, None if gallery is None else gallery.mu, k=min(most, size))
    if gallery is not None:
        itself = (test.mu - gallery.mu[found[:, 0]]).abs().amax(1) < _SAME
        if float(itself.double().mean()) > _MOST_FOUND:
            msg = (
                "evaluate: most test inputs are in the gallery too, so that each is its own nearest neighbour and "
                "seems right. Leave them out of the gallery, or give no gallery: then each input is left out of its "
                "own search."
            )
            warnings.warn(msg, stacklevel=3)
    match = (test.labels if theirs is None else theirs)[found[:, 0]]
    return Search(metrics.rank_by_labels(found, test.labels, theirs), test.labels, match, size)


def retrieval(found: Search, ks: list[int]) -> Retrieval:
    """Return recall and mAP for all k that there are points for."""
    fitting = [k for k in ks if k <= found.size]
    return Retrieval(
        {k: metrics.recall_at_k(found.ranking, k) for k in fitting},
        {k: metrics.map_at_k(found.ranking, k) for k in fitting},
        int((found.ranking.n_positives > 0).sum()),
        found.size,
        [k for k in ks if k > found.size],
    )


def errors(found: Search, uncertainty: Tensor) -> Errors:
    """Judge an uncertainty, shape (N,), by whether the nearest neighbours are right."""
    right = metrics.average_precision_at_k(found.ranking, 1)
    counted = found.ranking.n_positives > 0
    wrong = counted & (right == 0)
    n_wrong, n_queries = int(wrong.sum()), int(counted.sum())
    r_auroc: float | Missing
    if 0 < n_wrong < n_queries:
        r_auroc = metrics.auroc(uncertainty[counted & ~wrong], uncertainty[wrong])
    else:
        all_are = "wrong" if n_wrong else "right"
        r_auroc = Missing(
            f"Every nearest neighbour is {all_are}, so no order of the inputs separates right from wrong."
        )
    by_right = torch.nan_to_num(1 - right, nan=1.0)
    return Errors(
        metrics.ausc(uncertainty, right),
        metrics.ausc(by_right, right),
        r_auroc,
        _points(metrics.sparsification_curve(uncertainty, right)),
        _points(metrics.sparsification_curve(by_right, right)),
        n_wrong,
        n_queries,
    )


def reliability(found: Search, test: Scored, gallery: Scored | None) -> Reliability | Missing:
    """Let each sampled network vote for the class of every test input, with the label of the nearest neighbour."""
    if test.samples is None or (gallery is not None and gallery.samples is None):
        return Missing("The sampled embeddings would take more than 1 GiB. Give fewer inputs or a smaller n_samples.")
    searched = () if gallery is None else (gallery.samples, gallery.labels)
    votes = metrics.retrieval_votes(test.samples, found.labels, *searched)
    curve = metrics.calibration_bins(votes, found.labels)
    edges = curve.edges.tolist()
    columns = (edges[:-1], edges[1:], curve.count.tolist(), curve.confidence.tolist(), curve.accuracy.tolist())
    bins = [each for each in map(Bin, *columns) if each.count]
    return Reliability(curve.expected_calibration_error, metrics.brier_score(votes, found.labels), bins, len(votes))


def pairs(test: Scored, seed: int) -> Pairs | Missing:
    """Return the equal error rate and the DET curve of pairs of test inputs: all, or where they are many a sample."""
    if test.labels is None:
        return Missing("The test inputs have no labels, so no pair is of one class or of two.")
    labels, order = test.labels.sort()
    # Partners come earlier in this order: those of one class from its first row on, and those of others before it.
    first, row = torch.searchsorted(labels, labels), torch.arange(len(labels))
    if not bool((first < row).any()) or not int(first[-1]):
        return Missing("The test inputs have no pairs of one class, or none of two. Give some of both kinds.")
    generator = torch.Generator().manual_seed(seed)
    one, two = (
        _cosines(test.mu[order], *_draw(start, count, generator))
        for start, count in ((first, row - first), (torch.zeros_like(first), first))
    )
    scores, same = torch.cat([one, two]), torch.arange(len(one) + len(two)) < len(one)
    _, matched, missed = metrics.det_curve(scores, same)
    # Both axes of the chart are logarithmic.
    rates = torch.cat([torch.zeros(1), torch.logspace(-6, 0, 97)]).double()
    at = torch.cat([torch.searchsorted(-matched, -rates), torch.searchsorted(missed, rates)]).unique()
    curve = [[_rounded(x), _rounded(y)] for x, y in zip(matched[at].tolist(), missed[at].tolist(), strict=True)]
    return Pairs(metrics.equal_error_rate(scores, same), curve, len(one), len(two))


def _draw(first: Tensor, count: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return both rows of pairs, where row i has the partners ``first[i]`` to ``first[i] + count[i] - 1``."""
    end = count.cumsum(0)
    total = int(end[-1])
    many = total > _MOST_PAIRS
    drawn = torch.randint(total, (_MOST_PAIRS,), generator=generator) if many else torch.arange(total)
    row = torch.searchsorted(end, drawn, right=True)
    return row, first[row] + drawn - (end - count)[row]


def _cosines(mu: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each pair of rows, a few thousand at a time for the memory."""
    steps = zip(a.split(4096), b.split(4096), strict=True)
    return torch.cat([(mu[i].double() * mu[j].double()).sum(1) for i, j in steps])


def detection(known: Judged | Missing, unknown: Judged | Missing | None) -> Detection | Missing:
    """Return AUROC and AUPRC of the novelty."""
    if unknown is None:
        return Missing("No unknown inputs were given. Give some of a kind that the encoder was not trained for.")
    if isinstance(known, Missing):
        return known
    if isinstance(unknown, Missing):
        return unknown
    return Detection(metrics.auroc(known.novelty, unknown.novelty), metrics.auprc(known.novelty, unknown.novelty))


def compared(
    test: Scored, unknown: Scored | None, gallery: Scored | None, found: Search | Missing
) -> tuple[Compared, ...]:
    """Return how well each score finds unknown inputs and wrong neighbours."""
    wrong = right = None
    if isinstance(found, Search):
        counted = found.ranking.n_positives > 0
        hit = metrics.average_precision_at_k(found.ranking, 1) > 0
        wrong, right = counted & ~hit, counted & hit
    known = _scores(test, test, gallery)
    others = {} if unknown is None else _scores(unknown, test, gallery)
    rows = []
    for name, scores in known.items():
        other = others.get(name)
        auroc, auprc = (None, None) if other is None else (metrics.auroc(scores, other), metrics.auprc(scores, other))
        r_auroc = None
        if wrong is not None and right is not None and bool(wrong.any()) and bool(right.any()):
            r_auroc = metrics.auroc(scores[right], scores[wrong])
        rows.append(Compared(name, auroc, auprc, r_auroc))
    return tuple(rows)


def _scores(scored: Scored, test: Scored, gallery: Scored | None) -> dict[str, Tensor]:
    """Return all scores of a data set by name, shape (N,), as far as there are any."""
    out = {"uncertainty": scored.uncertainty}
    if not isinstance(scored.judged, Missing):
        out["novelty"] = scored.judged.novelty
    out |= scored.rivals
    searched, itself = test if gallery is None else gallery, gallery is None and scored is test
    size = len(searched) - itself
    if not size:
        return out
    near = metrics.nearest_neighbors(scored.mu, None if itself else searched.mu, k=min(_VOTERS, size))
    out["distance"] = (scored.mu - searched.mu[near[:, 0]]).double().norm(dim=1)
    if searched.labels is not None and size > 1:
        classes = searched.labels[near]
        out["votes"] = (classes != classes[:, :1]).double().mean(1)
    return out


def known_inputs(la: Any) -> tuple[int | None, bool]:
    """Return how many known inputs the p-values compare with, and whether ``la.calibrate`` gave them."""
    calibration, sample = la.known.calibration, la.known.sample
    if calibration is not None:
        return calibration.reference.fewest, True
    return (None if sample is None else len(sample.features)), False


def thresholds(
    la: Any, known: Judged | Missing, unknown: Judged | Missing | None, alphas: list[float]
) -> Thresholds | Missing:
    """Return what is flagged, at the thresholds that are asked for and at many others."""
    if isinstance(known, Missing):
        return known
    if isinstance(unknown, Missing):
        return unknown
    sides = [known] if unknown is None else [known, unknown]
    novelty, p_value = (torch.cat(column) for column in zip(*sides, strict=True))
    n, calibrated = known_inputs(la)
    calibration = la.known.calibration
    by_novelty = calibration is None or str(calibration.score) == NOVELTY
    by_chance = 1 / n + 1 / len(known.novelty) if n and calibrated else None

    def at(alpha: float) -> Flagged:
        flagged = p_value <= alpha
        line: float | None = None
        if not by_novelty:
            # No value of the novelty says what another score flags.
            pass
        elif bool(flagged.all()):
            line = float(novelty.min())
        elif bool(flagged.any()):
            line = float((novelty[flagged].min() + novelty[~flagged].max()) / 2)
        shares = [float((side.p_value <= alpha).double().mean()) for side in sides]
        deviation = None if by_chance is None else math.sqrt(alpha * (1 - alpha) * by_chance)
        return Flagged(alpha, shares[0], None if unknown is None else shares[1], line, deviation)

    least = 0.0 if n is None else 1 / (n + 1)
    grid = [float(f"{step}e{power}") for power in range(-4, 0) for step in _STEPS]
    steps = [alpha for alpha in grid if least <= alpha <= _LARGEST_ALPHA] or [_LARGEST_ALPHA]
    edges = _bin_edges(known.novelty, novelty)
    return Thresholds(
        [at(alpha) for alpha in steps],
        [at(alpha) for alpha in alphas if alpha >= least],
        [alpha for alpha in alphas if alpha < least],
        n,
        calibrated,
        [_rounded(edge) for edge in edges.tolist()],
        _shares(edges, known.novelty),
        None if unknown is None else _shares(edges, unknown.novelty),
    )


def groups(test: Scored, unknown: Scored | None, found: Search | Missing, names: ClassNames) -> tuple[Group, ...]:
    """Return the most and the least certain test inputs, and those that a threshold flags first and last."""
    shown = []
    for kind, (title, text) in _GROUPS.items():
        scored = unknown if kind == "usual" else test
        if scored is not None and (extremes := scored.extremes.get(kind)):
            searched = found if scored is test and isinstance(found, Search) else None
            shown.append(Group(title, text, tuple(_card(scored, extreme, searched, names) for extreme in extremes)))
    return tuple(shown)


def _card(scored: Scored, extreme: Extreme, found: Search | None, names: ClassNames) -> Card:
    row = extreme.row
    match = right = None
    if found is not None:
        match = _class_name(int(found.match[row]), names)
        right = bool(found.ranking.relevant[row, 0]) if int(found.ranking.n_positives[row]) else None
    return Card(
        name=scored.data.name(row),
        item=extreme.item if scored.data.items is None else scored.data.items[row],
        label=None if scored.labels is None else _class_name(int(scored.labels[row]), names),
        match=match,
        right=right,
        uncertainty=float(scored.uncertainty[row]),
        p_value=None if isinstance(scored.judged, Missing) else float(scored.judged.p_value[row]),
    )


def _class_name(label: int, names: ClassNames) -> str:
    """Return the name of a class, or its number where it has none."""
    if isinstance(names, Mapping):
        return str(names.get(label, label))
    return str(label if names is None or not 0 <= label < len(names) else names[label])


def _rounded(value: float) -> float:
    """Return a number with five significant digits: shorter in a file, and the same in a plot."""
    return float(f"{value:.5g}")


def _points(curve: metrics.SparsificationCurve) -> list[list[float]]:
    """Return points of a curve, few enough for a page, the first and the last among them."""
    n = len(curve[0])
    rows = torch.linspace(0, n - 1, min(_MOST_POINTS, n), dtype=torch.float64).round().long().unique()
    return [[_rounded(x), _rounded(y)] for x, y in zip(*(side[rows].tolist() for side in curve), strict=True)]


def _bin_edges(known: Tensor, everything: Tensor) -> Tensor:
    """Return edges of equal width that show the known values well; the last bin takes what is far beyond them."""
    low, high = float(everything.min()), float(everything.max())
    middle, far = float(known.median()), float(known.max())
    high = min(high, far + 2 * (far - middle))
    if not high - low > 1e-9 * max(1.0, abs(low)):
        low, high = low - 0.5, low + 0.5
    return torch.linspace(low, high, _N_BINS + 1, dtype=torch.float64)


def _shares(edges: Tensor, values: Tensor) -> list[float]:
    """Return the share of the values in each bin; those outside count in the first or the last one."""
    counts = torch.histogram(values.double().clamp(edges[0], edges[-1]), edges).hist
    return [_rounded(share) for share in (counts / len(values)).tolist()]
