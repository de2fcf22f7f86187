"""Curvature in node form against the paper's pairwise algorithm, and at the sizes of real use.

Every case runs in its own process: inputs are made, then the curvature alone is taken, from features, raw outputs and
labels or listed pairs to the parameter diagonal, building the pair weights included. Memory is the highest resident
memory above the inputs, in the first call; times are the fastest of several calls, since other jobs disturb the rest.
Ratios are those of processor time, which a busy machine does not change much, the first case with one thread on both
sides. On a GPU every time is by the clock, to the end of the device's work, and memory is the device's.

    python -m benchmarks.curvature [--data-root ../shared/data] [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.experiments.data import read_idx
from benchmarks.experiments.training import make_network
from benchmarks.machine import Case, machine_line, measure_cases, measure_peak, measure_time, table
from benchmarks.pairwise import pairwise_curvature
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.last_layer import LastLayerPullback

DISTANCES = ("arccos", "euclidean")
FIXES = ("fixed", "positive", "full")
# Pairs held at once: as in the released code (the whole batch), and a number whose products stay in the cache.
CHUNKS = {"pairwise": None, "chunked": 64}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5}


def node_curvature(
    pullback: LastLayerPullback,
    features: Tensor,
    z: Tensor,
    loss: cc.PairLoss,
    labels: Tensor | None = None,
    pairs: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """What ``cc.ggn(..., subset_of_weights="last_layer", clamp=False)`` does once the encoder has run."""
    return pullback.coupled_diag(features, loss.output_hessian(z, labels, pairs=pairs))


def warm_up(loss: cc.PairLoss, device: str) -> None:
    """Start the libraries with a few points, so that neither time nor memory is theirs."""
    layer, features, z, labels = make_points(4, 8, 3, 2, device)
    node_curvature(LastLayerPullback(Encoder(layer, features)), features, z, loss, labels)


def make_points(
    n: int, width: int, dim: int, classes: int, device: str = "cpu"
) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A linear layer, features that cluster by class, raw outputs and labels; the same numbers on every device."""
    torch.manual_seed(0)
    labels = torch.arange(n) % classes
    features = (torch.rand(n, width) + torch.rand(classes, width)[labels]).to(device)
    layer = nn.Linear(width, dim).requires_grad_(False).to(device)
    return layer, features, layer(features), labels.to(device)


