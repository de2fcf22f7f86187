"""The effect of a training item on the answer to a query, for losses that couple points.

Without item k the loss loses every term in which k stands, and counts, shares and denominators change with it. With
``g_k``, the gradient of ``L - L_without_k`` at the trained weights, the weights would move by ``(H + prior)^-1 g_k``.
The classical formula (Koh and Liang, 2017) takes only the item's own term. No matrix of N by P numbers is formed: the
inverse is applied to the gradients of the queries, the result is pushed forward to the outputs of the training points,
and multiplied there with the gradients of the loss.

:func:`without` forgets items: it fits the rest, and on request moves the last layer by one Newton step.
``docs/influence.md`` compares the predictions with retraining.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit.curvature_options import CurvatureOptions
from contrastive_curvature.fit.readers import Batch, Reader
from contrastive_curvature.fit.share import Rest
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.row_loss import RowLoss
from contrastive_curvature.losses.weighting import class_pairs, count_shares, weigh_pairs
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.loader import check_loader, in_fixed_order, reads_by_index
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.posterior.value import Posterior

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace


def margin(query: Tensor, match: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of queries to their matches less that to the nearest items of another class, shape (Q,)."""
    return (query * (match - other)).sum(1)


def influence(
    la: ContrastiveLaplace,
    loader: Iterable[Any],
    queries: Iterable[Any],
    of: Callable[[Tensor, Tensor, Tensor], Tensor] = margin,
) -> Tensor:
    """Predict how a number of every query would change if a training item were left out of the training.

    The item only leaves the loss: a query is compared with the same nearest items as before.

    Args:
        la: A fitted posterior, of a loss of pairs over the data set or of anchors with the candidates of their batch.
            Closest to retraining are the prior of the training, ``pd_fix="full"`` of the loss, and the structure
            ``"full"``.
        loader: The loader of the fit, read as ``fit`` reads it; N points in all.
        queries: Batches ``(x, labels)`` of Q queries, each of a class that training items have, too.
        of: Function of unit embeddings of the queries, of their nearest items of the same class, and of their nearest
            items of another class, each (Q, D); it returns shape (Q,) and is differentiable.

    Returns:
        Shape (Q, N), in the unit of ``of``; negative if the answer would be weaker without the item. Items are in the
        order of the loader; of a ``DataLoader`` that shuffles, in the order of its data set. Two views of an input are
        two items, one after the other.

    Raises:
        NotFittedError: Before ``fit``.
        InputError: A query has no item of its class, or no item of another class; a loader gives other points, or
            others at their positions, when it is read again.
        UnsupportedError: The loss compares neither pairs nor anchors, the fit takes the pairs of batches for those of
            the data set, or a relation in place of labels; or the structure has no matrix of weights.

    Memory: Q (N D + P) numbers for P weights and D outputs. Time: Q N^2 D products for losses of pairs; a value of the
        loss of a batch for each of its points for losses of anchors.
    """
    posterior, backend = la.posterior, la.backend
    loss = _supported("influence", backend.options)
    items = Reader(_findable("loader", backend.options, loader), backend.points_of)
    check_loader(queries, "queries", once=True)
    asked = Reader(in_fixed_order(queries, "queries", positions=True), backend.points_of)
    with evaluation_mode(la.model), torch.no_grad():
        pullback = backend.pullback(next(iter(items)).x)
        groups = _outputs(pullback, items)
        [(z, labels)] = _together(groups)
        of_queries = torch.cat([_gradients(pullback, batch, items, z, labels, of) for batch in asked])
        moves = _moves(posterior, of_queries)
        shifts, numbers = [], []
        for batch, (known, _) in zip(items, groups, strict=True):
            pushed = [pullback.jvp(batch.x, move) for move in moves]
            _check_same("loader", known, pushed[0][0])
            shifts.append(torch.stack([shift for _, shift in pushed]))
            numbers.append(batch.numbers)
    if backend.options.over_dataset:
        found = _pairs_without_each(cast("PairLoss", loss), z, labels, torch.cat(shifts, dim=1))
    else:
        anchors = cast("RowLoss", loss)
        parts = zip(groups, shifts, strict=True)
        found = torch.cat([_anchors_without_each(anchors, *part, shift) for part, shift in parts], dim=1)
    return found[:, torch.cat(numbers).argsort()]


