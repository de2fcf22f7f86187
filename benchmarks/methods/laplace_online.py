"""Online LAM: the posterior over the last layer is learned with the encoder (paper, section 3.1, Eq. 4-5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data.split import RetrievalData, Split, loader
from benchmarks.methods.base import Method, Prediction, Setting
from benchmarks.methods.checks import check_choice, check_fit, fitted
from benchmarks.methods.sampled import (
    closed_form,
    curvature_options,
    load_posterior,
    posterior_state,
    sampled_embeddings,
)
from benchmarks.methods.training import train
from contrastive_curvature.laplace import ContrastiveDiagLLLaplace, ContrastiveLaplace
from contrastive_curvature.online import OnlineLaplace

__all__ = ["LaplaceOnline"]


class LaplaceOnline(Method):
    """Monte-Carlo EM from the first step on; the same kind of posterior and the same scores as post-hoc.

    Uncertainty and variants: see :func:`~benchmarks.methods.sampled.closed_form`.

    Args:
        setting: How encoders are made and trained.
        distance: Of the curvature; ``None`` for the library's default.
        pd_fix: Of the curvature; ``None`` for the library's default.
        train_samples: Sampled networks a training step.
        curvature: ``"discounted"``: the one that training remembers, as in the paper. ``"refitted"``: that of the
            final weights over all pairs of the training set, as post-hoc.
    """

    name = "laplace_online"
    title = "LAM (online)"

    def __init__(
        self,
        setting: Setting,
        distance: str | None = None,
        pd_fix: str | None = None,
        train_samples: int = 1,
        curvature: str = "discounted",
    ) -> None:
        super().__init__(setting)
        self._source = check_choice("curvature", curvature, ("discounted", "refitted"))
        self._training: dict[str, Any] = {"memory_factor": setting.memory_factor, "n_samples": train_samples}
        self._online = curvature_options(setting, distance, pd_fix, pairs="batch")
        self._options = self._online if curvature == "discounted" else {**self._online, "pairs": "dataset"}
        self._la: ContrastiveLaplace | None = None

    @property
    def posterior(self) -> ContrastiveLaplace:
        """The fitted laplace object.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._la, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        check_fit(seed, folder)

        def make_step(encoder: nn.Module, probe: Tensor) -> nn.Module:
            return OnlineLaplace(
                encoder, probe=probe, n_data=len(data.train), backend_kwargs=self._online, **self._training
            )

        online = train(self.setting, data, seed, folder / "training.pt", make_step=make_step)
        if self._source == "discounted":
            self._la = online.laplace()
            return
        la = ContrastiveDiagLLLaplace(online.encoder, backend_kwargs=self._options)
        plain = data.train if data.train_plain is None else data.train_plain
        la.fit(loader(plain, self.setting.eval_batch, generator=torch.Generator(), workers=self.setting.workers))
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
