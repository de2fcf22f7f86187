"""Errors: one line, the right exit code, no half-written result; also for folders that are damaged in any way."""

import csv
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
from cli_support import Run, encoder_file, error_of
from tables import covering

from contrastive_curvature import artifact
from contrastive_curvature.apps.cli import cli, saved
from contrastive_curvature.apps.cli.console import report
from contrastive_curvature.errors import DivergenceError, InputError, UnsupportedError

SCORE = ("score", "posterior", "new.npz", "--out", "scores.csv")


def saved_files(pattern: str) -> Path:
    found = sorted(Path("posterior").glob(pattern))
    assert len(found) == 1
    return found[0]


@covering(
    1,
    pattern=["config.json", "posterior-*.safetensors", "encoder-*.safetensors"],
    harm=["truncated", "missing", "foreign", "flipped"],
)
def test_a_damaged_posterior_is_refused_in_one_line(run: Run, pattern: str, harm: str) -> None:
    file = saved_files(pattern)
    whole = file.read_bytes()
    if harm == "missing":
        file.unlink()
    elif harm == "foreign":
        file.write_bytes(b'{"a": 1}')
    elif harm == "truncated":
        file.write_bytes(whole[: len(whole) // 2])
    else:
        # A digit of the texts, a bit of the numbers.
        place = whole.index(b"1") if pattern.endswith("json") else len(whole) - 2
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    error = error_of(run(*SCORE, code=2))
    assert "posterior" in error
    assert not Path("scores.csv").exists()


def test_a_posterior_of_another_version_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    header, tensors = artifact.read_tensors(encoder_file(), saved.EncoderFile)
    with monkeypatch.context() as later:
        later.setattr(artifact, "VERSION", 99)
        artifact.write_tensors(encoder_file(), header, tensors)
    said = error_of(run(*SCORE, code=2))
    assert "version 99" in said
    assert "use that release" in said


def test_a_folder_of_something_else(run: Run) -> None:
    Path("photos").mkdir()
    for command in (("info", "photos"), ("score", "photos", "new.npz", "--out", "scores.csv"), ("info", "nowhere")):
        assert command[1] in error_of(run(*command, code=2))


def test_weights_of_another_encoder(run: Run) -> None:
    run("fit", "train.npz", "--out", "other", "--weights", "all", "--structure", "diag", "--prior-precision", 1)
    shutil.copy("posterior/config.json", "other/config.json")
    assert "other" in error_of(run("score", "other", "new.npz", "--out", "scores.csv", code=2))


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


@covering(
    2, at=["encoder-", "config.json", "posterior-", "README.md"], error=[KeyboardInterrupt, OSError], tidy=[True, False]
)
def test_replacing_a_posterior_leaves_the_old_or_the_new_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, at: str, error: type[BaseException], tidy: bool
) -> None:
    """At every file the writing ends; a killed process tidies nothing up."""
    found = dict(np.load("train.npz"))
    np.savez("other.npz", **{**found, "weight": 1.3 * found["weight"][::-1]})

    def uncertainty(folder: str) -> np.ndarray:
        run("score", folder, "new.npz", "--out", "scores.csv", "--no-mu")
        with open("scores.csv") as file:
            return np.array([float(row["uncertainty"]) for row in csv.DictReader(file)])

    fit = ("fit", "other.npz", "--calibrate", "validation.npz", "--overwrite", "--out")
    run(*fit, "new")
    old, new = uncertainty("posterior"), uncertainty("new")
    assert not np.allclose(old, new, rtol=0.01)
    before = {file.name: file.read_bytes() for file in Path("posterior").iterdir()}
    done = []

    def ends(real: Callable[..., object]) -> Callable[..., object]:
        def replace(source: str | Path, target: str | Path) -> object:
            if Path(target).name.startswith(at) and not done:
                done.append(at)
                raise error(errno.ENOSPC, os.strerror(errno.ENOSPC)) if error is OSError else error
            return real(source, target)

        return replace

    def killed(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", ends(os.replace))
        if not tidy:
            patched.setattr(saved, "read_info", killed)
        run(*fit, "posterior", code=130 if error is KeyboardInterrupt else 1)
    assert done
    run("info", "posterior")
    # Two fits of the same data may differ in the last digits.
    np.testing.assert_allclose(uncertainty("posterior"), new if at == "README.md" else old, rtol=1e-4)
    if tidy and at != "README.md":
        assert {file.name: file.read_bytes() for file in Path("posterior").iterdir()} == before
    run(*fit, "posterior")
    np.testing.assert_allclose(uncertainty("posterior"), new, rtol=1e-4)
    assert len(os.listdir("posterior")) == len(os.listdir("new"))


def test_a_folder_that_is_not_writable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Permissions do not bind the user that tests often run as.
    monkeypatch.setattr(Path, "mkdir", refused)
    assert "can be written" in error_of(run("fit", "train.npz", "--out", "below/new", code=2))
    assert not Path("below").exists()


def test_errors_as_json(run: Run) -> None:
    result = run("info", "nowhere", "--json", code=2)
    assert result.stdout == ""
    found = json.loads(result.stderr)
    assert (found["kind"], found["exit_code"]) == ("BadParameter", 2)
    assert "nowhere" in found["error"]


def test_a_traceback_for_those_who_ask(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(cli, ["info", "nowhere", "--traceback"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (InputError("a: expected b, got c."), 2, "a: expected b"),
        (UnsupportedError("a: no."), 2, "a: no."),
        (DivergenceError("NaN", 3), 1, "step 3"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2, "x: No such file"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "x: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "disk is full"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "x: File name too long"),
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


def test_an_error_inside_a_command_ends_it_with_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("contrastive_curvature.apps.cli.fit._made_loss", fails)
    assert "ZeroDivisionError: by nothing" in error_of(run("fit", "train.npz", "--out", "p", code=1))
