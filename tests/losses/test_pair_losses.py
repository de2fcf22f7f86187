"""Every pair loss against autograd: its value, its output Hessian, the curvature of parameters, data sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from strategies import DISTANCES, FIXES, NORMALIZATIONS, Case, cases, close, network_cases
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.testing import dense_ggn, dense_jacobian, dense_output_hessian, list_pairs
from contrastive_curvature.testing.oracle import pair_weights

pytestmark = pytest.mark.parametrize("device", DEVICES)


def logistic(scale: float, bias: float) -> Callable[[float, int], float]:
    """By hand, from the distance of a pair."""

    def value(distance: float, sign: int) -> float:
        logit = scale * (1 - distance**2 / 2) + bias
        return math.log1p(math.exp(-sign * logit))

    return value


def contrastive(margin: float | None) -> Callable[[float, int], float]:
    def value(distance: float, sign: int) -> float:
        if sign > 0:
            return distance**2 / 2
        return -(distance**2) / 2 if margin is None else max(0.0, margin**2 - distance**2) / 2

    return value


LOSSES: dict[str, tuple[Any, Callable[[float, int], float]]] = {
    "logistic": (lambda **o: cc.LogisticLoss(3.0, -1.0, **o), logistic(3.0, -1.0)),
    "steep logistic": (lambda **o: cc.LogisticLoss(10.0, -5.0, **o), logistic(10.0, -5.0)),
    "contrastive": (lambda **o: cc.ContrastiveLoss(0.9, **o), contrastive(0.9)),
}

options = st.fixed_dictionaries(
    {
        "distance": st.sampled_from(DISTANCES),
        "pd_fix": st.sampled_from(FIXES),
        "negative_weight": st.sampled_from((0.0, 0.2, 0.5, 1.0)),
        "normalization": st.sampled_from(NORMALIZATIONS),
    }
)
kinds = st.sampled_from(tuple(LOSSES))


def size_of(loss: cc.PairLoss, case: Case) -> float:
    """Size of the terms that may cancel in a Hessian."""
    y, c = cc.output_hessian(case.z, **case.given, loss=loss, pd_fix="full").derivatives.dense()
    total = y.abs().sum() + (0 if c is None else c.abs().sum())
    return float(total) / float(case.z.norm(dim=1).min()) ** 2


@given(case=cases(), kind=kinds, chosen=options)
def test_value_is_a_sum_over_pairs(case: Case, kind: str, chosen: dict[str, Any], device: str) -> None:
    make, by_hand = LOSSES[kind]
    loss, moved = make(**chosen), case.to(device)
    listed = list_pairs(len(case.z), case.labels, case.pairs)
    u = case.z / case.z.norm(dim=1, keepdim=True)
    truth = size = 0.0
    for (i, j, sign), weight in pair_weights(listed, loss.negative_weight, str(loss.normalization)).items():
        each = abs(weight) * by_hand(float((u[i] - u[j]).norm()), sign)
        truth, size = truth + each, size + abs(each) + abs(weight)
    assert abs(float(loss(moved.z, **moved.given)) - truth) <= 1e-12 * size
    found = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs).loss_and_cost()
    assert abs(float(found[0]) - truth) <= 1e-12 * size
    assert abs(float(found[1]) - truth) <= 1e-12 * size


@given(case=cases(), kind=kinds, chosen=options)
def test_output_hessian_equals_autograd(case: Case, kind: str, chosen: dict[str, Any], device: str) -> None:
    loss, moved = LOSSES[kind][0](**chosen), case.to(device)
    truth, size = dense_output_hessian(case.z, **case.given, loss=loss), 1e-3 * size_of(loss, case)
    found = cc.output_hessian(moved.z, **moved.given, loss=loss)
    assert close(found.dense().cpu(), truth, size)
    assert close(found.diagonal().flatten().cpu(), truth.diagonal(), size)
    signed = found.signed_factor()
    if signed.sums_batch:
        flat = signed.columns.flatten(1)
        assert close((flat.T @ (signed.signs.unsqueeze(1) * flat)).cpu(), truth, size)
    else:
        rebuilt = torch.einsum("cnd,cn,cne->nde", signed.columns, signed.signs, signed.columns)
        assert close(rebuilt, found.point_blocks(), 1e3 * size, 1e-12)


@pytest.mark.parametrize("fix", ["ggn", "ggn_fixed", "psd_parts"])
@given(case=cases(), kind=kinds, chosen=options)
def test_the_parts_of_the_output_hessian_equal_autograd(
    fix: str, case: Case, kind: str, chosen: dict[str, Any], device: str
) -> None:
    if kind == "contrastive" and fix != "psd_parts":
        kind = "logistic"
    loss, moved = LOSSES[kind][0](**{**chosen, "pd_fix": fix}), case.to(device)
    truth = dense_output_hessian(case.z, **case.given, loss=loss)
    found = cc.output_hessian(moved.z, **moved.given, loss=loss)
    assert close(found.dense().cpu(), truth, 1e-3 * size_of(loss, case))


def test_a_fix_that_the_oracle_does_not_know_is_no_other_one(device: str) -> None:
    with pytest.raises(ValueError, match="pd_fix='psd_part'"):
        dense_output_hessian(torch.eye(3, device=device), torch.zeros(3), pd_fix="psd_part")


@given(case=cases(), kind=kinds, chosen=options)
def test_full_arccos_is_the_hessian_of_the_loss(case: Case, kind: str, chosen: dict[str, Any], device: str) -> None:
    loss, moved = LOSSES[kind][0](**{**chosen, "distance": "arccos", "pd_fix": "full"}), case.to(device)
    truth = torch.autograd.functional.hessian(lambda z: loss(z, **moved.given), moved.z)
    found = loss.output_hessian(moved.z, moved.labels, pairs=moved.pairs).dense()
    assert close(found, truth.reshape(moved.z.numel(), -1), 1e-3 * size_of(loss, case))


@given(case=cases(), kind=kinds, chosen=options, columns=st.integers(1, 3), data=st.data())
def test_products_and_cross_blocks_agree_with_dense(
    case: Case, kind: str, chosen: dict[str, Any], columns: int, data: st.DataObject, device: str
) -> None:
    loss, moved = LOSSES[kind][0](**chosen), case.to(device)
    found = cc.output_hessian(moved.z, **moved.given, loss=loss)
    dense, (n, dim) = found.dense(), case.z.shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    v, w = torch.randn(2, n, dim, columns, generator=generator, dtype=torch.float64).to(device)
    size = 10 * size_of(loss, case)
    assert close(found.matvec(v).reshape(n * dim, columns), dense @ v.reshape(n * dim, columns), size, 1e-13)
    assert close(found.matvec(v[..., 0]), found.matvec(v)[..., 0], size, 1e-13)
    if not found.coupled:
        return
    ends = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    rows, everything = slice(*ends), slice(0, n)
    for left, right in ((rows, everything), (rows, rows)):
        cross, four = found.cross(left, right), dense.view(n, dim, n, dim).clone()
        four[torch.arange(n), :, torch.arange(n)] = 0
        part = four[left][:, :, right]
        assert close(cross.matmul(v[right]), torch.einsum("iajb,jbk->iak", part, v[right]), size, 1e-13)
        assert close(
            cross.forms(w[left], v[right]), torch.einsum("iak,iajb,jbk->kij", w[left], part, v[right]), size, 1e-13
        )
        for k in range(dim):
            assert close(cross.axis(k), part[:, k, :, k], size, 1e-13)
        i, j = (
            torch.cartesian_prod(*(torch.arange(size_) for size_ in cross.shape)).unbind(1)
            if part.numel()
            else (None, None)
        )
        if i is not None:
            assert close(cross.diagonals(i, j), torch.diagonal(part[i, :, j], dim1=1, dim2=2), size, 1e-13)


@given(drawn=network_cases(), kind=kinds, chosen=options, last=st.booleans())
def test_parameter_curvature_is_exact(
    drawn: tuple[nn.Module, Tensor, Case], kind: str, chosen: dict[str, Any], last: bool, device: str
) -> None:
    model, x, case = drawn
    loss, moved = LOSSES[kind][0](**chosen), case.to(device)
    truth = dense_ggn(model, x, **case.given, loss=loss)
    size = 1e-3 * size_of(loss, case) * float(dense_jacobian(model, x).square().sum())
    if last:
        width = sum(p.numel() for p in [m for m in model.modules() if isinstance(m, nn.Linear)][-1].parameters())
        truth = truth[-width:, -width:]
    given = {**moved.given, "loss": loss, "subset_of_weights": "last_layer" if last else "all", "clamp": False}
    model, x = model.to(device), x.to(device)
    assert close(cc.ggn(model, x, **given).cpu(), truth.diagonal(), size)
    assert close(cc.ggn(model, x, structure="full", **given).cpu(), truth, size)


def problem(device: str) -> tuple[nn.Module, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    x, y = torch.randn(14, 4, dtype=torch.float64, device=device), (torch.arange(14) % 3).to(device)
    return model, x, y, list(zip(x.split(5), y.split(5), strict=True))


@covering(2, kind=LOSSES, fix=FIXES, distance=DISTANCES, normalization=NORMALIZATIONS, last=[False, True])
@pytest.mark.filterwarnings("ignore:The clamped curvature is zero everywhere")
def test_a_data_set_in_batches_is_its_pairs_at_once(
    kind: str, fix: str, distance: str, normalization: str, last: bool, device: str
) -> None:
    model, x, y, loader = problem(device)
    loss = LOSSES[kind][0](distance=distance, pd_fix=fix, normalization=normalization)
    backend = cc.ContrastiveGGN(model, last_layer=False, loss=loss)
    subset = "last_layer" if last else "all"
    scale = 14 / 2 if normalization == "type" else 1.0
    for structure in ("diag", "full"):
        if last:
            la = Laplace(model, "contrastive", "last_layer", structure, backend_kwargs={"loss": loss})
            la.fit(loader)
            found = la.H_raw
        else:
            found = backend.fit(loader, cc.options.Structure(structure)).curvature
        truth = scale * cc.ggn(model, x, y, loss=loss, structure=structure, subset_of_weights=subset, clamp=False)
        assert close(found, truth, tolerance=1e-11)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_structure_of_laplace(kind: str, device: str) -> None:
    model, _, _, loader = problem(device)
    loss = LOSSES[kind][0](pd_fix="psd")
    found = {}
    for structure in ("diag", "full", "kron", "lowrank", "gp"):
        more = {"n_subset": 6} if structure == "gp" else {}
        la = Laplace(model, "contrastive", "all", structure, backend_kwargs={"loss": loss}, **more)
        la.fit(loader)
        found[structure] = la(loader[0][0])
        assert bool(found[structure].kappa.isfinite().all()), structure
    # All are posteriors of one curvature: what they know most surely, they agree on in size.
    assert float((found["full"].kappa / found["lowrank"].kappa - 1).abs().max()) < 1e-3


def test_what_belongs_to_the_loss_is_refused_beside_it(device: str) -> None:
    model, x, y, _ = problem(device)
    for name, value in (("margin", 0.7), ("margin", None), ("negative_weight", 0.5), ("normalization", "anchor")):
        with pytest.raises(cc.InputError, match=f"loss, {name}"):
            cc.ggn(model, x, y, loss=cc.LogisticLoss(), **{name: value})
        with pytest.raises(cc.InputError, match=f"loss, {name}"):
            cc.output_hessian(x, y, loss=cc.LogisticLoss(), **{name: value})
        with pytest.raises(cc.InputError, match=f"loss, {name}"):
            Laplace(model, "contrastive", backend_kwargs={"loss": cc.LogisticLoss(), name: value})
    for wrong in (nn.MSELoss(), cc.LogisticLoss, "logistic"):
        with pytest.raises(cc.InputTypeError, match="loss"):
            cc.ggn(model, x, y, loss=wrong)


def test_split_options_win_over_those_of_the_loss(device: str) -> None:
    """``distance`` and ``pd_fix`` are matters of the Hessian; a loss only has defaults for them."""
    _, x, y, _ = problem(device)
    loss = cc.LogisticLoss(pd_fix="psd", distance="euclidean")
    assert cc.output_hessian(x, y, loss=loss).pd_fix == "psd"
    other = cc.output_hessian(x, y, loss=loss, pd_fix="full", distance="arccos")
    assert (other.pd_fix, other.distance) == ("full", "arccos")
    assert (loss.pd_fix, loss.distance) == ("psd", "euclidean")


@each(
    "options, name",
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"bias": math.inf}, "bias"),
        ({"scale": "1"}, "scale"),
    ],
)
def test_options_of_the_logistic_loss(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises((cc.InputError, cc.InputTypeError), match=name):
        cc.LogisticLoss(**options)


def test_online_training_with_another_loss(device: str) -> None:
    model, _, _, loader = problem(device)
    learner = cc.OnlineLaplace(
        model, probe=loader[0][0], n_data=14, backend_kwargs={"loss": cc.LogisticLoss(pd_fix="psd")}
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, y in loader:
        optimizer.zero_grad()
        value = learner(x, y)
        value.backward()
        optimizer.step()
    assert bool(learner.laplace()(loader[0][0]).kappa.isfinite().all())
