"""CoSENT against a loop over comparisons, the formula of sentence-transformers, and autograd."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loss_cases import check_cross_blocks, check_hessian, cosine_hessian, numbers, unit
from strategies import DISTANCES, close
from tables import each
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.losses.cosent import CoSENTLoss

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


def by_hand(s: Tensor, grades: Tensor, scale: float) -> Tensor:
    """The loss from the cosines of the listed pairs, one comparison after the other."""
    terms = [0 * s.sum()]
    for k, high in enumerate(grades.tolist()):
        terms += [scale * (s[j] - s[k]) for j, low in enumerate(grades.tolist()) if high > low]
    return torch.stack(terms).logsumexp(0)


def oracle(drawn: Drawn, distance: str, fix: str) -> Tensor:
    """The Hessian (N D, N D) as the fix and the distance want it, by autograd of :func:`by_hand`."""
    a, b, grades = drawn.pairs

    def cosine(u: Tensor) -> Tensor:
        return (u[a] * u[b]).sum(1) if distance == "arccos" else 1 - (u[a] - u[b]).square().sum(1) / 2

    def repelling(slope: Tensor) -> Tensor:
        # The slope of a pair is that of all places where it is listed.
        total: dict[frozenset[int], float] = {}
        keys = [frozenset(ends) for ends in zip(a.tolist(), b.tolist(), strict=True)]
        for key, value in zip(keys, slope.tolist(), strict=True):
            total[key] = total.get(key, 0.0) + value
        return torch.tensor([total[key] > 0 for key in keys], dtype=slope.dtype)

    return cosine_hessian(drawn.z, cosine, lambda s: by_hand(s, grades, drawn.scale), repelling, distance, fix)


@given(drawn=problems())
def test_value_is_that_of_a_loop_over_comparisons(drawn: Drawn, device: str) -> None:
    loss, z, pairs = drawn.on(device)
    u, (a, b, _) = unit(drawn.z), drawn.pairs
    s, grades = (u[a] * u[b]).sum(1).tolist(), drawn.pairs[2].tolist()
    gaps = [drawn.scale * (low - high) for high, y in zip(s, grades) for low, x in zip(s, grades) if y > x]  # noqa: B905
    top = max([0.0, *gaps])
    truth = top + math.log(math.exp(-top) + math.fsum(math.exp(gap - top) for gap in gaps))
    assert float(loss(z, pairs=pairs)) == pytest.approx(truth, rel=1e-12, abs=1e-14 * drawn.scale)
    for found in loss.output_hessian(z, pairs=pairs).loss_and_cost():
        assert float(found) == pytest.approx(truth, rel=1e-12, abs=1e-14 * drawn.scale)


@given(drawn=problems(), distance=st.sampled_from(DISTANCES), fix=st.sampled_from(tuple(cc.PDFix)))
def test_hessian_is_that_of_autograd(drawn: Drawn, distance: str, fix: str, device: str) -> None:
    loss, z, pairs = drawn.on(device, distance=distance, pd_fix=fix)
    found, truth = loss.output_hessian(z, pairs=pairs), oracle(drawn, distance, fix)
    # Autograd subtracts numbers of the size of the second derivatives: what cancels leaves their rounding errors.
    check_hessian(found, truth, 1e-4 * drawn.size)
    if fix in ("ggn", "ggn_fixed", "psd", "psd_parts"):
        low = float(torch.linalg.eigvalsh(found.dense()).min())
        assert low >= -1e-12 * max(float(truth.abs().max()), 1e-3 * drawn.size)


@given(drawn=problems(), fix=st.sampled_from(("full", "positive", "ggn")), seed=st.integers(0, 999))
def test_products_and_cross_blocks_agree_with_dense(drawn: Drawn, fix: str, seed: int, device: str) -> None:
    loss, z, pairs = drawn.on(device, pd_fix=fix)
    check_cross_blocks(loss.output_hessian(z, pairs=pairs), drawn.size, seed)


@given(drawn=problems())
def test_parts_of_the_blocks_agree_with_the_whole(drawn: Drawn, device: str) -> None:
    loss, z, pairs = drawn.on(device, pd_fix="full")
    whole = loss.output_hessian(z, pairs=pairs).blocks
    dense, rows = whole.dense(), slice(1, len(z) - 1)
    with pytest.MonkeyPatch.context() as patch:
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


@each("spread, ordered", [(0.02, True), (0.02, False), (1.0, True), (1.0, False)])
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


@each("fix", ["full", "psd", "ggn"])
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


A, B, Y = torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([0.0, 1.0])


@each(
    "given, words",
    [
        ({"pairs": (A, B, Y[:1])}, r"pairs.*equal length.*\[2, 2, 1\]"),
        ({"pairs": (A, B + 1, Y)}, r"pairs.*0\.\.2 for 3 points.*2\.\.3"),
        ({"pairs": (A, B, Y / 0)}, r"grades.*finite.*\[0, 1\]"),
        ({"pairs": (A, A, Y)}, r"pairs.*one point twice in pairs \[0, 1\]"),
        ({"pairs": (A.float(), B, Y)}, r"pairs \(a\).*integer.*float32"),
        ({"pairs": (A, B, Y.unsqueeze(1))}, r"grades.*\(K,\).*\(2, 1\)"),
        ({"pairs": (A, B)}, r"pairs.*\(a, b, grades\).*tuple of 2"),
        ({"pairs": torch.eq}, r"pairs.*\(a, b, grades\)"),
        ({"labels": A}, r"labels.*pairs=\(a, b, grades\)"),
    ],
)
def test_wrong_input_is_named(given: dict[str, Any], words: str, device: str) -> None:
    if isinstance(given.get("pairs"), tuple):
        given = {"pairs": tuple(part.to(device) for part in given["pairs"])}
    for call in (CoSENTLoss(), CoSENTLoss().output_hessian):
        with pytest.raises(cc.InputError, match=words):
            call(torch.ones(3, 3, device=device), **given)


def test_wrong_towers_are_named(device: str) -> None:
    z, loss = torch.ones(3, 2, device=device), CoSENTLoss()
    with pytest.raises(cc.InputError, match=r"z_b.*3"):
        loss.between(z, z[:2], torch.ones(3, device=device))
    with pytest.raises(cc.InputError, match="equal length"):
        loss.between(z, z, torch.ones(2, device=device))
