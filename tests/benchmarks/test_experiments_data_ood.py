"""Any data set can stand for what an encoder does not know."""

import numpy as np
import pytest
import torch
from benchmark_data_files import write_cub, write_mnist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.data import TensorSplit, load_data
from benchmarks.experiments.data.ood import SizedSplit, shuffle_quarters
from benchmarks.experiments.data.photos import IMAGENET_DEVIATION, IMAGENET_MEAN
from contrastive_curvature.errors import InputError

MEAN, DEVIATION = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_DEVIATION))


def in_memory(n=5, channels=1, side=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, channels, side, side), dtype=torch.uint8, generator=generator)
    return TensorSplit(pixels, torch.arange(n))


def test_colours_become_grey_values_of_the_encoders_size(tmp_path):
    write_cub(tmp_path)  # pictures of one shade, the class's number
    write_mnist(tmp_path, "FashionMNIST", {"train": 12, "t10k": 7})
    data = load_data("fashionmnist", tmp_path, ood="cub200")
    images = data.ood.images(range(len(data.ood)))
    assert images.shape[1:] == (1, 28, 28)
    assert np.allclose(images.mean((1, 2, 3)) * 255, data.ood.targets + 1, atol=2)


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
