"""What the build of the site adds to mkdocs: pages from outside docs, links to them, docstrings, the list of names."""

import importlib.util
from types import ModuleType

from markdown_pages import ROOT
from tables import each

import contrastive_curvature


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, names, roles = hook("repository_pages"), hook("public_names"), hook("sphinx_roles")
formulas = hook("formulas")


@each(
    "page, link, wanted",
    [
        ("threshold.md", "../benchmarks/results/threshold.md", "benchmarks/results/threshold.md"),
        ("threshold.md", "theory.md#structures", "theory.md#structures"),
        ("recipes/indexes.md", "../../CONTRIBUTING.md#style", "../contributing.md#style"),
        ("changelog.md", "docs/theory.md", "theory.md"),
        ("benchmarks/results/threshold.md", "../../docs/results.md", "../../results.md"),
        ("benchmarks/results/threshold.md", "transfer.md", "transfer.md"),
        ("threshold.md", "https://example.org/README.md", "https://example.org/README.md"),
    ],
)
def test_links_lead_to_the_copies_in_the_site(page, link, wanted):
    fenced = "```\n[a](../CHANGELOG.md)\n```\n"
    assert pages.rewrite(fenced, page) == fenced
    assert pages.rewrite(f"Read [this]({link}), please.", page) == f"Read [this]({wanted}), please."


def test_public_names_are_those_of_the_imported_packages():
    wanted, packages = set(), {path.rpartition(".")[2] for path in names.PUBLIC}
    for path in names.PUBLIC:
        package = importlib.import_module(f"contrastive_curvature.{path}" if path else "contrastive_curvature")
        wanted |= {f"{package.__name__}.{name}" for name in package.__all__ if name not in packages}
        assert all(hasattr(package, name) for name in package.__all__)
    assert set(names.public_names()) == wanted
    assert f"contrastive_curvature.{contrastive_curvature.ContrastiveLoss.__name__}" in wanted


def test_every_package_is_public_or_internal():
    assert names.unclassified() == []
    assert not set(names.PUBLIC) & set(names.INTERNAL)


def test_formulas_are_drawn_by_the_browser_and_dollars_in_code_are_left_alone():
    import markdown

    text = "The curvature $J_i^\\top H_{ij} J_j$, `$HOME` and $5.\n\n$$\na < \\frac{1}{n}\n$$\n"
    marked = markdown.markdown(
        text, extensions=["pymdownx.arithmatex"], extension_configs={"pymdownx.arithmatex": {"generic": True}}
    )
    page = formulas.with_mathml(marked)
    assert page.count("<math") == 2
    assert 'display="block"' in page
    assert "<mfrac>" in page
    assert "arithmatex" not in page
    assert "<code>$HOME</code> and $5." in page


def test_names_in_tables_break_between_words():
    page = "<p><code>cc.a_b</code></p><table><td>a.b <code>{}</code></td></table>".format
    for marked in (
        "cc.<wbr>RetrievalThreshold",
        "1.5",
        ".p_<wbr>value",
        "f(<wbr>x)[<wbr>k]/<wbr>d=<wbr>e",
        "x &lt;= b",
    ):
        assert hook("table_names").with_breaks(page(marked.replace("<wbr>", ""))) == page(marked)
