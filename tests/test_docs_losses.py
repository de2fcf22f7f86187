"""What docs/losses.md and docs/clip.md say of losses, data and towers; their code runs in
test_house, and the formulas of docs/theory.md in test_docs_theory.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_rows import close, numbers
from laplace import Laplace
from tables import refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.losses.cosine import CosineLoss

DOCS = Path(__file__).resolve().parent.parent / "docs"


def small(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(device)
    return encoder, numbers(4, 24, 5).to(device), (torch.arange(24) % 6).to(device)


def fitted(encoder: nn.Module, batches: Any, loss: CosineLoss, **options: Any) -> Any:
    la = Laplace(encoder, "contrastive", backend_kwargs={"loss": loss, **options})
    la.fit(batches)
    la.optimize_prior_precision()
    return la


def test_anchors_without_a_positive_are_counted(device: str, caplog: pytest.LogCaptureFixture) -> None:
    encoder, x, y = small(device)
    alone = torch.cat([y[:-1], y[-1:] + 99])
    with caplog.at_level(logging.INFO, logger="contrastive_curvature"):
        some = fitted(encoder, [(x, alone)], cc.InfoNCELoss(0.2))
    assert [r for r in caplog.records if r.getMessage().startswith("1 of 24 anchors ")]
    z = encoder(x).detach()
    assert close(some.loss, 23 * cc.InfoNCELoss(0.2)(z, alone))
    refused(lambda: fitted(encoder, [(x, torch.arange(24, device=device))], cc.InfoNCELoss(0.2)), "at least one anchor")


def test_every_loss_and_every_fix_stands_on_the_page() -> None:
    losses = (DOCS / "losses.md").read_text(encoding="utf-8")
    rows = [line for line in losses.splitlines() if line.startswith("| `")]
    kinds = [
        kind
        for kind in (getattr(cc, name) for name in cc.__all__)
        if isinstance(kind, type) and issubclass(kind, CosineLoss)
    ]
    concrete = [kind.__name__ for kind in kinds if not kind.__abstractmethods__]
    assert len(concrete) >= 9
    for name in concrete:
        found = any(row.startswith(f"| `{name}` (") for row in rows)
        assert found, f"{name} has no row in the table at the top of docs/losses.md"
    for fix in cc.PDFix:
        assert f'| `"{fix}"` |' in losses
