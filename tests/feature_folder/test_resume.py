"""An interrupted run goes on where it stopped, and never over other features."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_networks import POINTS, Interrupted, data, encoder, loader
from tables import covering, each, refused
from tiny import Counting

import contrastive_curvature as cc

ROWS = 12
"""Of a part: batches of 8 points lie across parts."""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write(path: Path, device: str, given: Any = None, model: Any = None, **options: Any) -> cc.FeatureFolder:
    x, y = data(device)
    options = {"dtype": "float64", "rows_per_part": ROWS, **options}
    return cc.features(model or encoder(device), loader(x, y) if given is None else given, path, **options)


def batches(device: str) -> list[Any]:
    return list(loader(*data(device)))


@pytest.mark.parametrize("texts", [False, True])
def test_exception_in_the_loader(texts: bool, device: str, tmp_path: Path) -> None:
    options = {"identifiers": [f"é{i}" for i in range(POINTS)] if texts else None}
    write(tmp_path / "whole", device, **options)
    with pytest.raises(OSError, match="has gone"):
        write(tmp_path / "f", device, Interrupted(batches(device), 4), **options)
    refused(lambda: cc.FeatureFolder(tmp_path / "f"), "complete feature folder, got one with 2 parts")
    kept = content(tmp_path / "f")
    counting = Counting(encoder(device))
    # The name of the last layer is another inside the wrapper, so that is no way to count.
    refused(lambda: write(tmp_path / "f", device, model=counting, **options), "no linear layer of that name")
    assert content(tmp_path / "f") == kept
    write(tmp_path / "f", device, **options)
    assert content(tmp_path / "f") == content(tmp_path / "whole")


def test_kept_parts_are_not_computed_again(device: str, tmp_path: Path) -> None:
    counting = Counting(encoder(device))
    with pytest.raises(OSError, match="has gone"):
        write(tmp_path / "f", device, Interrupted(batches(device), 5), counting)
    counting.points = 0
    write(tmp_path / "f", device, model=counting)
    # Of 3 whole parts 8 points each are compared, of which two are in pieces; a probe of 8, one alone, and four runs of
    # two that try other values in the last layer's place analyse the encoder; batches 4 to 6 hold the 14 points that
    # are missing.
    analysis = 8 + 1 + 4 * 2
    assert counting.points <= analysis + 3 * 8 + 8 + 8 + 2
    counting.points = 0
    write(tmp_path / "f", device, model=counting)
    # A complete folder: one batch, for the comparison.
    assert counting.points <= analysis + 8


def _truncate(folder: Path) -> None:
    os.truncate(folder / "features.bin", (folder / "features.bin").stat().st_size - 8)


def _flip(folder: Path) -> None:
    damaged = bytearray((folder / "features.bin").read_bytes())
    damaged[len(damaged) // 3] ^= 1
    (folder / "features.bin").write_bytes(damaged)


def _remove(folder: Path) -> None:
    (folder / "targets.bin").unlink()


def _lengthen(folder: Path) -> None:
    with (folder / "features.bin").open("ab") as file:
        file.write(bytes(100))


@each("damage", [_truncate, _flip, _remove])
def test_damaged_parts_are_written_again(damage: Callable[[Path], None], device: str, tmp_path: Path) -> None:
    folder = write(tmp_path / damage.__name__, device)
    whole = content(folder.path)
    damage(folder.path)
    if damage is not _flip:
        refused(lambda: cc.FeatureFolder(folder.path), "it writes what is missing")
    refused(lambda: folder.verify(), "damaged (part")
    write(folder.path, device)
    assert content(folder.path) == whole
    cc.FeatureFolder(folder.path).verify()


def test_what_a_killed_writer_left_after_the_last_part_goes(device: str, tmp_path: Path) -> None:
    whole = content(write(tmp_path / "whole", device, rows_per_part=10).path)
    with pytest.raises(OSError, match="has gone"):
        write(tmp_path / "f", device, Interrupted(batches(device), 4), rows_per_part=10)
    _lengthen(tmp_path / "f")
    write(tmp_path / "f", device, rows_per_part=10)
    assert content(tmp_path / "f") == whole


def _first_weight(model: Any) -> Any:
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-4
    return model


@covering(
    1,
    complete=[False, True],
    change__message=[
        ({"dtype": "float32"}, "dtype: expected 'float64'.*got 'float32'"),
        ({"identifiers": [str(i) for i in range(POINTS)]}, "identifiers: expected 'int64'.*got 'S2'"),
        ({"identifiers": range(1, POINTS + 1)}, "other identifiers for the points from row 0 on"),
        ({"model": "other"}, "features of this encoder.*other weights before the last layer"),
        ({"given": "targets"}, "other targets for the points from row 0 on"),
        ({"given": "inputs"}, "other features for the points from row 0 on"),
    ],
)
def test_other_encoder_options_or_data_are_refused(change, message, complete, device, tmp_path) -> None:
    x, y = data(device)
    if complete:
        write(tmp_path / "f", device)
    else:
        with pytest.raises(OSError, match="has gone"):
            write(tmp_path / "f", device, Interrupted(batches(device), 4))
    kept = content(tmp_path / "f")
    options = dict(change)
    if options.get("model"):
        options["model"] = _first_weight(encoder(device))
    if given := options.get("given"):
        options["given"] = {"targets": loader(x, y + 1), "inputs": loader(x + 0.1, y)}[given]
    with pytest.raises(cc.InputError, match=message):
        write(tmp_path / "f", device, **options)
    assert content(tmp_path / "f") == kept


def test_other_number_of_points_is_refused(device: str, tmp_path: Path) -> None:
    write(tmp_path / "f", device)
    kept, (x, y) = content(tmp_path / "f"), data(device)
    for given in (loader(x[:-1], y[:-1]), loader(torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))):
        with pytest.raises(cc.InputError, match="loader: expected the data of the folder"):
            write(tmp_path / "f", device, given)
    assert content(tmp_path / "f") == kept


def test_two_writers_exclude_each_other(device: str, tmp_path: Path) -> None:
    class Nested:
        def __iter__(self) -> Any:
            yield batches(device)[0]
            write(tmp_path / "f", device)

    refused(lambda: write(tmp_path / "f", device, Nested()), "a folder that nobody else is writing")
    write(tmp_path / "f", device)
