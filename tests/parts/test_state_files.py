"""States as files: whatever is damaged is refused, and nothing is half written. test_states.py reads them back."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from part_cases import batches_of, content_of, make, points
from safetensors.torch import save
from tables import each

from contrastive_curvature import artifact
from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.state import State


def state(device: str, seed: int = 7) -> State:
    return make("sampled", device).part_statistics(batches_of(device, [5, 5, 2], seed=seed), (0, 1))


def test_other_files_are_refused_by_name(device: str, tmp_path: Path) -> None:
    path = tmp_path / "part"
    state(device).save(path)
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
        state(device).save(tmp_path / "none" / "a")


def test_an_interrupted_write_leaves_the_old_file(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "a", state(device)
    old.save(path)

    def interrupted(_: int) -> None:
        msg = "no space left on device"
        raise OSError(msg)

    monkeypatch.setattr(artifact.os, "fsync", interrupted)
    with pytest.raises(OSError, match="no space left"):
        state(device, seed=8).save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"]
    assert content_of(State.load(path)) == content_of(old)


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


@each("n", [12, 1200])
def test_a_file_of_curvature_does_not_hold_the_data(n: int, device: str) -> None:
    """The curvature, the sample with its classes, and points that say what is typical; no inputs."""
    la, loader = make("sampled", device), [points(device, n)]
    first = la.part_statistics(loader, (0, 1))
    assert len(content_of(first)) <= 16_000 + n * 8 * 5
    assert len(content_of(la.part_curvature(loader, (0, 1), first))) <= 16_000 + n * 8 * 7