def without(
    la: ContrastiveLaplace, train_loader: Iterable[Any], gone: Any, newton_step: bool, progress_bar: bool | None
) -> ContrastiveLaplace:
    """Return a fit of the rest, see :meth:`.ContrastiveLaplace.without`."""
    posterior, options = la.posterior, la.curvature_options
    validate.flag("newton_step", newton_step)
    if newton_step and not la.on_last_layer:
        raise UnsupportedError(f"newton_step: moves a last layer. This posterior has {la.subset_of_weights!r} weights.")
    loss = _supported("newton_step", options) if newton_step else None
    points = Rest(_findable("train_loader", options, train_loader), gone)
    rest = la.with_encoder(la.model)
    rest.fit(points, progress_bar=progress_bar)
    if not isinstance(train_loader, (list, tuple)) and not reads_by_index(train_loader):
        # A fit may have read it only once.
        deque(points, maxlen=0)
    # In shares, as two views of an input are two points.
    n = posterior.fitted.n
    if rest.n_data * points.count != n * (points.count - len(points.gone)):
        hint = "Pass the data of the fit, whole; of several fits that were added up, fit the rest of each again."
        raise InputError("train_loader", f"the {n} points of the fit", f"{points.count}", hint)
    if loss is not None:
        move = _newton_step(rest, loss, points)
        rest = rest.with_encoder(copy.deepcopy(la.model))
        vector_to_parameters(rest.mean + move, rest.model.last_layer.parameters())
        rest.fit(points, progress_bar=progress_bar)
    return rest


