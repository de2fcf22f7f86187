"""Negatives from a sample: that of all points is exact, and the mean over all samples is exact."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DISTANCES, FIXES, NORMALIZATIONS, build_network, close, make_inputs
from tables import covering
from tiny import Numbered, in_batches
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import InputError
from contrastive_curvature.fit import dataset
from contrastive_curvature.losses.logistic import LogisticLoss
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.pairs.rows import point_keys
from contrastive_curvature.structures import Dense, Diagonal, Kron

MARGINS = (None, 0.3, 0.9, 1.4, 2.0)
WEIGHTS = (0.0, 0.3, 0.5, 1.0)
WITH_FACTORS = ("linear", "no bias", "tanh", "softplus", "gelu", "batchnorm")


def backend(model: nn.Module, x: Tensor, last: bool, **options: Any) -> Any:
    if not last:
        return cc.ContrastiveGGN(model, **options)
    return cc.ContrastiveGGN(Encoder(model, x[:2]), last_layer=True, **options)


def tensors(curvature: Any) -> list[Tensor]:
    return [curvature] if isinstance(curvature, Tensor) else [part for group in curvature for part in group]


@st.composite
def labelled(draw: st.DrawFn, kinds: Sequence[str], least: int = 2) -> tuple[nn.Module, Tensor, Tensor, int]:
    """A network and inputs of one class or of several of any sizes, one of them of two points at least."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    sizes[0] = max(sizes[0], least)
    torch.manual_seed(draw(st.integers(0, 2**16)))
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(sum(sizes))] * 7 - 3
    kind = draw(st.sampled_from(tuple(kinds)))
    return build_network(kind, draw(st.integers(2, 3))), make_inputs(kind, len(y)), y, draw(st.integers(1, len(y)))


contrastive = st.fixed_dictionaries(
    {
        "distance": st.sampled_from(DISTANCES),
        "pd_fix": st.sampled_from(FIXES),
        "margin": st.sampled_from(MARGINS),
        "negative_weight": st.sampled_from(WEIGHTS),
        "normalization": st.sampled_from(NORMALIZATIONS),
    }
)
curved = st.builds(
    lambda bias, options, fix: {"loss": LogisticLoss(4.0, bias, pd_fix=fix, **options)},
    st.sampled_from((-1.0, -3.0)),
    st.sampled_from(({"negative_weight": 0.3}, {"normalization": "type"})),
    st.sampled_from(("fixed", "psd", "psd_parts")),
)


@given(drawn=labelled(WITH_FACTORS), options=contrastive | curved, last=st.booleans(), more=st.sampled_from((0, 5)))
def test_a_sample_of_all_points_is_exact(drawn, options, last, more, device) -> None:
    """With at least all points in the sample, curvature, loss and cost are those of all pairs."""
    model, (x, y), size = drawn[0].to(device), (part.to(device) for part in drawn[1:3]), drawn[3]
    loader = in_batches(x, y, size)
    for structure in (Diagonal, Dense, Kron):
        if structure is Kron and options.get("pd_fix") in ("positive", "full"):
            continue
        made = [backend(model, x, last, negative_samples=m, **options) for m in (None, max(2, len(x) + more))]
        try:
            whole = made[0].fit(loader, structure)
        except InputError as refused:
            # No anchor has anything that it is compared with.
            with pytest.raises(InputError, match=re.escape(str(refused))):
                made[1].fit(loader, structure)
            continue
        sampled = made[1].fit(loader, structure)
        # Attraction and repulsion may cancel: sizes are those of what is added up.
        scale = float(whole.cost.abs()) + len(x)
        for mine, exact in zip(tensors(sampled.curvature.plain()), tensors(whole.curvature.plain()), strict=True):
            assert close(mine, exact, 1e-3 * scale)
        assert close(torch.stack([sampled.loss, sampled.cost]), torch.stack([whole.loss, whole.cost]), scale, 1e-12)
        assert sampled.n == whole.n == len(x)


