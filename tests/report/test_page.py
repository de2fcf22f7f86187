"""The page: what comes from users is escaped, nothing is loaded, and what is missing is said."""

import html.parser
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from report_cases import fitted, inputs, loader

from contrastive_curvature.apps.report import Data, evaluate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError

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


def test_nothing_is_loaded(tmp_path):
    x, labels = inputs(60, seed=3)
    page = write(evaluate(fitted(), loader(x, labels), unknown=loader(inputs(40, 4, unknown=True)[0])), tmp_path)
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


def test_large_data_gives_a_small_page(tmp_path):
    x, labels = inputs(4000, seed=3)
    pictures = torch.rand(4000, 3, 64, 64, generator=torch.Generator().manual_seed(0)).unbind()
    found = evaluate(fitted(), Data(loader(x, labels, 500), items=pictures), n_samples=3)
    size = len(write(found, tmp_path))
    assert size < 300_000
    assert len(found.to_json()) < 60_000


def test_what_is_missing_is_said(tmp_path):
    found = evaluate(fitted(), [inputs(30, seed=3)[0]])
    page = write(found, tmp_path)
    text = " ".join("".join(Read(page).text).split())
    for reason in found.missing.values():
        assert reason in text
    assert text.count("Not shown.") == 3
    assert "no unknown inputs were given" in text
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert set(embedded) == {"thresholds", "slider"}


def test_texts_are_shown_and_cut(tmp_path):
    x, labels = inputs(12, seed=3)
    texts = [f"sentence number {i}, " + "and so on " * 60 for i in range(12)]
    text = "".join(Read(write(evaluate(fitted(), Data(loader(x, labels), items=texts), n_samples=0), tmp_path)).text)
    shown = re.findall(r"sentence number \d+, [^…]*…", text)
    assert {int(re.search(r"\d+", each)[0]) for each in shown} == set(range(12))
    assert all(230 < len(each) <= 240 for each in shown)


def test_no_inputs_are_shown_where_none_are_wanted(tmp_path):
    found = evaluate(fitted(), loader(*inputs(12, seed=3)), n_shown=0, n_samples=0)
    assert found.groups == ()
    read = Read(write(found, tmp_path))
    assert not read.of("img")
    assert "#inputs" not in [a.get("href") for a in read.of("a")]


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    found = evaluate(fitted(), loader(*inputs(12, seed=3)), n_samples=2)
    files = found.save(tmp_path / "new" / "report")
    plots = {f"{name}.{kind}" for name in ("novelty", "sparsification", "reliability") for kind in ("png", "svg")}
    assert {path.name for path in (tmp_path / "new" / "report").iterdir()} == {"report.html", "metrics.json", *plots}
    assert set(files) == {"report.html", "metrics.json", *plots}
    assert json.loads(files["metrics.json"].read_text())["metrics"] == found.metrics
    before = {name: path.read_bytes() for name, path in files.items()}
    found.save(tmp_path / "new" / "report")
    assert {name: path.read_bytes() for name, path in files.items()} == before

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("contrastive_curvature.apps.report.folder.write_whole", full)
    monkeypatch.setattr("contrastive_curvature.apps.report.plots.draw", lambda _: {})
    with pytest.raises(OSError, match="No space"):
        found.save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    with pytest.raises(InputError, match="folder"):
        found.save(files["metrics.json"])
    with pytest.raises(InputTypeError, match="title"):
        found.to_html(tmp_path / "a.html", title=3)


@pytest.mark.parametrize("package", ["matplotlib", "PIL"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    found = evaluate(fitted(), loader(*inputs(12, seed=3)), n_samples=0)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnsupportedError, match=rf"the package {package}.*pip install 'contrastive-curvature\[report\]'"
    ):
        found.save(tmp_path / "report")
    assert not list(tmp_path.iterdir())


def test_half_characters_and_numbers_as_names(tmp_path):
    x, labels = inputs(12, seed=3)
    odd = Data(loader(x, labels), items=["a\ud800b\x00"] * 12, ids=torch.arange(500, 512))
    page = write(evaluate(fitted(), odd, n_samples=0), tmp_path)
    assert "a?b" in page
    assert ">505<" in page


def test_missing_parts_have_no_plot(tmp_path):
    files = evaluate(fitted(), [inputs(12, seed=3)[0]]).save(tmp_path / "report")
    assert set(files) == {"report.html", "metrics.json", "novelty.png", "novelty.svg"}


def test_numbers_of_the_page_are_those_of_the_evaluation(tmp_path):
    x, labels = inputs(150, seed=3)
    la = fitted()
    found = evaluate(la, loader(x, labels), unknown=loader(inputs(40, 4, unknown=True)[0]), n_samples=5)
    page = write(found, tmp_path)
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    for name, curve in json.loads(found.to_json())["curves"].items():
        assert embedded[name] == curve
    p_value = la(x).p_value.numpy()
    for step in embedded["slider"]:
        share = 100 * np.mean(p_value <= float(step["alpha"]))
        assert float(step["known"].removesuffix(" %")) == pytest.approx(share, abs=0.0501)
    for name in ("r_auroc", "ausc", "auroc", "auprc", "ece", "brier"):
        assert f">{found.metrics[name]:.3f}<" in re.sub(r"\s+", "", page)
    angle = math.degrees(float(la(x).uncertainty.max()))
    assert f"{angle:.2g}°" in page
