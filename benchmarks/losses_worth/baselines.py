"""Scores that no curvature of a loss is needed for."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.transfer.baselines import neighbors
from benchmarks.transfer.fitted import Fitted, Points
from contrastive_curvature.laplace.prior import STRENGTH

__all__ = ["BASELINES", "FeatureCovariance", "baseline"]

BASELINES = {
    "norm": "minus norm",
    "knn_embedding": "10-NN, embedding",
    "features_alone": "features alone, V / n^2",
}
"""``features_alone`` is the posterior of a regression: what is left of a Kronecker-factored one where the curvature of
the loss is replaced by a constant."""


_MOST = 3000
"""Training inputs of the regression where features are more: their Gram matrix would take a minute."""


class FeatureCovariance:
    """Variance of a linear regression on the features, of the prior precision that the library takes.

    ``V(phi) = phi^T (A + lambda I)^-1 phi`` with ``A = sum_i phi_i phi_i^T`` and ``lambda`` a hundredth of its mean
    diagonal.

    Args:
        features: Of training, shape (N, F), the bias left out; the first 3,000 where F is larger.
    """

    def __init__(self, features: Tensor) -> None:
        self.wide = features.shape[1] > min(_MOST, len(features))
        self.features = features[:_MOST] if self.wide else features
        self.prior = STRENGTH * float(self.features.double().square().sum(0).mean())
        gram = self.features @ self.features.T if self.wide else self.features.T @ self.features
        gram = gram.double()
        gram.diagonal().add_(self.prior)
        self.root = torch.linalg.cholesky(gram)

    def __call__(self, features: Tensor) -> Tensor:
        """Variances of N inputs, shape (N,)."""
        if not self.wide:
            return torch.linalg.solve_triangular(self.root, features.double().T, upper=False).square().sum(0)
        # Woodbury's identity, with the Gram matrix of the points.
        seen = torch.linalg.solve_triangular(self.root, (self.features @ features.T).double(), upper=False)
        return (features.double().square().sum(1) - seen.square().sum(0)).clamp(min=0) / self.prior


def baseline(name: str, fitted: Fitted, points: Points) -> Tensor:
    """Scores of N inputs, shape (N,), larger is less certain; ``name`` is one of :data:`BASELINES`."""
    if name == "norm":
        return -points.outputs.norm(dim=1)
    if name == "knn_embedding":
        return neighbors(points.outputs, fitted.train.outputs)
    variance = fitted.once(name, lambda: FeatureCovariance(fitted.train.features))(points.features)
    return variance / points.outputs.double().square().sum(1)
