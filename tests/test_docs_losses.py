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
from contrastive_curvature.testing import dense_jacobian

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


def concrete_losses() -> dict[str, Any]:
    kinds = [getattr(cc, name) for name in cc.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, CosineLoss)]
    return {kind.__name__: kind for kind in kinds if not kind.__abstractmethods__}


def factors(loss: CosineLoss, device: str, size: int = 10) -> tuple[str, str]:
    """Of ``la.H``, as text, to ``loss()``; and how a fit of several batches adds up. ``cc.ggn`` has the factor 1."""
    x, y = numbers(size, size, 4).to(device), (torch.arange(size) % 3).to(device)
    y[0] = 9  # alone in its class
    torch.manual_seed(0)
    encoder = nn.Linear(4, 3).double().to(device)

    def curvature(x: Tensor, y: Tensor) -> Tensor:
        z = encoder(x).detach()
        hessian: Any = torch.autograd.functional.hessian(lambda raw: loss(raw, y), z)
        jacobian = dense_jacobian(encoder.cpu(), x.cpu()).to(device)
        encoder.to(device)
        return jacobian.T @ hessian.reshape(z.numel(), -1) @ jacobian

    def fit(batches: Any) -> Any:
        la = Laplace(encoder, "contrastive", "all", "full", backend_kwargs={"loss": loss})
        la.fit(batches)
        return la

    truth, la = curvature(x, y), fit([(x, y)])
    assert close(cc.ggn(encoder, x, y, loss=loss, structure="full", clamp=False), truth)
    operator = cc.ContrastiveGGNLinearOperator(encoder, loss, None, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert close(operator @ torch.eye(len(truth), dtype=truth.dtype, device=device), truth)
    known = {"1": 1.0, "$N / 2$": size / 2, "$N$": size, "$N_+$": size - 1}
    name = next(name for name, factor in known.items() if close(la.H_raw, factor * truth))
    assert close(la.loss, known[name] * loss(encoder(x), y).detach())
    half = size // 2
    parts = [(x[:half], y[:half]), (x[half:], y[half:])]
    together = fit(parts).H_raw
    if close(together, la.H_raw) and loss.compares == "pairs":
        return name, "all pairs of the data"
    assert close(together, sum(fit([part]).H_raw for part in parts))
    return name, "each batch alone, then the sum"


def test_factors_of_a_fit_stand_on_the_page(device: str) -> None:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, kind in concrete_losses().items():
        if kind.compares == "grades":
            continue
        option = "normalization" if kind.compares == "pairs" else "reduction"
        first = {"ProxyLoss": [numbers(0, 10, 3).to(device)], "TripletLoss": [2.0]}.get(name, [])
        for value in ("type", "anchor", "sum") if option == "normalization" else ("mean", "sum"):
            loss = kind(*first, **{option: value}, pd_fix="full")
            rows.setdefault((f'{option}="{value}"', *factors(loss, device)), []).append(f"`{name}`")
    page = (DOCS / "losses.md").read_text(encoding="utf-8")
    for (option, factor, batches), names in rows.items():
        row = f"| {', '.join(names)} | `{option}` | {factor} | {batches} |"
        assert row in page, f"docs/losses.md lacks the row\n{row}"


def test_every_loss_and_every_fix_stands_on_the_page() -> None:
    losses = (DOCS / "losses.md").read_text(encoding="utf-8")
    rows = [line for line in losses.splitlines() if line.startswith("| `")]
    concrete = concrete_losses()
    assert len(concrete) >= 9
    for name in concrete:
        found = any(row.startswith(f"| `{name}` (") for row in rows)
        assert found, f"{name} has no row in the table at the top of docs/losses.md"
    for fix in cc.PDFix:
        assert f'| `"{fix}"` |' in losses
