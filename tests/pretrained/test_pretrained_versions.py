"""Posteriors that every released version has saved load still, and predict what they did."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from devices import DEVICES
from make_version import VERSIONS, each, model_of, predictions

import contrastive_curvature as cc

pytestmark = pytest.mark.parametrize("device", DEVICES)

RELEASED = ["0.1.0"]
"""Append the version of every release, and run ``make_version.py`` once."""

CASES = [(v, name) for v in RELEASED for name in sorted(json.loads((VERSIONS / v / "expected.json").read_text()))]

ROUNDING = 1e-9
"""Relative, of float64: another version of torch or another machine may add in another order."""


def test_there_is_a_folder_for_every_release(device: str) -> None:
    assert sorted(os.listdir(VERSIONS)) == sorted(RELEASED)
    size = sum(path.stat().st_size for path in VERSIONS.rglob("*") if path.is_file())
    assert size < 200_000 * len(RELEASED)


@pytest.mark.parametrize(("version", "name"), CASES)
def test_it_loads_and_predicts_what_it_did(version: str, name: str, device: str) -> None:
    folder = VERSIONS / version / name
    expected = json.loads((VERSIONS / version / "expected.json").read_text())[name]
    loaded = cc.load_pretrained(folder, copy.deepcopy(model_of(name)).to(device))
    for tower, la in each(loaded).items():
        found = predictions(la, device)
        assert found.keys() == expected[tower].keys()
        for key, value in expected[tower].items():
            mine, wanted = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found[key], value))
            torch.testing.assert_close(mine, wanted, rtol=ROUNDING, atol=ROUNDING)
    info = cc.pretrained.read_info(folder)
    assert info.versions["contrastive_curvature"] == version
    assert info.metrics == {"auroc": 0.5}
