"""Measure a posterior on data that it was not fitted on: from the scores of its inputs to an evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from contrastive_curvature import metrics, validate
from contrastive_curvature.apps.report.evaluation import (
    Bin,
    Card,
    Compared,
    Detection,
    Errors,
    Evaluation,
    Flagged,
    Group,
    Missing,
    Pairs,
    Reliability,
    Retrieval,
    Thresholds,
)
from contrastive_curvature.apps.report.scored import GROUPS, Data, Extreme, Scored, score
from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.laplace.advice import LabelWarning
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.tower_posteriors import TwoTowerLaplace
from contrastive_curvature.network.loader import check_loader
from contrastive_curvature.progress import Progress

_Part = TypeVar("_Part")
_ClassNames = Mapping[int, str] | Sequence[str] | None

_SAME = 1e-5
"""Entries of the directions of one input in another batch differ less, in float32."""

_MOST_FOUND = 0.5
"""Share of the test inputs that the gallery may hold without a warning."""

_VOTERS = 10
"""Neighbours whose classes are compared."""

_MOST_PAIRS = 100_000
"""Pairs of one class, and as many of two."""

_MOST_POINTS = 200
_N_BINS = 40
_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_LARGEST_ALPHA = 0.5


def evaluate(
    la: Any,
    test: Iterable[Any] | Data,
    *,
    unknown: Iterable[Any] | Data | None = None,
    gallery: Iterable[Any] | Data | None = None,
    ks: Sequence[int] = (1, 5, 10),
    alphas: Sequence[float] = (0.01, 0.02, 0.05, 0.1),
    n_samples: int = 30,
    n_shown: int = 12,
    seed: int = 0,
    class_names: Mapping[int, str] | Sequence[str] | None = None,
    progress_bar: bool | None = None,
) -> Evaluation:
    """Compute every metric of the library, and the content of the page.

    Each data set is run over once. A part without its data is a :class:`Missing` with the reason: retrieval needs
    labels, the detection of unknown inputs needs ``unknown``, and thresholds need a calibration.

    Args:
        la: A fitted posterior of one encoder, preferably calibrated with other inputs than ``test``.
        test: Known inputs that the posterior was neither fitted nor calibrated on: batches ``(x, labels)``, mappings,
            or ``x`` alone; or a :class:`Data`, which adds texts, pictures and names for the page.
        unknown: Inputs of a kind that the encoder does not know, in the same form; labels are not used.
        gallery: Inputs to search, with labels. ``None`` searches among the other test inputs.
        ks: Ranks of recall@k and mAP@k.
        alphas: Thresholds of the p-value whose flagged shares are reported, each in (0, 1).
        n_samples: Number of networks that vote, for the reliability; 0 leaves the reliability out.
        n_shown: Number of inputs in each group on the page; 0 for none.
        seed: Seed of the sampled networks, and of the pairs if there are more than 100,000 of one class or of two.
        class_names: Names of the labels, for the page.
        progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

    Returns:
        The evaluation.

    Raises:
        NotFittedError: Before ``fit``.
        InputTypeError: An argument or a batch has another type.
        InputError: An argument is out of range, a data set is empty, or an input has no finite output.
        UnsupportedError: ``la`` is a posterior of two towers.

    Warns:
        UserWarning: Most test inputs are also in the gallery.
        LabelWarning: Test inputs have classes that the fit did not have.
        OptimisticPValueWarning: The posterior is not calibrated.
    """
    _check_posterior(la)
    ranks, alphas = _sorted("ks", ks, validate.count), _sorted("alphas", alphas, validate.fraction)
    if not ranks:
        raise InputTypeError("ks", "positive whole numbers, as a list", repr(ks))
    for name, value in (("n_samples", n_samples), ("n_shown", n_shown), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(name, "a whole number >= 0", value)
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, (Mapping, Sequence))):
        wanted = "names by label, as a list or a dict"
        raise InputTypeError("class_names", wanted, f"a {type(class_names).__name__}")
    data = {}
    for name, source in (("test", test), ("unknown", unknown), ("gallery", gallery)):
        if source is not None:
            check_loader(source.batches if isinstance(source, Data) else source, name, once=True)
            data[name] = source if isinstance(source, Data) else Data(source)

    no_votes = None if n_samples else Missing("No networks were sampled (n_samples=0).")
    progress = Progress(progress_bar)
    scored = {
        name: score(la, name, part, 0 if no_votes or name == "unknown" else n_samples, n_shown, seed, progress)
        for name, part in data.items()
    }
    known, others = scored["test"], scored.get("unknown")
    _advise_on_classes(la, known)
    searched = scored.get("gallery", known)
    near = _neighbours(known, searched, max(ranks[-1], _VOTERS))
    search = _search(known, searched, near)
    compared = _compared(
        _scores(known, searched, near),
        {} if others is None else _scores(others, searched, _neighbours(others, searched, _VOTERS)),
        search,
    )
    by_name: dict[str, Any] = {one.name: one for one in compared}
    detection: Detection | Missing
    if others is None:
        detection = Missing("No unknown inputs were given. Give some of a kind that the encoder was not trained for.")
    elif isinstance(known.p_value, Missing):
        detection = known.p_value
    else:
        detection = Detection(by_name["novelty"].auroc, by_name["novelty"].auprc)
    calibration, sample = la.posterior.calibration, la.posterior.fitted.training_sample
    n_compared = None if sample is None else len(sample.rows)
    if calibration is not None:
        n_compared = calibration.reference.fewest
    return Evaluation(
        counts={
            **{name: len(scored.get(name, ())) for name in ("test", "unknown", "gallery")},
            "classes": 0 if known.labels is None else len(known.labels.unique()),
        },
        retrieval=_part(_retrieval, search, ranks),
        errors=_part(_errors, search, known.scores["uncertainty"], by_name["uncertainty"].r_auroc),
        reliability=_part(_reliability, no_votes or search, known, searched),
        pairs=_pairs(known, seed),
        detection=detection,
        thresholds=_part(_thresholds, known.p_value, known, others, alphas, calibration, n_compared),
        compared=compared,
        groups=_groups(scored, search, class_names),
        posterior=_description(la, n_compared),
    )


def _check_posterior(la: Any) -> None:
    if isinstance(la, TwoTowerLaplace):
        raise UnsupportedError(
            "evaluate: a posterior of two towers has two encoders. Evaluate la.a and la.b, each with its own inputs."
        )
    if not isinstance(la, ContrastiveLaplace):
        wanted = 'a posterior, Laplace(encoder, likelihood="contrastive") after fit'
        raise InputTypeError("la", wanted, f"a {type(la).__name__}")
    la.check_fitted()


def _sorted(name: str, values: Any, check: Callable[[str, object], Any]) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputTypeError(name, "numbers, as a list", repr(values))
    return sorted({check(name, value) for value in values})


def _advise_on_classes(la: Any, known: Scored) -> None:
    """Warn about classes without a centre, because ``uncertainty`` uses the centres."""
    if la.class_centres is None or known.labels is None:
        return
    classes = known.labels.unique()
    new = int((~torch.isin(classes, la.class_centres.labels.to(classes))).sum())
    if new:
        msg = (
            f"evaluate: {new} of the {len(classes)} classes of test were not in the fit, whose classes uncertainty "
            "compares inputs with. la.measure_classes(loader) takes those of other data, and la.class_centres = None "
            "leaves them out. Or are the classes numbered in another way?"
        )
        warnings.warn(msg, LabelWarning, stacklevel=3)


def _description(la: Any, n_compared: int | None) -> dict[str, str | int | float | bool | None]:
    """Return a description of a posterior for readers of its evaluation, as plain values."""
    precision = la.prior_precision.detach().flatten().double().cpu()
    out: dict[str, Any] = {
        "class": type(la).__name__,
        "structure": str(getattr(la.structure, "value", la.structure)),
        "embedding dimension": int(la.n_outputs),
        "weights with a posterior": int(la.mean.numel()),
        "training points": int(la.n_data),
        "prior precision": float(precision[0]) if len(precision) == 1 else f"{len(precision)} values",
        "temperature": float(la.temperature),
        "compared with for p-values": n_compared,
        "calibrated": la.posterior.calibration is not None,
    }
    for name, value in la.plain_options().items():
        plain = value is None or isinstance(value, (str, int, float, bool))
        out[f"option: {name}"] = value if plain else str(value)
    return out


def _part(measured: Callable[..., _Part], source: Any, *options: Any) -> _Part | Missing:
    """Return a part of an evaluation, or ``source`` if it is :class:`Missing`."""
    return source if isinstance(source, Missing) else measured(source, *options)


@dataclass(frozen=True)
class _Search:
    """The neighbours of N test inputs.

    Attributes:
        ranking: The neighbours that are right.
        labels: Labels of the test inputs, shape (N,).
        match: Labels of the nearest neighbours, shape (N,).
        right: 1 if the match has the same class, 0 if not, NaN if there is no point of this class; float64, shape (N,).
        size: Number of points that each input is compared with.
    """

    ranking: metrics.Ranking
    labels: Tensor
    match: Tensor
    right: Tensor
    size: int


def _neighbours(scored: Scored, searched: Scored, most: int) -> Tensor | None:
    """Return the rows of up to ``most`` nearest points, shape (N, K); ``None`` without points.

    In a search among its own data set, an input is not its own neighbour.
    """
    alone = searched is scored
    size = len(searched) - alone
    return metrics.nearest_neighbors(scored.mu, None if alone else searched.mu, k=min(most, size)) if size else None


def _search(test: Scored, searched: Scored, near: Tensor | None) -> _Search | Missing:
    """Compare the classes of test inputs and their neighbours ``near``, shape (N, K)."""
    alone = searched is test
    if test.labels is None or searched.labels is None:
        whose = "test inputs have" if test.labels is None else "gallery has"
        return Missing(f"The {whose} no labels, so no neighbour is right or wrong.")
    if near is None:
        return Missing("There is one test input and no gallery, so it has no neighbour. Give more inputs or a gallery.")
    classes = test.labels.unique()
    if len(classes) == len(test) if alone else not bool(torch.isin(classes, searched.labels).any()):
        where = "another test input" if alone else "a gallery point"
        return Missing(f"No test input has {where} of its class, so there is nothing right to find.")
    if not alone:
        itself = (test.mu - searched.mu[near[:, 0]]).abs().amax(1) < _SAME
        if float(itself.double().mean()) > _MOST_FOUND:
            msg = (
                "evaluate: most test inputs are in the gallery too, so that each is its own nearest neighbour and "
                "seems right. Leave them out of the gallery, or give no gallery: then each input is left out of its "
                "own search."
            )
            warnings.warn(msg, stacklevel=3)
    ranking = metrics.rank_by_labels(near, test.labels, None if alone else searched.labels)
    right = metrics.average_precision_at_k(ranking, 1)
    return _Search(ranking, test.labels, searched.labels[near[:, 0]], right, len(searched) - alone)


def _retrieval(search: _Search, ks: list[int]) -> Retrieval:
    """Return recall and mAP for all k up to the number of points."""
    fitting = [k for k in ks if k <= search.size]
    return Retrieval(
        {k: metrics.recall_at_k(search.ranking, k) for k in fitting},
        {k: metrics.map_at_k(search.ranking, k) for k in fitting},
        int((search.ranking.n_positives > 0).sum()),
        search.size,
        [k for k in ks if k > search.size],
    )


def _errors(search: _Search, uncertainty: Tensor, r_auroc: float | None) -> Errors:
    """Judge an uncertainty, shape (N,), by whether the nearest neighbours are right."""
    right = search.right
    n_wrong, n_queries = int((right == 0).sum()), int((~right.isnan()).sum())
    all_are = "wrong" if n_wrong else "right"
    reason = f"Every nearest neighbour is {all_are}, so no order of the inputs separates right from wrong."
    by_right = torch.nan_to_num(1 - right, nan=1.0)
    curve, best = (metrics.sparsification_curve(order, right) for order in (uncertainty, by_right))
    # Few enough points for a page, including the first and the last.
    n = len(curve[0])
    at = torch.linspace(0, n - 1, min(_MOST_POINTS, n), dtype=torch.float64, device="cpu").round().long().unique()
    return Errors(
        metrics.ausc(uncertainty, right),
        metrics.ausc(by_right, right),
        Missing(reason) if r_auroc is None else r_auroc,
        _points(*curve, at),
        _points(*best, at),
        n_wrong,
        n_queries,
    )


def _reliability(search: _Search, test: Scored, searched: Scored) -> Reliability | Missing:
    """Let each sampled network vote for the class of every test input, with the label of the nearest neighbour."""
    if test.samples is None or searched.samples is None:
        return Missing("The sampled embeddings would take more than 1 GiB. Give fewer inputs or a smaller n_samples.")
    gallery = () if searched is test else (searched.samples, searched.labels)
    votes = metrics.retrieval_votes(test.samples, search.labels, *gallery)
    curve = metrics.calibration_bins(votes, search.labels)
    edges = curve.edges.tolist()
    columns = (edges[:-1], edges[1:], curve.count.tolist(), curve.confidence.tolist(), curve.accuracy.tolist())
    bins = [each for each in map(Bin, *columns) if each.count]
    return Reliability(curve.expected_calibration_error, metrics.brier_score(votes, search.labels), bins, len(votes))


def _pairs(test: Scored, seed: int) -> Pairs | Missing:
    """Return the equal error rate and the DET curve of all pairs of test inputs, or of a sample if there are many."""
    if test.labels is None:
        return Missing("The test inputs have no labels, so no pair is of one class or of two.")
    labels, order = test.labels.sort()
    # The partners of a row come earlier in this order: the same class starts at its first row, other classes are before
    # it.
    first, row = torch.searchsorted(labels, labels), torch.arange(len(labels), device="cpu")
    if not bool((first < row).any()) or not int(first[-1]):
        return Missing("The test inputs have no pairs of one class, or none of two. Give some of both kinds.")
    generator = torch.Generator().manual_seed(seed)
    one, two = (
        _cosines(test.mu[order], *_draw(start, count, generator))
        for start, count in ((first, row - first), (torch.zeros_like(first), first))
    )
    scores, same = torch.cat([one, two]), torch.arange(len(one) + len(two), device="cpu") < len(one)
    _, matched, missed = metrics.det_curve(scores, same)
    # Both axes of the chart are logarithmic.
    rates = torch.cat([torch.zeros(1, device="cpu"), torch.logspace(-6, 0, 97, device="cpu")]).double()
    at = torch.cat([torch.searchsorted(-matched, -rates), torch.searchsorted(missed, rates)]).unique()
    return Pairs(metrics.equal_error_rate(scores, same), _points(matched, missed, at), len(one), len(two))


def _draw(first: Tensor, count: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return both rows of pairs; row i has the partners ``first[i]`` to ``first[i] + count[i] - 1``."""
    end = count.cumsum(0)
    total = int(end[-1])
    many = total > _MOST_PAIRS
    drawn = (
        torch.randint(total, (_MOST_PAIRS,), generator=generator, device="cpu")
        if many
        else torch.arange(total, device="cpu")
    )
    row = torch.searchsorted(end, drawn, right=True)
    return row, first[row] + drawn - (end - count)[row]


