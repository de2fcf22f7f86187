"""Are fitted probabilities of a match right, and what do the uncertainties add to the cosine?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.transfer.content import FeatureFile
from contrastive_curvature.embedding.match_probability import Side, pair_features
from contrastive_curvature.embedding.match_regression import Regression
from contrastive_curvature.errors import InputError, expected

__all__ = [
    "BINS",
    "MODELS",
    "SMOOTH",
    "fit_models",
    "harmed_pairs",
    "judge_harmed_pairs",
    "judge_pairs",
    "probability_figures",
    "shown",
    "summary",
]

BINS = 15
"""Bins of equal width of the expected calibration error."""

FALSE_ACCEPT = 1e-3
REJECTED = (0.05, 0.1, 0.2)
RESAMPLES = 200
_COVARIANCES = 2**23
"""Entries of the covariances in memory at once."""

MODELS: dict[str, tuple[tuple[int, ...], bool]] = {
    "cosine": ((0,), False),
    "cosine, isotonic": ((0,), True),
    "with norms": ((0, 4, 5, 6), False),
    "with uncertainties": ((0, 1, 2, 3), False),
    "with uncertainties, isotonic": ((0, 1, 2, 3), True),
}
"""Columns of :func:`shown`, and whether the curve is isotonic. The first is what the others are compared with, and the
third is the same regression on the norms of the raw outputs, which need no posterior."""

SMOOTH = ("cosine", "with norms", "with uncertainties")
"""Models whose probabilities take enough values for a false-accept rate of 1e-3."""

_LEAST = 1e-7

Floats = NDArray[np.float64]


def probability_figures(said: Floats, happened: Floats, *, pairs: bool = False) -> dict[str, float]:
    """Figures of N probabilities.

    Args:
        said: Probabilities, shape (N,).
        happened: 0 or 1, shape (N,).
        pairs: Whether to add those of decisions at a probability of one half, and the true-accept rate.

    Returns:
        ``brier``, ``ece`` (:data:`BINS` bins of equal width), ``log_loss``; with ``pairs`` also ``error`` and
        ``error_at_...``, the error among the pairs that are kept after rejecting a share of those nearest to one half,
        and ``true_accept`` at a false-accept rate of 1e-3.
    """
    inside = np.clip(said, _LEAST, 1 - _LEAST)
    which = np.minimum((said * BINS).astype(int), BINS - 1)
    gaps = np.bincount(which, said - happened, BINS)
    out = {
        "brier": float(np.square(said - happened).mean()),
        "ece": float(np.abs(gaps).sum() / len(said)),
        "log_loss": float(-np.where(happened == 1, np.log(inside), np.log1p(-inside)).mean()),
    }
    if pairs:
        wrong = ((said >= 0.5) != (happened == 1))[np.argsort(-np.abs(said - 0.5), kind="stable")]
        out["error"] = float(wrong.mean())
        for share in REJECTED:
            out[f"error_at_{share:g}"] = float(wrong[: max(1, round((1 - share) * len(wrong)))].mean())
        strangers, same = np.sort(said[happened == 0]), said[happened == 1]
        if len(strangers) and len(same):
            limit = strangers[-1 - int(FALSE_ACCEPT * len(strangers))]
            out["true_accept"] = float((same > limit).mean())
    return out


def summary(models: Mapping[str, Tensor], happened: Tensor, *, pairs: bool = False, seed: int = 0) -> dict[str, Any]:
    """Figures of every model, with standard errors from one bootstrap over queries or pairs.

    Args:
        models: Name -> probabilities (N,); differences are from the first.
        happened: Whether it happened, shape (N,).
        pairs: See :func:`probability_figures`.
        seed: Of the bootstrap.

    Returns:
        ``n``, ``share`` (of what happened), and ``models``: name -> figure -> ``[value, its standard error, difference
        from the first model, its standard error]``.
    """
    truth = happened.double().numpy()
    said = {name: value.double().numpy() for name, value in models.items()}
    whole = {name: probability_figures(value, truth, pairs=pairs) for name, value in said.items()}
    first = next(iter(whole))
    source = np.random.default_rng(seed)
    drawn: dict[str, list[dict[str, float]]] = {name: [] for name in said}
    for _ in range(RESAMPLES):
        rows = source.integers(0, len(truth), len(truth))
        for name, value in said.items():
            drawn[name].append(probability_figures(value[rows], truth[rows], pairs=pairs))
    out: dict[str, Any] = {"n": len(truth), "share": float(truth.mean()), "models": {}}
    for name, figures in whole.items():
        out["models"][name] = {}
        for figure in figures:
            own, other = (np.array([d.get(figure, np.nan) for d in drawn[which]]) for which in (name, first))
            error, error_of_difference = (float(np.nanstd(x, ddof=1)) for x in (own, own - other))
            difference = figures[figure] - whole[first][figure]
            out["models"][name][figure] = [figures[figure], error, difference, error_of_difference]
    return out


def shown(la: Any, left: Tensor, right: Tensor, *, symmetric: bool = True) -> Tensor:
    """What ``cc.MatchProbability`` sees of pairs, computed once for many fits.

    Args:
        la: A posterior of the last layer.
        left: Features (P, F) of one side.
        right: Features of the other side.
        symmetric: Whether exchanging the sides must not matter, as for ``fit_pairs``; false as for ``fit_retrieval``.

    Returns:
        Shape (P, 7), float64: the four numbers of the library, and the last three once more with the inverse norms of
        the raw outputs as uncertainties.
    """
    size = max(1, min(1024, _COVARIANCES // la.n_outputs**2))
    parts = []
    with torch.no_grad():
        for a, b in zip(left.split(size), right.split(size), strict=True):
            one, other = la(a), la(b)
            sides = (Side.of("pairs", x, use_uncertainty=True) for x in (one, other))
            inverse = -torch.stack([x.raw_mean.double().norm(dim=1).log() for x in (one, other)], 1)
            if symmetric:
                inverse = inverse.sort(1, descending=True).values
            total = (2 * inverse).logsumexp(1, keepdim=True)
            parts.append(torch.cat([pair_features(*sides, symmetric=symmetric), total, inverse], 1))
    return torch.cat(parts)


def fit_models(seen: Tensor, right: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Fit every model of :data:`MODELS`, as ``cc.MatchProbability`` does.

    Args:
        seen: What :func:`shown` gives for P pairs.
        right: Whether each is of one class, shape (P,).

    Returns:
        Name -> probabilities (N,) of what is seen of N pairs.
    """
    kinds = "pairs of one class and of two classes"
    out: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, (columns, isotonic) in MODELS.items():
        fitted = Regression.fit(seen[:, columns], right, isotonic=isotonic, argument="right", kinds=kinds)
        out[name] = partial(_probabilities, fitted, columns)
    return out


