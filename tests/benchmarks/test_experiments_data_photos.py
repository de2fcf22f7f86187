import shutil

import numpy as np
import pytest
import torch
from benchmark_data_files import paint, write_cars, write_cub, write_lfw
from PIL import Image

from benchmarks.experiments.data import load_data
from benchmarks.experiments.data.photos import cropped, squeezed
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


def test_an_archive_is_read_as_its_folder(tmp_path):
    folders = []
    for name in ("folder", "archive"):
        (tmp_path / name).mkdir()
        folders.append(write_lfw(tmp_path / name))
    shutil.make_archive(str(folders[1] / "lfw-deepfunneled"), "zip", folders[1], "lfw-deepfunneled")
    shutil.rmtree(folders[1] / "lfw-deepfunneled")
    plain, packed = (load_data("lfw", folder.parent, ood="none", image_size=16) for folder in folders)
    assert plain.fingerprint() == packed.fingerprint()
    assert torch.equal(plain.test.images([0, 1, 2]), packed.test.images([0, 1, 2]))
    assert plain.train.targets.tolist() == packed.train.targets.tolist()
    assert not (folders[1] / "lfw-deepfunneled").exists()  # nothing was unpacked
