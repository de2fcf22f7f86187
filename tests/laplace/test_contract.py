"""Every backend passes the same contract; the default one is chosen anew, and pages say what each can do."""

import re
from pathlib import Path
from typing import Any

import backend_tables as support
import pytest
import torch
from laplace import Laplace
from strategies import build_network, make_inputs
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature import (
    BackPackContrastiveGGN,
    ContrastiveGGN,
    StochManContrastiveGGN,
)
from contrastive_curvature.testing import BackendContract


class TestTorchFunc(BackendContract):
    backend = ContrastiveGGN


class TestBackPack(BackendContract):
    backend = BackPackContrastiveGGN
    refused = frozenset({"softplus", "gelu", "layernorm", "attention", "shared", "residual"})


class TestStochMan(BackendContract):
    backend = StochManContrastiveGGN
    refused = frozenset({"gelu", "layernorm", "attention", "shared", "residual", "embedding"})


LABELS = torch.tensor([0, 0, 1, 1, 2, 2])


def fitted(kind: str, weights: str, structure: str, **kwargs: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model, x = build_network(kind, 3), make_inputs(kind, len(LABELS))
    kwargs.setdefault("backend_kwargs", {"pd_fix": "psd"})
    la = Laplace(model, "contrastive", weights, structure, **kwargs)
    la.fit([(x[:4], LABELS[:4]), (x[4:], LABELS[4:])])
    return la, x


def test_the_default_is_chosen_anew_at_every_fit() -> None:
    la, x = fitted("residual", "all", "kron")
    before = la.backend
    la.fit([(x, LABELS)])
    assert la.backend is not before
    assert type(la.backend) is cc.ContrastiveGGN


def test_a_backend_that_cannot_be_used_is_refused_by_name() -> None:
    with pytest.raises(cc.UnsupportedError, match=r"a GELU.*ContrastiveGGN"):
        fitted("gelu", "all", "diag", backend=cc.BackPackContrastiveGGN)


def test_a_backend_of_ones_own_may_have_options() -> None:
    class Mine(cc.ContrastiveGGN):
        def __init__(self, *args: Any, flavour: str = "plain", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.flavour = flavour

    la, _ = fitted("tanh", "all", "diag", backend=Mine, backend_kwargs={"flavour": "salt", "pd_fix": "psd"})
    assert la.backend.flavour == "salt"
    with pytest.raises(cc.InputError, match=r"backend_kwargs.*flavour"):
        fitted("tanh", "all", "diag", backend=Mine, backend_kwargs={"taste": 1})


ROOT = Path(__file__).resolve().parents[2]


PAGES = ("docs/backends.md",)


def test_pages_are_up_to_date() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(r"<!-- backends: \w+", text), f"{page} has no marks"
        assert support.rewrite(text) == text, f"{page} is out of date: run `make tables`"
