"""Mean directions of the training classes: an embedding between two of them is less certain than its angle says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.codec import NOT_SAVED
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.class_table import ClassTable, ClassTableCollector
from contrastive_curvature.network.pullback import full_precision
from contrastive_curvature.pairs.rows import RowCollector, Rows, content_numbers

WEIGHT = 3.0
"""How strongly the position between classes counts: the factor of an angle is ``exp(WEIGHT (r - typical r))``.
Measured: ``docs/defaults.md``."""

CAP = 0.85
"""Largest ratio that counts. An embedding of none of the classes is nearly as far from the second centre as from the
first, and which of the two is nearer says nothing about it."""

NEAREST = 4
"""Centres whose distances are computed exactly: products of matrices may be rounded to 10 bits (TF32)."""

MOST_NUMBERS = 2**24
"""Largest K times D: more would take longer than the forward pass of many encoders."""

_SAMPLE = 2000
"""Inputs that say which ratio is typical."""

TYPICAL = "typical"
"""Name of the points that say which position between classes is typical."""

_ALONE = 1e-3
"""Norm of a sum of unit vectors below which it has no direction."""

_ENTRIES = 2**24
"""Cosines in memory at once."""


@dataclass(frozen=True)
class ClassCentres:
    """Sums of the unit embeddings of every class, whose directions are the centres.

    Args:
        labels: Distinct class labels, ascending, int64, shape (K,). A single class has no effect until others are
            merged.
        sums: Sums of unit embeddings, float64, shape (K, D).
        typical: Mean of :meth:`ratio`, capped, over inputs of these classes, each left out of its own centre.
        n: Number of these inputs.
        sample: Some of these inputs, with their unit embeddings and labels in the columns ``outputs`` and ``targets``,
            because ``typical`` must be measured again when other classes are merged. A ``state_dict`` leaves the sample
            out, because it is the user's data.
    """

    labels: Tensor
    sums: Tensor
    typical: float
    n: int
    sample: Rows | None = field(default=None, compare=False, repr=False, metadata=NOT_SAVED)

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> ClassCentres | None:
        """Return the centres of raw outputs (N, D) with int64 labels (N,); ``None`` if they are too large."""
        every = Rows(None, content_numbers(outputs).cpu(), {"outputs": outputs, "targets": labels.to(outputs.device)})
        return centres_of(ClassTable.of(outputs.detach(), labels), every.subsample(_SAMPLE))

    def merged(self, other: ClassCentres) -> ClassCentres | None:
        """Return the centres of both data sets, measured again; ``None`` if they are too many.

        If one of them has no sample (after loading), ``typical`` is measured on the sample of the other.
        """
        labels, rows = torch.cat([self.labels, other.labels.to(self.labels)]).unique(return_inverse=True)
        every = torch.cat([self.sums, other.sums.to(self.sums)])
        sums = every.new_zeros(len(labels), every.shape[1]).index_add_(0, rows, every)
        samples = [part.sample.to(sums.device) for part in (self, other) if part.sample is not None]
        if sums.numel() > MOST_NUMBERS or not samples:
            return None
        return ClassCentres(labels, sums, 0.0, self.n + other.n, reduce(Rows.merged, samples))._measured()

    def _measured(self) -> ClassCentres:
        """Return a copy with ``typical`` measured on its sample."""
        if self.sample is None or len(self.labels) < 2:
            return self
        units, own = self.sample.columns["outputs"], torch.searchsorted(self.labels, self.sample.columns["targets"])
        rows = max(1, _ENTRIES // len(self.labels))
        parts = [self._left_out(u, k) for u, k in zip(units.split(rows), own.split(rows), strict=True)]
        # In float32, the cap itself would be rounded up.
        return replace(self, typical=min(CAP, float(torch.cat(parts).double().clamp(max=CAP).mean())))

    def _left_out(self, units: Tensor, own: Tensor) -> Tensor:
        """Return the ratio of unit embeddings (B, D) with the classes ``own`` (B,), each left out of its own centre.

        A new input is part of no centre. In a small class, an input that is part of the centre is much nearer to it.
        """
        rest = self.sums[own] - units.double()
        # For a class of one input, the rest is only rounding; the opposite direction is farther than any other centre.
        alone = (rest.norm(dim=1) < _ALONE).unsqueeze(1)
        left = normalize(torch.where(alone, -units.double(), rest))[0].to(units)
        centres = self.centres_like(units)
        with torch.autocast(units.device.type, enabled=False):
            cosine = (units @ centres.T).scatter(1, own.unsqueeze(1), -torch.inf)
        others = centres[cosine.topk(min(NEAREST, len(centres) - 1), dim=1).indices]
        ratio = _ratio(units, torch.cat([left.unsqueeze(1), others], 1))
        return ratio if len(centres) > 2 else torch.where(alone[:, 0], 1.0, ratio)

    @cached_property
    def centres(self) -> Tensor:
        """Directions of the sums (K, D); a sum of zero stays zero, at a right angle to every embedding."""
        norms = self.sums.norm(dim=1, keepdim=True)
        return self.sums / torch.where(norms > 0, norms, 1)

    @cached_property
    def _converted(self) -> dict[tuple[torch.dtype, torch.device], Tensor]:
        return {}

    def centres_like(self, outputs: Tensor) -> Tensor:
        """Return the centres (K, D) in a dtype and on a device, converted once."""
        key = outputs.dtype, outputs.device
        if key not in self._converted:
            self._converted[key] = self.centres.to(outputs)
        return self._converted[key]

    def ratio(self, outputs: Tensor) -> Tensor:
        """Return :func:`nearest_ratio` for outputs (B, D) with non-zero norms, shape (B,)."""
        return self.ratio_of_units(normalize(outputs)[0])

    def ratio_of_units(self, units: Tensor) -> Tensor:
        """Return :meth:`ratio` of unit vectors (B, D)."""
        if units.shape[1] != self.sums.shape[1]:
            wanted = f"D = {self.sums.shape[1]}, that of the embeddings"
            raise InputError("class_centres", wanted, f"outputs of D = {units.shape[1]}")
        centres, rows = self.centres_like(units), max(1, _ENTRIES // len(self.labels))
        if len(units) <= rows:
            return nearest_ratio(units, centres)
        return torch.cat([nearest_ratio(block, centres) for block in units.split(rows)])

    def nearest(self, outputs: Tensor) -> Tensor:
        """Return the index of the nearest centre for outputs (B, D) with non-zero norms, int64, shape (B,)."""
        centres = self.centres_like(outputs)
        with torch.autocast(outputs.device.type, enabled=False):
            blocks = outputs.split(max(1, _ENTRIES // len(centres)))
            return torch.cat([(block @ centres.T).argmax(1) for block in blocks])

    def factor(self, outputs: Tensor) -> Tensor:
        """Return the factors of the angles of outputs (B, D), shape (B,)."""
        return between_classes(self.ratio(outputs), self.typical)


def between_classes(ratio: Tensor, typical: float | Tensor) -> Tensor:
    """Return the factor of an angle: 1 for a typical ratio, larger between two classes, smaller near a class centre."""
    return (WEIGHT * (ratio.clamp(max=CAP) - typical)).exp()


@full_precision
def nearest_ratio(units: Tensor, centres: Tensor) -> Tensor:
    """Return the ratio (B,) of the distances of unit vectors (B, D) to the nearest and second of K >= 2 centres.

    The ratio is 0 at a centre and 1 between two. Source: Lowe (2004), "Distinctive image features from scale-invariant
    keypoints", section 7.1: the ratio that separates right matches from wrong ones.
    """
    cosine = units.detach() @ centres.T
    return _ratio(units, centres[cosine.topk(min(NEAREST, len(centres)), dim=1).indices])


def _ratio(units: Tensor, near: Tensor) -> Tensor:
    """Return the quotient (B,) of the two smallest distances to some centres (B, C, D) each."""
    # Differences, because 1 - cosine loses all digits near a centre.
    apart = (units.unsqueeze(1) - near).norm(dim=2)
    # At two equal centres the ratio is 1, as between two classes.
    smallest = apart.topk(2, dim=1, largest=False).values.clamp(min=torch.finfo(apart.dtype).tiny)
    first, second = smallest.unbind(1)
    return first / second


def same_centres(one: ClassCentres | None, other: ClassCentres | None) -> bool:
    """Return whether embeddings are compared with the same classes."""
    if one is other or one is None or other is None:
        return one is other
    if (one.typical, one.n, one.sums.shape) != (other.typical, other.n, other.sums.shape):
        return False
    return torch.equal(one.labels, other.labels.to(one.labels)) and torch.equal(one.sums, other.sums.to(one.sums))


class CentreCollector:
    """Builds the :class:`ClassCentres` of a stream of labelled outputs, which need not fit into memory together.

    Args:
        limited: Whether to stop summing when the centres become too large.
    """

    def __init__(self, *, limited: bool = True) -> None:
        self._table, self._typical = ClassTableCollector(), RowCollector(_SAMPLE)
        self._limited, self._too_many = limited, False

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        if self._too_many:
            return
        self._table.add(outputs, labels)
        self._typical.add(
            content_numbers(outputs), {"outputs": outputs, "targets": waiting.sent(labels, outputs.device)}
        )
        # The number of classes can only grow.
        self._too_many = self._limited and self._table.size > MOST_NUMBERS

    def found(self) -> tuple[ClassTable | None, Rows]:
        """Return counts and sums of all classes, and the sample of points for ``typical``."""
        return None if self._too_many else self._table.table(), self._typical.rows()

    def centres(self) -> ClassCentres | None:
        """Return the centres or ``None``; see :meth:`ClassCentres.of`."""
        return centres_of(*self.found())


def centres_of(table: ClassTable | None, typical: Rows) -> ClassCentres | None:
    """Return the centres of classes; ``None`` without classes, with too many classes, or without a sample."""
    if table is None or not len(typical) or table.sums.numel() > MOST_NUMBERS:
        return None
    columns = {**typical.columns, "outputs": normalize(typical.columns["outputs"].detach())[0]}
    sample = replace(typical, columns=columns)
    return ClassCentres(table.labels, table.sums, 0.0, int(table.counts.sum()), sample)._measured()
