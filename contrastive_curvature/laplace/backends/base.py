"""What all adapters share: laplace-torch's curvature interface on top of a pullback.

An adapter says how its host pulls the output Hessian back to all parameters of a network
(:meth:`ContrastiveBackend.all_parameters`); subnetworks, last layers, data sets and batches follow from that.

The host's contract: ``diag``, ``full`` and ``kron`` take a batch and return ``(loss, curvature)``, both summed over
what the batch stands for in a data set of ``N`` points; Jacobians are (batch, outputs, parameters). ``diag`` and
``full`` are exact. A data set's pairs do not fall apart into batches, so the contrastive Laplace classes call
:meth:`ContrastiveBackend.fit` instead.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from laplace.curvature.curvature import GGNInterface
from laplace.utils import Kron
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.accumulate import per_point
from contrastive_curvature.fit.anchors import AnchorBatch, anchors_curvature
from contrastive_curvature.fit.api import check_encoder, check_trainable
from contrastive_curvature.fit.batches import batch_curvature
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.options import CurvatureOptions
from contrastive_curvature.fit.views import as_anchors
from contrastive_curvature.laplace.advice import LabelRange
from contrastive_curvature.laplace.backends.fits import DatasetFits
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, slice_inputs, tokenized_batch
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.loader import Views, check_model, has_views, read_batch, read_views
from contrastive_curvature.network.module import SubnetworkPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.network.sketch import sketch_size
from contrastive_curvature.options import Structure

__all__ = ["ContrastiveBackend"]


class ContrastiveBackend(DatasetFits, GGNInterface, ABC):
    """Generalised Gauss-Newton of the contrastive loss, for laplace-torch.

    Args:
        model: The encoder, or laplace's feature extractor around it.
        likelihood: ``"contrastive"``.
        last_layer: Only the last linear layer.
        subnetwork_indices: Entries of the flattened trainable parameters, or ``None``.
        dict_key_x: Not used; a mapping is given to the model whole.
        dict_key_y: Where a mapping keeps the labels.
        loss: A loss (:mod:`contrastive_curvature.losses`); ``None`` takes the contrastive one with ``margin``,
            ``negative_weight`` and ``normalization``.
        distance: See :class:`~contrastive_curvature.options.Distance`; with a ``loss``, by default its own.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`; with a ``loss``, by default its own.
        margin: See :class:`~contrastive_curvature.ContrastiveLoss`.
        negative_weight: See :class:`~contrastive_curvature.ContrastiveLoss`.
        normalization: See :class:`~contrastive_curvature.ContrastiveLoss`.
        pairs: ``"dataset"``: exact over all pairs of the data set. ``"batch"``: only pairs inside a batch, rescaled.
        candidates: Of a loss of anchors (:class:`~contrastive_curvature.losses.rows.RowLoss`): ``"batch"``, the
            default, sums over batches as they are, as in training, in one pass; ``"dataset"`` compares an anchor with
            all points.
        negatives_per_anchor: With ``candidates="dataset"``: how many negatives an anchor had in training, so that all
            N - 1 together make the comparison as hard as those; ``None`` counts each fully.
        positives: Where a loader has two views of every input, and labels: ``"views"`` of one input belong together, or
            inputs with the same of the ``"labels"``; ``None``: labels for losses of classes, views for the others.
        relation: Instead of class labels, a callable on the loader's targets that returns two boolean masks.
        rank: Number of eigenpairs of the structure ``lowrank``, or of eigenvectors that ``kron_lowrank`` keeps of the
            input factor, there ``None`` to choose it from the spectrum.
        kfac_approx: How the Kronecker structure treats the two points of a pair, see
            :class:`~contrastive_curvature.options.KFACApprox`; all but ``"expand"`` need ``pairs="batch"``.
        negative_samples: Number M of points, drawn uniformly, that stand for all negatives: a price of N M instead of
            N^2 (``docs/large_data.md``). ``None`` counts all pairs. ``"auto"``, the default, counts all pairs of fewer
            than 30,000 points, and takes 2,000 from there on, where the fix and the structure have no cross terms or
            products with all pairs; the log says which it was. For class labels, with
            ``pairs="dataset"`` or ``candidates="dataset"``; the relative standard error of the curvature is reported.
        mc_samples: ``None``: exact. K: an unbiased estimate of the structures ``diag`` and ``kron`` from K random
            backward passes, see :func:`contrastive_curvature.ggn`; the same samples at every fit.
        options: All of these, parsed; those that are given by name besides it replace its own.

    Raises:
        InputError: An option is unknown or out of range.
    """

    keeps_graph: ClassVar[bool] = False
    """Whether Jacobians can be differentiated once more."""

    sketches_inputs: bool = False
    """Whether the input factor of a last layer's Kronecker pair is a sketch; a posterior of low rank asks for it."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = "contrastive",
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        options: CurvatureOptions | None = None,
        **given: Any,
    ) -> None:
        check_model(model, half=last_layer)
        if options is None or given:
            options = CurvatureOptions.parse(given if options is None else {**options.named(), **given})
        self.options, self.loss = options, options.loss
        # The host knows no contrastive likelihood; what it derives from the name is replaced below.
        super().__init__(model, "regression", last_layer, subnetwork_indices, dict_key_x, dict_key_y)
        self.likelihood = likelihood
        self.lossfunc = self.loss
        self.factor = 1.0
        self.labels_seen = LabelRange()
        self._encoder: Encoder | None = None

    def encoder(self, probe: Inputs) -> Encoder:
        """The analysed encoder; analysed at the first call.

        Args:
            probe: A batch to run once.

        Returns:
            The encoder.
        """
        if self._encoder is None:
            model = self.model
            few = slice_inputs(probe, slice(0, 8))
            encoder = model.encoder if self.last_layer else Encoder(model, few, label_key=self.dict_key_y)
            check_encoder(encoder, self.loss)
            self._encoder = encoder
        return self._encoder

    @abstractmethod
    def all_parameters(self, encoder: Encoder) -> Pullback:
        """The host's pullback to all trainable parameters of an encoder.

        Args:
            encoder: The analysed encoder, in evaluation mode.

        Returns:
            The pullback, at the parameters' present values.

        Raises:
            UnsupportedError: The host cannot differentiate a layer of it; the message names the layer, and
                :class:`~contrastive_curvature.laplace.backends.ContrastiveGGN`, which can.
        """

    def subnetwork_parameters(self, encoder: Encoder, indices: Tensor) -> Pullback:
        """The host's pullback to some entries of the parameters."""
        return SubnetworkPullback(self.all_parameters(encoder), indices)

    def pullback(self, probe: Inputs) -> Pullback:
        """The pullback to this backend's parameters, at their present values."""
        encoder = self.encoder(probe)
        if self.last_layer:
            # One linear layer has closed forms, which leave nothing to a host.
            width = encoder.require_last_layer().in_features
            return LastLayerPullback(encoder, sketch_size(width, self.options.rank) if self.sketches_inputs else None)
        check_trainable(encoder)
        if self.subnetwork_indices is None:
            return self.all_parameters(encoder)
        return self.subnetwork_parameters(encoder, self.subnetwork_indices.to(next(encoder.parameters()).device))

    def diag(self, x: Inputs, y: Tensor, N: int | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Loss and unclamped diagonal (P,) that a batch adds to the estimate for N points."""
        return self._batch(x, y, N, Structure.DIAG)

    def full(self, x: Inputs, y: Tensor, N: int | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Loss and unclamped matrix (P, P) that a batch adds to the estimate for N points."""
        return self._batch(x, y, N, Structure.FULL)

    def kron(self, x: Inputs, y: Tensor, N: int | None = None, **kwargs: Any) -> tuple[Tensor, Kron]:
        """Loss and Kronecker factors that a batch adds to the estimate for N points."""
        loss, factors = self._batch(x, y, N, Structure.KRON)
        return loss, Kron(factors)

    def jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Jacobians (B, D, P) of the raw outputs with respect to this backend's parameters, and the outputs (B, D)."""
        if enable_backprop and not self.keeps_graph:
            msg = f"enable_backprop=True: {type(self).__name__} keeps no graph. Use backend=ContrastiveGGN."
            raise UnsupportedError(msg)
        with evaluation_mode(self.model), torch.set_grad_enabled(enable_backprop):
            encoder, pullback = self.encoder(x), self.pullback(x)
            context: Any = x
            if isinstance(pullback, LastLayerPullback):
                z, context = encoder.features(x)
            else:
                z = encoder(x)
            axes = torch.eye(z.shape[1], dtype=z.dtype, device=z.device).expand(z.shape[0], -1, -1)
            return pullback.vjp(context, axes), z

    def last_layer_jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """The same as :meth:`jacobians`, which already knows whether this is a last-layer backend."""
        return self.jacobians(x, enable_backprop)

    def gradients(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        """Refused: a pair loss has no gradient per point.

        Raises:
            UnsupportedError: Always.
        """
        msg = "gradients: a loss of pairs has no gradient per point. Use diag, full or kron."
        raise UnsupportedError(msg)

    def read_anchors(self, batch: Any) -> AnchorBatch:
        """Take apart what a loader yields for a loss of anchors; see :func:`read_views`."""
        device, related = next(self.model.parameters()).device, self.options.relation is not None
        batch = tokenized_batch(self.model, batch)
        views = read_views(batch, device, self.dict_key_y, related=related)
        found = as_anchors(views, self.loss, self.options.relation, self.options.positives)
        self.labels_seen.note(found.classes)
        return found

    def read(self, batch: Any) -> tuple[Inputs, Tensor]:
        """Take apart what a loader yields, and bring it to the model's device; see :func:`read_batch`."""
        batch = tokenized_batch(self.model, batch)
        if has_views(batch) and self.options.relation is None and not isinstance(self.loss, PairLoss):
            msg = "loader: batches of two views. This needs labelled points: yield (x, labels)."
            raise UnsupportedError(msg)
        if has_views(batch) and self.options.relation is None:
            msg = (
                f"train_loader: batches of two views, and {type(self.loss).__name__} is a loss of labelled points. Use "
                "backend_kwargs=dict(loss=contrastive_curvature.InfoNCELoss()) for views without labels, or yield "
                "(x, labels)."
            )
            raise UnsupportedError(msg)
        x, y = read_batch(batch, next(self.model.parameters()).device, self.dict_key_y)
        if self.options.relation is None:
            self.labels_seen.note(y)
        return x, y

    def identity(self, structure: Structure) -> dict[str, str]:
        """See :meth:`DatasetFits.identity`."""
        names = ("pairs", "candidates", "negatives_per_anchor", "positives", "rank", "mc_samples", "negative_samples")
        options: dict[str, Any] = {name: getattr(self.options, name) for name in names}
        indices = self.subnetwork_indices
        weights = "last layer" if self.last_layer else "all"
        if indices is not None:
            digest = hashlib.sha256(indices.cpu().numpy().tobytes()).hexdigest()[:16]
            weights = f"subnetwork of {indices.numel()} ({digest})"
        return {
            "encoder": encoder_digest(self.model),
            "weights": weights,
            "structure": f"{structure}{' with a sketch of the inputs' if self.sketches_inputs else ''}",
            "loss": " ".join(repr(self.loss).split()),
            "options": str(
                {**options, "relation": self.options.relation is not None, "kfac_approx": str(self.options.kfac_approx)}
            ),
        }

    def _batch(self, x: Inputs, y: Tensor, n_data: int | None, structure: Structure) -> tuple[Tensor, Any]:
        with evaluation_mode(self.model), torch.no_grad():
            pullback = self.pullback(x)
            n_data = y.shape[0] if n_data is None else n_data
            if not isinstance(self.loss, PairLoss):
                return self._anchor_batch(pullback, x, y, n_data, structure)
            term = batch_curvature(
                pullback,
                x,
                y,
                self.loss,
                structure,
                n_data,
                relation=self.options.relation,
                kfac_approx=self.options.kfac_approx,
                sampler=self.sampler(structure),
            )
            check_finite(term.curvature, pullback, "this batch")
        scaled = self.at_data_scale(term)
        return scaled.loss, scaled.curvature

    def _anchor_batch(
        self, pullback: Pullback, x: Inputs, y: Tensor, n_data: int, structure: Structure
    ) -> tuple[Tensor, Any]:
        given = as_anchors(Views(x, None, y), self.loss, self.options.relation, self.options.positives)
        approx, sampler = self.options.kfac_approx, self.sampler(structure)
        term = anchors_curvature(
            pullback, [given], lambda batch: batch, self.loss, structure, None, approx, sampler, whole=False
        )
        if structure is Structure.KRON:
            # Of N points, of which others come in other batches.
            return term.loss, per_point(term.curvature, n_data / term.n)
        return term.loss, term.curvature
