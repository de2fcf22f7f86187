"""The README's picture shows what it says it shows."""

import sys

import pytest
import torch

from benchmarks import readme_picture


@pytest.fixture(scope="module")
def scored():
    return readme_picture.score(2)


def test_known_and_unknown_digits_are_apart(scored):
    known, unknown, wrong = scored
    assert set(known.labels.tolist()) == set(range(8))
    assert set(unknown.labels.tolist()) == {8, 9}
    assert len(known.images) == len(known.embedding)
    assert 0 <= wrong < 0.9  # two epochs are better than guessing one of eight


def test_the_picture_quotes_what_is_flagged(scored):
    known, unknown, _ = scored
    figure = readme_picture.draw(known, unknown)
    (axis,) = figure.subfigs[1].axes
    told = next(text.get_text() for text in axis.texts)
    for group in (known, unknown):
        assert f"{100 * float((group.embedding.p_value <= readme_picture.ALPHA).double().mean()):.0f} %" in told
    assert len(figure.subfigs[0].axes) == 2 * readme_picture._SHOWN
    shown = [axis.images[0].get_array() for axis in figure.subfigs[0].axes]
    least = known.images[known.embedding.uncertainty.argmax()]
    assert torch.equal(torch.as_tensor(shown[readme_picture._SHOWN].data), least)


def test_the_command_writes_the_picture(scored, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme_picture, "score", lambda _: scored)
    monkeypatch.setattr(sys, "argv", ["readme_picture", "--out", str(tmp_path / "new" / "digits.png")])
    readme_picture.main()
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert "AUROC of novelty" in capsys.readouterr().out
