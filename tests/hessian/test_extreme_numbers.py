"""Norms far from one, margins at their end, and sums over many points: exact, or refused."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DISTANCES, FIXES, NORMALIZATIONS
from tables import covering
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.hessian.sphere import normalize, norms

# The scales at which `fixed` and `full` were exact in float32 already, and beyond.
EXPONENTS = st.integers(-18, 18)


def points(n: int = 8, dim: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 2


@given(exponent=st.integers(-44, 38), dim=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_directions_are_right_for_every_finite_number(exponent: int, dim: int, seed: int, device: str) -> None:
    """Down to the smallest numbers of float32, which have few digits of their own."""
    generator = torch.Generator().manual_seed(seed)
    z = (torch.randn(5, dim, generator=generator).sign() * (1 + torch.rand(5, dim, generator=generator))).double()
    z = (z * 10.0**exponent).float()
    z = z[(z != 0).any(1) & z.isfinite().all(1)].to(device)
    wanted = z.double() / z.double().norm(dim=1, keepdim=True)
    u, n = normalize(z)
    for found in (u, cc.L2Norm()(z)):
        assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-7)
    length = z.double().norm(dim=1)
    held = length < torch.finfo(torch.float32).max
    assert torch.allclose(n.double()[held], length[held], rtol=1e-6, atol=2e-45)
    assert torch.equal(norms(z), n)


def test_derivatives_of_the_normalisation(device: str) -> None:
    z = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: normalize(z), (z,))
    assert torch.autograd.gradgradcheck(cc.L2Norm(), (z,))
    batched = torch.func.vmap(torch.func.jacrev(cc.L2Norm()))(z.detach())
    one = torch.func.jacrev(cc.L2Norm())(z[1].detach())
    assert torch.allclose(batched[1], one, rtol=1e-12)


@pytest.mark.parametrize("pd_fix", FIXES)
@given(distance=st.sampled_from(DISTANCES), exponents=st.lists(EXPONENTS, min_size=8, max_size=8))
def test_the_hessian_is_right_from_1e_18_to_1e18(exponents: list[int], pd_fix: str, distance: str, device: str) -> None:
    """Scaling the outputs by ``s_i`` scales block (i, j) by ``1 / (s_i s_j)``, whatever the fix."""
    z, labels = points()
    z = z / z.norm(dim=1, keepdim=True)
    scales = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    scaled = (z.double() * scales[:, None]).float()
    truth = cc.output_hessian(
        (scaled.double() / scales[:, None]).to(device), labels.to(device), pd_fix=pd_fix, distance=distance
    )
    found = cc.output_hessian(scaled.to(device), labels.to(device), pd_fix=pd_fix, distance=distance)
    s = scales.to(device)
    blocks, wanted = found.point_blocks().double() * s[:, None, None] ** 2, truth.point_blocks()
    size = wanted.abs().amax((1, 2), keepdim=True).clamp(min=1e-3)
    assert float(((blocks - wanted).abs() / size).max()) < 1e-5
    # A vector in units of the outputs gives a product that is the same number for every scale.
    v = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double().to(device)
    product = found.blocks.matmul((v * s[:, None]).float()).double() * s[:, None]
    assert float((product - truth.blocks.matmul(v)).abs().max()) < 1e-4
    if pd_fix == "psd":
        low, high = found.blocks.eigenvalue_bounds()
        assert bool((low >= -1e-6 * high).all())
        root = found.factor().double() * s[:, None, None]
        assert float((root @ root.mT - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


@covering(1, scale=[1e-25, 1e25], pd_fix=FIXES)
def test_what_the_dtype_cannot_hold_is_refused(pd_fix: str, scale: float, device: str) -> None:
    z, labels = points()
    z[3] *= scale
    z, labels = z.to(device), labels.to(device)
    with pytest.raises(
        cc.InputError, match=r"1 / norm\^2, torch.float32 can hold, got norms .* in rows \[3\].*float64"
    ):
        cc.output_hessian(z, labels, pd_fix=pd_fix)
    assert cc.output_hessian(z.double(), labels, pd_fix=pd_fix).diagonal().isfinite().all()
    # The loss only has directions, which float32 holds.
    wanted = cc.ContrastiveLoss()(torch.cat([z[:3], z[3:4] / scale, z[4:]]), labels)
    assert torch.allclose(cc.ContrastiveLoss()(z, labels), wanted, rtol=1e-5)


@given(
    normalization=st.sampled_from(NORMALIZATIONS),
    n=st.integers(2, 40),
    dim=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_a_margin_of_two_masks_nothing(n: int, dim: int, seed: int, normalization: str, device: str) -> None:
    """Rounding takes antipodal points apart by more or less than 2, the documented upper end of margins."""
    half = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))
    z, labels = torch.cat([half, -half * 1.7]).to(device), torch.arange(2 * n).to(device) // 2
    options: dict[str, Any] = {"normalization": normalization}
    closed, free = (cc.output_hessian(z, labels, margin=m, **options) for m in (2, None))
    assert torch.equal(closed.diagonal(), free.diagonal())
    mined = [cc.ContrastiveLoss(margin).mine(z, labels) for margin in (2, None)]
    assert all(torch.equal(a, b) for a, b in zip(*mined, strict=True))


@covering(1, normalization=NORMALIZATIONS, margin=[None, 0.7, 2])
def test_sums_over_many_points_keep_their_digits(margin: float | None, normalization: str, device: str) -> None:
    """10,000 points of tight classes, where attraction and repulsion nearly cancel."""
    torch.manual_seed(0)
    n, dim = 10_000, 8
    labels = torch.randint(0, 10, (n,))
    z = torch.randn(10, dim)[labels] + 0.05 * torch.randn(n, dim)
    z, labels = z.to(device), labels.to(device)
    found, truth = (cc.output_hessian(t, labels, margin=margin, normalization=normalization) for t in (z, z.double()))
    error = (found.diagonal() - truth.diagonal()).abs().max() / truth.diagonal().abs().max()
    # With a margin, single pairs lie on it to rounding, and count or not: 1e-5 of 10,000.
    assert float(error) < (2e-6 if margin in (None, 2) else 1e-4)
    for mine, wanted in zip(found.loss_and_cost(), truth.loss_and_cost(), strict=True):
        # Inside a margin the two sums are some 50 times the loss, and a tile of them is added in float32 (6e-8).
        assert abs(float(mine) / float(wanted) - 1) < (5e-6 if margin in (None, 2) else 2e-5)
