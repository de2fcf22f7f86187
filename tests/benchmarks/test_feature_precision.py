"""The benchmark of half precision, and feature folders in the place of a feature file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks import feature_precision
from benchmarks.transfer.feature_file import FeatureFile, load_features, save_features
from benchmarks.transfer.results import key_of

WIDTH, DIM = 10, 4


def make_content() -> FeatureFile:
    g = np.random.default_rng(0)
    centres = 2 * g.normal(size=(6, WIDTH))
    labels = np.arange(240) % 6
    known = (centres[labels] + g.normal(size=(240, WIDTH))).astype(np.float32)
    weight = g.normal(size=(DIM, WIDTH)).astype(np.float32)
    far = {"far": 4 * g.normal(size=(60, WIDTH)).astype(np.float32)}
    return FeatureFile(known[:160], labels[:160], known[160:], labels[160:], weight, np.zeros(DIM, "f4"), unknown=far)


def test_differences_are_of_the_size_of_the_rounding() -> None:
    found = feature_precision.judge(make_content())
    for structure in feature_precision.STRUCTURES:
        half, brain = (found[structure][name] for name in feature_precision.HALVES)
        # Rounding to nearest with 11 and 8 bits.
        assert 2**-14 < half["features"] < 2**-11
        assert 2**-11 < brain["features"] < 2**-8
        for name in ("median", "largest"):
            assert 0 < half[name] < brain[name] < 0.05
        assert 0.999 < brain["rank"] <= 1
        assert 0 <= brain["auroc"] < 0.01
    assert 0 < found["diag"]["float16"]["curvature"] < found["diag"]["bfloat16"]["curvature"] < 0.01
    assert found["default"]["float16"]["curvature"] is None


def test_script_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_features(tmp_path / "faces.npz", make_content())
    arguments = ["script", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    feature_precision.main()
    found = json.loads((tmp_path / "out/feature_precision.json").read_text(encoding="utf-8"))["encoders"]
    assert set(found) == {"faces"}
    lines = (tmp_path / "out/feature_precision.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| faces |") for line in lines) == 4
    assert {line.count("|") for line in lines if line.startswith("|")} == {9, 10}


def folders(path: Path, content: FeatureFile) -> None:
    layer = nn.Linear(WIDTH, DIM)
    layer.load_state_dict({"weight": torch.from_numpy(content.weight), "bias": torch.from_numpy(content.bias)})
    nothing = np.zeros(len(content.unknown["far"]), dtype=np.int64)
    for name, features, labels in (
        ("train", content.train_features, content.train_labels),
        ("test", content.test_features, content.test_labels),
        ("unknown_far", content.unknown["far"], nothing),
    ):
        data: Any = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
        cc.features(layer, DataLoader(data, batch_size=50), path / name)
    np.savez(path / "last_layer.npz", weight=content.weight, bias=content.bias)


def test_feature_folders_are_a_feature_file(tmp_path: Path) -> None:
    content = make_content()
    folders(tmp_path, content)
    found = load_features(tmp_path)
    for name in ("train_features", "train_labels", "test_features", "test_labels", "weight", "bias"):
        assert np.array_equal(getattr(found, name), getattr(content, name)), name
    assert np.array_equal(found.unknown["far"], content.unknown["far"])
    before = key_of(tmp_path)
    assert key_of(tmp_path) == before
    np.savez(tmp_path / "last_layer.npz", weight=2 * content.weight, bias=content.bias)
    assert key_of(tmp_path) != before


def test_feature_folders_that_do_not_belong_together(tmp_path: Path) -> None:
    content = make_content()
    folders(tmp_path, content)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, DIM))
    data: Any = TensorDataset(torch.from_numpy(content.test_features), torch.from_numpy(content.test_labels))
    cc.features(model, DataLoader(data), tmp_path / "unknown_other")
    with pytest.raises(cc.InputError, match=r"unknown_other: expected features of the encoder of train"):
        load_features(tmp_path)
    np.savez(tmp_path / "last_layer.npz", weight=content.weight)
    with pytest.raises(cc.InputError, match=r"last_layer.npz: expected the arrays weight and bias, got no bias"):
        load_features(tmp_path)
    (tmp_path / "last_layer.npz").unlink()
    with pytest.raises(cc.InputError, match=r"expected a \.npz archive of arrays"):
        load_features(tmp_path)
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "empty" / "last_layer.npz", weight=content.weight, bias=content.bias)
    with pytest.raises(cc.InputError, match="no train, test"):
        load_features(tmp_path / "empty")
