"""The wheel and the source archive: what is in them, and that an installed wheel works away from the checkout."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import checkout
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STEM = f"contrastive_curvature-{PROJECT['version']}"


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a program prints that runs in a folder outside the checkout, where only what is installed is found."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env = {**outside, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that is built from it, as ``make dist`` has it."""
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    assert {path.name for path in folder.iterdir()} == {f"{STEM}.tar.gz", f"{STEM}-py3-none-any.whl"}
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{STEM}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, which finds the packages that it needs in this one's folder."""
    if sys.platform == "win32":
        pytest.skip("the folders of an environment have other names")
    folder = tmp_path_factory.mktemp("fresh") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file are searched last, and .pth files there, such as that of an editable install, are not read.
    (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent), encoding="utf-8")
    return folder


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@checkout.needed
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(files_of(wheel))
    assert {name.partition("/")[0] for name in names} == {"contrastive_curvature", f"{STEM}.dist-info"}
    wanted = {path.relative_to(ROOT).as_posix() for path in checkout.files("contrastive_curvature")}
    assert {name for name in names if not name.startswith(STEM)} == wanted
    assert "contrastive_curvature/py.typed" in wanted
    assert any(name.endswith(".html") for name in wanted), "the template of the page"


def test_the_source_archive_can_be_tested_and_cited(dist: Path) -> None:
    with tarfile.open(dist / f"{STEM}.tar.gz") as archive:
        names = {name.removeprefix(f"{STEM}/") for name in archive.getnames()}
    wanted = {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "SECURITY.md", "pyproject.toml", "Makefile"}
    wanted |= {"CODE_OF_CONDUCT.md", ".pre-commit-config.yaml", ".github/workflows/ci.yml"}
    wanted |= {"constraints.txt", "constraints-oldest.txt", "tests/conftest.py", "benchmarks/__init__.py"}
    assert wanted <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "runs/", "dist/", "site/"))]


_LOOK = """
import importlib.metadata, json, runpy, sys
from importlib.resources import files
sys.argv = [sys.argv[1], "--version"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
import contrastive_curvature as cc
out = {"file": cc.__file__, "version": cc.__version__, "known": importlib.metadata.version("contrastive-curvature")}
out["files"] = sorted(path.name for path in files("contrastive_curvature").iterdir())
print(json.dumps(out))
"""


def test_an_installed_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    # The command runs in the process that looks around afterwards: one import of torch instead of two.
    command = installed / "bin" / "contrastive-curvature"
    assert os.access(command, os.X_OK)
    *printed, last = run([installed / "bin" / "python", "-c", _LOOK, command], tmp_path).splitlines()
    found = json.loads(last)
    assert PROJECT["version"] in "".join(printed)
    assert Path(found["file"]).is_relative_to(installed)
    assert found["version"] == found["known"] == PROJECT["version"]
    assert "py.typed" in found["files"]
