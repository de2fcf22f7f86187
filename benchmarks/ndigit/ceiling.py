"""How well corrupt images can be recognised at all: a classifier of single digits, trained on occluded ones.

The digits of an image are independent given their patches, so the classes of its digits hold all that can be known of
its class. A large network that classifies single digits, trained to classify occluded ones, comes close to that limit;
an embedding of the whole image in a few dimensions, trained with few occlusions, should stay below it.

    python -m benchmarks.ndigit.ceiling --data-root data --out benchmarks/results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import machine
from benchmarks.experiments.data.ndigit import NDigitData, load_ndigit, occlude
from benchmarks.experiments.data.ndigit_split import SIDE, NDigitSplit
from benchmarks.experiments.markdown import line, machines
from benchmarks.ndigit.scoring import average_precision, draw_pairs
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected

__all__ = ["main", "measure", "train_classifier"]

SHARES = (0.0, 0.2, 0.5, 1.0)
"""Of the digits that get a patch: none, as in training, half, and as in the corrupt parts."""
_TRAINED_SHARE = 0.7
_BATCH = 128
_PAIRS = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write ``ndigit_ceiling.json`` and ``.md``.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0; 2 when something was refused.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ndigit.ceiling", description=__doc__.split("\n")[0])
    parser.add_argument("--data-root", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw")
    parser.add_argument("--iterations", type=int, default=3_000, metavar="N", help="of the classifier's training")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's)")
    given = parser.parse_args(argv)
    try:
        if given.iterations < 1:
            raise InputError(expected("--iterations", "a whole number, at least 1", given.iterations))
        if given.threads is not None:
            torch.set_num_threads(given.threads)
        sets = {n: load_ndigit(given.data_root, n) for n in (2, 3)}
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    network = train_classifier(sets[2], given.iterations, seed=0)
    found = {str(n): measure(network, data) for n, data in sets.items()}
    results = {"iterations": given.iterations, "found": found, "machine": machine.describe()}
    machine.write_results(given.out, "ndigit_ceiling", results, _markdown(results))
    return 0


def train_classifier(data: NDigitData, iterations: int, seed: int) -> nn.Module:
    """Train a network to classify single digits, 70 % of them with a patch that is drawn anew each time.

    Args:
        data: Its training digits are used: those of the clean images that training images are made of.
        iterations: Batches of 128 digits.
        seed: Of weights, digits and patches.

    Returns:
        Digits (B, 1, 28, 28) in [0, 1] -> logits (B, 10), in evaluation mode.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows, shown = _digits(data.train)
    network = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, iterations)
    for _ in range(iterations):
        chosen = torch.from_numpy(rng.integers(len(rows), size=_BATCH))
        plain = NDigitSplit(data.train.digits, rows[chosen, None], torch.zeros(_BATCH, 1, 3).long(), shown[chosen])
        x = occlude(plain, _TRAINED_SHARE, rng).images(range(_BATCH)).contiguous(memory_format=torch.channels_last)
        loss = cross_entropy(network(x), shown[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return network.eval()


def measure(network: nn.Module, data: NDigitData, seed: int = 0) -> dict[str, dict[str, float]]:
    """Accuracy and verification from the classes of single digits, on test images of seen classes.

    Args:
        network: See :func:`train_classifier`.
        data: N-digit MNIST.
        seed: Of patches and pairs.

    Returns:
        By the share of occluded digits: ``"digits"``, the share of digits that are right; ``"accuracy"`` of whole
        images among the seen classes; ``"ap"`` of pairs, by the probability that both show the same class.
    """
    found = {}
    for share in SHARES:
        images = occlude(data.seen_clean, share, np.random.default_rng([seed, 7]))
        places = _classes(network, images)  # N tensors of (M, 10)
        n = len(places)
        shown = [images.targets // 10 ** (n - 1 - place) % 10 for place in range(n)]
        right = [(p.argmax(1) == label).double().mean() for p, label in zip(places, shown, strict=True)]
        joint = places[0]
        for place in places[1:]:
            joint = (joint[:, :, None] * place[:, None, :]).flatten(1)
        joint = joint[:, data.seen] / joint[:, data.seen].sum(1, keepdim=True)
        i, j = draw_pairs(images.targets, _PAIRS, seed)
        same = images.targets[i] == images.targets[j]
        found[f"{share:g}"] = {
            "digits": float(torch.stack(right).mean()),
            "accuracy": float((data.seen[joint.argmax(1)] == images.targets).double().mean()),
            "ap": average_precision((joint[i] * joint[j]).sum(1), same),
        }
    return found


def _digits(images: NDigitSplit) -> tuple[Tensor, Tensor]:
    """The digit images that are shown anywhere, each once, and what they show."""
    n = images.rows.shape[1]
    rows, labels = images.rows.T.flatten(), torch.cat([images.targets // 10 ** (n - 1 - k) % 10 for k in range(n)])
    kinds, place = np.unique(rows.numpy(), return_index=True)
    return torch.from_numpy(kinds), labels[torch.from_numpy(place)]


def _classes(network: nn.Module, images: NDigitSplit) -> list[Tensor]:
    """Probabilities of the ten digits at each place."""
    n, parts = images.rows.shape[1], []
    with torch.no_grad():
        for rows in torch.arange(len(images)).split(500):
            tiles = images.images(rows.tolist()).view(len(rows), 1, SIDE, n, SIDE).permute(3, 0, 1, 2, 4)
            parts.append(torch.stack([network(tile).double().softmax(1) for tile in tiles]))
    return list(torch.cat(parts, 1))


def _markdown(results: dict[str, Any]) -> str:
    heads = ["digits", "digits with a patch", "digits right", "images right", "AP of pairs"]
    lines = [line(heads), line(["---:"] * len(heads))]
    for n, shares in results["found"].items():
        for share, value in shares.items():
            cells = [f"{value[name]:.3f}" for name in ("digits", "accuracy", "ap")]
            lines.append(line([f"N = {n}", f"{float(share):.0%}", *cells]))
    notes = [
        f"A classifier of single digits ({results['iterations']:,} batches of {_BATCH}, {_TRAINED_SHARE:.0%} of them "
        "with a patch that is drawn anew each time) reads each place by itself; test images of seen classes.",
        "Images right: the most likely of the seen classes. AP: by the probability that two images show one class.",
        *machines([results]),
    ]
    title = "# How well corrupt N-digit images can be recognised\n"
    return "\n".join([title, *lines, "", *(f"- {note}" for note in notes)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
