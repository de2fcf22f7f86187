"""The command line from end to end: a whole run, a run that is interrupted, and what is refused."""

import json
import math

import pytest
from tables import each

from benchmarks.experiments import cli, plan, plots
from benchmarks.experiments.methods import training
from contrastive_curvature.errors import DivergenceError
from tests.devices import DEVICES

ROWS = ["deterministic", "deep_ensemble", "pfe", "laplace_posthoc", "laplace_online", "norm"]
TINY = ["--data", "digits", "--train-size", "200", "--test-size", "100", "--n-samples", "3", "--quiet"]
CLOSED = ["--table", "2", *TINY, "--epochs", "1", "--methods", *ROWS]


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def figures_of(folder):
    """What a run says of its cells, without what depends on the machine's mood."""
    kept = ("row", "seed", "members", "figures", "variants")
    return [{key: cell[key] for key in kept} for cell in results_of(folder)["cells"]]


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)  # half of the time


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *_: None)
        assert cli.main([*CLOSED, "--seeds", "0", "1", "--out", str(folder)]) == 0
    return folder


def test_a_run_leaves_figures_of_every_cell(whole):
    results = results_of(whole)
    assert set(results["rows"]) == set(ROWS)
    assert len(results["cells"]) == 5 * 2 + 1
    for cell in results["cells"]:
        figures = cell["figures"]
        assert all(0 <= figures[key] <= 1 for key in plan.COLUMNS[2] if key in figures)
        assert ("auroc" in figures) == (cell["row"] != "deterministic")
        assert ("ece" in figures) == (cell["row"] not in ("deterministic", "norm"))
        assert cell["seconds"]["fit"] > 0
        assert cell["seconds"]["predict_over_forward"] > 0
        if "auroc" in figures:
            assert {key: cell["variants"]["own"][key] for key in ("auroc", "ausc")} == {
                key: figures[key] for key in ("auroc", "ausc")
            }
    ensemble = next(cell for cell in results["cells"] if cell["row"] == "deep_ensemble")
    assert ensemble["members"] == [0, 1, 2, 3, 4]
    assert "sum_std" in ensemble["variants"]
    # scores on top of an encoder retrieve as it does
    by_row = {cell["row"]: cell["figures"] for cell in results["cells"] if cell["seed"] == 1}
    assert all(by_row[row]["map_at_5"] == by_row["deterministic"]["map_at_5"] for row in ("pfe", "norm"))


def test_means_and_deviations_stand_in_the_table(whole):
    results, text = results_of(whole), (whole / "results.md").read_text()
    both = [cell["figures"]["auroc"] for cell in results["cells"] if cell["row"] == "laplace_online"]
    summary = results["rows"]["laplace_online"]["figures"]["auroc"]
    assert summary["mean"] == pytest.approx(sum(both) / 2)
    assert summary["std"] == pytest.approx(abs(both[0] - both[1]) / math.sqrt(2))
    line = next(line for line in text.splitlines() if line.startswith("| LAM (online)"))
    assert f"{summary['mean']:.3f} ± {summary['std']:.3f}" in line
    plain = next(line for line in text.splitlines() if line.startswith("| Deterministic"))
    assert plain.count(" – |") == 6  # AUROC, AUPRC, AUSC, ECE, R-AUROC, Brier
    assert "±" not in next(line for line in text.splitlines() if line.startswith("| Deep ensemble"))
    assert "paper" not in text.split("## Notes")[0]  # the paper has no digits


def test_finished_cells_are_not_computed_again(whole, undrawn, monkeypatch):
    def never(*_, **__):
        raise RuntimeError("computed again")

    before = figures_of(whole)
    monkeypatch.setattr("benchmarks.experiments.run.evaluate", never)
    assert cli.main([*CLOSED, "--seeds", "1", "0", "--out", str(whole)]) == 0
    assert figures_of(whole) == before
    with pytest.raises(RuntimeError, match="computed again"):
        cli.main([*CLOSED, "--seeds", "2", "--out", str(whole)])


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, undrawn, monkeypatch):
    options = ["--table", "2", *TINY, "--epochs", "2", "--methods", "deterministic", "laplace_online", "norm"]
    assert cli.main([*options, "--out", str(tmp_path / "whole")]) == 0
    steps, stop_at = [], [6]

    def stops(batches, *_, **__):
        for batch in batches:
            steps.append(batch)
            if len(steps) == stop_at[0]:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(training, "tqdm", stops)
        assert cli.main([*options, "--out", str(tmp_path / "parts")]) == 130
        steps.clear()
        stop_at[0] = 100
        assert cli.main([*options, "--out", str(tmp_path / "parts")]) == 0
    # A checkpoint is written after every epoch, of four steps; what lies before the last one is not done again.
    assert len(steps) == 12
    assert figures_of(tmp_path / "parts") == figures_of(tmp_path / "whole")


