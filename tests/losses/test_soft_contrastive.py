"""The soft contrastive loss against a loop over pairs, autograd, the logistic loss and the paper's own form."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loss_cases import numbers, unit
from strategies import NORMALIZATIONS, Case, cases, close
from tables import each
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses.soft_contrastive import SoftContrastiveLoss
from contrastive_curvature.structures import Dense, Diagonal
from contrastive_curvature.testing import list_pairs
from contrastive_curvature.testing.oracle import pair_weights

chosen_options = st.fixed_dictionaries(
    {
        "a": st.sampled_from((0.5, 1.0, 20.0)),
        "b": st.sampled_from((0.0, 5.0, -1.0)),
        "negative_weight": st.sampled_from((0.0, 0.2, 0.5, 1.0)),
        "normalization": st.sampled_from(NORMALIZATIONS),
    }
)


def nearest(case: Case) -> float:
    """Smallest squared distance of two different points that are a pair."""
    i, j = torch.tensor([key[:2] for key in list_pairs(len(case.z), case.labels, case.pairs)]).view(-1, 2).T.long()
    return float((unit(case.z)[i] - unit(case.z)[j]).square().sum(1).min()) if len(i) else 1.0


@given(case=cases(), chosen=chosen_options)
def test_value_is_a_sum_over_pairs(case: Case, chosen: dict[str, Any], device: str) -> None:
    loss, moved = SoftContrastiveLoss(**chosen), case.to(device)
    listed = list_pairs(len(case.z), case.labels, case.pairs)
    u = unit(case.z)
    truth = size = 0.0
    for (i, j, sign), weight in pair_weights(listed, loss.negative_weight, str(loss.normalization)).items():
        length = float((u[i] - u[j]).norm())
        x = -sign * (chosen["b"] - chosen["a"] * length)
        truth += abs(weight) * (max(x, 0) + math.log1p(math.exp(-abs(x))))
        # A cosine of one is wrong by a rounding error, its distance by the root of it.
        size += abs(weight) * chosen["a"]
    assert abs(float(loss(moved.z, **moved.given)) - truth) <= 1e-7 * size + 1e-12 * truth


@pytest.mark.parametrize("distance", [1e-2, 1e-3, 3e-4, 1e-4])
def test_points_that_are_close_cost_the_digits_that_the_docs_say(distance: float, device: str) -> None:
    """Against autograd of the distance itself, which loses a digit for every one of 1 / d."""
    x, y = numbers(0, 8, 4).to(device), (torch.arange(8) % 2).to(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(device)
    step = numbers(1, 1, 4).to(device)[0]
    far = unit(model(torch.stack([x[0], x[0] + 1e-6 * step])).detach())
    x[2] = x[0] + distance / float((far[0] - far[1]).norm() / 1e-6) * step
    z = model(x).detach()
    rows, columns = (y.unsqueeze(1) == y).triu(1).nonzero().unbind(1)

    def value(z: torch.Tensor) -> torch.Tensor:
        u = unit(z)
        return -nn.functional.logsigmoid(-(u[rows] - u[columns]).norm(dim=1)).sum() / 3

    truth = torch.autograd.functional.hessian(value, z).view(24, 24)
    outputs = partial(torch.func.functional_call, model, args=(x,))
    parts = torch.func.jacrev(outputs)({name: part.detach() for name, part in model.named_parameters()})
    jacobian = torch.cat([part.reshape(24, -1) for part in parts.values()], dim=1)
    eps, pulled = torch.finfo(torch.float64).eps, jacobian.T @ truth @ jacobian
    for fix in ("full", "positive"):
        loss = SoftContrastiveLoss(negative_weight=0.0, pd_fix=fix)
        assert close(loss.output_hessian(z, y).dense().view(24, 24), truth, tolerance=10 * eps / distance**2)
        found = cc.ggn(model, x, y, loss=loss, structure="full", clamp=False)
        assert close(found, pulled, tolerance=eps / distance**3)


@given(case=cases(), chosen=chosen_options)
def test_full_arccos_is_the_hessian_of_the_loss(case: Case, chosen: dict[str, Any], device: str) -> None:
    assume(nearest(case) > 1e-6)
    loss, moved = SoftContrastiveLoss(pd_fix="full", **chosen), case.to(device)
    truth = torch.autograd.functional.hessian(lambda z: loss(z, **moved.given), moved.z)
    # Of derivatives that go with 1 / d^3, and of distances with as many digits as 2 - 2 s leaves.
    size = len(case.z) * nearest(case) ** -1.5 / float(case.z.norm(dim=1).min()) ** 2
    found = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs).dense()
    assert close(found, truth.reshape(found.shape), 1e-3 * size, 1e-10 + 1e-14 / nearest(case))


@each("dtype, kind", [(torch.float32, "labels"), (torch.float64, "pairs")])
def test_embeddings_that_meet(kind: str, dtype: torch.dtype, device: str) -> None:
    z = numbers(0, 5, 3).to(device, dtype)
    z[1] = 3 * z[0]
    given: dict[str, Any] = {"labels": (torch.arange(5) % 2).to(device)}
    if kind == "pairs":
        given = {"pairs": tuple(torch.tensor(index, device=device) for index in ([0, 2], [2, 4], [0, 3], [1, 1]))}
    loss = SoftContrastiveLoss()
    with pytest.raises(UnrepresentableError, match=r"SoftContrastiveLoss.*LogisticLoss.*duplicates"):
        loss.output_hessian(z, **given)
    assert bool(cc.LogisticLoss(2.0, -2.0).output_hessian(z, **given).dense().isfinite().all())
    # A pair that is not counted may meet.
    alone = tuple(torch.tensor(index, device=device) for index in ([2, 2], [4, 3], [2, 0], [1, 4]))
    masks = torch.zeros(2, 5, 5, dtype=torch.bool, device=device)
    for mask, ends in zip(masks, (alone[:2], alone[2:]), strict=True):
        mask[ends] = mask[ends[::-1]] = True
    for pairs in (alone, tuple(masks)):
        assert bool(loss.output_hessian(z, pairs=pairs).dense().isfinite().all())
    (gradient,) = torch.autograd.grad(loss(z.requires_grad_(), **given), z)
    assert bool(gradient.isfinite().all())


def problem(device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    return model, numbers(0, 14, 4).to(device), (torch.arange(14) % 3).to(device)


class Cubed(cc.PairLoss):
    """``|u - v|^3``, whose second derivative in the cosine is infinite where a point meets itself."""

    def _value(self, cosine: torch.Tensor, attract: torch.Tensor, repel: torch.Tensor) -> torch.Tensor:
        return ((attract - repel) * (2 - 2 * cosine).clamp(min=0) ** 1.5).sum()

    def _terms(self, cosine: torch.Tensor, attract: torch.Tensor, repel: torch.Tensor) -> cc.losses.Terms:
        root = (2 - 2 * cosine).clamp(min=0).sqrt()
        return cc.losses.Terms(-3 * (attract - repel) * root, 3 * (attract - repel) / root)


def near(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    same = (a.unsqueeze(1) - b).abs() < 2
    return same, ~same


@pytest.mark.parametrize("fix", ["fixed", "full", "ggn"])
@pytest.mark.filterwarnings("ignore:The clamped curvature is zero everywhere")
def test_no_rule_of_a_loss_sees_a_point_with_itself(fix: str, device: str) -> None:
    """Whatever the loader, the relation and the negatives: the curvature of a data set is that of its pairs at once."""
    model, x, y = problem(device)
    loss = Cubed(pd_fix=fix)
    batches = list(zip(x.split(5), y.split(5), strict=True))
    shuffled = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    fits = [(loader, relation, None) for loader in (batches, shuffled) for relation in (None, near)]
    if fix == "fixed":
        fits += [(batches, None, 14)]
    for loader, relation, samples in fits:
        backend = cc.ContrastiveGGN(model, last_layer=False, loss=loss, relation=relation, negative_samples=samples)
        found = backend.fit(loader, Dense).curvature.plain()
        given = {"labels": y} if relation is None else {"pairs": near(y, y)}
        assert close(found, cc.ggn(model, x, **given, loss=loss, structure="full", clamp=False), tolerance=1e-9)


def test_equal_points_are_two_points(device: str) -> None:
    """Between which cross terms count, also in a data set: a point is no pair with itself alone."""
    model, x, y = problem(device)
    x = x[[0, *range(13)]]
    y[1] = y[0]
    for loss in (cc.LogisticLoss(pd_fix="full"), cc.ContrastiveLoss(0.9, pd_fix="full")):
        backend = cc.ContrastiveGGN(model, last_layer=False, loss=loss)
        for loader in ([(x[:1], y[:1]), (x[1:], y[1:])], DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)):
            found = backend.fit(loader, Dense).curvature.plain()
            assert close(found, cc.ggn(model, x, y, loss=loss, structure="full", clamp=False), tolerance=1e-9)
    # A distance that is not squared has no second derivative where they meet.
    backend = cc.ContrastiveGGN(model, last_layer=False, loss=SoftContrastiveLoss(3.0, 2.0))
    with pytest.raises(UnrepresentableError, match=r"LogisticLoss"):
        backend.fit([(x, y)], Diagonal)
