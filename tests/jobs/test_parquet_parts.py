"""Parquet files in parts: every row once, in order, in batches of the size that was asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from job_cases import INPUTS, POINTS, assert_same, data, fit_in, fitted, posterior, table, write
from tables import covering

import contrastive_curvature as cc
from contrastive_curvature.io.jobs.parquet_parts import number_of_parts
from contrastive_curvature.io.jobs.sources import parts_of

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    # Of encoders that nobody has trained.
    pytest.mark.filterwarnings("ignore::contrastive_curvature.FeatureNormWarning"),
]


@given(
    groups=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4).filter(
        lambda all: sum(map(sum, all))
    ),
    parts=st.integers(1, 12),
    size=st.integers(1, 20),
)
def test_every_row_is_in_one_part(groups: list[list[int]], parts: int, size: int, device: str) -> None:
    del device
    rows = sum(map(sum, groups))
    parts = min(parts, rows)
    with tempfile.TemporaryDirectory() as folder:
        start, starts = 0, [0]
        for number, sizes in enumerate(groups):
            schema = table(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)).schema
            with pq.ParquetWriter(Path(folder) / f"{number}.parquet", schema) as writer:
                for n in sizes:
                    x = torch.arange(start, start + n, dtype=torch.float32)
                    writer.write_table(table(torch.stack([x, -x], 1), x.long()).cast(schema))
                    start += n
                    starts.append(start)
        found = cc.jobs.ParquetParts(folder, parts, batch_size=size)
        seen, numbers, ends = [], [], [0]
        assert len(found) == parts
        for part in found:
            batches = list(part)
            assert len(batches) == len(part)
            assert [len(y) for _, y in batches[:-1]] == [size] * (len(batches) - 1)
            assert 1 <= len(batches[-1][1]) <= size
            assert all(torch.equal(x, torch.stack([y, -y], 1).float()) for x, y in batches)
            seen += [y for _, y in batches]
            numbers.append(part.numbers)
            ends.append(ends[-1] + len(part.dataset))
    assert torch.equal(torch.cat(seen), torch.arange(rows))
    assert torch.equal(torch.cat(numbers), torch.arange(rows))
    # Nearly equal: not further from equal ones than the next row group.
    widest = max(b - a for a, b in pairwise(sorted({*starts})))
    assert all(abs(end - rows * k / parts) <= max(1, widest) for k, end in enumerate(ends))


def test_parts_are_whole_row_groups_where_there_are_enough(device: str, tmp_path: Path) -> None:
    del device
    folder = write(tmp_path / "d", *data(), groups=25)
    starts = {0, 25, 50, 60, 85, 110, 135}
    assert {part.start for part in cc.jobs.ParquetParts(folder, 3)} <= starts
    assert [part.start for part in cc.jobs.ParquetParts(folder, POINTS)] == list(range(POINTS))


@covering(
    1,
    structure=["diag", "kron", "kron_lowrank", "full"],
    options=[{}, {"negative_samples": None}, {"loss": cc.SupConLoss(), "candidates": "dataset"}],
)
def test_a_fit_of_parts_is_that_of_the_whole(
    structure: str, options: dict[str, Any], device: str, tmp_path: Path
) -> None:
    x, y = data()
    parts = cc.jobs.ParquetParts(write(tmp_path / "d", x, y), 4, batch_size=17)
    la = posterior(device, structure=structure, **options)
    fit_in(tmp_path / "states", la, parts)
    assert_same(la, fitted(device, structure=structure, **options), x[:20].to(device))


def test_read_turns_columns_into_batches(device: str, tmp_path: Path) -> None:
    x, y = data()
    write(tmp_path / "d", x, y)

    def read(batch: dict[str, Any]) -> Any:
        assert set(batch) == {"features", "weight", "target"}
        assert batch["features"].shape == (len(batch["target"]), INPUTS)
        # The rows' own numbers, so that another order would show.
        shift = torch.from_numpy(batch["weight"]).unsqueeze(1)
        return torch.from_numpy(batch["features"]) + shift - shift, torch.from_numpy(batch["target"])

    names = ["features", "weight", "target"]
    parts = cc.jobs.ParquetParts(tmp_path / "d", 3, batch_size=19, read=read, columns=names)
    la = posterior(device)
    fit_in(tmp_path / "states", la, parts)
    # Adding and subtracting up to 75 rounds inputs of size 1 to 1e-14.
    assert_same(la, fitted(device), x[:20].to(device))


def test_feature_folders_come_in_parts(device: str, tmp_path: Path) -> None:
    x, y = data()
    la = posterior(device)
    cc.features(la.model.model, [(x, y)], tmp_path / "f", dtype="float64", rows_per_part=40)
    parts = parts_of(tmp_path / "f", parts=4, batch_size=30)
    assert parts.fingerprint == parts_of(cc.FeatureFolder(tmp_path / "f"), parts=4).fingerprint
    fit_in(tmp_path / "states", la, parts)
    assert_same(la, fitted(device), x[:20].to(device))
    other = cc.features(posterior(device).model.model, [(x, 1 - y)], tmp_path / "g", dtype="float64")
    assert parts_of(other, parts=4).fingerprint != parts.fingerprint


def test_relative_paths_hold_in_other_working_directories(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data()
    write(tmp_path / "d", x, y)
    cc.features(posterior(device).model.model, [(x, y)], tmp_path / "f")
    monkeypatch.chdir(tmp_path)
    given = [cc.jobs.ParquetParts("d", 2), parts_of(cc.FeatureFolder("f"), 2), parts_of("f", 2)]
    states = cc.jobs.StateFolder("s", 2)
    monkeypatch.chdir("/")
    for found in given:
        assert sum(len(targets) for part in found for _, targets in part) == POINTS
    states.save(posterior(device).part_statistics(given[0][0], (0, 2)))


def test_half_precision_is_lifted(device: str, tmp_path: Path) -> None:
    del device
    x, y = data()
    pq.write_table(table(x.half(), y), tmp_path / "a.parquet")
    ((found, _),) = cc.jobs.ParquetParts(tmp_path / "a.parquet", 1)[0]
    assert torch.equal(found, x.half().float())


def test_targets_of_several_numbers(device: str, tmp_path: Path) -> None:
    del device
    x, _ = data()
    pq.write_table(
        table(x, x[:, 0]).set_column(1, "target", table(x, x[:, 0]).column("features")), tmp_path / "a.parquet"
    )
    ((_, y),) = cc.jobs.ParquetParts(tmp_path / "a.parquet", 1)[0]
    assert torch.equal(y, x)


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


def test_default_number_of_parts(device: str) -> None:
    del device
    assert [number_of_parts(None, n) for n in (1, 15, 10_000, 800_001, 10**6, 10**9)] == [1, 15, 16, 17, 20, 1000]


def _column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda found: found.set_column(found.column_names.index(name), name, pa.array(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda found: found.drop_columns("features"), "a column 'features', got the columns target", id="none"
        ),
        pytest.param(_column("features", [[1.0]] * POINTS), "lists of them of a fixed length", id="free lists"),
        pytest.param(lambda found: found.slice(0, 0), "at least one row", id="empty"),
        pytest.param(lambda found: found.drop_columns("target"), "a column 'target'", id="no target"),
        pytest.param(_column("target", ["a"] * POINTS), "in the column 'target', got string", id="texts"),
        pytest.param(
            _column("target", [None, *[1] * (POINTS - 1)]), "every row of the column 'target', got 1", id="null"
        ),
    ],
)
def test_unfit_columns_are_refused(change: Any, message: str, device: str, tmp_path: Path) -> None:
    pq.write_table(change(table(*data())), tmp_path / "a.parquet")
    with pytest.raises(cc.InputError, match=message):
        posterior(device).part_statistics(cc.jobs.ParquetParts(tmp_path / "a.parquet", 1)[0], (0, 1))


def test_nan_in_features_is_refused(device: str, tmp_path: Path) -> None:
    x, y = data()
    x[77, 1] = torch.nan
    parts = cc.jobs.ParquetParts(write(tmp_path / "d", x, y), 1, batch_size=50)
    with pytest.raises(cc.InputError, match="finite"):
        posterior(device).part_statistics(parts[0], (0, 1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parts": POINTS + 1}, cc.InputError, "parts: expected at most 150"),
        ({"parts": 0}, cc.InputError, "parts: expected a positive"),
        ({"batch_size": 2.0}, cc.InputError, "batch_size: expected a positive"),
        ({"read": "pixels"}, cc.InputTypeError, "read: expected a function"),
        (
            {"columns": ["weight"]},
            cc.InputError,
            "columns: expected a list of columns of the files .*, together with read",
        ),
        ({"columns": ["pixels"], "read": dict}, cc.InputError, r"got \['pixels'\]"),
        ({"columns": "weight", "read": dict}, cc.InputError, "a list of columns of the files"),
        ({"features": "image"}, cc.InputError, "a column 'image'"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, device: str, tmp_path: Path
) -> None:
    del device
    with pytest.raises(error, match=message):
        cc.jobs.ParquetParts(write(tmp_path / "d", *data()), **options)


def test_bad_paths_are_refused(device: str, tmp_path: Path) -> None:
    del device
    with pytest.raises(cc.InputError, match=r"without any"):
        cc.jobs.ParquetParts(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    for path in (tmp_path, tmp_path / "b.parquet"):
        with pytest.raises(cc.InputError, match="a Parquet file, got what cannot be read"):
            cc.jobs.ParquetParts(path)
    with pytest.raises(cc.InputTypeError, match="source: expected Parquet files"):
        cc.jobs.ParquetParts(3)  # type: ignore[arg-type]
    for names in ([], [tmp_path / "a.parquet"] * 2):
        with pytest.raises(cc.InputError, match="different files, at least one"):
            cc.jobs.ParquetParts(names)
    x, y = data()
    pq.write_table(table(x, y), tmp_path / "a.parquet")
    pq.write_table(table(x.float(), y), tmp_path / "b.parquet")
    with pytest.raises(cc.InputError, match=r"b.parquet: expected the columns of a.parquet"):
        cc.jobs.ParquetParts(tmp_path)
    found = cc.jobs.ParquetParts(tmp_path / "a.parquet", 2)
    for part in (-1, 2):
        with pytest.raises(IndexError, match="an index from 0 to 1"):
            found[part]


def test_a_file_that_has_changed_since_is_refused(device: str, tmp_path: Path) -> None:
    del device
    x, y = data()
    found = cc.jobs.ParquetParts(write(tmp_path / "d", x, y, ends=(POINTS,), groups=POINTS), 1)
    write(tmp_path / "d", x[:100], y[:100], ends=(100,), groups=100)
    with pytest.raises(cc.InputError, match="The files have changed"):
        list(found[0])


def test_options_of_other_sources_are_refused(device: str, tmp_path: Path) -> None:
    x, y = data()
    parts = cc.jobs.ParquetParts(write(tmp_path / "d", x, y), 2)
    folder = cc.features(posterior(device).model.model, [(x, y)], tmp_path / "f")
    for source, options, message in (
        (parts, {"parts": 3}, "parts: expected None with a ParquetParts"),
        (folder, {"read": dict}, "read: expected None with a FeatureFolder"),
        (folder, {"batch_size": 3}, "batch_size: expected None with a FeatureFolder"),
        (folder, {"parts": POINTS + 1}, "at most 150"),
        (3, {}, "source: expected Parquet files"),
    ):
        with pytest.raises(cc.InputError, match=message):
            parts_of(source, **options)
    assert parts_of(parts) is parts
