"""``likelihood="contrastive"`` in laplace-torch: what it adds, and that nothing else changes. In a fresh process."""

from typing import Any

import pytest
from fresh import run

SCRIPT = '''
import hashlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from laplace import Laplace, marglik_training
import laplace
from laplace.curvature import CurvlinopsEF, CurvlinopsGGN, BackPackGGN

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

def digest(*values):
    h = hashlib.sha256()
    for v in values:
        h.update(v.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()

def flat(H):
    if isinstance(H, torch.Tensor):
        return [H]
    return [t for part in H.eigenvalues + H.eigenvectors for t in part]

CASES = [(w, s, CurvlinopsGGN) for w in ("last_layer", "all") for s in ("diag", "kron", "full")]
CASES += [("all", "diag", BackPackGGN), ("last_layer", "diag", CurvlinopsEF)]
CASES += [("subnetwork", "full", CurvlinopsGGN), *((w, "gp", CurvlinopsGGN) for w in ("last_layer", "all"))]

def results():
    """Every number of ordinary Laplace approximations, as hashes."""
    out = {}
    torch.manual_seed(1)
    x = torch.randn(12, 3)
    targets = {"classification": torch.arange(12) % 3, "regression": torch.randn(12, 3)}
    for likelihood, y in targets.items():
        for weights, structure, backend in CASES:
            kwargs = {"backend": backend}
            if weights == "subnetwork":
                kwargs["subnetwork_indices"] = torch.tensor([0, 4, 20, 30])
            if structure == "gp":
                kwargs["n_subset"] = 8
            key = "/".join((likelihood, weights, structure, backend.__name__))
            torch.manual_seed(2)
            la = Laplace(net(), likelihood, weights, structure, **kwargs)
            try:
                la.fit(DataLoader(TensorDataset(x, y), batch_size=5))
            except Exception as error:  # what does not work must not work in the same way
                out[key] = f"{type(error).__name__}: {error}"
                continue
            parts = []
            if structure != "gp":
                la.optimize_prior_precision(pred_type="glm", method="marglik", n_steps=3)
                parts += [*flat(la.H), la.log_marginal_likelihood(), la.mean, la.prior_precision]
            prediction = la(x, pred_type="gp" if structure == "gp" else "glm")
            parts += prediction if isinstance(prediction, tuple) else [prediction]
            if structure != "gp":
                parts.append(la.sample(4))
            out[key] = [type(la).__module__ + "." + type(la).__name__, digest(*parts)]
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(x, targets["regression"]), batch_size=6)
    la, model, margliks, losses = marglik_training(
        net(), loader, "regression", "diag", backend=CurvlinopsGGN, n_epochs=2, n_hypersteps=2
    )
    out["marglik_training"] = digest(torch.tensor(margliks), torch.tensor(losses), la.mean)
    return out

def attempt(weights, structure):
    """The host's own error: laplace-torch 0.2 and 0.3 differ."""
    try:
        Laplace(net(), "regression", weights, structure)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

out = {"plain": results()}
errors = [attempt("all", "bogus"), attempt("last_layer", "kron_lowrank")]
assert not any("contrastive" in m for m in sys.modules)
import inspect
from laplace.baselaplace import BaseLaplace, DiagLaplace
from laplace.laplace import _all_subclasses

def classes():
    return sorted((c for c in _all_subclasses(BaseLaplace) if c.__module__.startswith("laplace.")), key=str)

def state():
    # All that laplace-torch consists of: its functions with their code, and what its classes define.
    functions = (Laplace, marglik_training)
    return (
        [(f, f.__code__, f.__defaults__, str(inspect.signature(f)), dict(vars(f))) for f in functions],
        {c: dict(vars(c)) for c in classes()},
        {name: value for name, value in vars(sys.modules["laplace.laplace"]).items() if name != "_all_subclasses"},
    )

first = state()
before_modules = set(sys.modules)
import contrastive_curvature as cc
new = set(sys.modules) - before_modules
out["brought"] = sorted(new & {"backpack", "stochman", "matplotlib", "networkx", "curvlinops"})
out["untouched"] = state() == first
entries = sys.modules["laplace.laplace"]._all_subclasses
cc.register()
cc.register()
out["idempotent"] = sys.modules["laplace.laplace"]._all_subclasses is entries
out["with"] = results()

x, y = torch.randn(12, 3), torch.arange(12) % 3
loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
def kind(la):
    return f"{type(la).__name__} {la.subset_of_weights} {la.hessian_structure}"

made = {}
for call in (
    lambda: Laplace(net(), likelihood="contrastive"),
    lambda: Laplace(net(), "contrastive", "last_layer", "kron", backend_kwargs={"rank": "full"}),
    lambda: laplace.Laplace(model=net(), likelihood="contrastive", hessian_structure="full", subset_of_weights="all"),
):
    la = call()
    la.fit(loader)
    made[kind(la)] = bool(torch.isfinite(la(x).kappa).all()) and isinstance(la, BaseLaplace)
out["made"] = made

# The names above were imported before this package.
from laplace.utils.enums import HessianStructure, SubsetOfWeights
chosen = {}
for name, call in {
    "default": lambda: Laplace(net(), "contrastive"),
    "all": lambda: Laplace(net(), "contrastive", SubsetOfWeights.ALL),
    "enumeration": lambda: Laplace(net(), "contrastive", hessian_structure=HessianStructure.KRON),
    "positional": lambda: Laplace(net(), "contrastive", "last_layer", "kron_lowrank", 1.0, 2.5),
    "unknown": lambda: Laplace(net(), "contrastive", "last_layer", "bogus"),
    "none": lambda: Laplace(net(), "contrastive", "all", "kron_lowrank"),
    "gone": lambda: Laplace(net(), "contrastive", hessian_structure=HessianStructure.GP, n_subset=8),
    "training": lambda: marglik_training(net(), loader, "contrastive", backend=cc.ContrastiveGGN),
}.items():
    try:
        chosen[name] = kind(call())
    except Exception as error:
        chosen[name] = f"{type(error).__name__}: {error}"
chosen["prior"] = float(Laplace(net(), "contrastive", "last_layer", "kron_lowrank", 1.0, 2.5).prior_precision)
out["chosen"] = chosen

class Mine(DiagLaplace):
    _key = ("all", "mine")

torch.manual_seed(4)
mine = Mine(net(), "classification")
mine.fit(loader)
theirs = DiagLaplace(net(), "classification")
theirs.fit(loader)
out["subclass"] = type(mine) is Mine and torch.allclose(mine.H, theirs.H, rtol=1e-4)
out["found"] = type(Laplace(net(), "classification", "all", "mine")).__name__
ours = [c for c in _all_subclasses(BaseLaplace) if c.__module__.startswith("contrastive") and isinstance(c, type)]
of_host = {c._key for c in classes() if hasattr(c, "_key")}
out["collisions"] = sorted(str(c._key) for c in ours if hasattr(c, "_key") and (c._key in of_host or len(c._key) < 3))
out["ours"] = len(ours)
with_us = [attempt("all", "bogus"), attempt("last_layer", "kron_lowrank")]
cc.unregister()
cc.unregister()
out["restored"] = state() == first and sys.modules["laplace.laplace"]._all_subclasses is _all_subclasses
out["same error"] = errors == with_us and None not in errors
out["after"] = results()
try:
    Laplace(net(), "contrastive")
except ValueError as error:
    out["refused"] = type(error).__name__
cc.register()
out["again"] = kind(Laplace(net(), "contrastive", "all", "diag"))
print(json.dumps(out))
'''


