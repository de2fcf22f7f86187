"""A kill or a full disk leaves the old file or the new one, whole; the next save removes what a killed one left."""

import contextlib
import errno
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import each
from tiny import data, encoder

import contrastive_curvature as cc

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="neither kills nor limits of resources"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DEVICE = "cpu"
"""Files are the same on every device, and a forked process has no GPU."""


def posterior(n: int = 60) -> Any:
    la: Any = Laplace(encoder(DEVICE), "contrastive")
    la.fit([data(n, DEVICE)])
    la.calibrate([data(30, DEVICE)[0]])
    return la


def retriever(n: int = 60) -> cc.Retriever:
    x, y = data(n, DEVICE)
    return cc.Retriever(encoder(DEVICE)).fit(x, y, held_out=(x[:40] + 1, y[:40]))


def numbers(loaded: Any) -> list[Any]:
    found = loaded(data(5, DEVICE)[0])
    names = ("label", "confidence", "p_value") if isinstance(loaded, cc.Retriever) else ("uncertainty", "p_value")
    return [getattr(found, name).tolist() for name in names]


VALUES: dict[str, tuple[Callable[[int], Any], Callable[[Any, Path], Any], Callable[[Path], Any]]] = {
    "a posterior": (
        posterior,
        lambda la, folder: la.save_pretrained(folder, overwrite=True),
        lambda folder: cc.load_pretrained(folder, encoder(DEVICE)),
    ),
    "a retriever": (
        retriever,
        lambda value, folder: value.save(folder, overwrite=True),
        lambda folder: cc.Retriever.load(folder, encoder(DEVICE)),
    ),
}


class Saves:
    """A folder in which a process saves a second value over the first one, and is killed."""

    def __init__(self, name: str, folder: Path) -> None:
        make, self.write, self.load = VALUES[name]
        self.folder, self.values, self.numbers = folder, [make(40), make(60)], []
        for value in self.values:
            self.write(value, folder)
            self.numbers.append(numbers(self.load(folder)))
        assert self.numbers[0] != self.numbers[1]

    def there(self) -> int:
        """Return which of the values is in the folder."""
        return self.numbers.index(numbers(self.load(self.folder)))

    def begin(self) -> None:
        """Save the first value; nothing else is there then."""
        self.write(self.values[0], self.folder)
        assert self.there() == 0
        assert not list(self.folder.rglob(".*"))

    def fork(self, line: int | None = None) -> int:
        """Save the second value in another process, which kills itself at a line of a function that writes."""
        if pid := os.fork():
            return pid
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)  # a fork lacks the threads of its parent
            if line is not None:
                sys.settrace(killer(line))
            self.write(self.values[1], self.folder)
        os._exit(0)


WRITING = {"write_whole", "_unfinished", "_remove_abandoned", "_lock", "save", "save_pretrained"}
"""Functions that a kill may interrupt."""


def killer(line: int) -> Any:
    lines = iter(range(line))

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name not in WRITING:
            return None
        if event == "line" and next(lines, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


@each("name", VALUES)
def test_a_kill_at_every_line(name: str, tmp_path: Path) -> None:
    saves, found, status = Saves(name, tmp_path / name), list[int](), signal.SIGKILL.value
    while status == signal.SIGKILL:
        saves.begin()
        status = os.waitpid(saves.fork(len(found)), 0)[1]
        found.append(saves.there())
    assert len(found) > 30
    assert 0 < sum(found) < len(found)
    assert found == sorted(found)
    saves.begin()


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
@each("name", VALUES)
def test_a_kill_at_a_random_moment(name: str, tmp_path: Path, kills: int) -> None:
    saves, start = Saves(name, tmp_path / name), time.monotonic()
    os.waitpid(saves.fork(), 0)
    whole, left = time.monotonic() - start, 0
    found = []
    for _ in range(kills):
        saves.begin()
        pid = saves.fork()
        time.sleep(random.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found.append(saves.there())
        left += len(list(saves.folder.rglob(".*")))
    saves.begin()
    print(f"{name}: {kills} kills left {sum(found)} new ones, {kills - sum(found)} old ones, {left} unfinished files")
    assert kills < 100 or 0 < sum(found) < kills


def state(folder: Path, la: Any) -> None:
    new: Any = Laplace(la.model.model, "contrastive")
    new.part_statistics([data(40, DEVICE)], (0, 1)).save(folder / "state.safetensors")


def embeddings(folder: Path, la: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    features = arrow.FixedSizeListArray.from_arrays(data(400, DEVICE)[0].flatten().numpy(), 4)
    source = folder.with_name("source.parquet")
    parquet.write_table(arrow.table({"features": features}), source)
    (folder / "found").mkdir(exist_ok=True)
    cc.io.jobs.EmbeddingFolder(folder / "found", la, cc.jobs.ParquetParts(source, 1)).write(la, 0)


def onnx(folder: Path, la: Any) -> None:
    pytest.importorskip("onnxscript")
    la.export(folder / "a.onnx")


WRITERS: dict[str, Callable[[Path, Any], object]] = {
    "a posterior": lambda folder, la: la.save_pretrained(folder / "saved", overwrite=True),
    "a retriever": lambda folder, _: retriever().save(folder / "saved", overwrite=True),
    "a graph": lambda folder, la: la.export(folder / "a.pt2"),
    "a graph of ONNX": onnx,
    "a state": state,
    "embeddings": embeddings,
    "a page": lambda folder, la: cc.report.evaluate(la, [data(40, DEVICE)], n_samples=0).to_html(folder / "page.html"),
}


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow above a size: the error is another than that of a full disk, and comes at the same places."""
    resource = importlib.import_module("resource")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@each("name", WRITERS)
def test_a_full_disk_is_an_oserror_and_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    la, folder = posterior(), tmp_path / name / "folder"
    folder.mkdir(parents=True)
    WRITERS[name](folder, la)
    sizes = [len(content) for content in files(folder).values()]
    for path in files(folder):
        (folder / path).write_bytes(b"as before")
    before = files(folder)
    for size in (0, max(sizes) - 1):
        with full_disk(size):
            WRITERS[name](folder, la)
        assert files(folder) == before
