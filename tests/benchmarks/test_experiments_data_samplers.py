"""Batches of places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.data.places import PlaceSampler
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
