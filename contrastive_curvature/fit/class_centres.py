"""Mean directions of the classes of training: an embedding between two of them is less certain than the angle says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hessian.sphere import normalize

__all__ = ["CAP", "MOST_NUMBERS", "WEIGHT", "ClassCentres", "add_sums", "same_centres"]

WEIGHT = 3.0
"""How strongly the position between classes counts: the factor of an angle is ``exp(WEIGHT (r - typical r))``.
Measured: ``docs/defaults.md``."""

CAP = 0.85
"""Largest ratio that counts. An embedding of none of the classes is nearly as far from the second centre as from the
first, and which of the two is nearer says nothing about it."""

MOST_NUMBERS = 2**24
"""Largest K times D: more would take longer than the forward pass of many encoders."""

_SAMPLE = 2000
"""Inputs that say which ratio is typical."""

_ROWS = 4096
_ALONE = 1e-3
"""Norm of a sum of unit vectors below which it has no direction."""

_NEAREST = 4
"""Centres whose distances are computed exactly: products of matrices may be rounded to 10 bits (TF32)."""

_ENTRIES = 2**24
"""Cosines in memory at once."""


@dataclass(frozen=True)
class ClassCentres:
    """Sums of the unit embeddings of every class, whose directions are the centres.

    Args:
        labels: Different class labels, ascending, int64, shape (K,). One class says nothing until others are merged.
        sums: Sums of unit embeddings, float64, shape (K, D).
        typical: Mean of :meth:`ratio`, capped, over inputs of these classes, each left out of its own centre.
        n: Number of these inputs.
        sample: Unit embeddings of some of them, shape (m, D), and their labels, shape (m,): what is typical has to be
            measured again where further classes are merged. A ``state_dict`` leaves it out: these are the user's data.
    """

    labels: Tensor
    sums: Tensor
    typical: float
    n: int
    sample: tuple[Tensor, Tensor] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> ClassCentres | None:
        """The centres of labelled inputs.

        Args:
            outputs: Raw outputs, shape (N, D).
            labels: Class labels, int64, shape (N,).

        Returns:
            ``None`` where they cost too much: more than :data:`MOST_NUMBERS` numbers.
        """
        kinds, rows = labels.unique(return_inverse=True)
        if len(kinds) * outputs.shape[1] > MOST_NUMBERS:
            return None
        some = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(0))[:_SAMPLE].to(outputs.device)
        sums = _sums_of_rows(outputs, rows, len(kinds))
        return cls.from_sums(kinds, sums, outputs[some], labels[some], len(outputs))

    @classmethod
    def from_sums(cls, labels: Tensor, sums: Tensor, sample: Tensor, of: Tensor, n: int) -> ClassCentres | None:
        """The centres of classes whose sums are known; see :meth:`of`.

        Args:
            labels: Different class labels, ascending, shape (K,).
            sums: Sums of unit embeddings, float64, shape (K, D).
            sample: Raw outputs of some of the inputs that were summed, for what is typical, shape (m, D).
            of: Their labels, shape (m,).
            n: Number of all inputs.
        """
        if sums.numel() > MOST_NUMBERS:
            return None
        return cls(labels, sums, 0.0, n, (normalize(sample.detach())[0], of))._measured()

    def merged(self, other: ClassCentres) -> ClassCentres | None:
        """The centres of both data sets, and what is typical for them; ``None`` where they are too many.

        Where one of the two has no sample, as after loading, that of the other says what is typical.
        """
        labels, sums = add_sums([(self.labels, self.sums), (other.labels.to(self.labels), other.sums.to(self.sums))])
        n, parts = self.n + other.n, []
        for part in (self, other):
            if part.sample is not None:
                units, of = part.sample
                rows = torch.randperm(len(of), generator=torch.Generator().manual_seed(0)).to(of.device)
                rows = rows[: max(1, _SAMPLE * part.n // n)]
                parts.append((units[rows].to(sums.device), of[rows].to(labels)))
        if sums.numel() > MOST_NUMBERS or not parts:
            return None
        units, of = (torch.cat(some) for some in zip(*parts, strict=True))
        return ClassCentres(labels, sums, 0.0, n, (units, of))._measured()

    def _measured(self) -> ClassCentres:
        """The same with what is typical for its sample."""
        if self.sample is None or len(self.labels) < 2:
            return self
        units, own = self.sample[0], torch.searchsorted(self.labels, self.sample[1])
        rows = max(1, _ENTRIES // len(self.labels))
        parts = [self._left_out(u, k) for u, k in zip(units.split(rows), own.split(rows), strict=True)]
        # In float32, the cap itself would be rounded up.
        return replace(self, typical=min(CAP, float(torch.cat(parts).double().clamp(max=CAP).mean())))

    def ratio(self, outputs: Tensor) -> Tensor:
        """Distance to the nearest centre over that to the second, on the sphere; 0 at a centre, 1 between two.

        Args:
            outputs: Outputs of any norm but zero, shape (B, D).

        Returns:
            Shape (B,), in [0, 1].

        Raises:
            InputError: They have another dimension.

        Source: Lowe (2004), "Distinctive image features from scale-invariant keypoints", section 7.1: the ratio that
        tells right matches from wrong ones.
        """
        if outputs.shape[1] != self.sums.shape[1]:
            wanted = f"D = {self.sums.shape[1]}, that of the embeddings"
            raise InputError(expected("class_centres", wanted, f"outputs of D = {outputs.shape[1]}"))
        units, centres = normalize(outputs)[0], self._directions(outputs)
        return torch.cat([_ratio(part, centres) for part in units.split(max(1, _ENTRIES // len(centres)))])

    def _left_out(self, units: Tensor, own: Tensor) -> Tensor:
        """The ratio of unit embeddings (B, D) of the classes with rows ``own`` (B,), each left out of its own centre.

        A new input is part of no centre. In a class of few, an input is much nearer to a centre that it is part of.
        """
        rest = self.sums[own] - units.double()
        # What rounding leaves of a class of one is no direction.
        alone = rest.norm(dim=1) < _ALONE
        left = normalize(torch.where(alone.unsqueeze(1), 1.0, rest))[0].to(units)
        return _ratio(units, self._directions(units), own, left.masked_fill(alone.unsqueeze(1), torch.nan))

    def factor(self, outputs: Tensor) -> Tensor:
        """What angles are multiplied with, shape (B,): 1 for a typical input, more between two classes, less near one.

        Args:
            outputs: As for :meth:`ratio`.
        """
        return (WEIGHT * (self.ratio(outputs).clamp(max=CAP) - self.typical)).exp()

    def _directions(self, like: Tensor) -> Tensor:
        """Centres (K, D); a sum of zero has no direction, and is at a right angle to everything."""
        kept: Tensor | None = self.__dict__.get("_kept")
        if kept is None or kept.dtype != like.dtype or kept.device != like.device:
            # A tensor that is made in inference mode would stay out of later gradients.
            with torch.inference_mode(False), torch.no_grad():
                sums = self.sums.clone() if self.sums.is_inference() else self.sums
                norms = sums.norm(dim=1, keepdim=True)
                kept = (sums / torch.where(norms > 0, norms, 1)).to(like.dtype).to(like.device)
            # The division takes longer than a prediction where there are many classes.
            object.__setattr__(self, "_kept", kept)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but the directions, which follow from the sums."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


def same_centres(one: ClassCentres | None, other: ClassCentres | None) -> bool:
    """Whether embeddings are compared with the same classes."""
    if one is other or one is None or other is None:
        return one is other
    if (one.typical, one.n, one.sums.shape) != (other.typical, other.n, other.sums.shape):
        return False
    return torch.equal(one.labels, other.labels.to(one.labels)) and torch.equal(one.sums, other.sums.to(one.sums))


def _sums_of_rows(outputs: Tensor, rows: Tensor, n_classes: int) -> Tensor:
    """Sums of the unit embeddings of the classes with the rows (B,) of the result, float64, shape (K, D)."""
    sums = torch.zeros(n_classes, outputs.shape[1], dtype=torch.float64, device=outputs.device)
    for part, into in zip(outputs.detach().split(_ROWS), rows.split(_ROWS), strict=True):
        sums.index_add_(0, into, normalize(part)[0].double())
    return sums


def add_sums(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Labels and sums of several sets of inputs together."""
    labels, inverse = torch.cat([labels for labels, _ in parts]).unique(return_inverse=True)
    every = torch.cat([sums for _, sums in parts])
    return labels, every.new_zeros(len(labels), every.shape[1]).index_add_(0, inverse, every)


