import numpy as np
import pytest
import torch
from benchmark_data_files import write_mnist, write_omniglot
from PIL import Image
from torch.nn.functional import avg_pool2d

from benchmarks.experiments.data import load_data
from contrastive_curvature.errors import InputError


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


def test_omniglot_shrinks_by_area(tmp_path):
    rng = np.random.default_rng(0)
    drawn = []

    def scribble(*_):
        drawn.append(rng.random((105, 105)) < 0.8)
        return Image.fromarray(drawn[-1])

    write_omniglot(tmp_path, ALPHABETS, scribble)
    write_mnist(tmp_path, "MNIST", {"t10k": 3})
    data = load_data("omniglot", tmp_path, image_size=35)
    ink = torch.from_numpy(np.stack(drawn[:15])).logical_not().float().unsqueeze(1)
    assert torch.allclose(data.train.images(range(15)), avg_pool2d(ink, 3), atol=0.5 / 255)
    assert data.ood.images([0]).shape == (1, 1, 35, 35)
    whole = load_data("omniglot", tmp_path, image_size=105)
    assert torch.equal(whole.train.images(range(15)), ink)
    with pytest.raises(InputError, match="image_size: expected at most 105"):
        load_data("omniglot", tmp_path, image_size=106)
