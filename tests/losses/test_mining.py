"""The pairs that cost something, against a loop over all of them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import relate_by_remainder

import contrastive_curvature as cc


@given(
    n=st.integers(1, 12),
    dim=st.integers(1, 4),
    classes=st.integers(1, 4),
    margin=st.sampled_from((None, 0.2, 0.7, 1.5, 2.0)),
    related=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_all_positives_and_the_negatives_inside_the_margin(
    n: int, dim: int, classes: int, margin: float | None, related: bool, seed: int, device: str
) -> None:
    torch.manual_seed(seed)
    # Close enough to each other for every margin to matter, with lengths that must not.
    z = torch.ones(dim, dtype=torch.float64) + torch.rand(n, 1) * torch.randn(n, dim, dtype=torch.float64)
    z = z * 10 ** torch.randn(n, 1, dtype=torch.float64)
    labels = torch.randint(0, classes, (n,))
    positive, negative = relate_by_remainder(labels, labels) if related else (labels[:, None] == labels, None)
    attract, repel = set(), set()
    for i in range(n):
        for j in range(i + 1, n):
            gap = float((z[i] / z[i].norm() - z[j] / z[j].norm()).norm())
            if positive[i, j]:
                attract.add((i, j))
            elif (negative is None or negative[i, j]) and (margin in (None, 2.0) or gap < margin):
                repel.add((i, j))
    z = z.to(device).requires_grad_()
    a1, p, a2, neg = cc.ContrastiveLoss(margin).mine(z, labels, relate_by_remainder if related else None)
    assert all(t.dtype == torch.int64 and t.ndim == 1 and t.device.type == device for t in (a1, p, a2, neg))
    found = [list(zip(i.tolist(), j.tolist(), strict=True)) for i, j in ((a1, p), (a2, neg))]
    assert [sorted(f) for f in found] == [sorted(attract), sorted(repel)]
