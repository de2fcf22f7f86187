"""The folder that every release has saved loads still, and predicts what it did.

Once for each release, from ``tests``: ``PYTHONPATH=. python pretrained/test_pretrained_versions.py`` writes its folder,
which is committed and never written again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc

VERSIONS = Path(__file__).resolve().parent / "versions"

RELEASED = ["0.2.0"]
"""Append the version of every release."""

OTHER_NOVELTY = ["0.2.0"]
"""Releases whose calibrations are of another statistic, and left out."""

NAMES = ("mu", "kappa", "variance", "uncertainty", "p_value")

ROUNDING = 1e-4
"""Relative, of float32: another version of torch or another machine may add in another order."""


def numbers(*shape: int, phase: float = 0.0) -> Tensor:
    """The same numbers with every version of torch, which random ones may not be."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(1, count + 1) * 1.7 + phase).sin().view(shape)


def encoder() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(numbers(*p.shape, phase=place))
    return model


def predictions(la: Any, match: cc.MatchProbability, device: str) -> dict[str, Any]:
    out = la(numbers(3, 4, phase=0.7).to(device))
    names = [name for name in NAMES if name != "p_value" or la.known.calibration is not None]
    found = {name: getattr(out, name).tolist() for name in names}
    return {**found, "right": match.nearest(out, la(numbers(60, 4).to(device))).right.tolist()}


def write() -> None:
    folder = VERSIONS / cc.__version__
    if folder.exists():
        sys.exit(f"{folder} is there: a release stays as it is.")
    x, labels = numbers(12, 4), torch.arange(12) % 3
    la: Any = Laplace(encoder(), "contrastive", backend_kwargs={"loss": cc.ProxyLoss(numbers(3, 3), 8.0)})
    la.fit([(x[:6], labels[:6]), (x[6:], labels[6:])])
    la.optimize_prior_precision()
    la.calibrate([numbers(10, 4, phase=2.0)])
    match = cc.MatchProbability().fit_retrieval(la(numbers(60, 4, phase=1.0)), torch.arange(60) // 2 % 2)
    la.save_pretrained(folder / "posterior", match=match, notes="A test keeps it.", metrics={"auroc": 0.5})
    (folder / "posterior" / ".lock").unlink(missing_ok=True)
    (folder / "expected.json").write_text(json.dumps(predictions(la, match, "cpu"), indent=1) + "\n")


def test_there_is_a_folder_for_every_release() -> None:
    assert sorted(path.name for path in VERSIONS.iterdir()) == sorted(RELEASED)
    size = sum(path.stat().st_size for path in VERSIONS.rglob("*") if path.is_file())
    assert size < 20_000 * len(RELEASED)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("version", RELEASED)
def test_it_loads_and_predicts_what_it_did(version: str, device: str) -> None:
    folder = VERSIONS / version / "posterior"
    expected = json.loads((VERSIONS / version / "expected.json").read_text())
    if version in OTHER_NOVELTY:
        del expected["p_value"]
        with pytest.warns(UserWarning, match="another statistic"):
            la = cc.load_pretrained(folder, encoder().to(device))
    else:
        la = cc.load_pretrained(folder, encoder().to(device))
    found = predictions(la, cc.pretrained.load_match(folder), device)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=ROUNDING, atol=ROUNDING)
    info = cc.pretrained.read_info(folder)
    assert info.versions["contrastive_curvature"] == version
    assert info.metrics == {"auroc": 0.5}


if __name__ == "__main__":
    write()