def _newton_step(rest: ContrastiveLaplace, loss: PairLoss | RowLoss, points: Rest) -> Tensor:
    """Return ``(H / T + prior)^-1 g / T`` of the rest, with the gradient ``g`` of all terms of the removed points."""
    items = Reader(points.loader, rest.backend.points_of)
    views = rest.n_data // (points.count - len(points.gone))
    with evaluation_mode(rest.model), torch.no_grad():
        pullback = rest.backend.pullback(next(iter(items)).x)
        groups = _outputs(pullback, items)
        kept = []
        for batch, (z, _) in zip(items, groups, strict=True):
            _check_same("train_loader", z, pullback.forward(batch.x)[0])
            kept.append(points.kept(batch.numbers // views).to(z.device))
        sizes = [len(keep) for keep in kept]
        if rest.backend.options.over_dataset:
            groups, kept = _together(groups), [torch.cat(kept)]
        lost = torch.cat([_lost(loss, *group, keep) for group, keep in zip(groups, kept, strict=True)])
        parts = [pullback.vjp_sum(batch.x, part) for batch, part in zip(items, lost.split(sizes), strict=True)]
    return _moves(rest.posterior, torch.stack(parts).sum(0))


def _moves(posterior: Posterior, gradients: Tensor) -> Tensor:
    """Return ``(H / T + prior)^-1 g / T`` of gradients (..., P)."""
    precision, factor = posterior.scales
    return posterior.fitted.clamped.solve(gradients, precision, factor) * factor


def _findable(argument: str, options: CurvatureOptions, loader: Iterable[Any]) -> Any:
    """Return a loader with the batches of the fit, whose points have the positions that the user knows."""
    check_loader(loader, argument)
    return in_fixed_order(loader, argument, mixed=not options.over_dataset, positions=True)


def _check_same(argument: str, known: Tensor, z: Tensor) -> None:
    """Refuse a later reading of a batch with other outputs."""
    if known.shape != z.shape or not torch.allclose(z, known, 1e-3, 1e-5 * float(known.abs().max())):
        wanted, hint = "the same points in the same order in every reading", "Turn shuffling and augmentation off."
        raise InputError(argument, wanted, "others", hint)


def _together(groups: list[tuple[Tensor, Any]]) -> list[tuple[Tensor, Any]]:
    z, labels = (torch.cat(part) for part in zip(*groups, strict=True))
    return [(z, labels)]


def _outputs(pullback: Pullback, items: Iterable[Batch]) -> list[tuple[Tensor, Any]]:
    """Return raw outputs and labels of every batch."""
    return [(pullback.forward(batch.x)[0], batch.labels) for batch in items]


def _supported(argument: str, options: CurvatureOptions) -> PairLoss | RowLoss:
    loss = options.loss
    known = loss.compares == "anchors" or options.over_dataset
    if options.relation is not None or not known:
        raise UnsupportedError(
            f"{argument}: takes losses of pairs over the data set (pairs='dataset') and losses of anchors, with labels "
            f"and without a relation. This posterior has {type(loss).__name__} with pairs={options.pairs!r}."
        )
    return cast("PairLoss | RowLoss", loss)


def _gradients(
    pullback: Pullback,
    queries: Batch,
    items: Iterable[Batch],
    z: Tensor,
    labels: Tensor,
    of: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the gradients (B, P) of the number of every query in the weights, from the items' outputs (N, D)."""
    outputs, context = pullback.forward(queries.x)
    classes: Any = queries.labels
    cosine, same = normalize(outputs)[0] @ normalize(z)[0].T, classes[:, None] == labels
    if not bool((same.any(1) & ~same.all(1)).all()):
        lone = int((~same.any(1) | same.all(1)).nonzero()[0])
        wanted = "queries with training items of their class and of another one"
        raise InputError("queries", wanted, f"query {lone} of a batch, of class {int(classes[lone])}")
    nearest = [cosine.masked_fill(mask, -torch.inf).argmax(1) for mask in (~same, same)]
    with torch.enable_grad():
        points = [part.detach().requires_grad_() for part in (outputs, *(z[index] for index in nearest))]
        value = of(*(normalize(part)[0] for part in points)).sum()
    of_query, *of_items = torch.autograd.grad(value, points, materialize_grads=True)
    rows = pullback.vjp(context, of_query[:, None])[:, 0]
    start = 0
    for batch in items:
        stop = start + input_length(batch.x)
        for row in range(len(rows)):
            cotangents = z.new_zeros(stop - start, z.shape[1])
            for index, slope in zip(nearest, of_items, strict=True):
                if start <= index[row] < stop:
                    cotangents[index[row] - start] += slope[row]
            if bool(cotangents.any()):
                rows[row] += pullback.vjp_sum(batch.x, cotangents)
        start = stop
    return rows


def _pairs_without_each(loss: PairLoss, z: Tensor, labels: Tensor, shifts: Tensor) -> Tensor:
    """Return the products (Q, N) of every ``g_k`` with moves of the weights, from the shifts (Q, N, D) of outputs.

    The weight of a pair depends only on the sizes of its two classes. So the sums of the pairs' changes by class, of
    all points and of every point k, give the loss without k: its own pairs go, and all weights change.
    """
    (u, norm), (_, index) = normalize(z), labels.unique(return_inverse=True)
    turns = (shifts - (shifts * u).sum(2, keepdim=True) * u) / norm[:, None]
    member = torch.nn.functional.one_hot(index).double()
    counts, each = member.sum(0).long(), torch.eye(member.shape[1], dtype=torch.int64, device=z.device)
    own_weights = torch.stack([_class_weights(loss, counts - one)[c] for c, one in enumerate(each)])
    own, sums = member.new_empty(shifts.shape[:2]), member.new_zeros(len(shifts), *each.shape)
    for rows, positive, negative in loss.relate(z, labels, None).row_blocks():
        cosine = u[rows] @ u.T
        cosine.diagonal(rows.start).fill_(0)
        slope = loss._terms(cosine, positive.to(u), negative.to(u)).first
        for query, turn in enumerate(turns):
            of_class = (slope * (turn[rows] @ u.T + u[rows] @ turn.T)).double() @ member
            sums[query] += member[rows].T @ of_class
            own[query, rows] = (of_class * own_weights[index[rows]]).sum(1)
    whole = _class_weights(loss, counts)
    # The sums count every pair twice.
    others = [((whole - _class_weights(loss, counts - one)) * sums).sum((1, 2)) / 2 for one in each]
    return (own + torch.stack(others, dim=1)[:, index]).to(shifts)


def _class_weights(loss: PairLoss, counts: Tensor) -> Tensor:
    """Return the weight of a pair in the loss of a fit, by its two classes of these sizes, float64 (C, C)."""
    positive, negative, totals = class_pairs(counts)
    shares = count_shares(positive, negative, loss.normalization, torch.float64, totals)
    same = torch.eye(len(counts), dtype=torch.float64, device=counts.device)
    attract, repel = weigh_pairs(loss.negative_weight, same, 1 - same, shares, shares)
    return loss.data_scale(int(counts.sum())) * (attract + repel)


def _anchors_without_each(loss: RowLoss, z: Tensor, labels: Tensor, shifts: Tensor) -> Tensor:
    """Return the same products for a loss of anchors, from the value of the loss without each point."""
    whole, out = _slope(loss, z, labels), shifts.new_empty(shifts.shape[:2])
    for k in range(len(z)):
        keep = torch.arange(len(z), device=z.device) != k
        out[:, k] = shifts.flatten(1) @ _lost(loss, z, labels, keep, whole).flatten()
    return out


def _lost(loss: PairLoss | RowLoss, z: Tensor, labels: Tensor, keep: Tensor, whole: Tensor | None = None) -> Tensor:
    """Return the gradient (N, D) of ``L - L_of_the_kept``, for boolean ``keep`` (N,); ``whole`` is that of ``L``."""
    lost = (_slope(loss, z, labels) if whole is None else whole).clone()
    lost[keep] -= _slope(loss, z[keep], labels[keep])
    return lost


def _slope(loss: PairLoss | RowLoss, z: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient (N, D) of the loss as a fit counts it, a sum over the data."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(loss(z, labels), z)
    if loss.compares == "pairs":
        return loss.data_scale(len(z)) * slope
    if not loss.averages:
        return slope
    blocks = loss.relate(z.detach(), labels, None).row_blocks()
    anchors = sum(int((loss._counts(positive.to(z), negative.to(z)) > 0).sum()) for _, positive, negative in blocks)
    return anchors * slope
