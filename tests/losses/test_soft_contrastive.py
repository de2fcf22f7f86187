"""The soft contrastive loss against a loop over pairs, autograd, the logistic loss and the paper's own form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import assume, given
from hypothesis import strategies as st
from row_cases import check_ggn_is_psd, check_products, cosines, counted, numbers
from strategies import FIXES, NORMALIZATIONS, Case, cases, close
from tables import covering, each
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.hedged import soft_contrastive_loss
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses.soft_contrastive import SoftContrastiveLoss
from contrastive_curvature.testing import list_pairs
from contrastive_curvature.testing.oracle import pair_weights

pytestmark = pytest.mark.parametrize("device", DEVICES)

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
    positive, negative = counted(case)
    listed = (positive + negative) > 0
    return float((2 - 2 * cosines(case.z))[listed].min()) if bool(listed.any()) else 1.0


@given(case=cases(), chosen=chosen_options, squared=st.booleans())
def test_value_is_a_sum_over_pairs(case: Case, chosen: dict[str, Any], squared: bool, device: str) -> None:
    loss, moved = SoftContrastiveLoss(squared=squared, **chosen), case.to(device)
    listed = list_pairs(len(case.z), case.labels, case.pairs)
    u = case.z / case.z.norm(dim=1, keepdim=True)
    truth = size = 0.0
    for (i, j, sign), weight in pair_weights(listed, loss.negative_weight, str(loss.normalization)).items():
        length = float((u[i] - u[j]).norm()) ** (2 if squared else 1)
        x = -sign * (loss.b - loss.a * length)
        truth += abs(weight) * (max(x, 0) + math.log1p(math.exp(-abs(x))))
        # A cosine of one is wrong by a rounding error, its distance by the root of it.
        size += abs(weight) * loss.a
    assert abs(float(loss(moved.z, **moved.given)) - truth) <= (1e-12 if squared else 1e-7) * size + 1e-12 * truth


@given(case=cases(), chosen=chosen_options, squared=st.booleans())
def test_full_arccos_is_the_hessian_of_the_loss(case: Case, chosen: dict[str, Any], squared: bool, device: str) -> None:
    assume(squared or nearest(case) > 1e-6)
    loss, moved = SoftContrastiveLoss(squared=squared, pd_fix="full", **chosen), case.to(device)
    truth = torch.autograd.functional.hessian(lambda z: loss(z, **moved.given), moved.z)
    truth = truth.reshape(moved.z.numel(), -1)
    found = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs)
    # Of derivatives that go with 1 / d^3, and of distances with as many digits as 2 - 2 s leaves.
    size = len(case.z) * (1 if squared else nearest(case) ** -1.5) / float(case.z.norm(dim=1).min()) ** 2
    tolerance = 1e-10 if squared else 1e-10 + 1e-14 / nearest(case)
    assert close(found.dense(), truth, 1e-3 * size, tolerance)
    assert close(found.diagonal().flatten(), truth.diagonal(), 1e-3 * size, tolerance)


@given(case=cases(), chosen=chosen_options, seed=st.integers(0, 99))
def test_products_and_cross_blocks_agree_with_dense(case: Case, chosen: dict[str, Any], seed: int, device: str) -> None:
    assume(nearest(case) > 1e-4)
    check_products(SoftContrastiveLoss(pd_fix="full", **chosen), case, device, nearest(case) ** -1.5 * 20, seed)


@given(case=cases(), chosen=chosen_options)
def test_squared_is_the_logistic_loss(case: Case, chosen: dict[str, Any], device: str) -> None:
    a, b = chosen["a"], chosen["b"]
    rest = {name: chosen[name] for name in ("negative_weight", "normalization")}
    moved = case.to(device)
    ours = SoftContrastiveLoss(squared=True, pd_fix="full", **chosen)
    other = cc.LogisticLoss(2 * a, b - 2 * a, pd_fix="full", **rest)
    left, right = (loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs).dense() for loss in (ours, other))
    assert close(left, right, 1e2 / float(case.z.norm(dim=1).min()) ** 2, 1e-11)
    check_ggn_is_psd(ours, case, device, (2 * a) ** 2 * len(case.z))


def test_same_as_the_paper_where_its_points_are_on_the_sphere(device: str) -> None:
    """Eq. 2 and 3 over all pairs; half of each here, as the factors of positives and negatives are one half."""
    for seed in range(3):
        z = torch.nn.functional.normalize(numbers(seed, 8, 3).to(device)).requires_grad_()
        labels = (torch.arange(8) % 3).to(device)
        i, j = torch.triu_indices(8, 8, 1, device=device)
        theirs = soft_contrastive_loss(z[i], z[j], labels[i] == labels[j], 3.0, 1.5, reduction="sum") / 2
        ours = SoftContrastiveLoss(3.0, 1.5, normalization="sum")(z, labels)
        # Theirs has a gradient along the points, which on the sphere is of no effect.
        grads = [torch.autograd.grad(value, z)[0] for value in (ours, theirs)]
        along = [grad - (grad * z).sum(1, keepdim=True) * z for grad in grads]
        assert close(ours.detach().reshape(1), theirs.detach().reshape(1), tolerance=1e-12)
        assert close(along[0].detach(), along[1].detach(), tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["labels", "pairs"])
def test_embeddings_that_meet(kind: str, dtype: torch.dtype, device: str) -> None:
    z = numbers(0, 5, 3).to(device, dtype)
    z[1] = 3 * z[0]
    given: dict[str, Any] = {"labels": (torch.arange(5) % 2).to(device)}
    if kind == "pairs":
        given = {"pairs": tuple(torch.tensor(index, device=device) for index in ([0, 2], [2, 4], [0, 3], [1, 1]))}
    loss = SoftContrastiveLoss()
    with pytest.raises(UnrepresentableError, match=r"squared=False.*squared=True.*duplicates"):
        loss.output_hessian(z, **given)
    assert bool(SoftContrastiveLoss(squared=True).output_hessian(z, **given).dense().isfinite().all())
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(z, **given), z)
    assert bool(gradient.isfinite().all())
    # A pair that is not counted may meet.
    alone = tuple(torch.tensor(index, device=device) for index in ([2, 2], [4, 3], [2, 0], [1, 4]))
    assert bool(loss.output_hessian(z.detach(), pairs=alone).dense().isfinite().all())
    assert bool(loss.output_hessian(z.detach(), pairs=tuple(_masks(alone, 5, device))).dense().isfinite().all())


@covering(2, fix=FIXES, squared=[True, False], normalization=NORMALIZATIONS)
@pytest.mark.filterwarnings("ignore:The clamped curvature is zero everywhere")
def test_a_data_set_in_batches_is_its_pairs_at_once(fix: str, squared: bool, normalization: str, device: str) -> None:
    """There every point stands among the others when it comes again, and is no pair with itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    x, y = numbers(0, 14, 4).to(device), (torch.arange(14) % 3).to(device)
    loss = SoftContrastiveLoss(3.0, 2.0, squared, pd_fix=fix, normalization=normalization)
    backend = cc.ContrastiveGGN(model, last_layer=False, loss=loss)
    scale = 14 / 2 if normalization == "type" else 1.0
    for structure in ("diag", "full"):
        loader = list(zip(x.split(5), y.split(5), strict=True))
        found = backend.fit(loader, cc.options.Structure(structure)).curvature
        truth = scale * cc.ggn(model, x, y, loss=loss, structure=structure, clamp=False)
        assert close(found, truth, tolerance=1e-9)
    twice = [(x[[0, 0, 1, 2]], y[[0, 0, 1, 2]]), (x[3:], y[3:])]
    if squared:
        backend.fit(twice, cc.options.Structure("diag"))
    else:
        with pytest.raises(UnrepresentableError, match=r"squared=True"):
            backend.fit(twice, cc.options.Structure("diag"))


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    x, y = numbers(0, 14, 4).to(device), (torch.arange(14) % 3).to(device)
    loss = Cubed(pd_fix=fix)
    batches = list(zip(x.split(5), y.split(5), strict=True))
    shuffled = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    fits = [(loader, relation, None) for loader in (batches, shuffled) for relation in (None, near)]
    if fix == "fixed":
        fits += [(batches, None, 14)]
    for loader, relation, samples in fits:
        backend = cc.ContrastiveGGN(model, last_layer=False, loss=loss, relation=relation, negative_samples=samples)
        found = backend.fit(loader, cc.options.Structure.FULL).curvature
        given = {"labels": y} if relation is None else {"pairs": near(y, y)}
        assert close(found, cc.ggn(model, x, **given, loss=loss, structure="full", clamp=False), tolerance=1e-9)


