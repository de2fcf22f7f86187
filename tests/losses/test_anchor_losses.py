"""The losses of anchors, one table: values by hand, Hessians by autograd for every fix, and other libraries."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import check_cross_blocks, check_hessian, numbers, unit
from pytorch_metric_learning import distances, losses
from strategies import Case, cases, close
from tables import each
from torch import Tensor
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.losses import row_loss as rows
from contrastive_curvature.losses import triplet_hinge
from contrastive_curvature.losses.row_loss import RowLoss
from contrastive_curvature.losses.sides import joined_towers, two_towers
from contrastive_curvature.pairs import relation
from contrastive_curvature.testing.oracle import anchor_hessian, anchor_value, masks_of

FIXES = ("full", "fixed", "psd", "psd_parts", "positive", "ggn", "ggn_fixed")
TEMPERATURES = ((0.005,), (0.07,), (1.0,), (10.0,))


def infonce(s: list[float], positive: list[float], negative: list[float], tau: float) -> tuple[float, float]:
    """A softmax for every positive."""
    total = 0.0
    for a, times in zip(s, positive, strict=True):
        if times:
            total += times * math.log1p(sum(n * math.exp((b - a) / tau) for b, n in zip(s, negative, strict=True)))
    return total, sum(positive)


def supcon(s: list[float], positive: list[float], negative: list[float], tau: float) -> tuple[float, float]:
    """A positive stands once in the denominator, a negative as often as it counts."""
    total, parts = 0.0, list(zip(s, positive, negative, strict=True))
    for a, times, _ in parts:
        if times:
            denominator = sum((1.0 if p else n) * math.exp((b - a) / tau) for b, p, n in parts)
            total += times / sum(positive) * math.log(denominator)
    return total, float(any(positive))


def softplus(x: float) -> float:
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def siglip(s: list[float], positive: list[float], negative: list[float], a: float, b: float) -> tuple[float, float]:
    """Every pair by itself."""
    parts = list(zip(s, positive, negative, strict=True))
    total = sum(p * softplus(-a * cosine - b) + n * softplus(a * cosine + b) for cosine, p, n in parts)
    return total, float(any(p or n for _, p, n in parts))


def multisimilarity(
    s: list[float], positive: list[float], negative: list[float], alpha: float, beta: float, base: float
) -> tuple[float, float]:
    far = sum(p * math.exp(-alpha * (a - base)) for a, p in zip(s, positive, strict=True))
    near = sum(n * math.exp(beta * (a - base)) for a, n in zip(s, negative, strict=True))
    return math.log1p(far) / alpha + math.log1p(near) / beta, float(any(positive) or any(negative))


def triplet(s: list[float], positive: list[float], negative: list[float], margin: float) -> tuple[float, float]:
    """The mean is over the triplets that cost something."""
    total = active = 0.0
    for a, p in zip(s, positive, strict=True):
        for b, n in zip(s, negative, strict=True):
            cost = max(0.0, 2 * b - 2 * a + margin)
            total, active = total + p * n * cost, active + p * n * (cost > 0)
    return total, active


class Family(NamedTuple):
    make: Any
    by_hand: Callable[..., tuple[float, float]]
    """The sum over the terms of an anchor, and their number, from its cosines and how often each candidate counts."""
    options: tuple[tuple[float, ...], ...]
    anchors: int
    """How many of five points with labels 0, 0, 1, 2, 3 have terms."""


FAMILIES = {
    "infonce": Family(cc.InfoNCELoss, infonce, TEMPERATURES, 2),
    "supcon": Family(cc.SupConLoss, supcon, TEMPERATURES, 2),
    "siglip": Family(cc.SigLIPLoss, siglip, ((10.0, -10.0), (1.0, 0.3), (100.0, -50.0)), 5),
    "multisimilarity": Family(
        cc.MultiSimilarityLoss, multisimilarity, ((2.0, 50.0, 0.5), (1.0, 1.0, -0.2), (20.0, 3.0, 1.0)), 5
    ),
    # No tie at any of these margins where cosines are 1 and -1, as in one dimension.
    "triplet": Family(cc.TripletLoss, triplet, ((0.05,), (0.2,), (1.3,), (9.0,)), 2),
}
every_family = pytest.mark.parametrize("name", FAMILIES)


def draw_loss(data: st.DataObject, name: str, fixes: tuple[str, ...] = FIXES, **options: Any) -> RowLoss:
    kind = FAMILIES[name].make
    fixes = tuple(fix for fix in fixes if not (kind.linear and fix.startswith("ggn")))
    chosen = {"reduction": ("mean", "sum"), "distance": ("arccos", "euclidean"), "pd_fix": fixes}
    drawn = {key: data.draw(st.sampled_from(values)) for key, values in chosen.items() if key not in options}
    return kind(*data.draw(st.sampled_from(FAMILIES[name].options)), **drawn, **options)


def as_pairs(loss: RowLoss, case: Case) -> Case:
    """The case with listed pairs: three tensors of indices are triplets for the triplet loss, see below."""
    if isinstance(loss, cc.TripletLoss) and isinstance(case.pairs, tuple) and len(case.pairs) == 3:
        return Case(case.z, case.labels, (*case.pairs[:2], case.pairs[0], case.pairs[2]), case.options)
    return case


def steepness(loss: Any) -> float:
    """Of the loss in a cosine."""
    names = ("scale", "alpha", "beta", "bias", "base", "margin")
    return 1 + sum(abs(getattr(loss, name, 0.0)) for name in names) + 1 / getattr(loss, "temperature", math.inf)


def size_of(loss: RowLoss, z: Tensor, **pairs: Any) -> float:
    """Of the terms that may cancel in the Hessian."""
    full = loss.replaced(pd_fix="full").output_hessian(z, **pairs).derivatives.dense()
    return sum(float(part.abs().sum()) for part in full if part is not None) / float(z.norm(dim=1).min()) ** 2


@contextmanager
def pieces(small: bool) -> Iterator[None]:
    """Blocks of one anchor, and derivatives that are computed again each time; or all at once."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(rows, "_HELD_ELEMENTS", 0)
            patch.setattr(relation, "BLOCK_ELEMENTS", 1)
        yield


