"""LAM on an encoder whose points lie in a plane or a space, not on a sphere: each point is lifted onto a large one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import check_count, check_fit, check_positive, fitted
from benchmarks.experiments.methods.hedged import HedgedPoint
from benchmarks.experiments.methods.sampled import PosteriorMethod, curvature_options, draw_embeddings, read_features
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["LaplaceLifted", "lift", "lower"]


def lift(encoder: nn.Sequential, height: float) -> nn.Sequential:
    """Give an encoder one output more, the same for all images: ``z`` becomes ``(z, height)``.

    The directions of the lifted points lie near a pole of the unit sphere. Where ``height`` is several times the
    length of the points, the distance of two directions is that of the points divided by ``height``, to first order.

    Args:
        encoder: Its last part is a linear layer; it is not changed.
        height: The further output, > 0.

    Returns:
        A new encoder, whose last layer has a further row: weights 0, bias ``height``.

    Raises:
        InputTypeError: The last part is no linear layer.
        InputError: ``height`` is not a positive number.
    """
    check_positive("height", height)
    name, last = list(encoder.named_children())[-1]
    if not isinstance(last, nn.Linear):
        raise InputTypeError(expected("encoder", "one that ends in nn.Linear", f"{type(last).__name__} at its end"))
    like = last.weight
    head = nn.Linear(last.in_features, last.out_features + 1, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        head.weight.zero_()[:-1] = last.weight
        head.bias.fill_(height)
        if last.bias is None:
            head.bias[:-1] = 0
        else:
            head.bias[:-1] = last.bias
    parts = [*list(copy.deepcopy(encoder).named_children())[:-1], (name, head)]
    lifted = nn.Sequential(OrderedDict(parts))
    return lifted.train(encoder.training)


def lower(lifted: Tensor, height: float) -> Tensor:
    """The points whose lifted ones have these directions: the inverse of :func:`lift` followed by normalisation.

    Args:
        lifted: Shape (..., D + 1), of any length, the last entry positive.
        height: As in :func:`lift`.

    Returns:
        Shape (..., D): the ray through the lifted point meets the plane at this height.

    Raises:
        InputError: A ray does not meet it.
    """
    if bool((lifted[..., -1] <= 0).any()):
        hint = "The posterior is so wide that a sampled point left the half sphere; take more training images."
        raise InputError(expected("lifted", "points above the equator", "one below", hint))
    return height * lifted[..., :-1] / lifted[..., -1:]


class LaplaceLifted(PosteriorMethod):
    """Post-hoc LAM on the encoder of :class:`~benchmarks.experiments.methods.hedged.HedgedPoint`.

    Its margin is the distance at which a match is as likely as not, on the sphere's scale.

    Args:
        setting: That of the encoder.
        factor: Height, as a multiple of the largest length of a training point.
        images: Training images that the curvature is fitted on, at most: the pairs inside a margin have to be found
            among all pairs.

    Raises:
        InputError: An option is out of range.
    """

    name = "laplace_lifted"
    title = "LAM (post-hoc) on the point embedding"
    needs_base = True

    def __init__(self, setting: Setting, factor: float = 4.0, images: int = 20_000) -> None:
        super().__init__(setting, curvature_options(setting, None, None))
        self.factor, self.images = check_positive("factor", factor), check_count("images", images, 2)
        self._base: HedgedPoint | None = None
        self.height = 0.0

    @property
    def base(self) -> HedgedPoint:
        """The point embedding.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._base, self.name)

    @property
    def match(self) -> tuple[float, float]:
        """The slope and the intercept of the point embedding's match probability."""
        return self.base.match

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; nothing is trained.

        Raises:
            InputTypeError: ``base`` is no point embedding.
            InputError: It is not fitted, has another network than the setting's, or no distance at which a match is as
                likely as not.
        """
        check_fit(seed, folder)
        if not isinstance(base, HedgedPoint):
            hint = "Fit one with the same seed first."
            raise InputTypeError(expected("base", "a fitted HedgedPoint", f"a {type(base).__name__}", hint))
        wanted, came = ((s.network, s.dim) for s in (self.setting, base.setting))
        if wanted != came:
            raise InputError(expected("base", f"network and dimension {wanted}", f"{came}"))
        rows = torch.randperm(len(data.plain), generator=torch.Generator().manual_seed(seed))[: self.images]
        train = data.plain.take(rows)
        self._take(base, self.factor * float(base.raw(train).norm(dim=1).max()))
        self.fit_post_hoc(self._lifted(), RetrievalData(data.name, data.title, "none", train, data.test))

    def points(self, split: Split, n_samples: int, seed: int) -> Tensor:
        """Points by sampled networks.

        Args:
            split: N images.
            n_samples: Number S of networks, each the same for all images.
            seed: Of their weights.

        Returns:
            float32, shape (N, S, D), on the CPU.
        """
        check_count("n_samples", n_samples)
        _, features = read_features(self.posterior, self.setting, split)
        drawn = [lower(u, self.height) for u in draw_embeddings(self.posterior, features, n_samples, seed)]
        return torch.stack(drawn, 1).float().cpu()

    def match_probability(self, first: Split, second: Split, n_samples: int = 100, seed: int = 0) -> Tensor:
        """How likely pairs of images show the same class, averaged over sampled networks.

        Args:
            first: N images.
            second: N images.
            n_samples: Number of networks, each the same for both images of a pair.
            seed: Of their weights.

        Returns:
            Probabilities (N,).

        Raises:
            InputError: The numbers of images differ.
        """
        if len(first) != len(second):
            raise InputError(expected("second", f"{len(first)} images, as many as first", len(second)))
        a, b = self.match
        left, right = (self.points(split, n_samples, seed) for split in (first, second))
        return torch.sigmoid(b - a * (left - right).norm(dim=2)).mean(1)

    def predict(self, split: Split) -> Prediction:
        """The point embedding; the posterior's uncertainty and novelty of lifted points."""
        found = super().predict(split)
        return Prediction(
            self.base.raw(split),
            found.uncertainty,
            {"inverse_kappa": found.variants["inverse_kappa"]},
            novelty=found.novelty,
            metric="euclidean",
        )

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Points by one sampled network after the other."""
        return iter(self.points(split, n_samples, seed).unbind(1))

    def state_dict(self) -> dict[str, Any]:
        """The point embedding, and the posterior with its calibration."""
        return {
            "base": self.base.state_dict(),
            "loss": self.base.loss,
            "margin": self.base.margin,
            "height": self.height,
            "posterior": self.posterior.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`."""
        base = HedgedPoint(
            self.setting, loss=state["loss"], margin=state["margin"] if state["loss"] == "hard" else None
        )
        base.load_state_dict(state["base"], data)
        self._take(base, state["height"])
        la = self.make_posterior(self._lifted())
        la.load_state_dict(state["posterior"])
        self._la = la

    def _take(self, base: HedgedPoint, height: float) -> None:
        if base.threshold <= 0:
            hint = "Its intercept b is not positive: train it for longer."
            raise InputError(expected("base", "a threshold b / a > 0 of its matches", base.threshold, hint))
        self._base, self.height = base, height
        # Two directions are at most 2 apart.
        self._options = self._options | {"margin": min(base.threshold / height, 2.0)}

    def _lifted(self) -> nn.Module:
        encoder = self.base.encoder
        if not isinstance(encoder, nn.Sequential):
            raise InputTypeError(expected("encoder", "an nn.Sequential", f"a {type(encoder).__name__}"))
        return lift(encoder, self.height).eval()
