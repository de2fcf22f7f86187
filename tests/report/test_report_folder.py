"""The folder of a report: never among other files, and never the files of two evaluations."""

import os
import sys

import pytest
from report_cases import fitted, inputs, loader
from tables import each

from contrastive_curvature.apps.report import evaluate, plots
from contrastive_curvature.errors import InputError, UnsupportedError

DRAW = plots.draw
CHARTS = {f"{name}.{kind}" for name in ("novelty", "sparsification", "reliability", "det") for kind in ("png", "svg")}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def quick_plots(monkeypatch):
    """Files without charts in them, which would take seconds to draw."""

    def draw(evaluation):
        text = str(evaluation.counts | {"n": len(evaluation.metrics)}).encode()
        return {name: text for name in CHARTS if "errors" not in evaluation.missing or name.startswith("novelty.")}

    monkeypatch.setattr(plots, "draw", draw)


@pytest.fixture(scope="module")
def evaluations():
    """With all plots; without labels, and thus with one plot."""
    test = loader(*inputs(12, seed=3))
    return evaluate(fitted(), test, n_samples=2), evaluate(fitted(), [inputs(12, seed=3)[0]], n_samples=0)


def test_plots_of_an_earlier_evaluation_go(tmp_path, evaluations):
    first, second = evaluations
    first.save(tmp_path / "report")
    (tmp_path / "report" / ".hidden").write_text("kept")
    second.save(tmp_path / "report")
    second.save(tmp_path / "new")
    assert CHARTS - set(contents(tmp_path / "new"))
    assert contents(tmp_path / "report") == {**contents(tmp_path / "new"), ".hidden": b"kept"}


@pytest.mark.parametrize("name", ["metrics.json", "novelty.svg", "report.html"])
def test_without_a_page_what_a_killed_process_leaves_is_no_report(tmp_path, evaluations, monkeypatch, name):
    first, second = evaluations
    second.save(tmp_path / "report")
    first.save(tmp_path / "new")
    real = os.replace

    def killed(source, target):
        if os.path.dirname(target) == str(tmp_path / "report") and os.path.basename(target) == name:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        first.save(tmp_path / "report")
    assert "report.html" not in contents(tmp_path / "report")
    monkeypatch.setattr(os, "replace", real)
    first.save(tmp_path / "report")
    assert contents(tmp_path / "report") == contents(tmp_path / "new")


def test_a_folder_with_other_files_is_refused(tmp_path, evaluations):
    evaluations[1].save(tmp_path / "report")
    (tmp_path / "report" / "cat.png").write_text("mine")
    names = sorted(os.listdir(tmp_path / "report"))
    with pytest.raises(InputError, match=r"cat\.png"):
        evaluations[0].save(tmp_path / "report")
    assert sorted(os.listdir(tmp_path / "report")) == names


@each("package", ["PIL", "matplotlib"])
def test_a_missing_package_is_named_and_nothing_is_written(tmp_path, monkeypatch, evaluations, package):
    monkeypatch.setattr(plots, "draw", DRAW)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, package, None)
        with pytest.raises(UnsupportedError, match=rf"the package {package}.*pip install '\.\[report\]'"):
            evaluations[0].save(tmp_path / package)
    assert not (tmp_path / package).exists()