@every_family
@given(case=cases(), data=st.data())
def test_value_is_that_of_a_loop_over_anchors(name: str, case: Case, data: st.DataObject, device: str) -> None:
    family, reduction = FAMILIES[name], data.draw(st.sampled_from(("mean", "sum")))
    chosen = data.draw(st.sampled_from(family.options))
    loss = family.make(*chosen, reduction=reduction)
    case = as_pairs(loss, case)
    s = (unit(case.z) @ unit(case.z).T).tolist()
    positive, negative = masks_of(len(s), case.labels, case.pairs)
    total = terms = 0.0
    for row in zip(s, positive.tolist(), negative.tolist(), strict=True):
        value, count = family.by_hand(*row, *chosen)
        if count:
            total, terms = total + value, terms + count
    truth = total if reduction == "sum" else total / max(terms, 1e-300)
    moved = case.to(device)
    z = moved.z.requires_grad_()
    value = loss(z, **moved.given)
    assert float(value.detach()) == pytest.approx(truth, rel=1e-11, abs=1e-12 * steepness(loss) * (1 + terms))
    (gradient,) = torch.autograd.grad(value, z)
    assert bool(gradient.isfinite().all())
    assert terms or not gradient.any()


@every_family
@given(case=cases(), data=st.data())
def test_output_hessian_equals_autograd(name: str, case: Case, data: st.DataObject, device: str) -> None:
    loss = draw_loss(data, name)
    case = as_pairs(loss, case)
    moved, value = case.to(device), anchor_value(loss, *masks_of(len(case.z), case.labels, case.pairs))
    truth = anchor_hessian(value, case.z, str(loss.distance), str(loss.pd_fix))
    want, floor = float(value(unit(case.z) @ unit(case.z).T)), 1e-3 * size_of(loss, case.z, **case.given)
    if name == "siglip":
        # Torch's second derivative of logsigmoid is zero where the sigmoid rounds to one: two negatives at a right
        # angle have the curvature exp(-50), and autograd none.
        floor += 1e-5 * loss.scale**2 / float(case.z.norm(dim=1).min()) ** 2
    for small in (False, True):
        with pieces(small):
            found = loss.output_hessian(moved.z, **moved.given)
            check_hessian(found, truth, floor)
            for one in (loss(moved.z, **moved.given), *found.loss_and_cost()[:1]):
                assert abs(float(one) - want) <= 1e-11 * (1 + abs(want))
    # In a fit a mean counts once for each of its anchors.
    times = found.derivatives.anchors if loss.averages else 1
    data_set = loss.data_hessian(moved.z, loss.relate(moved.z, moved.labels, moved.pairs))
    assert close(data_set.dense(), times * found.dense(), times * floor, 1e-12)


