"""Exports that cannot be: one line that says what to do, and no file, or the old one."""

import errno
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from serving_cases import DIM, INPUTS, WIDTH, fitted, inputs
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import artifact


def refused(folder: Path, wanted: type[Exception], says: str, la: Any, path: Any, *args: Any, **options: Any) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(wanted, match=says) as caught:
        la.export(path, *args, **options)
    assert "\n" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def test_other_weights_and_structures(device: str, tmp_path: Path) -> None:
    body = nn.Sequential(nn.Linear(INPUTS, DIM)).to(device)
    la = Laplace(body, "contrastive", "all", "diag", backend_kwargs={"pd_fix": "psd"})
    says = "subset_of_weights='all', hessian_structure='diag'.*'kron_lowrank'"
    refused(tmp_path, cc.UnsupportedError, says, la, tmp_path / "a.pt2", torch.ones(2, INPUTS, device=device))


def test_before_fit(device: str, tmp_path: Path) -> None:
    la = Laplace(nn.Sequential(nn.Linear(INPUTS, DIM)).to(device), "contrastive")
    refused(tmp_path, cc.NotFittedError, "fit", la, tmp_path / "a.pt2")


def test_p_values_without_a_calibration_and_with_one_of_another_posterior(device: str, tmp_path: Path) -> None:
    la, path = fitted("diag", calibrated=False, device=device), tmp_path / "a.pt2"
    refused(tmp_path, cc.NotFittedError, r"p_value=True: .*la\.calibrate", la, path, p_value=True)
    la = fitted("diag", device=device)
    la.prior_precision = 3.0
    for given in (None, True):
        refused(tmp_path, cc.NotFittedError, r"another posterior.*la\.calibrate", la, path, p_value=given)
    assert la.export(path, p_value=False) == ("mu", "kappa", "uncertainty")


@each(
    "path, options, wanted, says",
    [
        ("a.pth", {}, cc.InputError, r"path: expected a name that ends in '\.pt2' or '\.onnx'.*format="),
        ("a.npz", {}, cc.InputError, r"'\.pt2' or '\.onnx', got '.*a\.npz'\..*keep_and_serve\.md#features-from"),
        ("a.pt2", {"format": "npz"}, cc.InputError, "format: expected one of 'pt2'"),
        ("none/a.pt2", {}, cc.InputError, "a file in a folder that exists"),
        ("a.pt2", {"example": [1.0]}, cc.InputTypeError, "example: expected a tensor or a mapping"),
        ("a.pt2", {"example": torch.ones(2, INPUTS + 1)}, cc.InputError, "x: expected"),
        ("a.pt2", {"example": {"x": torch.ones(2, 2), "y": True}}, cc.InputTypeError, "'y' of type bool.*leave it out"),
        ("a.pt2", {"example": torch.ones(2, INPUTS), "dynamic_axes": [0]}, cc.InputError, "dynamic_axes: expected num"),
    ],
)
def test_arguments(device, path, options, wanted, says, tmp_path) -> None:
    la = fitted("diag", device=device, dtype=torch.float32)
    refused(tmp_path, wanted, says, la, tmp_path / path, **options)


class NoGraph(nn.Module):
    """After the fit it takes its way by the values of the inputs, or adds noise."""

    way = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.way == "noise":
            h = h + torch.rand_like(h)
        if self.way == "values" and float(h.sum()) > 0:
            h = -h
        return self.last(h)


@pytest.mark.filterwarnings("ignore")
@each(
    "way, says",
    [("noise", "gives other outputs when it runs"), ("values", r"torch\.export cannot trace.*last layer alone")],
)
def test_encoders_that_have_no_graph(device: str, way: str, says: str, tmp_path: Path) -> None:
    la = fitted("diag", body=NoGraph(), dtype=torch.float32, device=device)
    la.model.model.way = way
    (tmp_path / "a.pt2").write_bytes(b"as before")
    x = inputs(2, 1, torch.float32, device)
    refused(tmp_path, cc.UnsupportedError, says, la, tmp_path / "a.pt2", x)


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="the extra onnx is not installed")
def test_without_a_package_of_onnx(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted("diag", device=device)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    says = re.escape("the package onnxscript, got none installed. In a copy of the repository: pip install '.[onnx]'")
    refused(tmp_path, cc.UnsupportedError, says, la, tmp_path / "a.onnx", inputs(2, 1, device=device))


def test_an_interrupted_export_leaves_the_old_file(device, tmp_path, monkeypatch) -> None:
    la, path = fitted("diag", device=device), tmp_path / "a.pt2"
    path.write_bytes(b"as before")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        la.export(path, inputs(2, 1, device=device))
    assert path.read_bytes() == b"as before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of resources")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function ZipFile.__del__")  # of NumPy 1
def test_a_full_disk_is_an_error_that_the_process_survives(device: str, tmp_path: Path) -> None:
    """A limit of the size of a file acts as a full disk does; torch's own writer would end the process, exit 134."""
    import resource

    la: Any = Laplace(nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3)).to(device), "contrastive")
    la.fit([(torch.randn(40, 4, device=device), torch.arange(40, device=device) % 2)])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, usual[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            la.export(tmp_path / "a.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list(tmp_path.iterdir()) == []
