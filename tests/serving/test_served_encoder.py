"""The module alone computes what ``la(x)`` does, and says NaN where ``la(x)`` raises an error."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from serving_cases import INPUTS, STRUCTURES, assert_same, fitted, inputs, truth
from tables import each
from torch import Tensor, nn

from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.io.serving import ServedEncoder


@pytest.mark.filterwarnings("ignore:One point contributes")
@given(
    structure=st.sampled_from(sorted(STRUCTURES)),
    bias=st.booleans(),
    centres=st.booleans(),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_the_module_is_la(device: str, structure: str, bias: bool, centres: bool, seed: int, size: float) -> None:
    la = fitted(structure, bias=bias, centres=centres, device=device, seed=seed)
    x = size * inputs(9, seed + 5, device=device)
    # Differences of the variances lose some digits of float64, more so for inputs without much variance across.
    assert_same(ServedEncoder(la)(x), truth(la, x), 1e-10)


def without_factors(la: Any) -> None:
    fitted = dataclasses.replace(la.posterior.fitted, typical_norm=None, classes=None)
    la.posterior = dataclasses.replace(la.posterior, fitted=fitted)


def of_classes(count: int) -> Callable[[Any], None]:
    x = inputs(30, 3)
    return lambda la: la.measure_classes([(x.to(la._device), torch.arange(30, device=la._device) % count)])


def of_centres(*rows: int, size: float = 1.0) -> Callable[[Any], None]:
    """Sums of the classes with these numbers, the first of them times a size."""

    def change(la: Any) -> None:
        sums = la.class_centres.sums[list(rows)]
        la.class_centres = ClassCentres(la.class_centres.labels, torch.cat([size * sums[:1], sums[1:]]), 0.5, 48)

    return change


def calibrated_with(n: int) -> Callable[[Any], None]:
    return lambda la: la.calibrate([inputs(n, 11, device=str(la._device))])


@each(
    "change",
    [
        without_factors,
        *map(of_classes, (2, 12)),
        # One has no direction; all are in one place.
        *(of_centres(0, 1, 2, size=0), of_centres(0, 0, 0)),
        *map(calibrated_with, (2, 3, 16, 17)),
    ],
)
def test_other_classes_and_calibrations(change: Callable[[Any], None], device: str) -> None:
    la = fitted("diag", device=device)
    change(la)
    x = torch.cat([inputs(17, 11, device=device), inputs(20, 12, device=device)])
    assert_same(ServedEncoder(la)(x), truth(la, x), 1e-12)


@each("score, by_class", [("uncertainty", False), ("novelty", True), ("uncertainty", True)])
def test_p_values_of_another_score(score: str, by_class: bool, device: str) -> None:
    options = {"score": score, "by_class": by_class}
    la, x = fitted(dtype=torch.float32, device=device, calibrate=options), inputs(20, 3, torch.float32, device)
    wanted = truth(la, x)
    assert_same(ServedEncoder(la)(x), wanted, 1e-5)
    assert wanted[3].unique().numel() > 4
    assert not torch.equal(wanted[3], fitted(dtype=torch.float32, device=device)(x).p_value.cpu())


def test_a_snapshot_of_encoder_and_posterior(device: str) -> None:
    la, x = fitted(device=device), inputs(4, 3, device=device)
    module = ServedEncoder(la)
    before = module(x)
    with torch.no_grad():
        la.model.last_layer.weight.mul_(2)
    la.prior_precision = 100.0
    assert all(torch.equal(*pair) for pair in zip(module(x), before, strict=True))
    assert not any(p.requires_grad for p in module.parameters())
    assert not any(value.requires_grad for value in before)


@each("structure", ["diag", "kron", "full", "kron_lowrank of rank 2"])
def test_rows_that_are_not_finite_hold_nan_alone(device: str, structure: str) -> None:
    la, x = fitted(structure, device=device), inputs(4, 3, device=device)
    module, want, good = ServedEncoder(la), truth(la, x), [0, 2, 3]
    x[1, 2] = torch.nan
    found = module(x)
    assert_same([value[good] for value in found], [value[good] for value in want], 1e-12)
    assert all(bool(value[1].isnan().all()) for value in found)


@pytest.mark.filterwarnings("ignore:la.x.. the weights of la.model have changed")
def test_extreme_sizes_of_outputs(device: str) -> None:
    for scale in (1e-12, 1e12):
        la = fitted("kron", bias=False, device=device, dtype=torch.float32)
        with torch.no_grad():
            la.model.last_layer.weight.mul_(scale)
        la.calibrate([inputs(37, 2, torch.float32, device)])
        x = inputs(6, 3, torch.float32, device)
        assert_same(ServedEncoder(la)(x), truth(la, x), 1e-5)


def test_autocast_leaves_the_scores_alone(device: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh()), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return self.last(self.body(x))

    la = fitted("kron", dtype=torch.float32, device=device, body=Half())
    x = inputs(6, 3, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        found = ServedEncoder(la)(x)
    assert_same(found, truth(la, x), 1e-5)


class Mapped(nn.Module):
    """An encoder of a mapping, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(11, 7), nn.Linear(7, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        mask = x["mask"].unsqueeze(2).to(self.table.weight.dtype)
        return self.last((self.table(x["ids"]) * mask).sum(1) / mask.sum(1))


def mapped_posterior(device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = {"ids": torch.randint(0, 11, (30, 5), device=device), "mask": torch.ones(30, 5, device=device)}
    la = Laplace(Mapped().to(device, dtype), "contrastive", backend_kwargs={"pd_fix": "psd"})
    la.fit([{**x, "labels": torch.arange(30, device=device) % 3}])
    la.optimize_prior_precision()
    la.calibrate([{**x, "ids": x["ids"].flip(0) * 3 % 11}])
    return la, x
