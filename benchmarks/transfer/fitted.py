"""What the rows are computed from: an encoder's last layer with its posteriors, and the inputs that are scored."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.transfer.feature_file import FeatureFile
from contrastive_curvature import EmbeddingDistribution, FeatureNormWarning
from contrastive_curvature.errors import ContrastiveCurvatureError

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
_COVARIANCES = 2**20
"""Entries of the covariances in memory at once: many more would leave the processor's caches."""


class Points:
    """Inputs to score.

    Args:
        features: Shape (N, F).
        outputs: Raw outputs, shape (N, D).
        rows: Row number of each in the test, or of the test input that it was made from, shape (N,); ``None`` for
            inputs that are not in the test.

    Attributes:
        answers: Scores of each posterior, filled by :meth:`Fitted.answers`.
    """

    def __init__(self, features: Tensor, outputs: Tensor, rows: Tensor | None = None) -> None:
        self.features, self.outputs, self.rows = features, outputs, rows
        self.answers: dict[str, dict[str, Tensor]] = {}


class Fitted:
    """An encoder's last layer and training inputs; posteriors and baselines are fitted when a row first needs them.

    Attributes:
        gallery_labels: Classes of the test inputs, which are the gallery, shape (M,).
        warned: Structure -> what its fit warned of: that its score is little more than the norm of the features.
    """

    def __init__(self, content: FeatureFile) -> None:
        self.weight, self.bias = torch.from_numpy(content.weight), torch.from_numpy(content.bias)
        self.labels, self.gallery_labels = torch.from_numpy(content.train_labels), torch.from_numpy(content.test_labels)
        self.train = self.points(content.train_features)
        self.test = self.points(content.test_features, torch.arange(len(content.test_features)))
        self.warned: dict[str, str] = {}
        self._once: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What a row fits at its first call and keeps for the next, be it an error."""
        if name not in self._once:
            try:
                self._once[name] = make()
            except ContrastiveCurvatureError as error:
                # Several scores ask for a posterior, and a fit may fail after minutes.
                self._once[name] = error
        if isinstance(self._once[name], ContrastiveCurvatureError):
            raise self._once[name]
        return self._once[name]

    def points(self, features: Any, rows: Tensor | None = None) -> Points:
        """Inputs with their raw outputs."""
        features = torch.as_tensor(features)
        return Points(features, torch.addmm(self.bias, features, self.weight.T), rows)

    def posterior(self, structure: str) -> Any:
        """The posterior of one of :data:`STRUCTURES`, or :data:`DEFAULT`, with the defaults of the README."""
        structure = default_structure() if structure == DEFAULT else structure
        return self.once(structure, lambda: self._fit(structure))

    def _fit(self, structure: str) -> Any:
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0])
        layer.load_state_dict({"weight": self.weight, "bias": self.bias})
        la: Any = Laplace(layer, likelihood="contrastive", hessian_structure=structure)
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
        """All scores of :data:`READ`, from one prediction, float64, shape (N,) each."""
        structure = default_structure() if structure == DEFAULT else structure
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
