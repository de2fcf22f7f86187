"""What docs/losses.md, docs/self_supervised.md and docs/clip.md say of losses, data and towers; their code runs in
test_house, and the formulas of docs/theory.md in test_docs_theory.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from docs_rows import LABELS, ROW_LOSSES, D, N, close, numbers
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.rows import RowTerms

pytestmark = pytest.mark.parametrize("device", DEVICES)

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


class Tripled(cc.InfoNCELoss):
    """Three times InfoNCE."""

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return 3 * super()._value(cosine, positive, negative)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        terms = super()._terms(cosine, positive, negative, statistics)
        assert terms.second is not None
        return RowTerms(3 * terms.first, 3 * terms.second, tuple(math.sqrt(3) * q for q in terms.roots))


def test_a_constant_factor_of_a_loss_cancels(device: str) -> None:
    encoder, x, y = small(device)
    one, three = (fitted(encoder, [(x, y)], kind(0.2)) for kind in (cc.InfoNCELoss, Tripled))
    assert close(three(x).covariance, one(x).covariance, 1e-9)
    assert close(three.loss, 3 * one.loss)


def test_a_mean_counts_times_its_anchors(device: str) -> None:
    """With one positive each, the mean and the sum give one fit; two batches count as both."""
    encoder, x, y = small(device)
    once = (x[:12], y[:12])
    mean, total = (fitted(encoder, [once], cc.InfoNCELoss(0.2, reduction=r)) for r in ("mean", "sum"))
    assert close(mean.loss, total.loss)
    assert close(mean(x).covariance, total(x).covariance, 1e-9)
    z = encoder(x[:12]).detach()
    assert close(mean.loss, 12 * cc.InfoNCELoss(0.2)(z, y[:12]))
    both = fitted(encoder, [once, (x[12:], y[12:])], cc.InfoNCELoss(0.2))
    assert close(both.loss, mean.loss + fitted(encoder, [(x[12:], y[12:])], cc.InfoNCELoss(0.2)).loss)


def test_candidates_of_a_data_set(device: str) -> None:
    """One batch of everything is the data set; as many negatives as there are others count in full."""
    encoder, x, y = small(device)
    batches = list(zip(x.split(6), y.split(6), strict=True))
    loss = cc.InfoNCELoss(0.2)
    whole = fitted(encoder, [(x, y)], loss)
    dataset = fitted(encoder, batches, loss, candidates="dataset")
    assert close(dataset.loss, whole.loss)
    assert close(dataset(x).covariance, whole(x).covariance, 1e-8)
    assert close(fitted(encoder, batches, loss, candidates="dataset", negatives_per_anchor=23).loss, whole.loss)
    fewer = fitted(encoder, batches, loss, candidates="dataset", negatives_per_anchor=5)
    u = nn.functional.normalize(encoder(x).detach())
    logits, same = u @ u.T / 0.2, y[:, None] == y
    # Each negative counts 5 / 23.
    rest = (logits.exp() * ~same * 5 / 23).sum(1, keepdim=True)
    each = (logits.exp() / (logits.exp() + rest)).log()[same & ~torch.eye(24, dtype=torch.bool, device=device)]
    assert close(fewer.loss, -24 * each.mean())


def test_anchors_without_a_positive_are_counted(device: str, caplog: pytest.LogCaptureFixture) -> None:
    encoder, x, y = small(device)
    alone = torch.cat([y[:-1], y[-1:] + 99])
    with caplog.at_level(logging.INFO, logger="contrastive_curvature"):
        some = fitted(encoder, [(x, alone)], cc.InfoNCELoss(0.2))
    assert [r for r in caplog.records if r.getMessage().startswith("1 of 24 anchors ")]
    z = encoder(x).detach()
    assert close(some.loss, 23 * cc.InfoNCELoss(0.2)(z, alone))
    with pytest.raises(cc.InputError, match="at least one anchor"):
        fitted(encoder, [(x, torch.arange(24, device=device))], cc.InfoNCELoss(0.2))


def test_pairs_that_are_listed_twice(device: str) -> None:
    """A loss of pairs does not change; a softmax does."""
    z, labels = numbers(0, N, D).to(device), LABELS.to(device)
    i, j = torch.combinations(torch.arange(N, device=device)).unbind(1)
    same = labels[i] == labels[j]
    once = i[same], j[same], i[~same], j[~same]
    twice = tuple(torch.cat(two) for two in ((once[0], once[1]), (once[1], once[0]), (once[2], once[3]), once[3:1:-1]))
    for of_pairs in (cc.ContrastiveLoss(), cc.LogisticLoss(), cc.ContrastiveLoss(normalization="type")):
        assert close(of_pairs(z, pairs=twice), of_pairs(z, labels))
    for of_anchors in (cc.InfoNCELoss(), cc.SupConLoss()):
        assert close(of_anchors(z, pairs=once), of_anchors(z, labels))
        assert float(of_anchors(z, pairs=twice)) > 1.001 * float(of_anchors(z, labels))


def test_soft_threshold_on_squared_distances_is_logistic(device: str) -> None:
    z, labels = numbers(0, N, D).to(device), LABELS.to(device)
    soft, logistic = cc.SoftContrastiveLoss(4.0, 5.0, squared=True), cc.LogisticLoss(8.0, -3.0)
    for fix in cc.PDFix:
        pair = [loss.output_hessian(z, labels, pd_fix=fix).dense() for loss in (soft, logistic)]
        assert close(*pair)


def test_views_are_simclrs_loss(device: str) -> None:
    encoder, x, y = small(device)
    first, second = x[:12], x[12:]
    z = encoder(torch.cat([first, second])).detach()
    want = 24 * cc.InfoNCELoss(0.2)(z, torch.arange(12, device=device).repeat(2))
    for batch in ((first, second), ((first, second), y[:12]), (first, second, y[:12])):
        options = (
            {} if len(batch) == 2 and isinstance(batch[1], Tensor) and batch[1].ndim > 1 else {"positives": "views"}
        )
        assert close(fitted(encoder, [batch], cc.InfoNCELoss(0.2), **options).loss, want)
        assert close(fitted(encoder, [batch], cc.InfoNCELoss(0.2)).loss, want)
    by_labels = fitted(encoder, [((first, second), y[:12])], cc.InfoNCELoss(0.2), positives="labels")
    assert close(by_labels.loss, 24 * cc.InfoNCELoss(0.2)(z, y[:12].repeat(2)))


def test_every_loss_and_every_fix_stands_on_the_page(device: str) -> None:
    del device
    losses = (DOCS / "losses.md").read_text(encoding="utf-8")
    rows = [line for line in losses.splitlines() if line.startswith("| `")]
    kinds = [
        kind
        for kind in (getattr(cc, name) for name in cc.__all__)
        if isinstance(kind, type) and issubclass(kind, CosineLoss)
    ]
    concrete = [kind.__name__ for kind in kinds if not kind.__abstractmethods__]
    assert len(concrete) >= 10
    for name in concrete:
        found = any(row.startswith(f"| `{name}(") for row in rows)
        assert found, f"{name} has no row in the table at the top of docs/losses.md"
    for fix in cc.PDFix:
        assert f'| `"{fix}"` |' in losses


@pytest.mark.parametrize("name", ROW_LOSSES)
def test_defaults_of_pd_fix(name: str, device: str) -> None:
    assert ROW_LOSSES[name].pd_fix is cc.PDFix.PSD_PARTS
    proxies = numbers(0, 3, D).to(device)
    assert cc.ProxyLoss(proxies).pd_fix is cc.CoSENTLoss().pd_fix is cc.PDFix.PSD_PARTS
    assert cc.ProxyLoss(proxies, margin=0.5, kind="arcface").pd_fix is cc.PDFix.PSD
    assert cc.LogisticLoss().pd_fix is cc.ContrastiveLoss().pd_fix is cc.PDFix.FIXED


class PoolingHead(nn.Module):
    """The end of SigLIP's image tower: attention to a probe, and a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = self.attention(self.probe.expand(len(tokens), -1, -1), tokens, tokens)[0][:, 0]
        return pooled + self.fc2(nn.functional.gelu(self.fc1(pooled)))