@pytest.fixture(scope="module")
def registered() -> Any:
    """The life of a registration, in one process in which ``from laplace import Laplace`` ran first."""
    out, out["printed"] = run(SCRIPT)
    return out


def test_ordinary_results_are_bit_identical(registered: Any) -> None:
    plain = registered["plain"]
    assert registered["with"] == plain
    assert registered["after"] == plain
    # A comparison of errors with errors would prove nothing.
    worked = [key for key, value in plain.items() if isinstance(value, list)]
    assert len(worked) >= 18
    assert {key.split("/")[2] for key in worked} == {"diag", "kron", "full", "gp"}


def test_calls_work_however_laplace_was_imported(registered: Any) -> None:
    assert registered["made"] == dict.fromkeys(
        [f"ContrastiveLaplace {what}" for what in ("last_layer kron_lowrank", "last_layer kron", "all full")], True
    )
    assert registered["again"] == "ContrastiveLaplace all diag"
    chosen = registered["chosen"]
    assert {chosen[name] for name in ("default", "positional", "enumeration")} == {
        "ContrastiveLaplace last_layer kron_lowrank"
    }
    assert chosen["all"] == "ContrastiveLaplace all kron"
    assert chosen["prior"] == 2.5
    assert chosen["unknown"].startswith("InputError: hessian_structure: expected one of 'diag', ")
    assert chosen["none"].startswith("InputError: hessian_structure: expected one of 'diag', 'full', 'kron', ")
    assert "got kron_lowrank. 'kron_lowrank' is for subset_of_weights='last_layer'." in chosen["none"]
    assert "got gp. It was removed after version 0.2." in chosen["gone"]
    assert chosen["training"].startswith("UnsupportedError: marglik_training: it trains with a cross-entropy or ")


def test_what_is_replaced_is_put_back(registered: Any) -> None:
    for what in ("untouched", "idempotent", "same error", "restored"):
        assert registered[what], what
    assert registered["refused"] == "ValueError"


def test_a_users_subclass_keeps_working_and_our_classes_have_keys_of_their_own(registered: Any) -> None:
    assert registered["subclass"]
    assert registered["found"] == "Mine"
    assert registered["ours"] >= 1
    assert registered["collisions"] == []


def test_import_is_silent_and_light(registered: Any) -> None:
    """BackPACK, curvlinops and (through torchmetrics) matplotlib come with laplace-torch; nothing heavy comes by us."""
    assert registered["brought"] == []
    assert registered["printed"] == ""
