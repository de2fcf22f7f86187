"""Formulas that others publish for the same curvature: BayesVLM's own-row blocks, its Kronecker factors, its prior.

Written anew from what the published code computes; ``docs/other_methods.md`` names the files and lines.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from loss_cases import numbers
from strategies import close
from tables import each
from torch import Tensor, nn
from torch.nn import functional as F

from contrastive_curvature.losses import sides
from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.row_loss import RowLoss
from contrastive_curvature.losses.siglip import SigLIPLoss
from contrastive_curvature.network.two_towers import TwoTowers

Formula = Callable[[Tensor, Tensor], Tensor]
"""Own-row blocks (N, D, D) of N anchors, from their raw outputs (N, D) and those of the candidates (M, D)."""

temperatures = st.sampled_from((0.01, 0.07, 0.5, 2.0))
biases = st.sampled_from((-10.0, -1.0, 0.0, 3.0))


def jacobian_of_direction(z: Tensor) -> Tensor:
    """``(I - u u^T) / n``, the Jacobian of the l2-normalisation, shape (N, D, D)."""
    n = z.norm(dim=1).view(-1, 1, 1)
    u = z.unsqueeze(2) / n
    return (torch.eye(z.shape[1], dtype=z.dtype, device=z.device) - u @ u.mT) / n


def of_softmax(tau: float) -> Formula:
    """``P [sum_j p_j v_j v_j^T - m m^T] P / (n^2 tau^2)`` with ``m = sum_j p_j v_j``: no average over anchors."""

    def blocks(anchors: Tensor, candidates: Tensor) -> Tensor:
        u, v = F.normalize(anchors), F.normalize(candidates)
        p = (u @ v.T / tau).softmax(1)
        mean = p @ v
        moment = torch.einsum("ij,jd,je->ide", p, v, v) - mean.unsqueeze(2) * mean.unsqueeze(1)
        jacobian = jacobian_of_direction(anchors)
        return jacobian @ moment @ jacobian / tau**2

    return blocks


def of_sigmoid(scale: float, bias: float) -> Formula:
    """``a^2 P [sum_j sigma_j (1 - sigma_j) v_j v_j^T] P / n^2``: the label does not enter, and nothing is averaged."""

    def blocks(anchors: Tensor, candidates: Tensor) -> Tensor:
        u, v = F.normalize(anchors), F.normalize(candidates)
        logit = scale * u @ v.T + bias
        jacobian = jacobian_of_direction(anchors)
        moment = torch.einsum("ij,jd,je->ide", torch.sigmoid(logit) * torch.sigmoid(-logit), v, v)
        return scale**2 * jacobian @ moment @ jacobian

    return blocks


def of_candidates(tau: float) -> Formula:
    """``P [sum_i p_ij (1 - p_ij) u_i u_i^T] P / (m^2 tau^2)`` of candidates j: what the published code leaves out."""

    def blocks(candidates: Tensor, anchors: Tensor) -> Tensor:
        u, v = F.normalize(anchors), F.normalize(candidates)
        p = (u @ v.T / tau).softmax(1)
        jacobian = jacobian_of_direction(candidates)
        return jacobian @ torch.einsum("ij,id,ie->jde", p * (1 - p), u, u) @ jacobian / tau**2

    return blocks


Kind = Callable[[float, float], tuple[Callable[..., RowLoss], Formula]]

KINDS: dict[str, Kind] = {
    "infonce": lambda tau, _: (lambda *o, **k: InfoNCELoss(tau, *o, **k), of_softmax(tau)),
    "siglip": lambda tau, bias: (lambda *o, **k: SigLIPLoss(1 / tau, bias, *o, **k), of_sigmoid(1 / tau, bias)),
}


@st.composite
def two_towers(draw: st.DrawFn, more: int = 3) -> tuple[Tensor, Tensor]:
    """Raw outputs of N points of one tower and of N to N + more of the other, of different lengths."""
    seed, dim, n = draw(st.integers(0, 2**16)), draw(st.integers(2, 5)), draw(st.integers(2, 6))
    m = n + draw(st.integers(0, more))
    z, w = numbers(seed, n, dim), numbers(seed + 1, m, dim)
    return 3 * z * numbers(seed + 2, n, 1).exp(), w * numbers(seed + 3, m, 1).exp()


def blocks_of(loss: RowLoss, z_a: Tensor, z_b: Tensor) -> tuple[Tensor, Tensor]:
    """Our diagonal blocks of both towers; ``z_a[i]`` belongs to ``z_b[i]``."""
    labels = torch.arange(len(z_a), device=z_a.device), torch.arange(len(z_b), device=z_b.device)
    z, relation, first = sides.joined_towers(z_a, z_b, labels)
    both = sides.two_towers(first, len(z), loss.directions)
    found = loss.hessian_at(z, relation, sides=both).point_blocks()
    return found[:first], found[first:]


def same(found: Tensor, truth: Tensor, z: Tensor, tau: float) -> bool:
    """Block by block, relative to ``1 / (n^2 tau^2)``, the size of the terms that cancel in the formula."""
    sizes = z.square().sum(1).view(-1, 1, 1) * tau**2
    return close(found * sizes, truth * sizes, 1.0, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(given_towers=two_towers(), tau=temperatures, bias=biases)
def test_blocks_of_the_anchors(
    kind: str, given_towers: tuple[Tensor, Tensor], tau: float, bias: float, device: str
) -> None:
    """One direction, the sum over its anchors, no first-order part."""
    make, formula = KINDS[kind](tau, bias)
    z_a, z_b = (z.to(device) for z in given_towers)
    found, _ = blocks_of(make("sum", "a", pd_fix="ggn_fixed"), z_a, z_b)
    assert same(found, formula(z_a, z_b), z_a, tau)
    _, found = blocks_of(make("sum", "b", pd_fix="ggn_fixed"), z_b, z_a)
    assert same(found, formula(z_a, z_b), z_a, tau)
    # The mean over the anchors, as people train with it, is that divided by their number.
    found, _ = blocks_of(make("mean", "a", pd_fix="ggn_fixed"), z_a, z_b)
    assert same(found, formula(z_a, z_b) / len(z_a), z_a, tau)


@given(given_towers=two_towers(), tau=temperatures, bias=biases)
def test_both_directions(given_towers: tuple[Tensor, Tensor], tau: float, bias: float, device: str) -> None:
    """SigLIP's two directions are one loss, so nothing is missing; half of InfoNCE's own blocks are of candidates."""
    z_a, z_b = (z.to(device) for z in given_towers)
    found = blocks_of(SigLIPLoss(1 / tau, bias, "sum", pd_fix="ggn_fixed"), z_a, z_b)
    formula = of_sigmoid(1 / tau, bias)
    assert same(found[0], formula(z_a, z_b), z_a, tau)
    assert same(found[1], formula(z_b, z_a), z_b, tau)
    # InfoNCE needs a positive for every anchor of either direction.
    z_b = z_b[: len(z_a)]
    found = blocks_of(InfoNCELoss(tau, "sum", pd_fix="ggn_fixed"), z_a, z_b)
    own, other = of_softmax(tau), of_candidates(tau)
    assert same(2 * found[0], own(z_a, z_b) + other(z_a, z_b), z_a, tau)
    assert same(2 * found[1], own(z_b, z_a) + other(z_b, z_a), z_b, tau)


def encoders(device: str) -> tuple[nn.Sequential, nn.Sequential]:
    """One with a bias in its last layer, one without; inputs of three and of two numbers, outputs of four."""
    a = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4))
    b = nn.Sequential(nn.Linear(2, 5), nn.Sigmoid(), nn.Linear(5, 4, bias=False))
    return a.double().to(device), b.double().to(device)


@each("kind, tower", [("infonce", 0), ("siglip", 1)])
def test_kronecker_factors_of_a_last_layer(kind: str, tower: int, device: str) -> None:
    """Theirs: ``A = sum a a^T / sqrt(n)``, ``B = sum H_i / sqrt(n)``. Ours: the mean of ``a a^T``, the sum of H_i."""
    make, formula = KINDS[kind](0.3, -1.0)
    towers = encoders(device)
    data = [(numbers(k, 6, 3).to(device), numbers(k + 9, 6, 2).to(device)) for k in range(3)]
    backend = {"loss": make(directions="ab"[tower], pd_fix="ggn_fixed"), "rank": "full"}
    la = Laplace(TwoTowers(*towers), "contrastive", "last_layer", "kron", backend_kwargs=backend)
    la.fit(data)
    inputs: Any = 0.0
    curvature: Any = 0.0
    n, encoder, biased = 18, towers[tower], tower == 0
    for batch in data:
        features = encoder[:-1](batch[tower]).detach()
        if biased:
            features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        z, w = encoder(batch[tower]).detach(), towers[1 - tower](batch[1 - tower]).detach()
        inputs = inputs + features.T @ features / math.sqrt(n)
        curvature = curvature + formula(z, w).sum(0) / math.sqrt(n)
    (g, moment), *of_bias = (la.a, la.b)[tower].H_raw
    width = len(moment)
    assert width != len(g)
    assert close(torch.kron(g, moment), torch.kron(curvature, inputs[:width, :width]), tolerance=1e-12)
    # A bias is a column of the input factor there, and here a block of its own.
    assert len(of_bias) == int(biased)
    assert all(close(block, curvature * inputs[-1, -1], tolerance=1e-12) for (block,) in of_bias)


def positive_definite(seed: int, size: int) -> Tensor:
    """A random symmetric matrix (size, size) with eigenvalues of one and more."""
    root = numbers(seed, size, size)
    return torch.eye(size, dtype=torch.float64) + root @ root.T / size


def log_det_by_rule(a: Tensor, b: Tensor) -> Tensor:
    """Of ``A kron B``: every determinant to the power of the size of the OTHER factor."""
    return len(b) * a.logdet() + len(a) * b.logdet()


def log_det_as_published(a: Tensor, b: Tensor) -> Tensor:
    """The exponents of BayesVLM's prior optimisation: each factor's own size."""
    return len(a) * a.logdet() + len(b) * b.logdet()


@each("p, q, strength", [(2, 1, 0.5), (1, 2, 4.0)])
def test_evidence_by_quadrature_has_half_of_the_log_determinant(p: int, q: int, strength: float, device: str) -> None:
    """``log int N(w; 0, I / lambda) exp(-w^T (Lambda - lambda I) w / 2) dw`` of a damped precision ``Lambda``.

    The published objective has ``P / 2 log lambda`` of the prior, here with P = 2, beside the whole log-determinant.
    """
    damping = strength**0.5
    a = (3 * positive_definite(3, p) + damping * torch.eye(p).double()).to(device)
    b = (positive_definite(4, q) / 9 + damping * torch.eye(q).double()).to(device)
    precision = torch.kron(a, b)
    values = torch.linalg.eigvalsh(precision)
    # Ten standard deviations, in steps of half of the smallest: the trapezoidal rule is exact to rounding.
    reach, step = float(10 * values[0] ** -0.5), float(values[-1] ** -0.5 / 2)
    axis = torch.arange(-reach, reach + step, step, dtype=torch.float64, device=device)
    w = torch.cartesian_prod(axis, axis)
    prior = math.log(strength / (2 * math.pi))
    brute = float((prior - torch.einsum("ki,ij,kj->k", w, precision, w) / 2).logsumexp(0)) + 2 * math.log(step)
    assert abs(float(log_det_by_rule(a, b) - precision.logdet())) < 1e-12
    log_prior = math.log(strength)
    assert log_prior - float(log_det_by_rule(a, b)) / 2 == pytest.approx(brute, abs=1e-12)
    assert abs(log_prior - float(log_det_by_rule(a, b)) - brute) > 0.1
    assert abs(log_prior - float(log_det_as_published(a, b)) / 2 - brute) > 0.1
