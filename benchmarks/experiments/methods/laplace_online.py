"""Online LAM: the posterior over the last layer is learned with the encoder (paper, section 3.1, Eq. 4-5)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData
from benchmarks.experiments.methods.base import Method, Setting
from benchmarks.experiments.methods.checks import check_choice, check_count, check_fit
from benchmarks.experiments.methods.sampled import PosteriorMethod, curvature_options
from benchmarks.experiments.methods.training import train
from contrastive_curvature.online import OnlineLaplace


class LaplaceOnline(PosteriorMethod):
    """Monte-Carlo EM from the first step on; the same scores as post-hoc.

    Uncertainty and variants: see :func:`~benchmarks.experiments.methods.sampled.closed_form`.

    Args:
        setting: How encoders are made and trained.
        distance: Of the curvature; ``None`` for the library's default.
        pd_fix: Of the curvature; ``None`` for the library's default.
        train_samples: Sampled networks a training step.
        sampling_temperature: Of the sampled weights, in units of the mean loss of a point; ``None`` for the default.
        curvature: ``"discounted"``: the one that training remembers, as in the paper. ``"refitted"``: that of the
            final weights over all pairs of the training set, as post-hoc.
        structure: ``hessian_structure`` of training and posterior; ``None`` for the library's default in training, and
            of a posterior that is refitted for that of post-hoc.
    """

    name = "laplace_online"
    title = "LAM (online)"

    def __init__(
        self,
        setting: Setting,
        distance: str | None = None,
        pd_fix: str | None = None,
        train_samples: int = 1,
        sampling_temperature: float | None = None,
        curvature: str = "discounted",
        structure: str | None = None,
    ) -> None:
        self._refit = check_choice("curvature", curvature, ("discounted", "refitted")) == "refitted"
        self._online = curvature_options(setting, distance, pd_fix, pairs="batch")
        default = inspect.signature(OnlineLaplace).parameters["hessian_structure"].default
        trained = default if structure is None else structure
        super().__init__(setting, {**self._online, "pairs": "dataset"}, structure if self._refit else trained)
        self._training: dict[str, Any] = {
            "hessian_structure": trained,
            "n_samples": check_count("train_samples", train_samples),
            "sampling_temperature": sampling_temperature,
        }

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        check_fit(seed, folder)

        def make_step(encoder: nn.Module, probe: Tensor) -> nn.Module:
            return OnlineLaplace(
                encoder,
                probe=probe,
                n_data=len(data.train),
                memory_factor=self.setting.memory_factor,
                **self._training,
                backend_kwargs=self._online,
            )

        online = train(self.setting, data, seed, folder / "training.pt", make_step=make_step)
        if self._refit:
            self.fit_post_hoc(online.encoder, data)
        else:
            self._la = online.laplace()
            self.calibrate(data)
