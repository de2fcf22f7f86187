"""``mc_samples``: the mean of the estimate is the curvature, and what it has no meaning for is refused."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from strategies import DISTANCES, close
from tables import covering, each, refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.blocks import Blocks, SampledBlocks, SignedFactor


def problem(device: str, dim: int, n: int = 5) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(dim)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, dim)).double().to(device)
    return model, torch.randn(n, 3, dtype=torch.float64, device=device), (torch.arange(n) % 2).to(device)


def every_sign(blocks: Blocks) -> SignedFactor:
    """All sign vectors of a single sample, each point with all of them: the mean over them is the expectation."""
    exact = blocks.signed_factor()
    columns, signs = [], []
    vectors = list(itertools.product((-1.0, 1.0), repeat=exact.signs.shape[0]))
    for sign in (1, -1):
        mine = (exact.signs == sign).to(exact.columns.dtype)
        for vector in vectors:
            noise = torch.tensor(vector, dtype=mine.dtype, device=mine.device).unsqueeze(1)
            columns.append(torch.einsum("cn,cnd->nd", noise * mine, exact.columns) / len(vectors) ** 0.5)
            signs.append(torch.full_like(mine[0], sign))
    return SignedFactor(torch.stack(columns), torch.stack(signs))


def tensors(curvature: Any) -> list[Tensor]:
    return [curvature] if isinstance(curvature, Tensor) else list(itertools.chain.from_iterable(curvature))


@given(
    dim=st.integers(2, 4),
    distance=st.sampled_from(DISTANCES),
    fix=st.sampled_from(("fixed", "psd")),
    n=st.integers(1, 5),
)
def test_the_mean_over_all_samples_is_exact(dim: int, distance: str, fix: str, n: int, device: str) -> None:
    """Of ``diag`` and of ``kron``, by enumeration: no statistics, no tolerance for luck."""
    model, x, labels = problem(device, dim, n)
    for structure in ("diag", "kron"):
        options: dict[str, Any] = {"distance": distance, "pd_fix": fix, "structure": structure, "clamp": False}
        truth = cc.ggn(model, x, labels, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SampledBlocks, "signed_factor", lambda self: every_sign(self.exact))
            mean = cc.ggn(model, x, labels, mc_samples=1, **options)
        for found, wanted in zip(tensors(mean), tensors(truth), strict=True):
            assert close(found, wanted, 1e-6)


def test_samples_follow_the_generator_and_more_are_better(device: str) -> None:
    model, x, labels = problem(device, 16, n=12)
    exact = cc.ggn(model, x, labels, pd_fix="psd")

    def estimate(k: int, seed: int) -> Tensor:
        return cc.ggn(model, x, labels, pd_fix="psd", mc_samples=k, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(estimate(2, 5), estimate(2, 5))
    assert not torch.equal(estimate(2, 5), estimate(2, 6))
    default = cc.ggn(model, x, labels, pd_fix="psd", mc_samples=2)
    assert torch.equal(default, estimate(2, 0))
    errors = {k: sum(float((estimate(k, s) - exact).norm() / exact.norm()) for s in range(20)) / 20 for k in (1, 8)}
    # The standard error falls with the square root of K: 2.8 times from 1 to 8.
    assert 1.8 < errors[1] / errors[8] < 4.4


@each(
    "options, kind, words",
    [
        ({"pd_fix": "full"}, cc.UnsupportedError, "pd_fix='psd', 'fixed'"),
        ({"structure": "full"}, cc.UnsupportedError, "'diag' and 'kron'"),
        ({"mc_samples": 4}, cc.InputError, "fewer samples than the 4 outputs"),
        ({"subset_of_weights": "last_layer"}, cc.UnsupportedError, "Leave it out"),
        ({"mc_samples": 0}, cc.InputError, "mc_samples"),
        ({"generator": 0}, cc.InputTypeError, "generator"),
    ],
)
def test_refusals_name_what_to_do(options: dict[str, Any], kind: type[Exception], words: str, device: str) -> None:
    model, x, labels = problem(device, 4)
    with pytest.raises(kind, match=words):
        cc.ggn(model, x, labels, **{"mc_samples": 1, **options})
    with pytest.raises(cc.UnsupportedError, match="mc_samples"):
        Laplace(model, "contrastive", "all", "full", backend_kwargs={"mc_samples": 1})
    refused(lambda: cc.OnlineLaplace(model, probe=x, n_data=5, backend_kwargs={"mc_samples": 1}), "mc_samples")


@covering(1, structure=["diag", "kron"], pairs=["dataset", "batch"])
def test_a_fit_with_samples(structure: str, pairs: str, device: str) -> None:
    model, x, labels = problem(device, 8, n=24)
    fits = []
    for options in ({}, {"mc_samples": 4}, {"mc_samples": 4}):
        given = {"pd_fix": "psd", "pairs": pairs, **options}
        la = Laplace(model, "contrastive", "all", structure, backend_kwargs=given)
        la.fit([(x[:12], labels[:12]), (x[12:], labels[12:])])
        fits.append(torch.cat([part.flatten() for part in tensors(la.H_raw)]))
    exact, first, second = fits
    assert torch.equal(first, second)
    assert 0 < float((first - exact).norm() / exact.norm()) < 1
