"""Distributions of embeddings and what reads them: what cannot be right is refused, extreme norms are right."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tables import covering, each, refused
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature import metrics
from contrastive_curvature.embedding.spread import DenseSpread, Joint

NAN, INF = math.nan, math.inf


B, D = 4, 3


def mean(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)


def matrices(device: str = "cpu", dtype: torch.dtype = torch.float32, n: int = B, dim: int = D) -> Tensor:
    root = torch.randn(n, dim, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (root @ root.mT).to(device, dtype)


def spoilt(value: Tensor, place: Any, number: float) -> Tensor:
    out = value.clone()
    out[place] = number
    return out


V = matrices()


Z = torch.randn(5, B, D, generator=torch.Generator().manual_seed(4))


@each(
    "name, bad, words",
    [
        *(("raw_mean", bad, "") for bad in (None, torch.ones(3), torch.ones(4, 1), torch.ones(4, 3).long())),
        *(("raw_mean", spoilt(mean(), place, value), "") for place, value in (((1, 2), NAN), ((1, 2), INF), (2, 0.0))),
        *(("typical_norm", bad, "") for bad in (0, NAN, 10**400, "3", True, torch.tensor(1.0))),
        ("variance", torch.ones(B, D + 1), "shape"),
        ("variance", 1.0, "Tensor"),
        ("variance", torch.ones(B, D).long(), "floating"),
        ("variance", torch.ones(B, D).double(), "float32"),
        ("variance", -torch.ones(B, D), ">= 0"),
        ("variance", spoilt(torch.ones(B, D), (1, 1), NAN), "finite"),
        ("covariance", torch.ones(B, D), "shape"),
        ("covariance", V.double(), "float32"),
        ("covariance", spoilt(V, (1, 1, 1), NAN), "finite"),
        ("covariance", spoilt(V, (0, 0, 1), 1.1 * float(V[0, 0, 1])), "symmetric"),
        ("covariance", spoilt(spoilt(V, (2, 0, 1), 50.0), (2, 1, 0), 50.0), "rows [2]"),
        ("covariance", V - 0.01 * torch.linalg.eigvalsh(V).amax() * 2 * torch.eye(D), "negative eigenvalue"),
        ("joint_covariance", V, "shape"),
        ("joint_covariance", torch.eye(B * D).triu() + torch.ones(B * D, B * D).triu(1), "symmetric"),
        ("joint_covariance", -torch.eye(B * D), "negative eigenvalue"),
        ("joint_covariance", torch.eye(B * D) * NAN, "finite"),
        ("samples", None, ""),
        ("samples", torch.ones(3, 2), ""),
        ("samples", torch.ones(1, 3, 2), ""),
        ("samples", torch.ones(4, 3, 2).long(), ""),
        ("samples", spoilt(Z, (1, 2, 0), NAN), "1 of"),
    ],
)
def test_what_a_distribution_is_made_of(name: str, bad: Any, words: str) -> None:
    if name == "samples":
        refused(lambda: cc.EmbeddingDistribution.from_samples(bad), name, words)
        return
    spread = {} if "ariance" in name else {"covariance": V}
    refused(lambda: cc.EmbeddingDistribution(**{"raw_mean": mean(), **spread, name: bad}), name, words)


@each("bad", [0, True, 2.5, "3", None])
def test_numbers_of_samples(bad: Any) -> None:
    for found in (
        cc.EmbeddingDistribution(mean(), covariance=V),
        cc.EmbeddingDistribution(mean(), joint_covariance=torch.eye(B * D)),
        cc.EmbeddingDistribution.from_samples(Z),
    ):
        refused(lambda found=found: found.sample(bad), "n_samples")
        refused(lambda found=found: found.raw_samples(bad), "n_samples")
        refused(lambda found=found: found.sample(2, generator=3), "generator", kind=cc.InputTypeError)


def test_there_is_no_mean(device: str) -> None:
    """It could be the encoder's output, or the direction."""
    found = cc.EmbeddingDistribution(3 * mean(device), covariance=matrices(device))
    refused(lambda: found.mean, "raw_mean", "mu (norm 1)", kind=AttributeError)
    assert not hasattr(found, "mean")
    assert torch.allclose(found.raw_mean, found.raw_mean.norm(dim=1, keepdim=True) * found.mu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_what_is_right_up_to_rounding_is_taken(size: float, dtype: torch.dtype, device: str) -> None:
    """Singular covariances, and those that are symmetric but for the order of their sums."""
    z = mean(device, dtype)
    root = torch.randn(B, D, 1, device=device, dtype=dtype)
    singular = root @ root.mT * size
    turned = torch.linalg.qr(torch.randn(B, 3, 3, device=device, dtype=dtype))[0]
    rounded = turned @ (torch.diag_embed(torch.tensor([1.0, 1e-3, 0.0], device=device, dtype=dtype)) @ turned.mT) * size
    noisy = rounded * (1 + 20 * torch.finfo(dtype).eps * torch.randn(B, 3, 3, device=device, dtype=dtype))
    for covariance in (singular, rounded, noisy, torch.zeros_like(rounded)):
        found = cc.EmbeddingDistribution(z, covariance=covariance)
        assert torch.equal(found.covariance, covariance)
        whole = torch.block_diag(*covariance)
        assert torch.equal(cc.EmbeddingDistribution(z, joint_covariance=whole).covariance, covariance)
    assert cc.EmbeddingDistribution(z[:0], variance=z[:0]).raw_mean.shape == (0, D)


@covering(
    1, size=[1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30], kind=["variance", "covariance", "joint_covariance", "samples"]
)
def test_the_uncertainty_has_no_units(kind: str, size: float, device: str) -> None:
    """In float32, at norms whose square is no number: as in float64, where it is one.

    The spread is kept where float32 has numbers for it; the outputs' own unit decides nothing.
    """
    spread = min(max(0.1 * size, 1e-16), 1e16)  # standard deviations
    z = mean(device, torch.float64) * size
    covariance = matrices(device, torch.float64) * spread**2
    samples = z + spread * torch.randn(50, B, D, generator=torch.Generator().manual_seed(2)).double().to(device)
    if kind == "samples":
        low = cc.EmbeddingDistribution.from_samples(samples.float())
        high = cc.EmbeddingDistribution.from_samples(samples)
        # A difference of samples: its rounding is that of the samples, relative to their norm.
        tolerance = {"rtol": 1e-3, "atol": 1e-6}
    else:
        given = {
            "variance": covariance.diagonal(dim1=1, dim2=2),
            "covariance": covariance,
            "joint_covariance": torch.block_diag(*covariance),
        }[kind]
        low = cc.EmbeddingDistribution(z.float(), **{kind: given.float()})
        high = cc.EmbeddingDistribution(z, **{kind: given})
        tolerance = {"rtol": 1e-4, "atol": 0.0}
        assert bool((low.uncertainty > 0).all())
    torch.testing.assert_close(low.uncertainty.double(), high.uncertainty, **tolerance)
    torch.testing.assert_close(low.mu.double(), high.mu, rtol=1e-4, atol=1e-5)


def test_the_uncertainty_is_what_it_says() -> None:
    """The angle of a step of one tangential standard deviation, by hand; and with a typical norm."""
    z, covariance = mean(dtype=torch.float64), matrices(dtype=torch.float64)
    n = z.norm(dim=1)
    u = z / n[:, None]
    across = torch.eye(D) - u[:, :, None] * u[:, None, :]
    spread = (across @ covariance @ across).diagonal(dim1=1, dim2=2).sum(1).sqrt()
    found = cc.EmbeddingDistribution(z, covariance=covariance)
    torch.testing.assert_close(found.uncertainty, torch.atan2(spread, n))
    short = cc.EmbeddingDistribution(z, covariance=covariance, typical_norm=4.0)
    torch.testing.assert_close(short.uncertainty, torch.atan(spread / n * (4 / n).sqrt()))
    samples = torch.randn(50, B, D, dtype=torch.float64) + z
    found = cc.EmbeddingDistribution.from_samples(samples)
    torch.testing.assert_close(found.uncertainty, found.tangential_variance.sqrt().atan())
    torch.testing.assert_close(found.covariance[1], torch.cov(samples[:, 1].T))
    expected = cc.EmbeddingDistribution(samples.mean(0), covariance=found.covariance).tangential_variance
    torch.testing.assert_close(found.tangential_variance, expected)


def test_no_spread_has_no_angle_and_no_slope() -> None:
    z = mean(dtype=torch.float64).requires_grad_()
    angle = cc.EmbeddingDistribution(z, variance=torch.zeros_like(z)).uncertainty
    assert bool((angle == 0).all())
    assert bool((torch.autograd.grad(angle.sum(), z)[0] == 0).all())


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-20), (torch.float64, 1e-300)])
def test_an_output_that_may_point_anywhere(dtype: torch.dtype, size: float) -> None:
    z = torch.full((1, 2), size, dtype=dtype)
    for variance in (torch.ones_like(z), torch.full_like(z, 1e30)):
        found = cc.EmbeddingDistribution(z, variance=variance, typical_norm=1.0)
        assert float(found.uncertainty) == pytest.approx(torch.pi / 2)
    along = cc.EmbeddingDistribution(torch.tensor([[size, 0.0]], dtype=dtype), variance=torch.eye(2, dtype=dtype)[:1])
    assert float(along.uncertainty) == 0


