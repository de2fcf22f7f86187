"""Recipes in small: data from random files, networks of few layers, training that learns."""

import numpy as np
import pytest
import torch
from benchmark_data_files import write_lfw, write_mnist, write_omniglot
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from benchmarks.transfer.corruption import KINDS, LEVELS
from benchmarks.transfer.recipes import RECIPES, cifar10, grey
from benchmarks.transfer.recipes.cifar10 import POOLED, CifarResNet, load_weights
from benchmarks.transfer.recipes.image_encoder import (
    Augmented,
    Sizes,
    choose,
    make_inputs,
)
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.errors import InputError

CLASSES = ("bird", "cat", "dog")
WEIGHTS = "pytorch_resnet_cifar10/pretrained_models/resnet56-4bfd9763.th"


def write_photographs(root, each=48):
    rng = np.random.default_rng(0)
    for part, count in (("train", each), ("test", 4)):
        for name in CLASSES:
            folder = root / "CIFAR-10-images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:04d}.jpg")


def write_unknown(root):
    write_omniglot(root, {1: {"Greek": 1}, 2: {"Tifinagh": 2}}, lambda *_: Image.new("1", (105, 105), 1))
    write_lfw(root)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_photographs(root)
    write_unknown(root)
    for name in ("MNIST", "FashionMNIST"):
        write_mnist(root, name, {"train": 130, "t10k": 9}, seed=len(name))
    weights = root / WEIGHTS
    weights.parent.mkdir(parents=True)
    with seeded(0):
        state = {f"module.{name}": value for name, value in CifarResNet(8).state_dict().items()}
    torch.save({"state_dict": state}, weights)
    return root


def same(left, right):
    """Whether two feature files hold the same numbers."""
    flat = [
        {"train": one.train_features, "test": one.test_features, "weight": one.weight, "bias": one.bias}
        | {"labels": one.train_labels, "others": one.test_labels, "rows": one.corrupted_rows}
        | one.unknown
        | one.corrupted
        for one in (left, right)
    ]
    return flat[0].keys() == flat[1].keys() and all(np.array_equal(flat[0][name], flat[1][name]) for name in flat[0])


@pytest.mark.parametrize("name", ["fashionmnist-3-triplet", "mnist-32-supcon"])
def test_grey_images_give_the_same_features_for_the_same_seed(name, data_root, monkeypatch):
    monkeypatch.setattr(grey, "_TRAINING", Training(epochs=1))
    monkeypatch.setattr(grey, "_SIZES", Sizes(5, 6, 2, 4))
    grey._load.cache_clear()
    made = [RECIPES[name].make(data_root, data_root, seed) for seed in (0, 0, 1)]
    data, dim, _ = name.split("-")
    assert made[0].train_features.shape == (5, 9216)
    assert made[0].test_features.shape == (6, 9216)
    assert made[0].weight.shape == (int(dim), 9216)
    assert set(made[0].unknown) == {"omniglot", "mnist" if data == "fashionmnist" else "fashionmnist"}
    assert set(made[0].corrupted) == {(kind, level) for kind in KINDS for level in LEVELS}
    assert same(made[0], made[1])
    assert not np.array_equal(made[0].weight, made[2].weight)
    grey._load.cache_clear()


@pytest.mark.parametrize("name", ["cifar10-paper-16-contrastive", "cifar10-resnet-128-triplet"])
def test_photographs_give_the_same_features_for_the_same_seed(name, data_root, monkeypatch):
    network, dim = name.split("-")[1:3]
    monkeypatch.setitem(cifar10._TRAINING, network, Training(epochs=1))
    monkeypatch.setitem(cifar10._SIZES, network, Sizes(5, 6, 2, 4))
    made = [RECIPES[name].make(data_root, data_root, 0) for _ in range(2)]
    width = {"paper": 9216, "resnet": POOLED}[network]
    assert made[0].train_features.shape == (5, width)
    assert made[0].weight.shape == (int(dim), width)
    assert {name: len(value) for name, value in made[0].unknown.items()} == {
        "fashionmnist": 4,
        "mnist": 4,
        "faces": 3,
        "omniglot": 4,
    }
    assert same(made[0], made[1])


