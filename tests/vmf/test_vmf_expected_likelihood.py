"""EL-nivMF by Monte Carlo, against the closed form of isotropic proxies and integrals on the sphere; its gradients."""

import math

import pytest
import torch
from tables import each
from torch import Tensor
from vmf_points import f64, random

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.vmf.distances import expected_likelihood_distance
from contrastive_curvature.vmf.nonisotropic import el_nivmf_distance, el_nivmf_logits, nivmf_distance


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("dim", "kappa", "other"), [(2, 3.0, 2.0), (10, 8.0, 5.0), (64, 100.0, 30.0)])
def test_value_and_gradients_for_isotropic_proxies(dim: int, kappa: float, other: float) -> None:
    repeats, n = 30, 400
    mu, proxy = random(1, dim, seed=dim), random(1, dim, seed=dim) + 0.5 * random(1, dim, seed=dim + 1)

    def leaves() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = (mu, f64([kappa]), proxy, f64([other]))
        return tuple(t.clone().requires_grad_() for t in given)  # type: ignore[return-value]

    closed = leaves()
    distance = expected_likelihood_distance(*closed)
    truth = torch.cat([distance.flatten(), *(g.flatten() for g in torch.autograd.grad(distance.sum(), closed))])
    drawn = []
    for seed in range(repeats):
        m, k, p, o = arguments = leaves()
        found = el_nivmf_distance(m, k, p, o[:, None].expand(1, dim), n, seeded(seed))
        drawn.append(torch.cat([found.flatten(), *(g.flatten() for g in torch.autograd.grad(found.sum(), arguments))]))
    values = torch.stack(drawn).detach()
    error = values.std(0) / math.sqrt(repeats)
    # Student's t with 29 degrees exceeds 6 once in 6e5; the bias of the logarithm is of the order 1 / n
    assert bool(((values.mean(0) - truth.detach()).abs() < 6 * error + 4 / n * (1 + truth.detach().abs())).all())
    assert error[0].item() < 0.02
    assert error[dim + 1].item() < 0.1 * truth[dim + 1].abs().item()


def test_algorithm_1_at_temperature_1_is_the_distance_and_at_others_is_not() -> None:
    mu, kappa, proxy, axes = random(2, 5), f64([3.0, 9.0]), random(4, 5, seed=1), 1 + 5 * random(4, 5, seed=2).abs()
    distance = el_nivmf_distance(mu, kappa, proxy, axes, 7, seeded(0))
    logits = el_nivmf_logits(mu, kappa, proxy, axes, f64(1.0), 7, seeded(0))
    torch.testing.assert_close(logits, math.log(7) - distance, rtol=1e-13, atol=1e-13)
    # erratum: the power 1/t stands inside the mean; it is convex for t < 1, so Jensen puts it above that outside
    inside = el_nivmf_logits(mu, kappa, proxy, axes, f64(0.25), 7, seeded(0)) - math.log(7)
    assert bool((inside > -distance / 0.25 + 1e-3).all())


def test_the_printed_likelihood_of_z_needs_no_sample() -> None:
    # erratum: Algorithm 1 prints the likelihood of z in the loop over samples, which is d_nivMF whatever the norm of z
    mu, proxy, axes = random(2, 5), random(4, 5, seed=1), 1 + 5 * random(4, 5, seed=2).abs()
    certain = el_nivmf_distance(mu, f64([1e13, 1e13]), proxy, axes, 3, seeded(0))
    torch.testing.assert_close(certain, nivmf_distance(mu, proxy, axes), rtol=1e-4, atol=1e-4)
    unsure = el_nivmf_distance(mu, f64([1.0, 1.0]), proxy, axes, 3, seeded(0))
    assert (unsure - certain).abs().min().item() > 1e-2


@pytest.mark.parametrize("normalized", [True, False])
def test_gradients_of_proxies_and_temperature(normalized: bool) -> None:
    mu, kappa = random(2, 4), f64([3.0, 9.0])
    proxy, axes = random(3, 4, seed=1).requires_grad_(), (0.5 + 4 * random(3, 4, seed=2).abs()).requires_grad_()
    temperature = f64([0.7]).requires_grad_()

    def logits(p: Tensor, a: Tensor, t: Tensor) -> Tensor:
        return el_nivmf_logits(mu, kappa, p, a, t, 5, seeded(0), normalized=normalized)

    assert torch.autograd.gradcheck(logits, (proxy, axes, temperature))


TENSORS = (torch.ones(2, 3), torch.ones(2), torch.ones(4, 3), torch.ones(4, 3))


@each(
    "at, value, kind, message",
    [
        (0, torch.zeros(2, 3), InputError, "mu: expected non-zero"),
        (1, torch.ones(3), InputError, r"kappa: expected shape \(2,\)"),
        (1, 2.0, InputTypeError, "kappa: expected a torch.Tensor"),
        (2, torch.ones(4, 2), InputError, "proxy_kappa: expected shape"),
        (3, torch.zeros(4, 3), InputError, "proxy_kappa: expected > 0 for every axis"),
    ],
)
def test_refusals(at: int, value: object, kind: type[Exception], message: str) -> None:
    arguments: list[object] = list(TENSORS)
    arguments[at] = value
    with pytest.raises(kind, match=message):
        el_nivmf_distance(*arguments, 3)  # type: ignore[arg-type]
    with pytest.raises(kind, match=message):
        el_nivmf_logits(*arguments, torch.tensor(1.0), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n_samples: expected a positive whole number"):
        el_nivmf_distance(*TENSORS, 0)
    with pytest.raises(InputError, match="temperature: expected"):
        el_nivmf_logits(*TENSORS, torch.tensor(0.0), 3)
