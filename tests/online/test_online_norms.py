"""The typical norm of an online posterior: of the outputs as they are, whatever the curvature remembers."""

import pytest
import torch

from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.online.discount import DiscountedCurvature
from contrastive_curvature.structures import Diagonal


def term(norm: float, n: int) -> DatasetCurvature:
    one = torch.tensor(1.0, dtype=torch.float64)
    return DatasetCurvature(Diagonal(torch.ones(3, dtype=torch.float64)), one, one, n, typical_norm=norm * one)


@pytest.mark.parametrize("memory_factor", [0.0, 1e-4, 0.2])
def test_it_follows_the_outputs(memory_factor: float) -> None:
    sums = DiscountedCurvature(Diagonal(torch.zeros(3, dtype=torch.float64)), memory_factor)
    for _ in range(50):
        sums.add([term(1.0, 10)])
    assert float(sums.at_scale(100).typical_norm) == pytest.approx(1.0)
    for _ in range(500):
        sums.add([term(2.0, 10), term(4.0, 10)])
    # 500 steps that forget 1 % each leave 0.0066 of the first 50.
    assert float(sums.at_scale(100).typical_norm) == pytest.approx(3.0, rel=0.005)


def test_steps_count_by_their_points() -> None:
    sums = DiscountedCurvature(Diagonal(torch.zeros(3, dtype=torch.float64)), 0.0)
    sums.add([term(1.0, 30)])
    sums.add([term(5.0, 10)])
    assert float(sums.at_scale(100).typical_norm) == pytest.approx((0.99 * 30 + 50) / (0.99 * 30 + 10))
