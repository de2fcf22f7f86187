"""The triplet loss, and the Bayesian one: a mean and a variance for every image.

Sources: Warburg et al. (2021), "Bayesian Triplet Loss", poster and supplement; see docs/other_methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.training import Fitted, Prediction, Setting, encode, train, unit
from contrastive_curvature import metrics, vmf
from contrastive_curvature.hedged.matching import inverse_softplus
from contrastive_curvature.hessian.sphere import check_outputs, normalize
from contrastive_curvature.metrics.neighbors import Metric
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


def mine_triplets(z: Tensor, targets: Tensor, margin: float, negatives: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Triplets of a batch: every ordered positive pair, with some of the negatives of its anchor.

    Args:
        z: Points, shape (B, D); no gradient flows through the choice.
        targets: Class labels, shape (B,).
        margin: Only negatives that violate it, ``|a - n|^2 < |a - p|^2 + margin``, count.
        negatives: Negatives that are drawn at random for each pair, at most; ``None`` for all.

    Returns:
        Indices of anchors, positives and negatives, each int64 of shape (T,). Random numbers come from torch's global
        generator of the CPU.
    """
    with torch.no_grad():
        positive, negative = make_target_relation(targets, len(z), z.device, None).rows(0, len(z))
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
        negatives: See :func:`mine_triplets`.
    """

    def __init__(self, encoder: nn.Module, negatives: int | None = NEGATIVES) -> None:
        super().__init__()
        self.encoder, self.negatives = encoder, negatives

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar; zero, with a zero gradient, for a batch without such triplets."""
        z: Tensor = self.encoder(x)
        u = normalize(check_outputs(z))[0]
        a, p, n = mine_triplets(u, targets, MARGIN, self.negatives)
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
        negatives: See :func:`mine_triplets`.
    """

    def __init__(self, encoder: nn.Module, form: Form, negatives: int | None = NEGATIVES) -> None:
        super().__init__()
        self.encoder, self.form, self.negatives = encoder, form, negatives

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats, a scalar; zero, with a zero gradient, for a batch without triplets."""
        form, z = self.form, self.encoder(x)
        mean, variance = gaussians(z, form)
        triplet = mine_triplets(mean, targets, form.mining_margin, self.negatives)
        if not len(triplet[0]):
            return torch.as_tensor(z.sum() * 0)
        a, p, n = ((mean[i], variance[i]) for i in triplet)
        each = kl_to_uniform(1 / variance.squeeze(1), mean.shape[1]) if form.on_sphere else kl_to_normal(mean, variance)
        share = torch.bincount(torch.cat(triplet), minlength=len(each)) / len(triplet[0])
        return form.kl_weight * (share.to(each.dtype) * each).sum() - log_probability(a, p, n, 0.0).mean()


def triplet(setting: Setting, data: RetrievalData, seed: int, encoders: list[nn.Module]) -> Fitted:
    """Train unit embeddings with the triplet loss; what the Bayesian one is compared with."""
    encoder = train(setting, data, seed, lambda encoder, _: TripletStep(encoder)).encoder
    return Fitted(lambda split: Prediction(unit(encode(setting, encoder, split))))


def bayesian_triplet(
    setting: Setting, data: RetrievalData, seed: int, encoders: list[nn.Module], distribution: str = "gaussian"
) -> Fitted:
    """Train an encoder that gives a mean and a variance for every image; with ``"vmf"`` means are unit vectors.

    The score is the variance, summed over dimensions, as a share of the mean's squared norm. On the sphere that is the
    variance itself, the documents' score. Off it, where means are twice as long, so are the distances that the scatter
    stands beside. Variants, off the sphere: ``"variance"``, the variance as it is, and ``"norm"``, minus the norm of
    the mean.
    """
    form = FORMS[distribution]
    metric: Metric = "cosine" if form.on_sphere else "euclidean"
    encoder = train(
        setting, data, seed, lambda encoder, _: BayesianStep(encoder, form), outputs=setting.dim + 1
    ).encoder

    def distributions(split: Split) -> tuple[Tensor, Tensor]:
        """Means (N, D) and variances (N, 1) of images, on the CPU."""
        return gaussians(encode(setting, encoder, split), form)

    def draw(mean: Tensor, variance: Tensor, temperature: float, n_samples: int, seed: int) -> Iterator[Tensor]:
        variance = temperature * variance
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            if form.on_sphere:
                yield vmf.sample(mean, 1 / variance.squeeze(1), 1, generator)[0]
            else:
                yield mean + variance.sqrt() * torch.randn(mean.shape, generator=generator)

    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    known = data.train.take(order[:_CALIBRATION])
    of_known = distributions(known)
    temperature = calibrated_temperature(lambda t: draw(*of_known, t, _DRAWS, seed), known.targets, metric)

    def predict(split: Split) -> Prediction:
        mean, variance = distributions(split)
        total, squares = variance.expand_as(mean).sum(1), mean.square().sum(1)
        if form.on_sphere:
            return Prediction(mean, total, metric=metric)
        variants = {"variance": total, "norm": -squares.sqrt()}
        return Prediction(mean, total / squares.clamp(min=_SMALLEST), variants, metric=metric)

    return Fitted(predict, lambda split, n_samples, seed: draw(*distributions(split), temperature, n_samples, seed))


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
