"""Files that a public home of the project reads: workflows, forms for issues, the citation, the changelog."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE))


def called_targets(text: str) -> set[str]:
    """First words after ``make`` in commands: at the start of a line, or after ``run:``, ``&&`` or ``exec``."""
    return set(re.findall(r"(?:^|run:|&&|exec)\s*make ([a-z][a-z-]*)", text, re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows(path: Path) -> None:
    workflow = read(path)
    assert workflow["name"] == path.stem
    assert True in workflow, "YAML 1.1 reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] == "ubuntu-latest"
        assert job["timeout-minutes"] <= 60, name
        assert all(("uses" in step) != ("run" in step) for step in job["steps"]), name
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step), name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
    called = called_targets(path.read_text(encoding="utf-8"))
    assert called
    assert called <= make_targets()


def test_workflows_are_there() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert called_targets(WORKFLOWS[0].read_text(encoding="utf-8")) == {"test", "test-oldest", "docs"}


def test_ci_runs_the_versions_of_python_that_are_promised() -> None:
    (matrix,) = [job["strategy"]["matrix"] for job in read(WORKFLOWS[0])["jobs"].values() if "strategy" in job]
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"


def test_the_script_of_ci_is_a_newcomers_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    last = script.read_text(encoding="utf-8").rstrip().splitlines()[-1]
    assert last == "exec make test", "its last line of output is pytest's"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_for_issues(path: Path) -> None:
    form = read(path)
    assert set(form) == {"name", "description", "labels", "body"}
    questions = [item for item in form["body"] if item["type"] != "markdown"]
    ids = [item["id"] for item in questions]
    assert len(set(ids)) == len(ids) > 0
    assert {item["type"] for item in form["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert all(item["attributes"]["label"] for item in questions)


def test_the_three_forms_are_there() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "question"]


def test_the_citation_is_that_of_the_released_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    # What the Citation File Format 1.2.0 demands, and of what else it allows, that which is there.
    assert {"message", "title", "authors"} <= set(citation)
    allowed = {"cff-version", "type", "abstract", "version", "date-released", "license", "keywords", "references"}
    assert set(citation) <= allowed | {"message", "title", "authors", "preferred-citation"}
    assert citation["type"] == "software"
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert isinstance(citation["date-released"], date)
    for work in (citation, *citation["references"]):
        assert work["title"]
        assert all(set(author) <= {"name", "family-names", "given-names"} and author for author in work["authors"])
    assert all({"type", "title", "authors"} <= set(work) for work in citation["references"])


def test_the_changelog_has_the_released_version_on_its_day() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    day = read(ROOT / "CITATION.cff")["date-released"]
    assert headings[:2] == ["[Unreleased]", f"[{PROJECT['version']}] - {day}"]
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Moved"}


def test_policies_are_written_down() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.search(r"^## .*[Dd]eprecat", contributing, re.MULTILINE)
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for word in ("safetensors", "weights_only", "--encoder", "ONNX", "pickle", "How to report"):
        assert word in security
