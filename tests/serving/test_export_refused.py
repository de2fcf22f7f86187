"""Exports that cannot be: one line that says what to do, and no file, or the old one."""

from __future__ import annotations

import re
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from serving_cases import DIM, INPUTS, WIDTH, fitted, inputs
from test_served_encoder import mapped_posterior
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.io import serving

pytestmark = pytest.mark.parametrize("device", DEVICES)


def refused(folder: Path, wanted: type[Exception], says: str, la: Any, path: Any, *args: Any, **options: Any) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(wanted, match=says) as caught:
        la.export(path, *args, **options)
    assert "\n" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("weights", "structure"),
    [("all", "diag"), ("all", "lowrank"), ("last_layer", "gp"), ("subnetwork", "diag"), ("all", "kron")],
)
def test_other_weights_and_structures(device: str, weights: str, structure: str, tmp_path: Path) -> None:
    host: dict[str, Any] = {"subnetwork_indices": torch.tensor([0, 3])} if weights == "subnetwork" else {}
    host |= {"n_subset": 6} if structure == "gp" else {}
    body = nn.Sequential(nn.Linear(INPUTS, DIM)).to(device)
    la = Laplace(body, "contrastive", weights, structure, backend_kwargs={"pd_fix": "psd"}, **host)
    says = f"subset_of_weights='{weights}', hessian_structure='{structure}'.*'kron_lowrank'"
    refused(tmp_path, cc.UnsupportedError, says, la, tmp_path / "a.pt2", torch.ones(2, INPUTS, device=device))


def test_before_fit_and_what_is_no_posterior(device: str, tmp_path: Path) -> None:
    la = Laplace(nn.Sequential(nn.Linear(INPUTS, DIM)).to(device), "contrastive")
    refused(tmp_path, cc.NotFittedError, "fit", la, tmp_path / "a.npz")
    with pytest.raises(cc.InputTypeError, match=r"la: expected a contrastive last-layer posterior, got a Linear"):
        serving.export(nn.Linear(2, 3), tmp_path / "a.npz")


def test_p_values_without_a_calibration_and_with_one_of_another_posterior(device: str, tmp_path: Path) -> None:
    la, path = fitted("diag", calibrated=False, device=device), tmp_path / "a.npz"
    refused(tmp_path, cc.NotFittedError, r"p_value=True: .*la\.calibrate", la, path, p_value=True)
    la = fitted("diag", device=device)
    la.prior_precision = 3.0
    for given in (None, True):
        refused(tmp_path, cc.NotFittedError, r"another posterior.*la\.calibrate", la, path, p_value=given)
    assert la.export(path, p_value=False) == ("mu", "kappa", "uncertainty")
    refused(tmp_path, cc.InputTypeError, "p_value: expected True or False", la, path, p_value="no")


@pytest.mark.parametrize(
    ("path", "options", "wanted", "says"),
    [
        ("a.pth", {}, cc.InputError, r"path: expected a name that ends in '\.pt2', '\.onnx'.*format="),
        ("a", {}, cc.InputError, "path: expected a name"),
        ("a.npz", {"format": "zip"}, cc.InputError, "format: expected one of 'pt2'"),
        ("a.npz", {"format": 3}, cc.InputError, "format: expected one of 'pt2'"),
        ("none/a.npz", {}, cc.InputError, "a file in a folder that exists"),
        ("none/a.pt2", {}, cc.InputError, "a file in a folder that exists"),
        ("", {}, cc.InputError, "path: expected a name"),
        ("a.npz", {"example": torch.ones(2, INPUTS)}, cc.InputError, "example: expected nothing for format='npz'"),
        ("a.npz", {"dynamic_axes": [1]}, cc.InputError, "dynamic_axes: expected nothing for format='npz'"),
        ("a.pt2", {"example": [1.0]}, cc.InputTypeError, "example: expected a tensor or a mapping"),
        ("a.pt2", {"example": torch.ones(0, INPUTS)}, cc.InputError, "example: expected a batch of at least one point"),
        ("a.pt2", {"example": torch.ones(2, INPUTS + 1)}, cc.InputError, "x: expected"),
        ("a.pt2", {"example": torch.full((2, INPUTS), torch.nan)}, cc.InputError, "x: expected inputs with finite"),
        ("a.pt2", {"example": {"x": torch.ones(2, 2), "y": True}}, cc.InputTypeError, "'y' of type bool.*leave it out"),
        ("a.pt2", {"example": torch.ones(2, INPUTS), "dynamic_axes": [0]}, cc.InputError, "dynamic_axes: expected num"),
        ("a.pt2", {"example": torch.ones(2, INPUTS), "dynamic_axes": 1}, cc.InputTypeError, "dynamic_axes: expected"),
    ],
)
def test_arguments(
    device: str, path: str, options: dict[str, Any], wanted: type[Exception], says: str, tmp_path: Path
) -> None:
    la = fitted("diag", device=device, dtype=torch.float32)
    refused(tmp_path, wanted, says, la, tmp_path / path if path else "", **options)