@given(case=cases(), name=st.sampled_from(tuple(FAMILIES)), data=st.data(), seed=st.integers(0, 999))
def test_products_and_cross_blocks_agree_with_dense(
    case: Case, name: str, data: st.DataObject, seed: int, device: str
) -> None:
    loss = draw_loss(data, name, ("full", "positive", "ggn"))
    moved = as_pairs(loss, case).to(device)
    found = loss.output_hessian(moved.z, **moved.given)
    check_cross_blocks(found, 10 * size_of(loss, moved.z, **moved.given), seed)


@every_family
@settings(max_examples=12)
@given(data=st.data(), dim=st.integers(2, 4), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_two_towers(name: str, data: st.DataObject, dim: int, sizes: tuple[int, int], device: str) -> None:
    """Point by point, or of different sizes with labels; in one direction or both."""
    labels = None
    if data.draw(st.booleans()):
        labels = tuple((torch.arange(n) % 3).to(device) for n in sizes)
    else:
        sizes = (sizes[0], sizes[0])
    seed = data.draw(st.integers(0, 2**16))
    a, b = (numbers(seed + k, n, dim).to(device) for k, n in enumerate(sizes))
    loss = draw_loss(
        data, name, ("full",), distance="arccos", directions=data.draw(st.sampled_from(("both", "a", "b")))
    )
    z, related, first = joined_towers(a, b, labels)
    sides, value = two_towers(first, len(z), loss.directions), loss.between(a, b, labels)
    truth = torch.autograd.functional.hessian(lambda z: loss.between(z[:first], z[first:], labels), z)
    for small in (False, True):
        with pieces(small):
            found = loss.hessian_at(z, related, sides=sides)
            floor = 1e-4 * len(z) * steepness(loss) ** 2 / float(z.norm(dim=1).min()) ** 2
            check_hessian(found, torch.as_tensor(truth).reshape(z.numel(), -1), floor)
            for one in (loss.between(a, b, labels), found.loss_and_cost()[0]):
                assert close(one.reshape(1), value.reshape(1), 1.0, 1e-12)


@every_family
def test_anchors_without_terms_are_left_out(name: str, device: str) -> None:
    loss, labels = FAMILIES[name].make(), torch.tensor([0, 0, 1, 2, 3], device=device)
    derivatives = loss.output_hessian(numbers(0, 5, 3).to(device), labels).derivatives
    assert (derivatives.anchors, derivatives.skipped) == (FAMILIES[name].anchors, 5 - FAMILIES[name].anchors)


@given(n=st.integers(2, 7), seed=st.integers(0, 99), soft=st.booleans(), data=st.data())
def test_partners_and_targets(n: int, seed: int, soft: bool, data: st.DataObject, device: str) -> None:
    """Positives with a direction: the index of a partner, and a distribution over the candidates."""
    name = data.draw(st.sampled_from([name for name in FAMILIES if name != "triplet"]))
    loss = draw_loss(data, name, tuple(fix for fix in FIXES if fix != "positive"))
    generator, others = torch.Generator().manual_seed(seed), 1 - torch.eye(n, dtype=torch.float64)
    z = numbers(seed, n, 3)
    if soft:
        some = torch.rand(n, n, generator=generator, dtype=torch.float64)
        pairs = others * (some * (some < 0.7) + 1e-3)
        pairs = positive = pairs / pairs.sum(1, keepdim=True)
    else:
        pairs = (torch.arange(n) + 1 + torch.randint(0, n - 1, (n,), generator=generator)) % n
        positive = F.one_hot(pairs, n).double()
    value = anchor_value(loss, positive, (positive == 0) * others)
    found = loss.output_hessian(z.to(device), pairs=pairs.to(device))
    check_hessian(found, anchor_hessian(value, z, str(loss.distance), str(loss.pd_fix)), size_of(loss, z, pairs=pairs))
    want = float(value(unit(z) @ unit(z).T))
    assert float(loss(z.to(device), pairs=pairs.to(device))) == pytest.approx(want, rel=1e-10, abs=1e-12)


@given(seed=st.integers(0, 2**16), many=st.integers(0, 6), margin=st.sampled_from((0.2, 3.0)), mean=st.booleans())
def test_listed_triplets_are_no_others(seed: int, many: int, margin: float, mean: bool, device: str) -> None:
    """Two triplets of one anchor are not the four that their pairs make; one that is listed twice counts twice."""
    z, generator = numbers(seed, 4, 3).to(device), torch.Generator().manual_seed(seed)
    pairs = tuple(torch.randint(0, 4, (3, many), generator=generator).to(device))
    s, total, active = unit(z) @ unit(z).T, 0.0, 0
    for a, p, n in zip(*(part.tolist() for part in pairs), strict=True):
        cost = float(2 * s[a, n] - 2 * s[a, p] + margin) if a not in (p, n) else 0.0
        total, active = total + max(0.0, cost), active + (cost > 0)
    loss = cc.TripletLoss(margin, "mean" if mean else "sum", pd_fix="full")
    want = total / max(active, 1) if mean else total
    assert float(loss(z, pairs=pairs)) == pytest.approx(want, rel=1e-12, abs=1e-14)
    truth = torch.as_tensor(torch.autograd.functional.hessian(lambda z: loss(z, pairs=pairs), z)).reshape(12, 12)
    found = loss.output_hessian(z, pairs=pairs)
    check_hessian(found, truth, size_of(loss, z, pairs=pairs))
    positive = loss.output_hessian(z, pairs=pairs, pd_fix="positive").derivatives.dense()[0]
    assert torch.equal(positive, found.derivatives.dense()[0].clamp(min=0))


def test_both_ends_of_a_triplet_agree_on_whether_it_is_active(device: str) -> None:
    """Where ``s_n = s_p - m / 2`` up to rounding, too: the weights of a row sum to zero."""
    loss, generator = cc.TripletLoss(0.2), torch.Generator().manual_seed(0)
    s = (torch.randint(-10, 11, (64, 40), generator=generator, dtype=torch.float64) / 10).to(device)
    positive = (torch.rand(64, 40, generator=generator) < 0.4).double().to(device)
    statistics = loss._statistics(s, positive, 1 - positive)
    first = loss._terms(s, positive, 1 - positive, statistics).first
    assert not first.sum(1).any()
    assert torch.equal(loss._counts_at(s, positive, 1 - positive), (first * (1 - positive)).sum(1) / 2)


def check_same(ours: Tensor, theirs: Tensor, z: Tensor) -> None:
    """Two losses have the same value and the same gradient."""
    assert close(ours.detach().reshape(1), theirs.detach().reshape(1), tolerance=1e-11)
    assert close(*(torch.autograd.grad(value, z)[0] for value in (ours, theirs)), tolerance=1e-11)


THEIRS = [
    *((cc.InfoNCELoss(tau), losses.NTXentLoss(tau)) for tau in (0.05, 1.0)),
    *((cc.SupConLoss(tau), losses.SupConLoss(tau)) for tau in (0.05, 1.0)),
    *((cc.MultiSimilarityLoss(*o), losses.MultiSimilarityLoss(*o)) for o in ((2.0, 50.0, 0.5), (1.0, 10.0, 0.0))),
    *(
        (cc.TripletLoss(m), losses.TripletMarginLoss(m, distance=distances.LpDistance(power=2)))
        for m in (0.0, 0.2, 1.5)
    ),
]


@each("ours, theirs", THEIRS)
def test_same_as_pytorch_metric_learning(ours: Any, theirs: Any, device: str) -> None:
    """Values and gradients. It adds the smallest normal number inside some sums, of no effect here.

    Its SupCon gives zero for a batch without negatives, where ours tells the positives apart from each other, and
    leaves anchors of zero loss out of the mean.
    """
    for seed in range(3):
        z, labels = numbers(seed, 12, 4).to(device).requires_grad_(), (torch.arange(12) % (2 + seed)).to(device)
        check_same(ours(z, labels), theirs(z, labels), z)
        if isinstance(ours, cc.SupConLoss):
            other, of_other = numbers(seed + 9, 8, 4).to(device), (torch.arange(8) % 3).to(device)
            one_way = cc.SupConLoss(ours.temperature, directions="a")
            check_same(
                one_way.between(z, other, (labels, of_other)), theirs(z, labels, ref_emb=other, ref_labels=of_other), z
            )
        if isinstance(ours, cc.TripletLoss):
            chosen = tuple(torch.tensor(part, device=device) for part in ([0, 1, 5, 5], [3, 2, 4, 6], [1, 0, 9, 9]))
            check_same(ours(z, pairs=chosen), theirs(z, labels, chosen), z)


@pytest.mark.parametrize("tau", [0.01, 1.0])
def test_two_towers_are_cross_entropies(tau: float, device: str) -> None:
    """CLIP's loss in both directions, ``MultipleNegativesRankingLoss`` of sentence-transformers in one, SigLIP's."""
    a, b, target = numbers(0, 6, 3).to(device), numbers(1, 6, 3).to(device), torch.arange(6, device=device)
    logits = F.normalize(a) @ F.normalize(b).T / tau
    one, other = F.cross_entropy(logits, target), F.cross_entropy(logits.T, target)
    pairs = 6 * F.binary_cross_entropy_with_logits(logits - 10, F.one_hot(target, 6).double())
    for directions, truth in (("a", one), ("b", other), ("both", (one + other) / 2)):
        for loss in (cc.InfoNCELoss(scale=1 / tau, directions=directions), cc.SupConLoss(tau, directions=directions)):
            assert close(loss.between(a, b).reshape(1), truth.reshape(1), tolerance=1e-13)
        found = cc.SigLIPLoss(1 / tau, -10.0, directions=directions).between(a, b)
        assert close(found.reshape(1), pairs.reshape(1), tolerance=1e-13)


@every_family
@pytest.mark.parametrize("pull", [0.0, 0.3, 1.0])
def test_single_precision(name: str, pull: float, device: str) -> None:
    """At low temperatures, and where every positive is told apart surely, so that all weights are small."""
    labels = (torch.arange(24) % 6).to(device)
    z = (numbers(0, 24, 5).to(device) + pull * numbers(1, 6, 5).to(device)[labels]).float()
    options = {"siglip": (100.0, -50.0), "multisimilarity": (2.0, 50.0, 0.5), "triplet": (0.2,)}.get(name, (0.005,))
    for fix in ("full", "fixed" if name == "triplet" else "ggn"):
        loss = FAMILIES[name].make(*options, pd_fix=fix)
        single, double = (loss.output_hessian(x, labels).dense().double() for x in (z, z.double()))
        # A logit is 200 cosines, each wrong by some 1e-7.
        assert close(single, double, tolerance=5e-4)


def test_separated_positives_lose_no_digits(device: str) -> None:
    """All weights are tiny where a positive has nearly all of its softmax; roots must not be larger."""
    z = torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [0, 0, 1.0], [0, 0.1, 1]], device=device)
    labels = (torch.arange(24) % 12).to(device)
    wide = (numbers(0, 24, 16) / 2 + 2 * numbers(1, 12, 16)[labels.cpu()]).float().to(device)
    for loss, points, y, most in (
        (cc.InfoNCELoss(0.07, pd_fix="full"), z, torch.tensor([0, 0, 1, 1], device=device), 1e-3),
        (cc.SupConLoss(0.02, pd_fix="fixed"), wide, labels, 1e-6),
    ):
        single, double = (loss.output_hessian(x, y).dense().double() for x in (points, points.double()))
        assert float(double.abs().max()) < most
        assert close(single, double, tolerance=1e-4)


