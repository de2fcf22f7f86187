"""What an import of the package does: modules form layers without a cycle, nothing is printed, nothing extra comes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import ROOT, run
from packaging.version import Version

PACKAGE = "contrastive_curvature"

FLOW = ["pairs", "hessian", "network", "losses", "fit", "vmf", "metrics", "embedding", "hosts", "laplace"]
"""Folders of the flow, in its order: each imports those before it alone, and none of those around it."""

PLAIN = {"artifact", "errors", "validate", "options", "progress"}
"""Modules that everything may import."""


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, without those for the type checker alone."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from statements(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, [])
            yield from statements(inner if isinstance(inner, list) else [])


def import_graph(root: Path, package: str) -> dict[str, set[str]]:
    """Module -> modules of the package that its import runs by name."""
    files = {module_of(path, root): path for path in sorted((root / package).rglob("*.py"))}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
            wanted: list[str] = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: a relative import"
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [module if module in files else str(node.module) for module in inner]
            graph[name] |= {module for module in wanted if module in files and module != name}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, the first of them at both ends; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(graph[module]):
                if cycle := visit(other, [*path, module]):
                    return cycle
            done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(ROOT, PACKAGE)


def test_no_import_cycle(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 100
    assert find_cycle(graph) == []


def test_folders_import_what_stands_before_them(graph: dict[str, set[str]]) -> None:
    def folder(module: str) -> str:
        return ([*module.split("."), ""])[1]

    folders: dict[str, set[str]] = {folder(module): set() for module in graph}
    for module, others in graph.items():
        folders[folder(module)] |= {folder(other) for other in others} - {folder(module), ""}
    assert find_cycle(folders) == [], "a circle of folders"
    for place, name in enumerate(FLOW):
        above = folders[name] - set(FLOW[:place]) - PLAIN
        assert not above, f"{name} imports {above}, which do not stand before it in the flow"


def test_the_graph_sees_what_an_import_runs_and_no_more(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    lines = {
        "__init__": "from p import a",
        "a": "import p.b\nfrom p.c import x\nfrom p import d, y",
        "b": "def f():\n    from p import a",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a\nelse:\n    import p.d",
        "d": "class C:\n    try:\n        import p.e\n    except ImportError:\n        import os",
        "e": "with open('x') as f:\n    from p import b",
    }
    for name, code in lines.items():
        (package / f"{name}.py").write_text(code, encoding="utf-8")
    graph = import_graph(tmp_path, "p")
    wanted = {"p": {"p.a"}, "p.a": {"p", "p.b", "p.c", "p.d"}, "p.b": set(), "p.c": {"p.d"}, "p.d": {"p.e"}}
    assert graph == {**wanted, "p.e": {"p.b"}}
    assert find_cycle(graph) == ["p", "p.a", "p"]
    graph["p"] = set()
    assert find_cycle(graph) == []


IMPORT = """
import contextlib, io, json, sys, warnings
caught = io.StringIO()
with contextlib.redirect_stdout(caught), contextlib.redirect_stderr(caught):
    import MODULE
out = {"filters": [repr(f) for f in warnings.filters], "printed": caught.getvalue()}
out["modules"] = sorted({m.partition(".")[0] for m in sys.modules})
shown = io.StringIO()
with contextlib.redirect_stderr(shown):
    warnings.warn("`torch.jit.script` is deprecated, says the user", FutureWarning)
    warnings.warn("another thing is", FutureWarning)
out["shown"] = shown.getvalue()
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[dict[str, Any], dict[str, Any]]:
    """What an import of laplace-torch leaves, alone and after this package, in a process of its own each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "default")
        return run(IMPORT.replace("MODULE", "laplace"))[0], run(IMPORT.replace("MODULE", f"{PACKAGE}, laplace"))[0]


def test_import_prints_nothing(imported: tuple[dict[str, Any], dict[str, Any]]) -> None:
    host, ours = imported
    if Version(torch.__version__) >= Version("2.11"):  # some version before it does not warn yet
        assert "torch.jit.script" in host["printed"], "laplace-torch is silent by itself: the filter has no use"
    assert ours["printed"] == ""


def test_import_leaves_the_users_warnings_alone(imported: tuple[dict[str, Any], dict[str, Any]]) -> None:
    host, ours = imported
    assert ours["filters"] == host["filters"]
    assert "says the user" in ours["shown"]
    assert "another thing" in ours["shown"]


ALONE = """
import json, sys
before = set(sys.modules)
import contrastive_curvature
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)))
"""


def test_import_brings_nothing_until_a_name_is_used() -> None:
    """So that `--help` takes as long as click does; laplace-torch alone takes five seconds."""
    found, _ = run(ALONE)
    assert {name for name in found if not name.startswith("_")} == {PACKAGE, "lazy_loader"}


PARTS = """
import json, sys
import contrastive_curvature as cc, laplace
cc.OnlineLaplace
before = set(sys.modules)
cc.jobs, cc.pretrained, cc.load_pretrained, cc.FaissStore, cc.LanceStore
import contrastive_curvature.apps.cli, contrastive_curvature.apps.report, contrastive_curvature.io.serving
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before})))
"""


def test_parts_for_optional_packages_bring_none_of_them() -> None:
    """Ray, LanceDB, FAISS, ONNX, the hub's client, Jinja and the tools of the recipes wait until they are used."""
    found, printed = run(PARTS)
    assert set(found) <= {PACKAGE, "click", "pydantic", "safetensors"}
    assert printed == ""


def test_import_works_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error::FutureWarning")
    assert run(f"import {PACKAGE}; print(1)") == (1, "")