def test_a_method_that_diverges_is_reported_and_tried_again(tmp_path, undrawn, monkeypatch, capsys):
    options = ["--table", "1", *TINY, "--epochs", "1", "--methods", "posthoc_arccos_fixed", "online_arccos_psd"]

    def diverges(*_):
        raise DivergenceError("the loss is nan.", 7)

    with monkeypatch.context() as patch:
        patch.setattr("contrastive_curvature.online.OnlineLaplace.forward", diverges)
        assert cli.main([*options, "--out", str(tmp_path)]) == 1
    assert "online_arccos_psd failed" in capsys.readouterr().err
    assert "**Failed**: online_arccos_psd, seed 0: DivergenceError" in (tmp_path / "results.md").read_text()
    assert set(results_of(tmp_path)["rows"]) == {"posthoc_arccos_fixed"}
    assert cli.main([*options, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "results.md").read_text()
    assert "Failed" not in text
    assert "| *paper, LFW* | *0.69 ± 0.00* | *0.53 ± 0.20* | *0.46 ± 0.02* |" in text


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_of_the_tables_runs(device, tmp_path, undrawn):
    keys = [row.key for row in plan.known_rows(2) if row.key not in ROWS]
    options = ["--table", "2", *TINY, "--epochs", "1", "--device", device, "--out", str(tmp_path)]
    assert cli.main([*options, "--methods", *keys]) == 0
    assert set(results_of(tmp_path)["rows"]) == set(keys)


def test_other_options_are_refused_by_the_folder(tmp_path, undrawn, capsys):
    options = ["--table", "2", *TINY, "--epochs", "1", "--methods", "deterministic", "--out", str(tmp_path)]
    assert cli.main(options) == 0
    before = (tmp_path / "results.json").read_bytes()
    assert cli.main([*options, "--dim", "4"]) == 2
    assert "dim = 3, got dim = 4" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_bytes() == before
    # Augmentations draw other random numbers in other processes.
    assert cli.main([*options, "--workers", "1"]) == 2
    assert "workers = 0, got workers = 1" in capsys.readouterr().err
    assert cli.main([*options, "--threads", "1"]) == 0


def test_ensembles_know_their_members(tmp_path, undrawn):
    options = ["--table", "2", *TINY, "--epochs", "1", "--methods", "deterministic", "deep_ensemble"]
    options += ["--out", str(tmp_path), "--seeds"]
    assert cli.main([*options, "0"]) == 0
    # other members, under the same first seed: not the old ensemble under a new name
    assert cli.main([*options, "0", "2", "3", "4", "5"]) == 0
    cell = json.loads((tmp_path / "seed0" / "deep_ensemble.json").read_text())
    assert cell["members"] == [0, 2, 3, 4, 5]
    assert {path.name for path in (tmp_path / "seed0").glob("deep_ensemble-*")} == {
        "deep_ensemble-0-1-2-3-4",
        "deep_ensemble-0-2-3-4-5",
    }
    # another process's ensemble shares encoders with it, so it is no second run
    assert cli.main([*options, "1"]) == 0
    assert results_of(tmp_path)["rows"]["deep_ensemble"]["figures"]["map_at_1"]["n"] == 1


@each(
    "options, says",
    [
        (["--dim", "1"], "--dim"),
        (["--epochs", "0"], "--epochs"),
        (["--margin", "2.5"], "--margin"),
        (["--per-class", "3"], "multiple of per_class=3"),
        (["--seeds", "1", "1"], "--seeds"),
        (["--test-size", "601"], "at most the 600"),
        (["--network", "cifar10"], "--network cifar10"),
        (["--device", "nowhere"], "--device"),
        (["--methods", "hubs"], "--methods"),
        (["--table", "3"], "--data"),
    ],
)
def test_refusals_come_first(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--table", "2", "--data", "digits", *options]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
