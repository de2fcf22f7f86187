"""``benchmarks.experiments --encoder``: the rows that train nothing, of a feature file or of the faces' encoder."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from laplace import Laplace
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import results_plots
from benchmarks.experiments import plan, run
from benchmarks.transfer.recipes import faces

CLASSES, EACH, FEATURES, DIM = 12, 10, 8, 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A feature file: the first six classes train, the others test, and one of these has one input only."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)[: 1 - EACH]
    centres = rng.normal(size=(CLASSES, FEATURES))
    features = (centres[labels] + 0.5 * rng.normal(size=(len(labels), FEATURES))).astype("f")
    train = labels < CLASSES // 2
    arrays = {"weight": rng.normal(size=(DIM, FEATURES)).astype("f"), "bias": rng.normal(size=DIM).astype("f")}
    arrays |= {"train_features": features[train], "train_labels": labels[train]}
    arrays |= {"test_features": features[~train], "test_labels": labels[~train]}
    arrays |= {f"unknown_{name}": features[:40] + shift for name, shift in (("near", 1.0), ("far", 9.0))}
    np.savez(tmp_path / "mine.npz", **arrays)
    return tmp_path / "mine.npz"


def options(file: Path, *more: str) -> list[str]:
    out = ["--out", str(file.parent / "run"), "--n-samples", "3", "--quiet"]
    return ["--table", "3", "--data", "folder", "--encoder", str(file), *out, *more]


@pytest.mark.filterwarnings("ignore::contrastive_curvature.embedding.known.OptimisticPValueWarning")
def test_the_rows_are_those_of_the_layer_and_its_features(file: Path) -> None:
    assert run.main(options(file, "--ood", "far")) == 0
    results = json.loads((file.parent / "run/results.json").read_text())
    found = {key: row["figures"] for key, row in results["rows"].items()}
    assert {row.method for row in plan.known_rows("3") if row.key in found} == set(plan.POST_HOC)
    assert (results["config"]["dim"], results["config"]["epochs"], results["data"]["ood_title"]) == (DIM, 0, "far")
    of = {name: torch.from_numpy(value) for name, value in np.load(file).items()}
    layer = nn.Linear(FEATURES, DIM)
    layer.load_state_dict({"weight": of["weight"], "bias": of["bias"]})
    known, unknown = (layer(of[name]).detach() for name in ("test_features", "unknown_far"))

    unit = nn.functional.normalize(known)
    cosines = (unit @ unit.T).fill_diagonal_(-2)
    right = (of["test_labels"][cosines.argmax(1)] == of["test_labels"]).numpy()
    answered = (of["test_labels"] != CLASSES - 1).numpy()  # the query that is alone in its class
    assert [round(row["map_at_1"]["mean"] * answered.sum()) for key, row in found.items() if "diag" not in key] == [
        right[answered].sum()
    ] * (len(found) - 1)
    assert found["norm"]["map_at_1_released"]["mean"] == pytest.approx(right.mean())

    def check(row: str, of_known: torch.Tensor, of_unknown: torch.Tensor) -> None:
        truth = np.repeat([0, 1], [len(of_known), len(of_unknown)])
        scores = torch.cat([of_known, of_unknown]).numpy()
        assert found[row]["auroc"]["mean"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-6)
        assert found[row]["auprc"]["mean"] == pytest.approx(average_precision_score(truth, scores), abs=1e-6)

    check("norm", -known.norm(dim=1), -unknown.norm(dim=1))
    la = Laplace(layer, "contrastive", backend_kwargs={"margin": results["config"]["margin"]})
    la.fit(DataLoader(TensorDataset(of["train_features"], of["train_labels"]), batch_size=7), progress_bar=False)
    la.optimize_prior_precision()
    rows = torch.randperm(len(of["train_labels"]), generator=torch.Generator().manual_seed(1))
    la.calibrate(DataLoader(TensorDataset(of["train_features"][rows], of["train_labels"][rows])), progress_bar=False)
    check("laplace_posthoc", la(of["test_features"]).novelty, la(of["unknown_far"]).novelty)


def test_a_run_goes_on_with_the_same_layer_only(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(options(file, "--methods", "norm")) == 0
    assert json.loads((file.parent / "run/results.json").read_text())["data"]["ood_title"] == "near"  # the first
    assert "pretrained, nothing is trained here" in (file.parent / "run/results.md").read_text()
    assert run.main(options(file, "--methods", "laplace_posthoc", "norm")) == 0
    results_plots.main(["--results", str(file.parent / "run"), "--out", str(file.parent / "again")])
    assert {path.stem for path in (file.parent / "again/seed0").iterdir()} == {"roc", "sparsification"}
    arrays = dict(np.load(file))
    np.savez(file, **(arrays | {"weight": 2 * arrays["weight"]}))
    assert run.main(options(file, "--methods", "norm")) == 2
    assert "options as the run there" in capsys.readouterr().err


def test_what_a_pretrained_encoder_cannot_do_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in (
        (["--methods", "pfe"], "of table 3 without training: deterministic"),
        (["--ood", "mnist"], "mine.npz: near, far, none"),
        (["--encoder", "nowhere.npz"], "no file nowhere.npz"),
    ):
        assert run.main(options(file, *more)) == 2
        assert said in capsys.readouterr().err
    for more in (["--table", "demo", "--data", "digits"], ["--encoder", "mobilefacenet"], ["--encoder", "resnet50"]):
        with pytest.raises(SystemExit):
            run.main(options(file, *more))
        assert "--encoder: expected" in capsys.readouterr().err


def test_the_faces_table_is_made_from_both_lists_of_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    people = {"Train": {"A": 6, "B": 1}, "Test": {"C": 2, "D": 2}}
    (tmp_path / "lfw-py").mkdir()
    with zipfile.ZipFile(tmp_path / "lfw-py/lfw-deepfunneled.zip", "w") as archive:
        for part, counts in people.items():
            lines = [str(len(counts)), *(f"{name}\t{count}" for name, count in counts.items())]
            (tmp_path / f"lfw-py/peopleDev{part}.txt").write_text("\n".join(lines))
            for name, count in counts.items():
                for number in range(1, count + 1):
                    with archive.open(f"lfw-deepfunneled/{name}/{name}_{number:04d}.jpg", "w") as jpeg:
                        Image.fromarray(rng.integers(0, 256, (250, 250, 3), dtype=np.uint8)).save(jpeg, "JPEG")
    weight, bias = rng.normal(size=(2, 4)), np.array([3.0, -4.0])

    def network(_root):  # its features are the means of the quarters
        def run_network(images):
            quarters = [image.reshape(2, 56, 2, 56, 3).mean((1, 3, 4)).ravel() for image in images]
            return np.stack(quarters).astype("f"), (np.stack(quarters) @ weight.T + bias).astype("f")

        return run_network

    monkeypatch.setattr(faces, "face_network", network)
    monkeypatch.setattr(faces, "unknown_images", lambda *_: np.zeros((5, 112, 112, 3), np.uint8))
    found = faces.make_table(tmp_path, 0)
    assert found.train_labels.tolist() == [0] * 6 + [1]
    assert found.test_labels.tolist() == [2, 2, 3, 3]
    np.testing.assert_allclose(found.weight, weight, rtol=1e-3, atol=1e-3)
    assert list(found.unknown) == ["shuffled", "fashionmnist"]
    clothes, shuffled = found.unknown["fashionmnist"], found.unknown["shuffled"]
    assert not clothes.any()
    np.testing.assert_allclose(np.sort(shuffled), np.sort(found.test_features), rtol=1e-6)
    # Every quarter has left its side: upper left, upper right, lower left, lower right.
    assert (shuffled[:, [0, 2]] != found.test_features[:, [0, 2]]).all()
    assert np.allclose(np.sort(shuffled[:, [0, 2]]), np.sort(found.test_features[:, [1, 3]]))
