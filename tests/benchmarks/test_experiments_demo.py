"""The demonstration, from its command to its page and plots."""

import json
import math

import pytest
import torch

from benchmarks.experiments import cli, config, demo, plan, plots

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


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *_: None)
        assert cli.main([*TINY, "--out", str(folder)]) == 0
    # goes on with a second seed, so that the spread is there too
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


def test_a_fifth_of_the_training_images_is_held_out_for_the_threshold():
    given = cli.parse(DEMO)
    data, whole = config.read_data(given), config.load_data("digits", given.data_root)
    assert (len(data.train), len(data.calibration), len(whole.train)) == (958, 239, 1197)
    parts = torch.cat([data.train.pixels, data.calibration.pixels]).flatten(1)
    assert torch.equal(parts.unique(dim=0), whole.train.pixels.flatten(1).unique(dim=0))
    assert torch.equal(config.read_data(given).calibration.pixels, data.calibration.pixels)
    assert data.fingerprint() != whole.fingerprint()
    assert config.read_data(cli.parse(["--table", "2", "--data", "digits"])).calibration is None
