"""The build fails where a public name is missing from the reference.

Public is what stands in ``__all__`` of the package and of the packages in :data:`PUBLIC`. What the reference shows is
read from the inventory that mkdocstrings writes of the finished site.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

NAME = "contrastive_curvature"
SOURCE = Path(__file__).resolve().parent.parent.parent / NAME

PUBLIC = (
    "",
    "apps.report",
    "hedged",
    "hosts.backpack",
    "hosts.curvlinops",
    "hosts.stochman",
    "io.jobs",
    "io.pretrained",
    "io.serving",
    "laplace",
    "losses",
    "metrics",
    "online",
    "pairs",
    "testing",
    "triplet",
    "vmf",
)
"""Packages whose ``__all__`` users may rely on, as paths below the package."""

INTERNAL = (
    *("apps", "decisions", "embedding", "fit", "hessian", "hosts", "io", "network", "posterior", "retriever"),
    "structures",
)
"""Packages that may change without notice. What users need of them stands in the package itself."""

NOT_SHOWN = frozenset({f"{NAME}.__version__"})


def exported(init: Path) -> list[str]:
    """The literal ``__all__`` of a file, without importing it."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if (
            any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
            and node.value is not None
        ):
            return list(ast.literal_eval(node.value))
    msg = f"{init} has no __all__"
    raise ValueError(msg)


def file_of(package: str, source: Path) -> Path:
    """Return where a package or module says what is public."""
    if not package:
        return source / "__init__.pyi"
    folder = source.joinpath(*package.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def public_names(source: Path = SOURCE) -> list[str]:
    """Every public name with its full path, such as ``"contrastive_curvature.metrics.auroc"``, but packages."""
    return [
        ".".join(part for part in (NAME, package, name) if part)
        for package in PUBLIC
        for name in exported(file_of(package, source))
        if name not in {package.rpartition(".")[2] for package in PUBLIC}
    ]


def unclassified(source: Path = SOURCE) -> list[str]:
    """Packages that stand neither in :data:`PUBLIC` nor in :data:`INTERNAL`."""
    found = sorted(init.parent.name for init in source.glob("*/__init__.py"))
    return [name for name in found if name not in PUBLIC + INTERNAL]


def missing(names: Iterable[str], shown: Collection[str]) -> list[str]:
    """The names that the reference does not show; a function of its module's name may stand there with both."""

    def both(name: str) -> set[str]:
        return {name, f"{name}.{name.rpartition('.')[2]}"}

    return [name for name in names if not both(name) & set(shown) and name not in NOT_SHOWN]


def on_post_build(config: MkDocsConfig) -> None:
    """Compare the finished site with the package."""
    from mkdocs.exceptions import PluginError
    from mkdocstrings import Inventory

    if found := unclassified():
        msg = f"docs/hooks/public_names.py: neither in PUBLIC nor in INTERNAL: {', '.join(found)}"
        raise PluginError(msg)
    with (Path(config.site_dir) / "objects.inv").open("rb") as file:
        shown = Inventory.parse_sphinx(file)
    if absent := missing(public_names(), shown):
        msg = f"public, but not in docs/reference: {', '.join(absent)}"
        raise PluginError(msg)
