"""Inputs of another width or dtype than the encoder takes: an error that names them, and torch's own behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import covering
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.curvlinops import ContrastiveGGNLinearOperator
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.curvlinops import CurvlinopsContrastiveGGN
from contrastive_curvature.laplace.backends.stochman import StochManContrastiveGGN
from contrastive_curvature.network.encoder import Encoder

LABELS = torch.arange(6) % 3
BACKENDS = [None, cc.ContrastiveGGN, BackPackContrastiveGGN, CurvlinopsContrastiveGGN, StochManContrastiveGGN]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), cc.L2Norm()).eval()


def refused(call: Callable[[], Any], *words: str) -> cc.InputError:
    with pytest.raises(cc.InputError, match=r"^x: expected") as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.__cause__ is not None
    return caught.value


WRONG = {
    "width": (torch.rand(6, 7), ("shape (7,)", "torch.float32", "mat1 and mat2")),
    "double": (torch.rand(6, 4, dtype=torch.float64), ("shape (4,)", "torch.float64", "dtype")),
    "long": (torch.zeros(6, 4, dtype=torch.long), ("shape (4,)", "torch.int64")),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_ggn(kind: str, subset: str) -> None:
    x, words = WRONG[kind]
    for structure in ("diag", "full", "kron"):
        refused(
            lambda s=structure: cc.ggn(build(), x, LABELS, subset_of_weights=subset, structure=s, pd_fix="psd"), *words
        )


@covering(
    1,
    kind=WRONG,
    subset__structure__backend=[
        ("last_layer", "diag", None),
        *(("all", s, b) for s in ("diag", "kron") for b in BACKENDS),
    ],
)
def test_laplace(kind: str, backend: Any, subset: str, structure: str) -> None:
    x, words = WRONG[kind]
    for pairs in ("dataset", "batch"):
        options = {"pairs": pairs, "pd_fix": "psd"}
        la = Laplace(build(), "contrastive", subset, structure, backend=backend, backend_kwargs=options)
        refused(lambda la=la: la.fit([(x, LABELS)]), *words)
        good = torch.rand(6, 4)
        refused(lambda la=la, good=good: la.fit([(good, LABELS), (x, LABELS)]), *words)
        la.fit([(good, LABELS)])
        refused(
            lambda la=la: la(x), "points of shape (4,) and dtype torch.float32, as when the model was analysed", *words
        )
        refused(lambda la=la: la.predictive_samples(x, n_samples=2, joint=True), *words)
        assert la(good).raw_mean.shape == (6, 3)


def test_operator() -> None:
    batches = [(torch.rand(6, 4), LABELS), (torch.rand(6, 7), LABELS)]
    refused(lambda: ContrastiveGGNLinearOperator(build(), cc.ContrastiveLoss(), None, batches), "shape (7,)")


def test_images_and_mappings() -> None:
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    refused(lambda: cc.ggn(images, torch.rand(6, 3, 4, 4), LABELS), "shape (3, 4, 4)", "channels")

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Any) -> Tensor:
            out: Tensor = self.layer(x["a"])
            return out

    refused(lambda: cc.ggn(Named(), {"a": torch.rand(6, 7)}, LABELS), "'a' of shape (7,)", "mat1")
    refused(lambda: cc.ggn(Named(), {"b": torch.rand(6, 4)}, LABELS), "'b' of shape (4,)", "KeyError")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, IndexError])
def test_an_error_of_the_users_own_stays_what_it_is(kind: type[Exception]) -> None:
    """Where the encoder took inputs like these before, and where the machine is to blame."""

    class Moody(nn.Module):
        error: Exception | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.error is not None:
                raise self.error
            return x

    model = nn.Sequential(Moody(), nn.Linear(4, 3))
    encoder = Encoder(model, torch.rand(5, 4))
    model[0].error = kind("a mood")
    with pytest.raises(kind, match=r"^a mood$"):
        encoder(torch.rand(6, 4))
    with pytest.raises(kind, match=r"^a mood$"):
        encoder.features(torch.rand(6, 4))
    error = refused(lambda: encoder(torch.rand(6, 5)), "shape (4,)", "shape (5,)", f"{kind.__name__}: a mood.")
    assert error.__cause__ is model[0].error
    refused(lambda: Encoder(model, torch.rand(5, 4)), "inputs that the model can process", "a mood")
    for machine in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("Expected all tensors to be on the same device"),
        NotImplementedError("forward"),
        KeyboardInterrupt(),
        cc.UnsupportedError("ours"),
    ):
        model[0].error = machine  # type: ignore[assignment]
        with pytest.raises(type(machine)) as caught:
            encoder(torch.rand(6, 5))
        assert caught.value is machine
