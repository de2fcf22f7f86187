"""A scikit-learn transformer: embeddings of an encoder, with a posterior for their uncertainty."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from laplace import Laplace
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.losses import SupConLoss
from contrastive_curvature.network.loader import check_model

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # scikit-learn 1.5

    def validate_data(estimator: Any, /, *arrays: Any, **options: Any) -> Any:
        """Check arrays with the method of older scikit-learn versions."""
        return estimator._validate_data(*arrays, **options)


class ContrastiveEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Embeddings of norm 1 as a scikit-learn transformer, with a Laplace posterior of the encoder.

    ``fit(X, y)`` trains a small network with a supervised contrastive loss, or uses a trained encoder, and fits the
    posterior; ``transform(X)`` is ``mu``, ``predict_dist(X)`` the whole distribution.

    Args:
        encoder: A trained ``torch.nn.Module`` that maps rows of ``X`` to embeddings and ends in a linear layer. It is
            copied and not trained. ``None`` trains a network with one hidden layer, in float64.
        loss: Loss of the library; ``None`` for ``SupConLoss(0.1)`` if ``fit`` trains an encoder, else for the
            posterior's default.
        dim: Embedding dimension of the trained network.
        hidden: Width of the hidden layer.
        epochs: Epochs of the training, with Adam.
        learning_rate: Learning rate of the training.
        batch_size: Number of rows in a batch.
        random_state: Seed of the weights and of the order of the rows; torch's generators do not change.

    Attributes:
        la_: The posterior, as from ``laplace.Laplace``.
        classes_: Classes of ``y``, sorted.
        n_features_in_: Columns of ``X``.
    """

    def __init__(
        self,
        encoder: nn.Module | None = None,
        loss: Any = None,
        *,
        dim: int = 8,
        hidden: int = 64,
        epochs: int = 10,
        learning_rate: float = 1e-2,
        batch_size: int = 256,
        random_state: int = 0,
    ) -> None:
        self.encoder = encoder
        self.loss = loss
        self.dim = dim
        self.hidden = hidden
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Train an encoder if there is none, fit its posterior, and choose the prior.

        Args:
            X: Numbers, shape (N, F).
            y: Classes, shape (N,).

        Returns:
            The object itself.

        Raises:
            ValueError: scikit-learn does not accept ``X`` or ``y``, no class has two rows, or an argument is out of
            range.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        for name in ("dim", "hidden", "epochs", "batch_size"):
            value = getattr(self, name)
            validate.count(name, int(value) if isinstance(value, np.integer) else value)
        validate.number("learning_rate", self.learning_rate, positive=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        loss = self.loss
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state)
            if self.encoder is None:
                loss = SupConLoss(0.1) if loss is None else loss
                encoder: nn.Module = self._trained(torch.from_numpy(X), torch.from_numpy(labels), loss)
            else:
                check_model(self.encoder, half=True)
                encoder = copy.deepcopy(self.encoder)
            options = {} if loss is None else {"loss": loss}
            rows = TensorDataset(torch.from_numpy(X).to(_dtype(encoder)), torch.from_numpy(labels))
            self.la_: Any = Laplace(encoder.eval(), "contrastive", backend_kwargs=options)
            # In a random order, because y may be sorted, and some losses compare the rows of a batch.
            order = torch.randperm(len(rows)).tolist()
            self.la_.fit(DataLoader(rows, batch_size=self.batch_size, sampler=order))
        self.la_.optimize_prior_precision()
        self._n_features_out = self.la_.n_outputs
        return self

    def _trained(self, x: torch.Tensor, labels: torch.Tensor, loss: Any) -> nn.Module:
        encoder = nn.Sequential(nn.Linear(x.shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.dim))
        encoder.double()
        optimizer = torch.optim.Adam(encoder.parameters(), lr=self.learning_rate)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x)).split(self.batch_size):
                optimizer.zero_grad()
                loss(encoder(x[rows]), labels[rows]).backward()
                optimizer.step()
        return encoder

    def calibrate(self, X: Any) -> Self:
        """Calibrate p-values with known rows that the fit has not seen; see ``la.calibrate``.

        Args:
            X: Numbers, shape (M, F).

        Returns:
            The object itself.
        """
        x = torch.from_numpy(self._rows(X)).to(_dtype(self.la_.model))
        self.la_.calibrate(x.split(self.batch_size))
        return self

    def predict_dist(self, X: Any) -> EmbeddingDistribution:
        """Return the distribution of the embeddings: ``mu``, ``uncertainty``, ``p_value`` and the rest.

        Args:
            X: Numbers, shape (M, F).
        """
        return self.la_.predict(self._rows(X), self.batch_size)

    def transform(self, X: Any) -> NDArray[Any]:
        """Return embeddings of norm 1, shape (M, D).

        Args:
            X: Numbers, shape (M, F).
        """
        return self.predict_dist(X).mu.cpu().numpy()

    def _rows(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, reset=False)

    def __sklearn_tags__(self) -> Any:
        """Return the tags for scikit-learn: this estimator needs classes."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _more_tags(self) -> dict[str, bool]:
        # The same tags for scikit-learn 1.5.
        return {"requires_y": True}


def _dtype(model: nn.Module) -> torch.dtype:
    return next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
