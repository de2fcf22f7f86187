"""Data sets in small, in the formats in which they are published."""

import gzip
import struct
import zipfile
from io import BytesIO

import numpy as np
import torch
from PIL import Image

__all__ = ["paint", "write_cars", "write_cub", "write_idx", "write_lfw", "write_mnist", "write_omniglot"]


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


def write_omniglot(root, archives, drawing):
    folder = root / "omniglot"
    folder.mkdir(parents=True, exist_ok=True)
    for number, alphabets in archives.items():
        with zipfile.ZipFile(folder / f"images_background_small{number}.zip", "w") as archive:
            for alphabet, characters in alphabets.items():
                for character in range(1, characters + 1):
                    for n in range(1, 4):
                        png = BytesIO()
                        drawing(alphabet, character, n).save(png, "PNG")
                        name = f"character{character:02d}/{character:04d}_{n:02d}.png"
                        archive.writestr(f"images_background_small{number}/{alphabet}/{name}", png.getvalue())


def paint(path, shade=128):
    """A grey picture, 24x20; its shade tells it from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (24, 20), (shade,) * 3).save(path, quality=95)


def write_cub(root, classes=(1, 2, 100, 101, 102, 200)):
    """Two images a class, of the shade of its number; the lists in the published format."""
    folder = root / "CUB_200_2011"
    lines = [(c, f"{c:03d}.Bird_{c}/Bird_{c}_{n:04d}.jpg") for c in classes for n in (1, 2)]
    for c, name in lines:
        paint(folder / "images" / name, c)
    (folder / "images.txt").write_text("".join(f"{i} {name}\n" for i, (_, name) in enumerate(lines, 1)))
    (folder / "image_class_labels.txt").write_text("".join(f"{i} {c}\n" for i, (c, _) in enumerate(lines, 1)))
    return folder


def write_cars(root, parts=((1, 98, 99), (99, 196))):
    from scipy.io import savemat

    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    tables = ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat")
    for table, images, classes in zip(tables, ("cars_train", "cars_test"), parts, strict=True):
        rows = np.zeros(len(classes), dtype=[("bbox_x1", object), ("class", object), ("fname", object)])
        for n, c in enumerate(classes):
            rows[n] = (np.uint8(3), np.uint8(c), f"{n + 1:05d}.jpg")
            paint(folder / images / f"{n + 1:05d}.jpg", c)
        savemat(folder / table, {"annotations": rows.reshape(1, -1)})
    return folder


def write_lfw(root, images="lfw-deepfunneled"):
    folder = root / "lfw-py"
    for part, people in {"Train": {"Ada_B": 2, "Cy_D": 1}, "Test": {"Eve_F": 3}}.items():
        folder.mkdir(exist_ok=True)
        lines = [f"{name}\t{count}" for name, count in people.items()]
        (folder / f"peopleDev{part}.txt").write_text("\n".join([str(len(lines)), *lines]) + "\n")
        for name, count in people.items():
            for n in range(1, count + 1):
                paint(folder / images / name / f"{name}_{n:04d}.jpg", 40 * n)
    return folder
