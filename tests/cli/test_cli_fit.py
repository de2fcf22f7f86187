"""``fit``: the posterior is the library's, in a folder that needs nothing else; options work or are refused."""

import json
from pathlib import Path

import numpy as np
import torch
from cli_support import BIAS, DIM, WEIGHT, WIDTH, Run, error_of, points
from laplace import Laplace
from tables import each
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.saved import open_posterior


def layer(weight: np.ndarray = WEIGHT, bias: np.ndarray = BIAS) -> nn.Linear:
    out = nn.Linear(weight.shape[1], len(weight))
    with torch.no_grad():
        out.weight.copy_(torch.from_numpy(weight))
        out.bias.copy_(torch.from_numpy(bias))
    return out


def batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = np.load(name)
    x, labels = torch.from_numpy(found["features"]), torch.from_numpy(found["labels"])
    return list(zip(x.split(256), labels.split(256), strict=True))


def test_the_posterior_is_that_of_the_library(place: Path) -> None:
    la = Laplace(layer(), "contrastive")
    la.fit(batches("train.npz"))
    la.optimize_prior_precision()
    la.calibrate(batches("validation.npz"))
    found, encoder = open_posterior(Path("posterior"))
    x = torch.from_numpy(points(30, 9)["features"])
    wanted, came = la(x), found(x)
    # The same operations on the same float32 numbers.
    torch.testing.assert_close(came.mu, wanted.mu, rtol=0, atol=0)
    torch.testing.assert_close(came.uncertainty, wanted.uncertainty, rtol=1e-6, atol=0)
    torch.testing.assert_close(came.p_value, wanted.p_value, rtol=0, atol=1e-12)
    assert encoder.width == WIDTH


def test_options_reach_the_library(run: Run) -> None:
    run(
        *("fit", "train.npz", "--out", "other", "--loss", "triplet", "--weights", "all", "--structure", "full"),
        *("--loss-option", "margin=0.3", "--loss-option", "reduction=sum"),
        *("--prior-strength", 0.1, "--seed", 3, "--calibrate", "validation.npz", "--quiet"),
    )
    found, _ = open_posterior(Path("other"))
    la = Laplace(layer(), "contrastive", "all", "full", backend_kwargs={"loss": cc.TripletLoss(0.3, "sum")})
    found_x, found_y = (torch.cat(part) for part in zip(*batches("train.npz"), strict=True))
    order = torch.from_numpy(np.random.default_rng(3).permutation(300))
    la.fit(list(zip(found_x[order].split(256), found_y[order].split(256), strict=True)))
    la.optimize_prior_precision(strength=0.1)
    torch.testing.assert_close(found.prior_precision, la.prior_precision, rtol=1e-6, atol=0)
    assert repr(found.backend.loss) == repr(la.backend.loss)
    assert (found.subset_of_weights, found.hessian_structure) == ("all", "full")
    assert found.known.calibration is not None


def test_held_out_share_is_calibrated_with_and_not_fitted(run: Run) -> None:
    result = json.loads(run("fit", "train.npz", "--out", "held", "--calibration-share", 0.2, "--json").stdout)
    assert (result["inputs"], result["calibration_inputs"]) == (240, 60)
    found, _ = open_posterior(Path("held"))
    assert found.n_data == 240
    again = json.loads(run("fit", "train.npz", "--out", "again", "--calibration-share", 0.2, "--json").stdout)
    assert again["loss"] == result["loss"]
    other = run("fit", "train.npz", "--out", "seed", "--calibration-share", 0.2, "--json", "--seed", 1).stdout
    assert json.loads(other)["loss"] != result["loss"]


def test_embeddings_alone_are_a_layer_that_is_the_identity_and_say_so(run: Run) -> None:
    found = np.load("train.npz")
    embeddings = found["features"] @ WEIGHT.T + BIAS
    np.savez("embeddings.npz", embeddings=embeddings, labels=found["labels"])
    result = run("fit", "embeddings.npz", "--out", "alone", "--json")
    assert any("identity" in text for text in json.loads(result.stdout)["warnings"])
    assert not any("norm 1" in text for text in json.loads(result.stdout)["warnings"])
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.savez("unit.npz", embeddings=unit.astype(np.float16), labels=found["labels"])
    assert "norm 1, so novelty cannot see a norm, which may help" in run("fit", "unit.npz", "--out", "unit").stderr
    la = Laplace(layer(np.eye(DIM, dtype=np.float32), np.zeros(DIM, np.float32)), "contrastive")
    la.fit([(torch.from_numpy(embeddings), torch.from_numpy(found["labels"]))])
    la.optimize_prior_precision()
    x = torch.from_numpy(embeddings[:20])
    # Batches of another size add in another order.
    torch.testing.assert_close(open_posterior(Path("alone"))[0](x).uncertainty, la(x).uncertainty, rtol=1e-4, atol=0)


def test_a_posterior_is_replaced_when_asked_and_other_files_stay(run: Run) -> None:
    assert "--overwrite" in error_of(run("fit", "train.npz", "--out", "posterior", code=2))
    Path("posterior/mine.txt").write_text("mine")
    run("fit", "train.npz", "--out", "posterior", "--overwrite", "--structure", "diag")
    assert Path("posterior/mine.txt").read_text() == "mine"
    assert open_posterior(Path("posterior"))[0].hessian_structure == "diag"
    assert len(list(Path("posterior").glob("*.safetensors"))) == 2


@each(
    "extra, wanted",
    [
        (("--loss-option", "margin=3"), "margin"),
        (("--loss-option", "temperature=0.1"), "margin"),
        (("--loss", "nonsense"), "infonce"),
        (("--loss-option", "margin"), "NAME=VALUE"),
        (("--option", "nonsense=1"), "nonsense"),
        (("--calibrate", "new.npz", "--calibration-share", "0.2"), "both"),
        (("--calibration-share", "0"), "'--calibration-share'"),
        (("--prior-strength", "-1"), "--prior-strength"),
        (("--weights", "all", "--structure", "kron_lowrank"), "kron_lowrank"),
        (("--batch-size", "0"), "batch-size"),
        (("--device", "nonsense"), "--device"),
        (("--encoder-options", '{"a": 1}'), "--encoder"),
        (("--last-layer", "train.npz"), "feature folder"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(run: Run, extra: tuple, wanted: str) -> None:
    assert wanted in error_of(run("fit", "train.npz", "--out", "other", *extra, code=2))
    assert not Path("other").exists()
