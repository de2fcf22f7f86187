"""An encoder with sampled weights: its outputs, with their graph, and the curvature at these weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import linear

from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.loop import DatasetCurvature, mean_norm
from contrastive_curvature.fit.mc_samples import term_of
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.module import parameter_places
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import PDFix
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.structures import Structure


class SampledEncoder(ABC):
    """Runs an encoder with sampled weights, for a training step.

    Args:
        backend: The curvature backend.
        probe: A batch of inputs, for the analysis of the encoder.
        n_data: Number N of training points.
        structure: The Hessian structure.
    """

    def __init__(self, backend: ContrastiveBackend, probe: Inputs, n_data: int, structure: type[Structure]) -> None:
        self.backend, self.n_data, self.structure = backend, n_data, structure
        self.encoder = backend.encoder(probe)

    @abstractmethod
    def outputs(self, x: Inputs, noise: list[Tensor | None]) -> Iterator[tuple[Tensor, Any]]:
        """Run the encoder at sampled weights, in its present mode.

        Args:
            x: A batch of B inputs.
            noise: For every network, the deviation from the mean weights, shape (P,), or ``None`` for the mean weights.

        Yields:
            Raw outputs (B, D), whose graph leads to the mean weights, and a context for :meth:`curvature`.
        """

    @abstractmethod
    def curvature(self, x: Inputs, z: Tensor, context: Any, targets: Tensor | None, pairs: Any) -> DatasetCurvature:
        """Return the contribution of a batch to the curvature of a data set, at sampled weights.

        Args:
            x: A batch of B inputs.
            z: Raw outputs of the batch, without a graph.
            context: The context that :meth:`outputs` has returned with ``z``.
            targets: Labels, or targets of the relation.
            pairs: Index tuples of a miner, or ``None`` for all pairs.

        Returns:
            Unclamped curvature, loss, non-negative loss, and B.
        """

    def empty(self, x: Inputs) -> Structure:
        """Return the curvature of no pairs: zeros in the right shapes."""
        pullback = self.backend.pullback(x)
        with torch.no_grad(), evaluation_mode(self.encoder):
            z, context = pullback.forward(x)
            no_pairs = torch.zeros(0, dtype=torch.int64, device="cpu")
            # Other losses may not support an empty set of pairs; the shape is the same for all losses.
            hessian = ContrastiveLoss(pd_fix=PDFix.FIXED).hessian_at(
                z, make_relation(len(z), z.device, None, (no_pairs,) * 4)
            )
            return term_of(self.structure, pullback, context, hessian)

    def _term(self, pullback: Pullback, z: Tensor, context: Any, targets: Any, pairs: Any) -> DatasetCurvature:
        loss, options = self.backend.loss, self.backend.options
        relation = loss.relate(z, targets, options.relation) if pairs is None else loss.relate(z, None, pairs)
        hessian = loss.data_hessian(z, relation, self.n_data)
        value = term_of(self.structure, pullback, context, hessian)
        # Scaled to the share of these B points in a data set of N points.
        scaled = self.backend.at_data_scale(DatasetCurvature(value, *hessian.loss_and_cost(), self.n_data))
        return replace(scaled, n=len(hessian), typical_norm=mean_norm(z))


class LastLayer(SampledEncoder):
    """Samples only the last linear layer, so that all networks share one pass through the other layers."""

    def outputs(self, x: Inputs, noise: list[Tensor | None]) -> Iterator[tuple[Tensor, Any]]:
        """Run the encoder once, and the last layer for every network; yields raw outputs (B, D) and features (B, F)."""
        layer = self.encoder.require_last_layer()
        mean, features = self.encoder.forward_with_features(x)
        size = layer.weight.numel()
        for shift in noise:
            if shift is None:
                yield mean, features.detach()
                continue
            weight = layer.weight + shift[:size].view_as(layer.weight)
            bias = None if layer.bias is None else layer.bias + shift[size:]
            yield linear(features, weight, bias), features.detach()

    def curvature(self, x: Inputs, z: Tensor, context: Any, targets: Tensor | None, pairs: Any) -> DatasetCurvature:
        """Return the contribution of a batch to the curvature, from the features in ``context``, shape (B, F)."""
        dtype = self.encoder.require_last_layer().weight.dtype
        with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
            pullback, features = self.backend.pullback(x), context.to(dtype)
            return self._term(pullback, z.to(dtype), features, targets, pairs)


class AllParameters(SampledEncoder):
    """Samples all trainable parameters."""

    def __init__(self, backend: ContrastiveBackend, probe: Inputs, n_data: int, structure: type[Structure]) -> None:
        super().__init__(backend, probe, n_data, structure)
        self._places = parameter_places(self.encoder)
        self._size = sum(p.numel() for p in self.encoder.parameters() if p.requires_grad)

    def outputs(self, x: Inputs, noise: list[Tensor | None]) -> Iterator[tuple[Tensor, Any]]:
        """Run the encoder for every network; yields raw outputs (B, D) and the deviation from the mean weights."""
        named = [(name, p) for name, p in self.encoder.named_parameters() if p.requires_grad]
        sizes = [p.numel() for _, p in named]
        if sum(sizes) != self._size:
            wanted = f"{self._size} trainable numbers, as when OnlineLaplace was created"
            hint = "Freeze or unfreeze parameters before creating OnlineLaplace, or create another one."
            raise InputError("encoder", wanted, f"{sum(sizes)} of them", hint)
        for shift in noise:
            if shift is None:
                yield self.encoder(x), None
                continue
            parts = shift.split(sizes)
            moved = {name: p + part.view_as(p) for (name, p), part in zip(named, parts, strict=True)}
            everywhere = {place: value for name, value in moved.items() for place in self._places[name]}
            # With ties by torch, a module with two names would keep the replaced tensors in the user's model.
            yield functional_call(self.encoder, everywhere, (x,), tie_weights=False), shift

    def curvature(self, x: Inputs, z: Tensor, context: Any, targets: Tensor | None, pairs: Any) -> DatasetCurvature:
        """Return the contribution of a batch to the curvature, computed in evaluation mode.

        In training mode, batch normalisation would make the output of a point depend on the whole batch, so a point
        would have no Jacobian of its own.
        """
        with (
            self._shifted(context),
            evaluation_mode(self.encoder),
            torch.no_grad(),
            torch.autocast(z.device.type, enabled=False),
        ):
            pullback = self.backend.pullback(x)
            again, inner = pullback.forward(x)
            return self._term(pullback, again, inner, targets, pairs)

    @contextmanager
    def _shifted(self, shift: Tensor | None) -> Iterator[None]:
        """Add ``shift`` to the weights, and restore the original tensors afterwards."""
        if shift is None:
            yield
            return
        trainable = [p for p in self.encoder.parameters() if p.requires_grad]
        before = [p.data for p in trainable]
        try:
            for p, part in zip(trainable, shift.split([p.numel() for p in trainable]), strict=True):
                # A new tensor instead of an in-place change, because the graph of the loss refers to the old tensor.
                p.data = p.data + part.view_as(p)
            yield
        finally:
            for p, tensor in zip(trainable, before, strict=True):
                p.data = tensor
