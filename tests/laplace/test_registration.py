"""``likelihood="contrastive"`` in laplace-torch: what it adds, and that nothing else changes. In fresh processes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from fresh import run

HOST = '''
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

CASES = [("last_layer", s, b) for s in ("diag", "kron", "full") for b in (CurvlinopsGGN, BackPackGGN)]
CASES += [("all", s, b) for s in ("diag", "kron", "full") for b in (CurvlinopsGGN, BackPackGGN)]
CASES += [("last_layer", "diag", CurvlinopsEF), ("subnetwork", "diag", CurvlinopsGGN)]
CASES += [("subnetwork", "full", CurvlinopsGGN), ("all", "gp", CurvlinopsGGN)]

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
'''


@pytest.fixture(scope="module")
def plain() -> Any:
    """Ordinary results where this package was never imported."""
    script = HOST + 'assert not any("contrastive" in m for m in sys.modules); print(json.dumps(results()))'
    return run(script)[0]


@pytest.fixture(scope="module")
def registered() -> Any:
    """The life of a registration, in one process in which ``from laplace import Laplace`` ran first."""
    script = (
        HOST
        + """
from laplace.baselaplace import BaseLaplace, DiagLaplace
from laplace.laplace import _all_subclasses

def classes():
    return sorted((c for c in _all_subclasses(BaseLaplace) if c.__module__.startswith("laplace.")), key=str)

first = {c: c.__dict__.get("__init__") for c in classes()}
training = laplace.marglik_training
codes = Laplace.__code__, training.__code__
before_modules = set(sys.modules)
import contrastive_curvature as cc
new = set(sys.modules) - before_modules
out = {"brought": sorted(new & {"backpack", "stochman", "matplotlib", "networkx", "curvlinops"})}

def state():
    return {c: c.__dict__.get("__init__") for c in classes()}

redirected = state()
out["changed"] = sorted(c.__name__ for c in first if redirected[c] is not first[c])
cc.register()
cc.register()
out["idempotent"] = all(redirected[c] is state()[c] for c in first)
out["with"] = results()

x, y = torch.randn(12, 3), torch.arange(12) % 3
loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
made = {}
for call in (
    lambda: Laplace(net(), likelihood="contrastive"),
    lambda: Laplace(net(), "contrastive", "all", "diag"),
    lambda: laplace.Laplace(net(), "contrastive", "last_layer", "diag", backend_kwargs={"margin": 0.9}),
    lambda: laplace.DiagLLLaplace(net(), "contrastive"),
    lambda: laplace.FullLaplace(model=net(), likelihood="contrastive"),
):
    la = call()
    la.fit(loader)
    made[type(la).__name__] = bool(torch.isfinite(la(x).kappa).all()) and isinstance(la, BaseLaplace)
out["made"] = made

# The names above were imported before this package.
from laplace.utils.enums import HessianStructure, SubsetOfWeights
chosen = {}
for name, call in {
    "default": lambda: Laplace(net(), "contrastive"),
    "all": lambda: Laplace(net(), "contrastive", SubsetOfWeights.ALL),
    "string": lambda: Laplace(net(), "contrastive", hessian_structure="kron"),
    "enumeration": lambda: Laplace(net(), "contrastive", hessian_structure=HessianStructure.KRON),
    "positional": lambda: Laplace(net(), "contrastive", "last_layer", "kron_lowrank", 1.0, 2.5),
    "unknown": lambda: Laplace(net(), "contrastive", "last_layer", "bogus"),
    "training": lambda: marglik_training(net(), loader, "contrastive"),
    "theirs": lambda: Laplace(net(), "regression", "last_layer", "kron_lowrank"),
}.items():
    try:
        chosen[name] = type(call()).__name__
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
try:
    Mine(net(), "contrastive")
except cc.UnsupportedError as error:
    out["hint"] = str(error)
try:
    Laplace(net(), "nonsense")
except ValueError as error:
    out["nonsense"] = str(error)
ours = [c for c in _all_subclasses(BaseLaplace) if c.__module__.startswith("contrastive")]
theirs = {c._key for c in _all_subclasses(BaseLaplace) if c not in ours and hasattr(c, "_key")}
out["collisions"] = sorted(str(c._key) for c in ours if hasattr(c, "_key") and (c._key in theirs or len(c._key) < 3))
out["ours"] = len(ours)

cc.unregister()
cc.unregister()
# What a class did not define itself, it must not define now.
out["restored"] = all(
    state()[c] is first[c] and ("__init__" in c.__dict__) == (first[c] is not None) for c in first
) and laplace.marglik_training is training and sys.modules["laplace.marglik_training"].marglik_training is training
out["restored"] &= Laplace.__code__ is codes[0] and training.__code__ is codes[1] and laplace.Laplace is Laplace
out["after"] = results()
refused = []
for call in (lambda: Laplace(net(), "contrastive"), lambda: laplace.DiagLLLaplace(net(), "contrastive")):
    try:
        call()
    except ValueError as error:
        refused.append(type(error).__name__)
