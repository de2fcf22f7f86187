"""The README's picture shows what it says it shows."""

import re
from pathlib import Path

import pytest
import torch
from laplace import Laplace
from PIL import Image

from benchmarks import readme_picture


@pytest.fixture
def scored() -> readme_picture.Scored:
    x, labels = torch.randn(600, 8), torch.arange(600) % 4
    x += 2 * torch.eye(8)[labels]
    la = Laplace(torch.nn.Linear(8, 3), "contrastive")
    la.fit([(x[:300], labels[:300])])
    la.optimize_prior_precision()
    la.calibrate([(torch.randn(200, 8) + 2 * torch.eye(8)[torch.arange(200) % 4], torch.zeros(200))])
    known, unknown = la(x[300:]), la(9 * torch.randn(100, 8))
    cosine, nearest = (known.mu @ la(x[:300]).mu.T).max(1)
    return readme_picture.Scored(labels[nearest] != labels[300:], known.uncertainty, 1 - cosine, known, unknown)


def test_errors_are_those_of_the_surest_questions():
    wrong, by = torch.tensor([True, False, True, False]), torch.tensor([0.9, 0.1, 0.5, 0.2])
    assert readme_picture.errors(wrong, by).tolist() == [0, 0, 1 / 3, 1 / 2]


def test_the_command_writes_the_picture_and_what_is_refused(scored, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(readme_picture, "score", lambda *_: scored)
    readme_picture.main(["--out", str(tmp_path / "new" / "sentences.png")])
    assert (tmp_path / "new" / "sentences.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    share = 100 * float((scored.unknown.p_value <= readme_picture.ALPHA).double().mean())
    assert f"alpha 0.05: refused {readme_picture.flagged(scored.known):.1f} %, unknown {share:.1f} %" in printed
    (text,) = readme_picture.draw(scored).axes[1].texts
    assert f"{share:.1f} %" in text.get_text()


def test_the_caption_has_the_figures_of_the_picture():
    root = Path(__file__).resolve().parents[2]
    (caption,) = re.findall(r"^\*Questions of CLINC150.*\*$", (root / "README.md").read_text("utf-8"), re.MULTILINE)
    figures = Image.open(root / "docs/images/sentences.png").text["Description"]
    said = re.findall(r"\d+\.\d %", caption)
    assert len(said) == 5
    assert [figure for figure in said if figure not in figures] == []
