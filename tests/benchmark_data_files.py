"""Data sets in small, in the formats in which they are published."""

import gzip
import struct
import zipfile
from io import BytesIO

import torch

__all__ = ["write_mnist", "write_omniglot"]


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