@pytest.mark.parametrize(("tau", "radius"), [(0.02, 0), (0.02, 1e-2), (0.02, 0.1), (0.1, 0), (0.1, 0.3), (1e-3, 0.3)])
def test_what_a_trained_encoder_loses_beyond_the_least_keeps_its_digits(tau: float, radius: float, device: str) -> None:
    """SupCon less the entropy of its targets, both of the size of one, is 1e-15 where the classes have collapsed."""
    labels = torch.arange(24) // 6
    z = torch.eye(4, 6)[labels] + radius * numbers(0, 24, 6).float()
    twice = [torch.tensor(part) for part in ([0, 0, 0, 1], [1, 1, 2, 0], [0, 0, 1], [7, 7, 8])]
    for given_as in ({"labels": labels.to(device)}, {"pairs": tuple(part.to(device) for part in twice)}):
        for x, tolerance in ((z, 1e-3), (z.double(), 1e-9)):
            loss = cc.SupConLoss(tau, reduction="sum")
            found = loss.output_hessian(x.to(device), **given_as).loss_and_cost()[1]
            relation = loss.relate(x, *(given_as.get(name) for name in ("labels", "pairs")))
            masks = [mask.cpu() for mask in relation.rows(0, 24)]
            truth, anchors = beyond_the_least(x.double(), *masks, tau)
            # Single cosines are rounded, too: docs/defaults.md.
            rounding = anchors * (torch.finfo(x.dtype).eps / tau) ** 2
            assert float(found) == pytest.approx(truth, rel=tolerance, abs=rounding), (given_as.keys(), x.dtype)


