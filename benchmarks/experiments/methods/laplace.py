"""LAM, post-hoc and online: a Laplace posterior over the last layer, in closed form and from sampled networks."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.nn.functional import linear
from tqdm import tqdm

from benchmarks.experiments.data.split import RetrievalData, Split, loader
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.deterministic import OnBase
from benchmarks.experiments.methods.embed import SphereSpread, image_batches, unit
from benchmarks.experiments.methods.training import train
from contrastive_curvature.embedding.known import OptimisticPValueWarning
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.online import OnlineLaplace
from contrastive_curvature.options import Distance, PDFix

_CHUNK = 2**25
"""Numbers that sampled weights, or what they give, may fill at once."""

_SAMPLED = "inverse_kappa_sampled"
CALIBRATION = 2_000
"""Known images that p-values are relative to, at most."""
_SEED = 0
"""Of the networks behind the sampled variants: equal images give equal predictions."""


def curvature_options(
    setting: Setting, distance: Distance | str | None, pd_fix: PDFix | str | None, **more: Any
) -> dict[str, Any]:
    """``backend_kwargs``: what is given, else the setting's, else the library's defaults."""
    given = {
        "distance": setting.distance if distance is None else distance,
        "pd_fix": setting.pd_fix if pd_fix is None else pd_fix,
        "negative_weight": setting.negative_weight,
        "relation": setting.relation,
        **more,
    }
    # Of the margin, None is a value: every negative counts.
    return {"margin": setting.margin} | {name: value for name, value in given.items() if value is not None}


def default_structure(options: dict[str, Any]) -> str | None:
    """``hessian_structure`` of a posterior with these ``backend_kwargs``: ``None`` for the library's default.

    With the fixes ``positive`` and ``full``, Kronecker factors leave the terms between two points out, and the diagonal
    does not.
    """
    return "diag" if options.get("pd_fix") in ("positive", "full") else None


def closed_form(la: ContrastiveLaplace, setting: Setting, split: Split, p_values: bool = False) -> Prediction:
    """The library's prediction, and beside it what sampling gives.

    Args:
        la: The fitted posterior of a last layer; calibrated, or with training inputs of its fit.
        setting: Batch size, and the number of sampled networks; with fewer than two there are no sampled variants.
        split: Images.
        p_values: Whether p-values are wanted.

    Returns:
        Mean raw outputs, ``uncertainty`` and ``novelty`` of ``EmbeddingDistribution``, without sampling; its
        ``seconds`` are for these. Variants, each one score for both questions: ``"inverse_kappa"`` (closed form), and
        of sampled networks ``"inverse_kappa_sampled"`` with the samples' mean directions (paper, Eq. 42-43) and
        ``"sum_std"``, the sum over dimensions of the standard deviations of unit embeddings (released code).
    """
    started = time.perf_counter()
    parts = []
    with torch.no_grad():
        for x in image_batches(split, setting):
            predicted = la(x)
            known = [predicted.p_value.cpu()] if p_values else []
            scores = (predicted.uncertainty, predicted.novelty, 1 / predicted.kappa)
            parts.append([predicted.raw_mean.cpu(), *(score.cpu() for score in scores), *known])
    mean, score, novelty, angular, *p_value = (torch.cat(part) for part in zip(*parts, strict=True))
    seconds = time.perf_counter() - started
    variants, means, taken = {"inverse_kappa": angular}, {}, {"inverse_kappa": seconds}
    if setting.n_samples >= 2:
        started = time.perf_counter()
        spread = SphereSpread()
        for u in sampled_embeddings(la, setting, split, setting.n_samples, _SEED):
            spread.add(u.double())
        sampled = spread.prediction()
        taken[_SAMPLED] = time.perf_counter() - started
        variants |= {_SAMPLED: sampled.uncertainty, **sampled.variants}
        means = {_SAMPLED: sampled.mean.float()}
    calibrated = p_value[0] if p_value else None
    return Prediction(mean, score, variants, means, seconds, taken, novelty, calibrated)


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
    for sample in draw_embeddings(la, features, n_samples, seed, setting.progress):
        yield sample.float().cpu()


def draw_embeddings(
    la: ContrastiveLaplace, features: Tensor, n_samples: int, seed: int, progress: bool = False
) -> Iterator[Tensor]:
    """The same from features that were computed before, on their device.

    Args:
        la: The fitted posterior of a last layer.
        features: Inputs of the last layer, shape (N, F).
        n_samples: Number S of networks; each is the same network for all images.
        seed: Of their weights.
        progress: Whether to show a progress bar.

    Yields:
        Unit embeddings, shape (N, D).
    """
    generator = torch.Generator(features.device).manual_seed(seed)
    dim, width = la.model.last_layer.weight.shape
    step = max(1, _CHUNK // max(dim * width, dim * len(features)))
    with tqdm(total=n_samples, desc="[sampled networks]", leave=False, disable=not progress) as bar:
        for start in range(0, n_samples, step):
            # Not around the yield: what comes between two samples is the caller's.
            with torch.no_grad():
                theta = la.sample(min(step, n_samples - start), generator=generator)
                weight, bias = theta[:, : dim * width].reshape(-1, width), theta[:, dim * width :].flatten()
                raw = linear(features, weight, bias).view(len(features), -1, dim)
                units = [unit(sample) for sample in raw.unbind(1)]
            for sample in units:
                yield sample
                bar.update()


class PosteriorMethod(Method):
    """What :class:`LaplacePosthoc` and :class:`LaplaceOnline` have in common once they are fitted.

    Args:
        setting: How encoders are made and trained.
        options: ``backend_kwargs`` of the posterior.
        structure: Its ``hessian_structure``; ``None`` for :func:`default_structure`.
    """

    def __init__(self, setting: Setting, options: dict[str, Any], structure: str | None = None) -> None:
        super().__init__(setting)
        self._options = options
        self._structure = default_structure(options) if structure is None else structure

    def fit_post_hoc(self, encoder: nn.Module, data: RetrievalData) -> None:
        """Fit the curvature of trained weights over all pairs of the training set, and the library's prior."""
        chosen = {} if self._structure is None else {"hessian_structure": self._structure}
        la: ContrastiveLaplace = Laplace(encoder, "contrastive", backend_kwargs=self._options, **chosen)
        batches = loader(data.plain, self.setting.eval_batch, generator=torch.Generator(), workers=self.setting.workers)
        la.fit(batches, progress_bar=self.setting.progress)
        la.optimize_prior_precision()
        self.calibrate(la, data)

    def calibrate(self, la: ContrastiveLaplace, data: RetrievalData) -> None:
        """Give the posterior known images to compare others with: those held out for it, else training images.

        Relative to training images p-values would be optimistic, so predictions have them only with images that were
        held out.
        """
        self.posterior, self._held_out = la, data.calibration is not None
        split = data.plain if data.calibration is None else data.calibration
        rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(1))[:CALIBRATION]
        batches = loader(
            split.take(rows), self.setting.eval_batch, generator=torch.Generator(), workers=self.setting.workers
        )
        with warnings.catch_warnings():
            if not self._held_out:
                warnings.simplefilter("ignore", OptimisticPValueWarning)
            la.calibrate(batches, progress_bar=None if self.setting.progress else False)

    def predict(self, split: Split) -> Prediction:
        """See :func:`closed_form`."""
        return closed_form(self.posterior, self.setting, split, self._held_out)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """See :meth:`Method.samples`; each from one network for all images."""
        return sampled_embeddings(self.posterior, self.setting, split, n_samples, seed)


