"""The demonstration, from its command to its page and plots."""

import json
import math

import pytest
import torch

from benchmarks.experiments import cli, config, defaults, demo, plan, plots
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.online import load_checkpoint

DEMO = ["--table", "demo"]
TINY = [*DEMO, "--epochs", "1", "--train-size", "150", "--test-size", "100", "--n-samples", "5", "--quiet"]
TITLES = [title for row in plan.table_rows("demo")[1:] for title in plan.score_titles("demo", row).values()]
PLOTS = {"roc", "sparsification", "calibration", "histograms", "embeddings_laplace_posthoc", "images_laplace_posthoc"}
PLOTS |= {"p_values_laplace_posthoc"}


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def numbers(node):
    if isinstance(node, dict):
        return [n for value in node.values() for n in numbers(value)]
    if isinstance(node, list):
        return [n for value in node for n in numbers(value)]
    return [node] if isinstance(node, float) else []


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)  # half of the time


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    # two seeds, so that the spread is there too
    assert cli.main([*TINY, "--seeds", "0", "1", "--out", str(folder)]) == 0
    return folder


def test_run_leaves_every_promised_file(run_folder):
    promised = {"config.json", "results.json", "results.md", "plots", "seed0", "seed1"}
    assert {path.name for path in run_folder.iterdir()} == promised
    assert {path.stem for path in (run_folder / "plots").iterdir()} == PLOTS
    for path in (run_folder / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_results_hold_every_figure_and_all_are_finite(run_folder):
    results = results_of(run_folder)
    assert all(math.isfinite(value) for value in numbers(results))
    assert set(results["rows"]) == {row.key for row in plan.table_rows("demo")}
    posterior = results["rows"]["laplace_posthoc"]
    assert set(posterior["figures"]) >= set(plan.QUALITY)
    assert set(posterior["variants"]) >= {"own", "uncertainty", "novelty", "inverse_kappa", "inverse_kappa_sampled"}
    assert posterior["variants"]["own"]["auroc"] == posterior["variants"]["novelty"]["auroc"]
    assert posterior["variants"]["own"]["r_auroc"] == posterior["variants"]["uncertainty"]["r_auroc"]
    assert set(posterior["seconds"]) >= {"fit", "predict", "predict_over_forward", "predict_inverse_kappa_sampled"}
    # Sampled networks retrieve by the mean directions of their embeddings, which are others than the encoder's.
    assert set(posterior["variants"]["inverse_kappa_sampled"]) >= {"map_at_1", "map_at_5", "map_at_10", "auroc"}
    both = [cell["figures"]["auroc"] for cell in results["cells"] if cell["row"] == "laplace_posthoc"]
    summary = posterior["figures"]["auroc"]
    assert summary["mean"] == pytest.approx(sum(both) / 2)
    assert summary["std"] == pytest.approx(abs(both[0] - both[1]) / 2**0.5)


def test_table_shows_every_row_and_the_spread(run_folder):
    text = (run_folder / "results.md").read_text()
    assert len(TITLES) == 6
    assert all(text.count(f"| {title} |") == 3 for title in TITLES)  # two seeds and their mean
    assert all(f"| {title} |" in text for title, _, _ in demo._STEPS)
    assert " ± " in text
    assert "| flagged as unknown at | α = 0.05 |" in text  # 30 images cannot say a hundredth
    assert "Warburg et al. 2023" not in text  # the paper has no digits


def test_the_paper_stands_beside_fashionmnist(run_folder):
    results = results_of(run_folder)
    results["config"]["data"] = "fashionmnist"
    text = demo.demo_markdown(results)
    theirs = "0.78 | 0.74 | 0.72 | 0.96 | 0.96 | 0.86 | 0.03"
    assert text.count(f"| Warburg et al. 2023: LAM post-hoc | {theirs} | – | – |") == 1
    assert text.count("Warburg et al. 2023: LAM online") == 1


def test_a_seed_gives_the_same_figures_again(run_folder, tmp_path, undrawn):
    assert cli.main([*TINY, "--seeds", "1", "--out", str(tmp_path)]) == 0
    first, again = (
        {(cell["seed"], cell["row"]): (cell["figures"], cell["variants"]) for cell in results_of(folder)["cells"]}
        for folder in (run_folder, tmp_path)
    )
    assert all(first[key] == figures for key, figures in again.items())
    assert first[0, "laplace_posthoc"] != first[1, "laplace_posthoc"]
    name = "seed1/deterministic/model.pt"
    states = [load_checkpoint(folder / name)["state"]["encoder"] for folder in (run_folder, tmp_path)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


# This fix has a diagonal posterior, which may say so of itself.
@pytest.mark.filterwarnings("ignore::contrastive_curvature.laplace.advice.FeatureNormWarning")
def test_other_dimensions_and_options_run(tmp_path):
    options = ["--dim", "5", "--distance", "euclidean", "--pd-fix", "positive", "--negative-weight", "0.2"]
    options += ["--margin", "none", "--batch-size", "32", "--baseline-features", "20", "--ood", "shuffled"]
    assert cli.main([*TINY, *options, "--out", str(tmp_path)]) == 0
    written = results_of(tmp_path)["config"]
    assert (written["dim"], written["margin"], written["distance"]) == (5, None, "euclidean")
    assert load_checkpoint(tmp_path / "seed0/knn_features/model.pt")["state"]["own"] == {"gallery_size": 20}
    assert "margin" not in (tmp_path / "results.md").read_text()


def test_without_the_unknown_there_is_no_detection(tmp_path):
    assert cli.main([*TINY, "--ood", "none", "--out", str(tmp_path)]) == 0
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == PLOTS - {"roc", "histograms"}
    assert "out of distribution: nothing" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dim", "1"], "--dim: expected a whole number, at least 2"),
        (["--epochs", "0"], "--epochs"),
        (["--seeds", "1", "1"], "--seeds"),
        (["--train-size", "5"], "--train-size"),
        (["--train-size", "1198"], "at most the 1197"),
        (["--test-size", "601"], "at most the 600"),
        (["--lr", "nan"], "--lr"),
        (["--margin", "2.5"], "margin"),
        (["--negative-weight", "-0.1"], "negative_weight"),
        (["--negative-weight", "1"], "--negative-weight"),
        (["--n-samples", "1"], "--n-samples"),
        (["--baseline-features", "9"], "--baseline-features"),
        (["--device", "nowhere"], "--device"),
        (["--margin", "none", "--distance", "euclidean"], "zero curvature"),
        (["--data", "lfw"], "--data: expected for table demo one of digits, fashionmnist"),
        (["--ood", "digits"], "other images than those of 'digits'"),
        (["--ood", "birds"], "ood: expected one of digits, fashionmnist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_come_first(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*DEMO, *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "options",
    [["--data", "cifar"], ["--margin", "wide"], ["--distance", "city"], ["--typo"], ["--table", "5"]],
)
def test_unknown_words_are_refused_by_the_parser(options, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*DEMO, *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_demonstration_goes_on_in_its_folder(run_folder, undrawn, monkeypatch):
    monkeypatch.setattr("benchmarks.experiments.run.evaluate", lambda *_, **__: pytest.fail("computed again"))
    assert cli.main([*TINY, "--seeds", "0", "1", "--out", str(run_folder)]) == 0


def test_a_run_folder_of_the_diagonal_posterior_is_refused(run_folder, tmp_path, capsys):
    content = json.loads((run_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "format": 2}))
    assert cli.main([*TINY, "--seeds", "0", "1", "--out", str(tmp_path)]) == 2
    assert "a run folder of format 3, got 2" in capsys.readouterr().err


@pytest.mark.parametrize("files", [["results.json", "encoder_seed0.pt"], ["config.json"]])
def test_run_folders_of_earlier_versions_are_refused(files, tmp_path, capsys):
    for name in files:
        (tmp_path / name).write_text(json.dumps({"table": 2, "images": "abc"}))
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert ("a run folder of format 3, got None" if files == ["config.json"] else "holds something else") in said
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_run_folders_of_one_second_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for _ in range(3):
        folders.append(cli.parse(DEMO).out)
        folders[-1].mkdir(parents=True)
    assert len(set(folders)) == 3
    assert all(folder.name.startswith("digits-d3-") for folder in folders)


def test_a_fifth_of_the_training_images_is_held_out_for_the_threshold():
    given = cli.parse(DEMO)
    data, whole = config.read_data(given), config.load_data("digits", given.data_root)
    assert (len(data.train), len(data.calibration), len(whole.train)) == (958, 239, 1197)
    parts = torch.cat([data.train.pixels, data.calibration.pixels]).flatten(1)
    assert torch.equal(parts.unique(dim=0), whole.train.pixels.flatten(1).unique(dim=0))
    assert torch.equal(config.read_data(given).calibration.pixels, data.calibration.pixels)
    assert data.fingerprint() != whole.fingerprint()
    assert config.read_data(cli.parse(["--table", "2", "--data", "digits"])).calibration is None


def test_known_images_are_flagged_as_rarely_as_promised(run_folder):
    """Of 100 test images and 30 calibration images: within four standard deviations."""
    for cell in results_of(run_folder)["cells"]:
        if cell["row"] == "laplace_posthoc":
            assert cell["figures"]["flagged_known_0.05"] <= 0.05 + 4 * math.sqrt(0.05 * 0.95 * (1 / 100 + 1 / 30))


def test_without_matplotlib_the_command_is_named(monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(UnsupportedError, match=r"need matplotlib: pip install \"contrastive-curvature\[benchmarks\]\""):
        cli._check_installed()


def test_defaults_follow_the_data_set():
    digits, fashion = cli.parse(DEMO), cli.parse([*DEMO, "--data", "fashionmnist"])
    assert (digits.data, digits.dim, digits.epochs, digits.margin) == ("digits", 3, 15, 0.7)
    assert (fashion.dim, fashion.epochs, cli.parse(["--table", "2"]).epochs) == (3, 3, 20)
    # Small files are fetched unasked, and nothing else.
    assert fashion.download
    assert not cli.parse([*DEMO, "--ood", "cub200"]).download
    assert not cli.parse(["--table", "2"]).download


def test_images_of_a_run_that_are_missing_are_named(tmp_path, capsys):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"")
    # one file is there, so nothing is downloaded over it
    assert cli.main([*DEMO, "--data", "fashionmnist", "--data-root", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "no train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte." in message
    assert 'python -c "from torchvision.datasets import FashionMNIST' in message


def test_every_table_can_be_made_on_its_data():
    for table, names in defaults.TABLE_DATA.items():
        for name in names:
            given = cli.parse(["--table", str(table), "--data", name])
            config.check_config(given)
