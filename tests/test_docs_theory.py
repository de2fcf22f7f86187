"""The formulas of "Any loss of cosines" in docs/theory.md, against the library and autograd in float64."""

import math

import pytest
import torch
from docs_rows import ROW_LOSSES, D, N, Rows, close, numbers
from tables import covering

import contrastive_curvature as cc


@covering(1, distance=["arccos", "euclidean"], name=ROW_LOSSES)
def test_hessian_is_a_first_and_a_second_part(name: str, distance: str, device: str) -> None:
    rows = Rows(ROW_LOSSES[name], device)
    first = rows.first_part(distance)
    full = rows.loss.output_hessian(rows.z, rows.labels, distance=distance, pd_fix="full").dense()
    if rows.loss.linear:
        assert close(full, first)
        return
    second = rows.second_part()
    assert close(full, first + second)
    # K is the same for both distances.
    assert close(rows.loss.output_hessian(rows.z, rows.labels, distance=distance, pd_fix="ggn").dense(), second)
    if distance == "arccos":
        exact = torch.autograd.functional.hessian(lambda z: rows.loss(z, rows.labels), rows.z)
        assert close(torch.as_tensor(exact).reshape(N * D, N * D), first + second, 1e-11)


def test_table_of_rows(device: str) -> None:
    """Derivatives of SupCon, SigLIP and multi-similarity, as the table has them."""
    rows = Rows(ROW_LOSSES["supcon"], device)
    s, pos, neg = rows.cosine, rows.positive, rows.negative
    p = ((pos + neg) * (s / 0.3).exp()) / ((pos + neg) * (s / 0.3).exp()).sum(1, keepdim=True)
    t = pos / pos.sum(1, keepdim=True)
    assert close(rows.terms.first, (p - t) / 0.3)
    assert close(torch.as_tensor(rows.terms.second), p / 0.09)
    assert close(rows.terms.roots[0], p / 0.3)
    rows = Rows(ROW_LOSSES["siglip"], device)
    x = 4 * s - 1
    assert close(rows.terms.first, 4 * (neg * x.sigmoid() - pos * (-x).sigmoid()))
    assert close(torch.as_tensor(rows.terms.second), 16 * (pos + neg) * x.sigmoid() * (-x).sigmoid())
    rows = Rows(ROW_LOSSES["multisimilarity"], device)
    p, q = pos * (-2 * (s - 0.4)).exp(), neg * (10 * (s - 0.4)).exp()
    p, q = p / (1 + p.sum(1, keepdim=True)), q / (1 + q.sum(1, keepdim=True))
    assert close(rows.terms.first, q - p)
    assert close(torch.as_tensor(rows.terms.second), 2 * p + 10 * q)
    assert close(rows.terms.roots[0], math.sqrt(2) * p)
    assert close(rows.terms.roots[1], math.sqrt(10) * q)
    rows = Rows(ROW_LOSSES["triplet"], device)
    active = pos[:, :, None] * neg[:, None, :] * (2 * s[:, None, :] - 2 * s[:, :, None] + 0.5 > 0)
    assert close(rows.terms.first, 2 * (active.sum(1) - active.sum(2)))


def test_two_roots_of_infonce(device: str) -> None:
    rows = Rows(ROW_LOSSES["infonce"], device)
    assert rows.loss.root_signs == (-1, 1)
    tau, s = 0.3, rows.cosine / 0.3
    for i in range(N):
        positives, negatives = rows.positive[i] > 0, rows.negative[i] > 0
        log_z = s[i][negatives].logsumexp(0)
        pi = (s[i] - log_z).sigmoid() * positives
        nu = (s[i] - log_z).exp() * negatives
        w = pi * (1 - pi)
        big, v = (1 - pi)[positives].sum(), w.sum()
        assert close(tau * rows.terms.first[i], (pi - 1) * positives + big * nu)
        curved = (w + big * nu).diag() - w[:, None] * nu - nu[:, None] * w - (big - v) * nu[:, None] * nu
        assert close(rows.curvature_of_rows()[i] / rows.factor, curved / tau**2)
        half = v / (2 * big.sqrt())
        assert close(rows.terms.roots[0][i], (w / big.sqrt() + (big.sqrt() - half) * nu) / tau)
        assert close(rows.terms.roots[1][i], (w / big.sqrt() - half * nu) / tau)
        minus_diagonal = torch.linalg.eigvalsh(curved - (w + big * nu).diag())
        size = float(minus_diagonal.abs().max())
        assert int((minus_diagonal > 1e-12 * size).sum()) == int((minus_diagonal < -1e-12 * size).sum()) == 1


@pytest.mark.parametrize(("kind", "margin"), [("softmax", 0.0), ("cosface", 0.3), ("arcface", 0.5)])
def test_second_derivatives_of_proxies(kind: str, margin: float, device: str) -> None:
    a, proxies, z = 3.0, numbers(1, 3, D).to(device), numbers(2, 1, D).to(device)
    loss = cc.ProxyLoss(proxies, a, margin, kind, reduction="sum", pd_fix="psd")
    w, u = proxies / proxies.norm(dim=1, keepdim=True), (z / z.norm())[0]
    y = torch.tensor([int((w @ u).argmax())], device=device)
    cosine = w @ u
    theta = cosine[y].arccos()
    phi, slope, bend = cosine[y] - margin, torch.ones_like(theta), torch.zeros_like(theta)
    if kind == "arcface":
        phi = (theta + margin).cos()
        slope = math.cos(margin) + math.sin(margin) * theta.cos() / theta.sin()
        bend = math.sin(margin) / theta.sin() ** 3
    p = (a * cosine.index_copy(0, y, phi)).softmax(0)
    g = a * p.index_copy(0, y, -slope * (1 - p[y]))
    scale = torch.ones_like(p).index_copy(0, y, slope)
    c = a**2 * scale[:, None] * (p.diag() - p[:, None] * p) * scale
    c[y, y] -= a * bend * (1 - p[y])
    projector = torch.eye(D, dtype=torch.float64, device=device) - u[:, None] * u
    s = -g @ w
    along = u @ s
    t = s - along * u
    first = along * projector + u[:, None] * t + t[:, None] * u
    second = projector @ w.T @ c @ w @ projector
    exact = torch.autograd.functional.hessian(lambda raw: loss(raw, y), z)
    truth = torch.as_tensor(exact).reshape(D, D)
    assert close((first + second) / z.square().sum(), truth, 1e-11)
    assert close(loss.output_hessian(z, y, pd_fix="full").dense(), truth, 1e-11)
    assert bool(torch.linalg.eigvalsh(c)[0] < -1e-3) is (kind == "arcface")


def test_second_derivatives_in_a_distance(device: str) -> None:
    a, b = 4.0, 3.0
    s = torch.linspace(-0.9, 0.95, 30, dtype=torch.float64, device=device)
    d = (2 - 2 * s).sqrt()
    p = (b - a * d).sigmoid()
    square = a**2 * p * (1 - p) / d**2
    for positive, formula in ((0.0, square + a * p / d**3), (1.0, square - a * (1 - p) / d**3)):
        attract = torch.full_like(s, positive)
        found = cc.SoftContrastiveLoss(a, b)._terms(s, attract, 1 - attract).second
        assert close(torch.as_tensor(found), formula)
        if positive:
            assert torch.equal(formula < 0, a * d * p < 1)
