"""Corruption to images: what each kind does, and that more of it is worse."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from tables import covering

from benchmarks.transfer.corruption import KINDS, LEVELS, corrupt


def pictures(shape, seed=0):
    """Blots of several pixels over the whole range of grey."""
    rough = np.random.default_rng(seed).standard_normal(shape)
    smooth = ndimage.gaussian_filter(rough, [0, 2, 2] + [0] * (len(shape) - 3))
    low, high = smooth.min(), smooth.max()
    return np.rint(255 * (smooth - low) / (high - low)).astype(np.uint8)


@covering(1, kind=KINDS, shape=[(60, 28, 28), (40, 24, 40, 3)])
def test_more_corruption_is_further_from_the_image(kind, shape):
    images = pictures(shape)
    far = [np.abs(corrupt(images, kind, level, 3).astype(int) - images).mean() for level in LEVELS]
    assert far[0] > 0
    assert all(less < more for less, more in pairwise(far))


@pytest.mark.parametrize("side", [32, 64])
def test_blur_widens_a_point_in_proportion_to_the_image(side):
    # a bar, so that rounding to whole grey values matters little
    images = np.zeros((1, side, side), dtype=np.uint8)
    images[0, :, side // 2 - 1 : side // 2 + 1] = 255
    for level, share in zip(LEVELS, (0.02, 0.04, 0.06, 0.09, 0.13), strict=True):
        row = corrupt(images, "blur", level, 0)[0, side // 2].astype(float)
        at = np.arange(side)
        mean = (row * at).sum() / row.sum()
        variance = (row * (at - mean) ** 2).sum() / row.sum()
        # the bar's own variance, and the kernel's
        assert variance == pytest.approx(0.25 + (share * side) ** 2, rel=0.08)


def test_noise_has_its_deviation_and_only_its_strength_changes():
    grey = np.full((50, 32, 32), 128, dtype=np.uint8)
    first, second = (corrupt(grey, "noise", level, 7).astype(float) - 128 for level in (1, 2))
    assert first.std() == pytest.approx(255 * 0.05, rel=0.02)
    assert second.std() == pytest.approx(255 * 0.10, rel=0.02)
    assert np.abs(second - 2 * first).max() <= 1.5  # both are rounded


@given(height=st.integers(8, 40), width=st.integers(8, 40), seed=st.integers(0, 1000))
def test_squares_lie_within_the_next_ones(height, width, seed):
    black = np.zeros((2, height, width, 3), dtype=np.uint8)
    before = np.zeros(black.shape, dtype=bool)
    for level, share in zip(LEVELS, (0.20, 0.32, 0.44, 0.56, 0.70), strict=True):
        found = corrupt(black, "occlusion", level, seed)
        covered = found == 128
        assert np.array_equal(covered, found > 0)
        side = max(1, round(share * min(height, width)))
        assert np.array_equal(covered.sum((1, 2, 3)), [3 * side**2] * 2)
        assert covered[before].all()
        before = covered


def test_contrast_shrinks_to_the_mean():
    images = pictures((5, 12, 10, 3))
    for level, share in zip(LEVELS, (0.70, 0.50, 0.33, 0.20, 0.08), strict=True):
        mean = images.mean((1, 2, 3), keepdims=True)
        assert np.abs(corrupt(images, "contrast", level, 0) - (mean + share * (images - mean))).max() <= 0.51


def test_a_bar_turns_by_the_degrees_of_its_level():
    images = np.zeros((12, 65, 65), dtype=np.uint8)
    images[:, 31:34, 12:53] = 255
    y, x = np.mgrid[-32:33, -32:33]
    senses = set()
    for level, degrees in zip(LEVELS, (10, 20, 35, 55, 85), strict=True):
        for turned in corrupt(images, "rotation", level, 0).astype(float):
            angle = np.degrees(0.5 * np.arctan2(2 * (turned * x * y).sum(), (turned * (x**2 - y**2)).sum()))
            assert abs(angle) == pytest.approx(degrees, abs=0.5)
            senses.add(np.sign(angle))
    assert senses == {-1, 1}
