"""Inputs of another width or dtype than the encoder takes: an error that names them, and torch's own behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.stochman import StochManContrastiveGGN
from contrastive_curvature.network.encoder import Encoder

LABELS = torch.arange(6) % 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), cc.L2Norm()).eval()


def refused(call: Callable[[], Any], *words: str) -> cc.InputError:
    with pytest.raises(cc.InputError, match=r"^x: expected") as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.__cause__ is not None
    return caught.value


WRONG = [
    (torch.rand(6, 7), ("shape (7,)", "torch.float32", "mat1 and mat2")),
    (torch.rand(6, 4, dtype=torch.float64), ("shape (4,)", "torch.float64", "dtype")),
]
FITS = [
    ("last_layer", "diag", None),
    *(("all", "diag", b) for b in (None, cc.ContrastiveGGN, BackPackContrastiveGGN, StochManContrastiveGGN)),
    ("all", "kron", None),
]


@each("x, words", WRONG)
def test_fits_predictions_and_curvatures(x: Tensor, words: tuple[str, ...]) -> None:
    refused(lambda: cc.ggn(build(), x, LABELS), *words)
    good = torch.rand(6, 4)
    for subset, structure, backend in FITS:
        la = Laplace(build(), "contrastive", subset, structure, backend=backend, backend_kwargs={"pd_fix": "psd"})
        refused(lambda la=la: la.fit([(x, LABELS)]), *words)
        refused(lambda la=la: la.fit([(good, LABELS), (x, LABELS)]), *words)
        la.fit([(good, LABELS)])
        analysed = "points of shape (4,) and dtype torch.float32, as when the model was analysed"
        refused(lambda la=la: la(x), analysed, *words)
        refused(lambda la=la: la.predictive_samples(x, n_samples=2, joint=True), *words)
        assert la(good).raw_mean.shape == (6, 3)


def test_entries_of_a_mapping_are_named() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Any) -> Tensor:
            out: Tensor = self.layer(x["a"])
            return out

    refused(lambda: cc.ggn(Named(), {"a": torch.rand(6, 7)}, LABELS), "'a' of shape (7,)", "mat1")
    refused(lambda: cc.ggn(Named(), {"b": torch.rand(6, 4)}, LABELS), "'b' of shape (4,)", "KeyError")


def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    """Where the encoder took inputs like these before, and where the machine is to blame."""

    class Moody(nn.Module):
        error: Exception | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.error is not None:
                raise self.error
            return x

    model = nn.Sequential(Moody(), nn.Linear(4, 3))
    encoder = Encoder(model, torch.rand(5, 4))
    model[0].error = ValueError("a mood")
    for call in (encoder, encoder.forward_with_features):
        with pytest.raises(ValueError, match=r"^a mood$"):
            call(torch.rand(6, 4))
    error = refused(lambda: encoder(torch.rand(6, 5)), "shape (4,)", "shape (5,)", "ValueError: a mood.")
    assert error.__cause__ is model[0].error
    for machine in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("Expected all tensors to be on the same device"),
        cc.UnsupportedError("ours"),
    ):
        model[0].error = machine
        with pytest.raises(type(machine)) as caught:
            encoder(torch.rand(6, 5))
        assert caught.value is machine
