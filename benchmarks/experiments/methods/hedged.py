"""Hedged instance embeddings (Oh et al., "Modeling uncertainty with hedged instance embedding")."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import Sampler

from benchmarks.experiments.data import RetrievalData, Split, loader
from benchmarks.experiments.training import Fitted, Prediction, Setting, encode, train
from contrastive_curvature.hedged import (
    MatchParameters,
    kl_bound,
    match_loss,
    match_probability,
    stratified_samples,
)
from contrastive_curvature.hedged.matching import inverse_softplus

_FLOOR = 1e-6
"""Smallest variance, so that divergences stay finite."""
_MISMATCHES = 1_000
"""Of a batch whose pairs all count: those of 128 images are 8,128, with 64 pairs of samples each."""
_SLOPE, _INTERCEPT, _MATCH_RATE = 2.0, 3.0, 10.0
"""First a and b of the match probability, and their learning rate as a multiple of the network's."""
_FIRST_VARIANCE, _KL_WEIGHT, _SAMPLES = 0.1, 1e-4, 8
_SEED = 0
"""Of the samples behind the self-mismatch."""


def mixture(raw: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Means and variances from the outputs of the shared network.

    Args:
        raw: Shape (N, 2 C D): C means, then C variances before ``softplus``.
        components: C.

    Returns:
        Mean and variance, both (N, C, D). Variances are ``softplus(raw + shift) + 1e-6``, and the shift is such that
        ``raw = 0`` gives the first variance.
    """
    mean, spread = raw.unflatten(1, (2, components, -1)).unbind(1)
    return mean, softplus(spread + inverse_softplus(_FIRST_VARIANCE)) + _FLOOR


def choose_pairs(targets: Tensor, most: int = _MISMATCHES) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a batch that match, and of those that do not ``most``, drawn from torch's global generator.

    Args:
        targets: Class labels, int64 (B,).
        most: That number.

    Returns:
        Rows of the first and of the second image, each int64 (P,), and weights (P,). The weights of the matches have
        the sum 1/2, and those of the mismatches, where a batch has both.
    """
    i, j = torch.triu_indices(len(targets), len(targets), 1, device=targets.device).unbind(0)
    same = targets[i] == targets[j]
    others = torch.nonzero(~same).squeeze(1)
    kept = others[torch.randperm(len(others))[:most].to(targets.device)]
    chosen = torch.cat([torch.nonzero(same).squeeze(1), kept])
    i, j = i[chosen], j[chosen]
    matches = targets[i] == targets[j]
    counts = torch.stack([matches.sum(), (~matches).sum()])
    each = 1 / (counts.clamp(min=1) * (counts > 0).sum())
    return i, j, torch.where(matches, each[0], each[1])


class PairStep(nn.Module):
    """The loss of a batch of pairs of mixtures, the VIB objective (Eq. 8).

    An image has the same samples in all its pairs, and its divergence counts twice for each image of the batch
    (once for each end of a pair), whatever the number of pairs that it is in.

    Args:
        encoder: Images -> outputs of a mixture (N, 2 C D).
        components: C.
    """

    def __init__(self, encoder: nn.Module, components: int) -> None:
        super().__init__()
        self.encoder, self.components = encoder, components
        self.match = MatchParameters(_SLOPE, _INTERCEPT)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The network's weights, and the numbers of the match probability with a rate of their own."""
        return [
            {"params": list(self.encoder.parameters()), "lr": lr},
            {"params": list(self.match.parameters()), "lr": lr * _MATCH_RATE},
        ]

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the pairs, in which matches weigh as much as mismatches; a scalar."""
        i, j, weight = choose_pairs(targets)
        return (weight * self.losses(self.encoder(x), i, j, targets[i] == targets[j])).sum()

    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """The loss of each pair, shape (P,)."""
        mean, variance = mixture(raw, self.components)
        samples = stratified_samples(mean, variance, _SAMPLES)
        found = match_loss(samples[i], samples[j], matches, *self.match(), average="probability", reduction="none")
        return found + 2 * _KL_WEIGHT * kl_bound(mean, variance).mean()


class PairBatches(Sampler[list[int]]):
    """Batches of pairs of images, exactly half of them of one class and half of two.

    A batch is a list of ``2 * pairs`` rows; rows ``2 i`` and ``2 i + 1`` are a pair, and the pairs stand in random
    order. In both halves the first image of a pair is drawn from all images that have a partner, the second from all
    partners: the other images of its class, or all images of other classes.

    Args:
        targets: Class labels, int64 (N,): at least two classes, one of them with two images.
        pairs: Pairs in a batch, an even number.
        batches: Batches in an epoch.
        generator: Source of the draws, on the CPU.
    """

    def __init__(self, targets: Tensor, pairs: int, batches: int, generator: torch.Generator) -> None:
        _, kinds, counts = targets.unique(return_inverse=True, return_counts=True)
        self.pairs, self.batches, self.generator = pairs, batches, generator
        # Places in an order that has one class after the other: a class is an interval.
        self._order = kinds.argsort(stable=True)
        self._count = counts[kinds[self._order]]
        self._start = (counts.cumsum(0) - counts)[kinds[self._order]]
        self._with_partner = torch.nonzero(self._count > 1).squeeze(1)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        everyone = torch.arange(len(self._order))
        for _ in range(self.batches):
            first = torch.cat([self._draw(self._with_partner), self._draw(everyone)])
            start, count = self._start[first], self._count[first]
            matching = torch.arange(self.pairs) < self.pairs // 2
            # Steps forward, at least one and less than a full turn: inside the class, or past it.
            turn = torch.where(matching, count, len(self._order))
            skipped = torch.where(matching, 1, start + count - first)
            steps = skipped + self._below(torch.where(matching, count - 1, len(self._order) - count))
            second = torch.where(matching, start + (first - start + steps) % turn, (first + steps) % turn)
            both = self._order[torch.stack([first, second], 1)]
            yield both[torch.randperm(self.pairs, generator=self.generator)].flatten().tolist()

    def _draw(self, places: Tensor) -> Tensor:
        return places[torch.randint(len(places), (self.pairs // 2,), generator=self.generator)]

    def _below(self, bounds: Tensor) -> Tensor:
        """A whole number from 0 to each bound, without the bound."""
        return (torch.rand(bounds.shape, dtype=torch.float64, generator=self.generator) * bounds).long()


def hedged(setting: Setting, data: RetrievalData, seed: int, encoders: list[nn.Module], components: int = 1) -> Fitted:
    """Train an encoder on batches of pairs, half of them of one class (section 2.3).

    A batch has ``setting.batch_size / 2`` pairs; ``setting.per_class`` and ``setting.margin`` do not matter. Embeddings
    are compared by Euclidean distance. The score is the self-mismatch (Eq. 9), with the same noise for all images.
    Variants of a mixture: ``"variance"``, averaged over dimensions.

    Args:
        setting: How the encoder is made and trained; ``setting.batch_size`` is a multiple of 4.
        data: The training images are ``data.train``.
        seed: Of weights, pairs and noise.
        encoders: None.
        components: Gaussians of an embedding, a divisor of 8.
    """
    size, n = setting.batch_size, len(data.train)
    generator = torch.Generator().manual_seed(seed)
    drawn = PairBatches(data.train.targets, size // 2, math.ceil(n / size), generator)
    step = train(
        setting,
        data,
        seed,
        lambda encoder, _: PairStep(encoder, components).to(setting.device),
        outputs=setting.dim * 2 * components,
        batches=loader(data.train.augmented, 1, batch_sampler=drawn, generator=generator),
    )
    # The learned slope a and intercept b of the match probability.
    match = [number.item() for number in step.match()]

    def mixtures(split: Split) -> tuple[Tensor, Tensor]:
        return mixture(encode(setting, step.encoder, split), components)

    def mismatch(mean: Tensor, variance: Tensor) -> Tensor:
        generator, each = torch.Generator().manual_seed(_SEED), _SAMPLES // components
        centre, spread = mean.repeat_interleave(each, 1), variance.sqrt().repeat_interleave(each, 1)
        zero = torch.zeros_like(mean[0])
        # The noise of one image serves all: equal images have equal scores, and ranks have less noise.
        sets = [
            centre + spread * stratified_samples(zero, torch.ones_like(zero), _SAMPLES, generator) for _ in range(2)
        ]
        return 1 - match_probability(*sets, *match)

    def predict(split: Split) -> Prediction:
        mean, variance = mixtures(split)
        volume = (variance.mean(1) + mean.var(1, correction=0)).mean(1)
        return Prediction(mean.mean(1), mismatch(mean, variance), {"variance": volume}, metric="euclidean")

    def samples(split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        mean, variance = mixtures(split)
        generator, images = torch.Generator().manual_seed(seed), torch.arange(len(mean))
        for _ in range(n_samples):
            chosen = torch.randint(components, (len(mean),), generator=generator)
            noise = torch.randn(mean[:, 0].shape, generator=generator)
            yield mean[images, chosen] + variance[images, chosen].sqrt() * noise

    return Fitted(predict, samples)
