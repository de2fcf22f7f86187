"""Hedged embeddings and their points among the benchmarks' methods."""

from __future__ import annotations

import pytest
import torch
from benchmark_methods import make_data, make_setting
from torch import nn

from benchmarks.experiments.methods import hedged
from benchmarks.experiments.methods.hedged import Hedged, HedgedPoint, PairBatches, PairStep, choose_pairs, mixture
from contrastive_curvature.hedged import match_loss, self_mismatch, soft_contrastive_loss

KINDS = {"point": (HedgedPoint, {}), "hedged": (Hedged, {}), "mixture": (Hedged, {"components": 2})}


def trained(kind, folder, data=None, **changes):
    made, options = KINDS[kind]
    method = made(make_setting(**{"dim": 2, "epochs": 20, "lr": 0.003} | changes), **options)
    folder.mkdir(parents=True, exist_ok=True)
    method.fit(make_data() if data is None else data, 0, folder)
    return method


@pytest.mark.parametrize("kind", ["hedged", "mixture"])
def test_scores_are_those_of_the_mixture(kind, tmp_path):
    method, data = trained(kind, tmp_path, epochs=1), make_data()
    mean, variance = method.mixtures(data.test)
    assert mean.shape == variance.shape == (12, method.components, 2)
    found = method.predict(data.test)
    a, b = method.match
    many = self_mismatch(mean, variance, a, b, n_samples=2000, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(found.uncertainty, many, atol=0.2)
    twice = method.predict(data.test.take(torch.tensor([3, 0, 3]))).uncertainty
    torch.testing.assert_close(twice, found.uncertainty[[3, 0, 3]], rtol=0, atol=1e-6)
    draws = torch.stack(list(method.samples(data.test, 4000, 1)), 1)
    # Independent draws of the mixture have its mean and its variance, to five standard errors.
    total = variance.mean(1) + mean.var(1, correction=0)
    assert bool(((draws.mean(1) - mean.mean(1)).abs() < 5 * (total / 4000).sqrt()).all())
    assert torch.allclose(draws.var(1).mean(1), found.variants["variance"], rtol=0.15)


def test_pairs_of_a_batch():
    targets = torch.tensor([0, 0, 1, 2, 1, 1, 0, 3])
    i, j, weight = choose_pairs(targets, 100)
    same = targets[i] == targets[j]
    assert set(zip(i.tolist(), j.tolist(), strict=True)) == {(x, y) for y in range(8) for x in range(y)}
    assert int(same.sum()) == 6
    assert weight[same].sum() == pytest.approx(0.5)
    assert torch.allclose(weight[~same], torch.full((22,), 0.5 / 22))
    i, j, weight = choose_pairs(targets, 5)
    assert len(set(zip(i.tolist(), j.tolist(), strict=True))) == 11
    assert weight[targets[i] != targets[j]].sum() == pytest.approx(0.5)
    for alone in ([4, 4, 4, 4], [0, 1, 2, 3]):
        assert choose_pairs(torch.tensor(alone), 10)[2].sum() == pytest.approx(1.0)


def test_the_losses_are_the_packages():
    # A variance of almost nothing leaves no noise, so that two sets of samples give one loss.
    raw = torch.tensor([[0.0, 0.1], [0.3, 0.2], [-0.5, 1.0], [0.9, -0.4]])
    i, j, matches = torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([True, False])
    step = PairStep(nn.Identity(), 1)
    found = step.losses(torch.cat([raw, torch.full((4, 2), -200.0)], 1), i, j, matches)
    mean, variance = mixture(torch.cat([raw, torch.full((4, 2), -200.0)], 1), 1)
    sampled = mean.expand(-1, 8, -1)
    wanted = match_loss(sampled[i], sampled[j], matches, *step.match(), average="probability", reduction="none")
    kl = hedged.kl_bound(mean, variance).mean()
    assert torch.allclose(found, wanted + 2e-4 * kl, rtol=1e-2)
    assert [group["lr"] for group in step.parameter_groups(0.1)] == [0.1, 1.0]
    point = PairStep(nn.Identity(), 0)
    wanted = soft_contrastive_loss(raw[i], raw[j], matches, *point.match(), reduction="none")
    assert torch.equal(point.losses(raw, i, j, matches), wanted)


def test_half_of_the_drawn_pairs_match_and_partners_are_drawn_evenly():
    targets = torch.tensor([5, 5, 5, 9, 9, 2])
    batches = PairBatches(targets, 8, 400, torch.Generator().manual_seed(0))
    seen: dict[tuple[int, int], int] = {}
    for rows in batches:
        pairs = [tuple(pair) for pair in torch.tensor(rows).view(-1, 2).tolist()]
        assert sum(bool(targets[x] == targets[y]) for x, y in pairs) == 4
        assert all(x != y for x, y in pairs)
        for pair in pairs:
            seen[pair] = seen.get(pair, 0) + 1
    assert len(batches) == 400
    assert len(seen) == 6 * 5
    # A first image of five that have a partner, then one of its partners.
    for (x, y), count in seen.items():
        if targets[x] == targets[y]:
            expected = 1600 / 5 / (2 if targets[x] == 5 else 1)
            assert abs(count - expected) < 5 * expected**0.5
