"""IDX files, and the digits' quarters."""

import gzip
import struct

import pytest
import torch

from benchmarks.experiments.data.images import read_idx
from benchmarks.experiments.data.ood import shuffle_quarters
from contrastive_curvature.errors import InputError


def idx_bytes(values, kind=8):
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, kind, values.ndim, *values.shape) + bytes(
        values.flatten().tolist()
    )


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read(packed, tmp_path):
    values = torch.randint(256, (5, 4, 3), dtype=torch.uint8)
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    assert torch.equal(read_idx(path), values)


@pytest.mark.parametrize(
    "spoil",
    [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:6], lambda b: b"\1" + b[1:], lambda b: b"\0\0\r" + b[3:]],
    ids=["short", "long", "no axes", "magic", "type"],
)
def test_damaged_idx_files_are_refused(spoil, tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(spoil(idx_bytes(torch.arange(7, dtype=torch.uint8))))
    with pytest.raises(InputError, match="labels"):
        read_idx(path)


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(bytes(100))[:-4])
    with pytest.raises(InputError, match="damaged"):
        read_idx(path)


def test_shuffled_quarters_keep_pixels_and_leave_no_side():
    # every quarter has values of its own
    images = torch.arange(4.0).view(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    images = (images + torch.rand(50, 1, 8, 8) / 2).contiguous()
    moved = shuffle_quarters(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved.flatten(1).sort(1).values, images.flatten(1).sort(1).values)
    left, right = images[..., :4].floor(), moved[..., :4].floor()
    assert set(left.unique().tolist()) == {0.0, 2.0}
    assert set(right.unique().tolist()) == {1.0, 3.0}
    assert not torch.equal(moved[0].floor(), moved[1:].floor().unique(dim=0)[0]) or len(moved.floor().unique(dim=0)) > 1
    assert torch.equal(moved, shuffle_quarters(images, torch.Generator().manual_seed(0)))
    whole = {tuple(image.flatten().tolist()) for image in images[:, 0, :4, :4]}
    quarters = moved[:, 0].reshape(50, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(200, 16)
    assert whole <= {tuple(quarter.tolist()) for quarter in quarters}  # a quarter arrives in one piece
    with pytest.raises(InputError, match="even"):
        shuffle_quarters(images[..., :7], torch.Generator())
