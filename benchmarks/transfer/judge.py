"""The judge: every score and every figure of one encoder, from its feature file alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.figures import (
    COMBINED,
    Retrieval,
    Verified,
    corruption_figures,
    match_figures,
    retrieve,
    unknown_figures,
    verify,
)
from benchmarks.transfer.fitted import Fitted, Points, default_structure
from benchmarks.transfer.rows import Row, all_rows
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError


@dataclass
class Judgement:
    """What was found.

    Args:
        figures: Plain numbers, for the JSON file.
        retrieval: Which test inputs have a right nearest neighbour.
        verified: Which pairs are decided rightly; ``None`` without pairs.
        corrupted_rows: Row numbers of the test inputs that were corrupted, shape (K,); empty where none were.
        scores: Row -> set of inputs (``test``, ``unknown_NAME``, ``corrupted_KIND_LEVEL``, ``calibration``) -> scores.
        pairs: Row -> ``sum`` and ``max`` of the scores of each pair, shape (P,).
    """

    figures: dict[str, Any]
    retrieval: Retrieval
    verified: Verified | None
    corrupted_rows: Tensor
    scores: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    pairs: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def judge(content: FeatureFile, rows: Sequence[Row] | None = None) -> Judgement:
    """Fit the posteriors to an encoder's features, and take the figures of every row, or of these."""
    start = time.perf_counter()
    fitted = Fitted(content)
    retrieval = retrieve(fitted.test.outputs, fitted.gallery_labels)
    corrupted = torch.as_tensor([] if content.corrupted_rows is None else content.corrupted_rows, dtype=torch.int64)
    sides: list[Points] = []
    verified = None
    if (pairs := content.pairs) is not None:
        features = torch.from_numpy(content.test_features if pairs.features is None else pairs.features)
        for chosen in (torch.as_tensor(pairs.left), torch.as_tensor(pairs.right)):
            sides.append(fitted.points(features[chosen], chosen if pairs.features is None else None))
        same, fold = torch.as_tensor(pairs.same).bool(), torch.as_tensor(pairs.fold)
        verified = verify(sides[0].outputs, sides[1].outputs, same, fold)
    sets = {"test": fitted.test, **{f"unknown_{name}": fitted.points(x) for name, x in content.unknown.items()}}
    for (kind, level), features in content.corrupted.items():
        sets[f"corrupted_{kind}_{level}"] = fitted.points(features, corrupted)
    if content.calibration_features is not None:
        sets["calibration"] = fitted.points(content.calibration_features)
    out = Judgement(_header(content, retrieval, verified), retrieval, verified, corrupted)
    skipped: dict[str, str] = {}
    for row in all_rows() if rows is None else rows:
        try:
            scores = {name: _score(row, fitted, points) for name, points in sets.items()}
            halves = [_score(row, fitted, points) for points in sides]
        except ContrastiveCurvatureError as error:
            skipped[row.name] = str(error)
            continue
        out.scores[row.name] = scores
        found = _figures(content, scores, out)
        if verified is not None:
            out.pairs[row.name] = {name: combine(*halves) for name, combine in COMBINED.items()}
            found["pairs"] = {n: match_figures(s, verified.right) for n, s in out.pairs[row.name].items()}
        out.figures["rows"][row.name] = {"title": row.title, "needs": str(row.needs), **found}
    seconds = round(time.perf_counter() - start, 1)
    out.figures |= {"skipped": skipped, "warned": fitted.warned, "seconds": seconds}
    return out


def _header(content: FeatureFile, retrieval: Retrieval, verified: Verified | None) -> dict[str, Any]:
    dim, width = content.weight.shape
    sizes = {"train": len(content.train_features), "classes": len(set(content.train_labels.tolist()))}
    sizes |= {"test": len(content.test_features), "features": width, "dim": dim}
    sizes |= {f"unknown_{name}": len(features) for name, features in content.unknown.items()}
    if content.corrupted_rows is not None:
        sizes["corrupted"] = len(content.corrupted_rows)
    out: dict[str, Any] = {"sizes": sizes, "default": default_structure(), "map_at_1": retrieval.map_at_1, "rows": {}}
    if content.pairs is not None and verified is not None:
        right = verified.right
        out["pairs"] = {"pairs": len(right), "accuracy": verified.accuracy, "true_accept": verified.true_accept}
        if content.pairs.people_in_train is not None:
            new = torch.from_numpy(~content.pairs.people_in_train)
            out["pairs"] |= {"new_people": int(new.sum()), "accuracy_new_people": float(right[new].mean())}
    return out


def _score(row: Row, fitted: Fitted, points: Points) -> Tensor:
    score = row.score(fitted, points).detach().double()
    if not bool(score.isfinite().all()):
        raise InputError(row.name, "finite scores", f"{int((~score.isfinite()).sum())} that are NaN or infinite")
    return score


def _figures(content: FeatureFile, scores: Mapping[str, Tensor], out: Judgement) -> dict[str, Any]:
    test = scores["test"]
    found: dict[str, Any] = match_figures(test, out.retrieval.right)
    found["unknown"] = {name: unknown_figures(test, scores[f"unknown_{name}"]) for name in content.unknown}
    levels: dict[str, dict[int, Tensor]] = {}
    for kind, level in content.corrupted:
        levels.setdefault(kind, {})[level] = scores[f"corrupted_{kind}_{level}"]
    if levels:
        clean = test[out.corrupted_rows]
        found["corruption"] = {kind: corruption_figures(clean, some) for kind, some in levels.items()}
    return found
