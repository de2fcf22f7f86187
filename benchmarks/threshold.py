"""What share of known, unknown and corrupted inputs ``embedding.is_known(alpha)`` flags, on every encoder of the table.

For each feature file of ``benchmarks.transfer``: the posterior that the library takes when nobody asks for one, in
three situations. ``split``: calibrated on a random half of the test inputs, judged on the other half, the mean over
many splits. ``validation``: calibrated on inputs of their own, where a file has them, judged on all test inputs.
``optimistic``: without ``la.calibrate``, so compared with inputs that the encoder was trained on.

    python -m benchmarks.threshold --cache FOLDER [--only NAME ...]
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import Case, describe, machine_line, options, table, write_results
from benchmarks.transfer.feature_file import FeatureFile, Floats, load_features
from benchmarks.transfer.fitted import DEFAULT, Fitted
from contrastive_curvature import OptimisticPValueWarning

ALPHAS = (0.01, 0.05, 0.1)
SPLITS = 20
_BATCH = 500


def p_values(reference: Tensor, novelty: Tensor) -> Tensor:
    """P-values of inputs after ``la.calibrate``, from the statistics ``embedding.novelty`` alone.

    A prediction's novelty does not depend on the calibration inputs, so one prediction is enough for many splits. What
    the library counts as equal, as it differs by rounding alone, is not equal here.

    Args:
        reference: Novelty of the n calibration inputs.
        novelty: Of B inputs.

    Returns:
        Shape (B,), float64.
    """
    known = reference.double().sort().values
    below = torch.searchsorted(known, novelty.double())
    return (1 + len(known) - below).double() / (len(known) + 1)


def flagged(p_value: Tensor) -> list[float]:
    """Shares of the inputs that are not known at each of :data:`ALPHAS`."""
    return [float((p_value <= alpha).double().mean()) for alpha in ALPHAS]


def judge(content: FeatureFile, splits: int = SPLITS, seed: int = 0) -> dict[str, Any]:
    """Shares flagged among the inputs of one feature file.

    Args:
        content: Of the file.
        splits: Number of random halves of the test inputs.
        seed: Of the halves.

    Returns:
        ``split``, ``deviation`` (the standard deviation between splits), ``expected_deviation`` (that of binomial
        counts), ``validation`` (or ``None``), ``optimistic``, and ``others``: the shares among unknown and corrupted
        inputs with the calibration of ``validation`` where there is one, else of ``split``. Shares are lists over the
        alphas.
    """
    la = Fitted(content).posterior(DEFAULT)
    test, without = _predict(la, content.test_features, p_value=True)
    generator = torch.Generator().manual_seed(seed)
    half = len(test) // 2
    orders = [torch.randperm(len(test), generator=generator) for _ in range(splits)]
    shares = torch.tensor([flagged(p_values(test[order[:half]], test[order[half:]])) for order in orders])
    spread = 1 / half + 1 / (len(test) - half)
    references, validation = [test[order[:half]] for order in orders], None
    if content.calibration_features is not None:
        references = [_predict(la, content.calibration_features)[0]]
        validation = flagged(p_values(references[0], test))
    others = {}
    worst = {kind: max(level for other, level in content.corrupted if other == kind) for kind, _ in content.corrupted}
    corrupted = {f"{kind} {level}": content.corrupted[kind, level] for kind, level in worst.items()}
    for name, features in (content.unknown | corrupted).items():
        novelty, _ = _predict(la, features)
        found = torch.tensor([flagged(p_values(reference, novelty)) for reference in references])
        others[name] = found.mean(0).tolist()
    return {
        "test": len(test),
        "split": shares.mean(0).tolist(),
        "deviation": shares.std(0).tolist(),
        "expected_deviation": [math.sqrt(alpha * (1 - alpha) * spread) for alpha in ALPHAS],
        "validation": validation,
        "optimistic": flagged(without),
        "unseen_classes": not set(content.test_labels.tolist()) & set(content.train_labels.tolist()),
        "others": others,
    }


def _predict(la: Any, features: Floats, *, p_value: bool = False) -> tuple[Tensor, Tensor]:
    """Novelty of inputs, and if asked for their p-values without calibration."""
    found: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimisticPValueWarning)
        for block in torch.from_numpy(features).split(_BATCH):
            embeddings = la(block)
            found.append((embeddings.novelty, embeddings.p_value if p_value else torch.empty(0)))
    novelty, without = (torch.cat(part) for part in zip(*found, strict=True))
    return novelty, without


def render(results: Case) -> str:
    """Two tables: known inputs, and the others."""
    known, others = [], []
    for name, found in results["encoders"].items():
        ratios = [a / b for a, b in zip(found["deviation"], found["expected_deviation"], strict=True)]
        cells = [f"{share:.3f} ({ratio:.1f})" for share, ratio in zip(found["split"], ratios, strict=True)]
        cells += ["" if found["validation"] is None else f"{share:.3f}" for share in found["validation"] or ALPHAS]
        cells += [f"{share:.3f}" for share in found["optimistic"]]
        known.append([f"{name}{'*' if found['unseen_classes'] else ''}", *cells])
        kinds: dict[bool, list[str]] = {False: [], True: []}
        for other, shares in found["others"].items():
            kinds[" " in other].append(f"{other}: " + " / ".join(f"{share:.2f}" for share in shares))
        others.append([name, *("; ".join(kinds[corrupted]) for corrupted in (False, True))])
    ways = [f"{what} {alpha:g}" for what in ("calibrated", "validation", "without") for alpha in ALPHAS]
    parts = [
        "# What `is_known(alpha)` flags",
        f"`python -m benchmarks.threshold`, {machine_line(results['machine'])}: the posterior that "
        '`Laplace(encoder, likelihood="contrastive")` takes, on the feature files of `benchmarks.transfer`.',
        "## Known inputs",
        "Share of the test inputs that are flagged. Calibrated on a random half of them and judged on the other "
        f"half, mean of {SPLITS} splits; in brackets the standard deviation between splits over that of binomial "
        "counts. This must be alpha whatever the encoder, as splits are exchangeable. Validation: calibrated on "
        "the file's own calibration inputs. Without `la.calibrate`: compared with training inputs; `*` marks test "
        "inputs of classes that training has not seen.",
        table(["encoder", *ways], known),
        "## Unknown and corrupted inputs",
        f"Share that is flagged at alpha = {' / '.join(f'{alpha:g}' for alpha in ALPHAS)}; corrupted at the worst "
        "level. Calibrated on the file's own calibration inputs where it has them, else on halves of the test "
        "inputs.",
        table(["encoder", "unknown", "corrupted"], others),
    ]
    return "\n\n".join(parts) + "\n"


def judge_files(
    name: str,
    description: str | None,
    judge: Callable[[FeatureFile], Case],
    render: Callable[[Case], str],
    about: Case,
    arguments: Sequence[str] | None,
) -> None:
    """Judge every feature file of a folder, and write what there is after each of them.

    Args:
        name: Of the result files.
        description: Of the command line.
        judge: What is said of one feature file.
        render: The results as Markdown.
        about: What stands in the results beside the machine and the encoders.
        arguments: Of the command line.
    """
    parser = options(description)
    parser.add_argument("--cache", type=Path, default=Path("runs/transfer"), help="folder with the feature files")
    only = "feature files (default: all); other results are kept"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=only)
    given = parser.parse_args(arguments)
    there = sorted(path.stem for path in given.cache.glob("*.npz"))
    before = given.out / f"{name}.json"
    found = json.loads(before.read_text(encoding="utf-8"))["encoders"] if given.only and before.exists() else {}
    results = {"machine": describe(), **about}
    for encoder in given.only or there:
        found[encoder] = judge(load_features(given.cache / f"{encoder}.npz"))
        results["encoders"] = dict(sorted(found.items()))
        write_results(given.out, name, results, render(results), show=False)
    print(render(results))


def main(arguments: Sequence[str] | None = None) -> None:
    judge_files("threshold", __doc__, judge, render, {"alphas": ALPHAS, "splits": SPLITS}, arguments)


if __name__ == "__main__":
    main()
