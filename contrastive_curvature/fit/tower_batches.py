"""The curvature of two towers over a data set: the sum over its batches, in one pass over pairs of inputs.

The loss of a batch depends on all its outputs ``[z_a; z_b]``, so its Hessian has blocks within each tower and blocks
between the two. A posterior of one tower uses the block within that tower, including the cross terms of its points.
Only products use the blocks between the towers (:func:`towers_product`). One module for both kinds of inputs has one
set of parameters, and uses the whole Hessian.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.fit import loop
from contrastive_curvature.fit.anchors import check_compared
from contrastive_curvature.fit.loop import DatasetCurvature, Fit, Source, nothing
from contrastive_curvature.fit.passes import Passes, check_batch
from contrastive_curvature.fit.readers import check_usable
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.hessian.derivatives import CosineDerivatives, PartOfDerivatives
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.row_loss import RowLoss
from contrastive_curvature.losses.sides import joined_towers, two_towers
from contrastive_curvature.network.inputs import Inputs, input_length, is_texts
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.loader import joined_inputs, read_views
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.relation import check_labels
from contrastive_curvature.structures.finite import check_finite

_log = logging.getLogger("contrastive_curvature")

_BATCHES, _ALIKE = "batches", "batches whose inputs all belong together"
"""Names of sums over batches."""

_FORMS = "batches (a, b), ((a, b), labels), (a, b, labels) or (a, b, (labels of a, labels of b))"


class TowerBatch(NamedTuple):
    """A batch of two towers.

    Args:
        a: N inputs of the first tower.
        b: M inputs of the second tower.
        labels: Class labels of both, (N,) and (M,); ``None`` if ``a[i]`` belongs to ``b[i]``.
    """

    a: Inputs
    b: Inputs
    labels: tuple[Tensor, Tensor] | None

    @property
    def compares(self) -> bool:
        """Whether the batch has pairs to compare: more than one class or input."""
        if self.labels is None:
            return input_length(self.a) > 1
        both = torch.cat(self.labels)
        return bool((both != both[0]).any())


def read_towers(
    encoders: tuple[nn.Module, nn.Module], batch: Any, loss: RowLoss, positives: str | None = None
) -> TowerBatch:
    """Convert a batch of a loader, and move it to the device of the encoders."""
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        got = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        hint = "An encoder that takes a mapping gets one of its own: yield ({'pixel_values': ...}, {'input_ids': ...})."
        raise InputTypeError("train_loader", _FORMS, got, hint)
    if len(batch) == 3 and isinstance(batch[2], (tuple, list)):
        batch = (batch[0], batch[1], _joined_labels(batch))
    if len(batch) == 2 and isinstance(batch[0], (tuple, list)) and len(batch[0]) == 2 and _of_both(batch[1]):
        batch = (*batch[0], _joined_labels((*batch[0], batch[1])))
    views = read_views(encoders, batch)
    check_usable(views, loss, None, positives)
    second: Any = views.second
    counts = input_length(views.first), input_length(second)
    labels = views.targets
    a_pair = labels is not None and counts[0] == counts[1] == len(labels)
    if labels is None or positives == "views" or (positives is None and a_pair and not loss.supervised):
        if positives == "labels":
            raise InputError("train_loader", "(a, b, labels) for positives='labels'", "no labels")
        return TowerBatch(views.first, second, None)
    if a_pair:
        labels = torch.cat([labels, labels])
    if len(labels) != sum(counts):
        wanted = f"{sum(counts)} labels, of {counts[0]} inputs of the first tower and then of {counts[1]} of the second"
        if counts[0] == counts[1]:
            wanted = f"{counts[0]} labels, one a pair"
        raise InputError("train_loader", wanted, len(labels))
    labels = check_labels(labels, sum(counts))
    return TowerBatch(views.first, second, (labels[: counts[0]], labels[counts[0] :]))


def _of_both(labels: Any) -> bool:
    """Return whether these are the labels of each tower."""
    return isinstance(labels, (tuple, list)) and any(isinstance(part, Tensor) for part in labels)


def _joined_labels(batch: Any) -> Tensor:
    """Concatenate the labels of both towers."""
    a, b, labels = batch
    if len(labels) != 2 or not all(isinstance(part, Tensor) and part.ndim == 1 for part in labels):
        got = f"a {type(labels).__name__} of {len(labels)}, not two tensors"
        hint = "One label a pair is a tensor (N,), too."
        raise InputTypeError("train_loader", "(labels of a, labels of b), tensors (N,) and (M,)", got, hint)
    for name, x, part in zip("ab", (a, b), labels, strict=True):
        n = len(x) if is_texts(x) else input_length(x) if isinstance(x, (Tensor, Mapping)) else len(part)
        if len(part) != n:
            raise InputError("train_loader", f"{n} labels of {name}", len(part))
    return torch.cat([labels[0], labels[1].to(labels[0].device)])


class TowerReader(NamedTuple):
    """A loader, and a function that converts its batches."""

    loader: Iterable[Any]
    read: Callable[[Any], TowerBatch]


def parts(f: Fit, pairs: Any, passes: Passes) -> Iterator[Part | Total]:
    """Yield the Hessian of every batch within each tower; the candidates are outputs of the other tower."""
    del pairs
    reader = cast("TowerReader", passes.reader)
    for number, raw in enumerate(f.progress.over(reader.loader, "[curvature]")):
        batch = reader.read(raw)
        z_a, z_b, contexts = _outputs(f.pullbacks, batch)
        z, first, whole = _derivatives(cast("RowLoss", f.options.loss), z_a, z_b, batch, number)
        node_sums = whole.node_sums()
        ranges = [slice(0, first), slice(first, len(z))] if len(contexts) == 2 else [slice(0, len(z))]
        labels = None if batch.labels is None else torch.cat(batch.labels)
        for tower, (context, rows) in enumerate(zip(contexts, ranges, strict=True)):
            hessian = f.options.loss.hessian_of(z[rows], PartOfDerivatives(whole, rows, node_sums))
            part = Part.of_batch(hessian, context, None if labels is None else labels[rows], tower)
            counts = {
                _BATCHES: torch.tensor(1, device="cpu"),
                _ALIKE: torch.tensor(int(not batch.compares), device="cpu"),
            }
            yield part._replace(terms={**part.terms, **counts})


def closed(f: Fit, pairs: Any, totals: list[Total]) -> list[DatasetCurvature]:
    """Return the sum over all batches for each tower, with equal shares of the loss."""
    check_compared(totals[0])
    batches, alike = int(totals[0].terms[_BATCHES]), int(totals[0].terms[_ALIKE])
    if alike == batches:
        hint = "An anchor is told apart from the inputs of its batch that do not belong to it: use larger batches."
        got = f"{batches} batches whose inputs all belong together"
        raise InputError("train_loader", "batches of two pairs or more", got, hint)
    if alike:
        _log.info("%d of %d batches had no inputs that belong together less than others", alike, batches)
    curvatures = loop.closed(f, pairs, totals)
    return [replace(one, loss=one.loss / len(totals), cost=one.cost / len(totals)) for one in curvatures]


TOWERS = Source(nothing, nothing, parts, closed)


def towers_product(
    pullbacks: Sequence[Pullback],
    reader: TowerReader,
    loss: RowLoss,
    vectors: Sequence[Tensor],
) -> list[Tensor]:
    """Return ``J^T H J v`` over a data set, with the blocks between the towers; no matrix is formed."""
    out = [torch.zeros_like(v) for v in vectors]
    # A shared module has one set of parameters for both kinds of inputs.
    of_a, of_b = 0, len(pullbacks) - 1
    for number, raw in enumerate(reader.loader):
        batch = reader.read(raw)
        z_a, moved_a = pullbacks[of_a].jvp(batch.a, vectors[of_a])
        z_b, moved_b = pullbacks[of_b].jvp(batch.b, vectors[of_b])
        z, first, whole = _derivatives(loss, z_a, z_b, batch, number)
        curved = loss.hessian_of(z, whole).matvec(torch.cat([moved_a, moved_b]))
        out[of_a] += pullbacks[of_a].vjp_sum(batch.a, curved[:first])
        out[of_b] += pullbacks[of_b].vjp_sum(batch.b, curved[first:])
        for pullback, part in zip(pullbacks, out, strict=True):
            check_finite(part, pullback, f"batch {number} (counted from 0)")
    return out


def _outputs(pullbacks: Sequence[Pullback], batch: TowerBatch) -> tuple[Tensor, Tensor, list[Any]]:
    """Return raw outputs of both towers, and the contexts of the pullbacks."""
    if len(pullbacks) == 2 or isinstance(pullbacks[0], LastLayerPullback):
        z_a, context_a = pullbacks[0].forward(batch.a)
        z_b, context_b = pullbacks[-1].forward(batch.b)
        contexts = [context_a, context_b] if len(pullbacks) == 2 else [torch.cat([context_a, context_b])]
        return z_a, z_b, contexts
    x = joined_inputs(batch.a, batch.b)
    z, context = pullbacks[0].forward(x)
    first = input_length(batch.a)
    return z[:first], z[first:], [context]


def _derivatives(
    loss: RowLoss, z_a: Tensor, z_b: Tensor, batch: TowerBatch, number: int
) -> tuple[Tensor, int, CosineDerivatives]:
    """Return outputs of both towers, the number of outputs of the first, and the derivatives in the cosines."""
    z_a, z_b = check_batch(z_a, "encoder_a(a)", number), check_batch(z_b, "encoder_b(b)", number)
    z, relation, first = joined_towers(z_a, z_b, batch.labels)
    sides = two_towers(first, len(z), loss.directions)
    return z, first, loss.derivatives(relation, normalize(z)[0], sides=sides, as_data=True)
