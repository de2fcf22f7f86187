"""States as files: whatever is damaged is refused, and nothing is half written. test_states.py reads them back."""

from pathlib import Path

import pytest
import torch
from part_cases import batches_of, content_of, make, points
from safetensors.torch import save
from tables import each

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


@each("n", [12, 1200])
def test_a_file_of_curvature_does_not_hold_the_data(n: int, device: str) -> None:
    """The curvature, the sample with its classes, and points that say what is typical; no inputs."""
    la, loader = make("sampled", device), [points(device, n)]
    first = la.part_statistics(loader, (0, 1))
    assert len(content_of(first)) <= 16_000 + n * 8 * 5
    assert len(content_of(la.part_curvature(loader, (0, 1), first))) <= 16_000 + n * 8 * 7
