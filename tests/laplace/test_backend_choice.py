"""The default backend is exact for every encoder, and says which it is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from laplace import Laplace
from strategies import NETWORKS, build_network, close, make_inputs
from torch import Tensor, nn

import contrastive_curvature as cc

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
BACKENDS = [
    cc.ContrastiveGGN,
    cc.BackPackContrastiveGGN,
    cc.StochManContrastiveGGN,
    cc.CurvlinopsContrastiveGGN,
]


def fitted(kind: str, weights: str, structure: str, **kwargs: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model, x = build_network(kind, 3), make_inputs(kind, len(LABELS))
    if weights == "subnetwork":
        kwargs["subnetwork_indices"] = torch.tensor([0, 3, 5])
    if structure == "gp":
        kwargs["n_subset"] = len(x)
    kwargs.setdefault("backend_kwargs", {"pd_fix": "psd"})
    la = Laplace(model, "contrastive", weights, structure, **kwargs)
    la.fit([(x[:4], LABELS[:4]), (x[4:], LABELS[4:])])
    return la, x


@pytest.mark.parametrize(
    ("kind", "weights", "structure", "kwargs"),
    [
        ("tanh", "last_layer", "diag", {}),
        ("tanh", "all", "diag", {}),
        ("residual", "all", "kron", {}),
        ("conv2d", "subnetwork", "full", {}),
        ("attention", "all", "full", {}),
        ("tanh", "all", "diag", {"enable_backprop": True}),
        ("tanh", "all", "lowrank", {}),
        ("tanh", "all", "gp", {}),
    ],
)
def test_the_default_and_its_line_in_the_log(
    kind: str, weights: str, structure: str, kwargs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="contrastive_curvature"):
        la, x = fitted(kind, weights, structure, **kwargs)
    assert type(la.backend) is cc.ContrastiveGGN
    lines = [record.getMessage() for record in caplog.records if record.message.startswith("curvature by")]
    assert len(lines) == 1
    assert "by ContrastiveGGN:" in lines[0]
    assert "\n" not in lines[0]
    assert bool(torch.isfinite(la(x).kappa).all())
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="contrastive_curvature"):
        fitted("tanh", "all", "diag", backend=cc.BackPackContrastiveGGN)
    assert not [record for record in caplog.records if record.message.startswith("curvature by")]


def test_a_second_fit_looks_at_the_encoder_anew() -> None:
    la, x = fitted("tanh", "all", "diag")
    before = la.backend
    la.fit([(x, LABELS)])
    assert la.backend is not before
    assert type(la.backend) is cc.ContrastiveGGN


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.__name__)
@pytest.mark.parametrize(
    ("weights", "structure"),
    [
        *(("last_layer", s) for s in ("diag", "kron", "kron_lowrank", "full", "gp")),
        *(("all", s) for s in ("diag", "kron", "full", "lowrank", "gp")),
        *(("subnetwork", s) for s in ("diag", "full")),
    ],
)
def test_every_backend_gives_the_same_posterior(backend: Any, weights: str, structure: str) -> None:
    la, x = fitted("conv2d", weights, structure, backend=backend)
    assert type(la.backend) is backend
    other, _ = fitted("conv2d", weights, structure, backend=cc.ContrastiveGGN)
    default, _ = fitted("conv2d", weights, structure)
    for one in (la, default):
        assert close(one(x).covariance, other(x).covariance)
        assert close(one.log_marginal_likelihood(), other.log_marginal_likelihood())


def test_a_backend_that_cannot_be_used_is_refused_by_name() -> None:
    assert len(NETWORKS) > 10
    with pytest.raises(cc.UnsupportedError, match=r"a GELU.*ContrastiveGGN"):
        fitted("gelu", "all", "diag", backend=cc.BackPackContrastiveGGN)
    with pytest.raises(cc.UnsupportedError, match=r"enable_backprop.*ContrastiveGGN"):
        Laplace(nn.Linear(2, 2), "contrastive", "all", "diag", backend=cc.BackPackContrastiveGGN, enable_backprop=True)


def test_a_backend_of_ones_own_may_have_options() -> None:
    class Mine(cc.ContrastiveGGN):
        def __init__(self, *args: Any, flavour: str = "plain", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.flavour = flavour

    la, _ = fitted("tanh", "all", "diag", backend=Mine, backend_kwargs={"flavour": "salt", "pd_fix": "psd"})
    assert la.backend.flavour == "salt"
    with pytest.raises(cc.InputError, match=r"backend_kwargs.*flavour"):
        fitted("tanh", "all", "diag", backend=Mine, backend_kwargs={"taste": 1})
    assert isinstance(la.model, nn.Module)
