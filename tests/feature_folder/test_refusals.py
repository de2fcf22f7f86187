"""What cannot be written is refused by name, and leaves no complete folder behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from feature_networks import POINTS, data, encoder, loader
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature as cc

pytestmark = pytest.mark.parametrize("device", DEVICES)


def scaled(device: str, scale: float) -> nn.Sequential:
    """Features of any size: those of one point alone, number 30, are so large."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Identity(), nn.Linear(7, 4)).double().to(device)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e5), ("float32", 1e39), ("bfloat16", 1e39)])
def test_overflow_names_the_row(dtype: str, size: float, device: str, tmp_path: Path) -> None:
    model, (x, y) = scaled(device, size), data(device)
    x[30] *= size
    with pytest.raises(
        cc.InputError, match=rf"dtype='{dtype}': expected features of at most .* in row 30 .*Use dtype="
    ):
        cc.features(model, loader(x, y), tmp_path / "f", dtype=dtype)
    wider = {"float16": "bfloat16"}.get(dtype, "float64")
    assert len(cc.features(model, loader(x, y), tmp_path / "g", dtype=wider).targets) == POINTS


def test_underflow_names_the_row(device: str, tmp_path: Path) -> None:
    model, (x, y) = scaled(device, 1), data(device)
    with torch.no_grad():
        model[0].bias.zero_()
    x[30] *= 1e-7
    with pytest.raises(cc.InputError, match=r"less than a hundredth of the largest.* in row 30 .*bfloat16"):
        cc.features(model, loader(x, y), tmp_path / "f", dtype="float16")
    # Zero features lose nothing.
    x[30] = 0
    assert not cc.features(model, loader(x, y), tmp_path / "g", dtype="float16").numpy(30, 31).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite(bad: float, device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    x[30, 2] = bad
    if bad == float("inf"):
        # tanh makes it finite again.
        model[1] = nn.Identity()
    with pytest.raises(cc.InputError, match="finite features, got NaN or infinity in row 30"):
        cc.features(model, loader(x, y), tmp_path / "f")


def _views(x: Any, y: Any) -> Any:
    return [((x, x), y)]


@pytest.mark.parametrize(
    ("batches", "kind", "message"),
    [
        (_views, cc.UnsupportedError, "batches of two views.*yield .x, targets."),
        (lambda x, _: [(x, x)], cc.UnsupportedError, "batches of two views"),
        (lambda *_: [], cc.InputError, "at least one batch, got an empty loader"),
        (lambda x, _: [x], cc.InputTypeError, "loader: expected batches"),
        (lambda x, y: [(x, y[:-1])], cc.InputError, "one target for each of the 50 points"),
        (lambda x, y: [(x, y.sum())], cc.InputError, "one target for each of the 50 points"),
        (lambda x, y: [(x, y), (x, y.float())], cc.InputError, "targets of int64"),
        (lambda x, y: [(x, y), (x, y[:, None])], cc.InputError, "as before, got torch.int64 and shape"),
        (lambda x, y: [(x, y.bfloat16())], cc.InputTypeError, "targets of one of the types"),
        (lambda x, _: [(x, [1] * len(x))], cc.InputTypeError, "labels as a tensor"),
        (lambda x, y: [(x[:0], y[:0])], cc.InputError, "at least one point"),
        (lambda x, y: [(x, y.new_zeros(len(x), 0))], cc.InputError, "targets of at least one number"),
        (lambda x, _: x, cc.InputTypeError, "loader: expected"),
        (lambda *_: 3, cc.InputTypeError, "loader: expected"),
        (
            lambda x, y: DataLoader(TensorDataset(x, y), batch_size=8, drop_last=True),
            cc.UnsupportedError,
            "drop_last=True leaves out",
        ),
        (
            lambda x, y: DataLoader(TensorDataset(x, y), sampler=DistributedSampler(range(len(x)), 2, 0)),
            cc.UnsupportedError,
            "gives each of 2 processes a part",
        ),
    ],
)
def test_loaders(batches: Any, kind: type[Exception], message: str, device: str, tmp_path: Path) -> None:
    x, y = data(device)
    with pytest.raises(kind, match=message):
        cc.features(encoder(device), batches(x, y), tmp_path / "f")
    if (tmp_path / "f").exists():
        with pytest.raises(cc.InputError, match="feature folder"):
            cc.FeatureFolder(tmp_path / "f")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected one of 'float16', 'bfloat16', 'float32', 'float64', got int8"),
        ({"dtype": None}, "dtype: expected one of"),
        ({"format": "npz"}, "format: expected one of 'memmap', 'parquet'"),
        ({"rows_per_part": 0}, "rows_per_part: expected a positive whole number"),
        ({"last_layer_name": "0"}, "last_layer_name: expected the layer that computes the raw outputs"),
        ({"progress_bar": "no"}, "progress_bar: expected True or False"),
        ({"identifiers": range(POINTS - 1)}, "identifiers: expected one for each point.*49 identifiers, and 50 points"),
        ({"identifiers": range(POINTS + 1)}, "identifiers: expected one for each point.*51 identifiers, and 50 points"),
        ({"identifiers": [0] * POINTS}, "identifiers: expected a different one for each point, got 0 twice"),
        ({"identifiers": ["a"] * POINTS}, "identifiers: expected a different one for each point, got 'a' twice"),
        ({"identifiers": [*range(POINTS - 1), "a"]}, "identifiers: .*a int among them"),
        ({"identifiers": [0.5 * i for i in range(POINTS)]}, "identifiers: .*a float among them"),
        ({"identifiers": "names"}, "identifiers: expected whole numbers or texts"),
        ({"identifiers": torch.zeros(POINTS, 2)}, "identifiers: .*shape"),
        ({"identifiers": [f"{i}\0" for i in range(POINTS)]}, "identifiers: .*zero byte"),
        ({"identifiers": ["x" * 5000 + str(i) for i in range(POINTS)]}, "identifiers: .*at most 4096 bytes"),
        ({"identifiers": [2**63 + i for i in range(POINTS)]}, "identifiers: "),
    ],
)
def test_options(options: dict[str, Any], message: str, device: str, tmp_path: Path) -> None:
    x, y = data(device)
    with pytest.raises(cc.InputError, match=message):
        cc.features(encoder(device), loader(x, y), tmp_path / "f", **options)
    assert [path.name for path in tmp_path.glob("f/*")] in ([], [".lock"])


