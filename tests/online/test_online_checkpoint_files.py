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
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature.errors import InputTypeError
from contrastive_curvature.online import checkpoint, load_checkpoint, save_checkpoint
from contrastive_curvature.online.plain import checksum

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


def test_entries_that_change_places_are_noticed(tmp_path: Path) -> None:
    """Every entry of the archive is whole, and yet it holds another tensor under a name."""
    path = tmp_path / "a"
    save_checkpoint(path, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})

    def swapped(name: str, raw: bytes, entries: dict[str, bytes]) -> bytes:
        other = {"data/0": "data/1", "data/1": "data/0"}.get(name.split("/", 1)[1])
        return raw if other is None else entries[f"{name.split('/', 1)[0]}/{other}"]

    rewrite(path, swapped)
    assert torch.load(path, weights_only=True)["content"]["a"].tolist() == [3.0, 4.0]
    with pytest.raises(cc.InputError, match=r"damaged file \(the content is not that of its checksum\)"):
        load_checkpoint(path)


def rewrite(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in entries.items():
            archive.writestr(name, change(name, raw, entries))


def test_bombs_are_refused_before_they_go_off(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, {"weight": torch.zeros(100_000)})
    rewrite(path, lambda _, raw, __: raw, zipfile.ZIP_DEFLATED)
    with pytest.raises(cc.InputError, match="compressed entries, which torch does not write"):
        load_checkpoint(path)
    # 2^40 bytes of zeros, made by a function that torch lets a file call.
    bomb = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."
    save_checkpoint(path, {})
    rewrite(path, lambda name, raw, _: bomb if name.endswith(".pkl") else raw)
    with pytest.raises(cc.InputError, match=r"more than plain content \(__builtin__ bytearray\)"):
        load_checkpoint(path)
    lists: Any = []
    for _ in range(60):
        lists = [lists, lists]
    forged(path, {"lists": lists}, "0" * 32)
    with pytest.raises(cc.InputError, match="as many as the file has bytes"):
        load_checkpoint(path)
    deep: Any = []
    for _ in range(120):
        deep = [deep]
    forged(path, {"deep": deep}, "0" * 32)
    with pytest.raises(cc.InputError, match="nested more than 100 levels deep"):
        load_checkpoint(path)


def forged(path: Path, content: Any, checked: str | None = None) -> None:
    """A file with a right header, written past the checks."""
    whole = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "content": content}
    torch.save({**whole, "checksum": checksum(content) if checked is None else checked}, path)


CLAIMS = {
    "stride 0": lambda: torch.zeros(1).expand(2**45),
    "strides 0": lambda: torch.zeros(4).as_strided((2**20, 2**20, 4), (0, 0, 1)),
    "sparse": lambda: torch.zeros(3, 3).to_sparse(),
    "csr": lambda: torch.zeros(3, 3).to_sparse_csr(),
    "meta": lambda: torch.zeros(2**20, device="meta"),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_that_are_larger_than_their_file_are_refused(claim: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    forged(path, {"x": [CLAIMS[claim]()]}, "0" * 32)
    with pytest.raises(cc.InputError, match=r"a: expected a checkpoint"):
        load_checkpoint(path)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    path, marked = tmp_path / "a", torch.zeros(2)
    marked.note = "kept with it"
    for tensor, message in (
        (torch.zeros(3, 3).to_sparse(), "a dense tensor, got one of layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "a dense tensor, got one without data"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantised one"),
        (marked, r"got one with the attributes \['note'\].*detach"),
    ):
        with pytest.raises(InputTypeError, match=rf"content\['x'\]: expected .*{message}"):
            save_checkpoint(path, {"x": tensor})
    with pytest.raises(InputTypeError, match="content: expected a dictionary, got a list"):
        save_checkpoint(path, [1])  # type: ignore[arg-type]
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InputTypeError, match="nested more than 100 levels deep"):
        save_checkpoint(path, {"x": circle})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_tensor_comes_back(device: str, tmp_path: Path) -> None:
    base = torch.randn(4, 6, device=device)
    shared = {"again": [1, 2]}
    content = {
        "expanded": torch.ones(1, 3, device=device).expand(500, 3),
        "overlapping": torch.arange(5.0, device=device).unfold(0, 4, 1),
        "transposed": base.T,
        "view": base[1:, ::2],
        "bfloat16": base.bfloat16(),
        "half": base.half(),
        "complex": torch.view_as_complex(base.view(4, 3, 2)).conj(),
        "bool": base > 0,
        "uint16": torch.arange(3, device=device).to(torch.uint16),
        "empty": torch.zeros(0, 3, device=device),
        "scalar": torch.tensor(NAN, device=device),
        "parameter": nn.Parameter(base),
        "frozen": nn.Parameter(torch.ones(1, device=device).expand(300), requires_grad=False),
        "state": nn.Sequential(nn.BatchNorm1d(3)).to(device).state_dict(),
        "twice": [shared, shared],
        "nan": NAN,
    }
    save_checkpoint(tmp_path / "a", content)
    found = load_checkpoint(tmp_path / "a", device)
    assert checksum(found) == checksum(content)
    assert found["state"]._metadata == content["state"]._metadata  # type: ignore[attr-defined]
    assert type(found["frozen"]) is nn.Parameter
    for name in ("expanded", "overlapping", "bfloat16", "transposed"):
        assert torch.equal(found[name], content[name]), name


def test_the_checksum_sees_every_kind_of_change() -> None:
    contents = [
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {"a": 1, "b": 2.0},
        {"a": True, "b": 2},
        {"a": "1", "b": 2},
        {"a": [1], "b": 2},
        {"a": (1,), "b": 2},
        {"a": torch.tensor(1), "b": 2},
        {"a": torch.tensor([1]), "b": 2},
        {"a": torch.tensor([1], dtype=torch.int32), "b": 2},
        {"a": torch.tensor([0.0]), "b": 2},
        {"a": torch.tensor([-0.0]), "b": 2},
        {"a": nn.Parameter(torch.tensor([0.0])), "b": 2},
        {"ab": 1, "": 2},
        {"a": ["", "ab"], "b": 2},
        {"a": ["a", "b"], "b": 2},
        {"a": None, "b": 2},
    ]
    assert len({checksum(content) for content in contents}) == len(contents)
