"""Encoders trained with learned proxies: by the cosine, and by distances of von Mises-Fisher distributions.

Source: Kirchhof et al. (2022), A Non-isotropic Probabilistic Take on Proxy-based Deep Metric Learning, supplement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.training import Fitted, Prediction, Setting, encode, train, unit
from contrastive_curvature import vmf

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

_SHARE = 0.1
"""Of the newest batch in the running mean of lengths."""
_PROXY_RATE = 10.0
"""Learning rate of the proxies' directions and of the temperature as a multiple of the encoder's."""
_SAMPLES = 10
"""Of each embedding in training with EL-nivMF, the document's number."""


FIRST: dict[str, tuple[float, float, float]] = {
    "cosine": (1.0, 1.0, 1.0),
    "l2": (200.0, 10.0, 10.0),
    "nivmf": (10.0, 1.0, 10.0),
    "b_vmf": (3.0, 30.0, 10.0),
    "el_vmf": (10.0, 30.0, 10.0),
    "kl_vmf": (10.0, 30.0, 10.0),
    "el_nivmf": (10.0, 30.0, 10.0),
}
"""Distance -> first temperature, mean concentration of embeddings, and concentration of proxies.

All temperatures are such that a logit rises by about 1 when the cosine rises by 1: with the cosine as with EL-nivMF, a
softmax that is almost even at first ends in a better recall than a sharp one.
"""


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
        distance: One of :data:`FIRST`.
    """

    classes: Tensor
    mean_length: Tensor

    def __init__(self, encoder: nn.Module, probe: Tensor, targets: Tensor, distance: str) -> None:
        super().__init__()
        self.encoder, self.distance = encoder, distance
        temperature, embedding_kappa, proxy_kappa = FIRST[distance]
        with torch.no_grad():
            z = encoder(probe)
        dim = z.shape[1]
        self.register_buffer("mean_length", z.norm(dim=1).mean())
        self.register_buffer("classes", targets.unique().to(probe.device))
        rows = len(self.classes)
        # On the encoder's device, and drawn on the CPU: the same start everywhere.
        self.directions = nn.Parameter(nn.functional.normalize(torch.randn(rows, dim), dim=1).to(probe.device))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature), device=probe.device))
        # Where the distance does not depend on a concentration, it has no gradient and stays as it is.
        self.log_embedding_kappa = nn.Parameter(torch.tensor(math.log(embedding_kappa), device=probe.device))
        shape = (rows, dim) if distance in PER_AXIS else (rows,)
        self.log_kappa = nn.Parameter(torch.full(shape, math.log(proxy_kappa), device=probe.device))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The encoder's weights, directions and temperature, and concentrations, each with a rate of its own."""
        return [
            {"params": list(self.encoder.parameters()), "lr": lr},
            {"params": [self.directions, self.log_temperature], "lr": lr * _PROXY_RATE},
            {"params": [self.log_kappa, self.log_embedding_kappa], "lr": lr},
        ]

    def scale(self, mean_length: Tensor | None = None) -> Tensor:
        """Concentration of an embedding of length 1; 1 where the distance does not depend on it.

        Args:
            mean_length: What counts as the mean length; ``None`` for that of the last batches.
        """
        if self.distance not in WITH_KAPPA:
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
        distance, temperature = self.distance, self.log_temperature.exp()
        mu, length = vmf.from_embedding(z)
        if distance == "cosine":
            return -vmf.cosine_distance(mu, self.directions) / temperature
        mean_length = None
        if self.training:
            mean_length = length.mean()
            self.mean_length.lerp_(mean_length.detach(), _SHARE)
        kappa, proxy_kappa = self.scale(mean_length) * length, self.log_kappa.exp()
        # normalized=False: the document's function, which is no density.
        if distance == SAMPLED:
            return vmf.el_nivmf_logits(mu, kappa, self.directions, proxy_kappa, temperature, _SAMPLES, normalized=False)
        if distance == "nivmf":
            return -vmf.nivmf_distance(mu, self.directions, proxy_kappa, normalized=False) / temperature
        return -_CLOSED[distance](mu, kappa, self.directions, proxy_kappa) / temperature


def proxies(
    setting: Setting, data: RetrievalData, seed: int, encoders: list[nn.Module], distance: str = SAMPLED
) -> Fitted:
    """Give every class a proxy; an image is drawn to that of its class and away from all others.

    A raw output stands for a von Mises-Fisher distribution, whose concentration is its length times a learned scale
    (see :class:`ProxyStep`): the images that the encoder answers with long outputs are the certain ones. Retrieval is
    by the cosine, as in the document. ``"cosine"`` and ``"nivmf"`` do not depend on an embedding's concentration: the
    score is the length of an output that the loss does not see. With them and with ``"l2"``, an embedding is no
    distribution, and there are no samples.
    """
    step = train(setting, data, seed, lambda encoder, probe: ProxyStep(encoder, probe, data.train.targets, distance))
    scale = float(step.scale().detach())

    def outputs(split: Split) -> Tensor:
        """Embeddings in units of their concentration, shape (N, D), on the CPU: raw outputs times the scale."""
        return scale * encode(setting, step.encoder, split)

    def predict(split: Split) -> Prediction:
        z = outputs(split)
        return Prediction(unit(z), 1 / z.norm(dim=1))

    def samples(split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        mu, kappa = vmf.from_embedding(outputs(split))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            yield vmf.sample(mu, kappa, 1, generator)[0]

    return Fitted(predict, samples if distance in DISTRIBUTION else None)
