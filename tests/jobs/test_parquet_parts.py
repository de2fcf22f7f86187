"""Parquet files in parts: every row once, in order, in batches of the size that was asked for."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from job_cases import POINTS, assert_same, data, fit_in, fitted, posterior, table, write
from tables import covering, each

import contrastive_curvature as cc

pytestmark = [
    # Of encoders that nobody has trained.
    pytest.mark.filterwarnings("ignore::contrastive_curvature.FeatureNormWarning"),
]


def test_every_row_is_in_one_part(device: str, tmp_path: Path) -> None:
    del device
    x, y = data()
    write(tmp_path / "d", x, y)
    for count, size in ((1, 7), (3, 25), (7, 100)):
        parts = cc.jobs.ParquetParts(tmp_path / "d", count, batch_size=size)
        assert len(parts) == len(list(parts)) == count
        batches = [list(part) for part in parts]
        assert max(len(targets) for part in batches for _, targets in part) <= size
        for place, whole in enumerate((x, y)):
            assert torch.equal(torch.cat([batch[place] for part in batches for batch in part]), whole)
        assert torch.equal(torch.cat([part.numbers for part in parts]), torch.arange(POINTS))


@covering(
    1,
    structure=["diag", "kron", "kron_lowrank", "full"],
    options=[{}, {"negative_samples": None}],
)
def test_a_fit_of_parts_is_that_of_the_whole(
    structure: str, options: dict[str, Any], device: str, tmp_path: Path
) -> None:
    x, y = data()
    parts = cc.jobs.ParquetParts(write(tmp_path / "d", x, y), 4, batch_size=17)
    la = posterior(device, structure=structure, **options)
    fit_in(tmp_path / "states", la, parts)
    assert_same(la, fitted(device, structure=structure, **options), x[:20].to(device))


def test_fingerprint_changes_with_the_data(device: str, tmp_path: Path) -> None:
    del device
    x, y = data()
    write(tmp_path / "a", x, y)
    first = cc.jobs.ParquetParts(tmp_path / "a").fingerprint
    write(tmp_path / "a", x, y)
    assert cc.jobs.ParquetParts(tmp_path / "a").fingerprint == first
    assert cc.jobs.ParquetParts(tmp_path / "a", target="weight").fingerprint != first
    write(tmp_path / "a", x, y.flip(0), groups=20)
    assert cc.jobs.ParquetParts(tmp_path / "a").fingerprint != first


@each(
    "column, values, message",
    [
        ("features", None, "a column 'features', got the columns target"),
        ("features", [[1.0]] * POINTS, "lists of them of a fixed length"),
        ("target", None, "a column 'target'"),
        ("target", ["a"] * POINTS, "in the column 'target', got string"),
        ("target", [None, *[1] * (POINTS - 1)], "every row of the column 'target', got 1"),
    ],
)
def test_unfit_columns_are_refused(column: str, values: Any, message: str, device: str, tmp_path: Path) -> None:
    whole = table(*data())
    other = whole.drop_columns(column)
    pq.write_table(other if values is None else other.append_column(column, pa.array(values)), tmp_path / "a.parquet")
    with pytest.raises(cc.InputError, match=message):
        posterior(device).part_statistics(cc.jobs.ParquetParts(tmp_path / "a.parquet", 1)[0], (0, 1))


@each(
    "options, message",
    [
        ({"parts": 8}, "parts: expected at most 7, got 8. .* row_group_size"),
        ({"batch_size": 2.0}, "batch_size: expected a positive"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, device: str, tmp_path: Path) -> None:
    del device
    with pytest.raises(cc.InputError, match=message):
        cc.jobs.ParquetParts(write(tmp_path / "d", *data()), **options)


def test_bad_paths_are_refused(device: str, tmp_path: Path) -> None:
    del device
    with pytest.raises(cc.InputError, match="at least one, got 0 in"):
        cc.jobs.ParquetParts(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    for path in (tmp_path, tmp_path / "b.parquet"):
        with pytest.raises(cc.InputError, match="a Parquet file, got what cannot be read"):
            cc.jobs.ParquetParts(path)
    x, y = data()
    pq.write_table(table(x, y), tmp_path / "a.parquet")
    pq.write_table(table(x.float(), y), tmp_path / "b.parquet")
    with pytest.raises(cc.InputError, match=r"b.parquet: expected the columns of a.parquet"):
        cc.jobs.ParquetParts(tmp_path)


def test_a_file_that_has_changed_since_is_refused(device: str, tmp_path: Path) -> None:
    del device
    x, y = data()
    found = cc.jobs.ParquetParts(write(tmp_path / "d", x, y, ends=(POINTS,), groups=POINTS), 1)
    write(tmp_path / "d", x[:100], y[:100], ends=(100,), groups=100)
    with pytest.raises(cc.InputError, match="The files have changed"):
        list(found[0])
