"""The benchmark of the number of points runs, and says what it measured."""

import pytest
from devices import DEVICES

from benchmarks import scale
from benchmarks.machine import describe


@pytest.mark.parametrize("device", DEVICES)
def test_a_fit_is_measured_from_features_on_disk(tmp_path, monkeypatch, device):
    monkeypatch.setattr(scale, "CLASSES", 5)
    path = scale.folder_of(300, tmp_path)
    case = {"path": str(path), "structure": "diag", "device": device, "save": str(tmp_path / "h.npy")}
    rows = []
    for samples in (100, None):
        found = scale.measure({**case, "samples": samples})
        assert found["seconds"] > 0
        assert (found["error"] is None) == (samples is None)
        rows.append({"n": 300, "structure": "diag", "samples": samples, **found})
    rows.append({**rows[0], "n": 3000, "seconds": 10 * rows[0]["seconds"]})
    text = scale.render({"machine": describe(device), "rows": rows})
    assert "to the power 1.00" in text


def test_features_do_not_depend_on_how_many_are_asked_for():
    (few, _), (many, _) = (next(iter(scale.Synthetic(n))) for n in (scale._BATCH, 2 * scale._BATCH))
    assert few.equal(many)
