"""BackPACK's own numbers are bit-identical before, with and after our import, and use. In a fresh process."""

from typing import Any

import pytest
from fresh import run
from tables import each

SCRIPT = """
import hashlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from backpack import backpack, extend
from backpack import extensions

NAMES = ("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact", "SqrtGGNMC", "KFAC",
         "KFLR", "KFRA", "DiagHessian", "BatchDiagHessian", "GGNMP", "HMP", "PCHMP",
         "BatchGrad", "Variance", "SumGradSquared", "BatchL2Grad")

def digest(values):
    h = hashlib.sha256()
    for v in values:
        h.update(v.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()

def flat(value, p):
    if callable(value):
        value = value(torch.ones(1, *p.shape))
    return [part.detach().flatten() for part in (value if isinstance(value, list) else [value])]

def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4), nn.Sigmoid(), nn.Linear(4, 3)]
    return nn.Sequential(*layers)

def results():
    torch.manual_seed(1)
    x = torch.randn(6, 1, 3, 3)
    tasks = {"classes": (nn.CrossEntropyLoss, torch.arange(6) % 3), "regression": (nn.MSELoss, torch.randn(6, 3))}
    out = {}
    for task, (loss, y) in tasks.items():
        for name in NAMES:
            torch.manual_seed(2)
            model, extension = extend(net()), getattr(extensions, name)()
            try:
                with backpack(extension):
                    extend(loss())(model(x), y).backward()
            except Exception as error:  # what does not work must not work in the same way
                out[f"backpack/{task}/{name}"] = f"{type(error).__name__}: {error}"
                continue
            found = [t for p in model.parameters() for t in flat(getattr(p, extension.savefield), p)]
            out[f"backpack/{task}/{name}"] = [digest(found)]
    return out

out = {"plain": results()}
assert not any("contrastive" in m for m in sys.modules)
import contrastive_curvature as cc
out["with"] = results()
# And after their use: an adapter may leave nothing behind in its host.
x, y = torch.randn(6, 1, 3, 3), torch.arange(6) % 3
for kind in (cc.BackPackContrastiveGGN, cc.CurvlinopsContrastiveGGN, cc.StochManContrastiveGGN):
    made = kind(net(), pd_fix="psd")
    made.diag(x, y, N=6), made.full(x, y, N=6), made.kron(x, y, N=6)
model = extend(net())
with backpack(extensions.DiagGGNExact()):
    extend(cc.ContrastiveLoss(pd_fix="psd"))(model(x), y).backward()
out["afterwards"] = results()
cc.unregister()
out["undone"] = results()
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return run(SCRIPT)[0]


@each("when", ["with", "afterwards", "undone"])
def test_ordinary_results_are_bit_identical(found: Any, when: str) -> None:
    assert found[when] == found["plain"]


def test_the_comparison_is_one_of_numbers(found: Any) -> None:
    plain = found["plain"]
    worked = {key: value for key, value in plain.items() if isinstance(value, list)}
    assert len(worked) >= 26, {key: value for key, value in plain.items() if key not in worked}
    assert len({value[0] for value in worked.values()}) >= 22