def test_a_covariance_that_only_the_tangent_shows_to_be_none() -> None:
    """Those of the library's own posteriors are not decomposed, but no angle comes of a negative variance."""
    for covariance in ([[1.0, 5.0], [5.0, 1.0]], [[1.0, -5.0], [-5.0, 1.0]]):
        found = cc.EmbeddingDistribution.trusted(torch.ones(1, 2), DenseSpread(torch.tensor([covariance])))
        refused(lambda found=found: found.uncertainty, "covariance", "positive semidefinite")


def test_a_joint_covariance_names_the_inputs_that_are_not_finite() -> None:
    joint = torch.eye(B * D)
    joint[D : 2 * D] = joint[:, D : 2 * D] = INF
    with pytest.raises(cc.InputError, match=r"joint_covariance.*rows \[1\]"):
        cc.EmbeddingDistribution.trusted(mean(), Joint(joint.view(B, D, B, D)))
    between = torch.eye(B * D)
    between[0, D] = between[D, 0] = NAN
    refused(lambda: cc.EmbeddingDistribution.trusted(mean(), Joint(between.view(B, D, B, D))), "rows [0, 1]")


LABELS = torch.arange(6) % 2


SAMPLES = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(3))


HOW = "la.predictive_samples(x, n_samples=..., joint=True)"


@each(
    "function",
    [
        lambda bad: metrics.retrieval_ece(bad, LABELS),
        lambda bad: metrics.retrieval_brier(bad, LABELS),
        lambda bad: metrics.retrieval_votes(bad, LABELS),
        lambda bad: metrics.retrieval_ece(SAMPLES, LABELS, bad, LABELS),
        lambda bad: metrics.calibration_bins(bad, LABELS),
        lambda bad: metrics.brier_score(bad, LABELS),
    ],
)
def test_samples_of_another_kind(function: Callable[..., Any]) -> None:
    """The message says what to pass."""
    for bad in (SAMPLES.unsqueeze(0), [SAMPLES], 3, cc.EmbeddingDistribution(SAMPLES[0], variance=torch.ones(6, 3))):
        refused(lambda bad=bad: function(bad), HOW)
