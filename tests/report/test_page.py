"""The page: what comes from users is escaped, nothing is loaded, and what is missing is said."""

import html.parser
import json
import math
import re

import numpy as np
import pytest
from report_cases import fitted, inputs, loader

from contrastive_curvature.apps.report import Data, evaluate

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Read(html.parser.HTMLParser):
    """Tags and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def write(found, tmp_path, **options):
    found.to_html(tmp_path / "report.html", **options)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole():
    """An evaluation with every part, and the known test inputs."""
    x, labels = inputs(150, seed=3)
    return evaluate(fitted(), loader(x, labels), unknown=loader(inputs(40, 4, unknown=True)[0]), n_samples=5), x


def test_text_of_users_is_escaped(tmp_path):
    x, labels = inputs(30, seed=3)
    found = evaluate(
        fitted(),
        Data(loader(x, labels), items=[f"{i} {ATTACK}" for i in range(30)], ids=[f"id {ATTACK}"] * 30),
        class_names=[f"class {i} {ATTACK}" for i in range(4)],
        n_samples=2,
    )
    page = write(found, tmp_path, title=f"Title {ATTACK}")
    read = Read(page)
    assert len(read.of("script")) == 2
    assert not read.of("img")
    assert not [attributes for _, attributes in read.tags if any(name.startswith("on") for name in attributes)]
    texts = "".join(read.text)
    for start in ("Title ", "id ", "class 0 "):
        assert (start + ATTACK)[:70] in texts
    assert f"Title {ATTACK}" in texts


def test_nothing_is_loaded(tmp_path, whole):
    page = write(whole[0], tmp_path)
    read = Read(page)
    addresses = [a[name] for _, a in read.tags for name in ("src", "href") if name in a]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert "url(" not in page
    assert "@import" not in page
    policy = next(a["content"] for a in read.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    assert all(a["alt"] for a in read.of("img"))
    assert len(read.of("img")) == 4 * 12


def test_what_is_missing_is_said(tmp_path):
    found = evaluate(fitted(), [inputs(30, seed=3)[0]])
    page = write(found, tmp_path)
    text = " ".join("".join(Read(page).text).split())
    for reason in found.missing.values():
        assert reason in text
    assert text.count("Not shown.") == 4
    assert "no unknown inputs were given" in text
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert set(embedded) == {"thresholds", "slider"}


def test_numbers_of_the_page_are_those_of_the_evaluation(tmp_path, whole):
    la, (found, x) = fitted(), whole
    page = write(found, tmp_path)
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    for name, curve in json.loads(found.to_json())["curves"].items():
        assert embedded[name] == curve
    p_value = la(x).p_value.numpy()
    for step in embedded["slider"]:
        share = 100 * np.mean(p_value <= float(step["alpha"]))
        assert float(step["known"].removesuffix(" %")) == pytest.approx(share, abs=0.0501)
    for name in ("r_auroc", "ausc", "auroc", "auprc", "ece", "brier", "eer"):
        assert f">{found.metrics[name]:.3f}<" in re.sub(r"\s+", "", page)
    angle = math.degrees(float(la(x).uncertainty.max()))
    assert f"{angle:.2g}°" in page
