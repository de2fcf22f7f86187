"""``benchmarks.log_normalizer``: its table against mpmath, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import mpmath
import pytest
import torch

from benchmarks import log_normalizer

# Eq. 12 and 13: the constant, the factor of kappa, that of its square.
PRINTED = {128: ("127", "-0.01909", "-0.003355"), 512: ("868", "-0.0002662", "-0.0009685")}


@pytest.mark.parametrize("dim", log_normalizer.DIMS)
def test_table_agrees_with_mpmath(dim: int) -> None:
    kappa = torch.tensor(log_normalizer.KAPPAS, dtype=torch.float64)
    found = log_normalizer.compare(kappa, dim)
    with mpmath.workdps(50):
        half = mpmath.mpf(dim) / 2
        a, b, c = (mpmath.mpf(one) for one in PRINTED[dim])
        for at, x in enumerate(mpmath.mpf(k) for k in log_normalizer.KAPPAS):
            low = mpmath.besseli(half - 1, x)
            exact = (half - 1) * mpmath.log(x) - half * mpmath.log(2 * mpmath.pi) - mpmath.log(low)
            slope = -mpmath.besseli(half, x) / low
            fit = a + b * x + c * x**2
            assert found["exact"][at].item() == pytest.approx(float(exact), rel=1e-12)
            assert found["fit"][at].item() == pytest.approx(float(fit), rel=1e-12)
            assert found["difference"][at].item() == pytest.approx(float(fit - exact), rel=1e-9, abs=1e-10)
            assert found["derivatives"][at].item() == pytest.approx(float((b + 2 * c * x) / slope), rel=1e-10)


def test_writes_the_table_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_normalizer.main(["--out", str(tmp_path), "--plots", str(tmp_path / "plots")])
    text = (tmp_path / "log_normalizer.md").read_text()
    result = json.loads((tmp_path / "log_normalizer.json").read_text())
    assert text in capsys.readouterr().out
    assert result["kappa"] == list(log_normalizer.KAPPAS)
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    bold = [float(name.strip("| *").replace(",", "")) for name in rows if "**" in name]
    assert bold == [k for k in log_normalizer.KAPPAS if 10 <= k <= 50]
    assert rows["| 200"][1:4] == ["29.60", "−41", "1.86"]
    assert (tmp_path / "plots" / "log_normalizer.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_folder_nothing_is_drawn(tmp_path: Path) -> None:
    log_normalizer.main(["--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log_normalizer.json", "log_normalizer.md"]
