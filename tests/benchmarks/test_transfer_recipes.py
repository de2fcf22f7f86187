"""Recipes in small: data from random files, networks of few layers, training that learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmark_data_files import write_lfw, write_mnist, write_omniglot
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.harm import KINDS, LEVELS, harm
from benchmarks.transfer.recipes import RECIPES, cifar10, grey
from benchmarks.transfer.recipes.cifar10 import POOLED, CifarResNet, load_photographs, load_weights, small_resnet
from benchmarks.transfer.recipes.image_encoder import (
    Augmented,
    Known,
    Sizes,
    all_features,
    choose,
    make_inputs,
    unknown_images,
)
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.errors import DivergenceError, InputError

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
        | {"labels": one.train_labels, "others": one.test_labels, "rows": one.harmed_rows}
        | one.unknown
        | one.harmed
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
    assert set(made[0].harmed) == {(kind, level) for kind in KINDS for level in LEVELS}
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


def test_heads_share_one_trunk(data_root, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "_DEPTH", 8)
    monkeypatch.setattr(cifar10, "_SIZES_RESNET56", Sizes(140, 6, 2, 4))
    first = RECIPES["cifar10-resnet56-16-supcon"].make(data_root, tmp_path, 0)
    assert [path.name for path in (tmp_path / "trunks").iterdir()] == ["resnet56-0.npz"]
    monkeypatch.setattr(cifar10, "load_weights", None)  # the trunk is not run again
    second = RECIPES["cifar10-resnet56-128-triplet"].make(data_root, tmp_path, 0)
    assert (first.dim, second.dim, first.features) == (16, 128, 64)
    assert same(first, replace(second, weight=first.weight, bias=first.bias))
    assert same(first, RECIPES["cifar10-resnet56-16-supcon"].make(data_root, tmp_path, 0))


def test_names_are_those_of_the_table():
    assert {f"cifar10-{n}-{d}-{x}" for n in ("paper", "resnet", "resnet56") for d in (16, 128) for x in LOSSES} <= set(
        RECIPES
    )
    assert {f"{n}-{d}-{x}" for n in ("mnist", "fashionmnist") for d in (3, 32, 128) for x in LOSSES} <= set(RECIPES)
    assert all(recipe.name == name and recipe.title for name, recipe in RECIPES.items())
    assert len({recipe.title for recipe in RECIPES.values()}) == len(RECIPES)


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


def test_training_that_cannot_be_done_is_refused():
    network, labels = nn.Linear(2, 2), torch.zeros(128, dtype=torch.long)
    with pytest.raises(InputError, match=r"loss: expected one of contrastive, supcon, triplet, got arcface"):
        train(network, lambda rows: torch.ones(len(rows), 2), labels, "arcface", Training(1), 0)
    with pytest.raises(InputError, match=r"labels: expected at least 128.*got 127"):
        train(network, lambda rows: torch.ones(len(rows), 2), labels[:127], "supcon", Training(1), 0)
    with pytest.raises(DivergenceError, match="training step 1: the contrastive loss"):
        train(network, lambda rows: torch.full((len(rows), 2), torch.nan), labels, "contrastive", Training(1), 0)


def test_a_seed_lasts_for_its_block_only():
    torch.manual_seed(5)
    wanted = torch.rand(2)
    torch.manual_seed(5)
    with seeded(1):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), wanted)
    assert not torch.equal(inside, wanted)


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


def test_inputs_keep_their_pixels():
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 2), dtype=np.uint8)
    found = make_inputs(images)
    assert found.shape == (3, 2, 5, 4)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal((found * 255).round().permute(0, 2, 3, 1), torch.from_numpy(images).float())


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


def test_features_are_those_of_the_right_images():
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8) for name, n in (("a", 9), ("b", 6), ("c", 5))}
    known = Known(images["a"], np.arange(9), images["b"], np.arange(6))
    head = nn.Linear(64, 3)
    made = all_features(nn.Flatten(), head, known, {"other": images["c"]}, Sizes(7, 4, 2, 3), 1)
    assert isinstance(made, FeatureFile)

    def flat(pixels):
        return pixels.reshape(len(pixels), -1).astype(np.float32) / 255

    assert np.array_equal(made.train_features, flat(images["a"][:7]))
    assert np.array_equal(made.train_labels, np.arange(7))
    assert np.array_equal(made.test_features, flat(images["b"][:4]))
    assert np.array_equal(made.test_labels, np.arange(4))
    assert np.array_equal(made.unknown["other"], flat(images["c"][:3]))
    assert np.array_equal(made.harmed_rows, [0, 1])
    for (kind, level), found in made.harmed.items():
        assert np.array_equal(found, flat(harm(images["b"][:2], kind, level, 1)))
    outputs = head(torch.from_numpy(made.test_features)).detach().numpy()
    assert np.allclose(made.outputs(made.test_features), outputs, atol=1e-6)


def test_unknown_images_have_size_and_colours_of_the_known_ones(data_root):
    digits = unknown_images("mnist", data_root, (3, 32, 32), 5, 0)
    assert digits.shape == (5, 32, 32, 3)
    assert np.array_equal(digits[..., 0], digits[..., 2])
    faces = unknown_images("lfw", data_root, (3, 32, 32), 5, 0)
    # pictures of one shade each, 40, 80 and 120; JPEG and ImageNet's normalisation and back cost little
    assert sorted(np.rint(faces.mean((1, 2, 3))).tolist()) == pytest.approx([40, 80, 120], abs=2)
    own = unknown_images("mnist", data_root, (1, 28, 28), 9, 0)
    assert own.shape == (9, 28, 28, 1)


def test_photographs_are_read_with_their_classes(data_root):
    known = load_photographs(data_root, 0)
    assert known.train.shape == (144, 32, 32, 3)
    assert np.bincount(known.train_labels).tolist() == [48] * 3
    row = int(np.flatnonzero(known.test_labels == 1)[0])
    cats = [np.asarray(Image.open(path)) for path in sorted((data_root / "CIFAR-10-images/test/cat").iterdir())]
    assert any(np.array_equal(known.test[row], cat) for cat in cats)


def test_photographs_that_are_not_there_or_damaged_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"train: expected folders.*git clone"):
        load_photographs(tmp_path, 0)
    write_photographs(tmp_path, each=1)
    path = tmp_path / "CIFAR-10-images" / "train" / "dog" / "0000.jpg"
    Image.new("RGB", (24, 32)).save(path)
    with pytest.raises(InputError, match=r"0000\.jpg: expected 32 x 32 pixels"):
        load_photographs(tmp_path, 0)
    path.write_bytes(b"no image")
    with pytest.raises(InputError, match=r"0000\.jpg: expected an image file"):
        load_photographs(tmp_path, 0)


def test_the_small_residual_network_pools_features_that_are_not_negative():
    network = small_resnet(7).eval()
    with torch.no_grad():
        features = network[:-1](torch.rand(2, 3, 32, 32))
        assert network(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert features.shape == (2, POOLED)
    assert (features >= 0).all()
    assert isinstance(network.head, nn.Linear)


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


def test_inputs_of_the_published_network_are_normalised_as_its_training_was():
    network = CifarResNet(8).eval()
    seen = []
    network.conv1.register_forward_hook(lambda _module, args, _out: seen.append(args[0]))
    x = torch.rand(2, 3, 32, 32)
    assert network(x).shape == (2, 64)
    from torchvision.transforms.functional import normalize

    assert torch.allclose(seen[0], normalize(x, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), atol=1e-6)


def test_weights_go_where_they_belong_and_others_are_refused(tmp_path):
    path = tmp_path / "weights.th"
    source, target = CifarResNet(8), CifarResNet(8)
    torch.save({"state_dict": {f"module.{name}": value for name, value in source.state_dict().items()}}, path)
    load_weights(target, path, "how")
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    with pytest.raises(InputError, match=r"weights\.th: expected weights of CifarResNet, .*\. how"):
        load_weights(CifarResNet(14), path, "how")
    for content in ({"other": 1}, [1, 2], {"state_dict": 3}):
        torch.save(content, path)
        with pytest.raises(InputError, match=r"weights\.th"):
            load_weights(target, path, "how")
    path.write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"weights\.th"):
        load_weights(target, path, "how")
    with pytest.raises(InputError, match=r"nothing\.th"):
        load_weights(target, tmp_path / "nothing.th", "how")
