"""The triplet loss, and the Bayesian one: a mean and a variance for every image.

Sources: Warburg et al. (2021), "Bayesian Triplet Loss", poster and supplement; see docs/other_methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.deterministic import Deterministic, EncoderMethod
from benchmarks.experiments.methods.training import train
from contrastive_curvature import metrics, vmf
from contrastive_curvature.hedged.match import inverse_softplus
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.metrics.neighbors import Metric
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.pairs.relation import make_target_relation
from contrastive_curvature.triplet import kl_to_normal, kl_to_uniform, log_probability

MARGIN = 0.5
"""That unit means of triplets violate, on differences of squared distances."""
NEGATIVES = 8
"""Of those that violate the margin, so many are drawn for each ordered positive pair of a batch at most."""
TEMPERATURES = tuple(2.0**-k for k in range(-2, 11))
"""Factors on the variances of samples that are tried: 4 to 1/1024."""

_FLOOR = 1e-6
"""Smallest variance, so that divergences stay finite."""
_SMALLEST = 1e-30
"""Squared norm of a mean whose variance is compared with it."""
_CALIBRATION = 2000
"""Training images that the temperature is calibrated with, at most."""
_DRAWS = 20
"""Samples of each of them."""


@dataclass(frozen=True)
class Form:
    """What the outputs of a Bayesian triplet encoder mean, and the loss on them.

    Args:
        on_sphere: Whether means are divided by their norm, and images are retrieved by the cosine; else by the
            Euclidean distance of the means.
        mining_margin: That the means of triplets violate.
        kl_weight: Of the divergences to the prior: N(0, I), or the uniform one on the sphere.
        first_variance: Where a raw output is 0; images unlike those of the training set have outputs closer to 0 than
            others.
        gain: On the raw output of a variance. The optimiser's steps do not depend on the scale of a gradient; so
            variances are learned that much more slowly than means.
    """

    on_sphere: bool
    mining_margin: float
    kl_weight: float
    first_variance: float
    gain: float


FORMS = {"gaussian": Form(False, 1.0, 1e-3, 1.0, 1.0), "vmf": Form(True, MARGIN, 1e-6, 0.1, 0.1)}
"""Distribution -> form. ``"vmf"``: von Mises-Fisher with concentrations ``1 / variance``."""


def squared_distances(z: Tensor) -> Tensor:
    """Squared Euclidean distances between all points of a batch (B, D), shape (B, B).

    From differences, not from inner products, which cancel for close points.
    """
    return (z.unsqueeze(1) - z).square().sum(2)


def mine_triplets(
    z: Tensor, targets: Tensor, margin: float, negatives: int | None, relation: RelationFunction | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Triplets of a batch: every ordered positive pair, with some of the negatives of its anchor.

    Args:
        z: Points, shape (B, D); no gradient flows through the choice.
        targets: Class labels, shape (B,), or what ``relation`` takes, shape (B, ...).
        margin: Only negatives that violate it, ``|a - n|^2 < |a - p|^2 + margin``, count.
        negatives: Negatives that are drawn at random for each pair, at most; ``None`` for all.
        relation: ``None`` for class labels, or a callable on targets that returns two boolean masks.

    Returns:
        Indices of anchors, positives and negatives, each int64 of shape (T,). Random numbers come from torch's global
        generator of the CPU.
    """
    with torch.no_grad():
        positive, negative = make_target_relation(targets, len(z), z.device, relation).rows(0, len(z))
        anchors, positives = positive.nonzero().unbind(1)
        distances = squared_distances(z)
        counts = negative[anchors].bool()
        counts &= distances[anchors] < distances[anchors, positives].unsqueeze(1) + margin
        if negatives is not None and negatives < counts.shape[1]:
            # The largest of independent uniform numbers are a random subset; those of other points are below them all.
            keys = torch.rand(counts.shape).to(z.device).masked_fill(~counts, -1)
            counts &= torch.zeros_like(counts).scatter_(1, keys.topk(negatives, dim=1).indices, True)
        pairs, thirds = counts.nonzero().unbind(1)
    return anchors[pairs], positives[pairs], thirds


