"""The sample of features that a fit keeps: its size, its rule, and that every row is as likely."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contrastive_curvature.fit.feature_sample import FeatureSample


def drawn(rows: Tensor, sizes: list[int], most: int | None = None) -> FeatureSample:
    sample = FeatureSample(rows.shape[1])
    if most is not None:
        sample.size = most
    start = 0
    while start < len(rows):
        for size in sizes:
            sample.add(rows[start : start + size])
            start += size
    return sample


def numbers(sample: FeatureSample) -> list[float]:
    return sorted(sample.rows[:, 0].tolist())


@pytest.mark.parametrize(("width", "size"), [(1, 2000), (512, 2000), (2097, 2000), (9216, 455), (10**6, 200)])
def test_size(width: int, size: int) -> None:
    assert FeatureSample(width).size == size


@given(
    n=st.integers(1, 300),
    most=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_with_the_smallest_keys_are_kept(n: int, most: int, sizes: list[int], dtype: torch.dtype) -> None:
    """However the stream is cut into batches."""
    rows = torch.arange(n, dtype=dtype).unsqueeze(1).expand(-1, 2).contiguous()
    sample = drawn(rows, sizes, most)
    keys = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert numbers(sample) == sorted(keys.argsort()[:most].tolist())
    assert len(sample) == min(n, most)
    assert sample.rows.dtype == dtype
    assert torch.equal(rows[:, 0], torch.arange(n, dtype=dtype)), "the batches themselves stay as they are"


def test_rows_are_copies() -> None:
    rows = torch.zeros(5, 2)
    sample = drawn(rows, [5])
    rows += 1
    assert not sample.rows.any()


def test_every_row_is_as_likely() -> None:
    """Position in the stream decides nothing: the mean place of what is kept is the middle."""
    n, most = 20_000, 1000
    kept = torch.tensor(numbers(drawn(torch.arange(n, dtype=torch.float64).unsqueeze(1), [256], most)))
    assert abs(float(kept.mean()) / n - 0.5) < 5 / (12 * most) ** 0.5
    counts = torch.histc(kept, 10, 0, n)
    assert float(((counts - most / 10).square() / (most / 10)).sum()) < 33.7  # chi-square, 9 degrees: p = 1e-4


def test_merged_is_of_both() -> None:
    first, second = (torch.arange(k, k + 300, dtype=torch.float64).unsqueeze(1) for k in (0, 1000))
    small = drawn(first[:50], [20]).merged(drawn(second[:60], [7]))
    assert numbers(small) == [*range(50), *range(1000, 1060)]
    a, b = drawn(first, [32], 100), drawn(second, [32], 100)
    a.size = b.size = 100
    out = FeatureSample(1)
    assert out.size == 2000
    merged = a.merged(b)
    assert len(merged) == 200
    low = sum(number < 1000 for number in numbers(merged))
    assert low == 100


def test_the_generator_of_torch_is_left_alone() -> None:
    state = torch.get_rng_state()
    drawn(torch.randn(50, 3, generator=torch.Generator().manual_seed(3)), [20], 10)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_was_added() -> None:
    assert len(FeatureSample(3)) == 0
    with pytest.raises(RuntimeError, match="no features"):
        _ = FeatureSample(3).rows
