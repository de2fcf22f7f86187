"""Training with proxies: a direction and concentrations for each class, and a loss over all distances to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from contrastive_curvature import vmf

__all__ = ["DISTANCES", "DISTRIBUTION", "PER_AXIS", "PROXY_KAPPA", "SAMPLED", "WITH_KAPPA", "ProxyOptions", "ProxyStep"]

_CLOSED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "l2": vmf.squared_euclidean_distance,
    "b_vmf": vmf.bhattacharyya_distance,
    "el_vmf": vmf.expected_likelihood_distance,
    "kl_vmf": vmf.kl_distance,
}
SAMPLED = "el_nivmf"
"""The distance that is estimated from samples."""
PER_AXIS = ("nivmf", SAMPLED)
"""Distances whose proxies have a concentration for each axis."""
WITH_KAPPA = (*_CLOSED, SAMPLED)
"""Distances that an embedding's concentration enters."""
DISTRIBUTION = tuple(name for name in WITH_KAPPA if name != "l2")
"""Those that take it for the concentration of a distribution; that of ``"l2"`` has the unit of its temperature."""
PROXY_KAPPA = (*_CLOSED, *PER_AXIS)
"""Distances that the proxies' concentrations enter."""
DISTANCES = ("cosine", *PROXY_KAPPA)
"""All of them."""

_SHARE = 0.1
"""Of the newest batch in the running mean of lengths."""


@dataclass(frozen=True)
class ProxyOptions:
    """How proxies are compared with embeddings, and where they start.

    Args:
        distance: One of :data:`DISTANCES`.
        proxy_lr: Learning rate of the proxies' directions and of the temperature as a multiple of the encoder's.
        kappa_lr: The same of concentrations, those of the proxies and the embeddings' mean one.
        temperature: The first one, t of Eq. 40.
        embedding_kappa: The mean concentration of the first embeddings.
        proxy_kappa: The first concentration of every proxy, or of every axis.
        n_samples: Samples of each embedding, for :data:`SAMPLED`.
        normalized: Whether :data:`PER_AXIS` take a density, or the document's function.
    """

    distance: str
    proxy_lr: float
    kappa_lr: float
    temperature: float
    embedding_kappa: float
    proxy_kappa: float
    n_samples: int
    normalized: bool


class ProxyStep(nn.Module):
    """The cross-entropy of ``exp(-distance / temperature)`` over all proxies with the label, NCA++ (Eq. 40).

    An embedding is a raw output z of the encoder. Its direction is ``z / |z|``. Its concentration is a learned number
    times ``|z| / mean of |z|``, over the batch in training and over the last batches afterwards: raw outputs are far
    shorter than 1 at first and soon 50 times as long, whatever the distance, so that their length by itself is no
    concentration. EL-nivMF follows Algorithm 1, with its temperature inside the mean over samples.

    Args:
        encoder: Images -> raw outputs (N, D).
        probe: A few images on the encoder's device.
        targets: Class labels of the training images, any integers, shape (N,).
        options: See there.
    """

    classes: Tensor
    mean_length: Tensor

    def __init__(self, encoder: nn.Module, probe: Tensor, targets: Tensor, options: ProxyOptions) -> None:
        super().__init__()
        self.encoder, self.options = encoder, options
        with torch.no_grad():
            z = encoder(probe)
        dim = z.shape[1]
        self.register_buffer("mean_length", z.norm(dim=1).mean())
        self.register_buffer("classes", targets.unique().to(probe.device))
        rows = len(self.classes)
        # On the encoder's device, and drawn on the CPU: the same start everywhere.
        self.directions = nn.Parameter(nn.functional.normalize(torch.randn(rows, dim), dim=1).to(probe.device))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(options.temperature), device=probe.device))
        self.log_kappa: nn.Parameter | None = None
        self.log_embedding_kappa: nn.Parameter | None = None
        if options.distance in WITH_KAPPA:
            first = math.log(options.embedding_kappa)
            self.log_embedding_kappa = nn.Parameter(torch.tensor(first, device=probe.device))
        if options.distance in PROXY_KAPPA:
            shape = (rows, dim) if options.distance in PER_AXIS else (rows,)
            self.log_kappa = nn.Parameter(torch.full(shape, math.log(options.proxy_kappa), device=probe.device))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The encoder's weights, directions and temperature, and concentrations, each with a rate of its own."""
        groups: list[dict[str, Any]] = [
            {"params": list(self.encoder.parameters()), "lr": lr},
            {"params": [self.directions, self.log_temperature], "lr": lr * self.options.proxy_lr},
        ]
        kappas = [p for p in (self.log_kappa, self.log_embedding_kappa) if p is not None]
        if kappas:
            groups.append({"params": kappas, "lr": lr * self.options.kappa_lr})
        return groups

    def scale(self, mean_length: Tensor | None = None) -> Tensor:
        """Concentration of an embedding of length 1; 1 where the distance does not depend on it.

        Args:
            mean_length: What counts as the mean length; ``None`` for that of the last batches.
        """
        if self.log_embedding_kappa is None:
            return torch.ones_like(self.mean_length)
        return self.log_embedding_kappa.exp() / (self.mean_length if mean_length is None else mean_length)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar."""
        return cross_entropy(self.logits(self.encoder(x)), torch.searchsorted(self.classes, targets))

    def logits(self, z: Tensor) -> Tensor:
        """What the softmax over the classes takes.

        Args:
            z: Raw outputs, shape (B, D).

        Returns:
            Shape (B, C).
        """
        options, temperature = self.options, self.log_temperature.exp()
        mu, length = vmf.from_embedding(z)
        if options.distance == "cosine":
            return -vmf.cosine_distance(mu, self.directions) / temperature
        assert self.log_kappa is not None
        mean_length = None
        if self.training:
            mean_length = length.mean()
            self.mean_length.lerp_(mean_length.detach(), _SHARE)
        kappa, proxy_kappa = self.scale(mean_length) * length, self.log_kappa.exp()
        if options.distance == SAMPLED:
            n_samples, normalized = options.n_samples, options.normalized
            return vmf.el_nivmf_logits(
                mu, kappa, self.directions, proxy_kappa, temperature, n_samples, normalized=normalized
            )
        if options.distance == "nivmf":
            return -vmf.nivmf_distance(mu, self.directions, proxy_kappa, normalized=options.normalized) / temperature
        return -_CLOSED[options.distance](mu, kappa, self.directions, proxy_kappa) / temperature
