"""Every reader, on made-up folders in the published layout: the right images in the right part, up to a table."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import nn

from benchmarks.experiments import plan, plots, run, training
from benchmarks.experiments.data import DATASETS, classes_of, hold_out, load_data, rank

IMAGES = 4
"""Of a class, or of a place."""


def photo(path: Path, label: int, mode: str = "RGB") -> Path:
    """Write an image whose brightness tells its class; some sets have grey ones and ones for print among them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(abs(hash(path.name)) % 2**32).integers(0, 20, (24, 20, 3))
    pixels = (noise + 40 * (label % 5) + [0, label % 30, 0]).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def names(folder: Path, classes: list[int], ending: str = ".jpg") -> list[tuple[str, int]]:
    """Write some images of each class; their paths in the folder."""
    found = [(f"{label:03d}.kind/{label:03d}_{n}{ending}", label) for label in classes for n in range(IMAGES)]
    for name, label in found:
        photo(folder / name, label, {2: "L", 3: "CMYK"}.get(label % 50, "RGB"))
    return found


CLASSES = [1, 2, 100, 101, 152, 153]
"""Of 200: the first half trains."""


def write_cub(root: Path) -> None:
    folder = root / "CUB_200_2011"
    found = names(folder / "images", CLASSES)
    for file, column in (("images.txt", 0), ("image_class_labels.txt", 1)):
        (folder / file).write_text("".join(f"{i} {row[column]}\n" for i, row in enumerate(found, 1)))


CARS = [1, 2, 98, 99, 120, 121]
"""Of 196."""


