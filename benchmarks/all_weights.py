"""Predictions of a posterior of all weights: samples of the linearised network, and the exact covariance.

Processor times with one thread, as multiples of a forward pass of the same inputs, the smallest of several; of a fit,
multiples of an epoch (forward and backward over the same points). The scatter is the standard deviation of
`uncertainty` over repetitions, relative to its mean; beside it what `uncertainty_error` says. Memory is the highest
above what was held before: of two training steps with Adam, of the fit, and of a prediction.

    python -m benchmarks.all_weights [--network mlp resnet18] [--structure diag kron] [--samples 10] [--exact diag]
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable

import torch
import torchvision
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertModel

import contrastive_curvature as cc
from benchmarks.machine import Case, machine_line, measure_cases, measure_time, table, watch_memory

INPUTS, OUTPUTS, POINTS, REPETITIONS = 16, 32, 64, 5
LAPLACE_TORCH = "diag, laplace-torch"


class MiniLM(nn.Module):
    """The network of all-MiniLM-L6-v2 with random weights, on 32 tokens, and a layer to the outputs."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        self.bert = BertModel(BertConfig(**sizes, attn_implementation="eager"), add_pooling_layer=False)
        self.last = nn.Linear(384, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        out: Tensor = self.last(self.bert(tokens).last_hidden_state.mean(1))
        return out


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32."""
    net = torchvision.models.resnet18(num_classes=OUTPUTS)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return net


def vit_s() -> nn.Module:
    """ViT-S, of half its depth, on patches of 4 x 4."""
    net = torchvision.models.VisionTransformer(32, 4, 6, 6, 384, 1536, num_classes=OUTPUTS)
    nn.init.xavier_uniform_(net.heads.head.weight)  # torchvision's are zero, and a zero has no direction
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, OUTPUTS)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, OUTPUTS)),
    "resnet18": resnet18,
    "vit": vit_s,
    "minilm": MiniLM,
}
TITLES = {"small": "small MLP", "mlp": "MLP", "resnet18": "ResNet-18", "vit": "ViT-S, 6 layers", "minilm": "MiniLM"}


def seconds(call: Callable[[], object], times: int) -> float:
    """Return the processor time of the fastest of several calls."""
    return measure_time(call, times)["cpu_seconds"]


def points(name: str, n: int) -> tuple[Tensor, Tensor]:
    """Made-up images of eight classes, or tokens for MiniLM, and their labels."""
    labels = torch.arange(n) % 8
    if name == "minilm":
        tokens, of_class = torch.randint(1000, 20_000, (n, 32)), torch.randint(1000, 20_000, (8, 32))[labels]
        return torch.where(torch.rand(n, 32) < 0.5, tokens, of_class), labels
    return torch.randn(n, 3, 32, 32) + torch.randn(8, 3, 32, 32)[labels], labels


def train(net: nn.Module, x: Tensor, labels: Tensor, steps: int) -> None:
    """Train a network: the outputs of one with random weights are nearly the same for every input."""
    loss, optimizer = cc.ContrastiveLoss(margin=0.5), torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), labels).backward()
        optimizer.step()


def epoch(net: nn.Module, loader: list[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward over all batches."""
    for batch, _ in loader:
        net(batch).square().sum().backward()
        net.zero_grad()


def forward(net: nn.Module, x: Tensor) -> Tensor:
    """A forward pass without gradients."""
    with torch.no_grad():
        out: Tensor = net(x)
    return out


def run_case(case: Case) -> Case:
    """Measure one network and one structure."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    name, structure, samples = case["network"], case["structure"], case["samples"]
    if structure == LAPLACE_TORCH:
        return of_laplace_torch(name)
    (x, labels), net = points(name, POINTS), NETWORKS[name]()
    if structure == "kron":
        # The factor of a table is a matrix of all its entries: 25,000 positions of ViT, 12 million words of MiniLM.
        for part, p in net.named_parameters():
            p.requires_grad_("embedding" not in part)
    train(net, x, labels, 10)
    loader, few = [(x[k : k + 32], labels[k : k + 32]) for k in range(0, POINTS, 32)], x[:INPUTS]
    # Of a copy, whose gradients and moments go with it.
    copies = [copy.deepcopy(net)]
    memory = {"training": watch_memory(lambda: train(copies.pop(), few, labels[:INPUTS], 2))[1]}
    kwargs = {"mc_samples": 1} if structure == "diag" else {}
    la = Laplace(net.eval(), "contrastive", "all", structure, backend_kwargs={"pd_fix": "psd", **kwargs})
    fit, memory["fit"] = watch_memory(lambda: seconds(lambda: la.fit(loader), 1))
    fitted = la.posterior.fitted
    decomposition = seconds(lambda: fitted.curvature.clamped(fitted.sizes), 1)
    la.optimize_prior_precision()
    memory["samples"] = watch_memory(lambda: la(few, n_samples=samples))[1]
    one = seconds(lambda: forward(net, few), 5)
    outs: list[cc.EmbeddingDistribution] = []
    sampled = seconds(lambda: outs.append(la(few, n_samples=samples)), REPETITIONS)
    angles = torch.stack([out.uncertainty for out in outs])
    mean = angles.mean(0)
    found: Case = {
        "weights": len(la.mean),
        "forward_seconds": one,
        "decomposition_seconds": decomposition,
        "fit": (fit - decomposition) / seconds(lambda: epoch(net, loader), 2),
        "sampled": sampled / one,
        "scatter": float((angles.std(0) / mean).mean()),
        "stated": float((torch.stack([out.uncertainty_error for out in outs]).mean(0) / mean).mean()),
        "memory": memory,
    }
    if case["beside"]:
        exact: list[Tensor] = []
        found["exact"] = seconds(lambda: exact.append(la(few).uncertainty), 1) / one
        found["bias"] = float((mean / exact[0] - 1).mean())
    return found


def of_laplace_torch(name: str) -> Case:
    """Measure laplace-torch's own classification; it forms Jacobians (B, D, P), so it gets one input at a time."""
    (x, labels), net = points(name, 4), NETWORKS[name]().eval()
    loader = [(x[k : k + 1], labels[k : k + 1]) for k in range(4)]
    la = Laplace(net, "classification", "all", "diag")
    fit = seconds(lambda: la.fit(DataLoader(TensorDataset(x, labels), 1)), 1)
    one = seconds(lambda: forward(net, x[:1]), 5)
    exact = seconds(lambda: la(x[:1]), 2)
    return {"forward_seconds": one, "fit": fit / seconds(lambda: epoch(net, loader), 2), "exact": exact / one}


def render(results: Case) -> str:
    """Two tables, of times and of memory, one row for every network and structure."""
    times, memory = [], []
    for case in results["cases"]:
        where = [TITLES[case["network"]], case["structure"]]

        def show(key: str, form: str, case: Case = case) -> str:
            return format(case[key], form) if key in case else "–"

        forms = {"forward_seconds": ".3f", "fit": ".1f", "decomposition_seconds": ".1f", "sampled": ".0f"}
        forms |= {"scatter": ".1%", "stated": ".1%", "exact": ".0f", "bias": "+.1%"}
        times.append([*where, *(show(key, form) for key, form in forms.items())])
        if "memory" in case:
            used = case["memory"]
            ratios = [f"{used[key]:,.0f} ({used[key] / used['training']:.1f} ×)" for key in ("fit", "samples")]
            memory.append([*where, f"{case['weights'] / 1e6:.1f}", f"{used['training']:,.0f}", *ratios])
    text = (
        f"`python -m benchmarks.all_weights --exact diag kron`, {machine_line(results['machine'])}; one thread, "
        f"processor time, {OUTPUTS} outputs, `psd`, `diag` with `mc_samples=1`. A fit of {POINTS} points in epochs of "
        f"the same points, without the eigenvalues, which are computed once, however many points there are. "
        f"Predictions of {INPUTS} inputs in forward passes: from {results['cases'][0]['samples']} samples "
        "of the linearised network with the "
        f"scatter of `uncertainty` over {REPETITIONS} repetitions and the error that `uncertainty_error` states, and "
        "exact with the difference of the mean from it. `kron` leaves out tables of words and positions."
    )
    beside = (
        f"Memory in MiB above what is held before: of training steps with Adam on {INPUTS} inputs, of the fit in "
        f"batches of 32, which computes the eigenvalues too, and of the samples for {INPUTS} inputs."
    )
    head = ["network", "structure", "forward, s", "fit, epochs", "eigenvalues, s", "samples, passes", "scatter"]
    head += ["stated", "exact, passes", "samples' mean"]
    of_memory = ["network", "structure", "weights, million", "training step", "fit", "samples"]
    title = "# Predictions of a posterior of all weights"
    return "\n".join([title, "", text, "", table(head, times), "", beside, "", table(of_memory, memory), ""])


def make_cases(given: argparse.Namespace) -> list[Case]:
    same = {"samples": given.samples, "threads": 1}
    structures = [*given.structure, *([LAPLACE_TORCH] if given.laplace_torch or given.quick else [])]
    networks = ["small"] if given.quick else given.network
    return [
        {"network": name, "structure": structure, "beside": structure in given.exact or given.quick, **same}
        for structure in structures
        for name in networks
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=["resnet18", "vit", "minilm"])
    parser.add_argument("--structure", nargs="+", choices=["diag", "kron"], default=["diag", "kron"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--exact", nargs="+", default=[], metavar="STRUCTURE", help="exact covariances too, of these")
    parser.add_argument("--laplace-torch", action="store_true", help="laplace-torch's own classification beside them")


def main(arguments: list[str] | None = None) -> Case:
    return measure_cases("all_weights", __doc__, make_cases, run_case, render, arguments, add_options)


if __name__ == "__main__":
    main()
