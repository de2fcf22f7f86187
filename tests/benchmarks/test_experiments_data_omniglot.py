import numpy as np
import torch
from benchmark_data_files import write_mnist, write_omniglot
from PIL import Image

from benchmarks.experiments.data import load_data


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
