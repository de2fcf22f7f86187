"""Errors: one line, the right exit code, no half-written result; also for folders that are damaged in any way."""

import errno
import json
import os
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
from cli_support import Run, encoder_file, error_of
from tables import each
from test_cli_score import column, read

from contrastive_curvature.apps.cli.console import report
from contrastive_curvature.errors import DivergenceError, InputError, UnsupportedError

SCORE = ("score", "posterior", "new.npz", "--out", "scores.csv")


@each("harm", ["truncated", "missing", "foreign", "flipped"])
def test_a_damaged_encoder_file_is_refused_in_one_line(run: Run, harm: str) -> None:
    file = encoder_file()
    whole = file.read_bytes()
    damaged = {"truncated": whole[: len(whole) // 2], "foreign": b'{"a": 1}', "flipped": whole[:-1] + b"\xff"}
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(damaged[harm])
    error = error_of(run(*SCORE, code=2))
    assert "encoder" in error
    assert not Path("scores.csv").exists()
    file.write_bytes(whole)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_while_a_posterior_is_written(run: Run, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {file.name: file.read_bytes() for file in Path("posterior").iterdir()}
    names = sorted(os.listdir())
    monkeypatch.setattr(os, call, full)
    assert "full" in error_of(run("fit", "train.npz", "--out", "new", code=1)).lower().replace("no space", "full")
    if call == "fsync":
        overwrite = ("fit", "train.npz", "--out", "posterior", "--overwrite", "--structure", "diag")
        run(*overwrite, code=1)
    assert sorted(os.listdir()) == names
    assert {file.name: file.read_bytes() for file in Path("posterior").iterdir()} == before


def test_a_kill_while_a_posterior_is_replaced_leaves_the_old_or_the_new_one(run, monkeypatch) -> None:
    arrays = dict(np.load("train.npz"))
    np.savez("other.npz", **{**arrays, "weight": 1.3 * arrays["weight"][::-1]})

    def uncertainty(folder: str) -> np.ndarray:
        run("score", folder, "new.npz", "--out", "scores.csv", "--no-mu")
        return column(read("scores.csv"), "uncertainty")

    fit = ("fit", "other.npz", "--calibrate", "validation.npz", "--overwrite", "--out")
    run(*fit, "new")
    old, new, real = uncertainty("posterior"), uncertainty("new"), os.replace
    assert not np.allclose(old, new, rtol=0.01)
    for at in ("encoder-", "posterior.safetensors", "README.md"):

        def replace(source: str | Path, target: str | Path, at: str = at) -> None:
            if Path(target).name.startswith(at):
                raise KeyboardInterrupt
            real(source, target)

        shutil.copytree("posterior", at)
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            run(*fit, at, code=130)
        # Two fits of the same data may differ in the last digits.
        np.testing.assert_allclose(uncertainty(at), new if at == "README.md" else old, rtol=1e-4)
        run(*fit, at)
        np.testing.assert_allclose(uncertainty(at), new, rtol=1e-4)
        assert len(os.listdir(at)) == len(os.listdir("new"))


def test_errors_as_json(run: Run) -> None:
    result = run("info", "nowhere", "--json", code=2)
    assert result.stdout == ""
    found = json.loads(result.stderr)
    assert (found["kind"], found["exit_code"]) == ("BadParameter", 2)
    assert "nowhere" in found["error"]


@each(
    "error, code, text",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (InputError("a: expected b, got c."), 2, "a: expected b"),
        (UnsupportedError("a: no."), 2, "a: no."),
        (DivergenceError("NaN", 3), 1, "step 3"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "x: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "disk is full"),
        (OSError(errno.EIO, "Input/output error", "x"), 1, "x: Input/output error"),
        (MemoryError("so many"), 1, "--batch-size"),
        (ZeroDivisionError("two\nlines"), 1, "ZeroDivisionError: two lines"),
        (click.UsageError("no such option"), 2, "no such option"),
    ],
)
def test_exit_codes_and_lines(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, as_json=False, with_traceback=False) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert text in err
