"""Bounds of versions: the lower ones are those of the run with the oldest, the newest tested set is allowed."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
