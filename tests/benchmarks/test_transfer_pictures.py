"""The most and the least certain inputs: which rows, from which scores, and what a page shows of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.transfer import pictures
from contrastive_curvature.errors import InputError


def test_extremes_are_the_ends_of_the_order() -> None:
    score = np.random.default_rng(0).permutation(50).astype(np.float32)
    low, high = pictures.extremes(score, 4)
    assert score[low].tolist() == [0, 1, 2, 3]
    assert score[high].tolist() == [49, 48, 47, 46]
    low, high = pictures.extremes(score[:2], 4)
    assert sorted(low) == sorted(high) == [0, 1]


def test_scores_are_those_of_the_set(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    arrays = {
        f"kron_lowrank/{s}:{w}": np.full(3, n)
        for n, (s, w) in enumerate([(s, w) for s in pictures.SCORES for w in "ab"])
    }
    np.savez(tmp_path / "one" / "scores.npz", **arrays)
    found = pictures.read_scores(tmp_path, "one", "b")
    assert {name: value.tolist() for name, value in found.items()} == {"uncertainty": [1] * 3, "novelty": [3] * 3}
    with pytest.raises(InputError, match="--only other"):
        pictures.read_scores(tmp_path, "other", "a")


def test_a_plot_shows_every_image(tmp_path: Path) -> None:
    images = [np.full((4, 4, 3), shade, np.uint8) for shade in (0, 100, 200)]
    rows = [("first", images, ["a", "b", "c"]), ("second", images[:1], ["d"])]
    figure = pictures.draw_extremes(rows, "title")
    shown = [[axis.images[0].get_array()[0, 0, 0] for axis in figure.axes[k : k + 3] if axis.images] for k in (0, 3)]
    assert shown == [[0, 100, 200], [0]]
    assert [axis.get_title() for axis in figure.axes if axis.images] == ["a", "b", "c", "d"]
    figure.savefig(tmp_path / "plot.png")


def test_a_page_has_a_line_for_each_sentence() -> None:
    page = pictures.text_page([("lowest", ["one two", "three"], np.array([0.125, 2.5]))])
    assert "## lowest" in page
    assert "| 0.125 | one two |" in page
    assert "| 2.5 | three |" in page
