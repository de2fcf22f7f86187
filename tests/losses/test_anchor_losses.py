"""Losses of anchors: every distance, fix and structure against autograd, for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases, close, network_cases
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses import row_derivatives
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.pairs import relation
from contrastive_curvature.testing.oracle import AnchorCase, anchor_hessian, dense_jacobian, masks_of

pytestmark = pytest.mark.parametrize("device", DEVICES)

FIXES = ("full", "fixed", "psd", "psd_parts", "positive", "ggn", "ggn_fixed")
LOSSES: dict[str, Any] = {
    "infonce": cc.InfoNCELoss,
    "supcon": cc.SupConLoss,
    "siglip": cc.SigLIPLoss,
    "multisimilarity": cc.MultiSimilarityLoss,
    "triplet": cc.TripletLoss,
}
TEMPERATURES = (0.005, 0.1, 1.0, 10.0)


@st.composite
def losses(draw: st.DrawFn) -> RowLoss:
    name = draw(st.sampled_from(sorted(LOSSES)))
    chosen: dict[str, Any] = {"reduction": draw(st.sampled_from(("mean", "sum")))}
    chosen["distance"] = draw(st.sampled_from(("arccos", "euclidean")))
    kind = LOSSES[name]
    chosen["pd_fix"] = draw(st.sampled_from([fix for fix in FIXES if not (kind.linear and fix.startswith("ggn"))]))
    if name in ("infonce", "supcon"):
        chosen["temperature"] = draw(st.sampled_from(TEMPERATURES))
    return kind(**chosen)


def as_pairs(loss: RowLoss, case: Case) -> Case:
    """The case with listed pairs: triplets of indices are triplets for the triplet loss."""
    if isinstance(loss, cc.TripletLoss) and isinstance(case.pairs, tuple) and len(case.pairs) == 3:
        return Case(case.z, case.labels, (*case.pairs[:2], case.pairs[0], case.pairs[2]), case.options)
    return case


def oracle(loss: RowLoss, case: Case) -> tuple[Tensor, float]:
    """The dense Hessian, and the size of the terms that may cancel in it."""
    at = AnchorCase(loss, *masks_of(len(case.z), case.labels, case.pairs))
    truth = anchor_hessian(at, case.z, str(loss.distance), str(loss.pd_fix))
    full = loss.replaced(pd_fix="full").output_hessian(case.z, **case.given).derivatives.dense()
    size = sum(float(part.abs().sum()) for part in full if part is not None)
    return truth, size / float(case.z.norm(dim=1).min()) ** 2


@given(case=cases(), loss=losses())
def test_output_hessian_equals_autograd(case: Case, loss: RowLoss, device: str) -> None:
    case = as_pairs(loss, case)
    moved = case.to(device)
    truth, size = oracle(loss, case)
    found = loss.output_hessian(moved.z, **moved.given)
    size *= 1e-3
    assert close(found.dense().cpu(), truth, size)
    assert close(found.diagonal().flatten().cpu(), truth.diagonal(), size)
    n, dim = case.z.shape
    blocks = truth.view(n, dim, n, dim)[torch.arange(n), :, torch.arange(n)]
    assert close(found.point_blocks().cpu(), blocks, size)
    assert close(found.blocks.total().cpu(), blocks.sum(0), size)
    axes = torch.eye(n * dim, dtype=torch.float64, device=device).view(n, dim, -1)
    assert close(found.matvec(axes).reshape(n * dim, -1).cpu(), truth, size)
    signed = found.signed_factor()
    if signed.sums_batch:
        flat = signed.columns.flatten(1)
        assert close((flat.T @ (signed.signs.unsqueeze(1) * flat)).cpu(), truth, size)
    else:
        rebuilt = torch.einsum("cnd,cn,cne->nde", signed.columns, signed.signs, signed.columns)
        assert close(rebuilt.cpu(), blocks, size)
    value = AnchorCase(loss, *masks_of(n, case.labels, case.pairs))
    u = case.z / case.z.norm(dim=1, keepdim=True)
    want = float(value(u @ u.T))
    assert abs(float(loss(moved.z, **moved.given)) - want) <= 1e-11 * (1 + abs(want))
    assert abs(float(found.loss_and_cost()[0]) - want) <= 1e-11 * (1 + abs(want))


@given(case=cases(), loss=losses(), columns=st.integers(1, 3), data=st.data())
def test_cross_blocks_agree_with_dense(
    case: Case, loss: RowLoss, columns: int, data: st.DataObject, device: str
) -> None:
    case = as_pairs(loss, case)
    moved = case.to(device)
    found = loss.output_hessian(moved.z, **moved.given)
    if not found.coupled:
        return
    size = 10 * oracle(loss, case)[1]
    dense, (n, dim) = found.dense(), case.z.shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    v, w = torch.randn(2, n, dim, columns, generator=generator, dtype=torch.float64).to(device)
    ends = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    rows, everything = slice(*ends), slice(0, n)
    for left, right in ((rows, everything), (rows, rows), (everything, rows)):
        cross, four = found.cross(left, right), dense.view(n, dim, n, dim).clone()
        four[torch.arange(n), :, torch.arange(n)] = 0
        part = four[left][:, :, right]
        assert close(cross.matmul(v[right]), torch.einsum("iajb,jbk->iak", part, v[right]), size, 1e-13)
        forms = torch.einsum("iak,iajb,jbk->kij", w[left], part, v[right])
        assert close(cross.forms(w[left], v[right]), forms, size, 1e-13)
        for k in range(dim):
            assert close(cross.axis(k), part[:, k, :, k], size, 1e-13)
        if part.numel():
            i, j = torch.cartesian_prod(*(torch.arange(count) for count in cross.shape)).unbind(1)
            assert close(cross.diagonals(i, j), torch.diagonal(part[i, :, j], dim1=1, dim2=2), size, 1e-13)


@given(drawn=network_cases(), loss=losses(), last=st.booleans())
def test_parameter_curvature_is_exact(
    drawn: tuple[nn.Module, Tensor, Case], loss: RowLoss, last: bool, device: str
) -> None:
    model, x, case = drawn
    case = as_pairs(loss, case)
    truth, size = oracle(loss, case)
    jacobian = dense_jacobian(model, x)
    truth = jacobian.T @ truth @ jacobian
    size *= 1e-3 * float(jacobian.square().sum())
    layer = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    # The weights of a last layer are taken whole, frozen or not.
    last = last and all(p.requires_grad for p in layer.parameters())
    if last:
        width = sum(p.numel() for p in layer.parameters())
        truth = truth[-width:, -width:]
    moved = case.to(device)
    given = {**moved.given, "loss": loss, "subset_of_weights": "last_layer" if last else "all", "clamp": False}
    model, x = model.to(device), x.to(device)
    assert close(cc.ggn(model, x, **given).cpu(), truth.diagonal(), size)
    assert close(cc.ggn(model, x, structure="full", **given).cpu(), truth, size)


@given(case=cases(), loss=losses())
def test_pieces_agree_with_the_whole(case: Case, loss: RowLoss, device: str) -> None:
    """Blocks of one anchor, and derivatives that are computed again each time, give the same."""
    case = as_pairs(loss, case)
    moved = case.to(device)
    try:
        whole = loss.output_hessian(moved.z, **moved.given)
    except UnrepresentableError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_derivatives, "_HELD_ELEMENTS", 0)
        patch.setattr(relation, "BLOCK_ELEMENTS", 1)
        pieces = loss.output_hessian(moved.z, **moved.given)
        size = 1e-2 * oracle(loss, case)[1]
        assert close(pieces.dense(), whole.dense(), size)
        assert close(pieces.diagonal(), whole.diagonal(), size)
        assert close(pieces.blocks.total(), whole.blocks.total(), size)
        v = torch.ones_like(moved.z)
        assert close(pieces.matvec(v), whole.matvec(v), size)
    assert relation.BLOCK_ELEMENTS > 1


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=20)
@given(case=cases(), tau=st.sampled_from((0.005, 0.1)))
def test_the_second_order_part_is_positive_semidefinite(name: str, case: Case, tau: float, device: str) -> None:
    """For losses that are convex in the cosines; without any clamp."""
    kind, moved = LOSSES[name], case.to(device)
    if kind.linear:
        return
    loss = kind(temperature=tau) if name in ("infonce", "supcon") else kind()
    found = loss.output_hessian(moved.z, pd_fix="ggn", **moved.given)
    size = oracle(loss.replaced(pd_fix="full"), case)[1]
    assert float(torch.linalg.eigvalsh(found.dense()).min()) >= -1e-12 * size
    alone = loss.output_hessian(moved.z, pd_fix="ggn_fixed", **moved.given)
    assert float(alone.diagonal().min()) >= -1e-14 * size
    root = alone.blocks.project_psd().factor()
    assert close(root @ root.mT, alone.point_blocks(), size, 1e-11)


@covering(1, name=sorted(LOSSES), tau=[0.005, 0.05])
def test_single_precision(name: str, tau: float, device: str) -> None:
    """At the smallest temperatures too: finite, not negative, and as float64 has it."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    z = (z[torch.arange(40) // 2] + 0.3 * z).to(device)
    labels = (torch.arange(40) // 2).to(device)
    kind = LOSSES[name]
    fix = "fixed" if kind.linear else "ggn_fixed"
    loss = kind(temperature=tau, pd_fix=fix) if name in ("infonce", "supcon") else kind(pd_fix=fix)
    exact = loss.output_hessian(z, labels).diagonal()
    single = loss.output_hessian(z.float(), labels).diagonal()
    assert close(single.double(), exact, tolerance=1e-3)
    if not kind.linear:
        assert float(single.min()) >= 0


@given(n=st.integers(2, 7), seed=st.integers(0, 99), soft=st.booleans(), loss=losses())
def test_partners_and_targets(n: int, seed: int, soft: bool, loss: RowLoss, device: str) -> None:
    """Positives with a direction: the index of a partner, and a distribution over the candidates."""
    if isinstance(loss, cc.TripletLoss) or loss.pd_fix == "positive":
        return
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    if soft:
        pairs = torch.rand(n, n, generator=generator, dtype=torch.float64).fill_diagonal_(0)
        pairs = pairs * (torch.rand(n, n, generator=generator) < 0.7) + 1e-3 * (1 - torch.eye(n))
        pairs = pairs.double().fill_diagonal_(0)
        pairs = pairs / pairs.sum(1, keepdim=True)
        positive = pairs
    else:
        pairs = (torch.arange(n) + 1 + torch.randint(0, n - 1, (n,), generator=generator)) % n
        positive = torch.nn.functional.one_hot(pairs, n).double()
    negative = ((positive == 0) & ~torch.eye(n, dtype=torch.bool)).double()
    at = AnchorCase(loss, positive, negative)
    truth = anchor_hessian(at, z, str(loss.distance), str(loss.pd_fix))
    found = loss.output_hessian(z.to(device), pairs=pairs.to(device))
    whole = loss.replaced(pd_fix="full").output_hessian(z, pairs=pairs).derivatives.dense()
    size = 1e-3 * sum(float(part.abs().sum()) for part in whole if part is not None) / float(z.norm(dim=1).min()) ** 2
    assert close(found.dense().cpu(), truth, size)
    u = z / z.norm(dim=1, keepdim=True)
    want = float(at(u @ u.T))
    assert float(loss(z.to(device), pairs=pairs.to(device))) == pytest.approx(want, rel=1e-10, abs=1e-12)


def test_one_partner_is_cross_entropy(device: str) -> None:
    z = torch.randn(6, 4, dtype=torch.float64, device=device)
    partner = torch.tensor([3, 4, 5, 0, 1, 2], device=device)
    u = torch.nn.functional.normalize(z)
    logits = (u @ u.T / 0.1).fill_diagonal_(-torch.inf)
    truth = torch.nn.functional.cross_entropy(logits, partner)
    for loss in (cc.InfoNCELoss(0.1), cc.SupConLoss(0.1)):
        assert float(loss(z, pairs=partner)) == pytest.approx(float(truth), rel=1e-12)
        assert float(loss(z, torch.arange(3, device=device).repeat(2))) == pytest.approx(float(truth), rel=1e-12)


@each(
    "pairs, kind, words",
    [
        (torch.tensor([1, 0, 2]), cc.InputError, r"another point.*rows \[2\]"),
        (torch.tensor([1, 0, 3]), cc.InputError, r"0\.\.2.*0\.\.3"),
        (torch.tensor([1, 0]), cc.InputError, r"shape \(3,\).*shape \(2,\)"),
        (torch.tensor([1.0, 0.0, 1.0]), cc.InputTypeError, r"partner.*float32"),
        (torch.full((3, 3), 0.5), cc.InputError, "zero diagonal"),
        (0.4 * (1 - torch.eye(3)), cc.InputError, r"sum to one.*0\.8.*rows \[0, 1, 2\]"),
        (-(1 - torch.eye(3)), cc.InputError, ">= 0"),
        (torch.nan * torch.ones(3, 3), cc.InputError, "finite"),
        (torch.ones(3, 3, dtype=torch.int64), cc.InputTypeError, "int64"),
    ],
)
def test_malformed_partners_and_targets(pairs: Tensor, kind: type[Exception], words: str, device: str) -> None:
    z = torch.randn(3, 4, device=device)
    with pytest.raises(kind, match=words):
        cc.SupConLoss(0.1)(z, pairs=pairs.to(device))
    with pytest.raises(cc.InputError, match="one of them"):
        cc.SupConLoss(0.1)(z, torch.zeros(3, dtype=torch.int64), pairs=torch.tensor([1, 2, 0]))


def test_promised_roots_survive_rounding(device: str) -> None:
    """In float32 the eigenvalues of a sure softmax are differences of larger terms."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % 4
    z = (6 * torch.eye(8)[labels] + 0.2 * torch.randn(48, 8, generator=generator)).to(device)
    for kind in (cc.SupConLoss, cc.InfoNCELoss):
        for fix in ("psd_parts", "psd", "ggn_fixed"):
            found = kind(0.05, pd_fix=fix).output_hessian(z, labels.to(device))
            assert found.is_psd(), (kind, fix)
            root = found.factor()
            size = float(found.blocks.terms().max()) if fix != "psd" else float(found.point_blocks().abs().max())
            assert close(root @ root.mT, found.point_blocks(), size, 1e-5)


def test_options_of_all_losses_can_be_replaced_and_no_others(device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=r"replaced.*normalization.*InfoNCELoss"):
        cc.InfoNCELoss().replaced(normalization="sum")
    for kind in (cc.InfoNCELoss, cc.SupConLoss):
        with pytest.raises(cc.InputError, match=r"temperature.*1e-06"):
            kind(1e-9)
