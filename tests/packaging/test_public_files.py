"""What is public of the repository: workflows, citation, changelog, bounds of versions."""

import os
import re
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


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
    assert True in workflow, "YAML 1.1 reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert all(("uses" in step) != ("run" in step) for step in job["steps"]), name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
    called = called_targets(path.read_text(encoding="utf-8"))
    assert called
    assert called <= make_targets()


def test_ci_runs_the_versions_of_python_that_are_promised() -> None:
    matrix = read(WORKFLOWS[0])["jobs"]["newest"]["strategy"]["matrix"]
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"


def test_the_script_of_ci_is_a_newcomers_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    last = script.read_text(encoding="utf-8").rstrip().splitlines()[-1]
    assert last == "exec make test", "its last line of output is pytest's"


def test_the_citation_is_that_of_the_released_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert isinstance(citation["date-released"], date)
    assert all({"type", "title", "authors"} <= set(work) for work in citation["references"])


def bibtex(page: str) -> str:
    (block,) = re.findall(
        r"^```bibtex\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return str(block)


def test_the_bibtex_is_that_of_the_citation_file() -> None:
    citation = read(ROOT / "CITATION.cff")
    preferred, (paper,) = citation["preferred-citation"], citation["references"]
    assert {key: preferred[key] for key in ("title", "version", "authors")} == {
        key: citation[key] for key in ("title", "version", "authors")
    }
    assert preferred["year"] == citation["date-released"].year
    block = bibtex("README.md")
    assert block == bibtex("docs/index.md")
    ours, theirs = (dict(re.findall(r"^ +(\w+) += \{(.*)\}", entry, re.MULTILINE)) for entry in block.split("\n\n"))
    plain = {key: re.sub(r"[{}\\]", "", value) for key, value in ours.items()}
    assert plain["title"] == citation["title"]
    assert plain["author"] == citation["authors"][0]["name"]
    assert plain["year"] == str(preferred["year"])
    assert plain["note"].endswith(f"version {citation['version']}")
    assert theirs["title"] == paper["title"]
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert theirs["author"].replace(r"{\o}", "ø") == names
    assert theirs["year"] == str(paper["year"])
    assert f"{theirs['archivePrefix']}:{theirs['eprint']}" == paper["identifiers"][0]["value"]
    assert paper["url"] == PROJECT["urls"]["Paper"]
    addresses = {ours.get("url"), citation.get("repository-code"), PROJECT["urls"].get("Repository")}
    assert len(addresses) == 1, "the address of the repository stands in all three places, or in none"


def test_readme_and_site_open_with_the_same_sentence() -> None:
    """And with the same example of each door."""
    first, second = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md"))
    (sentence,) = re.findall(r"^# contrastive_curvature\n\n(\*\*.*?\*\*)$", first, re.MULTILINE | re.DOTALL)
    assert sentence in second
    (row,) = re.findall(r"^\| (`Laplace.*) \|$", first, re.MULTILINE)
    lines = re.findall("`([^`]+)`", row)
    assert len(lines) == 4
    assert [line for line in lines if line not in second] == []


def test_the_changelog_has_the_released_version_on_its_day() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    day = read(ROOT / "CITATION.cff")["date-released"]
    assert headings[:2] == ["[Unreleased]", f"[{PROJECT['version']}] - {day}"]
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Moved"}


EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


TOOLS = {"test", "docs"}


"""Extras of this project's own tools, which no user installs: their lower bounds are the newest tested versions."""


def pins(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "a line that is no pin"
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs), "a package stands twice"
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def makefile(name: str) -> set[str]:
    """The comma-separated value of a variable."""
    (value,) = re.findall(rf"^{name} := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return set(value.split(","))


def test_pre_commit_has_the_tested_versions() -> None:
    repos = [repo for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] if repo["repo"] != "local"]
    tested = pins("constraints.txt")
    assert {repo["hooks"][0]["id"].partition("-")[0]: Version(repo["rev"]) for repo in repos} == {
        name: tested[name] for name in ("ruff", "codespell")
    }


def test_the_group_dev_is_the_environment_of_make_test() -> None:
    (dev,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["dev"]
    assert Requirement(dev).name == PROJECT["name"]
    assert Requirement(dev).extras == makefile("ALL_EXTRAS")


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = [spec.version for spec in requirement.specifier if spec.operator == ">="]
    return Version(bound)


def oldest() -> list[str]:
    lists = [PROJECT["dependencies"], *(EXTRAS[extra] for extra in sorted(makefile("OLDEST_EXTRAS") - TOOLS))]
    return sorted({requirement for some in lists for requirement in some})


def test_the_run_with_the_oldest_versions_has_the_lower_bounds() -> None:
    tested = pins("constraints-oldest.txt")
    for requirement in map(Requirement, oldest()):
        assert tested[canonicalize_name(requirement.name)] == lower_bound(requirement), requirement


def test_the_newest_tested_versions_are_allowed() -> None:
    tested = pins("constraints.txt")
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(one for some in EXTRAS.values() for one in some)]):
        assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), requirement


def test_a_package_in_two_extras_has_one_bound() -> None:
    found: dict[str, set[str]] = {}
    for text in (one for some in EXTRAS.values() for one in some):
        requirement = Requirement(text)
        found.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    assert {name for name, bounds in found.items() if len(bounds) > 1} == set()