def _ratio(units: Tensor, centres: Tensor, own: Tensor | None = None, left: Tensor | None = None) -> Tensor:
    """Ratio of the two smallest distances; in each row, the centre ``own`` (B,) is replaced by ``left`` (B, D)."""
    with torch.autocast(units.device.type, enabled=False):
        cosine = units.detach() @ centres.T
    if own is not None and left is not None:
        # A centre that is not there is the last one.
        cosine = cosine.scatter(1, own.unsqueeze(1), (units * left).sum(1, keepdim=True).nan_to_num(nan=-2.0))
    nearest = cosine.topk(min(_NEAREST, len(centres)), dim=1).indices
    near = centres[nearest]
    if own is not None and left is not None:
        near = torch.where((nearest == own.unsqueeze(1)).unsqueeze(2), left.unsqueeze(1), near)
    # Differences, because 1 - cosine loses all digits near a centre.
    apart = (units.unsqueeze(1) - near).norm(dim=2).nan_to_num(nan=torch.inf)
    first, second = apart.topk(2, largest=False).values.unbind(1)
    # Two centres in one place, or one alone: the embedding is as much between two as it can be.
    between = (second == 0) | second.isinf()
    return torch.where(between, 1.0, first / torch.where(between, 1, second)).clamp(max=1)
