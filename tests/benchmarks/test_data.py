"""The data sets, in small files of the formats in which they are published."""

import gzip
import struct
import zipfile
from io import BytesIO

import numpy as np
import torch
from PIL import Image

from benchmarks.experiments.data import load_data, shuffle_quarters


def write_idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(head + values.numpy().tobytes()))


def write_mnist(root, name, counts, seed=0):
    """Random images of the published size; the labels count up."""
    made = {}
    for prefix, n in counts.items():
        generator = torch.Generator().manual_seed(seed + n)
        made[prefix] = torch.randint(256, (n, 28, 28), dtype=torch.uint8, generator=generator)
        write_idx(root / name / "raw" / f"{prefix}-images-idx3-ubyte.gz", made[prefix])
        write_idx(root / name / "raw" / f"{prefix}-labels-idx1-ubyte.gz", (torch.arange(n) % 10).to(torch.uint8))
    return made


def write_omniglot(root, archives):
    """One-bit drawings: paper is 1, ink is 0, and the upper third is ink."""
    folder, pixels = root / "omniglot", np.ones((105, 105), dtype=bool)
    folder.mkdir(parents=True, exist_ok=True)
    pixels[:35] = False
    for number, alphabets in archives.items():
        with zipfile.ZipFile(folder / f"images_background_small{number}.zip", "w") as archive:
            for alphabet, characters in alphabets.items():
                for character in range(1, characters + 1):
                    for n in range(1, 4):
                        png = BytesIO()
                        Image.fromarray(pixels).save(png, "PNG")
                        name = f"character{character:02d}/{character:04d}_{n:02d}.png"
                        archive.writestr(f"images_background_small{number}/{alphabet}/{name}", png.getvalue())


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


ALPHABETS = {1: {"Greek": 2, "Korean": 3}, 2: {"Greek": 2, "Sanskrit": 1, "Tagalog": 4}}


def test_omniglot_tests_on_new_alphabets_with_bright_ink(tmp_path):
    write_omniglot(tmp_path, ALPHABETS)
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