def test_equal_points_are_two_points(device: str) -> None:
    """Between which cross terms count, also in a data set: a point is no pair with itself alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    x, y = numbers(0, 14, 4).to(device)[[0, *range(13)]], (torch.arange(14) % 3).to(device)
    y[1] = y[0]
    for loss in (cc.LogisticLoss(pd_fix="full"), cc.ContrastiveLoss(0.9, pd_fix="full")):
        backend = cc.ContrastiveGGN(model, last_layer=False, loss=loss)
        for loader in ([(x[:1], y[:1]), (x[1:], y[1:])], DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)):
            found = backend.fit(loader, cc.options.Structure.FULL).curvature
            assert close(found, cc.ggn(model, x, y, loss=loss, structure="full", clamp=False), tolerance=1e-9)


def _masks(pairs: tuple[torch.Tensor, ...], n: int, device: str) -> list[torch.Tensor]:
    out = []
    for i, j in (pairs[:2], pairs[2:]):
        mask = torch.zeros(n, n, dtype=torch.bool, device=device)
        mask[i, j] = mask[j, i] = True
        out.append(mask)
    return out


def test_where_the_second_derivative_is_negative(device: str) -> None:
    """For positives with ``a d p < 1``; a negative never has one."""
    loss = SoftContrastiveLoss(2.0, 1.0)
    s = torch.linspace(-0.99, 0.99, 50, dtype=torch.float64, device=device)
    length = (2 - 2 * s).sqrt()
    none, one = torch.zeros_like(s), torch.ones_like(s)
    attracting, repelling = loss._terms(s, one, none).second, loss._terms(s, none, one).second
    assert attracting is not None
    assert repelling is not None
    p = torch.sigmoid(1 - 2 * length)
    assert torch.equal(attracting < 0, 2 * length * p < 1)
    assert bool((attracting < 0).any())
    assert bool((repelling > 0).all())
    steep = SoftContrastiveLoss(20.0, 20.0)._terms(s, one, none).second
    assert steep is not None
    assert bool((steep > 0).any())


@each(
    "options, name",
    [
        ({"a": 0.0}, "a"),
        ({"a": math.nan}, "a"),
        ({"a": "1"}, "a"),
        ({"b": math.inf}, "b"),
        ({"b": True}, "b"),
        ({"squared": 1}, "squared"),
        ({"negative_weight": 2.0}, "negative_weight"),
        ({"normalization": "none"}, "normalization"),
    ],
)
def test_options(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=f"^{name}: "):
        SoftContrastiveLoss(**options)
