"""What a posterior on an identity behind an encoder says, beside that on the encoder's own trained last layer.

``contrastive_curvature.with_last_layer`` puts the identity behind an encoder that ends in no linear layer. For each
feature file of ``benchmarks.transfer`` the raw outputs are taken as what such an encoder returns: the posterior on the
identity, without and with a bias, is judged beside the posterior on the layer that made them, and beside the norm of
the outputs, which costs nothing. R-AUROC of ``uncertainty`` for right nearest neighbours, and AUROC of ``novelty`` for
unknown kinds of inputs, the mean over the kinds.

Run: ``python -m benchmarks.identity_layer --cache FOLDER [--only NAME ...] [--out FOLDER]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.transfer.arrays import Floats
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.figures import Retrieval, match_figures, retrieve, unknown_figures
from benchmarks.transfer.fitted import DEFAULT, Fitted
from benchmarks.transfer.script import judge_files

WAYS = {
    "trained": "trained last layer",
    "identity": "identity, no bias",
    "identity_bias": "identity, bias",
    "norm": "1 / norm",
}


def outputs_of(content: FeatureFile) -> FeatureFile:
    """A file whose features are the raw outputs of another, and whose layer is the identity."""

    def moved(features: Floats) -> Floats:
        out: Floats = (features @ content.weight.T + content.bias).astype(np.float32)
        return out

    return replace(
        content,
        train_features=moved(content.train_features),
        test_features=moved(content.test_features),
        weight=np.eye(content.dim, dtype=np.float32),
        bias=np.zeros(content.dim, np.float32),
        unknown={name: moved(features) for name, features in content.unknown.items()},
        harmed={},
        harmed_rows=None,
        pairs=None,
        calibration_features=None,
        calibration_labels=None,
    )


def identity_without_bias(dim: int) -> nn.Linear:
    """What ``with_last_layer`` puts behind an encoder."""
    layer = nn.Linear(dim, dim, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(dim))
    return layer


def judge(content: FeatureFile) -> dict[str, Any]:
    """R-AUROC of matches and AUROC of unknown kinds, for each of :data:`WAYS`."""
    labels = torch.from_numpy(content.test_labels)
    outputs = outputs_of(content)
    fits = {"trained": (Fitted(content), content), "identity_bias": (Fitted(outputs), outputs)}
    without = Fitted(outputs)
    without.encoder = identity_without_bias(content.dim)
    fits["identity"] = (without, outputs)
    retrieval = retrieve(fits["trained"][0].test.outputs, labels)
    out: dict[str, Any] = {"classes_seen": bool(set(content.test_labels) & set(content.train_labels))}
    for way, (fitted, file) in fits.items():
        unknown = {name: fitted.points(name, torch.from_numpy(some)) for name, some in file.unknown.items()}
        answers = fitted.answers(DEFAULT, fitted.test)
        found = {name: fitted.answers(DEFAULT, points)["novelty"] for name, points in unknown.items()}
        out[way] = _figures(answers["uncertainty"], answers["novelty"], found, retrieval)
    norms = {name: 1 / points.outputs.norm(dim=1) for name, points in unknown.items()}
    test = 1 / without.test.outputs.norm(dim=1)
    out["norm"] = _figures(test, test, norms, retrieval)
    return out


def _figures(
    uncertainty: Tensor, novelty: Tensor, unknown: Mapping[str, Tensor], retrieval: Retrieval
) -> dict[str, float]:
    return {
        "matches": float(match_figures(uncertainty, retrieval.right)["r_auroc"]),
        "unknown": mean(float(unknown_figures(novelty, some)["auroc"]) for some in unknown.values()),
    }


def markdown(results: Mapping[str, dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """One table, with the means over the encoders."""
    out = ["# An identity as the last layer", ""]
    out += [
        f"`python -m benchmarks.identity_layer` on {machine['cores']} cores of {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date']}: the default posterior on the layer that made the embeddings, and on "
        "an identity behind them (`with_last_layer`). Matches: R-AUROC of `uncertainty` for right nearest neighbours. "
        "Unknown: AUROC of `novelty`, mean over the unknown kinds. `*`: test inputs of classes that training has not "
        "seen.",
        "",
    ]
    for figure in ("matches", "unknown"):
        out += [f"| {figure} | " + " | ".join(WAYS.values()) + " |", "|---" * (1 + len(WAYS)) + "|"]
        for name, found in results.items():
            cells = [f"{found[way][figure]:.3f}" for way in WAYS]
            out.append(f"| {name}{'' if found['classes_seen'] else '*'} | " + " | ".join(cells) + " |")
        means = [f"{mean(found[way][figure] for found in results.values()):.3f}" for way in WAYS]
        out += ["| mean | " + " | ".join(means) + " |", ""]
    return "\n".join(out).rstrip() + "\n"


def main() -> None:
    """Judge every feature file of a folder; print the table, write JSON and Markdown."""
    judge_files(__doc__, "identity_layer", judge, markdown, {})


if __name__ == "__main__":
    main()
