"""The code of the recipes runs: the first block of a page, then those of a section, as a reader copies them.

What no extra of the package brings is skipped by name. To run all:
``pip install langchain-core llama-index-core haystack-ai``, in an environment of its own.
"""

import re
from pathlib import Path

import pytest
from page_code import run_blocks, sections

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "recipes").glob("*.md"))

pytestmark = [
    # What the tools themselves warn of at their import or at their first use; ours to show, not to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

RECIPES = [(page, title) for page in PAGES for title in sections(page) if title]


@pytest.mark.parametrize(("page", "title"), RECIPES, ids=[title for _, title in RECIPES])
def test_recipe_runs_and_prints_what_it_says(page, title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    first, blocks = sections(page)[""], sections(page)[title]
    for name in re.findall(r"^(?:from|import) (\w+)", "".join(code for _, code in first + blocks), re.MULTILINE):
        pytest.importorskip(name)
    run_blocks(page, first + blocks, capsys)
    for _, code in blocks:
        assert code.count("\n") < 40, "a recipe is short"
        assert "\nassert " in code, "a recipe checks what comes out"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"recipes/(\w+)\.md", (PAGES[0].parents[2] / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.stem for page in PAGES]
    assert len(RECIPES) >= 14


def test_the_image_recipe_reads_a_file_as_a_person_sees_it(tmp_path, monkeypatch):
    np, image_of = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    (page,) = (page for page in PAGES if page.stem == "files")
    found, namespace = sections(page), {}
    for _, code in found[""] + found["A folder of images"][:1]:
        exec(code, namespace)
    grey = np.arange(30, dtype=np.uint8).reshape(5, 6) * 8
    colour = np.stack([grey, grey[::-1], grey // 2], axis=2)
    of_grey, turned = np.dstack([grey] * 3), image_of.Exif()
    turned[0x112] = 6
    alpha = np.where(grey > 100, 255, 0).astype(np.uint8)
    on_white = np.where(alpha[:, :, None] > 0, colour, 255)
    palette = image_of.fromarray(grey).convert("P")
    half = np.dstack([np.full((5, 6, 3), 100, np.uint8), np.full((5, 6), 51, np.uint8)])
    for name, image, options, wanted in [
        ("plain.png", colour, {}, colour),
        ("turned.png", colour, {"exif": turned}, np.rot90(colour, -1)),
        ("turned.tif", colour, {"exif": turned}, np.rot90(colour, -1)),
        ("deep.png", grey.astype(np.uint16) * 257, {}, of_grey),
        ("deep.tif", grey.astype(np.uint16) * 257, {}, of_grey),
        ("deep_turned.png", grey.astype(np.uint16) * 257, {"exif": turned}, np.rot90(of_grey, -1)),
        ("whole.tif", grey.astype(np.int32) * 257, {}, of_grey),
        ("fractions.tif", (grey / 255).astype(np.float32), {}, of_grey),
        ("floats.tif", grey.astype(np.float32), {}, of_grey),
        ("clear.png", np.dstack([colour, alpha]), {}, on_white),
        ("half.png", half, {}, np.full((5, 6, 3), 224)),
        ("grey_clear.png", image_of.fromarray(np.dstack([colour, alpha])).convert("LA"), {}, None),
        ("palette.png", palette, {}, of_grey),
        ("hole.png", palette, {"transparency": 0}, np.where(of_grey, of_grey, 255)),
        ("one_bit.png", image_of.fromarray(grey > 100), {}, np.where(of_grey > 100, 255, 0)),
        ("print.jpg", image_of.fromarray(colour).convert("CMYK"), {"quality": 100}, None),
    ]:
        (image if hasattr(image, "save") else image_of.fromarray(image)).save(name, **options)
        seen = namespace["as_seen"](name)
        assert seen.mode == "RGB", name
        if wanted is not None:
            assert np.array_equal(np.asarray(seen), wanted), name
    assert np.abs(np.asarray(namespace["as_seen"]("print.jpg")).astype(int) - colour).max() <= 4
    assert (np.asarray(namespace["as_seen"]("grey_clear.png"))[alpha == 0] == 255).all()
    for content in (b"no picture", Path("plain.png").read_bytes()[:50]):
        Path("broken.png").write_bytes(content)
        with pytest.raises(OSError, match=r"identify|truncated|broken"):
            namespace["as_seen"]("broken.png")
