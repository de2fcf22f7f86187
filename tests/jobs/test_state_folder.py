"""Folders of states: what is there is kept, what is lost is computed again alone, what is foreign is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from job_cases import assert_same, data, fit_in, fitted, posterior, write

import contrastive_curvature as cc
from contrastive_curvature.fit.state import State, digest_of
from contrastive_curvature.io.jobs.on_ray import made

pytestmark = pytest.mark.parametrize("device", DEVICES)

PARTS = 4


class Watched:
    """A posterior that counts which parts it computes."""

    def __init__(self, la: Any) -> None:
        self.la, self.seen = la, []

    def __getattr__(self, name: str) -> Any:
        if name in ("part_statistics", "part_curvature"):

            def watched(loader: Any, part: tuple[int, int], *rest: Any) -> Any:
                self.seen.append((name, part[0]))
                return getattr(self.la, name)(loader, part, *rest)

            return watched
        return getattr(self.la, name)


def parts_in(folder: Path, count: int = PARTS) -> cc.jobs.ParquetParts:
    return cc.jobs.ParquetParts(write(folder / "d", *data()), count)


def test_what_is_there_is_kept_and_what_is_lost_is_computed_alone(device: str, tmp_path: Path) -> None:
    parts, folder = parts_in(tmp_path), tmp_path / "states"
    fit_in(folder, posterior(device), parts)
    again = Watched(posterior(device))
    fit_in(folder, again, parts)
    assert again.seen == []
    states = cc.jobs.StateFolder(folder, PARTS, parts.fingerprint)
    states.file("statistics", 1).unlink()
    damaged = states.file("curvature", 2)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    states.file("curvature", 3).write_bytes(content[:40])
    fit_in(folder, again, parts)
    assert again.seen == [("part_statistics", 1), ("part_curvature", 2), ("part_curvature", 3)]
    assert_same(again.la, fitted(device), data()[0][:20].to(device))


@pytest.mark.parametrize("change", [{"margin": 0.2}, {"negative_samples": 39}, {"structure": "diag"}])
def test_states_of_other_options_are_refused(change: dict[str, Any], device: str, tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    fit_in(tmp_path / "states", posterior(device), parts)
    states = cc.jobs.StateFolder(tmp_path / "states", PARTS, parts.fingerprint)
    kept = states.file("statistics", 0).read_bytes()
    identity = posterior(device, **change).part_statistics([], (0, PARTS)).identity
    with pytest.raises(cc.InputError, match=r"statistics: (loss|options|structure)") as raised:
        states.missing("statistics", identity)
    assert "Use another folder, or delete this one" in raised.value.__notes__[0]
    assert states.file("statistics", 0).read_bytes() == kept


def test_states_of_another_encoder_are_refused(device: str, tmp_path: Path) -> None:
    parts, other = parts_in(tmp_path), posterior(device)
    fit_in(tmp_path / "states", posterior(device), parts)
    with torch.no_grad():
        other.model.model[2].bias[0] += 1e-9
    states = cc.jobs.StateFolder(tmp_path / "states", PARTS, parts.fingerprint)
    with pytest.raises(cc.InputError, match="statistics: encoder"):
        states.missing("statistics", other.part_statistics([], (0, PARTS)).identity)


def test_the_identity_is_that_of_every_part(device: str, tmp_path: Path) -> None:
    parts, la = parts_in(tmp_path), posterior(device)
    found = [la.part_statistics(parts[k], (k, PARTS)) for k in range(PARTS)]
    identity = posterior(device).part_statistics([], (0, PARTS)).identity
    assert all(state.identity == identity for state in found)
    statistics = State.merged(found)
    wanted = {**identity, "statistics": digest_of(statistics)}
    assert la.part_curvature(parts[3], (3, PARTS), statistics).identity == wanted


def test_another_source_or_number_of_parts_is_refused(device: str, tmp_path: Path) -> None:
    del device
    parts = parts_in(tmp_path)
    cc.jobs.StateFolder(tmp_path / "states", PARTS, parts.fingerprint)
    with pytest.raises(cc.InputError, match=r"folder: expected one of a job with the same parts \(3\), got 4"):
        cc.jobs.StateFolder(tmp_path / "states", 3, parts.fingerprint)
    with pytest.raises(cc.InputError, match="with the same source"):
        cc.jobs.StateFolder(tmp_path / "states", PARTS, "other")


def test_folders_of_others_are_left_alone(device: str, tmp_path: Path) -> None:
    del device
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(cc.InputError, match=r"has 'thesis.tex' in it"):
        cc.jobs.StateFolder(tmp_path, 2)
    with pytest.raises(cc.InputError, match="no folder"):
        cc.jobs.StateFolder(tmp_path / "a" / "b", 2)
    with pytest.raises(cc.InputError, match="a file"):
        cc.jobs.StateFolder(tmp_path / "thesis.tex", 2)
    with pytest.raises(cc.InputTypeError, match="a path of a folder"):
        cc.jobs.StateFolder(3, 2)  # type: ignore[arg-type]
    for count in (0, 1.5, True):
        with pytest.raises(cc.InputError, match="count: expected a positive"):
            cc.jobs.StateFolder(tmp_path / "c", count)  # type: ignore[arg-type]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "_job.json").write_text("{}")
    with pytest.raises(cc.InputError, match="something else"):
        cc.jobs.StateFolder(tmp_path / "m", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "thesis.tex"]


def test_only_states_of_one_part_are_saved(device: str, tmp_path: Path) -> None:
    parts, la = parts_in(tmp_path), posterior(device)
    states = cc.jobs.StateFolder(tmp_path / "states", PARTS)
    found = [la.part_statistics(parts[k], (k, PARTS)) for k in range(2)]
    with pytest.raises(cc.InputError, match="the state of one of 4 parts"):
        states.save(State.merged(found))
    with pytest.raises(cc.InputError, match="the state of one of 4 parts"):
        states.save(la.part_statistics(parts[0], (0, 3)))
    with pytest.raises(cc.InputError, match="no such file"):
        states.merged("statistics")
    with pytest.raises(cc.InputError, match="kind"):
        states.has("sums", 0)


def test_what_is_no_posterior_is_refused(device: str) -> None:
    la = posterior(device)
    assert made(la) is la
    assert made(lambda: la) is la
    for wrong in (3, None, "model"):
        with pytest.raises(cc.InputTypeError, match="posterior: expected a posterior"):
            made(wrong)
    with pytest.raises(cc.InputTypeError, match="a function that returns one, got a Sequential"):
        made(lambda: la.model.model)
