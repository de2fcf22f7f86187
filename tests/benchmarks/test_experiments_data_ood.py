"""Any data set can stand for what an encoder does not know."""

import numpy as np
import pytest
import torch
from benchmark_data_files import write_cub, write_lfw, write_mnist
from hypothesis import given
from hypothesis import strategies as st
from tables import each

from benchmarks.experiments import cli
from benchmarks.experiments.data import TensorSplit, load_data
from benchmarks.experiments.data.ood import SizedSplit
from benchmarks.experiments.data.photos import IMAGENET_DEVIATION, IMAGENET_MEAN
from benchmarks.experiments.data.registry import DATASETS, NONE, OUTSIDE, SHUFFLED
from contrastive_curvature.errors import InputError, UnsupportedError

MEAN, DEVIATION = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_DEVIATION))


def in_memory(n=5, channels=1, side=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, channels, side, side), dtype=torch.uint8, generator=generator)
    return TensorSplit(pixels, torch.arange(n))


def test_faces_need_no_birds(tmp_path):
    write_lfw(tmp_path)
    write_mnist(tmp_path, "MNIST", {"t10k": 6})
    data = load_data("lfw", tmp_path, ood="mnist", image_size=32)
    assert data.ood_title == "MNIST"
    assert data.ood.images([0, 3]).shape == data.test.images([0, 1]).shape
    assert load_data("lfw", tmp_path, ood=NONE).ood is None


def test_colours_become_grey_values_of_the_encoders_size(tmp_path):
    write_cub(tmp_path)  # pictures of one shade, the class's number
    write_mnist(tmp_path, "FashionMNIST", {"train": 12, "t10k": 7})
    data = load_data("fashionmnist", tmp_path, ood="cub200")
    images = data.ood.images(range(len(data.ood)))
    assert images.shape[1:] == (1, 28, 28)
    assert np.allclose(images.mean((1, 2, 3)) * 255, data.ood.targets + 1, atol=2)


def test_the_data_sets_own_is_left_as_it_is(tmp_path):
    digits = write_mnist(tmp_path, "MNIST", {"t10k": 6})
    write_mnist(tmp_path, "FashionMNIST", {"train": 12, "t10k": 7})
    named, own = (load_data("fashionmnist", tmp_path, ood=name) for name in ("mnist", None))
    assert torch.equal(own.ood.pixels.squeeze(1), digits["t10k"])
    assert named.fingerprint() == own.fingerprint()
    assert named.fingerprint() != load_data("fashionmnist", tmp_path, ood=SHUFFLED).fingerprint()


def test_parts_of_what_is_outside_are_cut_as_the_test_is(tmp_path):
    write_mnist(tmp_path, "MNIST", {"t10k": 60})
    data = load_data("digits", tmp_path, ood="mnist", test_size=20)
    assert isinstance(data.ood, SizedSplit)
    assert (len(data.ood), data.ood.images([19]).shape) == (20, (1, 1, 8, 8))


@given(
    channels=st.sampled_from([1, 3]), side=st.integers(8, 20), wanted=st.sampled_from([1, 3]), seed=st.integers(0, 99)
)
def test_images_are_sized_to_the_encoder(channels, side, wanted, seed):
    source = in_memory(channels=channels, side=side, seed=seed)
    plain = SizedSplit(source, (wanted, 8, 8), False, False).images(range(5))
    assert plain.shape == (5, wanted, 8, 8)
    assert 0 <= float(plain.min()) <= float(plain.max()) <= 1
    # A constant image stays what it is, whatever its size.
    flat = TensorSplit(torch.full((1, channels, side, side), 51, dtype=torch.uint8), torch.zeros(1))
    assert torch.allclose(SizedSplit(flat, (wanted, 8, 8), False, False).images([0]), torch.tensor(0.2), atol=1e-6)
    if wanted == 3:
        normal = SizedSplit(source, (3, 8, 8), False, True).images(range(5))
        assert torch.allclose(normal * DEVIATION + MEAN, plain, atol=1e-6)
    if channels == wanted == 3 and side == 8:
        assert torch.equal(plain, source.images(range(5)))


@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_parts_of_sized_images_are_the_same_images(rows):
    whole = SizedSplit(in_memory(channels=3), (1, 6, 6), False, False)
    part = whole.take(torch.tensor(rows))
    assert torch.equal(part.images(range(len(rows))), whole.images(rows))
    assert part.targets.tolist() == rows


def test_fingerprints_tell_sizes_apart():
    source = in_memory()
    made = [SizedSplit(source, shape, False, False).fingerprint() for shape in ((1, 6, 6), (1, 7, 7), (3, 6, 6))]
    assert len({*made, source.fingerprint()}) == 4


@each("name", ["birds", "", "digits"])
def test_unknown_names_and_the_known_images_are_refused(name):
    with pytest.raises(InputError, match=r"ood: expected (one of|other images)"):
        load_data("digits", "", ood=name)


def test_quarters_of_photographs_are_not_shuffled(tmp_path):
    write_lfw(tmp_path)
    with pytest.raises(UnsupportedError, match="in memory"):
        load_data("lfw", tmp_path, ood=SHUFFLED)


def test_defaults_can_be_named():
    assert {entry.ood for entry in DATASETS.values()} <= {*OUTSIDE, SHUFFLED, NONE}


def test_a_table_takes_what_is_unknown_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.experiments.plots.draw_all", lambda *_: None)
    write_mnist(tmp_path, "MNIST", {"t10k": 60})
    options = ["--table", "2", "--data", "digits", "--ood", "mnist", "--train-size", "100", "--test-size", "40"]
    options += ["--epochs", "1", "--n-samples", "2", "--methods", "deterministic", "norm", "--quiet"]
    assert cli.main([*options, "--data-root", str(tmp_path), "--out", str(tmp_path / "run")]) == 0
    assert "# Table 2: Digits; out of distribution: MNIST" in (tmp_path / "run" / "results.md").read_text()
    assert cli.main([*options[:4], *options[6:], "--data-root", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
