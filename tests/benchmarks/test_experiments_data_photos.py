import shutil

import numpy as np
import pytest
import torch
from benchmark_data_files import paint, write_cars, write_cub, write_lfw
from PIL import Image

from benchmarks.experiments.data import load_data
from benchmarks.experiments.data.photos import augmented, cropped, squeezed
from contrastive_curvature.errors import InputError

SIZE = 16
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


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


def test_parts_keep_the_plain_images_beside_the_augmented(tmp_path):
    write_cub(tmp_path)
    write_cars(tmp_path)
    data = load_data("cub200", tmp_path, image_size=SIZE, train_size=4, test_size=2)
    assert (len(data.train), len(data.test), len(data.ood)) == (4, 2, 2)
    assert data.train.paths == data.train_plain.paths
    assert data.train.transform is not data.train_plain.transform
    assert np.allclose(shades(data.train_plain), data.train_plain.targets.numpy() + 1, atol=2)


def test_the_size_of_photographs_is_the_papers(tmp_path):
    write_cub(tmp_path)
    write_cars(tmp_path)
    data = load_data("cub200", tmp_path)
    assert data.train.images([0]).shape == data.ood.images([0]).shape == (1, 3, 224, 224)


def test_lfw_is_split_by_people_and_birds_are_the_test_classes(tmp_path):
    write_cub(tmp_path)
    write_lfw(tmp_path)
    data = load_data("lfw", tmp_path, image_size=SIZE)
    assert (data.title, data.ood_title, data.open_set) == ("LFW", "CUB200", True)
    assert data.train.targets.tolist() == [0, 0, 1]
    assert data.test.targets.tolist() == [2, 2, 2]
    assert np.allclose(shades(data.train_plain), [40, 80, 40], atol=2)
    assert np.allclose(shades(data.test), [40, 80, 120], atol=2)
    assert data.ood.targets.tolist() == [100, 100, 101, 101, 199, 199]


@pytest.mark.parametrize("images", ["lfw_funneled", "lfw"])
def test_lfw_takes_every_alignment(images, tmp_path):
    write_cub(tmp_path)
    write_lfw(tmp_path, images)
    assert {path.parent.parent.name for path in load_data("lfw", tmp_path).train.paths} == {images}


def first_line(folder, name, text):
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text(text + "".join(lines[1:]))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "images.txt").unlink(), r"no \S*images\.txt.*CUB_200_2011\.tgz \(MD5"),
        (lambda f: (f / "images/001.Bird_1/Bird_1_0001.jpg").unlink(), r"1 missing, the first \S*Bird_1_0001\.jpg"),
        (lambda f: shutil.rmtree(f / "images/002.Bird_2"), r"all 6 files that the lists name, got 2 missing"),
        (lambda f: first_line(f, "images.txt", ""), "expected the same images, got 11 and 12"),
        (lambda f: first_line(f, "images.txt", "1 a b\n"), "lines of two words, got 1 a b"),
        (lambda f: first_line(f, "image_class_labels.txt", "1 x\n"), "classes counted from 1, got 'x' of image 1"),
        (lambda f: first_line(f, "image_class_labels.txt", "1 0\n"), "classes counted from 1, got '0' of image 1"),
        (lambda f: (f / "images.txt").write_text(""), "expected lines, got an empty file"),
        (lambda f: (f / "images.txt").write_bytes(b"\xff\xfe\xff"), "expected text"),
    ],
)
def test_incomplete_birds_are_refused(spoil, says, tmp_path):
    write_cars(tmp_path)
    spoil(write_cub(tmp_path))
    with pytest.raises(InputError, match=says):
        load_data("cub200", tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: shutil.rmtree(f / "cars_test"), r"no \S*cars_test\. .*torchvision does not fetch them"),
        (lambda f: (f / "cars_test_annos_withlabels.mat").write_bytes(b"MATLAB" * 40), "annotations with the fields"),
        (lambda f: (f / "cars_test_annos_withlabels.mat").write_bytes(b""), "annotations with the fields"),
        (lambda f: (f / "cars_test/00002.jpg").unlink(), r"1 missing, the first \S*cars_test\S*00002\.jpg"),
    ],
)
def test_incomplete_cars_are_refused(spoil, says, tmp_path):
    write_cub(tmp_path)
    spoil(write_cars(tmp_path))
    with pytest.raises(InputError, match=says):
        load_data("cub200", tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "peopleDevTest.txt").unlink(), r"no \S*peopleDevTest\.txt.*no library fetches the lists"),
        (lambda f: shutil.rmtree(f / "lfw-deepfunneled"), "one of the folders lfw_funneled, lfw-deepfunneled, lfw,"),
        (lambda f: shutil.rmtree(f / "lfw-deepfunneled/Cy_D"), r"1 missing, the first \S*Cy_D_0001\.jpg"),
        (lambda f: first_line(f, "peopleDevTrain.txt", "3\n"), "as many people as its first line states, got 2"),
        (lambda f: first_line(f, "peopleDevTrain.txt", "2\nx\n"), "a name and a number of images, got x"),
        (lambda f: first_line(f, "peopleDevTest.txt", "2\nCy_D\t1\n"), "different people, got Cy_D in both"),
    ],
)
def test_incomplete_faces_are_refused(spoil, says, tmp_path):
    write_cub(tmp_path)
    spoil(write_lfw(tmp_path))
    with pytest.raises(InputError, match=says):
        load_data("lfw", tmp_path)


