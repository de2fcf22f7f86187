"""Embeddings of a corpus as Parquet files: those of the posterior, every input once."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from job_cases import POINTS, data, fitted, posterior, table, write

import contrastive_curvature as cc
from contrastive_curvature.io.jobs import EmbeddingFolder

PARTS = 3


def embed(path: Path, la: Any, source: Any, **options: Any) -> pa.Table:
    folder = EmbeddingFolder(path, la, source, **options)
    for part in folder.missing():
        folder.write(la, part)
    assert folder.missing() == []
    return pq.read_table(path)


def assert_those_of(found: pa.Table, la: Any, x: torch.Tensor) -> None:
    exact = la(x)
    mu = np.array(found.column("mu").to_pylist(), dtype=np.float32)
    # The rounding to float32 is 6e-8; kappa and uncertainty are rounded once.
    assert np.allclose(mu, exact.mu.detach().cpu(), rtol=0, atol=1e-7)
    for name in ("kappa", "uncertainty"):
        assert np.allclose(found.column(name), getattr(exact, name).detach().cpu(), rtol=1e-6)


def test_embeddings_are_those_of_the_posterior(device: str, tmp_path: Path) -> None:
    x, y = data()
    la, parts = fitted(device), cc.jobs.ParquetParts(write(tmp_path / "d", x, y), PARTS, batch_size=23)
    found = embed(tmp_path / "e", la, parts)
    assert found.column_names == ["identifier", "mu", "kappa", "uncertainty", "target", "weight"]
    assert found.schema.field("mu").type == pa.list_(pa.float32(), 4)
    assert_those_of(found, la, x.to(device))
    assert found.column("identifier").to_pylist() == [f"point {k}" for k in range(POINTS)]
    assert found.column("target").to_pylist() == y.tolist()
    assert found.column("weight").to_pylist() == [k / 2 for k in range(POINTS)]


@pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")
def test_calibrated_posteriors_have_p_values(device: str, tmp_path: Path) -> None:
    x, y = data()
    la = fitted(device)
    la.calibrate([(x.to(device), y)])
    found = embed(tmp_path / "e", la, cc.jobs.ParquetParts(write(tmp_path / "d", x, y), PARTS), keep=["weight"])
    assert found.column_names == ["identifier", "mu", "kappa", "uncertainty", "p_value", "weight"]
    assert np.allclose(found.column("p_value"), la(x.to(device)).p_value.cpu(), rtol=1e-12)
    la.prior_precision = 7.0
    with pytest.raises(cc.NotFittedError, match="calibrated for another posterior"):
        EmbeddingFolder(tmp_path / "f", la, cc.jobs.ParquetParts(tmp_path / "d", PARTS))
    assert not (tmp_path / "f").exists()


def test_read_may_give_inputs_alone(device: str, tmp_path: Path) -> None:
    x, y = data()

    def read(batch: dict[str, Any]) -> Any:
        assert set(batch) == {"features"}
        return torch.from_numpy(batch["features"])

    la = fitted(device)
    parts = cc.jobs.ParquetParts(write(tmp_path / "d", x, y), PARTS, batch_size=50, read=read, columns=["features"])
    found = embed(tmp_path / "e", la, parts, keep=["target"])
    assert_those_of(found, la, x.to(device))
    assert found.column("target").to_pylist() == y.tolist()
    assert found.column("identifier").to_pylist()[-1] == f"point {POINTS - 1}"


def test_what_is_there_is_kept(device: str, tmp_path: Path) -> None:
    la, parts = fitted(device), cc.jobs.ParquetParts(write(tmp_path / "d", *data()), PARTS)
    first = embed(tmp_path / "e", la, parts)
    folder = EmbeddingFolder(tmp_path / "e", la, parts)
    kept = folder.file(0).stat().st_mtime_ns
    folder.file(1).unlink()
    folder.file(2).write_bytes(folder.file(2).read_bytes()[:-9])
    assert folder.missing() == [1, 2]
    assert embed(tmp_path / "e", la, parts).equals(first)
    assert folder.file(0).stat().st_mtime_ns == kept


def test_embeddings_of_another_posterior_are_refused(device: str, tmp_path: Path) -> None:
    la, parts = fitted(device), cc.jobs.ParquetParts(write(tmp_path / "d", *data()), PARTS)
    embed(tmp_path / "e", la, parts)
    again = posterior(device)
    again.load_state_dict(la.state_dict())
    EmbeddingFolder(tmp_path / "e", again, parts)
    again.prior_precision = 1.01 * again.prior_precision
    other = posterior(device)
    other.load_state_dict(la.state_dict())
    with torch.no_grad():
        # The norms stay.
        other.model.model[0].weight[0].neg_()
    two, (x, y) = cc.jobs.ParquetParts(tmp_path / "d", 2), data()
    flipped = cc.jobs.ParquetParts(write(tmp_path / "flipped", x, y.flip(0)), PARTS)
    cases = ((again, parts, None), (other, parts, None), (la, parts, []), (la, two, None), (la, flipped, None))
    for fitted_one, source, keep in cases:
        with pytest.raises(cc.InputError, match="destination: expected a new or an empty folder, or one of this job"):
            EmbeddingFolder(tmp_path / "e", fitted_one, source, keep)
    with pytest.raises(cc.NotFittedError):
        EmbeddingFolder(tmp_path / "e", posterior(device), parts)


def test_bad_rows_leave_no_file(device: str, tmp_path: Path) -> None:
    x, y = data()
    x[-1, 0] = torch.nan
    la, parts = fitted(device), cc.jobs.ParquetParts(write(tmp_path / "d", x, y), PARTS, batch_size=10)
    folder = EmbeddingFolder(tmp_path / "e", la, parts)
    folder.write(la, 0)
    with pytest.raises(cc.InputError, match="finite"):
        folder.write(la, 2)
    assert sorted(path.name for path in folder.path.iterdir()) == [folder.file(0).name]


def test_a_reader_that_leaves_rows_out_is_refused(device: str, tmp_path: Path) -> None:
    def read(batch: dict[str, Any]) -> Any:
        return torch.from_numpy(batch["features"])[1:]

    la, parts = fitted(device), cc.jobs.ParquetParts(write(tmp_path / "d", *data()), PARTS, read=read)
    with pytest.raises(cc.InputError, match="read: expected 50 inputs, one a row, got 49"):
        EmbeddingFolder(tmp_path / "e", la, parts).write(la, 0)


def test_columns_are_checked_first(device: str, tmp_path: Path) -> None:
    x, y = data()
    la = fitted(device)
    pq.write_table(table(x, y, kappa=pa.array(range(POINTS))), tmp_path / "a.parquet", row_group_size=60)
    parts = cc.jobs.ParquetParts(tmp_path / "a.parquet", 2, batch_size=20)
    with pytest.raises(cc.InputError, match=r"columns other than identifier, mu, .* got \['kappa'\]"):
        EmbeddingFolder(tmp_path / "e", la, parts)
    with pytest.raises(cc.InputError, match=r"keep: expected a list of columns of the source: target, kappa, got"):
        EmbeddingFolder(tmp_path / "e", la, parts, keep=["colour"])
    assert not (tmp_path / "e").exists()
    # Without names, the numbers of the rows are the identifiers.
    found = embed(tmp_path / "e", la, parts, keep=[])
    assert found.column("identifier").to_pylist() == list(range(POINTS))