def gaussians(raw: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Means (N, D) and variances (N, 1) from raw outputs (N, D + 1).

    Variances are ``softplus(gain raw + shift) + 1e-6``: close to ``exp`` while they are small, and linear, so that one
    step does not blow them up, where they are large. The shift gives the first variance at ``raw = 0``.
    """
    mean, spread = raw[:, :-1], raw[:, -1:]
    if form.on_sphere:
        mean = normalize(check_outputs(mean, "means"))[0]
    return mean, softplus(form.gain * spread + inverse_softplus(form.first_variance)) + _FLOOR


class TripletStep(nn.Module):
    """The mean of ``|a - p|^2 - |a - n|^2 + margin`` over the triplets of a batch where it is above 0.

    Args:
        encoder: Images -> raw outputs (N, D), which are put on the unit sphere.
        relation: On positions, which images show the same place; ``None`` for class labels.
        negatives: See :func:`mine_triplets`.
    """

    def __init__(
        self, encoder: nn.Module, relation: RelationFunction | None = None, negatives: int | None = NEGATIVES
    ) -> None:
        super().__init__()
        self.encoder, self.relation, self.negatives = encoder, relation, negatives

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar; zero, with a zero gradient, for a batch without such triplets."""
        z: Tensor = self.encoder(x)
        u = normalize(check_outputs(z))[0]
        a, p, n = mine_triplets(u, targets, MARGIN, self.negatives, self.relation)
        if not len(a):
            return z.sum() * 0
        near, far = (u[a] - u[p]).square().sum(1), (u[a] - u[n]).square().sum(1)
        return (near - far + MARGIN).mean()


class BayesianStep(nn.Module):
    """The Bayesian triplet loss, averaged over triplets of a batch.

    It is the mean of :func:`contrastive_curvature.triplet.bayesian_triplet_loss` with the moments of Gaussians, in less
    time: divergences are computed once an image.

    Args:
        encoder: Images -> raw outputs (N, D + 1).
        form: See there.
        relation: On positions, which images show the same place; ``None`` for class labels.
        negatives: See :func:`mine_triplets`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        form: Form,
        relation: RelationFunction | None = None,
        negatives: int | None = NEGATIVES,
    ) -> None:
        super().__init__()
        self.encoder, self.form, self.relation, self.negatives = encoder, form, relation, negatives

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats, a scalar; zero, with a zero gradient, for a batch without triplets."""
        form, z = self.form, self.encoder(x)
        mean, variance = gaussians(z, form)
        triplet = mine_triplets(mean, targets, form.mining_margin, self.negatives, self.relation)
        if not len(triplet[0]):
            return torch.as_tensor(z.sum() * 0)
        a, p, n = ((mean[i], variance[i]) for i in triplet)
        each = kl_to_uniform(1 / variance.squeeze(1), mean.shape[1]) if form.on_sphere else kl_to_normal(mean, variance)
        share = torch.bincount(torch.cat(triplet), minlength=len(each)) / len(triplet[0])
        return form.kl_weight * (share.to(each.dtype) * each).sum() - log_probability(a, p, n, 0.0).mean()


class TripletDeterministic(Deterministic):
    """Unit embeddings, trained with the triplet loss; what the Bayesian one is compared with."""

    name = "triplet"

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        relation = self.setting.relation
        step = train(self.setting, data, seed, make_step=lambda encoder, _: TripletStep(encoder, relation))
        self.encoder = step.get_submodule("encoder")


class BayesianTriplet(EncoderMethod):
    """An encoder that gives a mean and a variance for every image.

    Args:
        setting: How the encoder is made and trained; its margin is that of pairs, and not used.
        distribution: ``"gaussian"``, or ``"vmf"``: unit means.
    """

    name = "bayesian_triplet"

    def __init__(self, setting: Setting, distribution: Literal["gaussian", "vmf"] = "gaussian") -> None:
        super().__init__(setting)
        self.form = FORMS[distribution]
        self.metric: Metric = "cosine" if self.form.on_sphere else "euclidean"

    def fit(self, data: RetrievalData, seed: int, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``."""
        step = train(
            self.setting,
            data,
            seed,
            make_step=lambda encoder, _: BayesianStep(encoder, self.form, self.setting.relation),
            outputs=self.setting.dim + 1,
        )
        self.encoder = step.get_submodule("encoder")
        # Factor on the variances of samples.
        self.temperature = self._calibrated(data.plain, seed)

    def _calibrated(self, images: Split, seed: int) -> float:
        """The temperature whose votes are best on some training images; 1 for positions, which have no votes."""
        if self.setting.relation is not None:
            return 1.0
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        known = images.take(order[:_CALIBRATION])
        mean, variance = self.distributions(known)

        def draw(temperature: float) -> Iterator[Tensor]:
            return self._draw(mean, variance, temperature, _DRAWS, seed)

        return calibrated_temperature(draw, known.targets, self.metric)

    def distributions(self, split: Split) -> tuple[Tensor, Tensor]:
        """Means (N, D) and variances (N, 1) of images, on the CPU."""
        return gaussians(self.outputs(split), self.form)

    def predict(self, split: Split) -> Prediction:
        """Means; the variance, summed over dimensions, as a share of the mean's squared norm.

        On the sphere that is the variance itself, the documents' score. Off it, where means are twice as long, so are
        the distances that the scatter stands beside.

        Returns:
            Variants, off the sphere: ``"variance"``, the variance as it is, and ``"norm"``, minus the norm of the mean.
        """
        mean, variance = self.distributions(split)
        total, squares = variance.expand_as(mean).sum(1), mean.square().sum(1)
        if self.form.on_sphere:
            return Prediction(mean, total, metric=self.metric)
        variants = {"variance": total, "norm": -squares.sqrt()}
        return Prediction(mean, total / squares.clamp(min=_SMALLEST), variants, metric=self.metric)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Draws from each image's own distribution, with its variance times the temperature."""
        return self._draw(*self.distributions(split), self.temperature, n_samples, seed)

    def _draw(self, mean: Tensor, variance: Tensor, temperature: float, n_samples: int, seed: int) -> Iterator[Tensor]:
        variance = temperature * variance
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            if self.form.on_sphere:
                yield vmf.sample(mean, 1 / variance.squeeze(1), 1, generator)[0]
            else:
                yield mean + variance.sqrt() * torch.randn(mean.shape, generator=generator)


def calibrated_temperature(draw: Callable[[float], Iterable[Tensor]], labels: Tensor, metric: Metric) -> float:
    """The temperature whose votes have the smallest Brier score, the largest of equal ones.

    That is a proper score. The calibration error is not: it is small, too, where so much noise is added that all votes
    are chance.

    Args:
        draw: From a temperature, samples of the embeddings of N images, each (N, D).
        labels: Of the images, shape (N,).
        metric: How samples are compared.
    """
    scores = {
        temperature: metrics.retrieval_brier(draw(temperature), labels, metric=metric) for temperature in TEMPERATURES
    }
    return min(scores, key=lambda temperature: (scores[temperature], -temperature))
