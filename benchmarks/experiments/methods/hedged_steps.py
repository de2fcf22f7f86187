"""Training of hedged embeddings and of their points: what raw outputs mean, and the losses of pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.experiments.methods.checks import check_choice, check_count, check_positive
from contrastive_curvature.hedged import (
    MatchParameters,
    hard_contrastive_loss,
    kl_bound,
    kl_estimate,
    match_loss,
    soft_contrastive_loss,
    stratified_samples,
)
from contrastive_curvature.hedged.match import inverse_softplus

__all__ = ["HedgedStep", "PairTraining", "PointStep", "choose_pairs", "mixture"]

_FLOOR = 1e-6
"""Smallest variance, so that divergences stay finite."""
_MISMATCHES = 1_000
"""Of a batch whose pairs all count: those of 128 images are 8,128, with 64 pairs of samples each."""
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}


def mixture(raw: Tensor, components: int, first_variance: float) -> tuple[Tensor, Tensor]:
    """Means and variances from the outputs of the shared network.

    Args:
        raw: Shape (N, 2 C D): C means, then C variances before ``softplus``.
        components: C.
        first_variance: Of an embedding where the outputs are 0, as they nearly are before training.

    Returns:
        Mean and variance, both (N, C, D). Variances are ``softplus(raw + shift) + 1e-6``, and the shift is such that
        ``raw = 0`` gives the first variance.
    """
    mean, spread = raw.unflatten(1, (2, components, -1)).unbind(1)
    return mean, softplus(spread + inverse_softplus(first_variance)) + _FLOOR


def choose_pairs(targets: Tensor, pairs: str, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which images of a batch are compared.

    Args:
        targets: Class labels, int64 (B,), on the CPU or not.
        pairs: ``"drawn"``: rows ``2 i`` and ``2 i + 1``. ``"batch"``: all pairs of the batch that match, and of those
            that do not ``most``, drawn at random from torch's global generator.
        most: That number.

    Returns:
        Rows of the first and of the second image, each int64 (P,), and weights (P,). The weights of the matches have
        the sum 1/2, and those of the mismatches, where a batch has both.
    """
    device = targets.device
    if pairs == "drawn":
        i, j = torch.arange(len(targets), device=device).unflatten(0, (-1, 2)).unbind(1)
    else:
        i, j = torch.triu_indices(len(targets), len(targets), 1, device=device).unbind(0)
        same = targets[i] == targets[j]
        others = torch.nonzero(~same).squeeze(1)
        kept = others[torch.randperm(len(others))[:most].to(device)]
        chosen = torch.cat([torch.nonzero(same).squeeze(1), kept])
        i, j = i[chosen], j[chosen]
    matches = targets[i] == targets[j]
    counts = torch.stack([matches.sum(), (~matches).sum()])
    each = 1 / (counts.clamp(min=1) * (counts > 0).sum())
    return i, j, torch.where(matches, each[0], each[1])


@dataclass(frozen=True)
class PairTraining:
    """How pairs are trained on.

    Args:
        a: First value of the slope of the match probability, > 0.
        b: First value of its intercept.
        match_lr: Learning rate of both as a multiple of the network's.
        pairs: What counts in a batch. ``"batch"``: all pairs of its images that match, and 1,000 of those that do not,
            each half of the loss. ``"drawn"``: the pairs that were drawn.
        batches: Batches in an epoch; ``None`` for as many images as the training set has.
        optimizer: ``"rmsprop"``, as all methods of the tables, or ``"adam"``.

    Raises:
        InputTypeError: ``a`` or ``b`` is not a number.
        InputError: A value is out of range.
    """

    a: float
    b: float
    match_lr: float
    pairs: str
    batches: int | None
    optimizer: str

    def __post_init__(self) -> None:
        MatchParameters(self.a, self.b)
        check_positive("match_lr", self.match_lr)
        check_choice("pairs", self.pairs, ("batch", "drawn"))
        check_choice("optimizer", self.optimizer, tuple(_OPTIMIZERS))
        if self.batches is not None:
            check_count("batches", self.batches)


class _PairStep(nn.Module, ABC):
    """The loss of a batch of pairs.

    Args:
        encoder: Images -> raw outputs.
        training: How.
        learned: Whether the loss has the numbers of a match probability, which are learned with the network.
    """

    def __init__(self, encoder: nn.Module, training: PairTraining, learned: bool = True) -> None:
        super().__init__()
        self.encoder, self.how = encoder, training
        self.match = MatchParameters(training.a, training.b) if learned else None
        self.optimizer = _OPTIMIZERS[training.optimizer]

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The network's weights, and the numbers of the match probability with a rate of their own."""
        groups: list[dict[str, Any]] = [{"params": list(self.encoder.parameters()), "lr": lr}]
        if self.match is not None:
            groups.append({"params": list(self.match.parameters()), "lr": lr * self.how.match_lr})
        return groups

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the pairs, in which matches weigh as much as mismatches; a scalar."""
        i, j, weight = choose_pairs(targets, self.how.pairs, _MISMATCHES)
        return (weight * self.losses(self.encoder(x), i, j, targets[i] == targets[j])).sum()

    @abstractmethod
    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """The loss of each pair, shape (P,)."""


class PointStep(_PairStep):
    """The contrastive loss of pairs of points (Eq. 3, or Eq. 1 with a margin).

    Args:
        encoder: Images -> points (N, D).
        training: How.
        margin: Of the hard loss; ``None`` for the soft one.
    """

    def __init__(self, encoder: nn.Module, training: PairTraining, margin: float | None = None) -> None:
        super().__init__(encoder, training, learned=margin is None)
        self.margin = margin

    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """See :func:`~contrastive_curvature.hedged.soft_contrastive_loss` and its sibling."""
        if self.margin is not None:
            return hard_contrastive_loss(raw[i], raw[j], matches, self.margin, reduction="none")
        assert self.match is not None
        return soft_contrastive_loss(raw[i], raw[j], matches, *self.match(), reduction="none")


class HedgedStep(_PairStep):
    """The VIB objective of pairs of mixtures (Eq. 8).

    An image has the same samples in all its pairs, and its divergence counts twice for each image of the batch
    (once for each end of a pair), whatever the number of pairs that it is in.

    Args:
        encoder: Images -> raw outputs (N, 2 C D).
        training: How.
        components: C.
        first_variance: See :func:`mixture`.
        kl_weight: Weight of the divergences.
        n_samples: Samples of each image.
        average: Of :func:`~contrastive_curvature.hedged.match_loss`.
        divergence: ``"bound"`` or ``"sampled"``, as in :func:`~contrastive_curvature.hedged.vib_objective`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        training: PairTraining,
        *,
        components: int,
        first_variance: float,
        kl_weight: float,
        n_samples: int,
        average: Literal["log", "probability"],
        divergence: Literal["bound", "sampled"],
    ) -> None:
        super().__init__(encoder, training)
        self.components, self.first_variance = components, first_variance
        self.kl_weight, self.n_samples = kl_weight, n_samples
        self.average, self.divergence = average, divergence

    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """The VIB objective of each pair."""
        assert self.match is not None
        mean, variance = mixture(raw, self.components, self.first_variance)
        samples = stratified_samples(mean, variance, self.n_samples)
        found = match_loss(samples[i], samples[j], matches, *self.match(), average=self.average, reduction="none")
        divergences = kl_bound(mean, variance) if self.divergence == "bound" else kl_estimate(samples, mean, variance)
        return found + 2 * self.kl_weight * divergences.mean()
