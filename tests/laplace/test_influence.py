"""Predicted effects of leaving training items out: against autograd of the loss without them, and retraining."""

from typing import Any

import pytest
import torch
from tiny import encoder
from torch import Tensor, nn
from torch.func import functional_call

import contrastive_curvature as cc
from contrastive_curvature.laplace.posterior import ContrastiveLaplace

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 0, 1])
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
