"""CoSENT against a loop over comparisons, the formula of sentence-transformers, and autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import assume, given
from hypothesis import strategies as st
from row_cases import numbers
from strategies import DISTANCES, close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.losses import cosent
from contrastive_curvature.losses.cosent import CoSENTLoss
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.pairs.edges import GradedPairs
from contrastive_curvature.testing import dense_jacobian

pytestmark = pytest.mark.parametrize("device", DEVICES)

SCALES = (0.5, 20.0, 200.0)


@dataclass
class Drawn:
    """Points and graded pairs."""

    z: Tensor
    pairs: tuple[Tensor, Tensor, Tensor]
    scale: float

    def on(self, device: str, **options: Any) -> tuple[CoSENTLoss, Tensor, tuple[Tensor, ...]]:
        """The loss, points and pairs on a device."""
        return CoSENTLoss(self.scale, **options), self.z.to(device), tuple(part.to(device) for part in self.pairs)

    @property
    def size(self) -> float:
        """Of the second derivatives before they cancel."""
        return (1 + self.scale) ** 2 * max(1, len(self.pairs[0])) / float(self.z.norm(dim=1).min()) ** 2


@st.composite
def problems(draw: st.DrawFn) -> Drawn:
    """Points in several pairs, pairs listed several times and in both orders, equal grades, no pairs at all."""
    seed, n, dim = draw(st.integers(0, 2**16)), draw(st.integers(2, 6)), draw(st.integers(1, 4))
    count, grades = draw(st.integers(0, 8)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(0, n, (count,), generator=generator)
    b = (a + 1 + torch.randint(0, n - 1, (count,), generator=generator)) % n
    order = torch.randint(0, grades, (count,), generator=generator)
    kind = draw(st.sampled_from((torch.float64, torch.float32, torch.int64)))
    return Drawn(numbers(seed, n, dim), (a, b, order.to(kind) - 2), draw(st.sampled_from(SCALES)))


def cosines(z: Tensor, pairs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    u = z / z.norm(dim=1, keepdim=True)
    return (u[pairs[0]] * u[pairs[1]]).sum(1)


def by_hand(s: Tensor, grades: Tensor, scale: float) -> Tensor:
    """The loss from the cosines of the listed pairs, one comparison after the other."""
    terms = [0 * s.sum()]
    for k, high in enumerate(grades.tolist()):
        terms += [scale * (s[j] - s[k]) for j, low in enumerate(grades.tolist()) if high > low]
    return torch.stack(terms).logsumexp(0)


def oracle(drawn: Drawn, distance: str, fix: str) -> Tensor:
    """The Hessian (N D, N D) as the fix and the distance want it, by autograd of :func:`by_hand`."""
    if fix == "psd_parts":
        values, vectors = torch.linalg.eigh(oracle(drawn, distance, "fixed") - oracle(drawn, distance, "ggn_fixed"))
        return vectors @ torch.diag(values.clamp(min=0)) @ vectors.T + oracle(drawn, distance, "ggn_fixed")
    z, (n, dim), (a, b, grades) = drawn.z, drawn.z.shape, drawn.pairs

    def unit(z: Tensor) -> Tensor:
        return z / z.norm(dim=1, keepdim=True)

    def cosine(u: Tensor) -> Tensor:
        if distance == "arccos":
            return (u[a] * u[b]).sum(1)
        return 1 - (u[a] - u[b]).square().sum(1) / 2

    s = cosine(unit(z)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(by_hand(s, grades, drawn.scale), s)
    dropped = torch.zeros_like(slope)
    if fix.startswith("ggn"):
        dropped = slope
    elif fix == "positive":
        # The slope of a pair is that of all places where it is listed.
        total: dict[frozenset[int], float] = {}
        keys = [frozenset(ends) for ends in zip(a.tolist(), b.tolist(), strict=True)]
        for key, value in zip(keys, slope.tolist(), strict=True):
            total[key] = total.get(key, 0.0) + value
        dropped = slope * torch.tensor([total[key] > 0 for key in keys], dtype=slope.dtype)

    def left(u: Tensor) -> Tensor:
        # A loss minus its tangent line has no first-order part.
        return by_hand(cosine(u), grades, drawn.scale) - (dropped * cosine(u)).sum()

    if distance == "arccos":
        out = torch.autograd.functional.hessian(lambda z: left(unit(z)), z).reshape(n * dim, -1)
    else:
        jacobian = torch.autograd.functional.jacobian(unit, z).reshape(n * dim, -1)
        out = jacobian.T @ torch.autograd.functional.hessian(left, unit(z)).reshape(n * dim, -1) @ jacobian
    if fix in ("fixed", "psd", "ggn_fixed"):
        out = out * torch.eye(n, dtype=out.dtype).repeat_interleave(dim, 0).repeat_interleave(dim, 1)
    if fix == "psd":
        values, vectors = torch.linalg.eigh(out)
        out = vectors @ torch.diag(values.clamp(min=0)) @ vectors.T
    return out


@given(drawn=problems())
def test_value_is_that_of_a_loop_over_comparisons(drawn: Drawn, device: str) -> None:
    loss, z, pairs = drawn.on(device)
    s, grades = cosines(drawn.z, drawn.pairs).tolist(), drawn.pairs[2].tolist()
    gaps = [drawn.scale * (low - high) for high, y in zip(s, grades) for low, x in zip(s, grades) if y > x]  # noqa: B905
    top = max([0.0, *gaps])
    truth = top + math.log(math.exp(-top) + math.fsum(math.exp(gap - top) for gap in gaps))
    assert float(loss(z, pairs=pairs)) == pytest.approx(truth, rel=1e-12, abs=1e-14 * drawn.scale)
    for found in loss.output_hessian(z, pairs=pairs).loss_and_cost():
        assert float(found) == pytest.approx(truth, rel=1e-12, abs=1e-14 * drawn.scale)


@given(drawn=problems())
def test_equals_sentence_transformers(drawn: Drawn, device: str) -> None:
    """Its way: all differences, those that do not count moved out of sight, and a zero put in front."""
    loss, z, pairs = drawn.on(device)
    z = z.clone().requires_grad_()
    scores = torch.cosine_similarity(z[pairs[0]], z[pairs[1]]) * drawn.scale
    below = (pairs[2][:, None] < pairs[2][None, :]).to(z.dtype)
    masked = scores[:, None] - scores[None, :] - (1 - below) * 1e12
    theirs = torch.logsumexp(torch.cat([torch.zeros(1).to(z), masked.flatten()]), dim=0)
    ours = loss(z, pairs=pairs)
    assert close(ours.detach().reshape(1), theirs.detach().reshape(1), drawn.scale, 1e-12)
    gradients = [torch.autograd.grad(value, z)[0] for value in (ours, theirs)]
    assert close(*gradients, drawn.size**0.5, 1e-12)


@given(drawn=problems(), distance=st.sampled_from(DISTANCES), fix=st.sampled_from(tuple(cc.PDFix)))
def test_hessian_is_that_of_autograd(drawn: Drawn, distance: str, fix: str, device: str) -> None:
    loss, z, pairs = drawn.on(device, distance=distance, pd_fix=fix)
    found, truth, (n, dim) = loss.output_hessian(z, pairs=pairs), oracle(drawn, distance, fix), drawn.z.shape
    # Autograd subtracts numbers of the size of the second derivatives: what cancels leaves their rounding errors.
    floor = 1e-5 * drawn.size
    assert close(found.dense().cpu(), truth, floor)
    assert close(found.diagonal().flatten().cpu(), truth.diagonal(), floor)
    unit = torch.eye(n * dim, dtype=z.dtype, device=device).view(n, dim, -1)
    assert close(found.matvec(unit).reshape(n * dim, -1).cpu(), truth, floor)
    total = truth.view(n, dim, n, dim).diagonal(dim1=0, dim2=2).sum(2)
    assert close(found.blocks.total().cpu(), total, floor)
    if fix in ("ggn", "ggn_fixed", "psd", "psd_parts"):
        low = float(torch.linalg.eigvalsh(found.dense()).min())
        assert low >= -1e-12 * max(float(truth.abs().max()), 1e-3 * drawn.size)


@given(drawn=problems())
def test_full_is_the_hessian_of_the_loss(drawn: Drawn, device: str) -> None:
    loss, z, pairs = drawn.on(device, pd_fix="full")
    truth = torch.autograd.functional.hessian(lambda z: loss(z, pairs=pairs), z).reshape(z.numel(), -1)
    assert close(loss.output_hessian(z, pairs=pairs).dense(), truth, 1e-5 * drawn.size)


@given(drawn=problems(), fix=st.sampled_from(("full", "positive", "ggn")), data=st.data())
def test_products_and_cross_blocks_agree_with_dense(drawn: Drawn, fix: str, data: st.DataObject, device: str) -> None:
    loss, z, pairs = drawn.on(device, pd_fix=fix)
    found = loss.output_hessian(z, pairs=pairs)
    (n, dim), dense, size = z.shape, found.dense(), drawn.size
    v, w = (numbers(k, n, dim, 2).to(device) for k in range(2))
    assert close(found.matvec(v).reshape(n * dim, 2), dense @ v.reshape(n * dim, 2), size, 1e-13)
    assert close(found.matvec(v[..., 0]), found.matvec(v)[..., 0], size, 1e-13)
    wide = numbers(2, n, dim, 7).to(device)
    assert close(found.blocks.matmul(wide), found.blocks.dense() @ wide, size, 1e-13)
    four = dense.view(n, dim, n, dim).clone()
    four[torch.arange(n), :, torch.arange(n)] = 0
    low, high = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    middle, everything = slice(low, high), slice(0, n)
    for left, right in ((middle, everything), (middle, middle), (everything, middle), (everything, everything)):
        cross, part = found.cross(left, right), four[left][:, :, right]
        assert close(cross.matmul(v[right]), torch.einsum("iajb,jbk->iak", part, v[right]), size, 1e-13)
        forms = torch.einsum("iak,iajb,jbk->kij", w[left], part, v[right])
        assert close(cross.forms(w[left], v[right]), forms, size, 1e-13)
        for k in range(dim):
            assert close(cross.axis(k), part[:, k, :, k], size, 1e-13)
        if part.numel():
            i, j = torch.cartesian_prod(*(torch.arange(side, device=device) for side in cross.shape)).unbind(1)
            assert close(cross.diagonals(i, j), torch.diagonal(part[i, :, j], dim1=1, dim2=2), size, 1e-13)


@given(drawn=problems())
def test_linked_points_are_those_with_a_block(drawn: Drawn, device: str) -> None:
    loss, z, pairs = drawn.on(device, pd_fix="full")
    found, (n, dim) = loss.output_hessian(z, pairs=pairs), drawn.z.shape
    blocks = found.dense().view(n, dim, n, dim).abs().amax((1, 3)).fill_diagonal_(0)
    assert not (blocks[found.linked() == 0] > 1e-14 * drawn.size).any()
    listed = torch.zeros(n, dtype=torch.bool, device=device)
    listed[torch.cat(pairs[:2])] = True
    assert not found.linked()[~listed].any()


@given(drawn=problems())
def test_parts_of_the_blocks_agree_with_the_whole(drawn: Drawn, device: str) -> None:
    loss, z, pairs = drawn.on(device, pd_fix="full")
    whole = loss.output_hessian(z, pairs=pairs).blocks
    dense, rows = whole.dense(), slice(1, len(z) - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cosent, "_ROWS", 3)
        patch.setattr("contrastive_curvature.pairs.relation.BLOCK_ELEMENTS", 1)
        found = loss.output_hessian(z, pairs=pairs).blocks
        assert close(found.dense(), dense, drawn.size, 1e-13)
        assert close(found[rows].dense(), dense[rows], drawn.size, 1e-13)
        assert close(found[rows].diagonal(), dense[rows].diagonal(dim1=1, dim2=2), drawn.size, 1e-13)
        assert close(found[rows].total(), dense[rows].sum(0), drawn.size, 1e-12)
    moments = loss.derivatives(loss.relate(z, None, pairs), z / z.norm(dim=1, keepdim=True)).node_sums().moments
    assert moments is not None
    assert bool((moments.bound() * (1 + 1e-12) >= moments.dense().abs().amax((1, 2))).all())


@given(drawn=problems())
def test_two_towers_are_one_after_the_other(drawn: Drawn, device: str) -> None:
    assume(len(drawn.pairs[0]) > 0)
    loss, z, (a, b, grades) = drawn.on(device)
    count = len(a)
    towers = [z[a].clone().requires_grad_(), z[b].clone().requires_grad_()]
    value, index = loss.between(*towers, grades), torch.arange(2 * count, device=device)
    joined = torch.cat(towers)
    truth = loss(joined, pairs=(index[:count], index[count:], grades))
    assert close(value.detach().reshape(1), truth.detach().reshape(1), drawn.scale, 1e-13)
    assert close(value.detach().reshape(1), loss(z, pairs=(a, b, grades)).reshape(1), drawn.scale, 1e-13)
    ours, theirs = (torch.cat(torch.autograd.grad(v, towers, retain_graph=True)) for v in (value, truth))
    assert close(ours, theirs, drawn.size**0.5, 1e-13)


@pytest.mark.parametrize("spread", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("ordered", [True, False])
def test_float32_keeps_its_digits_at_a_large_scale(spread: float, ordered: bool, device: str) -> None:
    base = numbers(0, 1, 6)
    z = (base + spread * numbers(1, 24, 6)).float()
    index = torch.arange(24, device=device)
    s = torch.cosine_similarity(z[:12], z[12:])
    # In the right order the loss is nearly zero; in the wrong one a single comparison has nearly all of the softmax.
    pairs = (index[:12], index[12:], (s if ordered else -s).to(device))
    found = []
    for dtype in (torch.float32, torch.float64):
        given = z.to(device, dtype)
        found.append(CoSENTLoss(200.0).output_hessian(given, pairs=pairs).dense().double())
    size = float(found[1].abs().max())
    assert size > 0
    # Exponents of up to 400 are known to 400 * eps = 5e-5; tangents of near points have few digits.
    assert float((found[0] - found[1]).abs().max()) < 1e-3 * size
    assert bool((torch.linalg.eigvalsh(found[0]) > -1e-4 * size).all())


@pytest.mark.parametrize("fix", ["full", "psd", "ggn"])
def test_equal_grades_and_no_pairs_give_zero(fix: str, device: str) -> None:
    z = numbers(0, 4, 3).to(device).requires_grad_()
    index = torch.arange(4, device=device)
    loss = CoSENTLoss(pd_fix=fix)
    for count in (0, 1, 2):
        pairs = (index[:count], index[:count] + 1, torch.ones(count, device=device))
        value = loss(z, pairs=pairs)
        assert float(value.detach()) == 0
        assert not torch.autograd.grad(value, z)[0].any()
        found = loss.output_hessian(z.detach(), pairs=pairs)
        assert not found.dense().any()
        assert not found.matvec(z.detach()).any()
        assert float(found.loss_and_cost()[0]) == 0


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("fix", ["full", "ggn", "psd"])
def test_parameter_curvature(fix: str, structure: str, device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, index = numbers(0, 8, 4), torch.arange(8)
    pairs = (index[:4], index[4:], torch.tensor([0.1, 0.7, 0.3, 0.3]))
    loss = CoSENTLoss(5.0, pd_fix=fix)
    jacobian, dense = dense_jacobian(model, x), loss.output_hessian(model(x).detach(), pairs=pairs).dense()
    truth = jacobian.T @ dense @ jacobian
    given = {"loss": loss, "structure": structure, "clamp": False, "pairs": tuple(p.to(device) for p in pairs)}
    found = cc.ggn(model.to(device), x.to(device), **given).cpu()
    assert close(found, truth.diagonal() if structure == "diag" else truth)


def test_pairs_are_a_symmetric_relation(device: str) -> None:
    a, b = torch.tensor([0, 2, 1, 0], device=device), torch.tensor([1, 0, 0, 3], device=device)
    relation = GradedPairs(a, b, torch.zeros(4, device=device), 4, torch.device(device))
    positive, negative = relation.rows(0, 4)
    truth = torch.tensor([[0, 2, 1, 1], [2, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], device=device)
    assert torch.equal(positive, truth)
    assert not negative.any()
    assert torch.equal(relation.rows(1, 3, slice(0, 2))[0], truth[1:3, :2])


def test_a_host_finds_what_a_call_was_given(device: str) -> None:
    pairs = tuple(torch.tensor(part, device=device) for part in ([0, 1], [1, 2], [0.0, 1.0]))
    loss, z = CoSENTLoss(), torch.rand(3, 3, device=device, requires_grad=True)
    loss(z, pairs=pairs)
    assert loss.given_with(z) == (None, pairs)
    assert "scale=20.0" in repr(loss)


A, B, Y = torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([0.0, 1.0])
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"pairs": (A, B, Y[:1])}, r"pairs.*equal length.*\[2, 2, 1\]"),
    "too large": ({"pairs": (A, B + 1, Y)}, r"pairs.*0\.\.2 for 3 points.*2\.\.3"),
    "negative": ({"pairs": (A - 1, B, Y)}, r"pairs.*0\.\.2.*-1\.\.0"),
    "NaN": ({"pairs": (A, B, Y / 0)}, r"grades.*finite.*\[0, 1\]"),
    "itself": ({"pairs": (A, A, Y)}, r"pairs.*one point twice in pairs \[0, 1\]"),
    "float indices": ({"pairs": (A.float(), B, Y)}, r"pairs \(a\).*integer.*float32"),
    "complex grades": ({"pairs": (A, B, Y * 1j)}, r"grades.*complex"),
    "matrix": ({"pairs": (A, B, Y.unsqueeze(1))}, r"grades.*\(K,\).*\(2, 1\)"),
    "list": ({"pairs": ([0, 1], B, Y)}, r"pairs \(a\).*list"),
    "two": ({"pairs": (A, B)}, r"pairs.*\(a, b, grades\).*tuple of 2"),
    "callable": ({"pairs": torch.eq}, r"pairs.*\(a, b, grades\)"),
    "none": ({}, r"pairs.*\(a, b, grades\).*None"),
    "labels": ({"labels": A}, r"labels.*pairs=\(a, b, grades\)"),
    "zero": ({"z": torch.zeros(3, 3), "pairs": (A, B, Y)}, "z.*norm"),
}


@each("name", WRONG)
def test_wrong_input_is_named(name: str, device: str) -> None:
    given, words = WRONG[name]
    given = dict(given)
    if isinstance(given.get("pairs"), tuple):
        given["pairs"] = tuple(part.to(device) if isinstance(part, Tensor) else part for part in given["pairs"])
    z = given.pop("z", torch.ones(3, 3)).to(device)
    loss = CoSENTLoss()
    for call in (loss, loss.output_hessian):
        with pytest.raises(cc.InputError, match=words):
            call(z, **given)


def test_wrong_towers_and_options_are_named(device: str) -> None:
    z, loss = torch.ones(3, 2, device=device), CoSENTLoss()
    with pytest.raises(cc.InputError, match=r"z_b.*3"):
        loss.between(z, z[:2], torch.ones(3, device=device))
    with pytest.raises(cc.InputError, match="equal length"):
        loss.between(z, z, torch.ones(2, device=device))
    with pytest.raises(cc.InputError, match="scale"):
        CoSENTLoss(0.0)
    with pytest.raises(cc.InputError, match=r"relation.*graded pairs.*LabelRelation"):
        loss.derivatives(make_relation(3, torch.device(device), torch.arange(3, device=device)), z)
