"""The gallery's scripts run, with little data; their executed notebooks are of these scripts, complete, and small."""

import re
import runpy
from pathlib import Path

import jupytext
import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from gallery_data import write_faces, write_queries
from markdown_pages import read_page

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "gallery"
SCRIPTS = sorted(script for script in GALLERY.glob("*.py") if script.name != "execute.py")
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


@scripts
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_runs(script, monkeypatch, capsys, tmp_path):
    write_queries(tmp_path / "clinc150" / "data_full.json.gz")
    write_faces(tmp_path / "faces.npz")
    monkeypatch.chdir(ROOT)
    for name, value in (("GALLERY_SMALL", "1"), ("DATA_ROOT", tmp_path), ("FEATURES_ROOT", tmp_path)):
        monkeypatch.setenv(name, str(value))
    try:
        with matplotlib.rc_context():
            runpy.run_path(str(script), run_name="__main__")
        drawn = [plt.figure(number) for number in plt.get_fignums()]
    finally:
        plt.close("all")
    assert len(drawn) >= 3
    named = [axis.get_xlabel() or axis.get_ylabel() for figure in drawn for axis in figure.axes if axis.lines]
    assert named
    assert all(named), "an axis with a curve has no label"
    assert "All numbers of this page are computed in it, on" in capsys.readouterr().out


@scripts
def test_notebook_is_of_the_script_and_complete(script):
    path = script.with_suffix(".ipynb")
    executed = nbformat.read(path, as_version=4)
    assert [cell.source for cell in executed.cells] == [cell.source for cell in jupytext.read(script).cells], (
        f"run: python docs/gallery/execute.py {script.stem}"
    )
    first = next(cell.source for cell in executed.cells if cell.cell_type == "code")
    assert not re.search(r"rcParams|plt\.style", first), "the page begins with its plotting"
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert re.search(r"computed in it, on: \S", printed), "no machine is named"
    assert path.stat().st_size <= 400_000


@scripts
def test_links_lead_to_pages_and_their_headings(script):
    for place, heading in re.findall(r"\]\(\.\./([\w/]+)\.html(?:#([\w-]+))?\)", script.read_text(encoding="utf-8")):
        page = read_page((ROOT / "docs" / f"{place}.md").read_text(encoding="utf-8"))
        assert not heading or heading in page.anchors, f"{place}.md#{heading}"


def test_every_page_is_listed_and_executed_by_the_script():
    names = {script.stem for script in SCRIPTS}
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"gallery/(\w+)\.ipynb", listed)) == names
    assert set(runpy.run_path(str(GALLERY / "execute.py"))["PAGES"]) == names
    assert len(names) == 5
