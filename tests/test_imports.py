"""What an import of the package does: folders form layers, nothing is printed, nothing extra comes."""

import ast
import importlib
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from fresh import ROOT, run

from contrastive_curvature.removed import REMOVED

PACKAGE = "contrastive_curvature"

FLOW = [
    *("pairs", "hessian", "network", "structures", "losses", "fit", "vmf", "metrics", "embedding", "posterior"),
    *("hosts", "laplace"),
]
"""Folders of the flow, in its order: each imports those before it alone, and none of those around it."""

PLAIN = {"artifact", "codec", "errors", "validate", "options", "progress", "removed", "waiting"}
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


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(ROOT, PACKAGE)


@pytest.fixture(scope="module")
def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Folder, or module of the top -> others that it imports."""

    def folder(module: str) -> str:
        return ([*module.split("."), ""])[1]

    found: dict[str, set[str]] = {folder(module): set() for module in graph}
    for module, others in graph.items():
        found[folder(module)] |= {folder(other) for other in others} - {folder(module), ""}
    assert len(found) > 10
    return found


def test_no_circle_of_folders(folders: dict[str, set[str]]) -> None:
    TopologicalSorter(folders).prepare()  # raises CycleError, which names the circle


def test_an_embedding_knows_no_posterior() -> None:
    """Not even for the type checker, or in a function."""
    for path in (ROOT / PACKAGE / "embedding").glob("*.py"):
        assert f"from {PACKAGE}.laplace" not in path.read_text(encoding="utf-8"), path.name


def test_folders_import_what_stands_before_them(folders: dict[str, set[str]]) -> None:
    for place, name in enumerate(FLOW):
        above = folders[name] - set(FLOW[:place]) - PLAIN
        assert not above, f"{name} imports {above}, which do not stand before it in the flow"


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_file_name_stands_for_one_thing() -> None:
    names = [path.name for path in (ROOT / PACKAGE).rglob("*.py") if path.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_no_function_below_the_facade_takes_it() -> None:
    """What a function needs of a posterior is the value, or the encoder that reads for it."""
    for folder in FLOW[: FLOW.index("laplace")]:
        for path in (ROOT / PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                assert not (isinstance(node, ast.arg) and node.arg == "la"), f"{path}:{node.lineno}"


HOST = {
    "registration.py": {"laplace.laplace", "laplace.laplace.Laplace"},
    "apps": {"laplace.Laplace"},
    "laplace": {
        "laplace",
        "laplace.baselaplace.ParametricLaplace",
        "laplace.curvature.curvature.GGNInterface",
        "laplace.utils.Kron",
        "laplace.utils.enums.LinkApprox",
        "laplace.utils.enums.PredType",
        "laplace.utils.matrix.KronDecomposed",
    },
}
"""What is taken from laplace-torch, and where: all but its own function in one folder."""

INHERITED = {"_H_factor", "_device", "_gridsearch", "log_det_prior_precision", "predictive"}
"""What a posterior has from laplace-torch and does not define itself, without what only its own prediction calls."""


def test_what_is_taken_from_laplace_torch() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"(from|import) laplace", text) else ():
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            place = path.relative_to(ROOT / PACKAGE).parts[0]
            found.setdefault(place, set()).update(name for name in names if name.split(".")[0] == "laplace")
    assert {place: names for place, names in found.items() if names} == HOST


def test_what_a_posterior_inherits_from_laplace_torch() -> None:
    from contrastive_curvature.laplace import ContrastiveLaplace

    kinds = [kind for kind in ContrastiveLaplace.__mro__ if kind.__module__.startswith("laplace.")]
    own = {name for kind in ContrastiveLaplace.__mro__ if kind not in kinds for name in dir(kind) if name in vars(kind)}
    theirs = {name for kind in kinds for name in vars(kind) if not name.startswith("__")} - own - {"_abc_impl"}
    of_their_prediction = {name for name in theirs if name.startswith(("_glm_", "_nn_"))}
    of_their_prediction |= {"_check_jacobians", "_curv_closure", "_init_H"}
    assert theirs - of_their_prediction == INHERITED


IMPORT = """
import contextlib, io, json, sys, warnings
caught, shown = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(caught), contextlib.redirect_stderr(caught):
    import contrastive_curvature as cc, laplace
    cc.OnlineLaplace
    before = set(sys.modules)
    cc.jobs, cc.pretrained, cc.load_pretrained
    import contrastive_curvature.apps.cli, contrastive_curvature.apps.report, contrastive_curvature.io.serving
