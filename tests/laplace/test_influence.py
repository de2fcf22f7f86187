"""Predicted effects of leaving training items out: against autograd of the loss without them, and retraining."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from laplace import Laplace
from tiny import encoder
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.laplace.posterior import ContrastiveLaplace

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 1, 2, 2, 0, 3])
PRIOR = 3.0


def _data(n: int) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def _fitted(model: nn.Module, loss: Any, weights: str, loader: Any, structure: str = "full") -> ContrastiveLaplace:
    la = ContrastiveLaplace(
        model, "contrastive", weights, structure, prior_precision=PRIOR, temperature=0.5, backend_kwargs={"loss": loss}
    )
    la.fit(loader)
    return la


def _anchors(labels: Tensor) -> float:
    return float((labels[:, None] == labels).sum(1).gt(1).sum())


# Of a mean, the factor is the number of anchors with a positive; of means over pairs, half the number of points.
LOSSES = [
    (cc.ContrastiveLoss(margin=None, pd_fix="full"), lambda _: 1.0, True),
    (cc.SoftContrastiveLoss(normalization="type", pd_fix="psd"), lambda labels: len(labels) / 2, True),
    (cc.SupConLoss(0.3, pd_fix="full"), _anchors, False),
    (cc.SupConLoss(0.3, reduction="sum"), lambda _: 1.0, False),
    (cc.InfoNCELoss(0.3, pd_fix="ggn"), _anchors, False),
]


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize(("loss", "factor", "over_data"), LOSSES)
def test_influence_is_the_gradient_of_all_terms_of_an_item(
    weights: str, loss: Any, factor: Any, over_data: bool
) -> None:
    model, x, asked, classes = encoder(), _data(12), _data(5), torch.tensor([0, 1, 2, 1, 0])
    loader = [(x[:6], LABELS[:6]), (x[6:], LABELS[6:])]
    la = _fitted(model, loss, weights, loader)
    found = cc.influence(la, loader, [(asked[:2], classes[:2]), (asked[2:], classes[2:])])

    names = [name for name, _ in model.named_parameters() if weights == "all" or name.startswith("2.")]
    start = {name: p.detach() for name, p in model.named_parameters()}
    theta = torch.cat([start[name].flatten() for name in names])

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        parts = theta.split([start[name].numel() for name in names])
        changed = {name: part.view_as(start[name]) for name, part in zip(names, parts, strict=True)}
        return functional_call(model, {**start, **changed}, (x,))

    unit = nn.functional.normalize
    cosine = unit(outputs(theta, asked)) @ unit(outputs(theta, x)).T
    same = classes[:, None] == LABELS
    match, other = (cosine.masked_fill(mask, -2).argmax(1) for mask in (~same, same))

    def margins(theta: Tensor) -> Tensor:
        u, q = unit(outputs(theta, x)), unit(outputs(theta, asked))
        return (q * u[match]).sum(1) - (q * u[other]).sum(1)

    def objective(theta: Tensor, keep: list[int]) -> Tensor:
        groups = [keep] if over_data else [[k for k in keep if k < 6], [k for k in keep if k >= 6]]
        return sum(factor(LABELS[g]) * loss(outputs(theta, x[g]), LABELS[g]) for g in groups)

    gradient = torch.func.grad(objective)
    whole = gradient(theta, list(range(12)))
    lost = torch.stack([whole - gradient(theta, [k for k in range(12) if k != left]) for left in range(12)])
    moved = torch.linalg.solve(la.posterior_precision, 2.0 * lost.T)
    torch.testing.assert_close(found, torch.func.jacrev(margins)(theta) @ moved)


def test_influence_refuses_what_it_cannot_answer() -> None:
    loader = [(_data(12), LABELS)]
    la = _fitted(encoder(), cc.SupConLoss(pd_fix="full"), "last_layer", loader)
    with pytest.raises(cc.InputError, match="query 1 of a batch, of class 7"):
        cc.influence(la, loader, [(_data(2), torch.tensor([0, 7]))])
    la = ContrastiveLaplace(encoder(), backend_kwargs={"pairs": "batch"})
    la.fit(loader)
    with pytest.raises(cc.UnsupportedError, match="pairs='batch'"):
        cc.influence(la, loader, loader)


GONE = [1, 6, 7, 11]
REST = torch.tensor([0, 2, 3, 4, 5, 8, 9, 10])
FORGETTING = [
    *[(structure, cc.ContrastiveLoss(), {}) for structure in ("diag", "full", "kron", "kron_lowrank")],
    ("full", cc.ContrastiveLoss(margin=None, normalization="sum", pd_fix="full"), {}),
    ("full", cc.ContrastiveLoss(), {"pairs": "batch"}),
    ("kron", cc.SupConLoss(0.3), {}),
    ("full", cc.InfoNCELoss(0.3, pd_fix="ggn"), {}),
]


@pytest.mark.parametrize(("structure", "loss", "options"), FORGETTING)
def test_without_points_is_a_fit_of_the_rest(structure: str, loss: Any, options: Any) -> None:
    x = _data(12)

    def fitted(*batches: Tensor) -> ContrastiveLaplace:
        options_of_fit = {"loss": loss, **options}
        la: Any = Laplace(
            encoder(),
            "contrastive",
            hessian_structure=structure,
            temperature=0.5,
            backend_kwargs=options_of_fit,
        )
        la.fit([(x[rows], LABELS[rows]) for rows in batches])
        la.prior_precision = PRIOR
        return la

    la, other = fitted(*torch.arange(12).split(6)), fitted(REST[:5], REST[5:])
    before = _kept(la)
    rest = la.without([(x[:6], LABELS[:6]), (x[6:], LABELS[6:])], GONE)
    torch.testing.assert_close(_kept(rest), _kept(other))
    torch.testing.assert_close(_kept(la), before)


def _kept(la: ContrastiveLaplace) -> list[Any]:
    """Return all that a fit keeps of its points."""
    assert la.curvature is not None
    sample, classes = la.posterior.fitted.training_sample, la.class_centres
    return [
        *(tensor.clone() for tensor in la.curvature.tensors()),
        *(la.mean, la.loss, la.cost, la.n_data, la.typical_norm),
        *(() if sample is None else (sample.rows.columns["features"],)),
        *(() if classes is None else (classes.labels, classes.centres)),
    ]


@pytest.mark.parametrize(("loss", "factor", "over_data"), LOSSES)
def test_newton_step_moves_the_last_layer_by_all_terms_of_the_points(loss: Any, factor: Any, over_data: bool) -> None:
    model, x = encoder(), _data(12)
    # In another order than that of the data set, which positions are of.
    loader = DataLoader(TensorDataset(x, LABELS), batch_size=6, shuffle=over_data)
    la = _fitted(model, loss, "last_layer", loader)
    rest = la.without(loader, GONE, newton_step=True)

    def objective(theta: Tensor, keep: list[int]) -> Tensor:
        weight, bias = theta[:15].view(3, 5), theta[15:]
        groups = [keep] if over_data else [[k for k in keep if k < 6], [k for k in keep if k >= 6]]
        return sum(factor(LABELS[g]) * loss(model[:2](x[g]).detach() @ weight.T + bias, LABELS[g]) for g in groups)

    gradient = torch.func.grad(objective)
    lost = gradient(la.mean, list(range(12))) - gradient(la.mean, REST.tolist())
    still = la.without(loader, GONE)
    torch.testing.assert_close(rest.mean, la.mean + torch.linalg.solve(still.posterior_precision, 2.0 * lost))
    moved = encoder()
    nn.utils.vector_to_parameters(rest.mean, moved[2].parameters())
    other = _fitted(moved, loss, "last_layer", [(x[g], LABELS[g]) for g in (REST[:5], REST[5:])])
    torch.testing.assert_close(_kept(rest), _kept(other))
    torch.testing.assert_close(rest(x[:2]).mu, other(x[:2]).mu)


def test_without_refuses_what_it_cannot_answer() -> None:
    x = _data(12)
    loader = [(x, LABELS)]
    la = _fitted(encoder(), cc.SupConLoss(pd_fix="full"), "last_layer", loader)
    refused: list[tuple[str, Any, Any]] = [
        ("gone: .*mask.nonzero", loader, LABELS == 0),
        (r"gone: expected positions among the 12 points of the loader, got \[12\]", loader, [3, 12]),
        ("train_loader: expected the 12 points of the fit, got 24", 2 * loader, [3]),
    ]
    for message, points, gone in refused:
        with pytest.raises(cc.InputError, match=message):
            la.without(points, gone)
    la = _fitted(encoder(), cc.SupConLoss(pd_fix="full"), "all", loader)
    with pytest.raises(cc.UnsupportedError, match="newton_step: moves a last layer"):
        la.without(loader, [3], newton_step=True)


class Turning:
    """Gives its points in another order in every pass."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.passes = x, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        rows = torch.arange(12).roll(self.passes)
        yield from zip(self.x[rows].split(6), LABELS[rows].split(6), strict=True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("loss", [cc.ContrastiveLoss(margin=None, pd_fix="full"), cc.InfoNCELoss(0.3)])
def test_fit_influence_and_without_read_the_same_batches_of_a_loader_that_shuffles(loss: Any, drop_last: bool) -> None:
    x, queries = _data(12), [(_data(5), torch.tensor([0, 1, 2, 1, 0]))]
    loader = DataLoader(TensorDataset(x, LABELS), batch_size=6, shuffle=True, drop_last=drop_last)
    order = torch.arange(12)
    if loss.compares == "anchors":
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    batches = [(x[rows], LABELS[rows]) for rows in order.split(6)]
    # Positions of the same points in the batches.
    gone = [order.tolist().index(k) for k in GONE]
    for weights in ("last_layer", "all"):
        la, other = (_fitted(encoder(), loss, weights, given) for given in (loader, batches))
        torch.testing.assert_close(_kept(la), _kept(other))
        found, wanted = cc.influence(la, loader, queries), cc.influence(other, batches, queries)
        torch.testing.assert_close(found[:, order], wanted)
        for newton_step in (False, True) if weights == "last_layer" else (False,):
            rest, of_batches = la.without(loader, GONE, newton_step), other.without(batches, gone, newton_step)
            torch.testing.assert_close(_kept(rest), _kept(of_batches))


@pytest.mark.parametrize("loss", [cc.ContrastiveLoss(margin=None, pd_fix="full"), cc.SupConLoss(0.3)])
def test_points_that_are_others_in_the_next_reading_are_refused(loss: Any) -> None:
    x = _data(12)
    queries = [(x[:2], LABELS[:2])]
    la = _fitted(encoder(), loss, "last_layer", [(x[:6], LABELS[:6]), (x[6:], LABELS[6:])])
    random = DataLoader(TensorDataset(x, LABELS), 6, sampler=RandomSampler(x, replacement=True, num_samples=12))
    for loader in (Turning(x), random):
        with pytest.raises(cc.InputError, match=r"loader: expected the same (points|batches)"):
            cc.influence(la, loader, queries)
        for newton_step in (False, True):
            with pytest.raises(cc.InputError, match=r"train_loader: expected the same (points|batches)"):
                la.without(loader, [3, 4], newton_step)


def test_newton_step_of_two_views_of_an_input_loses_both() -> None:
    """A fit of one view of each has the same terms, where the batch is the views one after the other."""
    (x, more), names = _data(24).split(12), LABELS.repeat(2)
    loss, gone = cc.SupConLoss(0.3), torch.tensor(GONE)
    views, flat = [((x, more), LABELS)], [(torch.cat([x, more]), names)]
    rest = _fitted(encoder(), loss, "last_layer", views).without(views, gone, newton_step=True)
    other = _fitted(encoder(), loss, "last_layer", flat).without(flat, torch.cat([gone, gone + 12]), newton_step=True)
    torch.testing.assert_close(rest.mean, other.mean)
    torch.testing.assert_close(_kept(rest), _kept(other))
