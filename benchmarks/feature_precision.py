"""Features saved in half precision against float32: what changes in the posterior, on encoders of the table.

For each feature file of ``benchmarks.transfer`` that is in float32: its training features are written with
``contrastive_curvature.features`` in float32, float16 and bfloat16, a posterior is fitted from each folder, and the
test inputs and the unknown ones are predicted from float32 features.

Run: ``python -m benchmarks.feature_precision --cache FOLDER [--only NAME ...] [--out FOLDER]``.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import describe, write_results
from benchmarks.transfer.feature_file import FeatureFile, load_features
from benchmarks.transfer.fitted import DEFAULT, Fitted, default_structure
from benchmarks.transfer.script import chosen_files, file_options, results_of_others
from contrastive_curvature import FeatureNormWarning, features
from contrastive_curvature.io.feature_folder import FeatureFolder

NAMES = (
    *(
        f"cifar10-{network}-{dim}-{loss}"
        for network in ("resnet", "resnet56")
        for dim in (16, 128)
        for loss in ("contrastive", "supcon", "triplet")
    ),
    *(f"clinc150-64-{loss}" for loss in ("contrastive", "supcon", "triplet")),
    "faces",
)
"""Feature files in float32; the others are in float16 already."""

HALVES = ("float16", "bfloat16")
STRUCTURES = (DEFAULT, "diag")
_HEAD = (
    "| structure | saved as | features | curvature | uncertainty, median | largest | 1 - rank correlation "
    "| AUROC, change |"
)
_BATCH = 1024


def judge(content: FeatureFile) -> dict[str, Any]:
    """Differences between posteriors from half precision and from float32, for one feature file.

    Args:
        content: Of the file.

    Returns:
        Structure -> ``auroc`` from float32, and for each half precision: ``curvature`` (relative difference of the
        diagonal in the Frobenius norm, ``None`` of other structures), ``median`` and ``largest`` relative difference of
        ``uncertainty`` among test inputs, ``rank`` (Spearman's correlation of the two) and ``auroc`` (the largest
        change of an AUROC of test inputs against one kind of unknown inputs). Last ``features``: the relative
        difference of the features.
    """
    fitted = Fitted(content)
    out: dict[str, Any] = {"width": content.features, "dim": content.dim, "points": len(fitted.labels)}
    with tempfile.TemporaryDirectory() as place:
        loader = DataLoader(TensorDataset(fitted.train.features, fitted.labels), batch_size=_BATCH)
        folders = {
            name: features(fitted.encoder, loader, Path(place) / name, dtype=name) for name in ("float32", *HALVES)
        }
        for structure in STRUCTURES:
            exact = _posterior(fitted, structure, folders["float32"])
            known, unknown = _uncertainties(exact, content)
            aurocs = {kind: _auroc(known, values) for kind, values in unknown.items()}
            out[structure] = {"auroc": aurocs}
            for name in HALVES:
                la = _posterior(fitted, structure, folders[name])
                mine, others = _uncertainties(la, content)
                change = (mine / known - 1).abs()
                rounded = torch.from_numpy(folders[name].numpy())
                out[structure][name] = {
                    "features": _relative(rounded, fitted.train.features),
                    "curvature": _relative(la.H, exact.H) if structure == "diag" else None,
                    "median": float(change.median()),
                    "largest": float(change.max()),
                    "rank": float(spearmanr(mine.numpy(), known.numpy()).statistic),
                    "auroc": max(abs(_auroc(mine, others[kind]) - value) for kind, value in aurocs.items()),
                }
    return out


def _posterior(fitted: Fitted, structure: str, folder: FeatureFolder) -> Any:
    structure = default_structure() if structure == DEFAULT else structure
    la: Any = Laplace(fitted.encoder, "contrastive", hessian_structure=structure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatureNormWarning)
        la.fit(folder, progress_bar=False)
    la.optimize_prior_precision()
    return la


def _uncertainties(la: Any, content: FeatureFile) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the test inputs, and of every kind of unknown inputs."""

    def predict(values: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([la(block).uncertainty.double() for block in torch.from_numpy(values).split(_BATCH)])

    return predict(content.test_features), {name: predict(values) for name, values in content.unknown.items()}


def _auroc(known: Tensor, unknown: Tensor) -> float:
    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return float(roc_auc_score(labels.numpy(), torch.cat([known, unknown]).numpy()))


def _relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def markdown(results: Mapping[str, dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """One table: a line an encoder and structure."""
    lines = [
        "# Features in half precision",
        "",
        f"`python -m benchmarks.feature_precision` on {machine['cores']} cores of {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date']}: posteriors from features saved in float16 and bfloat16 against "
        "float32, on the feature files of `benchmarks.transfer` that are in float32. Training features are rounded, "
        "predictions are from float32 features.",
        "",
        "Relative difference of the features and of the diagonal curvature (Frobenius norm); relative difference of "
        "`uncertainty` among test inputs, median and largest; its rank correlation (one minus it); and the largest "
        "change of an AUROC of `uncertainty`, test inputs against one kind of unknown inputs.",
        "",
        f"| encoder {_HEAD}",
        "|---" * 9 + "|",
    ]
    worst: dict[tuple[str, str], list[float]] = {}
    for encoder, found in results.items():
        for structure in STRUCTURES:
            for half in HALVES:
                part = found[structure][half]
                numbers = [part["features"], part["curvature"] or 0.0, part["median"], part["largest"]]
                numbers += [1 - part["rank"], part["auroc"]]
                cells = [f"{number:.1e}" for number in numbers]
                if part["curvature"] is None:
                    cells[1] = ""
                lines.append(f"| {encoder} | {structure} | {half} | " + " | ".join(cells) + " |")
                before = worst.get((structure, half), numbers)
                worst[structure, half] = [max(pair) for pair in zip(before, numbers, strict=True)]
    lines += ["", "Largest over the encoders:", ""]
    lines += [_HEAD, "|---" * 8 + "|"]
    for (structure, half), numbers in worst.items():
        cells = [f"{number:.1e}" for number in numbers]
        cells[1] = cells[1] if structure == "diag" else ""
        lines.append(f"| {structure} | {half} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge the feature files that are in float32; print the table, write JSON and Markdown."""
    parser = file_options(__doc__)
    given = parser.parse_args()
    machine, paths = describe(), chosen_files(parser, given, NAMES)
    results = results_of_others(given, "feature_precision")
    for path in paths:
        results[path.stem] = judge(load_features(path))
        results = dict(sorted(results.items()))
        content = {"machine": machine, "encoders": results}
        write_results(given.out, "feature_precision", content, markdown(results, machine))


if __name__ == "__main__":
    main()
