"""The table of the results: means over the encoders of a family, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer.families import KNOWN, RIGHT, RIVALS_KNOWN, RIVALS_RIGHT, families_table, main
from benchmarks.transfer.results import VERSION

ROWS = [*RIGHT, *KNOWN, *RIVALS_KNOWN]


def result(name: str, number: float) -> dict[str, Any]:
    rows = {
        row.replace("default/", "kron_lowrank/"): {
            "r_auroc": number + place / 100,
            "unknown": {"one": {"auroc": number}, "other": {"auroc": number + place / 50}},
        }
        for place, row in enumerate(ROWS)
    }
    return {"name": name, "version": VERSION, "key": "", "default": "kron_lowrank", "map_at_1": number, "rows": rows}


def test_means_of_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [result("faces", 0.5), result("mnist-3-supcon", 0.2), result("mnist-32-triplet", 0.4)]
    lines = families_table(results).splitlines()
    assert len(lines) == 4
    faces, digits = ([cell.strip() for cell in row.split("|")[1:-1]] for row in lines[2:])
    assert faces[0].endswith("(1)")
    assert digits[0].endswith("(2)")
    assert digits[1] == "0.300"
    # Rows that answer both questions keep the place that they had last.
    places = {row: place for place, row in enumerate(ROWS)}
    right = [f"{0.3 + places[row] / 100:.3f}" for row in RIGHT]
    known = [f"{0.3 + places[row] / 100:.3f}" for row in KNOWN]
    best = [max(rivals, key=lambda row: places[row]) for rivals in (RIVALS_RIGHT, RIVALS_KNOWN)]
    right.append(f"{0.3 + places[best[0]] / 100:.3f} {RIVALS_RIGHT[best[0]]}")
    known.append(f"{0.3 + places[best[1]] / 100:.3f} {RIVALS_KNOWN[best[1]]}")
    assert digits[2:] == right[:-1] + known[:-1] + [right[-1], known[-1]]
    for found in results:
        (tmp_path / f"{found['name']}.json").write_text(json.dumps(found))
    main(["--results", str(tmp_path)])
    assert capsys.readouterr().out == families_table(results)
