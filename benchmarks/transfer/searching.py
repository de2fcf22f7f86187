"""P(the nearest neighbour is right) and "no match": is it right for known, unknown and harmed queries?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.transfer.content import FeatureFile
from benchmarks.transfer.matching import MODELS, fit_models, shown, summary
from contrastive_curvature import metrics

__all__ = ["CALIBRATIONS", "Query", "Search", "judge_searches", "open_set", "searches"]

CALIBRATIONS = ("known", "mix")
"""Fitted on known queries alone, or on as many unknown and harmed ones, together, as known ones."""


@dataclass(frozen=True)
class Query:
    """Queries of one kind.

    Args:
        features: Shape (N, F).
        labels: Classes, a number of no class where the query is of another kind, shape (N,).
    """

    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Search:
    """A fit and what it is judged on; no query of the fit is judged.

    Args:
        galleries: For the fit, and for the judging.
        fit: ``known``, ``unknown`` and ``harmed`` queries.
        judged: ``known``, ``unknown`` and names of harm with a level -> queries.
    """

    galleries: tuple[Query, Query]
    fit: dict[str, Query]
    judged: dict[str, Query]


def searches(content: FeatureFile, seed: int = 0) -> Iterator[Search]:
    """How a feature file is divided.

    With calibration inputs, these are the queries of the fit and the test inputs those that are judged, both with the
    training inputs as the gallery. Without, the test classes are divided into two halves; each is judged with what is
    fitted on the other, and half of the drawings of every class, none of them harmed, are the gallery. Where there are
    several kinds of unknown inputs, the first is judged and the others are for the fit; else half of them each.

    Args:
        content: Of the file.
        seed: Of all divisions.
    """
    source = np.random.default_rng(seed)
    labels = content.test_labels
    rows = content.harmed_rows if content.harmed_rows is not None else np.zeros(0, dtype=np.int64)
    unknown = _unknown(content, source)
    if content.calibration_features is not None and content.calibration_labels is not None:
        gallery = _query(content.train_features, content.train_labels)
        first = np.zeros(len(rows), dtype=bool)
        first[source.permutation(len(rows))[: len(rows) // 2]] = True
        known = _query(content.calibration_features, content.calibration_labels)
        # A judged query must not be in the fit as its own harmed copy.
        clean = np.setdiff1d(np.arange(len(content.test_labels)), rows[first])
        judged = {"known": _query(content.test_features[clean], content.test_labels[clean]), "unknown": unknown[1]}
        fit = {"known": known, "unknown": unknown[0]} | _all_harm(content, first, rows)
        yield Search((gallery, gallery), fit, judged | _harm(content, ~first, rows))
        return
    classes = source.permutation(np.unique(labels))
    in_first = np.isin(labels, classes[: len(classes) // 2])
    stored = _gallery_rows(labels, rows, source)
    for half in (in_first, ~in_first):
        galleries, queries = (
            [_query(content.test_features[part], labels[part]) for part in (half & some, ~half & some)]
            for some in (stored, ~stored)
        )
        fit = {"known": queries[0], "unknown": unknown[0]} | _all_harm(content, half[rows], rows)
        judged = {"known": queries[1], "unknown": unknown[1]} | _harm(content, ~half[rows], rows)
        yield Search((galleries[0], galleries[1]), fit, judged)


def judge_searches(la: Any, content: FeatureFile, seed: int = 0) -> dict[str, Any]:
    """Judge P(right) of all kinds of queries.

    Args:
        la: A posterior of the last layer.
        content: Of a file with unknown and harmed inputs.
        seed: Of the divisions.

    Returns:
        Calibration -> kind of query -> see :func:`benchmarks.transfer.matching.summary`; ``mixture`` is of the same
        composition as the fit on a mix. And calibration -> ``auroc`` -> model -> AUROC of ``no_match`` for unknown
        queries among known ones.
    """
    generator = torch.Generator().manual_seed(seed)
    said: dict[str, dict[str, dict[str, list[Tensor]]]] = {c: {} for c in CALIBRATIONS}
    truth: dict[str, list[Tensor]] = {}
    for search in searches(content, seed):
        fit = {name: _look(la, query, search.galleries[0]) for name, query in search.fit.items()}
        judged = {name: _look(la, query, search.galleries[1]) for name, query in search.judged.items()}
        for name, (_, right) in judged.items():
            truth.setdefault(name, []).append(right)
        half = len(fit["known"][1]) // 2
        for calibration in CALIBRATIONS:
            parts = [fit["known"]]
            if calibration == "mix":
                parts += [_some(fit[name], half, generator) for name in fit if name != "known"]
            models = fit_models(*(torch.cat(part) for part in zip(*parts, strict=True)))
            for name, (seen, _) in judged.items():
                found = said[calibration].setdefault(name, {model: [] for model in MODELS})
                for model, probabilities in models.items():
                    found[model].append(probabilities(seen))
    happened = {name: torch.cat(parts) for name, parts in truth.items()}
    out: dict[str, Any] = {}
    for calibration, kinds in said.items():
        models_by_kind = {name: {m: torch.cat(v) for m, v in models.items()} for name, models in kinds.items()}
        out[calibration] = _figures(models_by_kind, happened, torch.Generator().manual_seed(seed))
    return out


def _figures(said: dict[str, dict[str, Tensor]], happened: dict[str, Tensor], generator: torch.Generator) -> Any:
    harmed = [name for name in said if name not in ("known", "unknown")]
    groups = {"known": ["known"], "unknown": ["unknown"]}
    if harmed:
        worst = max(int(name.rsplit(" ", 1)[1]) for name in harmed)
        groups |= {"harmed": harmed, "worst harm": [name for name in harmed if name.endswith(f" {worst}")]}
    out = {
        group: summary({m: torch.cat([said[n][m] for n in names]) for m in MODELS}, _cat(happened, names))
        for group, names in groups.items()
        if len(_cat(happened, names))
    }
    half = len(happened["known"]) // 2
    rows = {"known": torch.arange(len(happened["known"]))}
    for name, names in (("unknown", ["unknown"]), ("harmed", harmed)):
        if names:
            rows[name] = torch.randperm(len(_cat(happened, names)), generator=generator)[:half]
    truth = torch.cat([_cat(happened, groups[name])[some] for name, some in rows.items()])
    mixed = {
        m: torch.cat([torch.cat([said[n][m] for n in groups[name]])[some] for name, some in rows.items()])
        for m in MODELS
    }
    out["mixture"] = summary(mixed, truth)
    out["auroc"] = {m: metrics.auroc(1 - said["known"][m], 1 - said["unknown"][m]) for m in MODELS}
    return out


def open_set(la: Any, content: FeatureFile, draws: int = 20, few: int = 100, seed: int = 0) -> dict[str, Any]:
    """Accuracy on known queries and recall of unknown ones, by one threshold chosen on validation queries.

    Known queries count as right if they are not rejected and their nearest training input is of their class.

    Args:
        la: A posterior of the last layer.
        content: Of a file with calibration inputs and one kind of unknown inputs.
        draws: How often the few unknown validation queries are drawn.
        few: Their number, at most half of all; the others are judged.
        seed: Of the draws.

    Returns:
        Score (``no match`` of three models, and ``novelty``) -> rule -> mean accuracy and recall, and their standard
        deviations between draws. Rules: ``reject 5 %`` of the validation queries, without any unknown ones, and
        ``best accuracy`` on the validation queries together with a few unknown ones.
    """
    if content.calibration_features is None or content.calibration_labels is None:
        return {}
    gallery = _query(content.train_features, content.train_labels)
    unknown = _of_no_class(content, next(iter(content.unknown.values())))
    sets = {
        "validation": _query(content.calibration_features, content.calibration_labels),
        "test": _query(content.test_features, content.test_labels),
        "unknown": unknown,
    }
    looked = {name: _look(la, query, gallery) for name, query in sets.items()}
    models = fit_models(*looked["validation"])
    scores = {
        model: {name: 1 - models[model](seen) for name, (seen, _) in looked.items()}
        for model in ("cosine", "with norms", "with uncertainties")
    }
    with torch.no_grad():
        scores["novelty"] = {
            name: torch.cat([la(block).novelty for block in query.features.split(500)]) for name, query in sets.items()
        }
    rights = {name: right for name, (_, right) in looked.items()}
    few = min(few, len(unknown.labels) // 2)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(unknown.labels), generator=generator) for _ in range(draws)]
    out: dict[str, Any] = {}
    for name, score in scores.items():
        limits = [(float(score["validation"].quantile(0.95)), orders[0][:0])]
        limits += [
            (_best(score["validation"], rights["validation"], score["unknown"][o[:few]]), o[:few]) for o in orders
        ]
        found = []
        for limit, used in limits:
            judged = torch.ones(len(unknown.labels), dtype=torch.bool)
            judged[used] = False
            accuracy = float((rights["test"] & (score["test"] <= limit)).double().mean())
            found.append([accuracy, float((score["unknown"][judged] > limit).double().mean())])
        many = torch.tensor(found[1:], dtype=torch.float64)
        out[name] = {
            "reject 5 %": [*found[0], 0.0, 0.0],
            "best accuracy": [*many.mean(0).tolist(), *many.std(0).tolist()],
        }
    return out


def _best(known: Tensor, right: Tensor, unknown: Tensor) -> float:
    """The threshold with most right answers: right known queries below it, and unknown ones above."""
    score = torch.cat([known[right], unknown])
    gain, order = torch.cat([torch.ones(int(right.sum())), -torch.ones(len(unknown))]), score.argsort()
    return float(score[order[int(gain[order].cumsum(0).argmax())]])


def _look(la: Any, query: Query, gallery: Query) -> tuple[Tensor, Tensor]:
    """What is shown of the queries and their nearest neighbours, and whether these are right."""
    with torch.no_grad():
        asked, stored = (la.model(x.features) for x in (query, gallery))
        index = metrics.nearest_neighbors(asked, stored, k=1).squeeze(1)
    return shown(la, query.features, gallery.features[index], symmetric=False), gallery.labels[index] == query.labels


def _unknown(content: FeatureFile, source: np.random.Generator) -> tuple[Query, Query]:
    """For the fit, and for the judging."""
    first, *others = content.unknown.values()
    if others:
        return _of_no_class(content, np.concatenate(others)), _of_no_class(content, first)
    order = source.permutation(len(first))
    half = len(first) // 2
    return _of_no_class(content, first[order[:half]]), _of_no_class(content, first[order[half:]])


def _gallery_rows(labels: Any, harmed: Any, source: np.random.Generator) -> Any:
    stored = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        free = np.setdiff1d(mine, harmed)
        stored[source.permutation(free)[: len(mine) // 2]] = True
    return stored


def _harm(content: FeatureFile, which: Any, rows: Any) -> dict[str, Query]:
    labels = content.test_labels[rows[which]]
    return {f"{kind} {level}": _query(found[which], labels) for (kind, level), found in content.harmed.items()}


def _all_harm(content: FeatureFile, which: Any, rows: Any) -> dict[str, Query]:
    parts = list(_harm(content, which, rows).values())
    if not parts:
        return {}
    return {"harmed": Query(torch.cat([p.features for p in parts]), torch.cat([p.labels for p in parts]))}


def _some(part: tuple[Tensor, Tensor], most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(len(part[1]), generator=generator)[:most]
    return part[0][rows], part[1][rows]


def _cat(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([values[name] for name in names])


def _query(features: Any, labels: Any) -> Query:
    return Query(torch.from_numpy(np.ascontiguousarray(features)), torch.from_numpy(labels))


def _of_no_class(content: FeatureFile, features: Any) -> Query:
    below = min(int(content.train_labels.min()), int(content.test_labels.min())) - 1
    return _query(features, np.full(len(features), below))
