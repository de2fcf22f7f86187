"""How far the closed form of zero-shot probabilities is from sampled embeddings.

Classes have most of their direction in common, as prompts of one template have in encoders of images and texts; images
are near one of them, with errors of several sizes. The probabilities of :class:`~contrastive_curvature
.ZeroShotClassifier` are compared with the mean softmax of sampled embeddings, in total variation, beside the softmax of
the means and the mean-field approximation of the logits.

Run: ``python -m benchmarks.zero_shot [--out FOLDER]``; under a minute.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import contrastive_curvature as cc
from benchmarks.machine import describe, write_results

RESULTS = Path(__file__).parent / "results"
IMAGES, DIM, SCALE, COMMON, SAMPLES, CHUNK = 60, 64, 100.0, 0.8, 4000, 50
CASES = [
    {"classes": classes, "image": image, "prompt": prompt}
    for classes, image, prompt in (
        (2, 0.02, 0.0),
        (2, 0.05, 0.0),
        (2, 0.03, 0.03),
        (10, 0.02, 0.0),
        (10, 0.05, 0.0),
        (10, 0.03, 0.03),
        (100, 0.02, 0.0),
        (100, 0.05, 0.0),
        (100, 0.03, 0.03),
    )
]
"""Number of classes, and the size of the errors of images and of prompts, at each number of an embedding."""


def draw(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings of images and prompts, and the standard deviations of both, one size a row."""
    torch.manual_seed(0)
    common = normalize(torch.randn(1, DIM), dim=1)
    apart = normalize(torch.randn(case["classes"], DIM), dim=1)
    prompts = normalize(math.sqrt(COMMON) * common + math.sqrt(1 - COMMON) * apart, dim=1)
    right = prompts[torch.randint(0, case["classes"], (IMAGES,))]
    noise = normalize(torch.randn(IMAGES, DIM), dim=1)
    images = normalize(0.3 * right + 0.25 * noise + 0.9 * normalize(torch.randn(1, DIM), dim=1), dim=1)
    sizes = [
        size * (2 * torch.rand(len(x), 1)).exp().expand_as(x)
        for size, x in ((case["image"], images), (case["prompt"], prompts))
    ]
    return images, prompts, sizes[0], sizes[1]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Total variation from sampled embeddings, means over the images."""
    images, prompts, of_image, of_prompt = draw(case)
    sampled = torch.zeros(IMAGES, case["classes"])
    for _ in range(SAMPLES // CHUNK):
        a = normalize(images + of_image * torch.randn(CHUNK, *images.shape), dim=2)
        b = normalize(prompts + of_prompt * torch.randn(CHUNK, *prompts.shape), dim=2)
        sampled += torch.softmax(SCALE * a @ b.mT, -1).sum(0) / SAMPLES
    left = cc.EmbeddingDistribution(images, variance=of_image.square())
    right = cc.EmbeddingDistribution(prompts, variance=of_prompt.square())
    cosine = cc.similarity(left, right, pairwise=True)
    slope = SCALE / (1 + math.pi / 8 * SCALE**2 * cosine.variance).sqrt()
    found = {
        "means": torch.softmax(SCALE * images @ prompts.T, 1),
        "mean_field": torch.softmax(slope * cosine.mean, 1),
        "this": cc.ZeroShotClassifier(right, scale=SCALE).probabilities(left),
    }
    return {**case, **{name: float((p - sampled).abs().sum(1).mean() / 2) for name, p in found.items()}}


def main() -> None:
    """Measure all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    machine, cases = describe(), [measure(case) for case in CASES]
    lines = [
        "# Zero-shot probabilities against sampled embeddings",
        "",
        f"`python -m benchmarks.zero_shot`, {machine['cpu']}, torch {machine['torch']}, {machine['date']}. Total "
        f"variation, mean over {IMAGES} images; {SAMPLES} samples, {DIM} dimensions, scale {SCALE:g}.",
        "",
        "| classes | error of images | of prompts | softmax of the means | mean field | `ZeroShotClassifier` |",
        "|---|---|---|---|---|---|",
    ]
    for c in cases:
        figures = " | ".join(f"{c[name]:.3f}" for name in ("means", "mean_field", "this"))
        lines.append(f"| {c['classes']} | {c['image']:g} | {c['prompt']:g} | {figures} |")
    write_results(given.out, "zero_shot", {"machine": machine, "cases": cases}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
