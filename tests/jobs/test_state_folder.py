"""Folders of states: what is there is kept, what is lost is computed again alone, what is foreign is refused."""

from pathlib import Path
from typing import Any

import pytest
from job_cases import assert_same, data, fit_in, fitted, posterior, write

import contrastive_curvature as cc

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


def test_another_source_or_number_of_parts_is_refused(device: str, tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    states = cc.jobs.StateFolder(tmp_path / "states", PARTS, parts.fingerprint)
    states.save(posterior(device).part_statistics(parts[0], (0, PARTS)))
    with pytest.raises(cc.InputError, match=r"folder: .* of this job in 6 files, got .* 'statistics-00000-of-00004"):
        cc.jobs.StateFolder(tmp_path / "states", 3, parts.fingerprint)
    with pytest.raises(cc.InputError, match=r"of this job in 8 files, got .* 'statistics-00000-of-00004"):
        cc.jobs.StateFolder(tmp_path / "states", PARTS, "other")
    assert states.missing("statistics") == [1, 2, 3]


def test_a_link_in_the_folder_is_replaced(device: str, tmp_path: Path) -> None:
    states = cc.jobs.StateFolder(tmp_path / "states", PARTS)
    (tmp_path / "precious").write_text("precious")
    states.file("statistics", 0).symlink_to(tmp_path / "precious")
    states.save(posterior(device).part_statistics([data()], (0, PARTS)))
    assert (tmp_path / "precious").read_text() == "precious"
    assert states.missing("statistics") == [1, 2, 3]
