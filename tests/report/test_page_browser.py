"""The page in a real browser: small and large, light and dark, by keyboard, without a network."""

import shutil

import pytest
from report_cases import fitted, inputs, loader

from contrastive_curvature.apps.report import Data, evaluate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome"),
    # Playwright's own event loop, which its subprocess transport closes after the loop.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page with everything, one with texts and long words, and one with almost nothing."""
    folder = tmp_path_factory.mktemp("pages")
    x, labels = inputs(150, seed=3)
    other = inputs(90, seed=4, unknown=True)[0]
    la = fitted()
    found = evaluate(la, loader(x, labels), unknown=loader(other), n_samples=5)
    found.to_html(folder / "all.html")
    texts = Data(loader(x, labels), items=[f"{LONG} {i}" for i in range(150)], ids=[f"{LONG}{i}" for i in range(150)])
    evaluate(la, texts, class_names=[LONG] * 4, n_samples=2).to_html(folder / "texts.html", title=LONG)
    evaluate(la, [x[:5]]).to_html(folder / "little.html")
    return folder, found, (la(x), la(other))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, file, width, height, scheme="light"):
    """The page, and all that went wrong in it so far."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    troubles = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith("data:") or request.url == file.as_uri() else troubles.append(request.url)
        ),
    )
    page.goto(file.as_uri())
    until(page, "[...document.querySelectorAll('[data-chart]')].every((box) => box.querySelector('svg'))")
    return page, troubles


def until(page, condition):
    """Wait for a condition. Playwright's own wait is code in a string, which the page's security policy forbids."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(condition)


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [
        ("all", 1600, 900, "light"),
        ("all", 375, 800, "dark"),
        ("texts", 375, 800, "dark"),
        ("little", 375, 800, "light"),
    ],
)
def test_fits_the_screen_and_can_be_read(browser, pages, name, width, height, scheme):
    page, troubles = opened(browser, pages[0] / f"{name}.html", width, height, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = (
        "(w) => [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > w + 1).length"
    )
    assert page.evaluate(cut, width) == 0
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
    page.close()
    assert not troubles


def test_keyboard_moves_the_threshold(browser, pages):
    folder, found, (known, unknown) = pages
    page, troubles = opened(browser, folder / "all.html", 1440, 900)
    slider = page.get_by_label("Threshold alpha")
    slider.focus()
    seen = set()
    for key in ("Home", "ArrowRight", "ArrowUp", "PageUp", "ArrowLeft", "End"):
        page.keyboard.press(key)
        step = found.thresholds.steps[int(slider.input_value())]
        alpha = float(page.locator("#alpha-value").inner_text())
        assert alpha == step.alpha
        for place, embedding in (("#known-flagged", known), ("#unknown-found", unknown)):
            share = 100 * float((embedding.p_value <= alpha).double().mean())
            shown = page.locator(place).inner_text()
            assert float(shown.removesuffix(" %")) == pytest.approx(share, abs=0.0501)
            assert shown in slider.get_attribute("aria-valuetext")
        assert float(page.locator("#one-in").inner_text()) == round(1 / alpha)
        seen.add((alpha, page.locator("svg .threshold").get_attribute("x1")))
    assert len({alpha for alpha, _ in seen}) >= 5
    # Neighbouring thresholds may flag the same inputs.
    assert len({place for _, place in seen}) >= 3
    assert alpha == 0.5
    page.close()
    assert not troubles


def test_numbers_without_javascript(browser, pages):
    folder, found, _ = pages
    context = browser.new_context(java_script_enabled=False, viewport={"width": 375, "height": 800})
    page = context.new_page()
    page.goto((folder / "all.html").as_uri())
    text = page.locator("main").inner_text()
    assert "need JavaScript" in text
    assert f"{found.metrics['auroc']:.3f}" in text
    context.close()
