"""A fit: a first pass over the data, a second pass that sums the curvature, and a last step from the sum.

A fit is ``J^T H J`` summed over points, with the Hessian ``H`` of the loss in the outputs. :func:`fit` runs all steps;
a :class:`Source` defines the points and which of them are compared:

- pairs of the whole data set, of all points or of a sample (:mod:`contrastive_curvature.fit.dataset`);
- pairs inside batches, weighted to represent all pairs (:mod:`contrastive_curvature.fit.batches`);
- anchors with the candidates of their batch (:mod:`contrastive_curvature.fit.anchors`);
- two towers, each with a curvature of its own (:mod:`contrastive_curvature.fit.tower_batches`).

Both passes give sums that merge, so several processes or jobs may each process a part of the data
(:mod:`contrastive_curvature.fit.processes`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.fit.class_centres import TYPICAL, ClassCentres, centres_of
from contrastive_curvature.fit.curvature_options import CurvatureOptions
from contrastive_curvature.fit.mc_samples import make_sampler, term_of
from contrastive_curvature.fit.observers import FEATURES, ClassSums, FeatureSample, FiniteCheck, Observer
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.fit.total import COST, VALUE, Part, Total
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.finite import check_finite

_NORMS = "norms"

_OUTWEIGHS = 25
"""A point with r times the typical norm weighs as much as 1 / r^2 points, since the Hessian grows with 1 / norm^2. With
1 / r^2 = 25 n it is four fifths of n points, even if their norms vary as those of normal numbers in 2 dimensions."""

_FEWEST = 32
"""Of fewer points, one may well contribute most of the curvature."""


class Slope(NamedTuple):
    """The derivatives of a fit in one number of the loss.

    Args:
        number: The number, shape (), with its graph.
        loss: Derivative of the loss, shape ().
        curvature: Derivative of every tensor of the curvature, unclamped.
    """

    number: Tensor
    loss: Tensor
    curvature: Structure


@dataclass(frozen=True)
class DatasetCurvature:
    """Unclamped curvature of a data set.

    Args:
        curvature: The curvature.
        loss: Value of the loss.
        cost: The loss minus its minimum, for the default temperature; see :meth:`DatasetHessian.loss_and_cost`.
        n: Number of points.
        features: A sample of the features of a last layer, in the column ``features``, if the second pass had them;
            with class labels in the column ``classes``, if all points have one.
        typical_norm: Mean norm of the raw outputs, one number.
        classes: Centres of the classes, if targets are class labels.
        slopes: Derivatives in the numbers of the loss that have a gradient.
    """

    curvature: Structure
    loss: Tensor
    cost: Tensor
    n: int
    features: Rows | None = None
    typical_norm: Tensor | None = None
    classes: ClassCentres | None = None
    slopes: tuple[Slope, ...] = ()


class Source(NamedTuple):
    """The points and the comparisons between them, as functions that :func:`fit` calls in this order.

    Args:
        statistics: First pass: collects the data that every batch needs of all others; the totals of parts add up.
        pairs: Takes the statistics of all parts, and returns the data on all pairs for :attr:`parts` and
            :attr:`closed`.
        parts: Second pass: yields the :class:`Part` of every batch, or a finished :class:`Total`.
        closed: Returns the curvatures, one for each tower, after the steps that need the whole sum.
        sums_classes: Whether the second pass sums embeddings by class; ``False`` if the statistics do so.
    """

    statistics: Callable[[Fit, Passes], Total]
    pairs: Callable[[Fit, Total], Any]
    parts: Callable[[Fit, Any, Passes], Iterator[Part | Total]]
    closed: Callable[[Fit, Any, list[Total]], list[DatasetCurvature]]
    sums_classes: bool = True


@dataclass(frozen=True)
class Fit:
    """A loss, the parameters and the structure whose curvature is summed.

    Args:
        source: Source of the points.
        pullbacks: Pullback to the parameters of each tower.
        structure: Structure of the curvature.
        options: The loss, and the pairs that it is summed over.
        progress: Progress of the whole fit.
        part: Index of the part of the data and number of all parts.
    """

    source: Source
    pullbacks: Sequence[Pullback]
    structure: type[Structure]
    options: CurvatureOptions
    progress: Progress
    part: tuple[int, int] = (0, 1)

    @property
    def alone(self) -> bool:
        """Whether all data are in one part."""
        return self.part[1] == 1


def fit(f: Fit, passes: Passes) -> list[DatasetCurvature]:
    """Return the unclamped curvature of all data for each tower; warn about a point with a very short output."""
    pairs = f.source.pairs(f, f.source.statistics(f, passes))
    return f.source.closed(f, pairs, add_up(f, f.source.parts(f, pairs, passes)))


@waiting.seldom_waiting()
def add_up(f: Fit, parts: Iterable[Part | Total]) -> list[Total]:
    """Sum the curvature of all parts, and the data that the posterior keeps of their points, for each tower."""
    totals = [Total() for _ in f.pullbacks]
    observers = [_observers(f, pullback) for pullback in f.pullbacks]
    # The seed differs in every part of the data.
    sampler = make_sampler(f.options.mc_samples, torch.Generator().manual_seed(f.part[0]))
    for part in parts:
        if isinstance(part, Total):
            totals[0] += part
            continue
        pullback = f.pullbacks[part.tower]
        if part.coupled is None or not f.structure.couples:
            blocks = part.blocks if sampler is None else sampler(part.blocks, pullback)
            term = f.structure.term(pullback, part.context, blocks)
        else:
            term = term_of(f.structure, pullback, part.context, part.coupled, sampler)
        for observer in observers[part.tower]:
            observer.add(part, term)
        norms = normalize(part.z.detach())[1].double()
        smallest, row = norms.min(0)
        index = torch.full_like(smallest, -1 if f.alone else f.part[0])
        shortest = torch.stack([smallest, index, (totals[part.tower].n + row).double()])
        curvature = term if part.cross is None else term + part.cross
        terms = {**part.terms, _NORMS: norms.sum()}
        totals[part.tower] += Total(len(norms), terms, shortest=shortest, curvature=curvature)
    for tower, noting in enumerate(observers):
        for observer in noting if totals[tower].n else ():
            totals[tower] = observer.noted(totals[tower])
    return totals


def _observers(f: Fit, pullback: Pullback) -> list[Observer]:
    """Return the observers of every part."""
    observers: list[Observer] = [FiniteCheck(pullback)]
    if isinstance(pullback, LastLayerPullback):
        observers.append(FeatureSample(pullback))
    if f.source.sums_classes:
        observers.append(ClassSums())
    return observers


def nothing(f: Fit, passes: Any) -> Total:
    """Return an empty total: batches need no data of each other."""
    del f, passes
    return Total()


def closed(f: Fit, pairs: Any, totals: list[Total]) -> list[DatasetCurvature]:
    """Return the curvature of all batches for each tower; warn about a point with a very short output."""
    del pairs
    curvatures = []
    for tower, (pullback, total) in enumerate(zip(f.pullbacks, totals, strict=True)):
        assert total.curvature is not None
        check_finite(total.curvature.plain(), pullback, "the sum over all batches")
        dtype = total.curvature.tensors()[0].dtype
        value, cost = (total.terms.get(name, torch.zeros((), device="cpu")).to(dtype) for name in (VALUE, COST))
        classes, kept = total.classes, total.kept
        # If one part has no sums by class, the sums of the others are incomplete.
        complete = classes is not None and int(classes.counts.sum()) == total.n and TYPICAL in kept
        centres = centres_of(classes, kept[TYPICAL]) if complete else None
        norm = total.terms[_NORMS] / total.n
        _warn_of_short_output(total, float(norm), f" of tower {'ab'[tower]}" if len(totals) > 1 else "")
        curvatures.append(DatasetCurvature(total.curvature, value, cost, total.n, kept.get(FEATURES), norm, centres))
    return curvatures


def _warn_of_short_output(total: Total, typical: float, tower: str) -> None:
    """Warn if the point with the smallest norm outweighs all others."""
    assert total.shortest is not None
    smallest, part, point = total.shortest.tolist()
    if total.n >= _FEWEST and smallest * (_OUTWEIGHS * total.n) ** 0.5 < typical:
        of = tower if part < 0 else f" of part {part:.0f}"
        msg = (
            f"The output of point {point:.0f}{of} (counted from 0, in the order of the loader) has the norm "
            f"{smallest:.3g}; the typical norm is {typical:.3g}. The Hessian grows with 1 / norm^2, so the posterior, "
            "and a prior that is chosen from the curvature, say more about this point than about all others. Check its "
            "input; leave the point out if it is not a valid example."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)


def mean_norm(z: Tensor) -> Tensor:
    """Return the mean norm of raw outputs (N, D), float64 and without a graph; no sum of float32 norms overflows."""
    return normalize(z.detach())[1].double().mean()
