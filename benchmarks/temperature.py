"""How well votes of sampled networks are calibrated, by the rule for the temperature, on every encoder of the table.

For each feature file of ``benchmarks.transfer``: the posterior that the library takes when nobody asks for one, with
its default prior, at several temperatures. Some last layers are sampled; each votes, for every test input, for the
class of the nearest neighbour among the other test inputs. A rule is judged by the Brier score of the votes, and by
their expected calibration error, on encoders that had no say in it: each family of encoders (one data set and trunk)
is left out in turn.

Run: ``python -m benchmarks.temperature --cache FOLDER [--only NAME ...] [--out FOLDER]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.fitted import DEFAULT, Fitted
from benchmarks.transfer.leave_out import family
from benchmarks.transfer.script import judge_files
from contrastive_curvature import metrics

RULES: dict[str, Callable[[float, int, float], float]] = {
    "L / N": lambda loss, n, _: loss / n,
    "2 L / N": lambda loss, n, _: 2 * loss / n,
    "L / (N + γ)": lambda loss, n, gamma: loss / (n + gamma),
    "2 L / (N + γ)": lambda loss, n, gamma: 2 * loss / (n + gamma),
    "4 L / (N + γ)": lambda loss, n, gamma: 4 * loss / (n + gamma),
    "L / sqrt(N (N + γ))": lambda loss, n, gamma: float(loss / (n * (n + gamma)) ** 0.5),
    "1": lambda *_: 1.0,
}
"""Name -> temperature, from the loss L of all N points at the trained weights and the effective number γ of weights."""

LIBRARY = "2 L / (N + γ)"
FACTORS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Of ``L / N``: the best of them, in hindsight, is what the rules are compared with."""

FIGURES = ("brier", "ece")
NETWORKS = 30
INPUTS = 1000


def judge(content: FeatureFile, seed: int = 0) -> dict[str, Any]:
    """Brier score and calibration error of the votes at every temperature, for one feature file.

    Args:
        content: Of the file.
        seed: Of the test inputs and of the networks.

    Returns:
        ``rules`` and ``factors``: name -> temperature and figures; ``points`` N, ``effective`` parameters and
        ``weights``, all there are.
    """
    fitted = Fitted(content)
    la = fitted.posterior(DEFAULT)
    loss, n = float(la.cost), int(la.n_data)
    gamma = la.effective_parameters(la.prior_precision / la.likelihood_factor)
    features, labels = _some(content, seed)
    encoder, (dim, width) = fitted.encoder, content.weight.shape
    moves = []
    with torch.no_grad():
        mean = encoder(features)
        for weights in la.sampled_weights(NETWORKS, torch.Generator().manual_seed(seed)):
            for sample in weights - la.mean:
                matrix, *bias = sample.split([dim * width, dim])
                moves.append(features @ matrix.view(dim, width).T + bias[0])
    # Likelihood and prior are both over the temperature, so the same draws serve all temperatures.
    unit = torch.stack(moves) / la.temperature**0.5
    at = {name: rule(loss, n, gamma) for name, rule in RULES.items()}
    factors = {f"{factor:g}": factor * loss / n for factor in FACTORS}
    return {
        "points": n,
        "effective": gamma,
        "weights": la.mean.numel(),
        "rules": {name: _figures(mean, unit, labels, t) for name, t in at.items()},
        "factors": {name: _figures(mean, unit, labels, t) for name, t in factors.items()},
    }


def _some(content: FeatureFile, seed: int) -> tuple[Tensor, Tensor]:
    """Features and labels of some test inputs, each with another of its class: else no vote for it can be right."""
    order = torch.randperm(len(content.test_features), generator=torch.Generator().manual_seed(seed))[:INPUTS]
    labels = torch.from_numpy(content.test_labels)[order]
    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    kept = counts[inverse] > 1
    return torch.from_numpy(content.test_features)[order[kept]], labels[kept]


