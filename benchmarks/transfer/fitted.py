"""What the rows are computed from: an encoder's last layer with its posteriors, and the inputs that are scored."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.transfer.feature_file import FeatureFile
from contrastive_curvature import EmbeddingDistribution, FeatureNormWarning
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError

T = TypeVar("T")

STRUCTURES = ("diag", "kron_lowrank")
"""Structures of the posterior that are compared. ``kron`` is the same as ``kron_lowrank`` at full rank, which this has
up to 2,048 features, and takes minutes with many more."""

DEFAULT = "default"
"""Stands for the structure that ``Laplace`` takes when nobody asks for one."""

READ: dict[str, Callable[[EmbeddingDistribution, Tensor], Tensor]] = {
    "uncertainty": lambda e, _: e.uncertainty,
    "without_classes": lambda e, spread: spread / e.raw_mean.norm(dim=1),
    "lost_length": lambda e, spread: spread * e.raw_mean.norm(dim=1) / 2,
    "novelty": lambda e, _: e.novelty,
    "angle": lambda _, spread: spread,
    "variance": lambda e, spread: spread * e.raw_mean.square().sum(1),
}
"""Scores of a posterior, each (B,) from the prediction for B inputs and its tangential variance."""

_BATCH = 1024
_KNOWN = 2000
_COVARIANCES = 2**20
"""Entries of the covariances in memory at once: many more would leave the processor's caches."""


class Points:
    """Inputs to score.

    Args:
        name: Name of the array that they come from, for messages.
        features: Shape (N, F).
        outputs: Raw outputs, shape (N, D).
        rows: Row number of each in the test, or of the test input that it was made from, shape (N,); ``None`` for
            inputs that are not in the test.

    Attributes:
        answers: Scores of each posterior, filled by :meth:`Fitted.answers`.

    Raises:
        InputError: A raw output is zero, which has no direction.
    """

    def __init__(self, name: str, features: Tensor, outputs: Tensor, rows: Tensor | None = None) -> None:
        if zeros := int((outputs == 0).all(1).sum()):
            hint = "A zero raw output has no direction."
            raise InputError(name, "features whose raw outputs are not zero", f"{zeros} that are", hint)
        self.name, self.features, self.outputs, self.rows = name, features, outputs, rows
        self.answers: dict[str, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.features)


class Fitted:
    """An encoder's last layer and training inputs; posteriors and baselines are fitted when a row first needs them.

    Args:
        content: Of the feature file.

    Attributes:
        gallery_labels: Classes of the test inputs, which are the gallery, shape (M,).
        warned: Structure -> what its fit warned of: that its score is little more than the norm of the features.

    Raises:
        InputError: No training class has two inputs, or there is one class only: pairs of both kinds are needed.
    """

    def __init__(self, content: FeatureFile) -> None:
        self.weight, self.bias = torch.from_numpy(content.weight), torch.from_numpy(content.bias)
        self.labels = torch.from_numpy(content.train_labels)
        sizes = self.labels.unique(return_counts=True)[1]
        if len(sizes) < 2 or int(sizes.max()) < 2:
            came = f"{len(sizes)} classes, {int(sizes.max())} inputs in the largest"
            hint = "The posterior needs pairs of one class and pairs of two."
            raise InputError("train_labels", "at least 2 classes and one of at least 2 inputs", came, hint)
        self.train = self.points("train_features", torch.from_numpy(content.train_features))
        rows = torch.arange(len(content.test_features))
        self.test = self.points("test_features", torch.from_numpy(content.test_features), rows)
        self.gallery_labels = torch.from_numpy(content.test_labels)
        found = content.calibration_features
        self.calibration = None if found is None else self.points("calibration_features", torch.from_numpy(found))
        self.warned: dict[str, str] = {}
        self._posteriors: dict[str, Any] = {}
        self._once: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What a row fits at its first call and keeps for the next."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    @cached_property
    def known(self) -> Points:
        """Inputs that say which scores are usual: those for calibration, else a sample of the training inputs."""
        return self.training_sample if self.calibration is None else self.calibration

    @cached_property
    def training_sample(self) -> Points:
        """Some of the training inputs, drawn with a fixed seed."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        return self.points("train_features", self.train.features[order[:_KNOWN]])

    def points(self, name: str, features: Tensor, rows: Tensor | None = None) -> Points:
        """Inputs with their raw outputs."""
        return Points(name, features, torch.addmm(self.bias, features, self.weight.T), rows)

    @cached_property
    def encoder(self) -> nn.Linear:
        """The last layer, which is the whole encoder where inputs are features."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            layer.bias.copy_(self.bias)
        return layer

    def posterior(self, structure: str) -> Any:
        """The posterior of one structure, with the defaults of the README.

        Args:
            structure: One of :data:`STRUCTURES`, or :data:`DEFAULT`.

        Raises:
            ContrastiveCurvatureError: The library refuses the structure.
        """
        if structure == DEFAULT:
            structure = default_structure()
        if structure not in self._posteriors:
            try:
                self._posteriors[structure] = self._fit(structure)
            except ContrastiveCurvatureError as error:
                # Three scores ask for it, and a fit may fail after minutes.
                self._posteriors[structure] = error
        found = self._posteriors[structure]
        if isinstance(found, ContrastiveCurvatureError):
            raise found
        return found

    def _fit(self, structure: str) -> Any:
        la: Any = Laplace(self.encoder, likelihood="contrastive", hessian_structure=structure)
        loader = DataLoader(TensorDataset(self.train.features, self.labels), batch_size=_BATCH)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FeatureNormWarning)
            la.fit(loader, progress_bar=False)
        for warning in caught:
            if issubclass(warning.category, FeatureNormWarning):
                self.warned[structure] = str(warning.message)
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        la.optimize_prior_precision()
        return la

    def answers(self, structure: str, points: Points) -> dict[str, Tensor]:
        """All scores of :data:`READ`, from one prediction, float64, shape (N,) each.

        Args:
            structure: One of :data:`STRUCTURES`, or :data:`DEFAULT`.
            points: N inputs.
        """
        if structure == DEFAULT:
            structure = default_structure()
        if structure not in points.answers:
            la = self.posterior(structure)
            size = min(_BATCH, max(1, _COVARIANCES // len(self.bias) ** 2))
            parts: dict[str, list[Tensor]] = {name: [] for name in READ}
            for block in points.features.split(size):
                predicted = la(block)
                spread = predicted.tangential_variance
                for name, read in READ.items():
                    parts[name].append(read(predicted, spread).detach().double())
            points.answers[structure] = {name: torch.cat(part) for name, part in parts.items()}
        return points.answers[structure]


def default_structure() -> str:
    """The structure that ``Laplace(encoder, likelihood="contrastive")`` takes."""
    la: Any = Laplace(nn.Linear(2, 2), likelihood="contrastive")
    return str(la.hessian_structure)
