"""The figures of one encoder: every curvature by the same scores, beside scores that need none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.losses_worth.baselines import BASELINES, baseline
from benchmarks.losses_worth.curvatures import (
    CHOSEN_FIX,
    FIXES,
    PAIR,
    fit,
    loss_of_fixes,
    losses_for,
    own_loss,
)
from benchmarks.losses_worth.encoder import Encoder
from benchmarks.losses_worth.scores import SCORES, answers
from benchmarks.losses_worth.votes import vote_figures
from benchmarks.transfer.figures import Retrieval, match_figures, retrieve, unknown_figures
from benchmarks.transfer.fitted import STRUCTURES, Fitted, Points, default_structure
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected
from contrastive_curvature.options import PDFix

__all__ = ["judge"]

FEW_WEIGHTS = 1500
"""A last layer of at most so many weights has the exact curvature, too."""

MANY_WEIGHTS = 10_000
"""Above it, a diagonal with the terms between two points takes up to minutes for each fix, and is left out."""

POOLED = 1024
"""Features of a last layer, at most, for which other strengths of the prior are tried: predictions are quick there."""

STRENGTHS = (0.01, 0.1, 10.0)
"""Of the library's prior precision."""


def judge(encoder: Encoder) -> dict[str, Any]:
    """All figures of one encoder.

    Args:
        encoder: From its feature file.

    Raises:
        InputError: It has no unknown inputs, or no posterior can be fitted.
    """
    content = encoder.content
    if not content.unknown:
        raise InputError(expected("unknown_NAME", "at least one array of inputs of another kind", "none"))
    fitted = Fitted(content)
    retrieval = retrieve(fitted.test.outputs, torch.from_numpy(content.test_labels))
    unknown = {name: fitted.points(name, torch.from_numpy(value)) for name, value in content.unknown.items()}
    out: dict[str, Any] = {
        "trained": encoder.loss,
        "own": own_loss(encoder),
        "learned_proxies": encoder.learned,
        "sizes": {"train": len(content.train_features), "features": content.features, "dim": content.dim},
        "map_at_1": retrieval.map_at_1,
        "baselines": {},
        "curvatures": {},
        "left_out": {},
    }
    for name in BASELINES:
        sets = {key: baseline(name, fitted, points) for key, points in unknown.items()}
        out["baselines"][name] = _figures(baseline(name, fitted, fitted.test), sets, retrieval)
    few = content.dim * (content.features + 1) <= FEW_WEIGHTS
    for structure in (*STRUCTURES, *(("full",) if few else ())):
        out["curvatures"][structure] = {}
        centres: Any = None
        for loss, fix in _asked(encoder, structure):
            name = loss if loss == PAIR else f"{loss}/{fix}"
            try:
                la, seconds = fit(encoder, fitted, loss, structure, fix)
                # What is compared is the curvature alone: the same centres for all.
                centres = la.class_centres if loss == PAIR else centres
                la.class_centres = centres
                found = _of_posterior(la, fitted, unknown, retrieval)
            except ContrastiveCurvatureError as error:
                out["left_out"][f"{structure}/{name}"] = str(error)
                continue
            voted = vote_figures(encoder, la)
            out["curvatures"][structure][name] = {**found, **voted, "seconds": round(seconds, 2)}
            if structure == default_structure() and content.features <= POOLED:
                out["curvatures"][structure][name]["strengths"] = _strengths(la, fitted, unknown, retrieval)
        print(f"{encoder.name}: {structure} done", flush=True)
    if PAIR not in out["curvatures"][STRUCTURES[0]]:
        raise InputError(expected("feature file", "data that a posterior can be fitted to", str(out["left_out"])))
    return out


def _asked(encoder: Encoder, structure: str) -> list[tuple[str, str]]:
    """Losses with their fixes.

    All fixes of one softmax loss, and one fix of each other loss: those for the default structure alone.
    """
    asked = []
    own = own_loss(encoder)
    many = encoder.content.dim * encoder.content.features > MANY_WEIGHTS
    for loss in losses_for(encoder):
        if structure != default_structure() and loss not in (PAIR, own, loss_of_fixes(own)):
            continue
        if loss == PAIR or loss != loss_of_fixes(own):
            asked.append((loss, "fixed" if loss == PAIR else "psd" if loss == "arcface" else CHOSEN_FIX))
        else:
            slow = structure == "full" or (many and structure == "diag")
            asked += [(loss, fix) for fix in FIXES if not (slow and PDFix(fix).coupled)]
    return asked


def _of_posterior(la: Any, fitted: Fitted, unknown: Mapping[str, Points], retrieval: Retrieval) -> dict[str, Any]:
    test = answers(la, fitted.test.features)
    others = {name: answers(la, points.features) for name, points in unknown.items()}
    return {
        score: _figures(test[score], {name: some[score] for name, some in others.items()}, retrieval)
        for score in SCORES
    }


def _strengths(la: Any, fitted: Fitted, unknown: Mapping[str, Points], retrieval: Retrieval) -> dict[str, Any]:
    """Figures of the angle alone at other strengths of the prior, whose precision is as before afterwards."""
    own, out = la.prior_precision, {}
    for strength in STRENGTHS:
        la.prior_precision = strength * own
        found = _of_posterior(la, fitted, unknown, retrieval)
        out[f"{strength:g}"] = {"novelty": found["novelty"]["auroc"], **found["angle"]}
    la.prior_precision = own
    return out


def _figures(test: Tensor, unknown: Mapping[str, Tensor], retrieval: Retrieval) -> dict[str, Any]:
    """``auroc``: mean over the kinds of unknown input; ``r_auroc`` and ``ausc`` for wrong nearest neighbours."""
    each = {name: unknown_figures(test, score)["auroc"] for name, score in unknown.items()}
    match = match_figures(test, retrieval.right)
    return {
        "auroc": sum(each.values()) / len(each),
        "r_auroc": match["r_auroc"],
        "ausc": match["ausc"],
        "unknown": {name: round(value, 4) for name, value in each.items()},
    }
