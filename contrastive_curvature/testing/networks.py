"""Small encoders of every kind that users have, in float64 and evaluation mode, and their inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_WIDTH = 4


class _Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _SelfAttention(nn.Module):
    """One head over two tokens of width two."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 2))
        out: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return out.flatten(1)


class _Tied(nn.Module):
    """The same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.tanh(self.layer(x)))
        return out


def _frozen(dim: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(_WIDTH, 3), nn.Sigmoid(), nn.Linear(3, dim))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda d: nn.Linear(_WIDTH, d),
    "no bias": lambda d: nn.Linear(_WIDTH, d, bias=False),
    "tanh": lambda d: nn.Sequential(nn.Linear(_WIDTH, 3), nn.Tanh(), nn.Linear(3, d)),
    "in-place relu": lambda d: nn.Sequential(nn.Linear(_WIDTH, 5), nn.ReLU(inplace=True), nn.Linear(5, d)),
    "softplus": lambda d: nn.Sequential(nn.Linear(_WIDTH, 3), nn.Softplus(), nn.Linear(3, d, bias=False)),
    "gelu": lambda d: nn.Sequential(nn.Linear(_WIDTH, 3), nn.GELU(), nn.Linear(3, d)),
    "conv2d": lambda d: nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, d)
    ),
    "conv1d": lambda d: nn.Sequential(nn.Conv1d(2, 2, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, d)),
    "batchnorm": lambda d: nn.Sequential(nn.Linear(_WIDTH, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, d)),
    "layernorm": lambda d: nn.Sequential(nn.Linear(_WIDTH, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, d)),
    "residual": lambda d: nn.Sequential(_Residual(_WIDTH), nn.Linear(_WIDTH, d)),
    "attention": lambda d: nn.Sequential(_SelfAttention(), nn.Linear(_WIDTH, d)),
    "embedding": lambda d: nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(2 * _WIDTH, d)),
    "shared": lambda d: nn.Sequential(_Tied(), nn.Linear(_WIDTH, d)),
    "frozen": _frozen,
    "unflatten": lambda d: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(18, d)
    ),
}

NETWORKS: dict[str, str] = {
    "linear": "`Linear`",
    "no bias": "`Linear` without a bias",
    "tanh": "`Tanh`",
    "in-place relu": "`ReLU(inplace=True)`",
    "softplus": "`Softplus`",
    "gelu": "`GELU`",
    "conv2d": "`Conv2d`, `MaxPool2d`, `Flatten`",
    "conv1d": "`Conv1d`",
    "batchnorm": "`BatchNorm1d` in evaluation mode",
    "layernorm": "`LayerNorm`",
    "residual": "residual connection in a module of the user's",
    "attention": "`MultiheadAttention`",
    "embedding": "`Embedding` of tokens",
    "shared": "a layer used twice (shared parameters)",
    "frozen": "frozen parameters",
    "unflatten": "`Unflatten`",
}
"""Kinds of networks that :func:`build_network` makes, and what each stands for."""


def build_network(kind: str, dim: int) -> nn.Module:
    """Build a small encoder from :func:`make_inputs` to (N, dim) raw outputs; torch's seed decides the weights.

    Args:
        kind: One of :data:`NETWORKS`.
        dim: D.

    Returns:
        The encoder, in float64 and evaluation mode.
    """
    network = _BUILDERS[kind](dim)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    return network.double().eval()


def make_inputs(kind: str, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw inputs of a kind of network.

    Args:
        kind: One of :data:`NETWORKS`.
        n: Number N of points.
        generator: Source of randomness.

    Returns:
        Shape (N, ...), float64, or int64 tokens.
    """
    if kind == "embedding":
        return torch.randint(0, 5, (n, _WIDTH), generator=generator, device="cpu")
    shape = {"conv2d": (1, 3, 3), "conv1d": (2, 4)}.get(kind, (_WIDTH,))
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64, device="cpu")


def repeats_weights(model: nn.Module) -> bool:
    """Return whether a matrix is applied several times per point; then K-FAC is not exact for one point."""
    return any(isinstance(module, (nn.MultiheadAttention, _Tied)) for module in model.modules())
