"""``search``: neighbours as a matrix of cosines gives them."""

from pathlib import Path

import numpy as np
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
    run(*SEARCH, "-k", 3)
    rows = read("hits.csv")
    (queries, _), (gallery, labels) = embedded("new.npz"), embedded("train.npz")
    cosine, index = (queries.mu.double() @ gallery.mu.double().T).topk(3)
    # The command's products are in float32.
    np.testing.assert_allclose(column(rows, "cosine").reshape(-1, 3), cosine.numpy(), atol=1e-6)
    assert [row["neighbour"] for row in rows] == [str(each) for each in index.flatten().tolist()]
    assert [row["label"] for row in rows] == [str(each) for each in labels[index.flatten()].tolist()]
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 40
    assert [row["query"] for row in rows] == [f"new {k}" for k in range(40) for _ in range(3)]
    assert list(rows[0]) == ["query", "rank", "neighbour", "label", "cosine", "uncertainty"]
    np.testing.assert_allclose(column(rows[::3], "uncertainty"), queries.uncertainty.numpy(), rtol=1e-4)


def test_a_gallery_that_is_searched_for_itself(run: Run) -> None:
    found = np.load("train.npz")
    np.savez("some.npz", features=found["features"][50:80], labels=found["labels"][50:80])
    result = run("search", "posterior", "--gallery", "train.npz", "--out", "hits.csv", "--queries", "some.npz")
    assert "--queries some.npz: most of these inputs are in the gallery" in result.stderr
    assert "in the gallery" not in run(*SEARCH).stderr


def test_galleries_that_do_not_fit(run: Run) -> None:
    few = points(3, 8)
    np.savez("few.npz", **few)
    np.savez("one.npz", **{name: value[:1] for name, value in few.items()})
    search = ("search", "posterior", "--queries", "new.npz", "--out", "hits.csv", "--gallery")
    assert "3" in error_of(run(*search, "few.npz", "-k", 4, code=2))
    run(*search, "few.npz", "-k", 3)
    run(*search, "one.npz", "-k", 1)
    assert "--gallery" in error_of(run(*search[:-1], code=2))
