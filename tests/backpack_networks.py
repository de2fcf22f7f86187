"""Networks whose layers BackPACK knows, and the cases that tests of hosts draw."""

from collections.abc import Callable, Iterable

import torch
from backpack.custom_module.branching import SumModule
from hypothesis import strategies as st
from strategies import INPUTS, Case, options, pair_kinds
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.testing import dense_ggn, dense_jacobian

Drawn = tuple[nn.Module, Tensor, Case]


class Branched(nn.Module):
    """Branches that BackPACK's own module adds up, and a module without parameters that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 3)
        self.skip = nn.Linear(3, 3, bias=False)
        self.act, self.add, self.flat = nn.ELU(0.5), SumModule(), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        return self.add(self.flat(self.act(self.skip(h))), h)


def build(kind: str, dim: int) -> nn.Module:
    """In float64 and evaluation mode."""
    image = nn.Unflatten(1, (1, 2, 2))
    made = {
        "linear": lambda: nn.Linear(INPUTS, dim),
        "no bias": lambda: nn.Sequential(nn.Linear(INPUTS, 3, bias=False), nn.Tanh(), nn.Linear(3, dim, bias=False)),
        "relu": lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(inplace=True), nn.Linear(5, dim)),
        "activations": lambda: nn.Sequential(
            *(nn.Linear(INPUTS, 3), nn.Sigmoid(), nn.LeakyReLU(0.2), nn.Linear(3, 3), nn.SELU(), nn.LogSigmoid()),
            *(nn.Dropout(0.5), nn.Identity(), nn.Linear(3, dim)),
        ),
        "smooth": lambda: nn.Sequential(
            *(nn.Linear(INPUTS, 2), nn.Sigmoid(), nn.Linear(2, 3), nn.ELU(), nn.Linear(3, dim))
        ),
        "conv2d": lambda: nn.Sequential(
            *(image, nn.Conv2d(1, 2, 2, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2, 1), nn.Flatten()),
            nn.Linear(8, dim),
        ),
        "strided": lambda: nn.Sequential(
            *(image, nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(1, 2, (2, 3), stride=2, bias=False), nn.ELU()),
            *(nn.Conv2d(2, 4, 1, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, dim)),
        ),
        "conv1d": lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.MaxPool1d(2), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(4, dim)),
        ),
        "max pool": lambda: nn.Sequential(
            *(image, nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(1, 2, (2, 3), bias=False), nn.BatchNorm2d(2), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, dim)),
        ),
        "groups": lambda: nn.Sequential(
            *(image, nn.Conv2d(1, 2, (1, 2), stride=2), nn.ELU(), nn.Conv2d(2, 4, 1, groups=2)),
            *(nn.Flatten(), nn.Linear(4, dim)),
        ),
        "positions": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, dim)
        ),
        "batchnorm": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, dim)),
        "unflatten": lambda: nn.Sequential(
            *(nn.Linear(INPUTS, 4), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 2), nn.Flatten(), nn.Linear(3, dim))
        ),
        "branched": lambda: nn.Sequential(Branched(), nn.Linear(3, dim)),
        "normalised inside": lambda: nn.Sequential(nn.Linear(INPUTS, 3), cc.L2Norm(), nn.Linear(3, dim)),
        "normalised": lambda: nn.Sequential(nn.Linear(INPUTS, dim + 1), cc.L2Norm()),
    }[kind]()
    for module in made.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    return made.double().eval()


FLAT = ("linear", "no bias", "relu", "smooth", "activations", "batchnorm")
SEQUENTIAL = (*FLAT, "conv2d", "strided", "positions", "normalised inside")
NETWORKS = (*SEQUENTIAL, "conv1d")
HOSTED = (*NETWORKS, "max pool", "groups", "unflatten", "branched")


@st.composite
def hosted_cases(draw: st.DrawFn, kinds: Iterable[str], build: Callable[[str, int], nn.Module] = build) -> Drawn:
    """A network, its inputs, and the pairs of its outputs."""
    n, dim = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    model = build(draw(st.sampled_from(tuple(kinds))), dim)
    x = torch.randn(n, INPUTS, dtype=torch.float64)
    labels, pairs = draw(pair_kinds(n, torch.Generator().manual_seed(seed)))
    return model, x, Case(model(x).detach(), labels, pairs, draw(options))


def truth_and_size(drawn: Drawn) -> tuple[Tensor, float]:
    """The dense curvature, and the size of the terms that may cancel in it."""
    model, x, case = drawn
    jacobian = dense_jacobian(model, x)
    weights = cc.output_hessian(case.z, **case.all).derivatives.dense()[0].abs().sum()
    size = float(weights / case.z.norm(dim=1).min() ** 2 * jacobian.square().sum())
    return dense_ggn(model, x, **case.all), 1e-2 * size
