"""Predictions of a posterior of all weights: the exact covariance, and samples of the linearised network.

Times are processor times with one thread, as multiples of a forward pass of the same inputs, the smallest of several.
The scatter is the standard deviation of `uncertainty` over repetitions, relative to the exact one, on the mean of the
inputs; beside it what `uncertainty_error` says.

    python -m benchmarks.all_weights [--network mlp resnet18] [--samples 10] [--exact]
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

import contrastive_curvature  # noqa: F401
from benchmarks.machine import describe, machine_line

INPUTS, OUTPUTS, REPETITIONS = 16, 32, 5


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32."""
    net = torchvision.models.resnet18(num_classes=OUTPUTS)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, OUTPUTS)),
    "resnet18": resnet18,
    "vit": lambda: torchvision.models.VisionTransformer(32, 4, 6, 6, 384, 1536, num_classes=OUTPUTS),
}


def seconds(call: Callable[[], object], times: int) -> float:
    """The fastest of several calls, in processor time."""
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def lines(name: str, structure: str, samples: int, exact: bool) -> list[str]:
    """What is measured of one network and one structure."""
    torch.manual_seed(0)
    net = NETWORKS[name]().eval()
    labels = torch.arange(64) % 8
    x = torch.randn(64, 3, 32, 32) + torch.randn(8, 3, 32, 32)[labels]
    kwargs = {"mc_samples": 1} if structure == "diag" else {}
    la = Laplace(net, "contrastive", "all", structure, backend_kwargs={"pd_fix": "psd", **kwargs})
    loader = [(x[k : k + 32], labels[k : k + 32]) for k in (0, 32)]
    start = time.process_time()
    la.fit(loader)
    fit = time.process_time() - start
    la.optimize_prior_precision()
    few = x[:INPUTS]

    def forward() -> Tensor:
        with torch.no_grad():
            out: Tensor = net(few)
        return out

    def epoch() -> None:
        for batch, _ in loader:
            net(batch).square().sum().backward()
            net.zero_grad()

    one, of_epoch = seconds(forward, 5), seconds(epoch, 2)
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


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=["resnet18", "vit"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--exact", action="store_true", help="the exact covariances beside them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine_line(describe()))
    for name in options.network:
        for structure in ("diag", "kron"):
            print(*lines(name, structure, options.samples, options.exact), sep="\n", flush=True)


if __name__ == "__main__":
    main()