@pytest.mark.parametrize("points", [POINTS - 1, POINTS + 1])
def test_number_of_identifiers_of_a_loader_without_length(points: int, device: str, tmp_path: Path) -> None:
    batches = list(loader(*data(device)))
    with pytest.raises(cc.InputError, match="identifiers: expected one for each point"):
        cc.features(encoder(device), batches, tmp_path / "f", identifiers=range(points))
    with pytest.raises(cc.InputError, match="complete feature folder"):
        cc.FeatureFolder(tmp_path / "f")


class NormalizesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.layer(x) + 1)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (NormalizesInside(), cc.UnsupportedError, "normalises its output inside forward"),
        (nn.Sequential(nn.Linear(5, 3), nn.ReLU()), cc.UnsupportedError, "no linear layer computes the raw outputs"),
        (nn.Linear(5, 3).half(), cc.InputError, "inputs that the model can process"),
        (nn.ReLU(), cc.InputError, "an encoder with parameters"),
        ("model", cc.InputTypeError, "a torch.nn.Module"),
        (cc.TwoTowers(nn.Linear(5, 3), nn.Linear(5, 3)), cc.InputTypeError, "one encoder"),
        (nn.Linear(6, 3), cc.InputError, "inputs that the model can process"),
    ],
)
def test_encoders(model: Any, kind: type[Exception], message: str, device: str, tmp_path: Path) -> None:
    x, y = data(device, torch.float32)
    moved = model.to(device) if isinstance(model, nn.Module) else model
    with pytest.raises(kind, match=message):
        cc.features(moved, loader(x, y), tmp_path / "f")
    assert [path.name for path in tmp_path.glob("f/*")] in ([], [".lock"])


def test_encoder_keeps_its_mode_and_dropout_is_off(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    model.insert(2, nn.Dropout(0.5))
    model.train()
    folder = cc.features(model, loader(x, y), tmp_path / "f", dtype="float64")
    assert all(module.training for module in model.modules())
    again = cc.features(model, loader(x, y), tmp_path / "g", dtype="float64")
    assert (folder.numpy() == again.numpy()).all()


def test_one_point(device: str, tmp_path: Path) -> None:
    x, y = data(device)
    folder = cc.features(encoder(device), loader(x[:1], y[:1]), tmp_path / "f")
    assert (len(folder), len(folder.targets)) == (1, 1)


def test_missing_pyarrow(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(device)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(cc.UnsupportedError, match=r"pip install 'contrastive-curvature.parquet.'"):
        cc.features(encoder(device), loader(x, y), tmp_path / "f", format="parquet")


def test_tied_last_layer_counts_as_trunk(device: str, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).tanh())

    model, (x, y) = Tied().double().to(device), data(device)
    cc.features(model, loader(x, y), tmp_path / "f")
    with torch.no_grad():
        model.last.bias += 1
    cc.features(model, loader(x, y), tmp_path / "f")
    with torch.no_grad():
        model.last.weight += 1
    with pytest.raises(cc.InputError, match="other weights before the last layer"):
        cc.features(model, loader(x, y), tmp_path / "f")
