"""Batches of places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.data.places import PlaceSampler, WithinMetres
from benchmarks.experiments.data.split import TensorSplit
from benchmarks.experiments.methods import Setting
from benchmarks.experiments.methods.training import training_loader
from contrastive_curvature import InputError


def positions(n: int, seed: int) -> torch.Tensor:
    return 60 * torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(n=st.integers(2, 60), per_place=st.integers(2, 5), radius=st.floats(2, 40), seed=st.integers(0, 999))
def test_every_group_surrounds_its_first_image(n, per_place, radius, seed):
    where = positions(n, seed)
    near = (torch.cdist(where, where) <= radius) & ~torch.eye(n, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    if per_place > n or not near.any():
        with pytest.raises(InputError, match=r"per_place|positions"):
            PlaceSampler(where, radius, per_place, generator)
        return
    sampler = PlaceSampler(where, radius, per_place, generator)
    rows = list(sampler)
    assert len(rows) == len(sampler) == n // per_place * per_place
    anchors = []
    for group in torch.tensor(rows).view(-1, per_place):
        anchor, others = int(group[0]), group[1:]
        anchors.append(anchor)
        assert bool(near[anchor, others].all())
        # nobody comes twice while there are others
        assert len(others.unique()) == min(len(others), int(near[anchor].sum()))
    counts = torch.tensor(anchors).bincount(minlength=n)
    around = near.sum(1) + 1
    chosen = around >= per_place if bool((around >= per_place).any()) else around > 1
    assert bool(chosen[anchors].all())
    assert int(counts.max()) <= -(-len(anchors) // int(chosen.sum()))


def test_epochs_differ_and_seeds_repeat():
    def draw(seed: int) -> list[list[int]]:
        sampler = PlaceSampler(positions(40, 0), 15, 4, torch.Generator().manual_seed(seed))
        return [list(sampler) for _ in range(2)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1)[0] != draw(1)[1]


def test_batches_of_training_hold_positive_pairs():
    where = positions(120, 3) * 20  # 1.2 km wide: hardly ever two by chance
    where[60:] = where[:60] + 2
    images = TensorSplit(torch.zeros(120, 1, 8, 8, dtype=torch.uint8), where)
    relation = WithinMetres(10, 25)
    for per_class, least in ((None, 0), (2, 8)):
        setting = Setting(network="digits", batch_size=16, per_class=per_class, relation=relation, progress=False)
        found = [int(relation(targets, targets)[0].triu(1).sum()) for _, targets in training_loader(setting, images, 0)]
        assert min(found[:-1]) >= least
    assert min(found[:-1]) >= 8
