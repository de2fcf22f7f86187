"""States as files: what is written comes back, whatever is damaged is refused, and nothing is ever half written."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from part_cases import CASES, batches_of, close_states, content_of, make
from safetensors.torch import save
from tables import covering

from contrastive_curvature import artifact
from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.state import State

pytestmark = pytest.mark.parametrize("device", DEVICES)

_WRITTEN: dict[tuple[str, str, str], State] = {}


def state(case: str, kind: str, device: str) -> State:
    """One state of a kind, computed once."""
    if (case, kind, device) not in _WRITTEN:
        la, loader = make(case, device), batches_of(case, device, [5, 5, 2])
        first = la.part_statistics(loader, (0, 1))
        _WRITTEN[case, "statistics", device] = first
        _WRITTEN[case, "curvature", device] = la.part_curvature(loader, (0, 1), first)
    return _WRITTEN[case, kind, device]


def same(one: State, other: State) -> bool:
    return close_states(one, other, 0.0) and one.found.contributions == other.found.contributions


@covering(1, kind=["statistics", "curvature"], case=list(CASES))
def test_what_is_written_comes_back(case: str, kind: str, device: str, tmp_path: Path) -> None:
    written = state(case, kind, device)
    for path in (tmp_path / "a.safetensors", str(tmp_path / "b")):
        written.save(path)
        read = State.load(path).to(torch.device(device))
        assert same(read, written)
        assert content_of(read) == content_of(written) == Path(path).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b"]


def test_equal_states_are_equal_files(device: str) -> None:
    la, loader = make("kron sampled", device), batches_of("kron sampled", device, [5, 5, 2])
    assert content_of(la.part_statistics(loader, (0, 1))) == content_of(state("kron sampled", "statistics", device))


def test_other_files_are_refused_by_name(device: str, tmp_path: Path) -> None:
    path = tmp_path / "part"
    state("sampled", "statistics", device).save(path)
    content = path.read_bytes()
    foreign = save({"weight": torch.zeros(3, device=device)})
    for other, message in (
        (b"", "a damaged one, or something else. Compute this part again"),
        (content[:-1], "a damaged one, or something else. Compute this part again"),
        (content[:-1] + bytes([content[-1] ^ 1]), "its checksum is another. Compute this part again"),
        (foreign, "a safetensors file of something else. la.part_statistics"),
    ):
        path.write_bytes(other)
        with pytest.raises(InputError, match=r"part: expected a state of a part of a data set, got .*" + message):
            State.load(path)
    with pytest.raises(InputError, match="none: expected a state of a part of a data set, got no such file"):
        State.load(tmp_path / "none")
    with pytest.raises(InputError, match="expected a file in a folder that exists"):
        state("sampled", "statistics", device).save(tmp_path / "none" / "a")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_says_so(device: str, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(PermissionError):
            state("sampled", "statistics", device).save(folder / "a")
        assert not os.listdir(folder)
    finally:
        folder.chmod(stat.S_IRWXU)


def test_an_interrupted_write_leaves_the_old_file(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "a", state("sampled", "statistics", device)
    old.save(path)

    def interrupted(_: int) -> None:
        msg = "no space left on device"
        raise OSError(msg)

    monkeypatch.setattr(artifact.os, "fsync", interrupted)
    with pytest.raises(OSError, match="no space left"):
        state("sampled", "curvature", device).save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"]
    assert same(State.load(path).to(torch.device(device)), old)


def test_nothing_in_a_file_is_executed(device: str, tmp_path: Path) -> None:
    """A pickle, which torch.load would run, is a damaged file here."""

    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    torch.save({"state": Trap()}, tmp_path / "pickle")
    with pytest.raises(InputError):
        State.load(tmp_path / "pickle")
    assert not (tmp_path / "sprung").exists()
    del device


@pytest.mark.parametrize("n", [12, 1200])
def test_files_are_as_large_as_what_they_hold(n: int, device: str) -> None:
    """Sums of classes, the sample, and 2,000 points that say what is typical; not all points."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    y = torch.arange(n, device=device) % 3
    la, loader = make("sampled", device), [(x, y)]
    first = la.part_statistics(loader, (0, 1))
    second = la.part_curvature(loader, (0, 1), first)
    dim, features, entry = 3, 5, 8
    of_point = entry * (dim + 2)
    parameters = dim * (features + 1)
    classes = 3 * entry * (dim + 2)
    sample, probe, header = 7 * of_point, 2 * entry * 5, 6000
    assert len(content_of(first)) <= classes + sample + n * of_point + probe + header
    assert len(content_of(second)) <= 3 * entry * parameters + n * entry * (features + 1) + probe + header
