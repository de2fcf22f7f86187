"""Files with a header: they come back as they were, are written whole or not at all, and others are refused by name."""

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


def tensors() -> dict[str, Tensor]:
    whole = torch.arange(12.0).reshape(3, 4)
    shared = {"whole": whole, "same": whole, "rows": whole[1:], "columns": whole[:, 1], "none": torch.zeros(0, 2)}
    return {**shared, "half": whole.bfloat16(), "count": torch.tensor(3)}


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", BOX, tensors())
    header, found = read_tensors(tmp_path / "f", Box)
    assert header == read_header(tmp_path / "f", Box) == BOX
    assert {name: (part.dtype, part.tolist()) for name, part in found.items()} == {
        name: (part.dtype, part.tolist()) for name, part in tensors().items()
    }
    write_tensors(tmp_path / "g", BOX, dict(reversed(tensors().items())))
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()


def changed(header: str, **changes: Any) -> str:
    return json.dumps({**json.loads(header), **changes})


REFUSED = [
    ("", "no whole JSON. Make it again"),
    (BOX.dumps()[:-9], "no whole JSON"),
    ('{"format": "other"}', "something else. Make one"),
    (Crate(sizes=[]).dumps(), "something else. Make one"),
    (changed(BOX.dumps(), version=9, written_by="7.1"), "a box of version 5, got version 9. contrastive_curvature 7.1"),
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
    assert path.read_bytes() == b"old"
    artifact.write_whole(link, lambda file: file.write(b"new"))
    assert (path.read_bytes(), path.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o640, True)
    assert sorted(os.listdir(tmp_path)) == ["f", "link"]
    artifact.write_whole(link, lambda file: file.write(b"newer"), follow=False)
    assert (path.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"new", b"newer", False)


KILLED = """
import os, signal, sys
from contrastive_curvature.artifact import write_whole
def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write_whole(sys.argv[1], write)
"""


def test_a_killed_writer_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = [name for name in os.listdir(tmp_path) if name != "f"]
    artifact.write_whole(path, lambda file: file.write(b"new"))
    assert sorted(os.listdir(tmp_path)) == sorted([left, "f"]), "it may be of a writer that is still at work"
    an_hour_ago = time.time() - 3700
    os.utime(tmp_path / left, (an_hour_ago, an_hour_ago))
    artifact.write_whole(path, lambda file: file.write(b"newer"))
    assert os.listdir(tmp_path) == ["f"]
