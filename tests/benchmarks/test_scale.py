"""The benchmark of the number of points runs, and says what it measured."""

import numpy as np
import pytest
from devices import DEVICES

from benchmarks import scale
from benchmarks.machine import describe


@pytest.mark.parametrize("device", DEVICES)
def test_a_fit_is_measured_from_features_on_disk(tmp_path, monkeypatch, device):
    monkeypatch.setattr(scale, "CLASSES", 5)
    path = scale.folder_of(300, tmp_path, 5)
    same = {"n": 300, "structure": "diag", "processes": 1}
    case = {**same, "path": str(path), "device": device, "threads": 1, "save": str(tmp_path / "h.npy")}
    rows = []
    for samples in (100, None):
        found = scale.measure({**case, "samples": samples})
        assert found["seconds"] > 0
        assert (found["error"] is None) == (samples is None)
        rows.append({**same, "samples": samples, "images": False, **found})
    rows.append({**rows[0], "n": 3000, "seconds": 10 * rows[0]["seconds"]})
    monkeypatch.setattr(scale, "PARTS", 3)
    parts = scale.run_parts(tmp_path, device, most=300)
    assert [row["classes"] for row in parts] == [5, 100]
    assert parts[1]["statistics"]["merged_mib"] > parts[0]["statistics"]["merged_mib"]
    text = scale.render({"machine": describe(device), "rows": rows, "parts": parts})
    assert "to the power 1.00" in text


def test_two_processes_fit_what_one_fits(tmp_path):
    path = scale.folder_of(400, tmp_path, scale.CLASSES)
    found = []
    for processes in (1, 2):
        save = tmp_path / f"{processes}.npy"
        case = {"n": 400, "structure": "kron", "samples": 100, "processes": processes}
        scale.measure({**case, "path": str(path), "device": "cpu", "threads": 1, "save": str(save)})
        found.append(np.load(save))
    assert np.allclose(*found, rtol=1e-4, atol=1e-5 * np.abs(found[0]).max())


def test_features_do_not_depend_on_how_many_are_asked_for():
    (few, _), (many, _) = (next(iter(scale.Synthetic(n, scale.CLASSES))) for n in (scale._BATCH, 2 * scale._BATCH))
    assert few.equal(many)
