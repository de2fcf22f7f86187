import gzip
import json
import math
import struct

import pytest
import torch

from contrastive_curvature.demo import cli, config, data, methods, ood, plots, report, train
from contrastive_curvature.demo.baselines import feature_distance
from contrastive_curvature.demo.idx import read_idx
from contrastive_curvature.errors import InputError, UnsupportedError

TINY = ["--epochs", "1", "--train-size", "150", "--test-size", "100", "--n-samples", "5"]


def numbers(node):
    if isinstance(node, dict):
        return [n for value in node.values() for n in numbers(value)]
    if isinstance(node, list):
        return [n for value in node for n in numbers(value)]
    return [node] if isinstance(node, float) else []


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    # two seeds, so that the spread is there too
    assert cli.main([*TINY, "--seeds", "0", "1", "--out", str(folder)]) == 0
    return folder


def test_run_leaves_every_promised_file(run_folder):
    promised = {*plots.PLOTS, "results.json", "results.md", "encoder_seed0.pt", "encoder_seed1.pt"}
    assert {path.name for path in run_folder.iterdir()} == promised
    for name in plots.PLOTS:
        assert (run_folder / name).read_bytes().startswith(b"\x89PNG")
        assert (run_folder / name).stat().st_size > 10_000


def test_results_hold_every_figure_and_all_are_finite(run_folder):
    results = json.loads((run_folder / "results.json").read_text())
    assert set(results) == {"config", "environment", "seeds", "mean", "std"}
    assert all(math.isfinite(value) for value in numbers(results))
    for part in (*results["seeds"].values(), results["mean"], results["std"]):
        assert set(part["methods"]) == set(methods.METHODS)
        assert set(part["seconds"]) == set(methods.SECONDS)
        for method, figures in part["methods"].items():
            sampled = method in (methods.CLOSED, methods.ANGULAR, methods.SAMPLED)
            assert set(figures) == set(methods.FIGURES) - (set() if sampled else {"ece"})
    for run in results["seeds"].values():
        assert sum(run["calibration"]["count"]) == 100
        for figures in run["methods"].values():
            assert all(0 <= value <= 1 for key, value in figures.items() if key != "seconds")
    both = [run["methods"][methods.CLOSED]["auroc"] for run in results["seeds"].values()]
    assert results["mean"]["methods"][methods.CLOSED]["auroc"] == pytest.approx(sum(both) / 2)
    assert results["std"]["methods"][methods.CLOSED]["auroc"] == pytest.approx(abs(both[0] - both[1]) / 2**0.5)
    assert results["config"]["seeds"] == [0, 1]


def test_table_shows_every_row_and_the_spread(run_folder):
    text = (run_folder / "results.md").read_text()
    assert all(text.count(f"| {title} |") == 3 for title in methods.METHODS.values())  # two seeds and their mean
    assert " ± " in text
    assert "Warburg et al. 2023" not in text  # the paper has no digits


def test_the_paper_stands_beside_fashionmnist(run_folder):
    results = json.loads((run_folder / "results.json").read_text())
    results["config"]["dataset"] = "fashionmnist"
    text = report.markdown(results)
    assert all(text.count(title) == 1 for title in methods.PAPER)


def test_a_seed_gives_the_same_figures_again(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)  # half of the time
    assert cli.main([*TINY, "--seeds", "1", "--out", str(tmp_path)]) == 0
    first, again = (json.loads((folder / "results.json").read_text()) for folder in (run_folder, tmp_path))
    for method, figures in again["seeds"]["1"]["methods"].items():
        figures.pop("seconds")
        assert {key: first["seeds"]["1"]["methods"][method][key] for key in figures} == figures
    assert first["seeds"]["0"]["methods"] != first["seeds"]["1"]["methods"]
    states = [torch.load(folder / "encoder_seed1.pt", weights_only=True) for folder in (run_folder, tmp_path)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_other_dimensions_and_options_run(tmp_path):
    options = ["--dim", "5", "--distance", "euclidean", "--pd-fix", "positive", "--negative-weight", "0.2"]
    assert cli.main([*TINY, *options, "--margin", "none", "--batch-size", "32", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "results.json").read_text())["config"]
    assert (written["dim"], written["margin"], written["distance"]) == (5, None, "euclidean")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dim", "1"], "--dim: expected at least 2"),
        (["--epochs", "0"], "--epochs"),
        (["--seeds", "1", "1"], "--seeds"),
        (["--seeds", "-1"], "--seeds"),
        (["--train-size", "5"], "--train-size"),
        (["--train-size", "1198"], "at most 1197"),
        (["--test-size", "601"], "at most 600"),
        (["--batch-size", "1"], "--batch-size"),
        (["--lr", "0"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--margin", "2.5"], "margin"),
        (["--negative-weight", "-0.1"], "negative_weight"),
        (["--negative-weight", "1"], "--negative-weight"),
        (["--n-samples", "1"], "--n-samples"),
        (["--baseline-features", "9"], "--baseline-features"),
        (["--device", "nowhere"], "--device"),
        (["--margin", "none", "--distance", "euclidean"], "zero curvature"),
        (["--dataset", "fashionmnist", "--train-size", "60001"], "at most 60000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_come_first(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(options) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [["--dataset", "cifar"], ["--margin", "wide"], ["--distance", "city"], ["--typo"]])
def test_unknown_words_are_refused_by_the_parser(options, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "precious").write_text("mine")
    assert cli.main(["--out", str(tmp_path)]) == 2
    assert "a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_run_folders_of_one_second_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [report.make_run_folder(config.DemoConfig()) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.name.startswith("digits-d3-") for folder in folders)


def test_without_matplotlib_the_command_is_named(monkeypatch):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match=r"pip install \"contrastive-curvature\[demo\]\""):
        config.check_plotting()


def test_defaults_follow_the_data_set():
    digits, fashion = cli.parse([]), cli.parse(["--dataset", "fashionmnist"])
    assert (digits.dim, fashion.dim) == (3, 3)
    assert digits.epochs == config.DATASETS["digits"].epochs
    assert fashion.epochs == config.DATASETS["fashionmnist"].epochs
    assert digits.curvature == {"margin": 0.7}


def idx_bytes(values, kind=8):
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, kind, values.ndim, *values.shape) + bytes(
        values.flatten().tolist()
    )


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read(packed, tmp_path):
    values = torch.randint(256, (5, 4, 3), dtype=torch.uint8)
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    assert torch.equal(read_idx(path), values)


@pytest.mark.parametrize(
    "spoil",
    [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:6], lambda b: b"\1" + b[1:], lambda b: b"\0\0\r" + b[3:]],
    ids=["short", "long", "no axes", "magic", "type"],
)
def test_damaged_idx_files_are_refused(spoil, tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(spoil(idx_bytes(torch.arange(7, dtype=torch.uint8))))
    with pytest.raises(InputError, match="labels"):
        read_idx(path)


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(bytes(100))[:-4])
    with pytest.raises(InputError, match="damaged"):
        read_idx(path)


def test_fashionmnist_is_read_as_published(tmp_path):
    stems = [stem for pair in data._STEMS.values() for stem in pair]
    for name in ("FashionMNIST", "MNIST"):
        folder = tmp_path / name / "raw"
        folder.mkdir(parents=True)
        for stem in stems:
            shape = (3, 28, 28) if "images" in stem else (3,)
            values = torch.full(shape, 255 if name == "MNIST" else 51, dtype=torch.uint8)
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx_bytes(values)))
    made = data._fashion(tmp_path)
    assert made.train_x.shape == (3, 1, 28, 28)
    assert made.test_y.dtype == torch.int64
    assert torch.equal(made.test_x, torch.full((3, 1, 28, 28), 0.2))
    assert torch.equal(made.ood_x, torch.ones(3, 1, 28, 28))


