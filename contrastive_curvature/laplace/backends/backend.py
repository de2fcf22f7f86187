"""The common base of all adapters: laplace-torch's curvature interface on top of a pullback.

An adapter defines how its host pulls the output Hessian back to all parameters of a network
(:meth:`ContrastiveBackend.all_parameters`). Subnetworks, last layers, data sets and batches are built on this method.

The host's contract: ``diag``, ``full`` and ``kron`` take a batch and return ``(loss, curvature)``, both scaled to the
batch's share of a data set of ``N`` points; Jacobians are (batch, outputs, parameters). ``diag`` and ``full`` are
exact. The pairs of a data set cannot be split into batches, so the contrastive Laplace classes call
:meth:`ContrastiveBackend.fit` instead.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch
from laplace.curvature.curvature import GGNInterface
from laplace.utils import Kron as HostKron
from torch import Tensor, nn
from torch.autograd import forward_ad
from typing_extensions import override

from contrastive_curvature.errors import InputTypeError, UnsupportedError
from contrastive_curvature.fit.anchors import ANCHORS
from contrastive_curvature.fit.api import check_encoder, check_trainable, make_pullback
from contrastive_curvature.fit.batches import BATCHES
from contrastive_curvature.fit.curvature_options import CurvatureOptions
from contrastive_curvature.fit.dataset import DATASET, refuse_cross_terms_in_parts
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, Slope, fit
from contrastive_curvature.fit.mc_samples import make_sampler, term_of
from contrastive_curvature.fit.part_state import CURVATURE, STATISTICS, Origin, State, check_identity, digest_of
from contrastive_curvature.fit.passes import Passes
from contrastive_curvature.fit.processes import curvature_of, finish_parts, statistics_of
from contrastive_curvature.fit.readers import Batch, Reader, as_batch, labelled_batch
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.laplace.advice import LabelRange
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.last_layer import LastLayerPullback, sketch_size
from contrastive_curvature.network.loader import (
    Views,
    check_loader,
    check_model,
    first_batch,
    in_fixed_order,
    read_views,
)
from contrastive_curvature.network.module import SubnetworkPullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures import Dense, Diagonal, Kron, Structure
from contrastive_curvature.structures.finite import check_finite

_S = TypeVar("_S", bound=Structure)


class ContrastiveBackend(GGNInterface, ABC):
    """Generalised Gauss-Newton of the contrastive loss, for laplace-torch.

    Args:
        model: The encoder; for a last layer, an analysed :class:`contrastive_curvature.network.encoder.Encoder`.
        likelihood: ``"contrastive"``.
        last_layer: Whether to use only the last linear layer.
        subnetwork_indices: Entries of the flattened trainable parameters, or ``None``.
        dict_key_x: Not used; the model receives the whole mapping.
        dict_key_y: Key of the labels in a mapping.
        loss: A loss (:mod:`contrastive_curvature.losses`); ``None``: the contrastive loss with ``margin``,
            ``negative_weight`` and ``normalization``.
        distance: See :class:`~contrastive_curvature.options.Distance`; with a ``loss``, by default its own.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`; with a ``loss``, by default its own.
        margin: See :class:`~contrastive_curvature.ContrastiveLoss`.
        negative_weight: See :class:`~contrastive_curvature.ContrastiveLoss`.
        normalization: See :class:`~contrastive_curvature.ContrastiveLoss`.
        pairs: For a loss of pairs: ``"dataset"``, exact over all pairs of the data set, or ``"batch"``, only pairs
            inside a batch, rescaled. Losses of anchors compare within batches, as in training.
        positives: For a loader with two views of every input and labels. ``"views"``: the views of one input are
            positives; ``"labels"``: inputs with equal labels are positives; ``None``: labels for losses of classes,
            views for other losses.
        relation: A callable that replaces class labels: it maps the loader's targets to two boolean masks.
        rank: Number of eigenvectors of the input factor that ``kron_lowrank`` keeps; ``None`` chooses it from the
            spectrum.
        negative_samples: Number M of uniformly drawn points that replace all negatives: N M pairs instead of N^2
            (``docs/large_data.md``). ``None`` counts all pairs. ``"auto"``, the default, draws 2,000 for 30,000 points
            or more, if the fix and the structure have no cross terms. Only for class labels
            and a loss of pairs, with ``pairs="dataset"``.
        mc_samples: ``None``: exact. K: an unbiased estimate of the structures ``diag`` and ``kron`` from K random
            backward passes, see :func:`contrastive_curvature.ggn`; every fit uses the same samples.
        options: All options above, parsed; an option passed by name replaces the value in here.

    Raises:
        InputError: An option is unknown or out of range.
    """

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
        # The host does not know the contrastive likelihood; the lines below replace the attributes that it derives from
        # the name.
        super().__init__(model, "regression", False, subnetwork_indices, dict_key_x, dict_key_y)
        # The last layer may still be unknown, but the host would ask for its parameters.
        self.likelihood, self.last_layer = likelihood, last_layer
        self.lossfunc = self.loss
        self.factor = 1.0
        self.labels_seen = LabelRange()
        self._encoder: Encoder | None = None

    def encoder(self, probe: Inputs) -> Encoder:
        """Return the encoder, analysed with a batch at the first call."""
        if self._encoder is None:
            model = self.model
            encoder = model if isinstance(model, Encoder) else Encoder(model, probe, label_key=self.dict_key_y)
            check_encoder(encoder, self.loss)
            self._encoder = encoder
        return self._encoder

    @abstractmethod
    def all_parameters(self, encoder: Encoder) -> Pullback:
        """Return the host's pullback to all trainable parameters of an encoder.

        Args:
            encoder: The analysed encoder, in evaluation mode.

        Returns:
            The pullback, at the parameters' present values.

        Raises:
            UnsupportedError: The host cannot differentiate a layer of the encoder; the message names the layer, and
                recommends :class:`~contrastive_curvature.laplace.backends.ContrastiveGGN`.
        """

    def subnetwork_parameters(self, encoder: Encoder, indices: Tensor) -> Pullback:
        """Return the host's pullback to some entries of the parameters."""
        return SubnetworkPullback(self.all_parameters(encoder), indices)

    def pullback(self, probe: Inputs) -> Pullback:
        """Return the pullback to this backend's parameters, at their present values."""
        encoder = self.encoder(probe)
        if self.last_layer:
            # One linear layer has closed forms, so no host is needed.
            width = encoder.require_last_layer().in_features
            return LastLayerPullback(encoder, sketch_size(width, self.options.rank) if self.sketches_inputs else None)
        check_trainable(encoder)
        if self.subnetwork_indices is None:
            return self.all_parameters(encoder)
        return self.subnetwork_parameters(encoder, self.subnetwork_indices.to(next(encoder.parameters()).device))

    def diag(self, x: Inputs, y: Tensor, N: int | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and unclamped diagonal (P,) that a batch adds to the estimate for N points."""
        loss, curvature = self._batch(x, y, N, Diagonal)
        return loss, curvature.plain()

    def full(self, x: Inputs, y: Tensor, N: int | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and unclamped matrix (P, P) that a batch adds to the estimate for N points."""
        loss, curvature = self._batch(x, y, N, Dense)
        return loss, curvature.plain()

    def kron(self, x: Inputs, y: Tensor, N: int | None = None, **kwargs: Any) -> tuple[Tensor, HostKron]:
        """Return loss and Kronecker factors that a batch adds to the estimate for N points."""
        loss, curvature = self._batch(x, y, N, Kron)
        # The host adds up means over all points, so each batch divides by all of them.
        whole = curvature.points.new_tensor(len(y) if N is None else N)
        return loss, HostKron(replace(curvature, points=whole).plain())

    def jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return Jacobians (B, D, P) of the raw outputs in this backend's parameters, and the outputs (B, D)."""
        with evaluation_mode(self.model), torch.set_grad_enabled(enable_backprop):
            encoder = self.encoder(x)
            if enable_backprop:
                # Jacobians of a host keep no graph, torch's own do.
                weights = "all" if self.subnetwork_indices is None else self.subnetwork_indices
                pullback = make_pullback(encoder, "last_layer" if self.last_layer else weights)
            else:
                pullback = self.pullback(x)
            context: Any = x
            if isinstance(pullback, LastLayerPullback):
                z, context = encoder.forward_with_features(x)
            else:
                z = encoder(x)
            axes = torch.eye(z.shape[1], dtype=z.dtype, device=z.device).expand(z.shape[0], -1, -1)
            return pullback.vjp(context, axes), z

    def last_layer_jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Call :meth:`jacobians`, which handles last-layer backends too."""
        return self.jacobians(x, enable_backprop)

    def gradients(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse: a pair loss has no gradient per point.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("gradients: a loss of pairs has no gradient per point. Use diag, full or kron.")

    def read(self, batch: Any) -> tuple[Inputs, Tensor]:
        """Split a batch ``(x, labels)`` or a mapping into inputs and labels, on the model's device."""
        x, targets = self._labelled(batch)
        return x, targets.to(next(self.model.parameters()).device)

    def _labelled(self, batch: Any) -> tuple[Inputs, Tensor]:
        """Split a batch into inputs on the model's device, and labels where the loader has them."""
        related = self.options.relation is not None
        views = read_views(self.model, batch, self.dict_key_y, related=related)
        if views.second is not None or views.targets is None:
            if related:
                raise InputTypeError("train_loader", "batches (x, labels) or mappings", "two views of every input")
            if self.loss.compares != "pairs":
                raise UnsupportedError("loader: batches of two views. This needs labelled points: yield (x, labels).")
            raise UnsupportedError(
                f"train_loader: batches of two views, and {type(self.loss).__name__} is a loss of labelled points. Use "
                "backend_kwargs=dict(loss=contrastive_curvature.InfoNCELoss()) for views without labels, or yield "
                "(x, labels)."
            )
        if not related:
            self.labels_seen.note(views.targets)
        return views.first, views.targets

    def points_of(self, batch: Any) -> Batch:
        """Convert a batch of a loader into the form that the loss needs."""
        if self.loss.compares == "pairs":
            return labelled_batch(*self._labelled(batch), self.options.relation)
        views = read_views(self.model, batch, self.dict_key_y, related=self.options.relation is not None)
        points = as_batch(views, self.loss, self.options.relation, self.options.positives)
        self.labels_seen.note(points.classes)
        return points

    def identity(self, structure: type[Structure]) -> dict[str, str]:
        """Return the identity that all parts of one fit share: the encoder and all options."""
        options = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        # The loss has its own entry below; passing it by name or as an object gives the same curvature.
        del options["loss"], options["given_loss"]
        # A function has no text that processes could compare.
        options["relation"] = self.options.relation is not None
        indices = self.subnetwork_indices
        weights = "last layer" if self.last_layer else "all"
        if indices is not None:
            digest = hashlib.sha256(indices.cpu().numpy().tobytes()).hexdigest()[:16]
            weights = f"subnetwork of {indices.numel()} ({digest})"
        return {
            "encoder": encoder_digest(self.model),
            "weights": weights,
            "structure": structure.name,
            "loss": self.loss.description,
            "options": str({name: str(value) for name, value in options.items()}),
        }

    def fit(self, loader: Iterable[Any], structure: type[Structure], progress: bool | None = None) -> DatasetCurvature:
        """Return the unclamped curvature of a data set, times its scale.

        Args:
            loader: Batches ``(x, labels)`` or mappings.
            structure: Structure of the curvature.
            progress: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            Curvature, loss and number of points. With ``normalization="type"``, a mean over pairs, curvature and loss
            are multiplied by N / 2, so that they grow with the data; for classes of equal size this equals
            ``"anchor"``.

        Raises:
            InputError: See :meth:`~contrastive_curvature.laplace.posterior.ContrastiveLaplace.fit`.
        """
        out = self._fitted(loader, structure, progress)
        slopes = tuple(self._slope(name, loader, structure, progress) for name in self.loss.with_gradient())
        return replace(out, slopes=slopes)

    def _fitted(self, loader: Iterable[Any], structure: type[Structure], progress: bool | None) -> DatasetCurvature:
        with self._ready(loader) as (encoder, pullback):
            f = self._fit(pullback, structure, Progress(progress))
            (out,) = fit(f, Passes(self._reader(loader), encoder, pullback))
        return self.at_data_scale(out)

    def _slope(self, name: str, loader: Iterable[Any], structure: type[Structure], progress: bool | None) -> Slope:
        """Return the derivatives of a fit in one number of the loss, by a fit in forward mode."""
        # Not by a graph: it would hold every batch of the fit.
        number, other = self.loss.with_gradient()[name], copy.copy(self)
        with forward_ad.dual_level():
            other.loss = self.loss.with_number(name, forward_ad.make_dual(number.detach(), torch.ones_like(number)))
            other.options = replace(self.options, loss=other.loss)
            out = other._fitted(loader, structure, progress)
            return Slope(number, _tangent(out.loss), out.curvature.map(_tangent))

    def fit_part(
        self,
        loader: Iterable[Any] | None,
        structure: type[Structure],
        part: tuple[int, int],
        statistics: State | None,
        progress: bool | None,
    ) -> State:
        """Run the first pass over a part of the data, or the second pass if ``statistics`` of all parts are passed.

        ``loader`` is ``None`` for a part without points.
        """
        identity = self.identity(structure)
        if statistics is not None:
            check_identity(statistics, identity)
            identity = {**identity, "statistics": digest_of(statistics)}
        if loader is None:
            kind = STATISTICS if statistics is None else CURVATURE
            return State(kind, identity, {part[0]: Origin(0, 0, 0.0, 0.0)}, part[1])
        with self._ready(loader, shares=True) as (encoder, pullback):
            f = self._fit(pullback, structure, Progress(progress), part)
            refuse_cross_terms_in_parts(f)
            passes = Passes(self._reader(loader, part[0]), encoder, pullback, records=True)
            if statistics is None:
                return statistics_of(f, passes, identity)
            return curvature_of(f, passes, identity, statistics.to(next(encoder.parameters()).device))

    def fit_of_parts(
        self, structure: type[Structure], statistics: State, curvature: State, probe: Inputs
    ) -> DatasetCurvature:
        """Return the curvature of a data set from the states of :meth:`fit_part` for all its parts."""
        identity = self.identity(structure)
        check_identity(statistics, identity)
        check_identity(curvature, {**identity, "statistics": digest_of(statistics)})
        with evaluation_mode(self.model), torch.no_grad():
            encoder, pullback = self.encoder(probe), self.pullback(probe)
            device = next(encoder.parameters()).device
            f = self._fit(pullback, structure, Progress(False), (0, statistics.count))
            out = finish_parts(f, statistics.to(device), curvature.to(device))
        return self.at_data_scale(out)

    def _batch(self, x: Inputs, y: Tensor, n_data: int | None, structure: type[_S]) -> tuple[Tensor, _S]:
        """Return loss and curvature of a batch, scaled to its share of a data set of ``n_data`` points."""
        options, loss = self.options, self.loss
        with evaluation_mode(self.model), torch.no_grad():
            pullback = self.pullback(x)
            n_data = y.shape[0] if n_data is None else n_data
            z, context = pullback.forward(x)
            z = check_outputs(z, "model(x)")
            batch = as_batch(Views(x, None, y), loss, options.relation, options.positives)
            hessian = loss.data_hessian(z, loss.relate(z, batch.labels, batch.pairs), n_data)
            self.options.check_structure(structure)
            curvature = term_of(structure, pullback, context, hessian, make_sampler(self.options.mc_samples))
            check_finite(curvature.plain(), pullback, "this batch")
            scaled = self.at_data_scale(DatasetCurvature(curvature, *hessian.loss_and_cost(), n_data))
        curvature = cast("_S", scaled.curvature)
        return scaled.loss, curvature

    def _fit(
        self, pullback: Pullback, structure: type[Structure], progress: Progress, part: tuple[int, int] = (0, 1)
    ) -> Fit:
        """Return the fit that the options define."""
        self.options.check_structure(structure)
        of_batches = BATCHES if self.loss.compares == "pairs" else ANCHORS
        source = DATASET if self.options.over_dataset else of_batches
        return Fit(source, [pullback], structure, self.options, progress, part)

    def _reader(self, loader: Any, part: int = 0) -> Reader:
        return Reader(in_fixed_order(loader, mixed=not self.options.over_dataset), self.points_of, part)

    @contextmanager
    def _ready(self, loader: Iterable[Any], *, shares: bool = False) -> Iterator[tuple[Encoder, Pullback]]:
        """Yield the encoder in evaluation mode, and the pullback; for ``shares`` see ``check_loader``."""
        check_loader(loader, shares=shares)
        probe = {} if self._encoder is not None else self.points_of(first_batch(loader)).x
        with evaluation_mode(self.model), torch.no_grad():
            yield self.encoder(probe), self.pullback(probe)

    def at_data_scale(self, out: DatasetCurvature) -> DatasetCurvature:
        """Multiply by N / 2 if the loss is a mean over pairs, so that it grows with the data; see :meth:`fit`."""
        scale = self.loss.data_scale(out.n)
        return replace(out, curvature=out.curvature.scaled(scale), loss=scale * out.loss, cost=scale * out.cost)


class ContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of a pair loss through any module, by torch alone; see :class:`ContrastiveBackend`."""

    @override
    def all_parameters(self, encoder: Encoder) -> Pullback:
        return make_pullback(encoder, "all")

    def subnetwork_parameters(self, encoder: Encoder, indices: Tensor) -> Pullback:
        """Return a pullback that differentiates only the parameters with chosen entries."""
        return make_pullback(encoder, indices)


def _tangent(value: Tensor) -> Tensor:
    """Return the derivative that a tensor of a fit in forward mode has; zero without one."""
    tangent = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if tangent is None else tangent
