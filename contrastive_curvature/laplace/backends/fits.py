"""What a backend computes over a whole data set, on top of its pullback."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.anchor_data import AnchorData, collect_anchors, ordered_curvature
from contrastive_curvature.fit.anchor_subset import anchor_subset
from contrastive_curvature.fit.anchors import AnchorBatch
from contrastive_curvature.fit.dataset import (
    DatasetCurvature,
    DatasetPoints,
    collect_points,
    expected_points,
    mean_norm,
)
from contrastive_curvature.fit.lowrank import curvature_product, leading_eigenpairs
from contrastive_curvature.fit.options import CurvatureOptions, check_mc_samples
from contrastive_curvature.fit.sampling import BlockSampler
from contrastive_curvature.fit.subset import HessianSubset, subset_hessian
from contrastive_curvature.hessian.derivatives import refuse_sampled
from contrastive_curvature.laplace.backends.driver import run_steps
from contrastive_curvature.laplace.backends.steps import AnchorSteps, BatchSteps, Part, PointSteps, Steps
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sampled_data import MANY_POINTS, NEGATIVE_SAMPLES, sampled_unasked, sums_suffice
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.loader import check_loader, check_whole, in_fixed_order
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Normalization, Structure
from contrastive_curvature.parts.exchange import Exchange, check_agreed, present_exchange
from contrastive_curvature.parts.state import State, check_identity, digest_of
from contrastive_curvature.progress import Progress

__all__ = ["DatasetFits"]

_log = logging.getLogger("contrastive_curvature")

_FASTER = (
    "Faster: a random part of the data; margin=None, which needs sums over classes only (with class labels); "
    "pairs='batch', which takes the pairs inside a batch; subset_of_weights='last_layer'; or a GPU."
)


class DatasetFits:
    """Part of a backend: curvatures, products and subsets over all pairs of a data set."""

    model: Any
    loss: CosineLoss
    options: CurvatureOptions
    _encoder: Encoder | None

    @abstractmethod
    def encoder(self, probe: Inputs) -> Encoder:
        """The analysed encoder."""

    @abstractmethod
    def pullback(self, probe: Inputs) -> Pullback:
        """The pullback to the backend's parameters."""

    @abstractmethod
    def read(self, batch: Any) -> tuple[Inputs, Tensor]:
        """Take apart what a loader yields."""

    @abstractmethod
    def read_anchors(self, batch: Any) -> AnchorBatch:
        """Take apart what a loader yields for a loss of anchors."""

    def fit(self, loader: Iterable[Any], structure: Structure, progress: bool | None = None) -> DatasetCurvature:
        """Unclamped curvature of a data set, times its scale.

        Inside an initialised ``torch.distributed`` process group, every process gives its share of the data, and all
        get the curvature of all of it.

        Args:
            loader: Batches ``(x, labels)`` or mappings.
            structure: ``diag``, ``full`` or ``kron``.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            Curvature, loss and number of points. With ``normalization="type"``, a mean over pairs, both are multiplied
            by N / 2, so that they grow with the data; on classes of equal size this equals ``"anchor"``.

        Raises:
            InputError: See :meth:`~contrastive_curvature.laplace.base.ContrastiveLaplace.fit`.
            ProcessError: Another process of the group has failed.
        """
        exchange = present_exchange()
        with exchange.together():
            return self._fit_shares(loader, structure, progress, exchange)

    def _fit_shares(
        self, loader: Iterable[Any], structure: Structure, progress: bool | None, exchange: Exchange
    ) -> DatasetCurvature:
        check_loader(loader)
        if exchange.count == 1:
            check_whole(loader)
        sampler = self.sampler(structure)
        with self._ready(loader) as (encoder, pullback):
            check_agreed(exchange, {**self.identity(structure), "backend": type(self).__name__})
            # One process shows its progress for all.
            shown = Progress(progress if exchange.rank == 0 else False, _FASTER)
            # Views of one input have its place in the loader as their label.
            data = in_fixed_order(loader) if self._is_ordered() else loader
            out = points = None
            if self._is_ordered() and self._stays_exact(loader, exchange):
                points = self._all_anchors(encoder, data, shown, exchange)
            if points is None or self.samples(points.n) is not None:
                steps = self.steps(encoder, pullback, structure, shown)
                out = run_steps(steps, data, exchange, self.identity(structure))
            if out is None:
                points = points or self._all_anchors(encoder, data, shown, exchange)
                self.tell_samples(points.n)
                out = ordered_curvature(pullback, data, self.read_anchors, points, structure, shown, sampler)
        return self.at_data_scale(out)

    def fit_part(
        self, loader: Iterable[Any], structure: Structure, part: Part, statistics: State | None, progress: bool | None
    ) -> State:
        """One of the two passes over a part of the data.

        Args:
            loader: The batches of the part.
            structure: ``diag``, ``full`` or ``kron``.
            part: Index of the part and number of all parts.
            statistics: Of all parts, for the second pass; ``None`` for the first.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Raises:
            InputError: See :meth:`fit`; or the statistics lack a part, or are of other options.
            UnsupportedError: The fit does not come in parts.
        """
        self.check_parts()
        identity = self.identity(structure)
        if statistics is not None:
            check_identity(statistics, identity)
            identity = {**identity, "statistics": digest_of(statistics)}
        with self._ready(loader) as (encoder, pullback):
            steps = self.steps(encoder, pullback, structure, Progress(progress, _FASTER))
            data = in_fixed_order(loader) if self._is_ordered() else loader
            if part[1] > 1:
                steps.check_adds_up()
            if statistics is None:
                return steps.first(data, part, identity)
            return steps.second(data, part, statistics.to(next(encoder.parameters()).device), identity)

    def fit_of_parts(
        self, structure: Structure, statistics: State, curvature: State, probe: Inputs
    ) -> DatasetCurvature:
        """The curvature of a data set from what :meth:`fit_part` gave for all its parts.

        Args:
            structure: ``diag``, ``full`` or ``kron``.
            statistics: Of the first pass, merged.
            curvature: Of the second pass, merged.
            probe: A batch of inputs.

        Raises:
            InputError: A part is missing, or the states are of other options, another encoder or other data.
        """
        self.check_parts()
        identity = self.identity(structure)
        check_identity(statistics, identity)
        check_identity(curvature, {**identity, "statistics": digest_of(statistics)})
        with evaluation_mode(self.model), torch.no_grad():
            encoder, pullback = self.encoder(probe), self.pullback(probe)
            device = next(encoder.parameters()).device
            steps = self.steps(encoder, pullback, structure, Progress(False, _FASTER))
            out = steps.finish(statistics.to(device), curvature.to(device))
        return self.at_data_scale(out)

    def check_parts(self) -> None:
        """Refuse options with which a fit does not come in parts.

        Raises:
            UnsupportedError: Every part would have to know all others.
        """
        if self._is_ordered() and not isinstance(self.options.negative_samples, int):
            msg = (
                f"candidates='dataset' in parts: every anchor of {type(self.loss).__name__} is compared with "
                "the points of all parts. Add backend_kwargs=dict(negative_samples=2000), or use candidates='batch'."
            )
            raise UnsupportedError(msg)

    def steps(self, encoder: Encoder, pullback: Pullback, structure: Structure, progress: Progress) -> Steps:
        """The steps of the fit that the options ask for."""
        if self.options.together == "dataset":
            kind: type[Steps] = PointSteps
        else:
            kind = BatchSteps if isinstance(self.loss, PairLoss) else AnchorSteps
        return kind(self, encoder, pullback, structure, progress)

    @abstractmethod
    def identity(self, structure: Structure) -> dict[str, str]:
        """What parts of one fit have in common: the encoder and all options."""

    @contextmanager
    def _ready(self, loader: Iterable[Any]) -> Iterator[tuple[Encoder, Pullback]]:
        """The encoder in evaluation mode, and the pullback."""
        # An encoder that is analysed already may have a part of the data without a point.
        probe = {} if self._encoder is not None else self._probe(loader)
        with evaluation_mode(self.model), torch.no_grad():
            yield self.encoder(probe), self.pullback(probe)

    def _is_ordered(self) -> bool:
        return not isinstance(self.loss, PairLoss) and self.options.candidates == "dataset"

    def _stays_exact(self, loader: Iterable[Any], exchange: Exchange) -> bool:
        """Whether a loss of anchors counts all candidates of the data set, as far as its loader says."""
        together = exchange.count > 1 and self.options.negative_samples == "auto"
        return together or self.samples(expected_points(loader)) is None

    def _all_anchors(
        self, encoder: Encoder, loader: Iterable[Any], progress: Progress, exchange: Exchange
    ) -> AnchorData:
        """All points as candidates of each other, in one process."""
        if exchange.count > 1:
            self.check_parts()
        return self._anchors(encoder, loader, progress)

    def _anchors(self, encoder: Encoder, loader: Iterable[Any], progress: Progress) -> AnchorData:
        return collect_anchors(
            encoder,
            loader,
            self.read_anchors,
            self.loss,
            self.options.together,
            self.options.negatives_per_anchor,
            progress,
        )

    def _points(self, encoder: Encoder, loader: Iterable[Any], progress: Progress) -> DatasetPoints | AnchorData:
        """Everything about the outputs of a data set, in the order of the loader."""
        if isinstance(self.loss, PairLoss):
            return collect_points(
                encoder, loader, self.read, self.loss, self.options.relation, progress, self.samples()
            )
        return self._anchors(encoder, loader, progress)

    def _check_products(self) -> None:
        """Refuse products with the Hessian of all points where a sample does not give them.

        Raises:
            UnsupportedError: It has cross terms, or is of a loss of anchors.
        """
        if self.samples() is None:
            return
        if not isinstance(self.loss, PairLoss):
            msg = (
                "negative_samples: the low-rank structure takes all candidates of a loss of anchors. Use "
                "hessian_structure='diag' or 'kron', or negative_samples=None."
            )
            raise UnsupportedError(msg)
        if self.loss.coupled:
            refuse_sampled(
                f"pd_fix={str(self.loss.pd_fix)!r} couples points, and this structure multiplies with all pairs"
            )

    def samples(self, n: int = 0) -> int | None:
        """Number of points that stand for all negatives of ``n`` points; ``None`` counts all."""
        if isinstance(self.options.negative_samples, int):
            return None if sums_suffice(self.loss) else self.options.negative_samples
        many = n >= MANY_POINTS and self.options.relation is None and sampled_unasked(self.loss)
        return NEGATIVE_SAMPLES if many and self.options.negative_samples == "auto" else None

    def tell_samples(self, n: int) -> None:
        """Say in the log whether a sample stood for all negatives, where the user left it open."""
        if sums_suffice(self.loss):
            if isinstance(self.options.negative_samples, int):
                _log.info("negative_samples is of no effect: sums over classes say everything about the negatives")
        elif self.options.negative_samples == "auto" and self.samples(n) is None:
            _log.info("negative_samples='auto': all pairs of %d points count", n)
        elif self.options.negative_samples == "auto":
            _log.warning(
                "negative_samples='auto': of %d points, %d drawn at random stand for all negatives, as from %d points "
                "on; backend_kwargs=dict(negative_samples=None) counts all pairs",
                n,
                NEGATIVE_SAMPLES,
                MANY_POINTS,
            )

    def _read_inputs(self, batch: Any) -> tuple[Inputs, Any]:
        if isinstance(self.loss, PairLoss):
            return self.read(batch)
        return self.read_anchors(batch).x, None

    def sampler(self, structure: Structure) -> BlockSampler:
        """What ``mc_samples`` asks for, with the seed 0.

        Raises:
            UnsupportedError: The structure has no such estimate.
        """
        check_mc_samples(self.options.mc_samples, self.loss.coupled, structure)
        return BlockSampler(self.options.mc_samples)

    def fit_lowrank(self, loader: Iterable[Any], progress: bool | None = None) -> DatasetCurvature:
        """Leading eigenvectors (P, R) and eigenvalues (R,) over all pairs of a data set, times its scale.

        Args:
            loader: Batches, always in the same order; of a shuffling ``DataLoader`` the data set in its own order.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            The pair of them as curvature, loss and number of points.

        Raises:
            UnsupportedError: ``pairs="batch"``; or a sample stands for all negatives, and the fix couples points or the
                loss is one of anchors.
            InputError: The backend has no rank.
        """
        if self.options.pairs == "batch":
            msg = (
                "pairs='batch': the low-rank structure has no batch estimate, since eigenpairs of batches do not add "
                "up. Use pairs='dataset', or the structure 'diag'."
            )
            raise UnsupportedError(msg)
        if self.options.rank is None:
            raise InputError(expected("rank", "a positive whole number", None))
        self._check_products()
        check_loader(loader)
        check_whole(loader)
        loader = in_fixed_order(loader)
        with self._ready(loader) as (encoder, pullback):
            shown = Progress(progress, _FASTER)
            found = self._points(encoder, loader, shown)
            vectors, values = leading_eigenpairs(pullback, found, loader, self._read_inputs, self.options.rank, shown)
        scale = self._data_scale(found.n)
        loss, cost = found.hessian.loss_and_cost()
        norm = mean_norm(found.hessian.z)
        curvature = (vectors, scale * values)
        return DatasetCurvature(curvature, scale * loss, scale * cost, found.n, None, norm, found.classes)

    def matvec(self, loader: Iterable[Any], v: Tensor) -> Tensor:
        """``J^T H J v`` over all pairs of a data set, unclamped, times its scale; no matrix is formed.

        Args:
            loader: Batches, always in the same order; of a shuffling ``DataLoader`` the data set in its own order.
            v: Shape (P,).

        Returns:
            Shape (P,).

        Raises:
            UnsupportedError: A sample stands for all negatives, and does not give the product.
        """
        self._check_products()
        check_loader(loader)
        check_whole(loader)
        loader = in_fixed_order(loader)
        with self._ready(loader) as (encoder, pullback):
            found = self._points(encoder, loader, Progress(None, _FASTER))
            product = curvature_product(pullback, found.hessian.whole(), loader, self._read_inputs, v)
        return self._data_scale(found.n) * product

    def fit_subset(
        self, loader: Iterable[Any], size: int, seed: int = 0, progress: bool | None = None
    ) -> tuple[HessianSubset, Tensor, Tensor, int]:
        """Some points of a data set, with a square root of their output Hessian, times the data set's scale.

        Args:
            loader: Batches.
            size: Number of points.
            seed: Of the draw.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            The points; loss, cost and number of points of the whole data set.

        Raises:
            UnsupportedError: ``pairs="batch"``, or the Hessian is not positive semidefinite.
        """
        if self.options.pairs == "batch":
            msg = "pairs='batch': a subset of the points takes the pairs of the data set. Use pairs='dataset'."
            raise UnsupportedError(msg)
        check_loader(loader)
        check_whole(loader)
        with self._ready(loader) as (encoder, _):
            shown = Progress(progress, _FASTER)
            if not isinstance(self.loss, PairLoss):
                if self.options.candidates == "dataset":
                    msg = (
                        "candidates='dataset': the points that hessian_structure='gp' draws are each other's "
                        "candidates. Leave candidates out, or use 'diag', 'kron' or 'full'."
                    )
                    raise UnsupportedError(msg)
                return anchor_subset(encoder, loader, self.read_anchors, self.loss, size, seed, shown)
            found = collect_points(encoder, loader, self.read, self.loss, self.options.relation, shown, self.samples())
            subset = subset_hessian(encoder, loader, self.read, found, size, seed, shown)
        scale = self._data_scale(found.n)
        loss, cost = found.hessian.loss_and_cost()
        return replace(subset, factor=scale**0.5 * subset.factor), scale * loss, scale * cost, found.n

    def eig_lowrank(self, data_loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The host's form of :meth:`fit_lowrank`: eigenvectors, eigenvalues and loss."""
        out = self.fit_lowrank(data_loader)
        vectors, values = out.curvature
        return vectors, values, out.loss

    def _probe(self, loader: Iterable[Any]) -> Inputs:
        for batch in loader:
            return self._read_inputs(batch)[0]
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))

    def _data_scale(self, n: int) -> float:
        mean = isinstance(self.loss, PairLoss) and self.loss.normalization is Normalization.TYPE
        return n / 2 if mean else 1.0

    def at_data_scale(self, out: DatasetCurvature) -> DatasetCurvature:
        """Times N / 2 where the loss is a mean over pairs, so that it grows with the data; see :meth:`fit`."""
        scale = self._data_scale(out.n)
        if isinstance(out.curvature, Tensor):
            scaled: Any = scale * out.curvature
        else:
            # The scale goes to the curvature factor alone: the other is a mean of inputs.
            scaled = [[scale * f[0], *f[1:]] for f in out.curvature]
        return replace(out, curvature=scaled, loss=scale * out.loss, cost=scale * out.cost)
