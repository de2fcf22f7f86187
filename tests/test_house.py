"""What the project says about itself holds: docstrings, versions, the README's code, the changelog."""

import ast
import re
import shutil
from pathlib import Path
from typing import NamedTuple
from unittest.mock import create_autospec

import checkout
import mutants
import pytest
from page_code import run_blocks

ROOT = Path(__file__).resolve().parent.parent


class Section(NamedTuple):
    """The Python blocks under one second-level heading of a page, each with the number of lines above it."""

    title: str
    blocks: list[tuple[int, str]]


def python_sections(page: str) -> list[Section]:
    """Collect the fenced ``python`` blocks of a Markdown page; sections without any are left out."""
    sections = [Section("top", [])]
    fence, block, start = None, [], 0
    for number, line in enumerate(page.splitlines(), start=1):
        if fence is None and (opening := re.match(r"\s*(`{3,}|~{3,})\s*(\w*)", line)):
            fence, language, block, start = opening[1], opening[2], [], number
        elif fence is not None and line.strip() == fence:
            if language == "python":
                sections[-1].blocks.append((start, "\n".join(block)))
            fence = None
        elif fence is not None:
            block.append(line)
        elif heading := re.match(r"##\s+(.*)", line):
            sections.append(Section(heading[1], []))
    return [section for section in sections if section.blocks]


def documented_sections() -> list[tuple[Path, Section]]:
    readme = ROOT / "README.md"
    pages = [readme, *sorted((ROOT / "docs").glob("*.md"))]
    pages.remove(ROOT / "docs" / "research.md")  # tests/docs/test_research.py runs it as a whole
    found = [(page, section) for page in pages for section in python_sections(page.read_text(encoding="utf-8"))]
    if not any(page == readme for page, _ in found):
        found.append((readme, Section("no block", [])))  # a case that fails, where an empty list would only be skipped
    return found


def test_public_names_have_docstrings():
    import contrastive_curvature as package

    assert package.__doc__
    assert len(set(package.__all__)) == len(package.__all__), "a name stands twice in __all__"
    bare = []
    for name in package.__all__:
        value = getattr(package, name)
        doc = (value.__doc__ or "").strip()
        generated = isinstance(value, type) and doc.startswith(f"{name}(")  # a dataclass or named tuple without its own
        if name != "__version__" and (not doc or generated):
            bare.append(name)
    assert not bare, f"without a docstring: {bare}"


def play_the_hub(monkeypatch, place):
    """Put a folder in the place of the Hugging Face hub; calls need the arguments of the true functions."""
    hub = pytest.importorskip("huggingface_hub")

    def create_repo(repo_id, **_):
        (place / repo_id).mkdir(parents=True)

    def upload_folder(*, repo_id, folder_path, **_):
        for path in folder_path.iterdir():
            shutil.copy(path, place / repo_id / path.name)

    def snapshot_download(repo_id, *, allow_patterns, **_):
        found = place / "cache"
        found.mkdir()
        for path in (place / repo_id).glob(allow_patterns):
            shutil.copy(path, found)
        return str(found)

    for fake in (create_repo, upload_folder, snapshot_download):
        true = getattr(hub, fake.__name__)
        monkeypatch.setattr(hub, fake.__name__, create_autospec(true, side_effect=fake))


@pytest.mark.parametrize(
    ("page", "section"),
    [pytest.param(*found, id=f"{found[0].name}: {found[1].title}") for found in documented_sections()],
)
def test_documented_code_runs_and_prints_what_the_page_says(page, section, tmp_path, monkeypatch, capsys):
    assert section.blocks, f"{page.name} has no ```python block"
    if any("import onnxruntime" in code for _, code in section.blocks):
        pytest.importorskip("onnxruntime")  # it needs a later torch than the oldest
    if any("huggingface_hub import" in code for _, code in section.blocks):
        play_the_hub(monkeypatch, tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    run_blocks(page, section.blocks, capsys)


def test_pages_import_this_package_before_laplace():
    """Its finder hides a FutureWarning of torch at the import of laplace; before, ``-W error`` fails at that import."""
    found = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            code = "".join(re.findall(r"^```py.*?^```$", section, re.MULTILINE | re.DOTALL))
            imports = re.findall(r"^(?:from|import) (laplace|contrastive_curvature)\b", code, re.MULTILINE)
            found += "laplace" in imports
            assert imports[:1] != ["laplace"], f"{page.name}: {section.splitlines()[0]}"
    assert found > 15


MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def makes_on_the_default_device(node: ast.AST) -> bool:
    """Whether it calls a function of torch that makes a tensor, without ``device`` and without ``**options``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    )


def test_every_tensor_is_made_on_a_device_that_has_a_name():
    paths = sorted((ROOT / "contrastive_curvature").rglob("*.py"))
    calls = [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    assert [f"{path}:{node.lineno}" for path, node in calls if makes_on_the_default_device(node)] == []
    assert len(paths) > 100
    assert makes_on_the_default_device(ast.parse("torch.ones(3)", mode="eval").body)


@checkout.needed
def test_no_message_or_page_sends_anybody_to_a_package_index_for_this_library():
    """Nobody owns its name there, so that anybody could claim it."""
    paths = [*ROOT.glob("*.md"), *checkout.files("contrastive_curvature", "docs", "benchmarks")]
    offer = re.compile(rb"install[^\n]*contrastive[-_]curvature|pypi\.org/project/[{ ]*(?:contrastive|library)")
    found = {path: offers for path in paths if (offers := offer.findall(path.read_bytes()))}
    assert found == {}
    assert len(paths) > 200


def test_claims_of_robustness_name_tests_that_exist():
    page = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    table = page.partition("| promise | test |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = table.splitlines()
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", row.rsplit("|", 2)[1])
        assert named, f"no test: {row}"
        for file, name in named:
            (path,) = (ROOT / "tests").rglob(file)
            code = path.read_text(encoding="utf-8")
            assert not name or f"def {name}(" in code, f"{file} has no {name}"


def test_every_mutant_has_its_place_and_its_tests() -> None:
    for mutant in mutants.MUTANTS:
        code = (ROOT / mutants.PACKAGE / mutant.file).read_text(encoding="utf-8")
        assert code.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} has other code now"
        missing = [name for name in mutant.targets.split() if not (ROOT / "tests" / name.partition("::")[0]).exists()]
        assert not missing, f"{mutant.name}: no {missing}"
