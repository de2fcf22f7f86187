"""The judge: every score and every figure of one encoder, from its feature file alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
    """Fit the posteriors to an encoder's features, and take the figures of every row.

    Args:
        content: Of the feature file.
        rows: Scores to compare; all by default.

    Raises:
        InputError: The inputs allow no posterior or no retrieval, or no row could be computed.
    """
    start = time.perf_counter()
    fitted = Fitted(content)
    labels = torch.from_numpy(content.test_labels)
    retrieval = retrieve(fitted.test.outputs, labels)
    pair_points, verified = _verification(content, fitted)
    corrupted_rows = torch.from_numpy(
        np.zeros(0, np.int64) if content.corrupted_rows is None else content.corrupted_rows
    )
    out = Judgement(_header(content, retrieval, verified), retrieval, verified, corrupted_rows)
    sets = _sets(content, fitted, corrupted_rows)
    skipped: dict[str, str] = {}
    for row in all_rows() if rows is None else rows:
        try:
            scores = {name: _score(row, fitted, points) for name, points in sets.items()}
            halves = None if pair_points is None else [_score(row, fitted, points) for points in pair_points]
        except ContrastiveCurvatureError as error:
            skipped[row.name] = str(error)
            continue
        out.scores[row.name] = scores
        found = _figures(content, scores, out)
        if halves is not None and verified is not None:
            out.pairs[row.name] = {name: combine(*halves) for name, combine in COMBINED.items()}
            found["pairs"] = {n: match_figures(s, verified.right) for n, s in out.pairs[row.name].items()}
        out.figures["rows"][row.name] = {"title": row.title, "needs": str(row.needs), **found}
    if not out.scores:
        raise InputError("feature file", "data that at least one score can be computed of", str(skipped))
    out.figures["skipped"] = skipped
    out.figures["warned"] = fitted.warned
    out.figures["seconds"] = round(time.perf_counter() - start, 1)
    return out


def _header(content: FeatureFile, retrieval: Retrieval, verified: Verified | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "sizes": {
            "train": len(content.train_features),
            "classes": len(set(content.train_labels.tolist())),
            "test": len(content.test_features),
            "features": content.features,
            "dim": content.dim,
            **{f"unknown_{name}": len(features) for name, features in content.unknown.items()},
        },
        "default": default_structure(),
        "map_at_1": retrieval.map_at_1,
        "rows": {},
    }
    if content.corrupted_rows is not None:
        out["sizes"]["corrupted"] = len(content.corrupted_rows)
    if content.pairs is not None and verified is not None:
        out["pairs"] = {
            "pairs": len(verified.right),
            "accuracy": verified.accuracy,
            "true_accept": verified.true_accept,
        }
        if content.pairs.people_in_train is not None:
            new = torch.from_numpy(~content.pairs.people_in_train)
            out["pairs"] |= {"new_people": int(new.sum()), "accuracy_new_people": float(verified.right[new].mean())}
    return out


def _sets(content: FeatureFile, fitted: Fitted, corrupted_rows: Tensor) -> dict[str, Points]:
    sets = {"test": fitted.test}
    for name, features in content.unknown.items():
        sets[f"unknown_{name}"] = fitted.points(f"unknown_{name}", torch.from_numpy(features))
    for (kind, level), features in content.corrupted.items():
        name = f"corrupted_{kind}_{level}"
        sets[name] = fitted.points(name, torch.from_numpy(features), corrupted_rows)
    if fitted.calibration is not None:
        sets["calibration"] = fitted.calibration
    return sets


def _verification(content: FeatureFile, fitted: Fitted) -> tuple[list[Points] | None, Verified | None]:
    """The inputs of the left and of the right of each pair, and the decisions."""
    pairs = content.pairs
    if pairs is None:
        return None, None
    own = pairs.features is not None
    features = torch.from_numpy(pairs.features) if own else fitted.test.features
    sides = []
    for name, rows in (("pairs_left", pairs.left), ("pairs_right", pairs.right)):
        chosen = torch.from_numpy(rows)
        sides.append(fitted.points(name, features[chosen], None if own else chosen))
    same, fold = torch.from_numpy(pairs.same), torch.from_numpy(pairs.fold)
    return sides, verify(sides[0].outputs, sides[1].outputs, same, fold)


def _score(row: Row, fitted: Fitted, points: Points) -> Tensor:
    score = row.score(fitted, points).detach().double()
    if score.shape != (len(points),) or not bool(score.isfinite().all()):
        came = f"shape {tuple(score.shape)}, {int((~score.isfinite()).sum())} of them NaN or infinite"
        raise InputError(f"{row.name} of {points.name}", f"{len(points)} finite scores", came)
    return score


def _figures(content: FeatureFile, scores: Mapping[str, Tensor], out: Judgement) -> dict[str, Any]:
    test = scores["test"]
    found: dict[str, Any] = match_figures(test, out.retrieval.right)
    found["unknown"] = {name: unknown_figures(test, scores[f"unknown_{name}"]) for name in content.unknown}
    levels: dict[str, dict[int, Tensor]] = {}
    for kind, level in content.corrupted:
        levels.setdefault(kind, {})[level] = scores[f"corrupted_{kind}_{level}"]
    if levels:
        found["corruption"] = {
            kind: corruption_figures(test[out.corrupted_rows], some) for kind, some in levels.items()
        }
    return found
