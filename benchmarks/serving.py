"""What a prediction with all its scores takes beside a forward pass of the encoder, at batch size 1 too.

A ResNet-18, a vision transformer (6 blocks of width 384, patches of 16 pixels) and an MLP (784-1024-1024-128), random
weights, images of 64 x 64, and a small convolutional network on images of 28 x 28; 128 outputs, and 2,048 of "wide"
(784-512-2048); the default posterior of the last layer, 8 class centres, 64 calibration inputs. "rank 64" keeps so many
eigenvectors of the features instead of all 1,024. Beside the encoder alone in the same runtime, one thread, in turns:
``la(x)`` with all four scores read, and the export in torch (``torch.export``) and in onnxruntime. And one query of
``cc.Retriever`` beside the encoder, the product with a gallery of 10,000 points and the ten nearest.

    python -m benchmarks.serving [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torchvision
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.machine import Case, machine_line, measure_cases, table, take_turns

NETWORKS = ("resnet18", "vit", "mlp", "mlp, rank 64", "cnn", "wide")
BATCHES = (1, 32, 256)
SECONDS = 8.0
"""For each network and batch size."""
_CLASSES = 8


def make_encoder(name: str, quick: bool = False) -> tuple[nn.Module, tuple[int, ...]]:
    """An encoder with random weights, and the shape of one input."""
    size = 16 if quick else 64
    if name == "resnet18":
        encoder = torchvision.models.resnet18()
        encoder.fc = nn.Linear(512, 128)
        return encoder, (3, size, size)
    if name == "vit":
        depth, width = (1, 32) if quick else (6, 384)
        encoder = torchvision.models.VisionTransformer(size, size // 4, depth, width // 64 or 1, width, 4 * width)
        encoder.heads = nn.Linear(width, 128)
        return encoder, (3, size, size)
    if name == "cnn":
        first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*first, *second, nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 128)), (1, 28, 28)
    if name == "wide":
        return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 64 if quick else 2048)), (784,)
    width = 64 if quick else 1024
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128)]
    return nn.Sequential(*layers), (784,)


def make_posterior(encoder: nn.Module, shape: tuple[int, ...], rank: int | None) -> Any:
    """The default structure, calibrated; of random inputs of a few classes."""
    labels = torch.arange(96) % _CLASSES
    x = torch.randn(_CLASSES, *shape)[labels] + torch.randn(96, *shape)
    la = Laplace(encoder, "contrastive", backend_kwargs={"pd_fix": "psd", "rank": rank})
    la.fit([(x[:32], labels[:32]), (x[32:], labels[32:])])
    la.optimize_prior_precision()
    la.calibrate([torch.randn(64, *shape)])
    return la


def all_scores(la: Any, x: Tensor) -> tuple[Tensor, ...]:
    """What the exported module returns, of ``la(x)``."""
    prediction = la(x)
    return prediction.mu, prediction.kappa, prediction.uncertainty, prediction.p_value


def make_sides(la: Any, shape: tuple[int, ...], folder: Path) -> dict[str, Callable[[Tensor], Any]]:
    """Functions of a batch, by name; the first of each pair is the encoder alone."""
    encoder, example = la.model.model.eval(), torch.randn(2, *shape)
    batch = torch.export.Dim("batch")
    plain = torch.export.export(encoder, (example,), dynamic_shapes=({0: batch},))
    torch.onnx.export(plain, (example,), folder / "plain.onnx", dynamo=True, verbose=False, input_names=["x"])
    la.export(folder / "scores.pt2", example)
    la.export(folder / "scores.onnx", example)
    served = torch.export.load(folder / "scores.pt2").module()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [
        onnxruntime.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
        for name in ("plain", "scores")
    ]
    return {
        "torch": encoder,
        "la(x)": lambda x: all_scores(la, x),
        "graph": plain.module(),
        "la.export pt2": served,
        "onnxruntime": lambda x: sessions[0].run(None, {"x": x.numpy()}),
        "la.export onnx": lambda x: sessions[1].run(None, {"x": x.numpy()}),
    }


PAIRS = (("torch", "la(x)"), ("graph", "la.export pt2"), ("onnxruntime", "la.export onnx"))


@torch.no_grad()
def largest_difference(sides: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, float]:
    """Of both exports to ``la(x)``: of mu absolutely, of the others relatively."""
    wanted, out = sides["la(x)"](x), {}
    for name in ("la.export pt2", "la.export onnx"):
        found = [torch.as_tensor(value) for value in sides[name](x)]
        apart = [(new - old).abs() for new, old in zip(found, wanted, strict=True)]
        scales = [torch.ones(()), *(old.abs() for old in wanted[1:])]
        out[name] = max(float((a / scale).max()) for a, scale in zip(apart, scales, strict=True))
    return out


def run_retriever(points: int, at_least: float) -> Case:
    """Seconds of one query, and of the encoder with a search alone."""
    labels = torch.arange(points) % 100
    classes = torch.randn(100, 128)
    encoder = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
    held_out = torch.arange(500) % 100
    retriever = cc.Retriever(encoder).fit(
        classes[labels] + 0.7 * torch.randn(points, 128),
        labels,
        held_out=(classes[held_out] + 0.7 * torch.randn(500, 128), held_out),
    )
    query, gallery = classes[:1] + 0.7 * torch.randn(1, 128), torch.randn(points, 64)
    calls = {"search": lambda: (encoder(query) @ gallery.T).topk(10), "retriever": lambda: retriever(query)}
    with torch.no_grad():
        take_turns(calls, 2)
        turns = take_turns(calls, 2, at_least=at_least)
    return {name: statistics.median(taken) for name, taken in turns.items()}


def run_case(case: Case) -> Case:
    """Seconds of every side and their ratios, for every batch size."""
    torch.manual_seed(0)
    if case["network"] == "retriever":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"query": run_retriever(case["points"], case["seconds"]), "rows": [], "difference": {}}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        made = make_encoder(case["network"], case["quick"])
        la = make_posterior(*made, 64 if "rank" in case["network"] else None)
        sides, rows = make_sides(la, made[1], Path(folder)), []
        for n in case["batches"]:
            x = torch.randn(n, *made[1])
            calls = {name: partial(side, x) for name, side in sides.items()}
            with torch.no_grad():
                take_turns(calls, 1)
                seconds = take_turns(calls, 2, at_least=case["seconds"])
            ratios = {
                mine: {
                    "of_fastest": min(seconds[mine]) / min(seconds[alone]),
                    "median": statistics.median(a / b for a, b in zip(seconds[mine], seconds[alone], strict=True)),
                }
                for alone, mine in PAIRS
            }
            fastest = {name: min(values) for name, values in seconds.items()}
            rows.append({"batch": n, "turns": len(seconds["torch"]), "seconds": fastest, "ratios": ratios})
    return {"rows": rows, "difference": largest_difference(sides, torch.randn(64, *made[1]))}


def render(results: Case) -> str:
    """One row for every network and batch size."""
    rows = []
    for case in results["cases"]:
        for row in case["rows"]:
            cells = [case["network"], row["batch"]]
            for alone, mine in PAIRS:
                ratio = row["ratios"][mine]
                cells += [f"{1e3 * row['seconds'][alone]:.3g}", f"{ratio['of_fastest']:.2f} ({ratio['median']:.2f})"]
            rows.append(cells)
    text = (
        f"`python -m benchmarks.serving`, {machine_line(results['machine'])}, onnxruntime "
        f"{results.get('onnxruntime', onnxruntime.__version__)}; one thread. Milliseconds of the encoder alone, and "
        "how many times as long a prediction with mu, kappa, uncertainty and p-value takes in the same runtime: the "
        "ratio of the fastest turns, and in brackets the median of the ratios of all turns. 'rank 64' keeps so many "
        "eigenvectors of 1,024 features."
    )
    head = ["network", "batch", "torch, ms", "`la(x)`", "graph, ms", "`la.export` pt2", "onnxruntime, ms"]
    lines = ["# What scores cost beside the encoder", "", text, "", table([*head, "`la.export` onnx"], rows), ""]
    lines += ["Largest difference to `la(x)` of 64 random inputs (of mu absolutely, of the others relatively):", ""]
    for case in results["cases"]:
        if "query" in case:
            search, whole = (1e3 * case["query"][name] for name in ("search", "retriever"))
            one = f"One query of `cc.Retriever`, {case['points']:,} points: {whole:.2f} ms, encoder and search alone"
            lines += ["", f"{one} {search:.2f} ms ({whole - search:.2f} ms more, {whole / search:.1f} times)."]
        else:
            lines.append(f"- {case['network']}: " + ", ".join(f"{k} {v:.1e}" for k, v in case["difference"].items()))
    return "\n".join(lines) + "\n"


def make_cases(given: argparse.Namespace) -> list[Case]:
    quick = given.quick
    sizes = {"batches": (1, 3) if quick else BATCHES, "seconds": 0.0 if quick else SECONDS, "threads": 1}
    names = ("mlp",) if quick else NETWORKS
    cases: list[Case] = [{"network": name, "quick": quick, **sizes} for name in names]
    return [*cases, {"network": "retriever", "points": 500 if quick else 10_000, **sizes}]


def main(arguments: list[str] | None = None) -> Case:
    return measure_cases("serving", __doc__, make_cases, run_case, render, arguments)


if __name__ == "__main__":
    main()