def test_missing_files_are_named_with_the_command(tmp_path, capsys):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"")
    # one file is there, so nothing is downloaded over it
    assert cli.main(["--dataset", "fashionmnist", "--data-root", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "train-images-idx3-ubyte" in message
    assert "no train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte." in message
    assert 'python -c "from torchvision.datasets import FashionMNIST' in message


def test_shuffled_quarters_keep_pixels_and_leave_no_side():
    # every quarter has values of its own
    images = torch.arange(4.0).view(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    images = (images + torch.rand(50, 1, 8, 8) / 2).contiguous()
    moved = ood.shuffle_quarters(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved.flatten(1).sort(1).values, images.flatten(1).sort(1).values)
    left, right = images[..., :4].floor(), moved[..., :4].floor()
    assert set(left.unique().tolist()) == {0.0, 2.0}
    assert set(right.unique().tolist()) == {1.0, 3.0}
    assert not torch.equal(moved[0].floor(), moved[1:].floor().unique(dim=0)[0]) or len(moved.floor().unique(dim=0)) > 1
    assert torch.equal(moved, ood.shuffle_quarters(images, torch.Generator().manual_seed(0)))
    whole = {tuple(image.flatten().tolist()) for image in images[:, 0, :4, :4]}
    quarters = moved[:, 0].reshape(50, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(200, 16)
    assert whole <= {tuple(quarter.tolist()) for quarter in quarters}  # a quarter arrives in one piece
    with pytest.raises(InputError, match="even"):
        ood.shuffle_quarters(images[..., :7], torch.Generator())


def test_digits_split_is_fixed_and_disjoint():
    first, again = data._digits(), data._digits()
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.ood_x, again.ood_x)
    assert (len(first.train_x), len(first.test_x)) == (1197, 600)
    assert 0 <= float(first.train_x.min()) < float(first.train_x.max()) <= 1
    assert int(torch.bincount(first.test_y).max() - torch.bincount(first.test_y).min()) <= 4
    seen = {tuple(image.flatten().tolist()) for image in first.train_x}
    assert not any(tuple(image.flatten().tolist()) in seen for image in first.ood_x)


def test_active_pairs_are_all_positives_and_the_near_negatives():
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
    a1, p, a2, n = train.active_pairs(z, torch.tensor([0, 0, 1, 1]), 0.7)
    assert sorted(zip(a1.tolist(), p.tolist(), strict=True)) == [(0, 1), (2, 3)]
    assert sorted(zip(a2.tolist(), n.tolist(), strict=True)) == [(0, 3), (1, 3)]
    assert len(train.active_pairs(z, torch.tensor([0, 0, 1, 1]), None)[2]) == 4


def test_feature_distance_is_the_mean_of_the_ten_nearest():
    queries, gallery = torch.rand(7, 5), torch.rand(30, 5)
    cosine = torch.nn.functional.cosine_similarity(queries.unsqueeze(1), gallery, dim=2)
    wanted = 1 - cosine.sort(1, descending=True).values[:, :10].mean(1)
    assert torch.allclose(feature_distance(queries, gallery), wanted, atol=1e-6)


def test_report_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "results.md"
    report.write_atomically(path, "old")
    monkeypatch.setattr(report.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        report.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