def _figures(mean: Tensor, unit: Tensor, labels: Tensor, temperature: float) -> dict[str, float]:
    votes = metrics.retrieval_votes((mean + temperature**0.5 * move for move in unit), labels)
    error = metrics.calibration_bins(votes, labels).expected_calibration_error
    return {"temperature": temperature, "brier": metrics.brier_score(votes, labels), "ece": error}


def hindsight(found: Mapping[str, Any], figure: str) -> float:
    """The smallest figure among the multiples of the mean loss."""
    return min(float(one[figure]) for one in found["factors"].values())


def by_family(results: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float]) -> dict[str, float]:
    """Mean of a number over the encoders of each family."""
    groups: dict[str, list[float]] = {}
    for name, found in results.items():
        groups.setdefault(family(name), []).append(value(found))
    return {name: float(np.mean(values)) for name, values in sorted(groups.items())}


def left_out(results: Mapping[str, Any], figure: str) -> dict[str, tuple[str, float]]:
    """Family -> the rule that is best on the mean of all other families, and its figure on this one."""
    means = {rule: by_family(results, _of(rule, figure)) for rule in RULES}
    out = {}
    for name in means[LIBRARY]:
        others = {rule: np.mean([v for f, v in found.items() if f != name]) for rule, found in means.items()}
        best = min(others, key=lambda rule, others=others: float(others[rule]))  # type: ignore[misc]
        out[name] = (best, means[best][name])
    return out


def _of(rule: str, figure: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda found: float(found["rules"][rule][figure])


def markdown(results: Mapping[str, dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """Tables of both figures by rule and family, the leave-one-out choice, and every encoder."""
    families = list(by_family(results, lambda _: 0.0))
    out = [
        "# Calibration of sampled networks, by the rule for the temperature",
        "",
        f"`python -m benchmarks.temperature` on {machine['cores']} cores of {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date']}: {len(results)} encoders of `benchmarks.transfer` with the library's "
        f"default posterior and prior. {NETWORKS} sampled last layers vote for the class of the nearest neighbour, for "
        f"up to {INPUTS:,} test inputs. L: loss of all N points that the posterior was fitted on, at the trained "
        f"weights; γ: effective number of weights. `{LIBRARY}` is the library's rule. Means over the encoders of a "
        "family, then over families.",
    ]
    for figure, title in zip(FIGURES, ("Brier score", "Expected calibration error"), strict=True):
        out += ["", f"## {title}", "", f"| temperature | mean | {' | '.join(families)} |"]
        out.append("|---" * (2 + len(families)) + "|")
        rows = {rule: by_family(results, _of(rule, figure)) for rule in RULES}
        rows["best multiple of L / N, in hindsight"] = by_family(results, lambda f, figure=figure: hindsight(f, figure))  # type: ignore[misc]
        for rule, found in rows.items():
            name = f"**{rule}**" if rule == LIBRARY else rule
            cells = " | ".join(f"{found[one]:.3f}" for one in families)
            out.append(f"| {name} | {np.mean(list(found.values())):.3f} | {cells} |")
        if len(families) > 1:
            chosen = left_out(results, figure)
            mean = np.mean([value for _, value in chosen.values()])
            cells = " | ".join(f"{chosen[one][1]:.3f} ({chosen[one][0]})" for one in families)
            out.append(f"| chosen by the other families | {mean:.3f} | {cells} |")
    out += ["", "## Every encoder", "", "| encoder | N | γ | weights | Brier: library | L / N | best | ECE: library | "
            "L / N | best |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, found in results.items():
        cells = [f"{found['points']:,}", f"{found['effective']:,.0f}", f"{found['weights']:,}"]
        for figure in FIGURES:
            cells += [f"{_of(rule, figure)(found):.3f}" for rule in (LIBRARY, "L / N")]
            cells.append(f"{hindsight(found, figure):.3f}")
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def main() -> None:
    """Judge every feature file of a folder; print the tables, write JSON and Markdown."""
    judge_files(__doc__, "temperature", judge, markdown, {"networks": NETWORKS, "inputs": INPUTS})


if __name__ == "__main__":
    main()