def test_a_damaged_photograph_is_named(tmp_path):
    write_cars(tmp_path)
    path = write_cub(tmp_path) / "images/001.Bird_1/Bird_1_0001.jpg"
    path.write_bytes(path.read_bytes()[:300])
    data = load_data("cub200", tmp_path, image_size=SIZE)
    with pytest.raises(InputError, match=r"Bird_1_0001\.jpg: expected an image file, got one that cannot be read"):
        data.train.images([0])
    assert data.train.images([1]).shape == (1, 3, SIZE, SIZE)


def test_the_birds_are_downloaded_with_their_checksum_if_there_are_none(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    asked = []

    def archive(url, root, md5):
        asked.append((url, md5))
        write_cub(tmp_path)

    monkeypatch.setattr(utils, "download_and_extract_archive", archive)
    write_cars(tmp_path)
    with pytest.raises(InputError, match=r"bird_images\(Path\(.*\), True, test=True\)"):
        load_data("cub200", tmp_path)
    assert len(load_data("cub200", tmp_path, download=True).test) == 6
    load_data("cub200", tmp_path, download=True)
    assert asked == [
        ("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78")
    ]


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


def test_incomplete_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no \S*train, \S*test\. Put the images there"):
        load_data("folder", tmp_path)
    paint(tmp_path / "train/a/1.png")
    (tmp_path / "test/a").mkdir(parents=True)
    with pytest.raises(InputError, match="test: expected a folder of images for each class"):
        load_data("folder", tmp_path)
    paint(tmp_path / "test/a/1.png")
    (tmp_path / "ood").mkdir()
    with pytest.raises(InputError, match=r"images: expected at least one, got none\. Remove the empty folder"):
        load_data("folder", tmp_path)


def test_crops_keep_the_centre_and_squeezing_keeps_all():
    # 56x28: black, with a white square of 14 in the middle and a white column at the left edge
    pixels = np.zeros((28, 56, 3), dtype=np.uint8)
    pixels[7:21, 21:35] = pixels[:, :7] = 255
    image = Image.fromarray(pixels)
    centre = cropped(28)(image) * DEVIATION + MEAN
    assert centre[:, 14, 14].allclose(torch.ones(3), atol=1e-2)
    assert centre[:, :, 0].abs().max() < 0.02
    whole = squeezed(28)(image) * DEVIATION + MEAN
    assert whole[:, :, 0].allclose(torch.ones(3, 28), atol=0.02)
    # both scale before they cut: 14 of 28 pixels are 16 of 32
    assert int((centre[0, 14] > 0.5).sum()) == 16


def test_augmentation_follows_torchs_generator():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    change = augmented(SIZE)
    views = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        views.append(change(image))
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    # a flip, and nothing else, turns a crop of the whole image round
    whole = augmented(40)
    whole.transforms[0].scale = whole.transforms[0].ratio = (1.0, 1.0)
    seen = [whole(image) for _ in range(20)]
    plain = squeezed(40)(image)
    assert {bool(torch.equal(view, plain)) for view in seen} == {True, False}
    assert all(torch.equal(view, plain) or torch.equal(view.flip(2), plain) for view in seen)
