"""The two passes of a fit over a part of the data, and how their results become a curvature, for every kind of fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.anchor_sums import check_anchors, finished_anchors, note_skipped
from contrastive_curvature.fit.anchors import anchors_of_part
from contrastive_curvature.fit.batches import batches_of_part, targets_of_part
from contrastive_curvature.fit.class_sums import TYPICAL
from contrastive_curvature.fit.cross_sums import refuse_in_parts
from contrastive_curvature.fit.dataset import DatasetCurvature, DatasetPoints, points_of
from contrastive_curvature.fit.finished import finished_sums
from contrastive_curvature.fit.second_pass import curvature_of_part, finished_curvature
from contrastive_curvature.fit.statistics import Collected, NumberedReader, Plan, collect_statistics, numbered
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.sampled_data import (
    MANY_POINTS,
    check_samplable,
    needs_points,
    sums_suffice,
    without_cross_terms,
)
from contrastive_curvature.losses.sampled_rows import SampledRowDerivatives
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.parts.rows import Rows
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import STATISTICS, Origin, State
from contrastive_curvature.progress import Progress

if TYPE_CHECKING:
    from contrastive_curvature.laplace.backends.fits import DatasetFits

__all__ = ["AnchorSteps", "BatchSteps", "PointSteps", "Steps"]

Part = tuple[int, int]
"""Index of a part of the data and number of all parts."""


class Steps(ABC):
    """The steps of one fit.

    Args:
        fits: The backend, with its options.
        encoder: The analysed encoder.
        pullback: Pullback to the parameters.
        structure: ``diag``, ``full`` or ``kron``.
        progress: Of the fit.
    """

    def __init__(
        self, fits: DatasetFits, encoder: Encoder, pullback: Pullback, structure: Structure, progress: Progress
    ) -> None:
        self.fits, self.encoder, self.pullback = fits, encoder, pullback
        self.structure, self.progress = structure, progress

    @abstractmethod
    def first(self, loader: Any, part: Part, identity: Mapping[str, str]) -> State:
        """What a part of the data adds to what all others have to know.

        Args:
            loader: The batches of the part.
            part: See :data:`Part`.
            identity: See :class:`~contrastive_curvature.parts.state.State`.
        """

    @abstractmethod
    def second(self, loader: Any, part: Part, statistics: State, identity: Mapping[str, str]) -> State:
        """What it adds to the curvature; arguments as in :meth:`first`.

        Args:
            loader: The batches of the part.
            part: See :data:`Part`.
            statistics: Of all parts.
            identity: See :class:`~contrastive_curvature.parts.state.State`.
        """

    @abstractmethod
    def finish(self, statistics: State, curvature: State) -> DatasetCurvature:
        """The curvature of all parts."""

    def check_adds_up(self) -> None:  # noqa: B027  most do
        """Refuse a curvature with cross terms between different parts of the data, before anything is computed.

        Raises:
            UnsupportedError: They follow neither from sums over classes nor from a sample.
        """

    def sampler(self, part: Part) -> Any:
        """Samples blocks, differently in every part."""
        sampler = self.fits.sampler(self.structure)
        if sampler.mc_samples is None:
            return None
        return replace(sampler, generator=torch.Generator().manual_seed(part[0]))


class PointSteps(Steps):
    """All pairs of the data set: the first pass finds all points, or sums over classes and a sample of points."""

    found: Collected | None = None
    """What the first pass of this process found."""

    _by_views = False
    """Whether the numbers of inputs stand in place of class labels."""

    _known: tuple[State, DatasetPoints] | None = None
    """The output Hessian, and what it was made from: it is asked for twice, and may take long."""

    def plan(self, parts: int) -> Plan:
        """What the first pass keeps, of data in so many parts."""
        fits = self.fits
        if fits.options.relation is not None or needs_points(fits.loss):
            return Plan()
        if sums_suffice(fits.loss):
            # Cross terms of very many classes are computed from the points, where they are in one part.
            return Plan(everything=fits.loss.coupled and parts == 1)
        # How many points there are is not known yet: of fewer all are kept.
        wanted = fits.samples(MANY_POINTS)
        if wanted is None:
            return Plan()
        if fits.options.negative_samples == "auto":
            return Plan(everything=False, sample=MANY_POINTS - 1)
        crosses = fits.loss.coupled and not fits.loss.pd_fix.attracting_only and self.structure is not Structure.KRON
        return Plan(everything=False, sample=wanted, inputs=crosses)

    def first(self, loader: Any, part: Part, identity: Mapping[str, str]) -> State:
        """See :meth:`Steps.first`."""
        fits, loss = self.fits, self.fits.loss
        wanted = fits.options.negative_samples
        if isinstance(wanted, int):
            check_samplable(loss, self.structure)
        self.found = collect_statistics(
            self.encoder,
            Share(loader, part[0]),
            self._reader(),
            self.plan(part[1]),
            fits.options.relation,
            self.progress,
            identity=identity,
            part=part,
        )
        if self._by_views:
            # Inputs of their own are no classes with a centre.
            state = self.found.state
            nobody = Rows(state.kept[TYPICAL].size, torch.zeros(0, dtype=torch.int64), {})
            self.found = replace(self.found, state=replace(state, kept={**state.kept, TYPICAL: nobody}))
        return self.found.state

    def points(self, statistics: State) -> DatasetPoints:
        """The output Hessian of the data set."""
        fits, known = self.fits, self._known
        if known is not None and known[0] is statistics:
            return known[1]
        loss, samples = fits.loss, fits.samples(statistics.n)
        if samples is not None and needs_points(loss):
            check_samplable(loss, self.structure)
            # Kronecker factors leave the cross terms out, which a sample does not give.
            loss = without_cross_terms(loss)
        found = points_of(
            statistics,
            loss,
            fits.options.relation,
            samples,
            self.found,
            negatives_per_anchor=fits.options.negatives_per_anchor,
        )
        derivatives = found.hessian.derivatives
        if isinstance(derivatives, SampledRowDerivatives):
            note_skipped(derivatives.anchors, derivatives.skipped)
        self._known = statistics, found
        return found

    def second(self, loader: Any, part: Part, statistics: State, identity: Mapping[str, str]) -> State:
        """See :meth:`Steps.second`."""
        return curvature_of_part(
            self.pullback,
            Share(loader, part[0]),
            self._reader(),
            self.points(statistics),
            self.structure,
            self.progress,
            self.sampler(part),
            whole=self.fits.read if part[1] == 1 else None,
            identity=identity,
            part=part,
        )

    def finish(self, statistics: State, curvature: State) -> DatasetCurvature:
        """See :meth:`Steps.finish`."""
        points = self.points(statistics)
        for index, origin in curvature.origins.items():
            points.check_origin(origin, index, "curvature")
        self.fits.tell_samples(points.n)
        return finished_curvature(self.pullback, curvature, points, self.structure)

    def check_adds_up(self) -> None:
        """See :meth:`Steps.check_adds_up`."""
        loss = self.fits.loss
        if not loss.coupled or self.structure is Structure.KRON:
            return
        by_class = isinstance(loss, ContrastiveLoss) and (loss.pd_fix.attracting_only or sums_suffice(loss))
        if self.fits.options.relation is not None or not (by_class or self.fits.samples() is not None):
            refuse_in_parts(loss)

    def _reader(self) -> NumberedReader:
        fits = self.fits
        if isinstance(fits.loss, PairLoss):
            return numbered(fits.read)

        def read(batch: Any, numbers: Tensor) -> tuple[Inputs, Tensor, Tensor]:
            given = fits.read_anchors(batch)
            if given.labels is None or given.pairs is not None:
                msg = (
                    f"candidates='dataset' in parts: {type(fits.loss).__name__} compares listed points of a batch. Use "
                    "candidates='batch'."
                )
                raise UnsupportedError(msg)
            views = len(given.labels) // max(1, len(numbers))
            of_points = torch.cat([views * numbers + view for view in range(views)])
            if given.classes is not None:
                return given.x, given.labels, of_points
            # Views of one input belong together: they have its number.
            self._by_views = True
            return given.x, numbers.to(given.labels.device).repeat(views), of_points

        return read


class BatchSteps(Steps):
    """Pairs inside batches: the first pass counts the pairs."""

    def first(self, loader: Any, part: Part, identity: Mapping[str, str]) -> State:
        """See :meth:`Steps.first`."""
        fits = self.fits
        return targets_of_part(
            Share(loader, part[0]), fits.read, fits.options.relation, self.progress, identity=identity, part=part
        )

    def second(self, loader: Any, part: Part, statistics: State, identity: Mapping[str, str]) -> State:
        """See :meth:`Steps.second`."""
        fits = self.fits
        return batches_of_part(
            self.pullback,
            Share(loader, part[0]),
            fits.read,
            statistics,
            self._loss(),
            self.structure,
            fits.options.relation,
            self.progress,
            fits.options.kfac_approx,
            self.sampler(part),
            identity=identity,
            part=part,
        )

    def finish(self, statistics: State, curvature: State) -> DatasetCurvature:
        """See :meth:`Steps.finish`."""
        return finished_sums(self.pullback, curvature, self.structure)

    def _loss(self) -> PairLoss:
        if not isinstance(self.fits.loss, PairLoss):
            msg = "pairs inside batches are those of a loss of pairs"
            raise TypeError(msg)
        return self.fits.loss


class AnchorSteps(Steps):
    """A loss of anchors with the candidates of their batch: there is nothing that other parts have to know."""

    def first(self, loader: Any, part: Part, identity: Mapping[str, str]) -> State:
        """See :meth:`Steps.first`."""
        return State(STATISTICS, identity, {part[0]: Origin(0, 0, 0.0, 0.0)}, part[1])

    def second(self, loader: Any, part: Part, statistics: State, identity: Mapping[str, str]) -> State:
        """See :meth:`Steps.second`."""
        fits = self.fits
        return anchors_of_part(
            self.pullback,
            loader,
            fits.read_anchors,
            fits.loss,
            self.structure,
            self.progress,
            fits.options.kfac_approx,
            self.sampler(part),
            identity=identity,
            part=part,
        )

    def finish(self, statistics: State, curvature: State) -> DatasetCurvature:
        """See :meth:`Steps.finish`."""
        check_anchors(curvature)
        return finished_anchors(self.pullback, curvature, self.structure)
