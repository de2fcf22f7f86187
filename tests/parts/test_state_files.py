"""States as files: what is written comes back, whatever is damaged is refused, and nothing is ever half written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from part_cases import CASES, batches_of, close_states, make
from safetensors.torch import save

from contrastive_curvature import artifact
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, InputTypeError
from contrastive_curvature.fit.state import State
from contrastive_curvature.io.states import VERSION, from_bytes, to_bytes

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


@pytest.mark.parametrize("kind", ["statistics", "curvature"])
@pytest.mark.parametrize("case", list(CASES))
def test_what_is_written_comes_back(case: str, kind: str, device: str, tmp_path: Path) -> None:
    written = state(case, kind, device)
    for path in (tmp_path / "a.safetensors", str(tmp_path / "b")):
        written.save(path)
        read = State.load(path).to(torch.device(device))
        assert same(read, written)
        assert to_bytes(read) == to_bytes(written) == Path(path).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b"]


def test_equal_states_are_equal_files(device: str) -> None:
    la, loader = make("kron sampled", device), batches_of("kron sampled", device, [5, 5, 2])
    assert to_bytes(la.part_statistics(loader, (0, 1))) == to_bytes(state("kron sampled", "statistics", device))


def refuses(content: bytes) -> bool:
    """Whether bytes are refused by name, and not by any other exception."""
    try:
        from_bytes(content, "part.safetensors")
    except InputError as error:
        return str(error).startswith("part.safetensors: expected ")
    return False


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject, device: str) -> None:
    written = state("kron sampled", "curvature", device)
    content = to_bytes(written)
    header = 8 + int.from_bytes(content[:8], "little")
    regions = ((0, 8), (8, 60), (8, header), (header, len(content)))
    for start, stop in regions:
        place = data.draw(st.integers(start, stop - 1))
        changed = bytearray(content)
        changed[place] ^= data.draw(st.integers(1, 255))
        # Some characters of the header may be exchanged for others that mean the same: spaces at its end.
        assert refuses(bytes(changed)) or same(from_bytes(bytes(changed)), from_bytes(content))


def test_every_byte_of_a_small_state_is_checked(device: str) -> None:
    """All bytes, each changed in one way."""
    content = to_bytes(state("no margin", "curvature", device))
    header = 8 + int.from_bytes(content[:8], "little")
    known, unnoticed = from_bytes(content), []
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 1 + place % 7
        if not refuses(bytes(changed)):
            assert same(from_bytes(bytes(changed)), known)
            unnoticed.append(place)
    assert all(place < header for place in unnoticed)
    assert len(unnoticed) <= 8


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_files_are_refused(data: st.DataObject, device: str) -> None:
    content = to_bytes(state("sampled", "statistics", device))
    assert refuses(content[: data.draw(st.integers(0, len(content) - 1))])
    assert refuses(content + b"\0")


@given(content=st.binary(max_size=300))
def test_anything_else_is_refused(content: bytes, device: str) -> None:
    del device
    assert refuses(content)
    assert refuses(len(content).to_bytes(8, "little") + content)


def about(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stands in the header of a file: all of it, and what this library wrote."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header, json.loads(header["__metadata__"]["part"])


def rewritten(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The same file with something else written in its header."""
    header, mine = about(content)
    change(mine)
    header["__metadata__"]["part"] = json.dumps(mine)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :]


def test_files_of_others_and_of_other_versions_are_named(device: str, tmp_path: Path) -> None:
    content = to_bytes(state("sampled", "statistics", device))
    assert same(from_bytes(rewritten(content, lambda _: None)), from_bytes(content))
    foreign = tmp_path / "weights.safetensors"
    foreign.write_bytes(save({"weight": torch.zeros(3, device=device)}))
    with pytest.raises(InputError, match=r"weights.safetensors: expected a state .* got a file of another kind"):
        State.load(foreign)
    for metadata in ({"format": "pt"}, {"part": "{}"}, {"part": '{"format": "other"}'}):
        foreign.write_bytes(save({"weight": torch.zeros(3, device=device)}, metadata))
        with pytest.raises(InputError, match="a file of another kind"):
            State.load(foreign)
    for version in (VERSION + 1, "1", None, [1]):
        changed = rewritten(content, lambda mine, version=version: mine.update(version=version))  # type: ignore[misc]
        with pytest.raises(InputError, match=rf"state: expected version {VERSION}, got version"):
            from_bytes(changed)


@pytest.mark.parametrize("key", ["state", "checksum"])
@pytest.mark.parametrize("value", [None, "", "{}", 5, [], "x" * 64])
def test_a_header_of_other_content_is_refused(key: str, value: Any, device: str) -> None:
    content = to_bytes(state("sampled", "statistics", device))
    with pytest.raises(InputError, match=r"a damaged one. Compute this part again"):
        from_bytes(rewritten(content, lambda mine: mine.update({key: value})))


def test_a_header_as_deep_as_a_well_is_refused(device: str) -> None:
    del device
    text = b"[" * 100_000
    assert refuses(len(text).to_bytes(8, "little") + text)
    assert refuses((2**63).to_bytes(8, "little") + text)


def test_paths_that_are_no_files_are_refused(device: str, tmp_path: Path) -> None:
    written = state("sampled", "statistics", device)
    with pytest.raises(InputError, match="expected a file that can be read, got Is a directory"):
        State.load(tmp_path)
    with pytest.raises(InputError, match="expected a file that can be read, got No such file"):
        State.load(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="a damaged one"):
        State.load(tmp_path / "empty")
    with pytest.raises(InputError, match="expected a file in a folder that exists"):
        written.save(tmp_path / "none" / "a")
    with pytest.raises(InputError, match="expected a file, got a folder"):
        written.save(tmp_path)
    for wrong in (5, None, b"path"):
        with pytest.raises(InputTypeError, match="path: expected a path"):
            State.load(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputTypeError, match="path: expected a path"):
            written.save(wrong)  # type: ignore[arg-type]


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
    assert issubclass(InputError, ContrastiveCurvatureError)
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
    assert len(to_bytes(first)) <= classes + sample + n * of_point + probe + header
    assert len(to_bytes(second)) <= 3 * entry * parameters + n * entry * (features + 1) + probe + header
