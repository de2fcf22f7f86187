"""BackPACK's own numbers are bit-identical before, with and after our import, and use. In a fresh process."""

from fresh import run

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
    out = {}
    for name in NAMES:
        torch.manual_seed(2)
        model, extension = extend(net()), getattr(extensions, name)()
        try:
            with backpack(extension):
                extend(nn.CrossEntropyLoss())(model(x), torch.arange(6) % 3).backward()
        except Exception as error:  # what does not work must not work in the same way
            out[name] = f"{type(error).__name__}: {error}"
            continue
        out[name] = [digest([t for p in model.parameters() for t in flat(getattr(p, extension.savefield), p)])]
    return out

out = {"plain": results()}
assert not any("contrastive" in m for m in sys.modules)
import contrastive_curvature as cc
out["with"] = results()
# And after their use: an adapter may leave nothing behind in its host.
x, y = torch.randn(6, 1, 3, 3), torch.arange(6) % 3
for kind in (cc.BackPackContrastiveGGN, cc.StochManContrastiveGGN):
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


def test_ordinary_results_are_bit_identical() -> None:
    found, _ = run(SCRIPT)
    assert found["with"] == found["afterwards"] == found["undone"] == found["plain"]
    worked = [value[0] for value in found["plain"].values() if isinstance(value, list)]
    assert len(worked) >= 13, "the comparison is one of numbers"
    assert len(set(worked)) >= 11
