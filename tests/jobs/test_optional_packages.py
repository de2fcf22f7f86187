"""Without ray or pyarrow the library works, and what needs them says what to install."""

import sys
from pathlib import Path

import pytest
from job_cases import data, posterior, write

import contrastive_curvature as cc


def test_missing_packages_are_named(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "d", *data())
    la = posterior(device)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(cc.UnsupportedError, match=r"pip install '\.\[ray\]'"):
        cc.jobs.fit_on_ray(la, tmp_path / "d", folder=tmp_path / "s", parts=2)
    assert not (tmp_path / "s").exists()
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(cc.UnsupportedError, match=r"pip install '\.\[parquet\]'"):
        cc.jobs.ParquetParts(tmp_path / "d")