def make_triplets(labels: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random anchors, each with a random point of its class and one of another."""
    same = labels.unsqueeze(1) == labels
    anchors = torch.randint(0, len(labels), (count,)).to(labels.device)
    positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    p, n = (torch.multinomial(mask[anchors].float(), 1).squeeze(1) for mask in (positive, ~same))
    return anchors, p, n


def median_distance(z: Tensor, pairs: tuple[Tensor, Tensor]) -> float:
    """A margin that about half of these pairs are inside of, and none so close to that rounding decides."""
    u, _ = normalize(z)
    distances = (u[pairs[0]] - u[pairs[1]]).norm(dim=1).sort().values
    middle = distances[len(distances) * 2 // 5 : len(distances) * 3 // 5]
    widest = int(middle.diff().argmax())
    return float(middle[widest : widest + 2].mean())


def run_pairwise(case: Case) -> Case:
    """Case 1: node form and pairwise algorithm on the same listed pairs."""
    n, width, dim, count = case["sizes"]
    device = case["device"]
    layer, features, z, labels = make_points(n, width, dim, 10, device)
    pairs = make_triplets(labels, count)
    kind: Case = {"distance": case["distance"], "pd_fix": case["pd_fix"], "margin": median_distance(z, pairs[::2])}
    loss = cc.ContrastiveLoss(**kind, negative_weight=0.5, normalization="sum")
    warm_up(loss, device)
    pullback = LastLayerPullback(Encoder(layer, features))

    def node() -> Tensor:
        return node_curvature(pullback, features, z, loss, pairs=pairs)

    def pairwise(chunk: int | None) -> Tensor:
        return pairwise_curvature(features, z, pairs, chunk=chunk, **kind)

    out: Case = {"margin": kind["margin"], "node": {"peak_mib": measure_peak(node, device)[1]}}
    turns = []
    for name, chunk in CHUNKS.items():
        out[name] = {"chunk": chunk or count, "peak_mib": measure_peak(partial(pairwise, chunk), device)[1]}
        # In turns, so that a busy minute of the machine does not fall on one side only.
        each = []
        for _ in range(case["repetitions"]):
            turns.append(measure_time(node, 4 * case["repetitions"], device))
            each.append(measure_time(partial(pairwise, chunk), 1, device))
        out[name].update(fastest(each))
    out["node"].update(fastest(turns))
    for name in CHUNKS:
        out[name]["ratio"] = out[name]["cpu_seconds"] / out["node"]["cpu_seconds"]
    settings = {**kind, "normalization": "sum", "subset_of_weights": "last_layer", "clamp": False, "pairs": pairs}
    ggn = measure_time(lambda: cc.ggn(layer, features, **settings), 4 * case["repetitions"], device)
    return {**out, "ggn": ggn, "error": check_agreement(layer, features, pairs, loss, kind)}


def fastest(times: list[dict[str, float]]) -> dict[str, float]:
    """Every figure from the run where it was least disturbed."""
    return {name: min(t[name] for t in times) for name in times[0]}


def check_agreement(
    layer: nn.Linear, features: Tensor, pairs: tuple[Tensor, ...], loss: cc.PairLoss, kind: Case
) -> dict[str, float]:
    """Largest error relative to the largest entry, in double and single precision; raises when it is too large."""
    errors = {}
    for dtype, tolerance in TOLERANCES.items():
        phi = features.to(dtype)
        z = phi @ layer.weight.to(dtype).T + layer.bias.to(dtype)
        reference = pairwise_curvature(phi, z, pairs, chunk=256, **kind)
        got = node_curvature(LastLayerPullback(Encoder(layer, features)), phi, z, loss, pairs=pairs)
        error = (got - reference).abs().max() / reference.abs().max()
        if not float(error) <= tolerance:
            raise RuntimeError(f"node form and pairwise algorithm differ by {float(error):.2g} in {dtype} ({kind})")
        errors[str(dtype).removeprefix("torch.")] = float(error)
    return errors


def run_wide(case: Case) -> Case:
    """Case 2: many outputs, class labels."""
    n, width, dim = case["sizes"]
    device = case["device"]
    layer, features, z, labels = make_points(n, width, dim, 8, device)
    i, j = (labels.unsqueeze(1) != labels).nonzero().unbind(1)
    margin = median_distance(z, (i, j))
    loss = cc.ContrastiveLoss(margin, distance=case["distance"], pd_fix=case["pd_fix"])
    warm_up(loss, device)
    curvature = partial(node_curvature, LastLayerPullback(Encoder(layer, features)), features, z, loss, labels)
    _, memory = measure_peak(curvature, device)
    times = measure_time(curvature, case["repetitions"], device)
    return {"margin": margin, "node": {"peak_mib": memory, **times}}


def run_dataset(case: Case) -> Case:
    """Case 3: all pairs of a training set, against one forward pass of the encoder over it."""
    torch.manual_seed(0)
    device = case["device"]
    images, labels, source = load_images(case["data_root"], case["points"])
    images, labels = images.to(device), labels.to(device)
    encoder = make_network("fashionmnist", 3).to(device)
    body, layer = encoder[:-1], encoder[-1]
    train(encoder, images, labels, case["steps"])
    encoder.requires_grad_(False)
    n, batch = len(images), 250

    def forward() -> None:
        for start in range(0, n, batch):
            encoder(images[start : start + batch])

    times = measure_time(forward, case["repetitions"], device)
    features = torch.empty(n, 9216, device=device)
    for start in range(0, n, batch):
        features[start : start + batch] = body(images[start : start + batch])
    z = torch.cat([layer(features[start : start + batch]) for start in range(0, n, batch)])
    margin = 0.7
    loss = cc.ContrastiveLoss(margin)
    warm_up(loss, device)
    curvature = partial(node_curvature, LastLayerPullback(Encoder(layer, features[:2])), features, z, loss, labels)
    _, memory = measure_peak(curvature, device)
    node = measure_time(curvature, case["repetitions"], device)
    u, _ = normalize(z)
    some = torch.randint(0, n, (2, 10**5)).to(device)
    some = some[:, labels[some[0]] != labels[some[1]]]
    inside = float(((u[some[0]] - u[some[1]]).norm(dim=1) < margin).float().mean())
    return {
        "source": source,
        "encoder": f"the paper's G.2 network after {case['steps']} steps with ContrastiveLoss",
        "ordered_pairs": n * (n - 1),
        "negatives_inside": inside,
        "forward": {**times, "batch": batch},
        "node": {"peak_mib": memory, **node},
        "ratio": times["cpu_seconds"] / node["cpu_seconds"],
    }


def load_images(root: str | None, points: int) -> tuple[Tensor, Tensor, str]:
    """Fashion-MNIST's training set, or noise about ten random patterns where no data root is given."""
    if root is None:
        labels = torch.arange(points) % 10
        patterns = nn.functional.interpolate(torch.rand(10, 1, 4, 4), size=28, mode="bilinear")
        return patterns[labels] + 0.3 * torch.rand(points, 1, 28, 28), labels, "synthetic images of the same shape"
    data = read_idx("fashionmnist", Path(root), "train")
    return data.images(range(min(points, len(data)))), data.targets[:points], "Fashion-MNIST, training set"


def train(encoder: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    """A short training, for margins as they are in use."""
    loss, optimizer = cc.ContrastiveLoss(margin=0.7), torch.optim.RMSprop(encoder.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(0, len(images), (64,)).to(images.device)
        optimizer.zero_grad()
        loss(encoder(images[rows]), labels[rows]).backward()
        optimizer.step()


def make_cases(given: argparse.Namespace) -> list[Case]:
    quick = given.quick
    small, wide = ([20, 40, 3, 60], [16, 24, 32]) if quick else ([64, 9216, 3, 5000], [128, 2048, 2048])
    repetitions = 1 if quick else 3
    kinds = [("pairwise", FIXES, small, 1), ("wide", (*FIXES, "psd"), wide, 2)]
    cases: list[Case] = [
        {"case": kind, "distance": d, "pd_fix": f, "sizes": sizes, "threads": threads, "repetitions": repetitions}
        for kind, fixes, sizes, threads in kinds
        for d in DISTANCES
        for f in fixes
    ]
    size = {"points": 60, "steps": 2, "repetitions": 1} if quick else {"points": 60000, "steps": 300, "repetitions": 2}
    cases.append({"case": "dataset", "data_root": given.data_root, "threads": 2, **size})
    return [{**case, "device": given.device} for case in cases]


def run_case(case: Case) -> Case:
    return {"pairwise": run_pairwise, "wide": run_wide, "dataset": run_dataset}[case["case"]](case)


def render(results: Case) -> str:
    """Three tables."""
    cases = results["cases"]
    out = [
        "# Curvature: time and memory",
        f"`python -m benchmarks.curvature`, {machine_line(results['machine'])}. Fastest of several calls; "
        "memory (MiB) is what the first call took above its inputs. On a GPU all times are by the clock.",
    ]
    listed, wide, whole = ([case for case in cases if case["case"] == kind] for kind in ("pairwise", "wide", "dataset"))
    if listed:
        n, width, dim, count = listed[0]["sizes"]
        head = ["distance", "fix", "node ms", "cc.ggn ms", "paper s", "ratio", "chunked s", "ratio"]
        head += ["node MiB", "paper MiB", "chunked MiB", "error float64", "float32"]
        rows = []
        for case in listed:
            row = [case["distance"], case["pd_fix"]]
            row += [f"{1e3 * case[name]['cpu_seconds']:.2f}" for name in ("node", "ggn")]
            for name in CHUNKS:
                row += [f"{case[name]['cpu_seconds']:.2f}", f"{case[name]['ratio']:.0f}"]
            row += [f"{case[name]['peak_mib']:.0f}" for name in ("node", *CHUNKS)]
            rows.append([*row, *(f"{error:.0e}" for error in case["error"].values())])
        out += [
            f"## {n} points, {count} triplets, last layer {width} -> {dim}",
            "Paper: every pair pulled back on its own, the whole batch at once as in the released code; chunked: the "
            f"same, {CHUNKS['chunked']} pairs at a time, which stay in the cache. `cc.ggn` also runs and checks the "
            "encoder. One thread, processor time.",
            table(head, rows),
        ]
    head = ["s by the clock", "s of processor", "MiB"]
    if wide:
        n, width, dim = wide[0]["sizes"]
        rows = [[case["distance"], case["pd_fix"], *_cost(case["node"], 3)] for case in wide]
        out += [f"## {n} points, class labels, last layer {width} -> {dim}", table(["distance", "fix", *head], rows)]
    for case in whole:
        rows = [["forward pass", *_cost(case["forward"], 1)], ["curvature", *_cost(case["node"], 1)]]
        out += [
            f"## All {case['ordered_pairs']:,} ordered pairs of {case['points']:,} points, arccos, fixed, margin 0.7",
            f"{case['source']}; {case['encoder']}; {case['negatives_inside']:.0%} of the negatives inside the margin. "
            f"One forward pass of the encoder, then the curvature from features: {case['ratio']:.1f} times as fast.",
            table(["", *head], rows),
        ]
    return "\n\n".join(out) + "\n"


def _cost(measured: dict[str, float], digits: int) -> list[str]:
    seconds = [f"{measured[name]:.{digits}f}" for name in ("seconds", "cpu_seconds")]
    return [*seconds, f"{measured['peak_mib']:.0f}" if "peak_mib" in measured else ""]


def main(arguments: list[str] | None = None) -> Case:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data-root", help="folder of FashionMNIST/raw; without it the data are synthetic")

    return measure_cases("curvature", __doc__, make_cases, run_case, render, arguments, add)


if __name__ == "__main__":
    main()