def write_kaggle_cars(root: Path) -> None:
    folder = root / "cars196"
    titles = [f"AM General Hummer/SUV {k}" for k in range(1, 197)]
    folder.mkdir()
    (folder / "names.csv").write_text("\n".join(titles))
    for part in ("train", "test"):
        rows = []
        for label in CARS:
            for n in range(IMAGES // 2):
                name = f"{label:03d}{n}{part}.jpg"
                photo(folder / "car_data/car_data" / part / titles[label - 1].replace("/", "-") / name, label)
                rows.append(f"{name},1,1,9,9,{label}")
        (folder / f"anno_{part}.csv").write_text("\n".join(rows))


def write_cars(root: Path) -> None:
    folder = root / "stanford_cars"
    kind = [("bbox_x1", "O"), ("bbox_y1", "O"), ("bbox_x2", "O"), ("bbox_y2", "O"), ("class", "O"), ("fname", "O")]
    (folder / "devkit").mkdir(parents=True)
    meta = {"class_names": np.array([f"car {k}" for k in range(196)], dtype=object)}
    savemat(folder / "devkit/cars_meta.mat", meta)
    for part, file in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        rows = [(1, 1, 9, 9, label, f"{label}{n}.jpg") for label in CARS for n in range(IMAGES // 2)]
        for *_, label, name in rows:
            photo(folder / f"cars_{part}" / name, label)
        savemat(folder / file, {"annotations": np.array(rows, dtype=kind)})


def write_lfw(root: Path) -> None:
    folder, people = root / "lfw-py", {part: [f"{part}_{k}" for k in range(3)] for part in ("Train", "Test")}
    folder.mkdir()
    everyone = [name for part in people.values() for name in part]
    (folder / "lfw-names.txt").write_text("".join(f"{name}\t{IMAGES}\n" for name in everyone))
    for part, chosen in people.items():
        lines = "".join(f"{name}\t{IMAGES}\n" for name in chosen)
        (folder / f"peopleDev{part}.txt").write_text(f"{len(chosen)}\n{lines}")
        for name in chosen:
            for n in range(1, IMAGES + 1):
                photo(folder / "lfw_funneled" / name / f"{name}_{n:04d}.jpg", everyone.index(name))


def write_sop(root: Path) -> None:
    folder, head = root / "Stanford_Online_Products", "image_id class_id super_class_id path\n"
    for part, classes in (("train", [1, 2, 3]), ("test", [4, 5, 6])):
        found = names(folder, classes, ".JPG")
        rows = "".join(f"{i} {label} 1 {name}\n" for i, (name, label) in enumerate(found, 1))
        (folder / f"Ebay_{part}.txt").write_text(head + rows)


def write_inaturalist(root: Path) -> None:
    folder = root / "inaturalist"
    for file, part, classes in (("train2018", "train", [1, 2, 3]), ("val2018", "test", [4, 5, 6])):
        found = names(folder / "train_val2018", classes)
        images = [
            {"file_name": f"train_val2018/{name}", "id": 100 * label + i} for i, (name, label) in enumerate(found)
        ]
        labels = [{"image_id": one["id"], "category_id": one["id"] // 100} for one in images]
        (folder / f"{file}.json").write_text(json.dumps({"images": images, "annotations": labels}))
        (folder / "Inat_dataset_splits").mkdir(exist_ok=True)
        lines = "\n".join(one["file_name"] for one in images)
        (folder / f"Inat_dataset_splits/Inaturalist_{part}_set1.txt").write_text(lines)


def write_inshop(root: Path) -> None:
    folder, rows = root / "inshop", []
    for part, classes in (("train", [1, 2, 3]), ("query", [7, 8, 9]), ("gallery", [7, 8, 9])):
        for name, label in names(folder / "Img/img" / part, classes):
            rows.append(f"img/{part}/{name}    id_{label:08d}    {part}")
    (folder / "Eval").mkdir()
    head = f"{len(rows)}\nimage_name item_id evaluation_status\n"
    (folder / "Eval/list_eval_partition.txt").write_text(head + "\n".join(rows))


def write_msls(root: Path) -> None:
    """Places with images 8 m apart, two with the same numbers in two zones; a query far from everything."""
    for part in ("train/database", "train/queries", "val/database", "val/queries"):
        for place in range(3):
            for n in range(IMAGES):
                at = f"@{500000 + 1000 * (place // 2) + 8 * n}.00@6170000.5@{33 - place % 2}@U"
                photo(root / "msls/images" / part / f"{at}@@@key{n}@@@@@@@@.jpg", place)
    photo(root / "msls/images/val/queries/@100000.00@100000.00@33@U@@@far@@@@@@@@.jpg", 0)


def write_folder(root: Path) -> None:
    names(root, [1, 2, 3, 4, 5, 6])


def write_cifar(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        pixels = np.arange(20 * 3072).reshape(20, 3072).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [n % 10 for n in range(20)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"thing {k}" for k in range(10)]}))
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3, 15)).astype(np.uint8)
    savemat(root / "test_32x32.mat", {"X": pixels, "y": np.arange(1, 16)[:, None] % 10})


SETS = {
    # reader: writers, its table, and the classes that train and that are searched
    "cub200": ([write_cub, write_cars], "3", CLASSES[:3], CLASSES[3:]),
    "cars196": ([write_kaggle_cars, write_cub], "3", CARS[:3], CARS[3:]),
    "lfw": ([write_lfw, write_cub], "3", [0, 1, 2], [3, 4, 5]),
    "sop": ([write_sop], "3", [1, 2, 3], [4, 5, 6]),
    "inaturalist": ([write_inaturalist], "3", [1, 2, 3], [4, 5, 6]),
    "inshop": ([write_inshop], "3", [1, 2, 3], [7, 8, 9]),
    "folder": ([write_folder], "3", [0, 1, 2], [3, 4, 5]),
    "cifar10": ([write_cifar], "2", list(range(10)), list(range(10))),
    "msls": ([write_msls], "4", None, None),
}


class Trunk(nn.Module):
    """Stands for ResNet-50, whose 25 million weights would be most of a test's time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.avgpool, self.fc = nn.Conv2d(3, 2048, 5, stride=8), nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.avgpool(self.conv(x).relu()))


def test_photographs_are_drawn_in_colour(tmp_path: Path) -> None:
    write_folder(tmp_path)
    data = load_data("folder", tmp_path, size=16)
    curves = {"scores": {"own": (torch.arange(12.0), None)}, "precision_at_1": torch.ones(12)}
    figure = plots.draw_images(data, curves, "made up")
    assert len(figure.axes) == 20  # no images out of distribution
    assert all(axes.images[0].get_array().shape == (16, 16, 3) for axes in figure.axes)
    plots.plt.close(figure)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made up has no published checksum, and needs no large network."""
    for module in ("cifar", "svhn"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.lfw._LFW._check_integrity", lambda _: True)
    monkeypatch.setattr("torchvision.models.resnet50", lambda **_: Trunk())
    monkeypatch.setattr(plots, "draw_all", lambda *_: None)


@pytest.mark.parametrize("name", SETS)
def test_a_made_up_set_becomes_a_table(name: str, tmp_path: Path) -> None:
    writers, table, trained, searched = SETS[name]
    for write in writers:
        write(tmp_path)
    data = load_data(name, tmp_path, size=16)
    assert data.open_set is (table != "2")
    assert (data.ood is None) is (DATASETS[name].ood == "none")
    if trained:
        assert (data.train.targets.unique().tolist(), data.test.targets.unique().tolist()) == (trained, searched)
    if table != "2":
        assert len(data.test) == len(searched or range(3)) * IMAGES  # the query far from everything has left
        assert data.gallery is None or not {*data.test.paths} & {*data.gallery.paths}
        assert all("quer" in path for path in data.test.paths) is (data.gallery is not None)
        labels, images = classes_of(data.test.targets, 500.0), data.test.images(range(len(data.test)))
        blue = [images[labels == label, 2].mean((1, 2)) for label in labels.unique()]
        assert all(float(one.max() - one.min()) < 0.2 for one in blue)  # an image has the label of its folder
        assert float(torch.stack([one.mean() for one in blue]).sort().values.diff().min()) > 0.4
    options = ["--table", table, "--data", name, "--data-root", str(tmp_path), "--out", str(tmp_path / "run")]
    options += ["--epochs", "1", "--dim", "3", "--image-size", "16", "--batch-size", "8", "--n-samples", "3"]
    options += ["--seeds", "0", "1", "--quiet", "--weights", "none", "--protocol", "paper"]
    assert run.main([*options, "--methods", "deterministic", "pfe", "laplace_posthoc_diag", "laplace_online"]) == 0
    rows = json.loads((tmp_path / "run/results.json").read_text())["rows"]
    assert all(row["seeds"] == [0, 1] for row in rows.values())
    missing = set() if data.ood else {"auroc", "auprc"} & plan.COLUMNS[table].keys()
    assert plan.COLUMNS[table].keys() - rows["laplace_online"]["figures"].keys() == missing
    text = (tmp_path / "run/results.md").read_text()
    assert text.count("| *paper* |") == (3 if plan.paper_rows(table, name) else 0)
    print(text)


def test_places_are_the_same_within_metres(tmp_path: Path) -> None:
    write_msls(tmp_path)
    data = load_data("msls", tmp_path)
    at = torch.tensor([[0.0, 0], [6, 8], [10.1, 0], [0, 25], [0, 25.1]], dtype=torch.float64)
    positive, negative = (pairs[0].tolist() for pairs in data.relation(at[:1], at))
    assert (positive, negative) == ([True, True, False, False, False], [False, False, False, False, True])
    assert rank(torch.zeros(1, 1, dtype=torch.long), at[:1], at).n_positives == 4
    assert rank(torch.zeros(12, 1, dtype=torch.long), data.test.targets, data.gallery.targets).n_positives.eq(4).all()


def test_only_training_sees_random_crops(tmp_path: Path) -> None:
    write_folder(tmp_path)
    plain = load_data("folder", tmp_path, size=16).train
    for split, same in ((plain, True), (plain.augmented, False), (plain.augmented.at(16), True)):
        first, second = (split.images([0, 1]) for _ in range(2))
        assert torch.equal(first, second) is same
        assert first.shape == (2, 3, 16, 16)


def test_stanford_cars_and_kaggles_are_the_same_cars(tmp_path: Path) -> None:
    for name, write in (("kaggle", write_kaggle_cars), ("stanford", write_cars)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    kaggle, stanford = (load_data("cars196", tmp_path / name, ood="none") for name in ("kaggle", "stanford"))
    for part in ("train", "test"):
        one, other = (sorted(getattr(data, part).targets.tolist()) for data in (kaggle, stanford))
        assert one == [label + 1 for label in other]  # torchvision counts from 0


def test_cifar_keeps_its_channels(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    data = load_data("cifar10", tmp_path)
    assert torch.equal(data.test.pixels.flatten(1)[0], torch.arange(3072).to(torch.uint8))
    assert (len(data.train), len(data.test), len(data.ood or ())) == (100, 20, 15)


def test_lists_say_which_images_of_a_folder_train(tmp_path: Path) -> None:
    found = [name for name, _ in names(tmp_path, [1, 2])]
    for part, rows in (("train", found[::2]), ("test", found[1::2])):
        (tmp_path / f"{part}.txt").write_text("\n".join(rows))
    data = load_data("folder", tmp_path)
    assert not data.open_set
    assert [Path(path).relative_to(tmp_path).as_posix() for path in data.test.paths] == found[1::2]


def test_rows_of_one_posterior() -> None:
    both, diagonal, default = (
        {row.key for row in plan.table_rows("2", None, one)} for one in (None, "diag", "default")
    )
    lam = {f"laplace_{when}" for when in ("posthoc", "online")}
    assert both - diagonal == lam
    assert both - default == {f"{key}_diag" for key in lam}
    assert all(row.options["posterior"] == "diag" for row in plan.table_rows("1", None, "diag"))
    assert len(plan.table_rows("1", None, "diag")) == 16


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (_, table, *_) in SETS.items():
        assert run.main(["--table", table, "--data", name, "--data-root", str(tmp_path / "nowhere")]) == 2
        assert f"--data-root {tmp_path}/nowhere: expected {DATASETS[name].title}" in capsys.readouterr().err


def test_held_out_images_are_of_other_classes_where_test_images_are(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for data, shared in ((load_data("folder", tmp_path), 0), (load_data("digits", tmp_path), 10)):
        held = hold_out(data)
        assert len(held.train) + len(held.selection) == len(data.train)
        both = set(held.train.targets.tolist()) & set(held.selection.targets.tolist())
        assert len(both) == shared


def test_the_checkpoint_is_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(1, 1, bias=False)
            self.register_buffer("epoch", torch.zeros(()))

        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            self.epoch += 1
            return self.encoder(x).square().mean()

    for scores, chosen in (([0.2, 0.9, 0.1], 2), ([0.2, 0.3, 0.4], 3), (None, 3)):
        step, left = Step(), iter(scores or ())
        monkeypatch.setattr(training, "map_at_5", lambda *_, left=left: next(left))
        batches = [(torch.ones(2, 1), torch.zeros(2))]
        selection = None if scores is None else load_data("digits", Path()).test
        training.run_training(training.Setting(epochs=3, progress=False), step, batches, 0.1, selection)
        assert int(step.epoch) == chosen


def test_each_protocol_trains_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watched(torch.optim.RMSprop):
        def step(self, closure=None):
            seen.append((self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]))
            return super().step(closure)

    class Step(nn.Linear):
        optimizer = Watched

        def forward(self, x, _):
            return super().forward(x).square().mean()

    for protocol, rate, decay, weight_decay in (
        ("paper", 0.1, 0.1, 0),
        ("clean", 0.1, 0.1, 0),
        ("released", 6.4, 0.01, 1e-5),
    ):
        seen.clear()
        setting = training.Setting(epochs=2, progress=False, protocol=protocol)
        training.run_training(setting, Step(3, 2), [(torch.ones(4, 3), torch.ones(4))], 0.1)
        (first, kept), (second, _) = seen
        assert (first, kept, second) == pytest.approx((rate, weight_decay, rate * np.exp(-decay)))
    targets = torch.tensor([7, 5, 7, 5, 9, 7])
    setting = training.Setting(per_class=2, batch_size=8, protocol="released")
    ((rows, _),) = training.training_loader(setting, [(row, 0) for row in range(6)], targets, 0, collate_fn=None)
    assert sorted(zip(rows[::2].tolist(), rows[1::2].tolist(), strict=True)) == [(2, 0), (3, 1), (5, 0)]


def test_weights_are_read_from_a_file(tmp_path: Path) -> None:
    trunk = Trunk()
    torch.save(trunk.state_dict(), tmp_path / "trunk.pt")
    network = training.make_network("resnet50", 5, weights=str(tmp_path / "trunk.pt")).eval()
    x = torch.rand(2, 3, 32, 32)
    pooled = trunk.conv(x).relu().clamp(min=1e-6).pow(3).mean((-2, -1)).pow(1 / 3)
    torch.testing.assert_close(network(x), network.head(pooled))
