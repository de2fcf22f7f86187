"""How far the document's quadratic fits of the log-normaliser are off."""

import pytest
import torch

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.vmf.density import log_normalizer_quadratic


def test_by_hand() -> None:
    kappa = torch.tensor([0.0, 10.0], dtype=torch.float64)
    by_hand = torch.tensor([127.0, 127 - 0.1909 - 0.3355], dtype=torch.float64)
    torch.testing.assert_close(log_normalizer_quadratic(kappa, 128), by_hand, rtol=1e-15, atol=0)
    by_hand = torch.tensor([868.0, 868 - 0.002662 - 0.09685], dtype=torch.float64)
    torch.testing.assert_close(log_normalizer_quadratic(kappa, 512), by_hand, rtol=1e-15, atol=0)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"dim: expected 128 or 512, got 64\. log_normalizer is exact"):
        log_normalizer_quadratic(torch.ones(1), 64)
    with pytest.raises(InputError, match="kappa: expected >= 0"):
        log_normalizer_quadratic(-torch.ones(1), 128)


@pytest.mark.parametrize(("dim", "error", "share"), [(128, 0.048, 0.0069), (512, 0.00086, 0.0018)])
def test_mean_squared_error_of_the_fits(dim: int, error: float, share: float) -> None:
    # "smaller than 0.1 %" does not say of what: it holds of the value squared, of the variance for neither dimension
    kappa = torch.arange(10.0, 51.0, dtype=torch.float64)
    exact = vmf.log_normalizer(kappa, dim)
    found = (log_normalizer_quadratic(kappa, dim) - exact).square().mean()
    assert found.item() == pytest.approx(error, rel=0.02)
    assert (found / exact.var(correction=0)).item() == pytest.approx(share, rel=0.03)
    assert (found / exact.square().mean()).item() < 1e-5