def _cosines(mu: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each pair of rows, a few thousand at a time to save memory."""
    steps = zip(a.split(4096), b.split(4096), strict=True)
    return torch.cat([(mu[i].double() * mu[j].double()).sum(1) for i, j in steps])


def _scores(scored: Scored, searched: Scored, near: Tensor | None) -> dict[str, Tensor]:
    """Return all scores of a data set by name, shape (N,) each; ``near`` are its neighbours, shape (N, K)."""
    scores = dict(scored.scores)
    if near is None:
        return scores
    scores["distance"] = (scored.mu - searched.mu[near[:, 0]]).double().norm(dim=1)
    if searched.labels is not None and near.shape[1] > 1:
        classes = searched.labels[near[:, :_VOTERS]]
        scores["votes"] = (classes != classes[:, :1]).double().mean(1)
    return scores


def _compared(known: dict[str, Tensor], unknown: dict[str, Tensor], search: _Search | Missing) -> tuple[Compared, ...]:
    """Return how well each score, shape (N,), finds unknown inputs and wrong neighbours."""
    right = wrong = None
    if not isinstance(search, Missing) and 0 < float(search.right.nanmean()) < 1:
        right, wrong = search.right == 1, search.right == 0
    return tuple(
        Compared(
            name,
            metrics.auroc(scores, unknown[name]) if name in unknown else None,
            metrics.auprc(scores, unknown[name]) if name in unknown else None,
            None if right is None else metrics.auroc(scores[right], scores[wrong]),
        )
        for name, scores in known.items()
    )


def _thresholds(
    p_value: Tensor, known: Scored, unknown: Scored | None, alphas: list[float], calibration: Any, n: int | None
) -> Thresholds:
    """Return the flagged shares at the requested thresholds and at many others."""
    novelties, p_values = [known.scores["novelty"]], [p_value]
    if unknown is not None:
        novelties.append(unknown.scores["novelty"])
        p_values.append(unknown.p_value)  # type: ignore[arg-type]
    novelty, everything = torch.cat(novelties), torch.cat(p_values)
    by_chance = 1 / n + 1 / len(known) if n and calibration is not None else None

    def at(alpha: float) -> Flagged:
        flagged, line = everything <= alpha, None
        # With another score, no value of the novelty is a threshold.
        if bool(flagged.any()) and (calibration is None or str(calibration.score) == NOVELTY):
            first, others = novelty[flagged].min(), novelty[~flagged]
            line = float((first + others.max()) / 2 if len(others) else first)
        shares = [float((values <= alpha).double().mean()) for values in p_values]
        deviation = None if by_chance is None else math.sqrt(alpha * (1 - alpha) * by_chance)
        return Flagged(alpha, shares[0], None if unknown is None else shares[1], line, deviation)

    least = 0.0 if n is None else 1 / (n + 1)
    grid = [float(f"{step}e{power}") for power in range(-4, 0) for step in _STEPS]
    steps = [alpha for alpha in grid if least <= alpha <= _LARGEST_ALPHA] or [_LARGEST_ALPHA]
    edges = _bin_edges(known.scores["novelty"], novelty)
    # Values outside the edges count in the first or the last bin.
    counts = [torch.histogram(values.double().clamp(edges[0], edges[-1]), edges).hist for values in novelties]
    histograms = [_rounded(count / len(values)) for count, values in zip(counts, novelties, strict=True)]
    return Thresholds(
        [at(alpha) for alpha in steps],
        [at(alpha) for alpha in alphas if alpha >= least],
        [alpha for alpha in alphas if alpha < least],
        n,
        calibration is not None,
        _rounded(edges),
        histograms[0],
        None if unknown is None else histograms[1],
    )


def _groups(scored: Mapping[str, Scored], search: _Search | Missing, names: _ClassNames) -> tuple[Group, ...]:
    """Return the most and the least certain test inputs, and the inputs that a threshold flags first and last."""
    shown = []
    for title, (source, _, _, text) in GROUPS.items():
        extremes = scored[source].extremes[title] if source in scored else []
        if extremes:
            searched = search if source == "test" and isinstance(search, _Search) else None
            shown.append(Group(title, text, tuple(_card(scored[source], one, searched, names) for one in extremes)))
    return tuple(shown)


def _card(scored: Scored, extreme: Extreme, search: _Search | None, names: _ClassNames) -> Card:
    row = extreme.row
    match = right = None
    if search is not None:
        match = _class_name(int(search.match[row]), names)
        right = None if search.right[row].isnan() else bool(search.right[row])
    return Card(
        name=scored.data.name(row),
        item=extreme.item if scored.data.items is None else scored.data.items[row],
        label=None if scored.labels is None else _class_name(int(scored.labels[row]), names),
        match=match,
        right=right,
        uncertainty=float(scored.scores["uncertainty"][row]),
        p_value=None if isinstance(scored.p_value, Missing) else float(scored.p_value[row]),
    )


def _class_name(label: int, names: _ClassNames) -> str:
    """Return the name of a class, or its number without a name."""
    if isinstance(names, Mapping):
        return str(names.get(label, label))
    return str(label if names is None or not 0 <= label < len(names) else names[label])


def _rounded(values: Tensor) -> list[float]:
    """Return numbers with five significant digits: shorter in a file, but equal in a plot."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def _points(x: Tensor, y: Tensor, rows: Tensor) -> list[list[float]]:
    """Return some points of a curve."""
    return [list(point) for point in zip(_rounded(x[rows]), _rounded(y[rows]), strict=True)]


def _bin_edges(known: Tensor, everything: Tensor) -> Tensor:
    """Return bin edges of equal width that show the known values well; the last bin also holds far larger values."""
    low, high = float(everything.min()), float(everything.max())
    middle, far = float(known.median()), float(known.max())
    high = min(high, far + 2 * (far - middle))
    if not high - low > 1e-9 * max(1.0, abs(low)):
        low, high = low - 0.5, low + 0.5
    return torch.linspace(low, high, _N_BINS + 1, dtype=torch.float64, device="cpu")
