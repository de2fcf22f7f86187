"""What the tests of jobs share: a small data set as Parquet files, posteriors of it, and their fit in one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc

INPUTS, DIM, POINTS = 6, 4, 150


def data(points: int = POINTS, width: int = INPUTS) -> tuple[Tensor, Tensor]:
    """Inputs of unbalanced classes, float64."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(points, width, generator=generator, dtype=torch.float64)
    return x, (torch.arange(points) % 7).clamp(max=3)


def table(x: Tensor, y: Tensor, **columns: Any) -> pa.Table:
    """Features and targets, and further columns."""
    features = pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), x.shape[1])
    return pa.table({"features": features, "target": pa.array(y.numpy()), **columns})


def write(folder: Path, x: Tensor, y: Tensor, ends: Sequence[int] = (60, POINTS), groups: int = 25) -> Path:
    """Parquet files whose rows end at ``ends``, with texts as identifiers and another column."""
    folder.mkdir(exist_ok=True)
    start = 0
    for number, end in enumerate(ends):
        rows = slice(start, end)
        names = [f"point {k}" for k in range(start, end)]
        found = table(x[rows], y[rows], identifier=pa.array(names), weight=pa.array(np.arange(start, end) / 2))
        pq.write_table(found, folder / f"{number}.parquet", row_group_size=groups)
        start = end
    return folder


def posterior(device: str = "cpu", structure: str = "kron", width: int = INPUTS, **options: Any) -> Any:
    """The same posterior at every call, not fitted."""
    torch.manual_seed(3)
    encoder = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, DIM), cc.L2Norm()).double().to(device)
    options = {"negative_samples": 40, **options}
    return Laplace(encoder, "contrastive", hessian_structure=structure, backend_kwargs=options)


def fitted(device: str = "cpu", **options: Any) -> Any:
    """Fitted in one process."""
    la, (x, y) = posterior(device, **options), data()
    la.fit([(x, y)])
    la.optimize_prior_precision()
    return la


def fit_in(folder: Path, la: Any, parts: cc.jobs.ParquetParts) -> None:
    """What a job does, in one process: what is there is kept."""
    count = len(parts)
    states = cc.jobs.StateFolder(folder, count, parts.fingerprint)
    for part in states.missing("statistics"):
        states.save(la.part_statistics(parts[part], (part, count)))
    statistics = states.merged("statistics")
    for part in states.missing("curvature"):
        states.save(la.part_curvature(parts[part], (part, count), statistics))
    la.fit_parts(statistics, states.merged("curvature"))


def assert_same(la: Any, other: Any, x: Tensor, tolerance: float = 1e-10) -> None:
    """Predictions, loss and number of points of two posteriors, after the same prior."""
    la.optimize_prior_precision()
    found, exact = la(x), other(x)
    assert torch.allclose(found.variance, exact.variance, rtol=tolerance, atol=0)
    assert torch.allclose(found.uncertainty, exact.uncertainty, rtol=tolerance, atol=0)
    assert float(la.loss) == pytest.approx(float(other.loss), rel=tolerance)
    assert la.n_data == other.n_data