def test_one_class_has_no_negatives(device: str) -> None:
    model, x = build_network("tanh", 3).to(device), make_inputs("tanh", 6).to(device)
    y = torch.zeros(6, dtype=torch.int64, device=device)
    for loss in (None, LogisticLoss(pd_fix="psd")):
        whole, sampled = (
            cc.ContrastiveGGN(model, loss=loss, negative_samples=m).fit([(x, y)], Dense) for m in (None, 2)
        )
        assert bool(whole.curvature.plain().any())
        assert close(sampled.curvature.plain(), whole.curvature.plain())
        assert close(sampled.cost.reshape(1), whole.cost.reshape(1))


# Every sample of a tiny data set. Where M exceeds the largest class, or there are two classes, a sample with points of
# two classes says nothing about which points of other classes it has, so that the mean over them is the exact sum.
TINY = [([0, 0, 1, 1, 2, 2], 4), ([0, 0, 0, 1, 2], 4), ([0, 0, 1, 1, 1], 2), ([0, 1, 1, 1, 1, 1], 3)]


def every_sample(labels: Tensor, size: int) -> list[list[int]]:
    found = map(list, itertools.combinations(range(len(labels)), size))
    return [chosen for chosen in found if len(labels[chosen].unique()) > 1]


def numbers_for(chosen: list[int], n: int) -> Tensor:
    """Numbers of n points of which the chosen ones have the smallest keys, so that they are the sample."""
    by_key = point_keys(torch.arange(n)).argsort()
    numbers = torch.empty(n, dtype=torch.int64)
    numbers[torch.tensor(chosen)] = by_key[: len(chosen)]
    numbers[torch.tensor([k for k in range(n) if k not in chosen])] = by_key[len(chosen) :]
    return numbers


@covering(1, labels__size=TINY, normalization=NORMALIZATIONS, distance=DISTANCES, fix=["fixed", "full", "curved"])
def test_the_mean_over_all_samples_is_the_exact_curvature(labels, size, normalization, distance, fix, device) -> None:
    torch.manual_seed(len(labels))
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double().to(device)
    y = torch.tensor(labels, device=device)
    x = torch.randn(len(y), 3, dtype=torch.float64, device=device)
    options = {"margin": 1.3, "negative_weight": 0.6, "normalization": normalization, "distance": distance}
    options |= {"pd_fix": fix}
    if fix == "curved":
        options = {"loss": LogisticLoss(4.0, -1.0, 0.6, normalization, distance=distance, pd_fix="fixed")}
    whole = cc.ContrastiveGGN(model, negative_samples=None, **options).fit([(x, y)], Dense)
    found, batches = [], in_batches(x, y, 3)
    for chosen in every_sample(y, size):
        loader = Numbered(batches, numbers_for(chosen, len(y)))
        found.append(cc.ContrastiveGGN(model, negative_samples=size, **options).fit(loader, Dense))
    curvatures = torch.stack([one.curvature.plain() for one in found])
    assert float(curvatures.std(0).max()) > 1e-3
    assert close(curvatures.mean(0), whole.curvature.plain())
    for name in ("loss", "cost"):
        mean = torch.stack([getattr(one, name) for one in found]).mean()
        assert close(mean.reshape(1), getattr(whole, name).reshape(1))


def test_the_documented_default_is_told_as_information(device, monkeypatch, caplog) -> None:
    monkeypatch.setattr(dataset, "MANY_POINTS", 60)
    monkeypatch.setattr(dataset, "NEGATIVE_SAMPLES", 20)
    x, y = torch.randn(90, 3, device=device), torch.arange(90, device=device) % 3
    with caplog.at_level("INFO", "contrastive_curvature"):
        cc.ContrastiveGGN(nn.Linear(3, 3).to(device)).fit([(x, y)], Diagonal)
    (told,) = [record for record in caplog.records if "of 90 points, 20 drawn at random" in record.getMessage()]
    assert told.levelname == "INFO"