out["refused"] = refused
cc.register()
out["again"] = type(Laplace(net(), "contrastive", "all", "diag")).__name__
out["again_same"] = results() == out["after"]
print(json.dumps(out))
"""
    )
    out, printed = run(script)
    out["printed"] = printed
    return out


def test_ordinary_results_are_bit_identical(plain: Any, registered: Any) -> None:
    assert registered["with"] == plain
    assert registered["after"] == plain
    assert registered["again_same"]


def test_the_comparison_covers_the_hosts_structures(plain: Any) -> None:
    """A comparison of errors with errors would prove nothing."""
    worked = [key for key, value in plain.items() if isinstance(value, list)]
    failed = {key: value for key, value in plain.items() if not isinstance(value, list) and "/" in key}
    assert len(worked) >= 26, failed
    assert {key.split("/")[2] for key in worked} == {"diag", "kron", "full", "gp"}
    assert all(value[0].startswith("laplace.") for key, value in plain.items() if key in worked)
    assert len({hashlib.sha256(value[1].encode()).digest() for key, value in plain.items() if key in worked}) > 20


def test_calls_work_however_laplace_was_imported(registered: Any) -> None:
    assert registered["made"] == {
        "ContrastiveKronLowRankLLLaplace": True,
        "ContrastiveDiagLaplace": True,
        "ContrastiveDiagLLLaplace": True,
        "ContrastiveFullLaplace": True,
    }
    assert registered["again"] == "ContrastiveDiagLaplace"


def test_the_default_and_every_error_are_ours_for_names_that_were_imported_before(registered: Any) -> None:
    chosen = registered["chosen"]
    assert chosen["default"] == chosen["positional"] == "ContrastiveKronLowRankLLLaplace"
    assert chosen["all"] == "ContrastiveKronLaplace"
    assert chosen["string"] == chosen["enumeration"] == "ContrastiveKronLLLaplace"
    assert chosen["prior"] == 2.5
    assert chosen["unknown"].startswith("InputError: hessian_structure: expected one of 'diag'")
    assert chosen["training"].startswith("UnsupportedError: marglik_training")
    assert chosen["theirs"] == "ValueError: Unsupported Laplace combination: last_layer, kron_lowrank."


def test_registration_is_idempotent_and_undone_without_a_trace(registered: Any) -> None:
    assert len(registered["changed"]) == 13
    assert registered["idempotent"]
    assert registered["restored"]
    assert registered["refused"] == ["ValueError", "ValueError"]


def test_a_users_subclass_keeps_working_and_is_told_what_to_extend(registered: Any) -> None:
    assert registered["subclass"]
    assert "Mine" in registered["hint"]
    assert "contrastive_curvature.laplace.ContrastiveDiagLaplace" in registered["hint"]
    assert "nonsense" in registered["nonsense"]


def test_the_hosts_lookup_never_meets_our_classes(registered: Any) -> None:
    assert registered["ours"] >= 9
    assert registered["collisions"] == []


def test_import_is_silent_and_light(registered: Any) -> None:
    """BackPACK, curvlinops and (through torchmetrics) matplotlib come with laplace-torch; nothing heavy comes by us."""
    assert registered["brought"] == []
    assert registered["printed"] == ""


@pytest.mark.parametrize(
    "again",
    [
        "import contrastive_curvature.laplace.registry as r; importlib.reload(r)",
        "import contrastive_curvature.laplace.registry as r; importlib.reload(r).register()",
        "[sys.modules.pop(m) for m in list(sys.modules) if m.startswith('contrastive_curvature')]\n"
        "import contrastive_curvature",
    ],
)
def test_a_second_copy_takes_over_from_the_first(again: str) -> None:
    """As with ``importlib.reload``, or in notebooks and test suites that clear ``sys.modules``."""
    script = (
        "import importlib, json, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import torch, laplace\n"
        "from laplace import Laplace, marglik_training\n"
        "plain = Laplace.__code__, laplace.DiagLaplace.__init__, dict(vars(Laplace))\n"
        "import contrastive_curvature\n"
        f"{again}\n"
        "import contrastive_curvature as cc\n"
        "from contrastive_curvature.laplace import ContrastiveKronLowRankLLLaplace as ours\n"
        "layer = torch.nn.Linear(3, 2)\n"
        "out = [type(Laplace(layer, 'classification')).__name__, type(Laplace(layer, 'contrastive')) is ours]\n"
        "data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.arange(4) % 2)\n"
        "loader = torch.utils.data.DataLoader(data)\n"
        "trained = marglik_training(layer, loader, 'classification', n_epochs=1)\n"
        "out.append(type(trained[0]).__name__)\n"
        "import contrastive_curvature.laplace.registry as registry\n"
        "registry.unregister()\n"
        "out.append((Laplace.__code__, laplace.DiagLaplace.__init__, dict(vars(Laplace))) == plain)\n"
        "print(json.dumps(out))"
    )
    assert run(script)[0] == ["KronLLLaplace", True, "KronLaplace", True]


def test_import_alone_is_silent_and_works_first() -> None:
    """Our package before laplace-torch, and every import that it causes."""
    script = (
        "import sys, json, io, contextlib\n"
        "caught = io.StringIO()\n"
        "with contextlib.redirect_stdout(caught), contextlib.redirect_stderr(caught):\n"
        "    import warnings; warnings.simplefilter('ignore')\n"
        "    import contrastive_curvature\n"
        "from laplace import Laplace\n"
        "import torch\n"
        "made = Laplace(torch.nn.Linear(2, 2), 'contrastive', 'all', 'diag')\n"
        "heavy = [m for m in ('stochman',) if m in sys.modules]\n"
        "print(json.dumps([type(made).__name__, heavy, caught.getvalue()]))"
    )
    assert run(script) == (["ContrastiveDiagLaplace", [], ""], "")
