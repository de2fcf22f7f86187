"""The curvature of a pair loss over a data set as a curvlinops operator, coupled over all pairs and never formed.

A product is one pass over the data for ``J v``, the node-form product with the output Hessian, and one reverse pass;
for the contrastive loss its time does not depend on the number of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.fit.api import check_encoder
from contrastive_curvature.fit.passes import check_batch
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.loader import (
    check_loader,
    check_model,
    first_batch,
    in_fixed_order,
    joined_inputs,
    read_views,
)
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.structures.finite import check_finite

try:
    from curvlinops._torch_base import PyTorchLinearOperator
except ImportError as error:
    raise ImportError(
        "ContrastiveGGNLinearOperator needs curvlinops 3: pip install 'curvlinops-for-pytorch>=3.0.1'. "
        "contrastive_curvature.ggn works with any curvlinops."
    ) from error

_TANGENT_ELEMENTS = 2**25
"""Numbers that the tangents of a chunk of columns may take: 128 MiB in float32."""


class ContrastiveGGNLinearOperator(PyTorchLinearOperator):
    """``J^T H J`` over all pairs of a data set, unclamped, as a linear operator of parameters.

    It supports all of curvlinops' functions for operators: products with vectors, matrices and lists of tensors, sums
    and multiples, submatrices, trace and diagonal estimators, inverses, spectral densities, ``to_scipy()``. It uses the
    values that the parameters had at construction. ``positive`` and ``full`` also couple points of different batches.

    Args:
        model: Any module that maps a batch to (N, D); an l2-normalisation at its end is skipped. It runs in evaluation
            mode.
        loss: The loss, with the distance and the fix of its curvature.
        params: Parameters of the model that require gradients, in the order of the operator's space; ``None`` for all.
        data: Batches ``(x, labels)``, or mappings with the labels under ``dict_key_y``; the same in every pass. A
            shuffling ``DataLoader`` is read in the order of its data set. A loss of anchors also accepts two views of
            every input, and compares each anchor with all points of the data.
        pairs: Instead of class labels: index tuples or masks over all points in the order of ``data`` (labels are then
            ignored), or a callable on the labels.
        dict_key_y: Key of the labels in a mapping.
        check_deterministic: Whether to compare two products, as curvlinops does.

    Raises:
        InputTypeError: An argument has the wrong type.
        InputError: No data, parameters that are not the model's or are frozen, half precision, malformed outputs,
            labels or pairs, or other data in the second pass.
        UnsupportedError: The encoder normalises inside ``forward``.
    """

    SELF_ADJOINT = True

    def __init__(
        self,
        model: nn.Module,
        loss: CosineLoss,
        params: Sequence[nn.Parameter] | None,
        data: Iterable[Any],
        *,
        pairs: Pairs | None = None,
        dict_key_y: str = "labels",
        check_deterministic: bool = True,
    ) -> None:
        check_model(model)
        if not isinstance(loss, CosineLoss):
            raise InputTypeError("loss", "a loss of contrastive_curvature", f"a {type(loss).__name__}")
        if not isinstance(dict_key_y, str):
            raise InputTypeError("dict_key_y", "the key of the labels", f"a {type(dict_key_y).__name__}")
        check_loader(data, "data")
        data = in_fixed_order(data, "data")
        self._model, self._data, self._label_key = model, data, dict_key_y
        self._device = _only({p.device for p in model.parameters()}, "on one device")
        self._dtype = _only({p.dtype for p in model.parameters()}, "of one dtype")
        self.loss = loss
        first = first_batch(data, "data")
        with evaluation_mode(model), torch.no_grad():
            encoder = Encoder(model, self._read(first)[0], label_key=dict_key_y)
            check_encoder(encoder, loss)
            self._pullback, self._order = _take(encoder, params)
            self._pullback.keep_values()
            self.hessian = self._collect(encoder, pairs)
        shapes = [tuple(p.shape) for p in self._pullback.params.values()]
        chosen = [shapes[k] for k in self._order]
        super().__init__(chosen, chosen)
        if not check_deterministic:
            return
        v = torch.randn(self.shape[1], generator=torch.Generator().manual_seed(0), dtype=self._dtype, device="cpu").to(
            self._device
        )
        first_time, second_time = self @ v, self @ v
        if not torch.allclose(first_time, second_time, rtol=5e-5, atol=1e-6 * float(first_time.abs().max())):
            hint = "Turn off what is random in the data, or pass check_deterministic=False."
            raise InputError("data", "the same product twice", "two different ones", hint)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self._dtype

    def _matmat(self, columns: list[Tensor]) -> list[Tensor]:
        count = columns[0].shape[-1]
        by_parameter = [columns[self._order.index(k)].reshape(-1, count) for k in range(len(self._order))]
        flat = torch.cat(by_parameter).detach()
        # Use as many columns at once as the bound allows, because every chunk needs two passes over the data.
        step = max(1, _TANGENT_ELEMENTS // max(1, self.hessian.z.numel()))
        with evaluation_mode(self._model), torch.no_grad():
            parts = [self._product(chunk) for chunk in flat.split(step, dim=1)]
        pieces = torch.cat(parts, dim=1).split([p.numel() for p in self._pullback.params.values()])
        return [pieces[k].reshape(*shape, count) for k, shape in zip(self._order, self._out_shape, strict=True)]

    def _product(self, columns: Tensor) -> Tensor:
        """Return ``J^T H J v`` of the whole data set for K columns ``v``, shape (P, K)."""
        wanted, moved, start = "the same points in the same order in every pass", [], 0
        for number, x in enumerate(self._inputs()):
            z, tangents = self._pullback.jvps(x, [columns.T])
            known = self.hessian.z[start : start + len(z)]
            if known.shape != z.shape or not torch.allclose(z, known, 1e-3, 1e-5 * float(known.abs().max())):
                hint = "Every product is a pass over the data: build the loader with shuffle=False and no augmentation."
                raise InputError("data", wanted, "others", hint)
            moved.append(tangents.movedim(0, 2))
            if bool(columns.isfinite().all()) and not bool(moved[-1].isfinite().all()):
                # The Jacobian overflows; its rows show in which layer.
                axes = torch.ones_like(z).unsqueeze(1)
                rows = self._pullback.vjp(self._pullback.forward(x)[1], axes).abs().sum((0, 1))
                check_finite(rows, self._pullback, f"batch {number} (counted from 0)")
            start += len(z)
        if start != len(self.hessian.z):
            hint = "Some of the data are missing in this pass: turn drop_last off, and pass no iterator."
            raise InputError("data", f"{len(self.hessian.z)} points in every pass", str(start), hint)
        curved = self.hessian.matvec(torch.cat(moved)).split([len(part) for part in moved])
        out = torch.zeros_like(columns)
        for number, (x, part) in enumerate(zip(self._inputs(), curved, strict=True)):
            for k in range(columns.shape[1]):
                out[:, k] += self._pullback.vjp_sum(x, part[..., k])
            check_finite(out, self._pullback, f"batch {number} (counted from 0)")
        return out

    def _collect(self, encoder: Encoder, pairs: Pairs | None) -> OutputHessian:
        outputs, targets = [], []
        numbered = 0
        for number, batch in enumerate(self._data):
            x, y, numbers_inputs = self._read(batch)
            if numbers_inputs:
                # The numbers continue from batch to batch.
                y, numbered = y + numbered, numbered + input_length(x) // 2
            outputs.append(check_batch(encoder(x), "model(x)", number))
            targets.append(y)
        z = torch.cat(outputs)
        listed = pairs is not None and not callable(pairs)
        if not listed and not all(isinstance(y, Tensor) for y in targets):
            raise InputTypeError("data", "labels as tensors", "others", "Pass pairs=... without labels.")
        return self.loss.output_hessian(z, None if listed else torch.cat(targets), pairs=pairs)

    def _inputs(self) -> Iterator[Inputs]:
        for batch in self._data:
            yield self._read(batch)[0]

    def _read(self, batch: Any) -> tuple[Inputs, Any, bool]:
        """Return the inputs and labels of a batch, and whether the labels only number the inputs of two views."""
        of_points = self.loss.compares in ("pairs", "proxies")
        views = read_views(self._model, batch, self._label_key, "data", related=of_points, labelled=False)
        if views.second is None:
            return views.first, views.targets, False
        if of_points:
            raise InputTypeError("data", "batches (x, labels) or mappings", "two views of every input")
        if (self.loss.supervised or views.graded) and (views.targets is not None or views.unusable is not None):
            hint = (
                "This host takes views without labels, or (x, labels): join the views and repeat the labels of classes."
            )
            raise InputTypeError("data", "(view, view)", "two views and labels", hint)
        ids = torch.arange(input_length(views.first), device=self._device).repeat(2)
        return joined_inputs(views.first, views.second, "data"), ids, True


def _take(encoder: Encoder, params: Sequence[nn.Parameter] | None) -> tuple[ModulePullback, list[int]]:
    """Return the pullback to some parameters, and the position of each of them in it."""
    trainable = {id(p): name for name, p in encoder.named_parameters() if p.requires_grad}
    wanted = [p for p in encoder.parameters() if p.requires_grad] if params is None else list(params)
    if not wanted:
        raise InputError("params", "at least one parameter that requires a gradient", "none")
    if len({id(p) for p in wanted}) != len(wanted):
        raise InputError("params", "distinct parameters", "one of them twice")
    if any(id(p) not in trainable for p in wanted):
        hint = "Set requires_grad for those that should count."
        raise InputError("params", "parameters of the model that require gradients", "others", hint)
    pullback = ModulePullback(encoder, only={trainable[id(p)] for p in wanted})
    order = list(pullback.params)
    return pullback, [order.index(trainable[id(p)]) for p in wanted]


def _only(values: set[Any], wanted: str) -> Any:
    if len(values) != 1:
        raise InputError("model", f"parameters {wanted}", str(sorted(map(str, values))))
    return values.pop()
