import pickle

import numpy as np
import pytest
import torch
from benchmark_data_files import write_mnist
from hypothesis import given
from hypothesis import strategies as st
from tables import each

from benchmarks.experiments.data import TensorSplit, load_data, loader
from contrastive_curvature.errors import InputError


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


def test_missing_idx_files_are_named_with_the_command(tmp_path):
    write_mnist(tmp_path, "FashionMNIST", {"train": 3, "t10k": 3})
    with pytest.raises(InputError, match=r"MNIST.raw: .*no t10k-images-idx3-ubyte, t10k-labels.*import MNIST; MNIST\("):
        load_data("fashionmnist", tmp_path)
    assert not (tmp_path / "MNIST").exists()  # nothing was fetched
    (tmp_path / "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    # nor is anything over files that are there
    with pytest.raises(InputError, match=r"no t10k-labels-idx1-ubyte\. .*replaces what is there"):
        load_data("fashionmnist", tmp_path, download=True)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """CIFAR10's pickles and SVHN's matrices in small; what torchvision checks them against is taken from them."""
    from scipy.io import savemat
    from torchvision.datasets import CIFAR10, SVHN

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    for batch, (name, _) in zip(pixels, CIFAR10.train_list + CIFAR10.test_list, strict=True):
        (folder / name).write_bytes(pickle.dumps({"data": batch, "labels": [3, 1, 4, 1]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class{n}" for n in range(10)]}))
    numbers = np.random.default_rng(1).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    savemat(tmp_path / "test_32x32.mat", {"X": numbers, "y": np.array([[10], [1], [2], [3], [9]], dtype=np.uint8)})
    for table in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, table, [[name, None] for name, _ in getattr(CIFAR10, table)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})
    monkeypatch.setattr(SVHN, "split_list", {"test": [None, "test_32x32.mat", None]})
    return tmp_path, pixels, numbers


def test_cifar10_and_svhn_are_read(cifar):
    root, pixels, numbers = cifar
    data = load_data("cifar10", root)
    assert (data.title, data.ood_title) == ("CIFAR10", "SVHN")
    assert data.classes[4] == "class4"
    wanted = torch.from_numpy(pixels).reshape(24, 3, 32, 32).float() / 255
    assert torch.equal(data.train.images(range(20)), wanted[:20])
    assert torch.equal(data.test.images(range(4)), wanted[20:])
    assert data.train.targets.tolist() == [3, 1, 4, 1] * 5
    assert torch.equal(data.ood.images(range(5)), torch.from_numpy(numbers).permute(3, 2, 0, 1).float() / 255)
    assert data.ood.targets.tolist() == [0, 1, 2, 3, 9]


def test_digits_split_is_fixed_and_disjoint():
    first, again = load_data("digits", ""), load_data("digits", "")
    assert first.fingerprint() == again.fingerprint()
    assert (len(first.train), len(first.test), len(first.ood)) == (1197, 600, 600)
    images = first.train.images(range(1197))
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    counts = torch.bincount(first.test.targets)
    assert int(counts.max() - counts.min()) <= 4
    seen = {tuple(image.flatten().tolist()) for image in first.train.pixels}
    assert not any(tuple(image.flatten().tolist()) in seen for image in first.ood.pixels)
    # Out of distribution is nothing but the test images in another arrangement.
    kept = [part.pixels.flatten(1).sort(1).values for part in (first.test, first.ood)]
    assert torch.equal(*kept)


@each("train, test", [(2, 2), (1197, 600), (300, 77)])
def test_parts_are_fixed_and_images_keep_their_labels(train, test):
    whole, part, again = (
        load_data("digits", "", **sizes) for sizes in ({}, *[{"train_size": train, "test_size": test}] * 2)
    )
    assert (len(part.train), len(part.test), len(part.ood)) == (train, test, test)
    for name in ("train", "test", "ood"):
        every, some, same = (getattr(data, name) for data in (whole, part, again))
        assert torch.equal(some.pixels, same.pixels)
        keys = [
            (*pixels.flatten().tolist(), label)
            for pixels, label in zip(every.pixels, every.targets.tolist(), strict=True)
        ]
        chosen = [
            (*pixels.flatten().tolist(), label)
            for pixels, label in zip(some.pixels, some.targets.tolist(), strict=True)
        ]
        assert set(chosen) <= set(keys)
        assert all(chosen.count(key) <= keys.count(key) for key in set(chosen[:5]))
    if train == 1197:
        assert torch.equal(whole.train.pixels, part.train.pixels)


@each(
    "name, options, says",
    [
        ("imagenet", {}, "name: expected one of 'digits', 'fashionmnist'"),
        ("digits", {"train_size": 1198}, "train_size: expected at most the 1197 images"),
        ("digits", {"test_size": 601}, "test_size: expected at most the 600 images"),
        ("digits", {"image_size": 16}, "image_size for 'digits': expected None, got 16.*omniglot"),
        ("omniglot", {"image_size": 7}, "image_size: expected a whole number of pixels, at least 8"),
    ],
)
def test_refusals_come_before_any_file(name, options, says, tmp_path):
    with pytest.raises(InputError, match=says):
        load_data(name, tmp_path, **options)


@given(n=st.integers(2, 40), batch=st.integers(1, 15), seed=st.integers(0, 2**31))
def test_the_loader_gives_every_image_once(n, batch, seed):
    split = TensorSplit(torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n), white=16)
    batches = loader(split, batch, shuffle=True, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        assert sorted(y.tolist()) == list(range(n))
        assert torch.equal(x.flatten(), y.float() / 16)