with contextlib.redirect_stderr(shown):
    warnings.warn("`torch.jit.script` is deprecated, says the user", FutureWarning)
    warnings.warn("another thing is", FutureWarning)
brought = sorted({m.partition(".")[0] for m in set(sys.modules) - before})
print(json.dumps({"printed": caught.getvalue(), "shown": shown.getvalue(), "brought": brought}))
"""


def test_imports_print_nothing_leave_warnings_alone_and_bring_no_optional_package(monkeypatch) -> None:
    """Ray, FAISS, ONNX, Jinja and the tools of the recipes wait until they are used."""
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    found, _ = run(IMPORT)
    assert found["printed"] == ""
    assert "says the user" in found["shown"]
    assert "another thing" in found["shown"]
    pydantic = {"annotated_types", "pydantic", "pydantic_core", "typing_inspection"}
    # torch 2.6 itself brings filelock.
    assert set(found["brought"]) <= {PACKAGE, "safetensors", "filelock"} | pydantic


ALONE = """
import json, sys
before = set(sys.modules)
import contrastive_curvature
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)))
"""


def test_import_brings_nothing_until_a_name_is_used() -> None:
    """So that `--help` takes a tenth of a second; laplace-torch alone takes five."""
    found, _ = run(ALONE)
    assert {name for name in found if not name.startswith("_")} == {PACKAGE, "lazy_loader"}


WITHOUT_CURVLINOPS = """
import json, pathlib, sys, tempfile, types
import contrastive_curvature as cc
import torch

x, y = torch.randn(6, 3), torch.arange(6) % 2
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
cc.ggn(net, x, y, structure="diag")
for module in ("backpack", "stochman"):
    __import__(f"contrastive_curvature.hosts.{module}")
cc.output_hessian, cc.SupConLoss, cc.EmbeddingDistribution
out = {"asked for": "curvlinops" in sys.modules}
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "curvlinops").mkdir()
(folder / "curvlinops/__init__.py").write_text("newer = True")
sys.path.insert(0, str(folder))
for what, ask in {"laplace": lambda: __import__("laplace"), "posterior": lambda: cc.OnlineLaplace,
                  "operator": lambda: cc.ContrastiveGGNLinearOperator}.items():
    try:
        ask()
    except ImportError as error:
        out[what] = str(error)
sys.path.remove(str(folder))
for module in [name for name in sys.modules if name.startswith(("laplace", "curvlinops"))]:
    del sys.modules[module]
sys.modules["opt_einsum"] = None
try:
    import laplace
except ImportError as error:
    out["other"] = str(error)
print(json.dumps(out))
"""


def test_curvlinops_waits_until_it_is_asked_for_and_one_that_laplace_torch_cannot_import_is_named() -> None:
    found, _ = run(WITHOUT_CURVLINOPS)
    assert not found["asked for"]
    for what in ("laplace", "posterior"):
        assert re.match(r"laplace-torch [\d.]+ does not import with curvlinops-for-pytorch [\d.]+ \(", found[what])
        assert "Install an older curvlinops-for-pytorch" in found[what]
        assert "\n" not in found[what]
    assert "needs curvlinops 3" in found["operator"]
    # Another error of that import is the host's own.
    assert "does not import with" not in found["other"]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_says_what_to_use_instead(name: str) -> None:
    module, _, attribute = f"{PACKAGE}.{name}".rpartition(".")
    assert attribute not in importlib.import_module(module).__all__
    with pytest.raises(ImportError, match=re.escape(f"{PACKAGE}.{name} was removed after")) as refused:
        exec(f"from {module} import {attribute}")
    assert REMOVED[name] in str(refused.value)
    for page, anchor in re.findall(r"(docs/[\w/]+\.md)(?:#([\w-]+))?", REMOVED[name]):
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs
