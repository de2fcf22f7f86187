"""The data sets, in small files of the formats in which they are published."""

import csv
import gzip
import shutil
import struct
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.experiments.data import load_data
from benchmarks.experiments.data.photos import IMAGENET_DEVIATION, IMAGENET_MEAN
from benchmarks.experiments.data.places import TEST_CITIES, TRAINING_CITIES
from contrastive_curvature.errors import InputError


def write_idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(head + values.numpy().tobytes()))


def write_mnist(root, name, counts, seed=0):
    """Random images of the published size; the labels count up."""
    made = {}
    for prefix, n in counts.items():
        generator = torch.Generator().manual_seed(seed + n)
        made[prefix] = torch.randint(256, (n, 28, 28), dtype=torch.uint8, generator=generator)
        write_idx(root / name / "raw" / f"{prefix}-images-idx3-ubyte.gz", made[prefix])
        write_idx(root / name / "raw" / f"{prefix}-labels-idx1-ubyte.gz", (torch.arange(n) % 10).to(torch.uint8))
    return made


def write_omniglot(root, archives, drawing):
    folder = root / "omniglot"
    folder.mkdir(parents=True, exist_ok=True)
    for number, alphabets in archives.items():
        with zipfile.ZipFile(folder / f"images_background_small{number}.zip", "w") as archive:
            for alphabet, characters in alphabets.items():
                for character in range(1, characters + 1):
                    for n in range(1, 4):
                        png = BytesIO()
                        drawing(alphabet, character, n).save(png, "PNG")
                        name = f"character{character:02d}/{character:04d}_{n:02d}.png"
                        archive.writestr(f"images_background_small{number}/{alphabet}/{name}", png.getvalue())


def paint(path, shade=128):
    """A grey picture, 24x20; its shade tells it from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 20), (shade,) * 3).save(path, quality=95)


def write_cub(root, classes=(1, 2, 100, 101, 102, 200)):
    """Two images a class, of the shade of its number; the lists in the published format."""
    folder = root / "CUB_200_2011"
    lines = [(c, f"{c:03d}.Bird_{c}/Bird_{c}_{n:04d}.jpg") for c in classes for n in (1, 2)]
    for c, name in lines:
        paint(folder / "images" / name, c)
    (folder / "images.txt").write_text("".join(f"{i} {name}\n" for i, (_, name) in enumerate(lines, 1)))
    (folder / "image_class_labels.txt").write_text("".join(f"{i} {c}\n" for i, (c, _) in enumerate(lines, 1)))
    return folder


def write_cars(root, parts=((1, 98, 99), (99, 196))):
    from scipy.io import savemat

    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    tables = ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat")
    for table, images, classes in zip(tables, ("cars_train", "cars_test"), parts, strict=True):
        rows = np.zeros(len(classes), dtype=[("bbox_x1", object), ("class", object), ("fname", object)])
        for n, c in enumerate(classes):
            rows[n] = (np.uint8(3), np.uint8(c), f"{n + 1:05d}.jpg")
            paint(folder / images / f"{n + 1:05d}.jpg", c)
        savemat(folder / table, {"annotations": rows.reshape(1, -1)})
    return folder


def write_lfw(root, images="lfw-deepfunneled"):
    folder = root / "lfw-py"
    for part, people in {"Train": {"Ada_B": 2, "Cy_D": 1}, "Test": {"Eve_F": 3}}.items():
        folder.mkdir(exist_ok=True)
        lines = [f"{name}\t{count}" for name, count in people.items()]
        (folder / f"peopleDev{part}.txt").write_text("\n".join([str(len(lines)), *lines]) + "\n")
        for name, count in people.items():
            for n in range(1, count + 1):
                paint(folder / images / name / f"{name}_{n:04d}.jpg", 40 * n)
    return folder


def test_fashionmnist_is_read_as_it_is(tmp_path):
    clothes = write_mnist(tmp_path, "FashionMNIST", {"train": 12, "t10k": 7})
    digits = write_mnist(tmp_path, "MNIST", {"t10k": 5}, seed=9)  # MNIST's training images are not needed
    data = load_data("fashionmnist", tmp_path)
    assert (data.title, data.ood_title, data.open_set, len(data.classes)) == ("FashionMNIST", "MNIST", False, 10)
    for split, pixels in ((data.train, clothes["train"]), (data.test, clothes["t10k"]), (data.ood, digits["t10k"])):
        images = split.images(range(len(split)))
        assert images.dtype == torch.float32
        assert torch.equal(images.squeeze(1), pixels.float() / 255)
        assert torch.equal(split.targets, torch.arange(len(split)) % 10)


def blank_with_ink(alphabet, character, n):
    """A one-bit drawing: paper is 1, ink is 0, and the upper third is ink."""
    pixels = np.ones((105, 105), dtype=bool)
    pixels[:35] = False
    return Image.fromarray(pixels)


ALPHABETS = {1: {"Greek": 2, "Korean": 3}, 2: {"Greek": 2, "Sanskrit": 1, "Tagalog": 4}}


def test_omniglot_tests_on_new_alphabets_with_bright_ink(tmp_path):
    write_omniglot(tmp_path, ALPHABETS, blank_with_ink)
    digits = write_mnist(tmp_path, "MNIST", {"t10k": 6})
    data = load_data("omniglot", tmp_path)
    assert data.open_set
    assert data.train.targets.tolist() == [label for label in range(5) for _ in range(3)]
    # Sanskrit and Tagalog; Greek was seen in training
    assert data.test.targets.tolist() == [label for label in range(5, 10) for _ in range(3)]
    images = data.test.images(range(15))
    assert images.shape == (15, 1, 28, 28)
    assert bool((images[:, :, :9] == 1).all())
    assert bool((images[:, :, 10:] == 0).all())
    assert torch.equal(data.ood.images(range(6)).squeeze(1), digits["t10k"].float() / 255)


SIZE = 16
MEAN, DEVIATION = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_DEVIATION))


def shades(split):
    """The shade of each image, from what a network would see."""
    images = split.images(range(len(split))) * DEVIATION + MEAN
    assert images.shape[1:] == (3, SIZE, SIZE)
    assert bool((images.flatten(1).std(1) < 0.01).all())
    return (images.mean((1, 2, 3)) * 255).round().int().tolist()


def test_cub200_is_split_by_class_and_cars_are_the_last_98(tmp_path):
    write_cub(tmp_path)
    write_cars(tmp_path)
    data = load_data("cub200", tmp_path, image_size=SIZE)
    assert (data.title, data.ood_title, data.open_set) == ("CUB200", "CARS196", True)
    assert data.train.targets.tolist() == data.train_plain.targets.tolist() == [0, 0, 1, 1, 99, 99]
    assert data.test.targets.tolist() == [100, 100, 101, 101, 199, 199]
    assert data.ood.targets.tolist() == [98, 98, 195]  # of both official parts
    # every image stands with its own label
    for split in (data.train, data.train_plain, data.test, data.ood):
        assert np.allclose(shades(split), split.targets.numpy() + 1, atol=2)


def test_folders_of_images(tmp_path):
    for name, shade in {"train/b/1.png": 10, "train/a/1.jpg": 20, "train/a/2.JPG": 30, "test/b/x.png": 40}.items():
        paint(tmp_path / name, shade)
    (tmp_path / "train/a/notes.txt").write_text("no image")
    data = load_data("folder", tmp_path, image_size=SIZE)
    assert (data.open_set, data.ood, data.classes) == (False, None, ("a", "b"))
    assert data.train.targets.tolist() == [0, 0, 1]
    assert np.allclose(shades(data.train_plain), [20, 30, 10], atol=2)
    assert data.test.targets.tolist() == [1]
    paint(tmp_path / "ood/deep/down/1.png", 50)
    paint(tmp_path / "ood/0.png", 60)
    assert sorted(shades(load_data("folder", tmp_path, image_size=SIZE).ood)) == [50, 60]
    paint(tmp_path / "test/c/x.png")
    with pytest.raises(InputError, match="got both: 'b' is in training, 'c' is not"):
        load_data("folder", tmp_path)
    shutil.rmtree(tmp_path / "test/b")
    opened = load_data("folder", tmp_path)
    assert (opened.open_set, opened.classes) == (True, ())
    assert not set(opened.train.targets.tolist()) & set(opened.test.targets.tolist())


def test_an_archive_is_read_as_its_folder(tmp_path):
    folder = write_lfw(tmp_path)
    plain = load_data("lfw", tmp_path, ood="none", image_size=16)
    images, mark = plain.test.images([0, 1, 2]), plain.fingerprint()
    shutil.make_archive(str(folder / "lfw-deepfunneled"), "zip", folder, "lfw-deepfunneled")
    shutil.rmtree(folder / "lfw-deepfunneled")
    packed = load_data("lfw", tmp_path, ood="none", image_size=16)
    assert mark == packed.fingerprint()
    assert torch.equal(images, packed.test.images([0, 1, 2]))
    assert plain.train.targets.tolist() == packed.train.targets.tolist()
    assert not (folder / "lfw-deepfunneled").exists()  # nothing was unpacked


COLUMNS = ["", "key", "easting", "northing", "control_panel", "unique_cluster", "night", "view_direction"]
RAW = ["", "key", "lon", "lat", "ca", "captured_at", "pano"]


def write_table(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_side(folder, frames):
    """Frames (key, easting, northing, pano) as Mapillary publishes them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for key, *_ in frames:
        Image.new("RGB", (6, 4)).save(folder / "images" / f"{key}.jpg")
    rows = [[n, key, e, u, False, n, False, "Forward"] for n, (key, e, u, _) in enumerate(frames)]
    write_table(folder / "postprocessed.csv", COLUMNS, rows)
    write_table(folder / "raw.csv", RAW, [[n, f[0], 0.1, 0.2, 0, "2019-01-01", f[3]] for n, f in enumerate(frames)])


EAST, NORTH = 347000.0, 6173000.0  # UTM coordinates of the size of Copenhagen's
QUERIES = [("q0", EAST, NORTH, False), ("q1", EAST + 1000, NORTH, False), ("q2", EAST, NORTH + 1, True)]
DATABASE = [("d0", EAST, NORTH + 24.9, False), ("d1", EAST + 1000, NORTH + 25.1, False), ("d2", EAST, NORTH, True)]


@pytest.fixture
def msls(tmp_path):
    """All cities, at the same coordinates. In each, one query has one right answer."""
    root = tmp_path / "msls" / "train_val"
    for city in (*TRAINING_CITIES, *TEST_CITIES):
        write_side(root / city / "query", QUERIES)
        write_side(root / city / "database", DATABASE)
    return tmp_path


def test_msls_leaves_out_panoramas_and_queries_without_an_answer(msls):
    data = load_data("msls", msls, image_size=8)
    assert (data.ood, data.train_plain, data.open_set) == (None, None, True)
    assert (len(TRAINING_CITIES), len(set(TRAINING_CITIES) | set(TEST_CITIES))) == (22, 24)
    assert len(data.train) == 22 * 4  # queries and database
    assert [f"{p.parts[-4]} {p.stem}" for p in data.test.paths] == ["cph q0", "sf q0"]
    assert [f"{p.parts[-4]} {p.stem}" for p in data.gallery.paths] == ["cph d0", "cph d1", "sf d0", "sf d1"]
    assert data.test.targets.dtype == torch.float64
    assert data.train.images([0, 5]).shape == (2, 3, 8, 8)
    # equal coordinates in another city are another place
    relevant, other = data.relevance(data.test.targets, data.gallery.targets)
    assert relevant.tolist() == [[True, False, False, False], [False, False, True, False]]
    assert torch.equal(other, ~relevant)
    assert (data.test.targets[0] - data.gallery.targets[0]).abs().tolist() == pytest.approx([0, 24.9], abs=1e-6)
