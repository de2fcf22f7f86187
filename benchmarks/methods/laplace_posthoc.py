"""Post-hoc LAM: a Laplace posterior over the last layer of a trained encoder (paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data.split import RetrievalData, Split, loader
from benchmarks.methods.base import Prediction, Setting
from benchmarks.methods.checks import fitted
from benchmarks.methods.on_base import OnBase
from benchmarks.methods.sampled import (
    closed_form,
    curvature_options,
    load_posterior,
    posterior_state,
    sampled_embeddings,
)
from contrastive_curvature.laplace import ContrastiveDiagLLLaplace, ContrastiveLaplace

__all__ = ["LaplacePosthoc"]


class LaplacePosthoc(OnBase):
    """The library's default: diagonal, exact over all pairs of the training set, with its own prior and temperature.

    Uncertainty and variants: see :func:`~benchmarks.methods.sampled.closed_form`.

    Args:
        setting: How encoders are made and trained.
        distance: Of the curvature; ``None`` for the library's default.
        pd_fix: Of the curvature; ``None`` for the library's default.
    """

    name = "laplace_posthoc"
    title = "LAM (post-hoc)"

    def __init__(self, setting: Setting, distance: str | None = None, pd_fix: str | None = None) -> None:
        super().__init__(setting)
        self._options = curvature_options(setting, distance, pd_fix)
        self._la: ContrastiveLaplace | None = None

    @property
    def posterior(self) -> ContrastiveLaplace:
        """The fitted laplace object.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._la, self.name)

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """See :meth:`OnBase.fit_on_base`; nothing is trained, and nothing is random."""
        la = ContrastiveDiagLLLaplace(self.base.encoder, backend_kwargs=self._options)
        plain = data.train if data.train_plain is None else data.train_plain
        batches = loader(plain, self.setting.eval_batch, generator=torch.Generator(), workers=self.setting.workers)
        la.fit(batches, progress_bar=self.setting.progress)
        la.optimize_prior_precision()
        self._la = la

    def predict(self, split: Split) -> Prediction:
        """See :meth:`Method.predict`."""
        return closed_form(self.posterior, self.setting, split)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """See :meth:`Method.samples`; each from one network for all images."""
        return sampled_embeddings(self.posterior, self.setting, split, n_samples, seed)

    def state_dict(self) -> dict[str, Any]:
        """Encoder and posterior."""
        return posterior_state(self.posterior)

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`."""
        self._la = load_posterior(self.setting, state, self._options)

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """Nothing: the posterior holds the encoder."""