def _probabilities(fitted: Regression, columns: tuple[int, ...], seen: Tensor) -> Tensor:
    return fitted(seen[:, columns])


def judge_pairs(la: Any, content: FeatureFile, seen_in_fit: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """P(same) of a file's pairs, each fold with what is fitted on the others.

    Args:
        la: A posterior of the last layer.
        content: Of a file with pairs.
        seen_in_fit: Whether to keep pairs with somebody whom the posterior saw in its fit; else they are left out of
            fits and figures alike.

    Returns:
        Name of a model -> probabilities, and whether each pair is of one class.

    Raises:
        InputError: The file has no pairs, or does not say which people the posterior saw.
    """
    pairs = content.pairs
    if pairs is None:
        raise InputError(expected("content", "pairs_left, pairs_right, pairs_same, pairs_fold", "none"))
    kept = np.ones(len(pairs.left), dtype=bool)
    if not seen_in_fit:
        if pairs.people_in_train is None:
            raise InputError(expected("content", "pairs_people_in_train", "none"))
        kept = ~pairs.people_in_train
    features = torch.from_numpy(content.test_features if pairs.features is None else pairs.features)
    seen = shown(la, features[pairs.left[kept]], features[pairs.right[kept]])
    same, fold = (torch.from_numpy(x[kept]) for x in (pairs.same, pairs.fold))
    out = {name: torch.zeros(len(seen), dtype=torch.float64) for name in MODELS}
    for one in fold.unique():
        for name, model in fit_models(seen[fold != one], same[fold != one]).items():
            out[name][fold == one] = model(seen[fold == one])
    return out, same


def harmed_pairs(content: FeatureFile, folds: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Pair every input that was harmed with an image of the same class and with one of another.

    Classes are divided into folds, and both images of a pair are of one fold.

    Args:
        content: Of a file with harmed inputs.
        folds: Number of folds.
        seed: Of the choice.

    Returns:
        ``harmed``: positions in ``harmed_rows``; ``other``: rows of the test; ``same``; ``fold``; each (P,).

    Raises:
        InputError: The file has no harmed inputs.
    """
    if content.harmed_rows is None:
        raise InputError(expected("content", "harmed_KIND_LEVEL arrays", "none"))
    source = np.random.default_rng(seed)
    labels = content.test_labels
    classes = source.permutation(np.unique(labels))
    fold_of = dict(zip(classes.tolist(), (np.arange(len(classes)) % folds).tolist(), strict=True))
    folded = np.array([fold_of[label] for label in labels.tolist()])
    found: list[tuple[int, int, bool, int]] = []
    for position, row in enumerate(content.harmed_rows.tolist()):
        near = folded == folded[row]
        mates = np.flatnonzero((labels == labels[row]) & (np.arange(len(labels)) != row))
        strangers = np.flatnonzero(near & (labels != labels[row]))
        for same, candidates in ((True, mates), (False, strangers)):
            if len(candidates):
                found.append((position, int(source.choice(candidates)), same, int(folded[row])))
    columns = (torch.tensor(column) for column in zip(*found, strict=True))
    return dict(zip(("harmed", "other", "same", "fold"), columns, strict=True))


def judge_harmed_pairs(la: Any, content: FeatureFile, seed: int = 0) -> dict[str, Any]:
    """P(same) of pairs with a harmed image, calibrated on clean pairs or on a mixture.

    Args:
        la: A posterior of the last layer.
        content: Of a file with harmed inputs.
        seed: Of the pairs and of the mixture.

    Returns:
        ``clean``, ``mix`` and ``other kinds`` (clean pairs, and harmed ones of all kinds but the one that is judged) ->
        ``clean``, ``all levels``, ``worst level`` and each kind at its worst level -> see :func:`summary`.
    """
    pairs = harmed_pairs(content, seed=seed)
    test, chosen = torch.from_numpy(content.test_features), torch.from_numpy(content.harmed_rows)
    sides = {("clean", 0): test[chosen]} | {key: torch.from_numpy(found) for key, found in content.harmed.items()}
    seen = {key: shown(la, side[pairs["harmed"]], test[pairs["other"]]) for key, side in sides.items()}
    kinds = sorted({kind for kind, _ in content.harmed})
    worst = {kind: max(level for other, level in content.harmed if other == kind) for kind in kinds}
    generator = torch.Generator().manual_seed(seed)
    said: dict[str, dict[tuple[str, int], dict[str, Tensor]]] = {}
    for calibration in ("clean", "mix", "other kinds"):
        said[calibration] = {key: {name: torch.zeros(len(pairs["same"])) for name in MODELS} for key in seen}
        for fold in pairs["fold"].unique():
            mine, others = (torch.nonzero(part).squeeze(1) for part in (pairs["fold"] == fold, pairs["fold"] != fold))
            for judged in kinds if calibration == "other kinds" else [None]:
                rows = {("clean", 0): others}
                for key in seen:
                    if calibration != "clean" and key[0] not in ("clean", judged):
                        rows[key] = others[torch.rand(len(others), generator=generator) < 1 / len(kinds)]
                models = fit_models(
                    torch.cat([seen[key][some] for key, some in rows.items()]),
                    torch.cat([pairs["same"][some] for some in rows.values()]),
                )
                for key in seen if judged is None else [key for key in seen if key[0] in (judged, "clean")]:
                    for name, model in models.items():
                        said[calibration][key][name][mine] = model(seen[key][mine]).float()
    parts = {"clean": [("clean", 0)], "all levels": list(content.harmed), "worst level": list(worst.items())}
    parts |= {f"{kind} {level}": [(kind, level)] for kind, level in worst.items()}
    return {
        calibration: {
            part: summary(
                {name: torch.cat([found[key][name] for key in keys]) for name in SMOOTH},
                pairs["same"].repeat(len(keys)),
                pairs=True,
            )
            for part, keys in parts.items()
        }
        for calibration, found in said.items()
    }
