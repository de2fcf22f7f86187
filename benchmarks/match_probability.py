"""Are the probabilities of ``cc.MatchProbability`` right, and what do the uncertainties add to the cosine?

On the feature files of ``benchmarks.transfer`` that are named: P(same) of the pairs of a file that has pairs (faces:
LFW's 6,000 by their ten folds, and pairs with a harmed image); P(the nearest neighbour is right) and "no match" of the
others (CLINC150, Omniglot), for known, unknown and harmed queries. All with the posterior that the library takes when
nobody asks for one.

Run: ``python -m benchmarks.match_probability --cache FOLDER [--only NAME ...] [--out FOLDER] [--plots FOLDER]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, write_results
from benchmarks.transfer.feature_file import FeatureFile, load_features
from benchmarks.transfer.fitted import DEFAULT, Fitted
from benchmarks.transfer.matching import BINS, MODELS, RESAMPLES, SMOOTH, judge_harmed_pairs, judge_pairs, summary
from benchmarks.transfer.script import chosen_files, file_options, results_of_others
from benchmarks.transfer.searching import judge_searches, open_set

NAMES = (
    "faces",
    *(f"{data}-64-{loss}" for data in ("clinc150", "omniglot") for loss in ("contrastive", "supcon", "triplet")),
)


def judge(content: FeatureFile, plots: Path | None = None, title: str = "") -> dict[str, Any]:
    """Everything of one feature file.

    Args:
        content: Of the file.
        plots: Folder for a reliability diagram of the pairs.
        title: Of the diagram.

    Returns:
        ``pairs``, ``unseen_pairs`` and ``harmed_pairs`` of a file with pairs; ``searches`` and ``open_set`` of another.
    """
    la = Fitted(content).posterior(DEFAULT)
    if content.pairs is None:
        return {"searches": judge_searches(la, content), "open_set": open_set(la, content)}
    said, same = judge_pairs(la, content)
    out = {"pairs": summary(said, same, pairs=True)}
    if plots is not None:
        _draw(plots, said, same, title)
    if content.pairs.people_in_train is not None:
        out["unseen_pairs"] = summary(*judge_pairs(la, content, seen_in_fit=False), pairs=True)
    if content.harmed:
        out["harmed_pairs"] = judge_harmed_pairs(la, content)
    return out


def _draw(folder: Path, said: Mapping[str, torch.Tensor], same: torch.Tensor, title: str) -> None:
    from benchmarks.transfer.plots import reliability_diagram

    folder.mkdir(parents=True, exist_ok=True)
    figure = reliability_diagram({m: said[m] for m in SMOOTH}, same, title, bins=BINS)
    figure.savefig(folder / "reliability.png", bbox_inches="tight")


def markdown(results: Mapping[str, dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """A section for each feature file."""
    out = ["# Probabilities of a match", ""]
    out += [
        f"`python -m benchmarks.match_probability` on {machine['cores']} cores of {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date']}. Brier score, expected calibration error ({BINS} bins of equal width) "
        "and log loss of `cc.MatchProbability`; after ± the standard error, and in brackets the difference from the "
        "cosine alone with the standard error of the difference, both from "
        f"{RESAMPLES} bootstrap resamples of the queries or "
        'pairs. "With norms": the same regression with the inverse norms of the raw outputs as uncertainties, which '
        "need no posterior.",
        "",
    ]
    for name, found in results.items():
        out += [f"## {name}", ""]
        if "pairs" in found:
            out += _pairs("Pairs, each fold with what is fitted on the others", found["pairs"])
        if "unseen_pairs" in found:
            what = "Pairs of people whom the posterior did not see in its fit, in fits and figures"
            out += _pairs(what, found["unseen_pairs"])
        if "harmed_pairs" in found:
            out += _harmed(found["harmed_pairs"])
        if "searches" in found:
            out += _searches(found["searches"])
        if found.get("open_set"):
            out += _open(found["open_set"])
    return "\n".join(out)


def _cell(numbers: list[float], digits: int = 4) -> str:
    value, error, difference, its_error = numbers
    compared = f" ({difference:+.{digits}f} ± {its_error:.{digits}f})" if difference or its_error else ""
    return f"{value:.{digits}f} ± {error:.{digits}f}{compared}"


def _pairs(title: str, found: Mapping[str, Any]) -> list[str]:
    figures = ("brier", "ece", "log_loss", "true_accept", "error", "error_at_0.05", "error_at_0.1", "error_at_0.2")
    heads = "Brier | ECE | log loss | true accepts at 1e-3 | error | 5 % rejected | 10 % | 20 %"
    share = f"{found['share']:.0%}"
    out = [f"{title}: {found['n']} pairs, {share} of them of one class.", "", f"| model | {heads} |", "|---" * 9 + "|"]
    for model, values in found["models"].items():
        shown = [f for f in figures if f != "true_accept" or model in SMOOTH]
        out.append(f"| {model} | " + " | ".join(_cell(values[f]) if f in shown else "" for f in figures) + " |")
    return [*out, ""]


def _harmed(found: Mapping[str, Any]) -> list[str]:
    out = ["Pairs of a harmed image and a clean one, half of one person; folds share nobody. Calibrated on clean pairs"]
    out[0] += ", on a mix of clean and harmed ones, or on such a mix without the kind of harm that is judged."
    heads = [f"{figure}: {model}" for figure in ("Brier", "ECE", "true accepts") for model in SMOOTH]
    out += ["", "| calibrated on | judged on | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for calibration, parts in found.items():
        for part, numbers in parts.items():
            models = numbers["models"]
            cells = [_cell(models[model]["brier"]) for model in SMOOTH]
            cells += [f"{models[model][figure][0]:.4f}" for figure in ("ece", "true_accept") for model in SMOOTH]
            out.append(f"| {calibration} | {part} | " + " | ".join(cells) + " |")
    return [*out, ""]


def _searches(found: Mapping[str, Any]) -> list[str]:
    out = [
        "P(the nearest neighbour is right), fitted on known queries or on a mix: known ones, and half as many each of "
        "unknown and of harmed ones of all levels. Unknown queries have no match. Right: the share whose neighbour is "
        "right. Mixture: judged on the same composition as the mix. Without calibration inputs (Omniglot), either half "
        "of the classes is judged with what is fitted on the other, and unknown queries are asked in both halves.",
        "",
    ]
    heads = [f"Brier: {model}" for model in MODELS]
    heads += [f"ECE: {model}" for model in MODELS]
    out += ["| fitted on | judged on | right | " + " | ".join(heads) + " |", "|---" * (3 + len(heads)) + "|"]
    for calibration, parts in found.items():
        for part, numbers in parts.items():
            if part == "auroc":
                continue
            models = numbers["models"]
            cells = [_cell(models[model]["brier"]) for model in MODELS]
            cells += [f"{models[model]['ece'][0]:.4f}" for model in MODELS]
            out.append(
                f"| {calibration} | {part} ({numbers['n']}) | {numbers['share']:.3f} | " + " | ".join(cells) + " |"
            )
    out += ["", "AUROC of `no_match` for unknown queries:", ""]
    out += ["| fitted on | " + " | ".join(MODELS) + " |", "|---" * (1 + len(MODELS)) + "|"]
    for calibration, parts in found.items():
        out.append(f"| {calibration} | " + " | ".join(f"{parts['auroc'][model]:.4f}" for model in MODELS) + " |")
    return [*out, ""]


def _open(found: Mapping[str, Any]) -> list[str]:
    out = [
        "Accuracy on known queries (a rejected one is wrong) and recall of unknown ones, with one threshold. Best "
        "accuracy: on validation queries and 100 unknown ones, the others are judged, mean ± standard deviation of 20 "
        "draws.",
        "",
        "| score | reject 5 % of validation: accuracy | recall | best accuracy: accuracy | recall |",
        "|---|---|---|---|---|",
    ]
    for score, rules in found.items():
        cells = [f"{x:.3f}" for x in rules["reject 5 %"][:2]]
        best = rules["best accuracy"]
        cells += [f"{best[k]:.3f} ± {best[k + 2]:.3f}" for k in (0, 1)]
        label = score if score == "novelty" else f"no match, {score}"
        out.append(f"| {label} | " + " | ".join(cells) + " |")
    return [*out, ""]


def main() -> None:
    """Judge the feature files; print the tables, write JSON and Markdown."""
    parser = file_options(__doc__)
    parser.add_argument("--plots", type=Path, help="folder for reliability diagrams (default: none are drawn)")
    given = parser.parse_args()
    machine, paths = describe(), chosen_files(parser, given, NAMES)
    results = results_of_others(given, "match_probability")
    for path in paths:
        folder = None if given.plots is None else given.plots / path.stem
        results[path.stem] = judge(load_features(path), folder, path.stem)
        results = dict(sorted(results.items()))
        result = {"machine": machine, "resamples": RESAMPLES, "encoders": results}
        write_results(given.out, "match_probability", result, markdown(results, machine))


if __name__ == "__main__":
    main()
