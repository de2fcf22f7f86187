"""What the build of the site adds to mkdocs: pages from outside docs, links to them, docstrings, the list of names."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from markdown_pages import ROOT
from tables import each

import contrastive_curvature


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, names, roles = hook("repository_pages"), hook("public_names"), hook("sphinx_roles")
formulas = hook("formulas")


@each(
    "page, link, wanted",
    [
        ("threshold.md", "../benchmarks/results/threshold.md", "benchmarks/results/threshold.md"),
        ("threshold.md", "../CHANGELOG.md", "changelog.md"),
        ("threshold.md", "theory.md#structures", "theory.md#structures"),
        ("recipes/faiss.md", "../vector_stores.md", "../vector_stores.md"),
        ("recipes/faiss.md", "../../CONTRIBUTING.md#style", "../contributing.md#style"),
        ("changelog.md", "docs/theory.md", "theory.md"),
        ("contributing.md", "CHANGELOG.md", "changelog.md"),
        ("benchmarks/results/threshold.md", "../../docs/results.md", "../../results.md"),
        ("benchmarks/results/threshold.md", "transfer.md", "transfer.md"),
        ("threshold.md", "https://example.org/README.md", "https://example.org/README.md"),
        ("threshold.md", "#the-statistic", "#the-statistic"),
    ],
)
def test_links_lead_to_the_copies_in_the_site(page, link, wanted):
    assert pages.rewrite(f"Read [this]({link}), please.", page) == f"Read [this]({wanted}), please."


def test_links_in_code_are_left_alone():
    fenced = "```\n[a](../CHANGELOG.md)\n```\n"
    assert pages.rewrite(f"{fenced}[b](../CHANGELOG.md)\n", "a.md") == f"{fenced}[b](changelog.md)\n"
    assert pages.rewrite("`[a](../LICENSE)` [`b`](../CHANGELOG.md)", "a.md") == "`[a](../LICENSE)` [`b`](changelog.md)"


def test_what_is_added_to_the_site_exists():
    for path in (*pages.PAGES, *pages.FILES, *pages.FOLDERS):
        assert (ROOT / path).exists(), path


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


def test_a_new_package_must_be_classified(tmp_path):
    for name in ("metrics", "novel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert names.unclassified(tmp_path) == ["novel"]


def test_a_name_that_the_reference_does_not_show_is_missing():
    shown = {"contrastive_curvature.ggn", "contrastive_curvature.io.serving.export.export"}
    wanted = ["contrastive_curvature.ggn", "contrastive_curvature.io.serving.export", "contrastive_curvature.new"]
    assert names.missing([*wanted, "contrastive_curvature.__version__"], shown) == ["contrastive_curvature.new"]


def test_a_package_without_all_is_refused(tmp_path):
    (tmp_path / "__init__.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="__all__"):
        names.exported(tmp_path / "__init__.py")


@pytest.mark.parametrize(
    ("docstring", "wanted"),
    [
        ("See :func:`choose_rank` and :data:`.MOST_RANK`.", "See `choose_rank` and `MOST_RANK`."),
        ("Raises :class:`~torch.nn.Linear`.", "Raises `Linear`."),
        (
            "A :class:`~contrastive_curvature.losses\n.RowLoss`.",
            'A <autoref optional identifier="contrastive_curvature.losses.RowLoss"><code>RowLoss</code></autoref>.',
        ),
        ("A test::\n\n    x = 1", "A test:\n\n    x = 1"),
    ],
)
def test_docstrings_become_markdown(docstring, wanted):
    assert roles.as_markdown(docstring) == wanted


def test_formulas_are_drawn_as_outlines_in_the_colour_of_the_text():
    markdown = roles.as_markdown("With:\n\n.. math::\n    a = \\tfrac12 \\Big( b\n      + c \\Big)\n\nwhere.")
    before, formula, after = markdown.split("\n\n")
    assert (before, after) == ("With:", "where.")
    assert formula.startswith('<div class="formula"><svg role="img" aria-label="a = \\frac{1}{2}')
    assert "\n" not in formula  # one block of HTML to Markdown
    assert formula.count("<use ") + formula.count("<rect ") >= 8  # a = 1 - 2 ( b + c )
    assert not any(colour in formula for colour in ("#000000", "black", "http"))


def test_a_formula_with_an_unknown_command_is_refused():
    with pytest.raises(ValueError, match="Unknown symbol"):
        roles.drawn(r"\nosuchcommand x")


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
