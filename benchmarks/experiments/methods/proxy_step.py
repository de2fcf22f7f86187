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

__all__ = ["DISTANCES", "PER_AXIS", "PROXY_KAPPA", "SAMPLED", "WITH_KAPPA", "ProxyOptions", "ProxyStep"]

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
PROXY_KAPPA = (*_CLOSED, *PER_AXIS)
"""Distances that the proxies' concentrations enter."""
DISTANCES = ("cosine", *PROXY_KAPPA)
"""All of them, in the order of the document's table 4 but for the cosine."""


@dataclass(frozen=True)
class ProxyOptions:
    """How proxies are compared with embeddings, and where they start.

    Args:
        distance: One of :data:`DISTANCES`.
        proxy_lr: Learning rate of proxies and temperature as a multiple of the encoder's.
        temperature: The first one, t of Eq. 40.
        embedding_kappa: The mean concentration of the first embeddings.
        proxy_kappa: The first concentration of every proxy, or of every axis.
        n_samples: Samples of each embedding, for :data:`SAMPLED`.
        normalized: Whether :data:`PER_AXIS` take a density, or the document's function.
    """

    distance: str
    proxy_lr: float
    temperature: float
    embedding_kappa: float
    proxy_kappa: float
    n_samples: int
    normalized: bool


class ProxyStep(nn.Module):
    """The cross-entropy of ``exp(-distance / temperature)`` over all proxies with the label, NCA++ (Eq. 40).

    An embedding is a raw output z of the encoder. Its direction is ``z / |z|``, its concentration ``scale |z|``: raw
    outputs of a new network are far shorter than 1, and the fixed scale gives a few images the mean concentration that
    the options ask for. EL-nivMF follows Algorithm 1, with its temperature inside the mean over samples.

    Args:
        encoder: Images -> raw outputs (N, D).
        probe: A few images on the encoder's device.
        targets: Class labels of the training images, any integers, shape (N,).
        options: See there.
    """

    classes: Tensor
    scale: Tensor

    def __init__(self, encoder: nn.Module, probe: Tensor, targets: Tensor, options: ProxyOptions) -> None:
        super().__init__()
        self.encoder, self.options = encoder, options
        with torch.no_grad():
            length = encoder(probe).float().norm(dim=1)
        dim = encoder(probe[:1]).shape[1]
        scale = options.embedding_kappa / length.mean() if options.distance in WITH_KAPPA else torch.ones(())
        self.register_buffer("scale", scale.to(probe.device))
        self.register_buffer("classes", targets.unique().to(probe.device))
        rows = len(self.classes)
        # On the encoder's device, and drawn on the CPU: the same start everywhere.
        self.directions = nn.Parameter(nn.functional.normalize(torch.randn(rows, dim), dim=1).to(probe.device))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(options.temperature), device=probe.device))
        self.log_kappa: nn.Parameter | None = None
        if options.distance in PROXY_KAPPA:
            shape = (rows, dim) if options.distance in PER_AXIS else (rows,)
            self.log_kappa = nn.Parameter(torch.full(shape, math.log(options.proxy_kappa), device=probe.device))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The encoder's weights, and all others with a rate of their own."""
        inside = list(self.encoder.parameters())
        known = {id(p) for p in inside}
        others = [p for p in self.parameters() if id(p) not in known]
        return [{"params": inside, "lr": lr}, {"params": others, "lr": lr * self.options.proxy_lr}]

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
        kappa, proxy_kappa = self.scale * length, self.log_kappa.exp()
        if options.distance == SAMPLED:
            n_samples, normalized = options.n_samples, options.normalized
            return vmf.el_nivmf_logits(
                mu, kappa, self.directions, proxy_kappa, temperature, n_samples, normalized=normalized
            )
        if options.distance == "nivmf":
            return -vmf.nivmf_distance(mu, self.directions, proxy_kappa, normalized=options.normalized) / temperature
        return -_CLOSED[options.distance](mu, kappa, self.directions, proxy_kappa) / temperature