@pytest.mark.parametrize("loss", LOSSES)
def test_training_separates_classes_and_repeats_itself(loss):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 4
    # one axis tells the classes apart, nine louder ones do not
    points = torch.randn(64, 10, generator=generator) * 2
    points[:, 0] = labels * 2 + torch.randn(64, generator=generator) / 20

    def nearest(outputs):
        found = nn.functional.normalize(outputs)
        cosines = (found @ found.T).fill_diagonal_(-2)
        return float((labels[cosines.argmax(1)] == labels).float().mean())

    def fit(seed, epochs):
        with seeded(seed):
            network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
        before = nearest(network(points))
        history = train(network, lambda rows: points[rows], labels, loss, Training(epochs, 1e-2, batch=32), seed)
        assert not network.training
        return before, history, network

    before, history, network = fit(0, 50)
    assert len(history) == 50
    assert before < 0.7
    assert nearest(network(points)) > 0.9
    first, again, other = fit(0, 2), fit(0, 2), fit(1, 2)
    assert first[1] == again[1] != other[1]
    assert all(torch.equal(a, b) for a, b in zip(first[2].parameters(), again[2].parameters(), strict=True))


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    count=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_chosen_rows_are_balanced_and_different(labels, count, seed):
    labels = np.array(labels)
    rows = choose(labels, count, seed)
    assert len(set(rows.tolist())) == len(rows)
    assert np.array_equal(rows, choose(labels, count, seed))
    each = -(-count // len(np.unique(labels)))
    available = np.minimum(np.bincount(labels), each)
    assert len(rows) == min(count, available.sum())
    assert (np.bincount(labels[rows], minlength=len(available)) <= available).all()


@given(height=st.integers(5, 9), width=st.integers(5, 9), seed=st.integers(0, 99))
def test_augmented_images_are_windows_of_the_mirrored_surroundings(height, width, seed):
    images = np.random.default_rng(seed).integers(0, 256, (6, height, width, 3), dtype=np.uint8)
    rows = torch.tensor([4, 0, 4])
    found = Augmented(images, seed)(rows)
    assert torch.equal(found, Augmented(images, seed)(rows))
    for image, row in zip(found, rows, strict=True):
        around = np.pad(images[row], ((4, 4), (4, 4), (0, 0)), mode="reflect")
        windows = [around[i : i + height, j : j + width] for i in range(9) for j in range(9)]
        possible = make_inputs(np.stack([*windows, *(window[:, ::-1] for window in windows)]))
        assert (possible == image).flatten(1).all(1).any()


def test_the_published_residual_network_has_its_number_of_parameters():
    # He et al. 2016, table 6: 0.27, 0.46, 0.66, 0.85 million
    counts = [sum(p.numel() for p in CifarResNet(depth).parameters()) for depth in (20, 32, 44, 56)]
    assert [round(count / 1e6, 2) for count in counts] == [0.27, 0.46, 0.66, 0.85]
    for depth in (2, 55, 58):
        with pytest.raises(InputError, match="depth: expected 6n"):
            CifarResNet(depth)


def test_shortcuts_take_every_other_pixel_and_new_channels_are_zero():
    network = CifarResNet(8).eval()
    block = network.get_submodule("layer2")[0]
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    wanted = torch.zeros(2, 32, 4, 4)
    wanted[:, 8:24] = x[:, :, ::2, ::2].relu()
    assert torch.equal(block(x), wanted)
    same_width = network.get_submodule("layer1")[0]
    nn.init.zeros_(same_width.conv2.weight)
    assert torch.equal(same_width(x), x.relu())


def test_weights_go_where_they_belong_and_others_are_refused(tmp_path):
    path = tmp_path / "weights.th"
    source, target = CifarResNet(8), CifarResNet(8)
    torch.save({"state_dict": {f"module.{name}": value for name, value in source.state_dict().items()}}, path)
    load_weights(target, path, "how")
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    with pytest.raises(InputError, match=r"weights\.th: expected weights of CifarResNet, .*\. how"):
        load_weights(CifarResNet(14), path, "how")