def test_a_path_that_is_none_and_one_that_is_a_folder(device: str, tmp_path: Path) -> None:
    la = fitted("diag", device=device)
    refused(tmp_path, cc.InputTypeError, "path: expected a path", la, None)
    (tmp_path / "a.npz").mkdir()
    refused(tmp_path, cc.InputError, "a folder", la, tmp_path / "a.npz")
    la.export(str(tmp_path / "b"), format="npz")
    assert serving.Scorer.load(tmp_path / "b").n


def test_axes_of_a_tensor_that_is_not_there(device: str, tmp_path: Path) -> None:
    la, x = mapped_posterior(device)
    says = r"dynamic_axes: expected tensors of the example, \['ids', 'mask'\], got 'other'"
    refused(tmp_path, cc.InputError, says, la, tmp_path / "a.pt2", x, dynamic_axes={"other": [1]})


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.last(h if float(h.sum()) > 0 else -h)


class ByNumber(ByValue):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) if len(x) == 2 else self.body(x).tanh())


class OutsideTorch(ByValue):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tensor(self.body(x).tolist(), device=x.device))


class Random(ByValue):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) + torch.rand_like(self.body(x)))


class Locked(ByValue):
    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ByValue, ByNumber, OutsideTorch, Random])
def test_encoders_that_have_no_graph(device: str, kind: type[ByValue], tmp_path: Path) -> None:
    says = "gives other outputs when it runs" if kind is Random else r"torch\.export cannot trace.*scorer\.npz"
    torch.manual_seed(0)
    options: dict[str, Any] = {"pd_fix": "psd"}
    la = Laplace(kind().to(device), "contrastive", "last_layer", "diag", backend_kwargs=options)
    x = inputs(1, 1, torch.float32, device).expand(6, -1).clone() + 1
    x[3:] += 1
    noise = kind is Random
    with torch.random.fork_rng():
        if noise:
            kind.forward = Locked.forward  # type: ignore[method-assign]
        la.fit([(x, torch.arange(6, device=device) % 2)])
        if noise:
            kind.forward = _random  # type: ignore[method-assign]
    (tmp_path / "a.pt2").write_bytes(b"as before")
    refused(tmp_path, cc.UnsupportedError, says, la, tmp_path / "a.pt2", x[:2])


_random = Random.forward


def test_an_encoder_that_cannot_be_copied(device: str, tmp_path: Path) -> None:
    la = fitted("diag", body=Locked(), dtype=torch.float32, device=device)
    la.model.model.lock = threading.Lock()
    x = inputs(2, 1, torch.float32, device)
    refused(tmp_path, cc.UnsupportedError, "cannot be copied.*lock", la, tmp_path / "a.pt2", x)


def test_an_onnx_file_that_onnxruntime_would_not_load(device: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    la = fitted("diag", dtype=torch.bfloat16, device=device)
    x = inputs(2, 1, torch.bfloat16, device)
    refused(tmp_path, cc.UnsupportedError, r"bfloat16.*'\.pt2'.*\.half\(\)", la, tmp_path / "a.onnx", x)


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="the extra onnx is not installed")
@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_a_package_of_onnx(device: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(name=name)
        return real(name, *args)

    la = fitted("diag", device=device)
    monkeypatch.setattr(importlib, "import_module", without)
    says = re.escape(f"the package {package}, got none installed. pip install 'contrastive-curvature[onnx]'")
    refused(tmp_path, cc.UnsupportedError, says, la, tmp_path / "a.onnx", inputs(2, 1, device=device))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.pt2"])
def test_an_interrupted_export_leaves_the_old_file(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    la = fitted("diag", device=device)
    (tmp_path / name).write_bytes(b"as before")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact.os, "fsync", interrupted)
    example = [inputs(2, 1, device=device)] if name.endswith("pt2") else []
    with pytest.raises(KeyboardInterrupt):
        la.export(tmp_path / name, *example)
    assert (tmp_path / name).read_bytes() == b"as before"
    assert [file.name for file in tmp_path.iterdir()] == [name]
