"""Losses of class proxies against loops, autograd and pytorch-metric-learning."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loss_cases import check_hessian, cosine_hessian, numbers, unit
from strategies import DISTANCES, close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses.proxy import ProxyLoss

KINDS = (("softmax", 0.0), ("cosface", 0.35), ("arcface", 0.0), ("arcface", 0.5), ("arcface", 2.6))
SCALES = (0.5, 16.0, 64.0)


@dataclass
class Drawn:
    """Points, their labels, proxies, and the options of the loss."""

    z: Tensor
    labels: Tensor
    proxies: Tensor
    options: dict[str, Any]

    def on(self, device: str, **others: Any) -> tuple[ProxyLoss, Tensor, Tensor]:
        """The loss, points and labels on a device."""
        loss = ProxyLoss(self.proxies.to(device), **{**self.options, **others})
        return loss, self.z.to(device), self.labels.to(device)

    @property
    def size(self) -> float:
        """Of the second derivatives before they cancel."""
        sine = 1.0
        if self.options["kind"] == "arcface" and self.options["margin"]:
            sine = float((1 - cosines(self.z, self.proxies).square()).sqrt().min())
        return (1 + self.options["scale"]) ** 2 / sine**3 / float(self.z.norm(dim=1).min()) ** 2


def cosines(z: Tensor, proxies: Tensor) -> Tensor:
    return unit(z) @ unit(proxies).T


@st.composite
def problems(draw: st.DrawFn) -> Drawn:
    """Any sizes from one; with a margin on the angle, no point is at its proxy or where the formula changes."""
    seed, n, classes, dim = (draw(st.integers(low, high)) for low, high in ((0, 2**16), (1, 5), (1, 6), (1, 4)))
    z, proxies = numbers(seed, n, dim), 3 * numbers(seed + 1, classes, dim)
    labels = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(seed))
    kind, margin = draw(st.sampled_from(KINDS))
    if kind == "arcface" and margin:
        own = cosines(z, proxies)[torch.arange(n), labels].clamp(-1, 1)
        assume(float(own.abs().max()) < 0.999)
        assume(float((own.acos() - (math.pi - margin)).abs().min()) > 1e-3)
    options = {"scale": draw(st.sampled_from(SCALES)), "margin": margin, "kind": kind}
    return Drawn(z, labels, proxies, {**options, "reduction": draw(st.sampled_from(("mean", "sum")))})


def by_hand(s: Tensor, labels: Tensor, scale: float, margin: float, kind: str, reduction: str) -> Tensor:
    """The loss from a matrix of cosines, one row after the other."""
    total = 0 * s.sum()
    for row, label in zip(s, labels.tolist(), strict=True):
        own = row[label]
        if kind == "cosface":
            own = own - margin
        elif kind == "arcface" and margin:
            angle = row[label].acos()
            own = (angle + margin).cos() if angle <= math.pi - margin else own - margin * math.sin(margin)
        others = [(scale * (row[j] - own)).exp() for j in range(len(row)) if j != label]
        if others:
            total = total + torch.stack(others).sum().log1p()
    return total / len(s) if reduction == "mean" else total


def oracle(drawn: Drawn, distance: str, fix: str) -> Tensor:
    """The Hessian (N D, N D) as the fix and the distance want it, by autograd of :func:`by_hand`."""
    proxies = unit(drawn.proxies)

    def cosine(u: Tensor) -> Tensor:
        return u @ proxies.T if distance == "arccos" else 1 - (u.unsqueeze(1) - proxies).square().sum(2) / 2

    def repelling(slope: Tensor) -> Tensor:
        return 1 - torch.nn.functional.one_hot(drawn.labels, len(proxies)).to(slope)

    def value(s: Tensor) -> Tensor:
        return by_hand(s, drawn.labels, **drawn.options)

    return cosine_hessian(drawn.z, cosine, value, repelling, distance, fix)


@given(drawn=problems())
def test_value_is_a_sum_over_points(drawn: Drawn, device: str) -> None:
    loss, z, labels = drawn.on(device)
    truth = float(by_hand(cosines(drawn.z, drawn.proxies), drawn.labels, **drawn.options))
    # Softmax of scaled cosines: rounding is relative to the scale.
    floor = 1e-14 * drawn.options["scale"] * len(z)
    assert float(loss(z, labels)) == pytest.approx(truth, rel=1e-11, abs=floor)
    for found in loss.output_hessian(z, labels).loss_and_cost():
        assert float(found) == pytest.approx(truth, rel=1e-11, abs=floor)


@given(drawn=problems(), distance=st.sampled_from(DISTANCES), fix=st.sampled_from(tuple(cc.PDFix)))
def test_hessian_is_that_of_autograd(drawn: Drawn, distance: str, fix: str, device: str) -> None:
    margin_on_angle = drawn.options["kind"] == "arcface" and drawn.options["margin"] > 0
    assume(not (fix in ("ggn", "ggn_fixed", "psd_parts") and margin_on_angle))
    loss, z, labels = drawn.on(device, distance=distance, pd_fix=fix)
    found, truth = loss.output_hessian(z, labels), oracle(drawn, distance, fix)
    # Autograd subtracts numbers of the size of the second derivatives: what cancels leaves their rounding errors.
    check_hessian(found, truth, 1e-5 * drawn.size)
    # Points do not see each other.
    assert not found.coupled
    if fix in ("ggn", "ggn_fixed", "psd", "psd_parts"):
        assert found.is_psd()
        low = float(torch.linalg.eigvalsh(found.dense()).min())
        assert low >= -1e-12 * max(float(truth.abs().max()), drawn.size)


@each("kind, margin", KINDS)
def test_float32_keeps_its_digits_where_a_softmax_is_concentrated(kind: str, margin: float, device: str) -> None:
    z, proxies = numbers(0, 300, 3).float(), numbers(1, 6, 3).float()
    labels = torch.arange(300, device=device) % 6
    convex = kind != "arcface" or margin == 0
    found = []
    for dtype in (torch.float32, torch.float64):
        loss = ProxyLoss(proxies.to(device, dtype), 200.0, margin, kind, "sum", pd_fix="ggn" if convex else "fixed")
        found.append(loss.output_hessian(z.to(device, dtype), labels).point_blocks().double())
    size = found[1].abs().amax((1, 2)) * z.norm(dim=1).to(device) ** 2
    # Below, squares of the first-order part vanish in float32.
    kept = size > 1e-12
    assert margin > 1 or float(size[kept].min()) < 1e-6
    assert float(size.max()) > 1e3
    # Every point by itself, however small its block is: logits of 200 are known to 1e-5.
    error = (found[0] - found[1]).abs().amax((1, 2)) * z.norm(dim=1).to(device) ** 2 / size
    assert float(error[kept].max()) < 1e-3


@pytest.mark.parametrize("elements", [1, 7])
@given(drawn=problems())
def test_blocks_of_points_change_nothing(drawn: Drawn, elements: int, device: str) -> None:
    loss, z, labels = drawn.on(device, pd_fix="full")
    whole = loss.output_hessian(z, labels)
    truth, total, value = whole.dense(), whole.blocks.total(), loss(z, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("contrastive_curvature.pairs.relation.BLOCK_ELEMENTS", elements)
        found = loss.output_hessian(z, labels)
        assert close(found.dense(), truth, drawn.size, 1e-13)
        assert close(found.diagonal().flatten(), truth.diagonal(), drawn.size, 1e-13)
        assert close(found.blocks.total(), total, drawn.size, 1e-12)
        assert close(loss(z, labels), value, drawn.options["scale"], 1e-13)


def test_an_embedding_on_its_proxy_is_named_with_a_margin_on_the_angle(device: str) -> None:
    proxies, labels = torch.eye(4, 3, device=device) + 0.0, torch.tensor([1, 0], device=device)
    proxies[3] = 1
    z = torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.0, 0.0]], device=device)
    with pytest.raises(UnrepresentableError, match=r"ProxyLoss.*points \[1\].*own proxy"):
        ProxyLoss(proxies, 16.0, 0.5, "arcface").output_hessian(z, labels)
    z = z.requires_grad_()
    (gradient,) = torch.autograd.grad(ProxyLoss(proxies, 16.0, 0.5, "arcface")(z, labels), z)
    assert bool(gradient.isfinite().all())
    for kind in ("softmax", "cosface"):
        ProxyLoss(proxies, kind=kind).output_hessian(z.detach(), labels)
    opposite = ProxyLoss(proxies, 16.0, 0.5, "arcface").output_hessian(-z.detach(), labels)
    assert bool(opposite.dense().isfinite().all())


@each("kind, margin", KINDS)
def test_one_class_or_no_point_is_flat(kind: str, margin: float, device: str) -> None:
    z, labels = torch.ones(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    loss = ProxyLoss(2 * z[:1], 16.0, margin, kind, pd_fix="full")
    for count in (2, 0):
        some = z[:count].clone().requires_grad_()
        value = loss(some, labels[:count])
        assert float(value.detach()) == 0
        assert not torch.autograd.grad(value, some)[0].any()
        found = loss.output_hessian(z[:count], labels[:count])
        assert not found.dense().any()
        assert found.dense().shape == (3 * count, 3 * count)


@given(drawn=problems())
def test_a_mean_counts_times_its_points_in_a_data_set(drawn: Drawn, device: str) -> None:
    loss, z, labels = drawn.on(device, reduction="mean", pd_fix="full")
    total = ProxyLoss(loss.proxies, **{**drawn.options, "reduction": "sum"}, pd_fix="full").output_hessian(z, labels)
    found = loss.data_hessian(z, loss.relate(z, labels, None))
    assert close(found.dense(), total.dense(), 0.0, 1e-14)
    assert close(found.loss_and_cost()[0].reshape(1), total.loss_and_cost()[0].reshape(1), 0.0, 1e-14)
    assert (found.derivatives.anchors, found.derivatives.skipped) == (len(z), 0)


def test_proxies_are_trained_and_told_apart(device: str) -> None:
    weights = numbers(0, 70, 5).float().to(device)
    loss, z, labels = ProxyLoss(nn.Parameter(weights.clone())), numbers(1, 3, 5).float().to(device), torch.arange(3)
    assert [name for name, _ in loss.named_parameters()] == ["proxies"]
    before, fixed = repr(loss), ProxyLoss(weights)
    assert "(70, 5)" in before
    assert not list(fixed.parameters())
    assert list(fixed.state_dict()) == ["proxies"]
    assert repr(fixed) == before
    optimizer = torch.optim.SGD(loss.parameters(), 1.0)
    loss(z, labels.to(device)).backward()
    optimizer.step()
    assert repr(loss) != before
    assert loss.replaced(pd_fix="psd").proxies is loss.proxies
    assert not loss.output_hessian(z, labels.to(device)).diagonal().requires_grad
    weights.zero_()
    assert repr(fixed) == before, "the proxies are the loss's own"


def test_the_default_fix_is_positive_semidefinite(device: str) -> None:
    proxies = torch.eye(3, device=device)
    chosen = {(kind, m): ProxyLoss(proxies, margin=m, kind=kind).pd_fix for kind, m in KINDS}
    assert [str(fix) for fix in chosen.values()] == ["psd_parts", "psd_parts", "psd_parts", "psd", "psd"]


A = torch.tensor([0, 1])


@each(
    "given, words",
    [
        ({"labels": A + 2}, r"labels.*0\.\.2.*label 3 of point 1"),
        ({"labels": A - 1}, r"labels.*label -1 of point 0"),
        ({"labels": torch.zeros(2)}, "labels.*integer"),
        ({"labels": A[:1]}, "labels.*2 embeddings"),
        ({}, "labels"),
        ({"pairs": (A, A, A)}, "pairs.*class labels"),
        ({"z": torch.ones(2, 4), "labels": A}, "z.*3 numbers.*4"),
    ],
)
def test_wrong_input_is_named(given: dict[str, Any], words: str, device: str) -> None:
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in given.items()}
    loss, z = ProxyLoss(torch.eye(3, device=device)), moved.pop("z", torch.ones(2, 3, device=device))
    for call in (loss, loss.output_hessian):
        with pytest.raises(cc.InputError, match=words):
            call(z, **moved)
