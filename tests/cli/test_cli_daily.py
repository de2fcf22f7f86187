"""``update``, ``export`` and ``features``: what the library does, by name and in files."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import BIAS, WEIGHT, Run, encoder_file, error_of, points
from laplace import Laplace
from test_cli_fit import batches, layer
from test_cli_score import read

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.io.serving.numpy_scorer import Scorer

UPDATE = ("update", "posterior", "new.npz", "--out", "newer")


def test_an_update_is_that_of_the_library(run: Run) -> None:
    result = json.loads(run(*UPDATE, "--calibrate", "validation.npz", "--prior-strength", 0.1, "--json").stdout)
    assert (result["added"], result["inputs"], result["calibration_inputs"]) == (40, 340, 150)
    wanted, _ = open_posterior(Path("posterior"))
    with pytest.warns(UserWarning, match="this posterior was loaded"):
        wanted.update(batches("new.npz"))
    wanted.optimize_prior_precision(strength=0.1)
    wanted.calibrate(batches("validation.npz"))
    found, _ = open_posterior(Path("newer"))
    x = torch.from_numpy(points(30, 9)["features"])
    for name in ("mu", "uncertainty", "p_value"):
        torch.testing.assert_close(getattr(found(x), name), getattr(wanted(x), name), rtol=1e-4, atol=1e-6)
    run("calibrate", "posterior", "validation.npz", "--score", "uncertainty", "--by-class", "--out", "other")
    run("update", "other", "new.npz", "--out", "newest", "--calibrate", "validation.npz")
    assert str(open_posterior(Path("newest"))[0].known.calibration.score) == "uncertainty by class"
    assert "--overwrite" in error_of(run(*UPDATE[:-1], "posterior", code=2))
    assert "no calibration data" in run(*UPDATE[:-1], "posterior", "--overwrite").stderr
    assert open_posterior(Path("posterior"))[0].n_data == 340


def test_classes_of_an_update_are_those_of_the_fit_by_name(run: Run) -> None:
    names, found, more = np.array(["ant", "bee", "cat", "dog", "elk", "fox"]), points(300, 2), points(60, 5)
    # The names that an update brings have other places in the alphabet of their own.
    late = more["labels"] >= 2
    more = {name: value[late] for name, value in more.items()}
    np.savez("named.npz", features=found["features"], labels=names[found["labels"]], weight=WEIGHT, bias=BIAS)
    np.savez("more.npz", features=more["features"], labels=names[more["labels"] + 1])
    run("fit", "named.npz", "--out", "p", "--quiet")
    assert not any(name.encode() in encoder_file("p").read_bytes() for name in ("elk", "cat"))
    run("update", "p", "more.npz", "--out", "p", "--overwrite", "--quiet")
    centres = open_posterior(Path("p"))[0].class_centres
    wanted = Laplace(layer(), "contrastive")
    for part in (found, {"features": more["features"], "labels": more["labels"] + 1}):
        wanted.fit([(torch.from_numpy(part["features"]), torch.from_numpy(part["labels"]))], override=part is found)
    assert centres.labels.tolist() == [0, 1, 2, 3, 4, 5]
    torch.testing.assert_close(centres.sums, wanted.class_centres.sums, rtol=1e-5, atol=1e-4)
    # Once more: the class that the first update brought is known now.
    run("update", "p", "more.npz", "--out", "p", "--overwrite", "--quiet")
    assert len(open_posterior(Path("p"))[0].class_centres.labels) == 6
    assert "the numbers that the classes have" in error_of(run("update", "posterior", "more.npz", "--out", "q", code=2))
    assert not Path("q").exists()


def test_an_export_scores_as_the_posterior(run: Run) -> None:
    result = json.loads(run("export", "posterior", "--out", "scorer.npz", "--json").stdout)
    assert result["outputs"] == ["mu", "kappa", "uncertainty", "p_value"]
    x, (la, _) = points(30, 9)["features"], open_posterior(Path("posterior"))
    np.testing.assert_allclose(Scorer.load("scorer.npz")(x)[2], la(torch.from_numpy(x)).uncertainty, rtol=1e-5)
    run("export", "posterior", "--out", "graph.pt2", "--example", "new.npz", "--no-p-value")
    graph = torch.export.load("graph.pt2").module()
    assert len(graph(torch.from_numpy(x))) == 3
    assert "'.onnx'" in error_of(run("export", "posterior", "--out", "graph.xyz", code=2))
    wrong = ("export", "posterior", "--out", "graph.pt2", "--dynamic-axes")
    assert "--dynamic-axes" in error_of(run(*wrong, "{", code=2))
    assert "dynamic_axes" in error_of(run(*wrong, "[7]", code=2))


MODULE = """
import torch
from torch import nn


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.fixture
def encoder(place: Path) -> Iterator[str]:
    """``--encoder`` of a module that no other test has imported."""
    name = f"daily_{abs(hash(str(place)))}"
    (place / f"{name}.py").write_text(MODULE)
    yield f"{name}:encoder"
    sys.modules.pop(name, None)
    sys.path[:] = [each for each in sys.path if each != str(place)]


def test_features_stand_for_the_inputs_with_the_names_of_their_classes(run: Run, encoder: str) -> None:
    names = np.array(["ant", "bee", "cat", "dog", "elk", "fox"])
    for name, seed in (("train", 2), ("test", 3)):
        found = points(200, seed)
        # Without the first class, the second has the number 0 in its own folder.
        rows = found["labels"] >= (name == "test")
        np.savez(f"{name}_x.npz", inputs=found["features"][rows], labels=names[found["labels"][rows]])
        run("features", f"{name}_x.npz", "--encoder", encoder, "--out", name, "--batch-size", 64)
    assert cc.FeatureFolder("test").class_names == ("bee", "cat", "dog", "elk")
    losses = []
    for source, folder in (("train_x.npz", "p"), ("train", "q")):
        fit = ("fit", source, "--encoder", encoder, "--out", folder, "--json")
        losses.append(json.loads(run(*fit).stdout)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    run("score", "q", "test", "--encoder", encoder, "--out", "scores.csv")
    assert len(read("scores.csv")) == len(cc.FeatureFolder("test").dataset)
    assert "--encoder" in error_of(run("features", "train_x.npz", "--out", "other", code=2))
    assert "already" in error_of(run("features", "train", "--encoder", encoder, "--out", "other", code=2))
    loader = [(torch.randn(4, 12), torch.arange(4))]
    with pytest.raises(cc.InputError, match="targets that are whole numbers from 0 to 0"):
        cc.features(torch.nn.Linear(12, 3), loader, "third", class_names=["one"])
