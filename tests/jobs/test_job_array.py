"""The job array of the documentation runs: its shell script, with a scheduler that runs tasks at once, and its file."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from job_cases import data, write
from laplace import Laplace
from torch import nn

import contrastive_curvature as cc

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "large_data.md").read_text(encoding="utf-8")
(SECTION,) = re.findall(r"^## A job array\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
WIDTH, DIM, PARTS = 512, 128, 3

# Notes its arguments, and answers with the number of a job.
SBATCH = '#!/bin/bash\nprintf "%q " "$@" >> submitted\necho >> submitted\nwc -l < submitted\n'


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return found


def submit(folder: Path) -> list[list[str]]:
    """What the page's shell script submits."""
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PARTS": str(PARTS)}
    subprocess.run(["bash", "-c", block("bash")], cwd=folder, env=env, check=True, capture_output=True, timeout=60)
    return [shlex.split(line) for line in (folder / "submitted").read_text().splitlines()]


def run_jobs(jobs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task of every job, one after the other, in this process."""
    for number, arguments in enumerate(jobs):
        waits = [a for a in arguments if a.startswith("--dependency=")]
        assert waits == ([f"--dependency=afterok:{number}"] if number else [])
        arrays = [a.removeprefix("--array=").split("-") for a in arguments if a.startswith("--array=")]
        first, last = map(int, arrays[0]) if arrays else (0, 0)
        python, script, step = arguments[-1].split()
        assert (python, script, arguments[-2]) == ("python", "fit_part.py", "--wrap")
        for index in range(first, last + 1):
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
            monkeypatch.setattr(sys, "argv", [script, step])
            runpy.run_path(script, run_name="__main__")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the script and its data, in float64."""
    (tmp_path / "fit_part.py").write_text(block("py"))
    x, y = data(90, WIDTH)
    write(tmp_path / "features", x, y, ends=(40, 90), groups=20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTS", str(PARTS))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.save(nn.Linear(WIDTH, DIM).state_dict(), "head.pt")
    yield tmp_path
    torch.set_default_dtype(dtype)


def in_one_process() -> Any:
    encoder = nn.Sequential(nn.Linear(WIDTH, DIM), cc.L2Norm())
    encoder[0].load_state_dict(torch.load("head.pt", weights_only=True))
    la = Laplace(encoder, "contrastive", hessian_structure="kron", backend_kwargs={"negative_samples": 2000})
    la.fit([data(90, WIDTH)])
    la.optimize_prior_precision()
    return la


@pytest.mark.skipif(sys.platform == "win32", reason="no shell script runs as sbatch")
def test_the_job_array_of_the_page(place: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    jobs = submit(place)
    assert [job[-1].split()[-1] for job in jobs] == ["statistics", "curvature", "finish", "embed"]
    run_jobs(jobs, monkeypatch)
    la, x = in_one_process(), data(90, WIDTH)[0]
    state = torch.load("posterior.pt", weights_only=True)
    assert torch.allclose(state["prior_precision"], la.prior_precision, rtol=1e-10)
    found, exact = pq.read_table("embeddings"), la(x)
    assert found.column("identifier").to_pylist() == [f"point {k}" for k in range(90)]
    assert np.allclose(found.column("uncertainty"), exact.uncertainty.detach(), rtol=1e-6)
    la.load_state_dict(state)
    assert torch.allclose(la(x).covariance, exact.covariance, rtol=1e-10, atol=1e-12 * float(exact.covariance.max()))
    # Submitted once more after two tasks have died: only they are run.
    kept = {path: path.stat().st_mtime_ns for folder in ("states", "embeddings") for path in Path(folder).iterdir()}
    lost = [*Path("states").glob("curvature-00001-of-*"), *Path("embeddings").glob("part-00002-of-*")]
    assert len(lost) == 2
    for path in lost:
        path.unlink()
    run_jobs(jobs, monkeypatch)
    assert all(path.exists() for path in lost)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items() if path not in lost)
    again = torch.load("posterior.pt", weights_only=True)
    assert torch.equal(again["prior_precision"], state["prior_precision"])
    assert pq.read_table("embeddings").equals(found)
