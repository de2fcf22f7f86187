"""How far an embedding lies from all training classes, each a von Mises-Fisher distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Prediction, Setting
from benchmarks.experiments.methods.checks import fitted
from benchmarks.experiments.methods.embed import unit
from benchmarks.experiments.methods.on_base import OnBase
from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.vmf.estimation import sra

_BLOCK = 2**24
"""Densities held at once."""


class VMFMixture:
    """A mixture of one von Mises-Fisher distribution for each class, weighted by the classes' frequencies.

    Args:
        mu: Mean directions, shape (C, D).
        kappa: Concentrations, shape (C,).
        log_weight: Logarithms of the frequencies, shape (C,).
    """

    def __init__(self, mu: Tensor, kappa: Tensor, log_weight: Tensor) -> None:
        self.mu, self.kappa, self.log_weight = mu.double(), kappa.double(), log_weight.double()

    @classmethod
    def fit(cls, u: Tensor, labels: Tensor) -> VMFMixture:
        """Estimate every class (Sra 2012, by :func:`contrastive_curvature.vmf.fit`).

        A class with one image has no spread of its own and takes that of all others together.

        Args:
            u: Unit embeddings, shape (N, D).
            labels: Shape (N,).

        Returns:
            The mixture.

        Raises:
            InputError: No class has two images.
        """
        _, sizes = labels.unique(return_counts=True)
        if int(sizes.max()) < 2:
            raise InputError(expected("data.train", "a class with at least 2 images", "one image of every class"))
        groups = [group.double() for group in u[labels.argsort(stable=True)].split(sizes.tolist())]
        # For each image of a class of several: squared distance to its class's mean, which is 1 - Rbar^2 on average.
        spread = torch.cat([(group - group.mean(0)).square().sum(1) for group in groups if len(group) > 1]).mean()
        pooled = sra((1 - spread).clamp(min=0).sqrt(), spread, u.shape[1])
        found = [vmf.fit(group) if len(group) > 1 else (group[0], pooled) for group in groups]
        mu, kappa = (torch.stack(part) for part in zip(*found, strict=True))
        return cls(mu, kappa, (sizes / sizes.sum()).log())

    def log_prob(self, u: Tensor) -> Tensor:
        """Log-density with respect to the surface measure.

        Args:
            u: Unit embeddings, shape (N, D).

        Returns:
            In nats, float64, shape (N,).
        """
        peak = self.log_weight + vmf.log_density_at_mode(self.kappa, self.mu.shape[1])
        parts = [
            torch.logsumexp(peak - self.kappa * (1 - rows.double() @ self.mu.T), dim=1)
            for rows in u.split(max(1, _BLOCK // len(self.mu)))
        ]
        return torch.cat(parts)


class VMFDensity(OnBase):
    """Minus the log-density of the embedding under the training classes.

    The score is meant for images of these classes; those of new ones count as out of distribution.

    Args:
        setting: That of the encoder.
    """

    name = "vmf_density"
    title = "vMF density of training classes"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._mixture: VMFMixture | None = None

    def check_data(self, data: RetrievalData) -> None:
        """See :meth:`OnBase.check_data`.

        Raises:
            UnsupportedError: The training images have positions instead of classes.
        """
        if data.train.targets.is_floating_point() or data.train.targets.ndim != 1:
            msg = "vmf_density: the training images have positions and no classes. Take 'knn_embedding' instead."
            raise UnsupportedError(msg)

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Estimate the classes."""
        plain = data.plain
        self._mixture = VMFMixture.fit(unit(self.base.outputs(plain)), plain.targets)

    def own_state(self) -> dict[str, Any]:
        """The mixture."""
        mixture = fitted(self._mixture, self.name)
        return {"mu": mixture.mu, "kappa": mixture.kappa, "log_weight": mixture.log_weight}

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`OnBase.load_own_state`."""
        self._mixture = VMFMixture(**{name: value.cpu() for name, value in state.items()})

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; minus the log-density in nats."""
        u = unit(self.base.outputs(split))
        return Prediction(u, -fitted(self._mixture, self.name).log_prob(u).float())
