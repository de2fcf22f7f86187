"""Two towers trained here with InfoNCE: what their posteriors are worth for zero-shot classes and unknown images.

    python -m benchmarks.losses_worth.towers --data-root data --cache runs/transfer

Images of Fashion-MNIST and captions made of their labels. A posterior of the last layers of both towers, with the
curvature of the loss that they were trained with; beside it none, and one of the image tower alone with the curvature
of the pair loss, which is told the classes. Temperatures are fitted on images that neither training nor the test has.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.losses_worth.captions import TEMPERATURE, draw_captions, make_towers, prompts, train_towers
from benchmarks.losses_worth.numbers import rounded
from benchmarks.machine import describe, write_results
from benchmarks.transfer.harm import harm
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.recipes import grey
from benchmarks.transfer.recipes.image_encoder import make_inputs, unknown_images
from contrastive_curvature import metrics
from contrastive_curvature.embedding.zero_shot import ZeroShotClassifier
from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.network.two_towers import TwoTowers

DIM, EPOCHS, BATCH, FITTED, HELD = 32, 4, 128, 4_000, 1_000
FIXES = ("psd_parts", "ggn_fixed")
SHARES = (0.1, 0.01)
"""Of the temperature that the library's rule gives."""
HARM = ("noise", 2), ("blur", 2), ("occlusion", 3)


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Mean gap of confidence and accuracy over bins of equal width, weighted by their points.

    Args:
        probabilities: Shape (N, C).
        labels: Shape (N,).
        bins: Number of bins.
    """
    confidence, found = probabilities.max(1)
    right = (found == labels).double()
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, right - confidence.double())
    return float(gaps.abs().sum() / len(labels))


def figures(classifier: ZeroShotClassifier, images: Any, labels: Tensor) -> dict[str, float]:
    """Accuracy, expected calibration error and negative log-likelihood of labelled images."""
    p = classifier.probabilities(images)
    likelihood = p.gather(1, labels.unsqueeze(1)).clamp(min=1e-12).log().mean()
    return {
        "accuracy": float((p.argmax(1) == labels).double().mean()),
        "ece": expected_calibration_error(p, labels),
        "nll": -float(likelihood),
    }


def judge(root: Path, cache: Path, seed: int) -> dict[str, Any]:
    """Train or load the towers, fit the posteriors, and take all figures.

    Args:
        root: The data root.
        cache: Folder where the trained towers are kept.
        seed: Of everything.
    """
    known = grey._load("fashionmnist", root, seed)
    labels, test_labels = torch.from_numpy(known.train_labels), torch.from_numpy(known.test_labels)
    towers = make_towers(DIM, seed)
    kept = cache / f"fashionmnist-{DIM}-towers{f'-seed{seed}' if seed else ''}.pt"
    if kept.is_file():
        for tower, state in zip(towers, torch.load(kept, weights_only=True), strict=True):
            tower.load_state_dict(state)
            tower.eval()
    else:
        rows = slice(HELD, None)
        history = train_towers(towers, known.train[rows], labels[rows], EPOCHS, seed, BATCH)
        print("loss of each epoch:", ", ".join(f"{value:.3f}" for value in history), flush=True)
        torch.save([tower.state_dict() for tower in towers], kept)
    x = {"held": make_inputs(known.train[:HELD]), "test": make_inputs(known.test)}
    for kind, level in HARM:
        x[f"{kind} {level}"] = make_inputs(harm(known.test, kind, level, seed))
    unknown = make_inputs(unknown_images("mnist", root, (1, 28, 28), len(test_labels), seed))
    fitted = slice(HELD, HELD + FITTED)
    images, some = make_inputs(known.train[fitted]), labels[fitted]
    rows_of = {"held": labels[:HELD]} | dict.fromkeys([name for name in x if name != "held"], test_labels)
    out: dict[str, Any] = {"rows": {}}
    for name, la_a, la_b, seconds in _posteriors(towers, images, some, seed):
        print(name, flush=True)
        ids, classes = prompts()
        with torch.no_grad():
            texts = towers[1](ids) if la_b is None else la_b(ids)
            found = {key: towers[0](part) if la_a is None else la_a(part) for key, part in x.items()}
            other = towers[0](unknown) if la_a is None else la_a(unknown)
        classifier = ZeroShotClassifier(texts, scale=1 / TEMPERATURE, labels=classes)
        plain = {key: figures(classifier, found[key], rows_of[key]) for key in x if key != "held"}
        scores = {"probability": [-classifier.probabilities(some).max(1).values for some in (found["test"], other)]}
        if la_a is not None:
            scores["novelty"] = [found["test"].novelty, other.novelty]
            scores["angle"] = [found["test"].tangential_variance, other.tangential_variance]
        temperature = classifier.fit_temperature(found["held"], rows_of["held"])
        out["rows"][name] = {
            "zero_shot": plain,
            "fitted": {key: figures(classifier, found[key], rows_of[key]) for key in x if key != "held"},
            "temperature": temperature,
            "posterior_temperature": None if la_a is None else float(la_a.temperature),
            "auroc": {key: metrics.auroc(*pair) for key, pair in scores.items()},
            "seconds": seconds,
        }
    return out


def _posteriors(
    towers: tuple[nn.Module, nn.Module], images: Tensor, labels: Tensor, seed: int
) -> Iterator[tuple[str, Any, Any, float]]:
    """Name, posteriors of both towers (``None``: without), and seconds of processor time of the fit."""
    yield "none", None, None, 0.0
    pairs = TensorDataset(images, draw_captions(labels, torch.Generator().manual_seed(seed)))
    for fix in FIXES:
        start = time.process_time()
        la: Any = Laplace(
            TwoTowers(*towers),
            likelihood="contrastive",
            subset_of_weights="last_layer",
            backend_kwargs={"loss": InfoNCELoss(TEMPERATURE, pd_fix=fix)},
        )
        la.fit(DataLoader(pairs, BATCH), progress_bar=False)
        la.optimize_prior_precision()
        seconds = time.process_time() - start
        yield f"InfoNCE, {fix}", la.a, la.b, seconds
        if fix == FIXES[0]:
            yield f"InfoNCE, {fix}, images alone", la.a, None, seconds
            for share in SHARES:
                for tower in (la.a, la.b):
                    _cool(tower, share)
                yield f"InfoNCE, {fix}, temperature times {share:g}", la.a, la.b, seconds
                for tower in (la.a, la.b):
                    _cool(tower, 1 / share)
    start = time.process_time()
    one: Any = Laplace(towers[0], likelihood="contrastive", subset_of_weights="last_layer")
    one.fit(DataLoader(TensorDataset(images, labels), BATCH), progress_bar=False)
    one.optimize_prior_precision()
    yield "pair loss with classes, images alone", one, None, time.process_time() - start


def _cool(la: Any, share: float) -> None:
    """Multiply the temperature; the prior keeps its size beside the curvature."""
    la.temperature = la.temperature * share
    la.prior_precision = la.prior_precision / share


def markdown(found: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """The table."""
    parts = [
        "# Two towers: what their posteriors are worth",
        "",
        f"Written by `python -m benchmarks.losses_worth.towers`; {machine['cpu']}, {machine['threads']} threads, torch "
        f"{machine['torch']}. Image tower and caption tower of dimension {DIM}, trained {EPOCHS} epochs with InfoNCE "
        f"at temperature {TEMPERATURE} on Fashion-MNIST; unknown are digits (MNIST). ECE and negative log-likelihood "
        "of zero-shot probabilities, as they come, and after a temperature was fitted on 1,000 further images.",
        "",
    ]
    first = next(iter(found["rows"].values()))
    for key in first["zero_shot"]:
        parts += [f"## {'Test images' if key == 'test' else f'Test images, {key}'}", "", *_part(found, key), ""]
    parts += ["## Unknown images: AUROC", "", *_unknown(found)]
    return "\n".join(parts) + "\n"


def _part(found: Mapping[str, Any], key: str) -> Iterator[str]:
    yield from head(["posterior", "accuracy", "ECE", "NLL", "ECE, fitted", "NLL, fitted", "fitted temperature"])
    for name, row in found["rows"].items():
        plain, fitted = row["zero_shot"][key], row["fitted"][key]
        numbers = [plain["accuracy"], plain["ece"], plain["nll"], fitted["ece"], fitted["nll"], row["temperature"]]
        yield line([name, *(f"{number:.3f}" for number in numbers)])


def _unknown(found: Mapping[str, Any]) -> Iterator[str]:
    yield from head(["posterior", "its temperature", "largest probability", "`novelty`", "angle", "seconds of the fit"])
    for name, row in found["rows"].items():
        scores = [
            f"{row['auroc'][key]:.3f}" if key in row["auroc"] else "" for key in ("probability", "novelty", "angle")
        ]
        own = row["posterior_temperature"]
        yield line([name, "" if own is None else f"{own:.3g}", *scores, f"{row['seconds']:.1f}"])


def main() -> None:
    """Read the command line, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    machine = describe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = judge(given.data_root, given.cache, given.seed)
    result = {"machine": machine, "seed": given.seed, **rounded(found)}
    write_results(given.out, "losses_worth_towers", result, markdown(found, machine))


if __name__ == "__main__":
    main()
