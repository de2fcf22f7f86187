"""``benchmarks.experiments`` from end to end: every row, the demonstration, a run that is interrupted."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import paper_table, results_plots
from benchmarks.experiments import plan, plots, report, run, training
from benchmarks.experiments.methods import triplet

ROOT = Path(__file__).parents[2]
TINY = ["--data", "digits", "--train-size", "100", "--test-size", "50", "--n-samples", "3", "--epochs", "1", "--quiet"]
PLOTS = {"roc", "sparsification", "votes", "images_laplace_posthoc"}


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)  # half of the time


def test_a_log_gets_one_line_of_a_training(capsys):
    class Squares(nn.Linear):
        def forward(self, x, targets):
            return (super().forward(x) - targets).square().mean()

    batches = [(torch.ones(4, 3), torch.ones(4, 1))] * 3
    for asked, line in ((True, "[training] done after 0 s\n"), (None, ""), (False, "")):
        training.run_training(training.Setting(epochs=2, progress=asked), Squares(3, 1), batches, lr=0.1)
        assert capsys.readouterr().err == line


def test_every_row_of_table_2_runs(device, tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(triplet, "TEMPERATURES", (1.0,))
    keys = [row.key for row in plan.known_rows("2")]
    options = ["--table", "2", *TINY, "--device", device, "--out", str(tmp_path)]
    assert run.main([*options, "--methods", *keys]) == 0
    cells = {cell["row"]: cell for cell in results_of(tmp_path)["cells"]}
    assert set(cells) == set(keys)
    unscored, without_votes = ("deterministic", "triplet", "cosine_proxies"), ("norm", "vmf_density")
    for key, cell in cells.items():
        figures = cell["figures"]
        assert all(0 <= figures[name] <= 1 for name in plan.COLUMNS["2"] if name in figures)
        assert key in unscored or "auroc" in figures
        assert ("ece" in figures) != (key in (*unscored[:2], *without_votes)) or "ece" not in figures
        assert cell["seconds"]["fit"] >= 0
    assert cells["deep_ensemble"]["members"] == [0, 1, 2, 3, 4]
    # Scores on top of an encoder retrieve as it does.
    assert len({cells[row]["figures"]["map_at_5"] for row in ("deterministic", "pfe", "norm", "knn_features")}) == 1
    text = (tmp_path / "results.md").read_text()
    assert all(f"| {row.title} |" in text for row in plan.known_rows("2"))
    assert "paper" not in text.split("## Notes")[0]  # the paper has no digits


def test_a_run_goes_on_from_the_saved_training(tmp_path, undrawn, monkeypatch):
    options = ["--table", "2", *TINY, "--out", str(tmp_path), "--methods", "laplace_posthoc", "laplace_online"]
    assert run.main(options) == 0
    first = {cell["row"]: cell["figures"] for cell in results_of(tmp_path)["cells"]}
    for name in ("laplace_posthoc", "laplace_online"):
        (tmp_path / "seed0" / f"{name}.json").unlink()

    def refuse(setting, *more):
        assert setting.epochs == 0
        return training.train(setting, *more)

    monkeypatch.setattr(run, "train", refuse)
    assert run.main([*options, "laplace_online_diag"]) == 0
    again = {cell["row"]: cell["figures"] for cell in results_of(tmp_path)["cells"]}
    assert again.keys() - first.keys() == {"laplace_online_diag"}
    assert {name: again[name] for name in first} == first


def test_the_demonstration(tmp_path, monkeypatch):
    options = ["--table", "demo", *TINY, "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *_: None)
        assert run.main(options) == 0
    assert run.main([*options, "--seeds", "0", "1"]) == 0
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == PLOTS
    (tmp_path / "curvature.json").write_bytes((results_plots.RESULTS / "curvature.json").read_bytes())
    results_plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "again")])
    assert {path.stem for path in (tmp_path / "again/seed1").iterdir()} == PLOTS
    assert {path.stem for path in (tmp_path / "again").glob("*.svg")} == {"methods", "speed"}
    results = results_of(tmp_path)
    assert results["data"]["train"] == 80  # a fifth is held out for the threshold
    posterior = results["rows"]["laplace_posthoc"]["variants"]
    assert posterior["own"]["auroc"] == posterior["novelty"]["auroc"]
    assert posterior["own"]["r_auroc"] == posterior["uncertainty"]["r_auroc"]
    both = [cell["figures"]["auroc"] for cell in results["cells"] if cell["row"] == "laplace_posthoc"]
    summary = results["rows"]["laplace_posthoc"]["figures"]["auroc"]
    assert summary["std"] == pytest.approx(abs(both[0] - both[1]) / math.sqrt(2))
    text = (tmp_path / "results.md").read_text()
    titles = [title for row in plan.table_rows("demo")[1:] for title in plan.score_titles("demo", row).values()]
    assert all(text.count(f"| {title} |") == 3 for title in titles)  # two seeds and their mean
    assert f"{summary['mean']:.3f} ± {summary['std']:.3f}" in text
    assert "| flagged as unknown at | α = 0.05 |" in text  # 20 images cannot say a hundredth
    results["config"]["data"] = "fashionmnist"
    theirs = "0.78 | 0.74 | 0.72 | 0.96 | 0.96 | 0.86 | 0.03"
    assert f"| Warburg et al. 2023: LAM post-hoc | {theirs} | – | – |" in report.demo_page(results)


def test_the_papers_numbers_stand_beside_ours():
    committed = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("benchmarks/results/paper.md", "docs/results.md")
    }
    assert paper_table.page() == committed["benchmarks/results/paper.md"]
    assert paper_table.section("2", "fashionmnist") in committed["docs/results.md"]
    for number, data in plan.PAPER_TABLES:
        text = paper_table.section(number, data)
        paper = [f"{mean:.2f} / " for row in plan.paper_rows(number, data).values() for mean, _ in row.values()]
        assert [text.count(one) for one in paper] == [paper.count(one) for one in paper]
        assert ("Not run" in text) == (" / –" in text)
    # Where queries have no positive, by the released code's count: of LFW's 0.657 at 1, not 0.977.
    lfw = json.loads((ROOT / "benchmarks/results/table3_lfw.json").read_text())["rows"]["laplace_posthoc_diag"]
    ours = [lfw["figures"][f"map_at_{k}_released"] for k in (1, 5, 10)] + [lfw["figures"]["auroc"]]
    ours += [lfw["variants"]["own"][f"{name}_released"] for name in ("auprc", "ausc")]
    papers = (0.44, 0.68, 0.65, 0.65, 0.72, 0.45)
    cells = [f"{theirs:.2f} / {figure['mean']:.2f}" for theirs, figure in zip(papers, ours, strict=True)]
    assert f"| LAM (post-hoc), diagonal | {' | '.join(cells)} |" in paper_table.section("3", "lfw")