def beyond_the_least(z: Tensor, positive: Tensor, negative: Tensor, tau: float) -> tuple[float, int]:
    """SupCon minus the entropy of its targets, with 60 digits; and the number of anchors."""
    total, anchors = mpmath.mpf(0), 0
    with mpmath.workdps(60):
        for i, (p, n) in enumerate(zip(positive.tolist(), negative.tolist(), strict=True)):
            if not sum(p):
                continue
            rows = [[mpmath.mpf(v) for v in row] for row in z.tolist()]
            size = [mpmath.sqrt(sum(v * v for v in row)) for row in rows]
            logits = [
                sum(map(mpmath.fmul, rows[i], row)) / size[i] / s / tau for row, s in zip(rows, size, strict=True)
            ]
            inside = sum((1 if a else b) * mpmath.exp(x) for x, a, b in zip(logits, p, n, strict=True) if a or b)
            targets = [(mpmath.mpf(a) / sum(p), x) for a, x in zip(p, logits, strict=True) if a]
            total += mpmath.log(inside) - sum(t * (x - mpmath.log(t)) for t, x in targets)
            anchors += 1
        return float(total), anchors


def test_promised_roots_survive_rounding(device: str) -> None:
    """In float32 the eigenvalues of a sure softmax are differences of larger terms."""
    labels = torch.arange(48) % 4
    z = (6 * torch.eye(8)[labels] + 0.2 * numbers(0, 48, 8).float()).to(device)
    for kind in (cc.SupConLoss, cc.InfoNCELoss):
        for fix in ("psd_parts", "psd", "ggn_fixed"):
            found = kind(0.05, pd_fix=fix).output_hessian(z, labels.to(device))
            assert found.is_psd(), (kind, fix)
            root = found.factor()
            size = float(found.blocks.terms().max()) if fix != "psd" else float(found.point_blocks().abs().max())
            assert close(root @ root.mT, found.point_blocks(), size, 1e-5)


