"""What a backend computes over a whole data set, on top of its pullback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.ggn.anchor_data import AnchorData, collect_anchors, ordered_curvature
from contrastive_curvature.ggn.anchor_subset import anchor_subset
from contrastive_curvature.ggn.anchors import AnchorBatch, anchors_curvature
from contrastive_curvature.ggn.batches import batches_curvature
from contrastive_curvature.ggn.dataset import (
    DatasetCurvature,
    DatasetPoints,
    collect_points,
    mean_norm,
)
from contrastive_curvature.ggn.lowrank import curvature_product, leading_eigenpairs
from contrastive_curvature.ggn.sampling import BlockSampler
from contrastive_curvature.ggn.second_pass import dataset_curvature
from contrastive_curvature.ggn.subset import HessianSubset, subset_hessian
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.loader import check_loader, check_whole, in_fixed_order
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import KFACApprox, Normalization, Structure
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.progress import Progress

__all__ = ["DatasetFits"]

_FASTER = (
    "Faster: a random part of the data; margin=None, which needs sums over classes only (with class labels); "
    "pairs='batch', which takes the pairs inside a batch; subset_of_weights='last_layer'; or a GPU."
)


class DatasetFits:
    """Part of a backend: curvatures, products and subsets over all pairs of a data set."""

    model: Any
    loss: CosineLoss
    pairs: str
    candidates: str
    negatives_per_anchor: int | None
    relation: RelationFunction | None
    rank: int | None
    kfac_approx: KFACApprox
    mc_samples: int | None

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

        Args:
            loader: Batches ``(x, labels)`` or mappings.
            structure: ``diag``, ``full`` or ``kron``.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            Curvature, loss and number of points. With ``normalization="type"``, a mean over pairs, both are multiplied
            by N / 2, so that they grow with the data; on classes of equal size this equals ``"anchor"``.
        """
        check_loader(loader)
        check_whole(loader)
        sampler = self.sampler(structure)
        probe = self._probe(loader)
        with evaluation_mode(self.model), torch.no_grad():
            encoder, pullback = self.encoder(probe), self.pullback(probe)
            shown = Progress(progress, _FASTER)
            if not isinstance(self.loss, PairLoss):
                return self._fit_anchors(encoder, pullback, loader, structure, shown, sampler)
            if self.pairs == "batch":
                out = batches_curvature(
                    pullback, loader, self.read, self.loss, structure, self.relation, shown, self.kfac_approx, sampler
                )
            else:
                found = collect_points(encoder, loader, self.read, self.loss, self.relation, shown)
                out = dataset_curvature(pullback, loader, self.read, found, structure, shown, sampler)
        return self.at_data_scale(out)

    def _fit_anchors(
        self,
        encoder: Encoder,
        pullback: Pullback,
        loader: Iterable[Any],
        structure: Structure,
        progress: Progress,
        sampler: BlockSampler,
    ) -> DatasetCurvature:
        """The same for a loss of anchors: its batches one by one, or all points as candidates."""
        read, loss = self.read_anchors, self.loss
        if self.candidates == "batch":
            return anchors_curvature(pullback, loader, read, loss, structure, progress, self.kfac_approx, sampler)
        loader = in_fixed_order(loader)
        return ordered_curvature(
            pullback, loader, read, self._anchors(encoder, loader, progress), structure, progress, sampler
        )

    def _anchors(self, encoder: Encoder, loader: Iterable[Any], progress: Progress) -> AnchorData:
        return collect_anchors(
            encoder, loader, self.read_anchors, self.loss, self.candidates, self.negatives_per_anchor, progress
        )

    def _points(self, encoder: Encoder, loader: Iterable[Any], progress: Progress) -> DatasetPoints | AnchorData:
        """Everything about the outputs of a data set, in the order of the loader."""
        if isinstance(self.loss, PairLoss):
            return collect_points(encoder, loader, self.read, self.loss, self.relation, progress)
        return self._anchors(encoder, loader, progress)

    def _read_inputs(self, batch: Any) -> tuple[Inputs, Any]:
        if isinstance(self.loss, PairLoss):
            return self.read(batch)
        return self.read_anchors(batch).x, None

    def sampler(self, structure: Structure) -> BlockSampler:
        """What ``mc_samples`` asks for, with the seed 0.

        Raises:
            UnsupportedError: The structure has no such estimate.
        """
        sampler = BlockSampler(self.mc_samples)
        sampler.check(self.loss.coupled, structure)
        return sampler

    def fit_lowrank(self, loader: Iterable[Any], progress: bool | None = None) -> DatasetCurvature:
        """Leading eigenvectors (P, R) and eigenvalues (R,) over all pairs of a data set, times its scale.

        Args:
            loader: Batches, always in the same order; of a shuffling ``DataLoader`` the data set in its own order.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            The pair of them as curvature, loss and number of points.

        Raises:
            UnsupportedError: ``pairs="batch"``.
            InputError: The backend has no rank.
        """
        if self.pairs == "batch":
            msg = (
                "pairs='batch': the low-rank structure has no batch estimate, since eigenpairs of batches do not add "
                "up. Use pairs='dataset', or the structure 'diag'."
            )
            raise UnsupportedError(msg)
        if self.rank is None:
            raise InputError(expected("rank", "a positive whole number", None))
        check_loader(loader)
        check_whole(loader)
        loader = in_fixed_order(loader)
        probe = self._probe(loader)
        with evaluation_mode(self.model), torch.no_grad():
            encoder, pullback = self.encoder(probe), self.pullback(probe)
            shown = Progress(progress, _FASTER)
            found = self._points(encoder, loader, shown)
            vectors, values = leading_eigenpairs(pullback, found, loader, self._read_inputs, self.rank, shown)
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
        """
        check_loader(loader)
        check_whole(loader)
        loader = in_fixed_order(loader)
        probe = self._probe(loader)
        with evaluation_mode(self.model), torch.no_grad():
            encoder, pullback = self.encoder(probe), self.pullback(probe)
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
        if self.pairs == "batch":
            msg = "pairs='batch': a subset of the points takes the pairs of the data set. Use pairs='dataset'."
            raise UnsupportedError(msg)
        check_loader(loader)
        check_whole(loader)
        probe = self._probe(loader)
        with evaluation_mode(self.model), torch.no_grad():
            encoder = self.encoder(probe)
            shown = Progress(progress, _FASTER)
            if not isinstance(self.loss, PairLoss):
                if self.candidates == "dataset":
                    msg = (
                        "candidates='dataset': the points that hessian_structure='gp' draws are each other's "
                        "candidates. Leave candidates out, or use 'diag', 'kron' or 'full'."
                    )
                    raise UnsupportedError(msg)
                return anchor_subset(encoder, loader, self.read_anchors, self.loss, size, seed, shown)
            found = collect_points(encoder, loader, self.read, self.loss, self.relation, shown)
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
