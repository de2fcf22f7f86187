"""``search``: neighbours as a matrix of cosines gives them, P(match) as the library learns it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import Run, error_of, points
from test_cli_score import column, read

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.saved import open_posterior

SEARCH = ("search", "posterior", "--gallery", "train.npz", "--queries", "new.npz", "--out", "hits.csv")


def embedded(name: str) -> tuple[cc.EmbeddingDistribution, torch.Tensor]:
    found = np.load(name)
    return open_posterior(Path("posterior"))[0](torch.from_numpy(found["features"])), torch.from_numpy(found["labels"])


def test_neighbours_are_those_of_all_cosines(run: Run) -> None:
    result = run(*SEARCH, "-k", 3)
    assert "--validation" in result.stderr
    rows = read("hits.csv")
    (queries, _), (gallery, labels) = embedded("new.npz"), embedded("train.npz")
    cosine, index = (queries.mu.double() @ gallery.mu.double().T).topk(3)
    # The command's products are in float32.
    np.testing.assert_allclose(column(rows, "cosine").reshape(-1, 3), cosine.numpy(), atol=1e-6)
    assert [row["neighbour"] for row in rows] == [str(each) for each in index.flatten().tolist()]
    assert [row["label"] for row in rows] == [str(each) for each in labels[index.flatten()].tolist()]
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 40
    assert [row["query"] for row in rows] == [f"new {k}" for k in range(40) for _ in range(3)]
    assert "match_probability" not in rows[0]


def test_probabilities_are_those_of_the_whole_gallery(run: Run) -> None:
    found = json.loads(run(*SEARCH, "-k", 2, "--validation", "validation.npz", "--json", "--batch-size", 16).stdout)
    rows = read("hits.csv")
    (queries, _), (gallery, labels) = embedded("new.npz"), embedded("train.npz")
    match = cc.MatchProbability().fit_retrieval(*embedded("validation.npz"), gallery, labels)
    right = match.nearest(queries, gallery).right.numpy()
    np.testing.assert_allclose(column(rows[::2], "match_probability"), right, rtol=1e-4)
    np.testing.assert_allclose(column(rows[::2], "no_match"), 1 - right, rtol=1e-4, atol=1e-6)
    assert {row["match_probability"] for row in rows[1::2]} == {""}
    assert found["more_likely_no_match"] == int((right < 0.5).sum()) > 0
    assert found["warnings"] == []


def test_in_very_many_dimensions_the_cosine_alone_decides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contrastive_curvature.apps.cli.search._AT_ONCE", 16)
    result = run(*SEARCH, "-k", 1, "--validation", "validation.npz")
    assert "the cosine alone" in result.stderr
    (queries, _), (gallery, labels) = embedded("new.npz"), embedded("train.npz")
    validation, theirs = embedded("validation.npz")
    match = cc.MatchProbability(use_uncertainty=False).fit_retrieval(validation.mu, theirs, gallery.mu, labels)
    right = match.nearest(queries.mu, gallery.mu).right.numpy()
    np.testing.assert_allclose(column(read("hits.csv"), "match_probability"), right, rtol=1e-4)


def test_a_saved_match_probability_is_used(run: Run) -> None:
    la, _ = open_posterior(Path("posterior"))
    gallery, labels = embedded("train.npz")
    match = cc.MatchProbability().fit_retrieval(*embedded("validation.npz"), gallery, labels)
    la.save_pretrained("posterior", overwrite=True, match=match)
    run(*SEARCH)
    right = match.nearest(embedded("new.npz")[0], gallery).right.numpy()
    np.testing.assert_allclose(column(read("hits.csv")[::5], "match_probability"), right, rtol=1e-4)


@pytest.mark.parametrize("at_once", [2**26, 16])
def test_a_gallery_that_is_searched_for_itself(run: Run, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("contrastive_curvature.apps.cli.search._AT_ONCE", at_once)
    found = np.load("train.npz")
    np.savez("some.npz", features=found["features"][50:80], labels=found["labels"][50:80])
    search = ("search", "posterior", "--gallery", "train.npz", "--out", "hits.csv", "--batch-size", 16)
    result = run(*search, "--queries", "some.npz", "--validation", "validation.npz")
    assert "--queries some.npz: most of these inputs are in the gallery" in result.stderr
    # An input that is its own neighbour is never wrong, and P(match) needs some that are.
    result = run(*search, "--queries", "new.npz", "--validation", "some.npz", code=2)
    assert "--validation some.npz: most of these inputs are in the gallery" in result.stderr
    assert "in the gallery" not in run(*SEARCH).stderr


def test_galleries_and_validations_that_do_not_fit(run: Run) -> None:
    few, found = points(3, 8), points(60, 7)
    np.savez("few.npz", **few)
    np.savez("one.npz", **{name: value[:1] for name, value in few.items()})
    np.savez("names.npz", features=found["features"], labels=np.array(list("abcde"))[found["labels"]])
    assert "numbers and texts" in error_of(run(*SEARCH, "--validation", "names.npz", code=2))
    search = ("search", "posterior", "--queries", "new.npz", "--out", "hits.csv", "--gallery")
    assert "3" in error_of(run(*search, "few.npz", "-k", 4, code=2))
    run(*search, "few.npz", "-k", 3)
    run(*search, "one.npz", "-k", 1)
    assert "two points" in error_of(run(*search, "one.npz", "-k", 1, "--validation", "validation.npz", code=2))
    assert "--gallery" in error_of(run(*search[:-1], code=2))
