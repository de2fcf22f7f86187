"""Predictions of a posterior of all weights: the exact covariance, and samples of the linearised network.

Times are processor times with one thread, as multiples of a forward pass of the same inputs, the smallest of several;
of a fit, multiples of an epoch (forward and backward over the same points). The scatter is the standard deviation of
`uncertainty` over repetitions, relative to its mean; beside it what `uncertainty_error` says. laplace-torch's own
classification forms Jacobians (B, D, P), so it gets one input at a time.

    python -m benchmarks.all_weights [--network mlp resnet18] [--structure diag kron] [--samples 10] [--exact]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
import torchvision
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks.machine import describe, machine_line, measure_time

INPUTS, OUTPUTS, REPETITIONS = 16, 32, 5


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
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, OUTPUTS)),
    "resnet18": resnet18,
    "vit": vit_s,
}


def seconds(call: Callable[[], object], times: int) -> float:
    """Return the processor time of the fastest of several calls."""
    return measure_time(call, times)["cpu_seconds"]


def points(n: int) -> tuple[Tensor, Tensor]:
    """Made-up images of eight classes, and their labels."""
    labels = torch.arange(n) % 8
    return torch.randn(n, 3, 32, 32) + torch.randn(8, 3, 32, 32)[labels], labels


def trained(name: str, x: Tensor, labels: Tensor) -> nn.Module:
    """A network after a few steps: the outputs of one with random weights are nearly the same for every input."""
    net = NETWORKS[name]()
    loss, optimizer = cc.ContrastiveLoss(margin=0.5), torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        loss(net(x), labels).backward()
        optimizer.step()
    return net.eval()


def epoch(net: nn.Module, loader: list[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward over all batches."""
    for batch, _ in loader:
        net(batch).square().sum().backward()
        net.zero_grad()


def lines(name: str, structure: str, samples: int, exact: bool) -> list[str]:
    """What is measured of one network and one structure."""
    torch.manual_seed(0)
    x, labels = points(64)
    net = trained(name, x, labels)
    kwargs = {"mc_samples": 1} if structure == "diag" else {}
    la = Laplace(net, "contrastive", "all", structure, backend_kwargs={"pd_fix": "psd", **kwargs})
    loader = [(x[k : k + 32], labels[k : k + 32]) for k in (0, 32)]
    start = time.process_time()
    la.fit(loader)
    fit = time.process_time() - start
    la.optimize_prior_precision()
    few = x[:INPUTS]
    one, of_epoch = seconds(lambda: forward(net, few), 5), seconds(lambda: epoch(net, loader), 2)
    sampled = seconds(lambda: la(few, n_samples=samples), 3) / one
    outs = [la(few, n_samples=samples) for _ in range(REPETITIONS)]
    angles = torch.stack([out.uncertainty for out in outs])
    mean = angles.mean(0)
    scatter = float((angles.std(0) / mean).mean())
    error = float((torch.stack([out.uncertainty_error for out in outs]).mean(0) / mean).mean())
    found = f"{sampled:.0f} forward passes, scatter {scatter:.0%}, uncertainty_error {error:.0%}"
    said = [f"{name} {structure}: fit {fit / of_epoch:.1f} epochs; n_samples={samples}: {found}"]
    if exact:
        start = time.process_time()
        whole = la(few)
        took = (time.process_time() - start) / one
        far = float(((mean - whole.uncertainty) / whole.uncertainty).mean())
        said.append(f"{name} {structure}: exact {took:.0f} forward passes; mean angle of the samples {far:+.1%} of it")
    return said


def forward(net: nn.Module, x: Tensor) -> Tensor:
    """A forward pass without gradients."""
    with torch.no_grad():
        out: Tensor = net(x)
    return out


def of_laplace_torch(name: str) -> str:
    """The diagonal and a prediction of laplace-torch's own classification, for the same network."""
    torch.manual_seed(0)
    x, labels = points(4)
    net, loader = NETWORKS[name]().eval(), [(x[k : k + 1], labels[k : k + 1]) for k in range(4)]
    la = Laplace(net, "classification", "all", "diag")
    start = time.process_time()
    la.fit(DataLoader(TensorDataset(x, labels), 1))
    fit = (time.process_time() - start) / seconds(lambda: epoch(net, loader), 2)
    took = seconds(lambda: la(x[:1]), 2) / seconds(lambda: forward(net, x[:1]), 5)
    return f"{name} diag, laplace-torch's classification, one input at a time: fit {fit:.0f} epochs; {took:.0f} passes"


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=["resnet18", "vit"])
    parser.add_argument("--structure", nargs="+", choices=["diag", "kron"], default=["diag"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--exact", action="store_true", help="the exact covariances beside them")
    parser.add_argument("--laplace-torch", action="store_true", help="laplace-torch's own classification beside them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine_line(describe()))
    for name in options.network:
        for structure in options.structure:
            print(*lines(name, structure, options.samples, options.exact), sep="\n", flush=True)
        if options.laplace_torch:
            print(of_laplace_torch(name), flush=True)


if __name__ == "__main__":
    main()