@each(
    "pairs, kind, words",
    [
        (torch.tensor([1, 0, 2]), cc.InputError, r"another point.*rows \[2\]"),
        (torch.tensor([1, 0, 3]), cc.InputError, r"0\.\.2.*0\.\.3"),
        (torch.tensor([1, 0]), cc.InputError, r"shape \(3,\).*shape \(2,\)"),
        (torch.tensor([1.0, 0.0, 1.0]), cc.InputTypeError, r"partner.*float32"),
        (torch.full((3, 3), 0.5), cc.InputError, "zero diagonal"),
        (0.4 * (1 - torch.eye(3)), cc.InputError, r"sum to one.*0\.8.*rows \[0, 1, 2\]"),
        (torch.nan * torch.ones(3, 3), cc.InputError, "finite"),
    ],
)
def test_malformed_partners_and_targets(pairs: Tensor, kind: type[Exception], words: str, device: str) -> None:
    with pytest.raises(kind, match=words):
        cc.SupConLoss(0.1)(torch.randn(3, 4, device=device), pairs=pairs.to(device))


def test_what_the_triplet_loss_refuses(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    z, labels = numbers(0, 4, 3).to(device), torch.tensor([0, 0, 1, 1], device=device)
    with pytest.raises(cc.UnsupportedError, match=r"pd_fix='ggn': TripletLoss is piecewise linear"):
        cc.TripletLoss().output_hessian(z, labels, pd_fix="ggn")
    with pytest.raises(cc.InputError, match="pairs"):
        cc.TripletLoss()(z, pairs=tuple(torch.tensor(part, device=device) for part in ([0], [1], [7])))
    monkeypatch.setattr(triplet_hinge, "_MOST_PAIRS", 15)
    with pytest.raises(cc.UnsupportedError, match=r"4 anchors with 4 candidates.*smaller batches"):
        cc.TripletLoss().output_hessian(z, labels)
