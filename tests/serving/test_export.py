"""Exported graphs give what ``la(x)`` does, for any number of inputs, and need nothing of this library."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from laplace import Laplace
from serving_cases import INPUTS, assert_same, fitted, inputs, truth
from tables import covering
from test_served_encoder import mapped_posterior
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.io.serving.export import METADATA

pytestmark = [
    # torch's exporters about their own insides
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
needs_onnx = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is None, reason="the extra onnx is not installed"
)
NUMBERS = (1, 3, 17)


def run_onnx(path: Path, x: Tensor | dict[str, Tensor]) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {"x": x} if isinstance(x, Tensor) else x
    return session.run(None, {name: value.cpu().numpy() for name, value in feed.items()})


@covering(
    1, centres=[True, False], calibrated=[True, False], structure=["diag", "kron", "full", "kron_lowrank of rank 2"]
)
def test_torch_export(device: str, structure: str, calibrated: bool, centres: bool, tmp_path: Path) -> None:
    la = fitted(structure, calibrated=calibrated, centres=centres, dtype=torch.float32, device=device)
    path = tmp_path / "model.pt2"
    outputs = la.export(path, inputs(2, 1, torch.float32, device))
    assert outputs == ("mu", "kappa", "uncertainty", "p_value")[: 3 + calibrated]
    files = {METADATA: ""}
    module = torch.export.load(path, extra_files=files).module()
    for n in NUMBERS:
        x = inputs(n, n, torch.float32, device)
        assert_same(module(x), truth(la, x, outputs), 1e-5)
    assert json.loads(files[METADATA]) == {
        "format": "contrastive_curvature.served",
        "version": 1,
        "structure": structure.split()[0],
        "outputs": list(outputs),
        "score": "novelty" if calibrated else None,
        "calibration_inputs": 37 * calibrated,
    }


@needs_onnx
def test_onnx(device: str, tmp_path: Path) -> None:
    la = fitted("kron_lowrank of rank 2", dtype=torch.float32, device=device)
    path = tmp_path / "model.onnx"
    # One point is enough of an example, too.
    outputs = la.export(path, inputs(1, 1, torch.float32, device))
    for n in NUMBERS:
        x = inputs(n, n, torch.float32, device)
        assert_same(run_onnx(path, x), truth(la, x, outputs), 1e-5)
    import onnx

    model = onnx.load(path)
    assert [output.name for output in model.graph.output] == list(outputs)
    (metadata,) = [entry.value for entry in model.metadata_props if entry.key == METADATA]
    assert json.loads(metadata)["outputs"] == list(outputs)


@needs_onnx
@pytest.mark.filterwarnings("ignore:la.x.. the weights of la.model have changed")
def test_onnx_of_float64_and_of_outputs_that_have_no_scores(device: str, tmp_path: Path) -> None:
    body = nn.Sequential(nn.Linear(INPUTS, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))
    la, path = fitted("kron", device=device, body=body), tmp_path / "model.onnx"
    # Positive inputs have outputs, negative ones do not.
    with torch.no_grad():
        la.model.model[0].weight.abs_()
        la.model.model[0].bias.zero_()
    la.calibrate([inputs(37, 2, device=device).abs()])
    la.export(path, inputs(4, 1, device=device).abs())
    x = inputs(5, 2, device=device).abs() + 0.1
    want = truth(la, x)
    # The arc tangent is that of float32.
    assert_same(run_onnx(path, x), want, 1e-6)
    x[2, 1], x[4] = torch.nan, -1
    p_value = la(x[4:]).p_value.cpu()
    found, good = run_onnx(path, x), [0, 1, 3]
    assert all(np.isnan(value[2]).all() for value in found)
    assert all(np.isnan(value[4]).all() for value in found[:3])
    assert found[3][4] == p_value.numpy()
    assert_same([value[good] for value in found], [value[good] for value in want], 1e-6)


@needs_onnx
def test_inputs_in_a_mapping_of_any_length(device: str, tmp_path: Path) -> None:
    la, x = mapped_posterior(device)
    axes = {name: [1] for name in x}
    la.export(tmp_path / "model.onnx", {key: value[:1] for key, value in x.items()}, dynamic_axes=axes)
    for n, length in ((1, 5), (3, 9), (17, 2)):
        x = {"ids": torch.randint(0, 11, (n, length), device=device), "mask": torch.ones(n, length, device=device)}
        x["mask"][:, 1:] = torch.randint(0, 2, (n, length - 1), device=device)
        assert_same(run_onnx(tmp_path / "model.onnx", x), truth(la, x), 1e-5)


def test_images_of_any_size(device: str, tmp_path: Path) -> None:
    layers = [nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    body = nn.Sequential(*layers, nn.Dropout(), nn.Linear(5, 3), cc.L2Norm()).to(device)
    x = torch.randn(40, 2, 8, 8, device=device)
    la = Laplace(body, "contrastive", backend_kwargs={"pd_fix": "psd"})
    la.fit([(x, torch.arange(40, device=device) % 2)])
    la.optimize_prior_precision()
    outputs = la.export(tmp_path / "model.pt2", x[:2], dynamic_axes=[2, 3])
    new = torch.randn(3, 2, 7, 12, device=device)
    found = torch.export.load(tmp_path / "model.pt2").module()(new)
    assert_same(found, truth(la, new, outputs), 1e-5)


def test_a_graph_needs_torch_alone(device: str, tmp_path: Path) -> None:
    la = fitted(device=device, dtype=torch.float32)
    la.export(tmp_path / "model.pt2", inputs(2, 1, torch.float32, device))
    code = (
        "import sys, torch\n"
        "outputs = torch.export.load('model.pt2').module()(torch.ones(2, 4, device=sys.argv[1]))\n"
        "assert len(outputs) == 4\n"
        "assert not [name for name in sys.modules if name.startswith(('laplace', 'contrastive_curvature'))]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, device], cwd=tmp_path, check=True, timeout=120)


CLOSE: dict[torch.dtype, dict[str, tuple[float, float]]] = {
    torch.float64: {"pt2": (1e-10, 1e-10)},
    torch.float16: {"pt2": (1e-5, 1e-5), "onnx": (0.001, 0.005)},
    torch.bfloat16: {"pt2": (1e-5, 1e-5)},
}
"""Bounds that docs/keep_and_serve.md states: of ``mu`` absolutely, of the others relatively. Those of float32,
and of float64 in ONNX, stand in the tests above.
"""


@pytest.mark.parametrize(("dtype", "kind"), [(dtype, kind) for dtype, kinds in CLOSE.items() for kind in kinds])
def test_how_close(device: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    la, path = fitted(dtype=dtype, device=device, calibrated=False), tmp_path / f"model.{kind}"
    x = inputs(40, 3, dtype, device)
    outputs = la.export(path, x[:2])
    found = torch.export.load(path).module()(x) if kind == "pt2" else run_onnx(path, x)
    wanted = [value.double() for value in truth(la, x, outputs)]
    bounds = CLOSE[dtype][kind]
    for number, (new, old) in enumerate(zip(found, wanted, strict=True)):
        apart = (torch.as_tensor(new).detach().cpu().double() - old).abs() / (1 if number == 0 else old.abs())
        assert float(apart.max()) <= bounds[min(number, 1)]
