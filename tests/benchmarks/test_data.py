"""The data sets, in small files of the formats in which they are published."""

import numpy as np
import torch
from benchmark_data_files import write_mnist, write_omniglot
from PIL import Image

from benchmarks.experiments.data import load_data, shuffle_quarters


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


def test_shuffled_quarters_keep_pixels_and_leave_no_side():
    # every quarter has values of its own
    images = torch.arange(4.0).view(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    images = (images + torch.rand(50, 1, 8, 8) / 2).contiguous()
    moved = shuffle_quarters(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved.flatten(1).sort(1).values, images.flatten(1).sort(1).values)
    left, right = images[..., :4].floor(), moved[..., :4].floor()
    assert set(left.unique().tolist()) == {0.0, 2.0}
    assert set(right.unique().tolist()) == {1.0, 3.0}
    assert len(moved.floor().unique(dim=0)) > 1
    assert torch.equal(moved, shuffle_quarters(images, torch.Generator().manual_seed(0)))
    whole = {tuple(image.flatten().tolist()) for image in images[:, 0, :4, :4]}
    quarters = moved[:, 0].reshape(50, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(200, 16)
    assert whole <= {tuple(quarter.tolist()) for quarter in quarters}  # a quarter arrives in one piece
