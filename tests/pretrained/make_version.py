"""Writes the folder of saved posteriors of this version of the library: ``python tests/pretrained/make_version.py``.

Run it once, when a version is released, and commit what it writes. A folder that is there is never written again:
``test_pretrained_versions.py`` loads those of all versions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

VERSIONS = Path(__file__).resolve().parent / "versions"

NAMES = ("mu", "kappa", "variance", "uncertainty", "p_value")


def numbers(*shape: int, phase: float = 0.0) -> Tensor:
    """The same numbers with every version of torch, which random ones may not be."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(1, count + 1, dtype=torch.float64) * 1.7 + phase).sin().view(shape)


def encoder(phase: float = 0.0) -> nn.Module:
    """An encoder from 4 to 3 numbers with fixed weights."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(numbers(*p.shape, phase=place + phase))
    return model


def model_of(name: str) -> nn.Module:
    """The encoder, or both towers, of a case."""
    return cc.TwoTowers(encoder(), encoder(0.3)) if name == "towers" else encoder()


def predictions(la: Any, device: str = "cpu") -> dict[str, Any]:
    """What a posterior says of fixed inputs, as lists."""
    out = la(numbers(3, 4, phase=0.7).to(device))
    names = NAMES if la.known.calibration is not None else NAMES[:-1]
    return {name: getattr(out, name).tolist() for name in names}


def each(la: Any) -> dict[str, Any]:
    """The posteriors of an object, by name."""
    return {"a": la.a, "b": la.b} if hasattr(la, "a") else {"encoder": la}


def made() -> dict[str, Any]:
    """Fitted posteriors by name: structures, losses with and without tensors, and two towers."""
    x, y = numbers(12, 4), torch.arange(12) % 3
    data = DataLoader(TensorDataset(x, y), 6)
    infonce = {"loss": cc.InfoNCELoss(0.5, pd_fix="ggn_fixed")}
    options: dict[str, tuple[str, str, dict[str, Any]]] = {
        "last_layer-kron": ("last_layer", "kron", {}),
        "last_layer-diag": ("last_layer", "diag", {"loss": cc.ProxyLoss(numbers(3, 3), 8.0)}),
        "last_layer-kron_lowrank": ("last_layer", "kron_lowrank", {"rank": 2, "margin": None}),
        "all-full": ("all", "full", infonce),
        "towers": ("last_layer", "full", infonce),
    }
    out = {}
    for name, (weights, structure, given) in options.items():
        la = Laplace(model_of(name), "contrastive", weights, structure, backend_kwargs=given)
        la.fit([(x[:6], x[6:].flip(1)), (x[3:9], x[2:8].flip(1))] if name == "towers" else data)
        la.optimize_prior_precision()
        if name != "towers":
            la.calibrate(DataLoader(TensorDataset(numbers(10, 4, phase=2.0), torch.zeros(10)), 5))
        out[name] = la
    return out


def main() -> None:
    """Write the folder of this version.

    Raises:
        SystemExit: It is there.
    """
    folder = VERSIONS / cc.__version__
    if folder.exists():
        sys.exit(f"{folder} is there: a released version stays as it is.")
    expected = {}
    for name, la in made().items():
        la.save_pretrained(folder / name, notes="A test keeps it.", metrics={"auroc": 0.5})
        expected[name] = {tower: predictions(one) for tower, one in each(la).items()}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
