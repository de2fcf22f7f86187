"""Sampled curvatures: their mean over all random signs is the exact one, and what makes no sense is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from strategies import close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hessian.signed import SignedFactor
from contrastive_curvature.network import layer_samples
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.options import Structure

pytestmark = pytest.mark.parametrize("device", DEVICES)

LABELS = torch.tensor([0, 0, 1, 1])


def build(seed: int, dim: int, device: str) -> tuple[LayerwisePullback, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2, groups=1), nn.Tanh(), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, dim, bias=seed % 2 == 0)
    )
    x = torch.randn(4, 1, 3, dtype=torch.float64, device=device)
    model = model.double().eval().to(device)
    return LayerwisePullback(Encoder(model, x)), x


@given(seed=st.integers(0, 99), dim=st.integers(2, 3), samples=st.integers(1, 2), fix=st.sampled_from(["fixed", "psd"]))
def test_the_mean_over_all_signs_is_exact(seed: int, dim: int, samples: int, fix: str, device: str) -> None:
    pullback, x = build(seed, dim, device)
    samples = min(samples, dim - 1)
    hessian = cc.output_hessian(pullback.forward(x)[0], LABELS.to(device), pd_fix=fix, margin=None)
    factor = hessian.blocks.signed_factor()
    exact = [pullback.block_term(x, hessian.blocks, Structure.DIAG)]
    exact += [f for group in pullback.kron_factors(x, hessian.blocks, 4) for f in group]
    count = len(factor.columns)
    means = [torch.zeros_like(f) for f in exact]
    choices = list(itertools.product((0, 1), repeat=samples * count))
    # The signs of a sample are the same for all points: each point's own sum is what must be right.
    for choice in choices:
        drawn = torch.tensor(choice).view(samples, count, 1).expand(-1, -1, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_samples.torch, "randint", lambda *_, drawn=drawn, **__: drawn)
            found = [pullback.sampled_block_term(x, hessian.blocks, Structure.DIAG, samples)]
            kron = pullback.sampled_block_term(x, hessian.blocks, Structure.KRON, samples)
        found += [f for group in kron for f in group]
        for mean, f in zip(means, found, strict=True):
            mean += f / len(choices)
    size = float(max(f.abs().max() for f in exact))
    assert all(close(mean, f, size) for mean, f in zip(means, exact, strict=True))


def test_points_have_signs_of_their_own_and_a_generator_repeats_them(device: str) -> None:
    columns = torch.ones(3, 50, 3, dtype=torch.float64, device=device)
    factor = SignedFactor(columns, torch.ones(3, 50, dtype=torch.float64, device=device))
    one, two = (layer_samples.sample_columns(factor, 2, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one.columns, two.columns)
    assert one.columns[0, :, 0].unique().numel() > 1
    assert not torch.equal(one.columns[0], one.columns[1])
    assert close(one.signs, torch.full((2, 50), 0.5, dtype=torch.float64, device=device))


def test_only_as_many_passes_as_the_signs_need(device: str) -> None:
    signs = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], device=device)
    drawn = layer_samples.sample_columns(SignedFactor(torch.eye(2, device=device).expand(2, 2, 2), signs), 1, None)
    assert drawn.columns.shape == (2, 2, 2)
    assert drawn.signs.tolist() == [[1.0, 1.0], [-1.0, -1.0]]
    none = layer_samples.sample_columns(SignedFactor(torch.ones(2, 2, 2, device=device), 0 * signs), 1, None)
    assert not bool(none.signs.any())


@pytest.mark.parametrize(
    ("samples", "structure", "error", "words"),
    [
        (3, Structure.DIAG, cc.InputError, "3 backward passes, one for each output"),
        (0, Structure.KRON, cc.InputError, "from 1 to 2"),
        (True, Structure.DIAG, cc.InputTypeError if hasattr(cc, "InputTypeError") else TypeError, "a whole number"),
        (1.5, Structure.DIAG, TypeError, "a whole number"),
        (1, Structure.FULL, cc.UnsupportedError, "'full'"),
    ],
)
def test_what_is_refused(samples: Any, structure: Structure, error: type[Exception], words: str, device: str) -> None:
    pullback, x = build(0, 3, device)
    hessian = cc.output_hessian(pullback.forward(x)[0], LABELS.to(device))
    with pytest.raises(error, match=words):
        pullback.sampled_block_term(x, hessian.blocks, structure, samples)
