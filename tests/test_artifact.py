"""Files with a header: they come back as they were, are written whole or not at all, and others are refused by name."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tables import each
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.artifact import Header, read_header, read_tensors, target_folder, write_tensors


class Box(Header):
    kind: ClassVar[str] = "box"
    described: ClassVar[str] = "a box"
    made_by: ClassVar[str] = "Make one."
    repaired_by: ClassVar[str] = "Make it again."

    sizes: list[int]


class Crate(Box):
    kind: ClassVar[str] = "crate"


BOX = Box(sizes=[2, 3])


TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.float64, torch.float16, torch.bfloat16, torch.complex64),
]


def tensors() -> dict[str, Tensor]:
    whole = torch.arange(12.0).reshape(3, 4)
    shared = {"whole": whole, "same": whole, "rows": whole[1:], "columns": whole[:, 1], "none": torch.zeros(0, 2)}
    return {**shared, "count": torch.tensor(3), **{str(kind): whole[0, :3].to(kind) for kind in TYPES}}


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", BOX, tensors())
    header, found = read_tensors(tmp_path / "f", Box)
    assert header == read_header(tmp_path / "f", Box) == BOX
    assert {name: (part.dtype, part.tolist()) for name, part in found.items()} == {
        name: (part.dtype, part.tolist()) for name, part in tensors().items()
    }
    write_tensors(tmp_path / "g", BOX, dict(reversed(tensors().items())))
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()


@each("header", [Box(sizes=[10**digits]) for digits in range(8)])
def test_a_reader_may_map_the_file_to_memory(tmp_path: Path, header: Box) -> None:
    write_tensors(tmp_path / "f", header, tensors())
    content = (tmp_path / "f").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    about = json.loads(content[8:start])
    assert all((start + about[name]["data_offsets"][0]) % part.itemsize == 0 for name, part in tensors().items())


def test_tensors_have_the_mode_of_the_file_that_they_replace(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "f").chmod(0o664)
    write_tensors(tmp_path / "f", BOX, tensors())
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o664


def changed(header: str, **changes: Any) -> str:
    return json.dumps({**json.loads(header), **changes})


REFUSED = [
    ("", "no whole JSON. Make it again"),
    (BOX.dumps()[:-9], "no whole JSON"),
    ('{"format": "other"}', "something else. Make one"),
    (Crate(sizes=[]).dumps(), "something else. Make one"),
    (changed(BOX.dumps(), version=9, written_by="7.1"), f"a box of version {artifact.VERSION}, got version 9."),
    (changed(BOX.dumps(), content={"sizes": [2, 4]}), "its checksum is another. Make it again"),
]


@each("text, message", REFUSED)
def test_a_header_of_something_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(cc.InputError, match="^here: .*" + message.replace(".", r"\.")):
        Box.loads(text, "here")


def test_every_changed_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write_tensors(here, BOX, {"a": torch.arange(3.0)})
    content = here.read_bytes()
    for place in range(len(content)):
        for other in (content[:place], content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]):
            here.write_bytes(other)
            try:
                header, found = read_tensors(here, Box)
            except cc.InputError as error:
                assert str(error).startswith(f"{here}: expected a box")  # noqa: PT017  most changes are refused
            else:  # a space of the header, or the name of the release
                assert header == BOX
                assert found["a"].tolist() == [0, 1, 2]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(cc.InputError, match=r"'thesis\.tex' in it and no box\.json"):
        target_folder("out", tmp_path, "box.json", "a box", overwrite=True)
    with pytest.raises(cc.InputError, match=r"^out: .*, which holds a box\. Pass overwrite=True to replace it"):
        target_folder("out", tmp_path, "thesis.tex", "a box", overwrite=False)
    assert target_folder("out", tmp_path, "thesis.tex", "a box", overwrite=True) == tmp_path


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    path, link = tmp_path / "f", tmp_path / "link"
    link.symlink_to(path)
    path.write_bytes(b"old")
    path.chmod(0o640)

    def fails(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifact.write_whole(link, fails)
    assert (path.read_bytes(), sorted(os.listdir(tmp_path))) == (b"old", ["f", "link"])
    artifact.write_whole(link, lambda file: file.write(b"new"))
    assert (path.read_bytes(), path.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o640, True)
    assert sorted(os.listdir(tmp_path)) == ["f", "link"]
    artifact.write_whole(link, lambda file: file.write(b"newer"), follow=False)
    assert (path.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"new", b"newer", False)


def test_a_header_that_no_reader_takes_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensors(tmp_path / "f", BOX, {})
    monkeypatch.setattr(artifact, "_LONGEST_HEADER", 5_000)
    with pytest.raises(cc.UnsupportedError, match=r"f: .* bytes of names and numbers are too many"):
        write_tensors(tmp_path / "f", Box(sizes=[7] * 5_000), {})
    assert read_header(tmp_path / "f", Box) == BOX


KILLED = """
import os, signal, sys
from contrastive_curvature.artifact import write_whole
def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write_whole(sys.argv[1], write)
"""


@each("locks", [True, False])
def test_a_killed_writer_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, own = tmp_path / "f[1]", tmp_path / ".f[1].mine.tmp"
    path.write_bytes(b"old")
    own.write_bytes(b"not of this library")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = set(tmp_path.iterdir()) - {path, own}
    if not locks:

        def refuses(*args: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuses)
        artifact.write_whole(path, lambda file: file.write(b"new"))
        assert left.exists(), "it may be of a writer that is still at work"
        an_hour_ago = time.time() - 3700
        os.utime(left, (an_hour_ago, an_hour_ago))
    artifact.write_whole(path, lambda file: file.write(b"newer"))
    assert path.read_bytes() == b"newer"
    assert set(tmp_path.iterdir()) == {path, own}


def test_writers_of_one_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"

    def write(file: Any) -> None:
        file.write(b"first to begin")
        os.utime(file.name, (0, 0))  # a slow one
        artifact.write_whole(path, lambda file: file.write(b"first to end"))
        assert path.read_bytes() == b"first to end"

    artifact.write_whole(path, write)
    assert path.read_bytes() == b"first to begin"

    # Another writer comes before a new file is locked, or before it replaces the old one.
    for module, name in ((artifact, "_lock"), (artifact.os, "replace")):
        with monkeypatch.context() as patched:
            call = getattr(module, name)

            def late(*args: Any, call: Any = call, undo: Any = patched.undo, **options: Any) -> Any:
                undo()
                artifact._remove_abandoned(path)
                return call(*args, **options)

            patched.setattr(module, name, late)
            artifact.write_whole(path, lambda file, name=name: file.write(name.encode()))
        assert path.read_bytes() == name.encode()
    assert list(tmp_path.iterdir()) == [path]
