"""What a checkpoint file is on the disk: links, modes, what killed writers leave, full disks, damage."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from online_training import checksum

import contrastive_curvature as cc
from contrastive_curvature.online import load_checkpoint, save_checkpoint

NAN = float("nan")
ROOT = Path(__file__).resolve().parents[2]
CONTENT: dict[str, Any] = {
    "names": ["a", "bc", None, True, 3, 2.5],
    "weights": {f"layer {i}": torch.arange(i + 2.0) for i in range(6)},
    "python": random.getstate(),
}


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "run.pt"
    link.symlink_to(Path("far") / "real.pt")
    for value in (1, 2):  # the target is not there at first
        save_checkpoint(link, {"value": value})
        assert link.is_symlink()
        assert load_checkpoint(tmp_path / "far" / "real.pt") == {"value": value}
    assert os.listdir(tmp_path / "far") == ["real.pt"]
    assert sorted(os.listdir(tmp_path)) == ["far", "run.pt"]


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "lost").symlink_to(Path("nowhere") / "a")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("circle", "links that form a circle"),
        ("lost", "a file in a folder that exists, got no folder .*nowhere"),
        ("folder", "expected a file, got a folder"),
        ("pipe", "expected a file, got a folder, a device or a pipe"),
    ):
        with pytest.raises(cc.InputError, match=f"{name}: .*{message}"):
            save_checkpoint(tmp_path / name, CONTENT)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["circle", "folder", "lost", "pipe"]


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_the_umask_rules_over_new_files_and_the_mode_of_old_ones_stays(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "a", CONTENT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
    (tmp_path / "a").chmod(0o640)
    save_checkpoint(tmp_path / "a", CONTENT)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


KILLED = """
import os, signal, sys
import torch
from contrastive_curvature.online import save_checkpoint
whole = torch.save
def killed(content, file):
    whole(content, file)
    file.flush()
    print(os.listdir("."), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
save_checkpoint("run.pt", {"weight": torch.zeros(9)})
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    done = python(KILLED, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = os.listdir(tmp_path)
    assert re.fullmatch(r"\.run\.pt\.[0-9a-f]{12}\.tmp", left)
    others = {
        ".run.pt.cafe.tmp": b"PK",  # another pattern
        ".run2.pt.0123456789ab.tmp": b"PK",  # of another file
        "run.pt.0123456789ab.tmp": b"PK",
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    save_checkpoint(tmp_path / "run.pt", CONTENT)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "run.pt"])


def test_writers_of_one_file_do_not_remove_what_the_others_write(tmp_path: Path) -> None:
    path, errors = tmp_path / "run.pt", []

    def write(who: int) -> None:
        try:
            for turn in range(40):
                save_checkpoint(path, {"who": who, "turn": turn})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert load_checkpoint(path)["turn"] == 39
    assert os.listdir(tmp_path) == ["run.pt"]


@pytest.mark.parametrize("when", ["save", "write", "fsync"])
def test_a_full_disk_leaves_the_old_file(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, CONTENT)
    full = OSError(errno.ENOSPC, "No space left on device")
    whole = torch.save

    class Full:
        """A file on a disk that is full after some bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 3000

        def write(self, raw: Any) -> int:
            self.left -= len(raw)
            if self.left < 0:
                raise full
            return self.file.write(raw)

        def flush(self) -> None:
            self.file.flush()

    def save(content: Any, file: Any) -> None:
        if when == "save":
            file.write(b"some")
            raise full
        whole(content, Full(file))

    def fsync(_: int) -> None:
        raise full

    if when == "fsync":
        monkeypatch.setattr(os, "fsync", fsync)
    else:
        monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="No space left") as caught:
        save_checkpoint(path, {"weight": torch.zeros(10000)})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert checksum(load_checkpoint(path)) == checksum(CONTENT)
    assert os.listdir(tmp_path) == ["a"]


LIMITED = """
import resource, signal
import torch
from contrastive_curvature.online import load_checkpoint, save_checkpoint
save_checkpoint("run.pt", {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save_checkpoint("run.pt", {"step": 2, "weight": torch.zeros(10_000)})
except OSError as error:
    print(error.errno, load_checkpoint("run.pt")["step"])
"""


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The system's own refusal in the middle of a file."""
    assert hasattr(resource, "RLIMIT_FSIZE")
    done = python(LIMITED, tmp_path)
    assert done.stdout.split() == [str(errno.EFBIG), "1"], done.stderr
    assert os.listdir(tmp_path) == ["run.pt"]


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_are_noticed_or_without_effect(seed: int, tmp_path: Path) -> None:
    """Ten files each; in the last 1,500 bytes is the directory of the archive, where torch looks its entries up."""
    path, rng = tmp_path / "a", random.Random(seed)
    save_checkpoint(path, CONTENT)
    whole, right = path.read_bytes(), checksum(CONTENT)
    for _ in range(10):
        raw = bytearray(whole)
        first = rng.choice([0, len(raw) - 1500])
        for _ in range(rng.randint(1, 6)):
            raw[rng.randrange(first, len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(raw))
        try:
            assert checksum(load_checkpoint(path)) == right
        except cc.InputError as error:
            assert str(path) in str(error)  # noqa: PT017  refused or the same: both are right
