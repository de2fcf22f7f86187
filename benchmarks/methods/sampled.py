"""Methods with a posterior over the last layer: what it says of images, in closed form and from sampled networks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data.split import RetrievalData, Split, loader
from benchmarks.methods.base import Method, Prediction, Setting
from benchmarks.methods.checks import fitted
from benchmarks.methods.embed import image_batches
from benchmarks.methods.spread import SphereSpread
from contrastive_curvature.demo.posterior import sampled_embeddings as draw
from contrastive_curvature.laplace import ContrastiveDiagLLLaplace, ContrastiveLaplace
from contrastive_curvature.options import Distance, PDFix

__all__ = ["PosteriorMethod", "closed_form", "curvature_options", "read_features", "sampled_embeddings"]

_SEED = 0
"""Of the networks behind the sampled variants: equal images give equal predictions."""


def curvature_options(
    setting: Setting, distance: Distance | str | None, pd_fix: PDFix | str | None, **more: Any
) -> dict[str, Any]:
    """``backend_kwargs``: what is given, and the library's defaults for what is ``None``."""
    given = {"distance": distance, "pd_fix": pd_fix, "margin": setting.margin, "relation": setting.relation, **more}
    return {name: value for name, value in given.items() if value is not None}


def closed_form(la: ContrastiveLaplace, setting: Setting, split: Split) -> Prediction:
    """The library's prediction, and beside it what sampling gives.

    Args:
        la: The fitted posterior of a last layer.
        setting: Batch size, and the number of sampled networks; with fewer than two there are no sampled variants.
        split: Images.

    Returns:
        Mean raw outputs and ``EmbeddingDistribution.uncertainty``, without sampling; its ``seconds`` are for these.
        Variants: ``"inverse_kappa"`` (closed form), and of sampled networks ``"inverse_kappa_sampled"`` (paper, Eq.
        42-43) and ``"sum_std"``, the sum over dimensions of the standard deviations of unit embeddings (released code).
    """
    started = time.perf_counter()
    means, scores, angular = [], [], []
    with torch.no_grad():
        for x in image_batches(split, setting):
            predicted = la(x)
            means.append(predicted.mean.cpu())
            scores.append(predicted.uncertainty.cpu())
            angular.append((1 / predicted.kappa).cpu())
    seconds = time.perf_counter() - started
    variants = {"inverse_kappa": torch.cat(angular)}
    if setting.n_samples >= 2:
        spread = SphereSpread()
        for u in sampled_embeddings(la, setting, split, setting.n_samples, _SEED):
            spread.add(u.double())
        sampled = spread.prediction()
        if sampled.uncertainty is not None:
            variants |= {"inverse_kappa_sampled": sampled.uncertainty, **sampled.variants}
    return Prediction(torch.cat(means), torch.cat(scores), variants, seconds)


def read_features(la: ContrastiveLaplace, setting: Setting, split: Split) -> tuple[Tensor, Tensor]:
    """Raw outputs (N, D) of images, and what the last layer makes them from, (N, F), on the device."""
    with torch.no_grad():
        parts = [la.model.forward_with_features(x) for x in image_batches(split, setting)]
    return torch.cat([z for z, _ in parts]), torch.cat([phi for _, phi in parts])


def sampled_embeddings(
    la: ContrastiveLaplace, setting: Setting, split: Split, n_samples: int, seed: int
) -> Iterator[Tensor]:
    """Embeddings by one sampled network after the other; only the last layer is random, so the rest runs once.

    Args:
        la: The fitted posterior of a last layer.
        setting: Batch size and device.
        split: N images.
        n_samples: Number S of networks.
        seed: Of their weights.

    Yields:
        Unit embeddings (N, D), float32, on the CPU.
    """
    _, features = read_features(la, setting, split)
    for sample in draw(la, features, n_samples, seed, "[sampled networks]", setting.progress):
        yield sample.float().cpu()


class PosteriorMethod(Method):
    """What :class:`LaplacePosthoc` and :class:`LaplaceOnline` have in common once they are fitted.

    Args:
        setting: How encoders are made and trained.
        options: ``backend_kwargs`` of the posterior.
    """

    def __init__(self, setting: Setting, options: dict[str, Any]) -> None:
        super().__init__(setting)
        self._options = options
        self._la: ContrastiveLaplace | None = None

    @property
    def posterior(self) -> ContrastiveLaplace:
        """The fitted laplace object.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._la, self.name)

    def fit_post_hoc(self, encoder: nn.Module, data: RetrievalData) -> None:
        """Fit the curvature of trained weights over all pairs of the training set, and the library's prior."""
        la = ContrastiveDiagLLLaplace(encoder, backend_kwargs=self._options)
        batches = loader(data.plain, self.setting.eval_batch, generator=torch.Generator(), workers=self.setting.workers)
        la.fit(batches, progress_bar=self.setting.progress)
        la.optimize_prior_precision()
        self._la = la

    def predict(self, split: Split) -> Prediction:
        """See :func:`closed_form`."""
        return closed_form(self.posterior, self.setting, split)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """See :meth:`Method.samples`; each from one network for all images."""
        return sampled_embeddings(self.posterior, self.setting, split, n_samples, seed)

    def state_dict(self) -> dict[str, Any]:
        """Encoder and posterior."""
        return {"encoder": dict(self.posterior.model.model.state_dict()), "posterior": self.posterior.state_dict()}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`."""
        encoder = self.setting.make_encoder()
        encoder.load_state_dict(state["encoder"])
        la = ContrastiveDiagLLLaplace(encoder.eval(), backend_kwargs=self._options)
        la.load_state_dict(state["posterior"])
        self._la = la
