"""Without ray or pyarrow the library works, and what needs them says what to install."""

import sys
from pathlib import Path

import pytest
from job_cases import data, posterior, write
from tables import each

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


@each(
    "options, message",
    [
        ({"workers": 0}, "workers: expected a positive"),
        ({"num_cpus": 0}, "num_cpus: expected a finite number > 0"),
        ({"num_gpus": -1}, "num_gpus: expected a finite number >= 0"),
        ({"max_retries": -1}, "max_retries: expected a whole number >= 0"),
    ],
)
def test_bad_resources_are_refused(options: dict[str, float], message: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(cc.InputError, match=message):
        cc.jobs.fit_on_ray(posterior(device), "no such file", folder=tmp_path / "s", **options)  # type: ignore[arg-type]