class LaplacePosthoc(PosteriorMethod, OnBase):
    """The library's default posterior over all pairs of the training set, with its own prior and temperature.

    Uncertainty and variants: see :func:`~benchmarks.experiments.methods.laplace.closed_form`.

    Args:
        setting: How encoders are made and trained.
        distance: Of the curvature; ``None`` for the library's default.
        pd_fix: Of the curvature; ``None`` for the library's default.
        structure: ``hessian_structure`` of the posterior; ``None`` for the library's default, with the fixes
            ``positive`` and ``full`` for ``"diag"``.
    """

    name = "laplace_posthoc"

    def __init__(
        self,
        setting: Setting,
        distance: str | None = None,
        pd_fix: str | None = None,
        structure: str | None = None,
    ) -> None:
        super().__init__(setting, curvature_options(setting, distance, pd_fix), structure)

    def fit_on_base(self, data: RetrievalData, seed: int) -> None:
        """See :meth:`OnBase.fit_on_base`; nothing is trained, and nothing is random."""
        self.fit_post_hoc(self.base.encoder, data)


class LaplaceOnline(PosteriorMethod):
    """Monte-Carlo EM from the first step on; the same scores as post-hoc.

    Uncertainty and variants: see :func:`~benchmarks.experiments.methods.laplace.closed_form`.

    Args:
        setting: How encoders are made and trained.
        distance: Of the curvature; ``None`` for the library's default.
        pd_fix: Of the curvature; ``None`` for the library's default.
        sampling_temperature: Of the sampled weights, in units of the mean loss of a point; ``None`` for the default.
        curvature: ``"discounted"``: the one that training remembers, as in the paper. ``"refitted"``: that of the
            final weights over all pairs of the training set, as post-hoc.
        structure: ``hessian_structure`` of training and posterior; ``None`` for the library's default in training, and
            of a posterior that is refitted for that of post-hoc.
    """

    name = "laplace_online"

    def __init__(
        self,
        setting: Setting,
        distance: str | None = None,
        pd_fix: str | None = None,
        sampling_temperature: float | None = None,
        curvature: str = "discounted",
        structure: str | None = None,
    ) -> None:
        self._refit = curvature == "refitted"
        self._online = curvature_options(setting, distance, pd_fix, pairs="batch")
        default = inspect.signature(OnlineLaplace).parameters["hessian_structure"].default
        trained = default if structure is None else structure
        super().__init__(setting, {**self._online, "pairs": "dataset"}, structure if self._refit else trained)
        self._training: dict[str, Any] = {
            "hessian_structure": trained,
            "sampling_temperature": sampling_temperature,
        }

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""

        def make_step(encoder: nn.Module, probe: Tensor) -> nn.Module:
            return OnlineLaplace(
                encoder,
                probe=probe,
                n_data=len(data.train),
                memory_factor=self.setting.memory_factor,
                **self._training,
                backend_kwargs=self._online,
            )

        online = train(self.setting, data, seed, make_step=make_step)
        if self._refit:
            self.fit_post_hoc(online.encoder, data)
        else:
            self.calibrate(online.laplace(), data)
