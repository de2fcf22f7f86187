"""The Bayesian triplet loss: its parts, its options, and why it is no bound."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import each
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.triplet import bayesian_triplet_loss, kl_to_normal, kl_to_uniform, log_probability


def draw(
    seed: int, dim: int, batch: tuple[int, ...] = (), *, width: int | None = None, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(last: int) -> Tensor:
        return torch.randn(*batch, last, generator=generator, dtype=torch.float64)

    return [(numbers(dim).to(dtype), numbers(width or dim).exp().to(dtype)) for _ in range(3)]


@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([(), (0,), (1,), (2, 3)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(0, 2),
    st.floats(0.1, 10),
    st.sampled_from([0.0, 1e-6, 1.0]),
)
def test_gaussian_loss_is_the_sum_of_its_parts(
    seed: int, dim: int, batch: tuple[int, ...], dtype: torch.dtype, margin: float, prior: float, weight: float
) -> None:
    three = draw(seed, dim, batch, dtype=dtype)
    loss = bayesian_triplet_loss(*three, margin, prior_variance=prior, kl_weight=weight, reduction="none")
    right = weight * sum(kl_to_normal(*one, prior) for one in three) - log_probability(*three, margin)
    assert loss.shape == batch
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, right, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from([(), (0,), (1,), (2, 3)]), st.floats(0, 1))
def test_loss_on_the_sphere_is_the_sum_of_its_parts(seed: int, dim: int, batch: tuple[int, ...], margin: float) -> None:
    three = draw(seed, dim, batch, width=1)
    options: Any = {"distribution": "vmf", "moments": "gaussian", "kl_weight": 0.5, "reduction": "none"}
    loss = bayesian_triplet_loss(*three, margin, **options)
    directed = [(torch.nn.functional.normalize(mean, dim=-1), variance) for mean, variance in three]
    divergence = sum(kl_to_uniform(1 / variance.squeeze(-1), dim) for _, variance in directed)
    torch.testing.assert_close(loss, 0.5 * divergence - log_probability(*directed, margin), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("distribution", ["gaussian", "vmf"])
def test_reductions(distribution: Any) -> None:
    three = draw(0, 3, (4, 2), width=1)
    each = bayesian_triplet_loss(*three, distribution=distribution, reduction="none")
    mean, total = (bayesian_triplet_loss(*three, distribution=distribution, reduction=r) for r in ("mean", "sum"))
    torch.testing.assert_close(mean, each.mean())
    torch.testing.assert_close(total, each.sum())


def test_a_negative_per_row_of_a_matrix() -> None:
    a, p, n = draw(0, 3, (2, 1))[0], draw(1, 3, (2, 1))[0], draw(2, 3, (2, 5))[0]
    loss = bayesian_triplet_loss(a, p, n, kl_weight=1.0, reduction="none")
    single = bayesian_triplet_loss(*[(m[1, i], v[1, i]) for (m, v), i in ((a, 0), (p, 0), (n, 3))], kl_weight=1.0)
    assert loss.shape == (2, 5)
    torch.testing.assert_close(loss[1, 3], single)


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.integers(2, 3), st.sampled_from(["gaussian", "vmf"]))
def test_gradients(seed: int, dim: int, distribution: Any) -> None:
    flat = [t.requires_grad_() for one in draw(seed, dim, width=1) for t in one]

    def loss(*t: Tensor) -> Tensor:
        return bayesian_triplet_loss(t[0:2], t[2:4], t[4:6], 0.1, distribution=distribution, kl_weight=0.3)

    assert torch.autograd.gradcheck(loss, flat, rtol=1e-3, atol=1e-4)


def test_the_documents_objective_exceeds_the_evidence() -> None:
    # D = 1, all means 0, prior variance 1, no margin: tau = (p - n)(p + n - 2 a) is a product of two Gaussians with
    # mean zero, so P(tau < 0) = 1/2 - arcsin(rho) / pi exactly. The evidence is P(tau < 0) = 1/2 under the prior.
    positive = torch.tensor([0.5], dtype=torch.float64)
    rho = (0.5 - 1) / math.sqrt((0.5 + 1) * (0.5 + 1 + 4))
    objective = math.log(0.5 - math.asin(rho) / math.pi) - kl_to_normal(torch.zeros(1).double(), positive).item()
    assert objective > math.log(0.5) + 0.009


TWO = draw(0, 3, (2,), width=1)


@each(
    "options, says",
    [
        ({"margin": -1.0}, "margin"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"prior_variance": 0.0}, "prior_variance"),
        ({"prior_variance": 1.0, "distribution": "vmf"}, "prior_variance: expected None with"),
        ({"distribution": "normal"}, "distribution: expected one of 'gaussian', 'vmf', got normal"),
        ({"reduction": "max"}, "reduction: expected one of"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        bayesian_triplet_loss(*TWO, **options)


@each(
    "three, distribution, says",
    [
        (draw(0, 3, (0,)), "gaussian", "at least one triplet"),
        (draw(0, 1, (2,)), "vmf", "D >= 2"),
        ([TWO[0], TWO[1], (TWO[2][0], 1e-310 * TWO[2][1])], "vmf", "variance of negative: expected variances > 0"),
        ([TWO[0], TWO[1], (TWO[2][0], 0 * TWO[2][1])], "gaussian", "variance of negative: expected variances > 0"),
        ([TWO[0], (0 * TWO[1][0], TWO[1][1]), TWO[2]], "vmf", "mean of positive: expected non-zero vectors"),
    ],
)
def test_bad_embeddings(three: list[tuple[Tensor, Tensor]], distribution: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        bayesian_triplet_loss(*three, distribution=distribution)


@pytest.mark.parametrize("distribution", ["gaussian", "vmf"])
def test_every_device_gives_the_same_loss(device: str, distribution: Any) -> None:
    three = draw(0, 4, (3,), width=1)
    moved = [(mean.to(device).requires_grad_(), variance.to(device)) for mean, variance in three]
    losses = [bayesian_triplet_loss(*one, 0.1, distribution=distribution, kl_weight=1.0) for one in (three, moved)]
    losses[1].backward()
    assert moved[0][0].grad is not None
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
