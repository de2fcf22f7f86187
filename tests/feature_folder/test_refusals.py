"""What cannot be written is refused by name, and leaves no complete folder behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_networks import POINTS, data, encoder, loader
from safetensors.torch import save_file
from tables import each, refused
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.artifact import read_header
from contrastive_curvature.io.feature_folder import HEADER, FeatureHeader


@each(
    "dtype, size, message, wider",
    [
        ("float16", 1e5, "dtype='float16': expected features of at most .* in row 30 .*Use dtype=", "bfloat16"),
        ("float32", 1e39, "dtype='float32': expected features of at most .* in row 30 .*Use dtype=", "float64"),
        ("float16", 1e-7, r"less than a hundredth of the largest.* in row 30 .*bfloat16", "bfloat16"),
        ("float64", torch.nan, "finite features, got NaN or infinity in row 30", None),
    ],
)
def test_features_that_the_precision_cannot_hold(dtype, size, message, wider, device, tmp_path) -> None:
    torch.manual_seed(1)
    layers = [nn.Linear(5, 7, bias=False), nn.Identity(), nn.Linear(7, 4)]
    model, (x, y) = nn.Sequential(*layers).double().to(device), data(device)
    x[30] *= size
    with pytest.raises(cc.InputError, match=message):
        cc.features(model, loader(x, y), tmp_path / f"{dtype}-{size}", dtype=dtype)
    if wider is not None:
        assert len(cc.features(model, loader(x, y), tmp_path / f"{dtype}-{size}-wider", dtype=wider).targets) == POINTS
    # Zero features lose nothing.
    x[30] = 0
    assert not cc.features(model, loader(x, y), tmp_path / f"{dtype}-{size}-zero", dtype=dtype).numpy(30, 31).any()


@each(
    "batches, kind, message",
    [
        (lambda x, y: [((x, x), y)], cc.UnsupportedError, "batches of two views.*yield .x, targets."),
        (lambda *_: [], cc.InputError, "at least one batch, got an empty loader"),
        (lambda x, _: [x], cc.InputTypeError, "loader: expected batches"),
        (lambda x, y: [(x, y[:-1])], cc.InputError, "one target for each of the 50 points"),
        (lambda x, y: [(x, y), (x, y.float())], cc.InputError, "targets of int64"),
        (lambda x, y: [(x, y.bfloat16())], cc.InputTypeError, "targets of one of the types"),
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
        refused(lambda: cc.FeatureFolder(tmp_path / "f"), "feature folder")


def test_a_malformed_header_is_refused_by_name(device: str, tmp_path: Path) -> None:
    path = cc.features(encoder(device), loader(*data(device)), tmp_path / "f").path / HEADER
    content = read_header(path, FeatureHeader).model_dump(mode="json")
    for name, value in (
        *(("dtype", "O"), ("target_type", "object"), ("identifiers", "O"), ("identifiers", "S0")),
        *(("target_shape", [-1]), ("rows_per_part", 0), ("points", 0)),
    ):
        reseal(path, FeatureHeader, {**content, name: value})
        with pytest.raises(cc.InputError, match=rf"{HEADER}: expected a feature folder, got one with.*{name}"):
            cc.FeatureFolder(path.parent)


def test_nothing_is_written_through_a_link(device: str, tmp_path: Path) -> None:
    """A folder that somebody else made, which says that its features are missing, or have no end."""
    cc.features(encoder(device), loader(*data(device)), tmp_path / "f")
    mine, link = tmp_path / "mine", tmp_path / "f" / "features.bin"
    link.rename(mine)
    link.symlink_to(mine)
    content, path = mine.read_bytes(), tmp_path / "f" / HEADER
    header = read_header(path, FeatureHeader).model_dump(mode="json")
    for changes in ({"parts": ["0"]}, {"points": None}):
        reseal(path, FeatureHeader, {**header, **changes})
        with pytest.raises(cc.InputError, match=r"features\.bin: expected a file of this folder, got a symbolic link"):
            cc.features(encoder(device), loader(*data(device)), tmp_path / "f")
        assert mine.read_bytes() == content


@each(
    "options, message",
    [
        ({"dtype": "int8"}, "dtype: expected one of 'float16', 'bfloat16', 'float32', 'float64', got int8"),
        ({"rows_per_part": 0}, "rows_per_part: expected a positive whole number"),
        ({"last_layer_name": "0"}, "last_layer_name: expected the layer that computes the raw outputs"),
        ({"identifiers": range(POINTS - 1)}, "identifiers: expected one for each point.*49 identifiers, and 50 points"),
        ({"identifiers": [0] * POINTS}, "identifiers: expected a different one for each point, got 0 twice"),
        ({"identifiers": [0.5 * i for i in range(POINTS)]}, "identifiers: .*a float among them"),
        ({"identifiers": [f"{i}\0" for i in range(POINTS)]}, "identifiers: .*zero byte"),
        ({"identifiers": [2**63 + i for i in range(POINTS)]}, "identifiers: "),
    ],
)
def test_options(options: dict[str, Any], message: str, device: str, tmp_path: Path) -> None:
    x, y = data(device)
    with pytest.raises(cc.InputError, match=message):
        cc.features(encoder(device), loader(x, y), tmp_path / "f", **options)
    assert [path.name for path in tmp_path.glob("f/*")] in ([], [".lock"])


@each(
    "model, kind, message",
    [
        (nn.Sequential(nn.Linear(5, 3), nn.ReLU()), cc.UnsupportedError, "no linear layer computes the raw outputs"),
        (nn.Linear(6, 3), cc.InputError, "inputs that the model can process"),
        (cc.TwoTowers(nn.Linear(5, 3), nn.Linear(5, 3)), cc.InputTypeError, "one encoder"),
    ],
)
def test_encoders(model: nn.Module, kind: type[Exception], message: str, device: str, tmp_path: Path) -> None:
    x, y = data(device, torch.float32)
    with pytest.raises(kind, match=message):
        cc.features(model.to(device), loader(x, y), tmp_path / "f")
    assert [path.name for path in tmp_path.glob("f/*")] in ([], [".lock"])


def test_encoder_keeps_its_mode_and_dropout_is_off(device: str, tmp_path: Path) -> None:
    model, (x, y) = encoder(device), data(device)
    model.insert(2, nn.Dropout(0.5))
    model.train()
    folder = cc.features(model, loader(x, y), tmp_path / "f", dtype="float64")
    assert all(module.training for module in model.modules())
    again = cc.features(model, loader(x, y), tmp_path / "g", dtype="float64")
    assert (folder.numpy() == again.numpy()).all()


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
    refused(lambda: cc.features(model, loader(x, y), tmp_path / "f"), "other weights before the last layer")


def reseal(path: Path, kind: type[artifact.Header], content: Any) -> None:
    """Write a file without tensors whose header has any content, with the right checksums."""
    about = {"format": kind.format_name(), "version": artifact.VERSION, "sha256": artifact._checksum(content)}
    text = json.dumps({**about, "content": content})
    header = {"header": text, "tensors": artifact._tensors_checksum({})}
    save_file({}, path, {artifact._METADATA: json.dumps(header)})