class TextTower(nn.Module):
    """Takes what a tokenizer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        kept = tokens["attention_mask"].unsqueeze(2).to(self.embedding.weight.dtype)
        return self.head((self.embedding(tokens["input_ids"]) * kept).sum(1) / kept.sum(1))


def test_towers_like_those_of_siglip(device: str) -> None:
    """An image tower that ends in a residual block, of which one layer is not frozen, beside a tower of tokens."""
    torch.manual_seed(0)
    images, texts = PoolingHead().to(device).requires_grad_(False), TextTower().to(device).requires_grad_(False)
    images.fc2.requires_grad_(True)
    texts.head.requires_grad_(True)
    tokens = {"input_ids": torch.randint(0, 20, (12, 5), device=device)}
    tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    batch = torch.randn(12, 7, 8, device=device), tokens
    options = {"loss": cc.SigLIPLoss(5.0, -2.0)}
    la = Laplace(cc.TwoTowers(images, texts), "contrastive", "all", "kron", backend_kwargs=options)
    la.fit([batch])
    la.optimize_prior_precision()
    assert la.a.mean.numel() == 12 * 8 + 8
    assert la.b.mean.numel() == 8 * 8 + 8
    assert bool((la.a(batch[0]).uncertainty > 0).all())
    assert cc.similarity(la.a(batch[0]), la.b(tokens), pairwise=True).mean.shape == (12, 12)
