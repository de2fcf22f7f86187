"""What a checkpoint file is on the disk: whole or as before, where links lead, with the mode that the user wants."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each

import contrastive_curvature as cc
from contrastive_curvature.online import load_checkpoint, save_checkpoint


@each("where, name", [(os, "replace"), (os, "fsync"), (torch, "save")])
def test_a_crash_while_writing_leaves_the_old_file(where: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, {"step": 1})

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, crash)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, {"weight": torch.zeros(1)})
    assert load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a"]


LIMITED = """
import resource
import torch
from contrastive_curvature.online import load_checkpoint, save_checkpoint
save_checkpoint("run.pt", {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save_checkpoint("run.pt", {"step": 2, "weight": torch.zeros(10_000)})
except OSError as error:
    print(error.errno, load_checkpoint("run.pt")["step"])
"""


def test_a_disk_that_is_full_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The system's own reason reaches the user, where torch's writer hides it; and the old file stays."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIMITED],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.split() == [str(errno.EFBIG), "1"], done.stderr
    assert os.listdir(tmp_path) == ["run.pt"]


def test_places_and_modes_of_files(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "run.pt"
    link.symlink_to(Path("far") / "real.pt")  # a target that is not there yet
    before = os.umask(0o077)
    try:
        save_checkpoint(link, {"step": 1})
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert stat.S_IMODE((tmp_path / "far" / "real.pt").stat().st_mode) == 0o600
    with pytest.raises(cc.InputError, match="far: expected a file, got a folder"):
        save_checkpoint(tmp_path / "far", {})
    with pytest.raises(cc.InputError, match=r"a file in a folder that exists, got no folder .*nowhere"):
        save_checkpoint(tmp_path / "nowhere" / "a", {})
    assert sorted(os.listdir(tmp_path)) == ["far", "run.pt"]
