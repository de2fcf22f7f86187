"""Training of hedged embeddings and of their points: what raw outputs mean, and the losses of pairs."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from contrastive_curvature.hedged import (
    MatchParameters,
    hard_contrastive_loss,
    kl_bound,
    kl_estimate,
    match_loss,
    soft_contrastive_loss,
    stratified_samples,
)

__all__ = ["FIRST_VARIANCE", "HedgedStep", "PointStep", "choose_pairs", "mixture"]

FIRST_VARIANCE = 0.01
"""Of an embedding where the network's outputs are 0, as they nearly are before training."""
_FLOOR = 1e-6
"""Smallest variance, so that divergences stay finite."""
_MISMATCHES = 1_500
"""Of a batch whose pairs all count: those of 128 images are 8,128, with 64 pairs of samples each."""
_SHIFT = math.log(math.expm1(FIRST_VARIANCE))


def mixture(raw: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Means and variances from the outputs of the shared network.

    Args:
        raw: Shape (N, 2 C D): C means, then C variances before ``softplus``.
        components: C.

    Returns:
        Mean and variance, both (N, C, D); variances are ``softplus(raw + shift) + 1e-6``, 0.01 at ``raw = 0``.
    """
    mean, spread = raw.unflatten(1, (2, components, -1)).unbind(1)
    return mean, softplus(spread + _SHIFT) + _FLOOR


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


class _PairStep(nn.Module):
    """The loss of a batch of pairs.

    Args:
        encoder: Images -> raw outputs.
        match: The learned numbers of the match probability, ``None`` where the loss has none.
        match_lr: Their learning rate as a multiple of the network's.
        pairs: See :func:`choose_pairs`.
    """

    def __init__(self, encoder: nn.Module, match: MatchParameters | None, match_lr: float, pairs: str) -> None:
        super().__init__()
        self.encoder, self.match, self.match_lr, self.pairs = encoder, match, match_lr, pairs

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The network's weights, and the numbers of the match probability with a rate of their own."""
        groups: list[dict[str, Any]] = [{"params": list(self.encoder.parameters()), "lr": lr}]
        if self.match is not None:
            groups.append({"params": list(self.match.parameters()), "lr": lr * self.match_lr})
        return groups

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the pairs, in which matches weigh as much as mismatches; a scalar."""
        i, j, weight = choose_pairs(targets, self.pairs, _MISMATCHES)
        return (weight * self.losses(self.encoder(x), i, j, targets[i] == targets[j])).sum()

    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """The loss of each pair, shape (P,)."""
        raise NotImplementedError


class PointStep(_PairStep):
    """The contrastive loss of pairs of points (Eq. 3, or Eq. 1 without ``match``).

    Args:
        encoder: Images -> points (N, D).
        match: For the soft loss; ``None`` for the hard one.
        match_lr: Learning rate of ``match`` as a multiple of the network's.
        pairs: See :func:`choose_pairs`.
        margin: Of the hard loss.
    """

    def __init__(
        self, encoder: nn.Module, match: MatchParameters | None, match_lr: float, pairs: str, margin: float
    ) -> None:
        super().__init__(encoder, match, match_lr, pairs)
        self.margin = margin

    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """See :func:`~contrastive_curvature.hedged.soft_contrastive_loss` and its sibling."""
        if self.match is None:
            return hard_contrastive_loss(raw[i], raw[j], matches, self.margin, reduction="none")
        return soft_contrastive_loss(raw[i], raw[j], matches, *self.match(), reduction="none")


class HedgedStep(_PairStep):
    """The VIB objective of pairs of mixtures (Eq. 8).

    An image has the same samples in all its pairs, and its divergence counts twice for each image of the batch
    (once for each end of a pair), whatever the number of pairs that it is in.

    Args:
        encoder: Images -> raw outputs (N, 2 C D).
        match: The learned numbers of the match probability.
        match_lr: Their learning rate as a multiple of the network's.
        pairs: See :func:`choose_pairs`.
        components: C.
        kl_weight: Weight of the divergences.
        n_samples: Samples of each image.
        average: Of :func:`~contrastive_curvature.hedged.match_loss`.
        divergence: ``"bound"`` or ``"sampled"``, as in :func:`~contrastive_curvature.hedged.vib_objective`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        match: MatchParameters,
        match_lr: float,
        pairs: str,
        *,
        components: int,
        kl_weight: float,
        n_samples: int,
        average: Literal["log", "probability"],
        divergence: Literal["bound", "sampled"],
    ) -> None:
        super().__init__(encoder, match, match_lr, pairs)
        self.components, self.kl_weight, self.n_samples = components, kl_weight, n_samples
        self.average, self.divergence = average, divergence

    def losses(self, raw: Tensor, i: Tensor, j: Tensor, matches: Tensor) -> Tensor:
        """The VIB objective of each pair."""
        assert self.match is not None
        mean, variance = mixture(raw, self.components)
        samples = stratified_samples(mean, variance, self.n_samples)
        found = match_loss(samples[i], samples[j], matches, *self.match(), average=self.average, reduction="none")
        divergences = kl_bound(mean, variance) if self.divergence == "bound" else kl_estimate(samples, mean, variance)
        return found + 2 * self.kl_weight * divergences.mean()
