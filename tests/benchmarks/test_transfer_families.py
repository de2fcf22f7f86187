"""The tables of the results: means over the encoders of a family, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer.families import OURS, RIVALS_KNOWN, RIVALS_LABELLED, RIVALS_RIGHT, STORES, families_table, main
from benchmarks.transfer.results import VERSION

ROWS = [*OURS, *RIVALS_RIGHT, *RIVALS_LABELLED]


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
    results = [result("faces", 1.0), result("mnist-3-supcon", 0.2), result("mnist-32-triplet", 0.4)]
    *tables, weakest = families_table(results).split("\n\n")
    right, known, by_score, unseen = (
        [[cell.strip() for cell in row.split("|")[1:-1]] for row in part.splitlines()[2:]] for part in tables
    )
    assert [len(part) for part in (right, known)] == [2, 2]
    assert right[0][0].endswith("(1)")
    assert right[1][0] == known[1][0]
    assert right[1][0].endswith("(2)")

    def best(rivals: dict[str, str], step: float) -> str:
        name = max(rivals, key=ROWS.index)
        return f"{0.3 + ROWS.index(name) * step:.3f} {rivals[name]}"

    assert right[1][1:] == ["0.300", "0.300", best(RIVALS_RIGHT, 0.01), "0.330", best(RIVALS_LABELLED, 0.01)]
    assert known[1][1:] == ["0.320", "0.300 one", best(RIVALS_RIGHT, 0.01), best(RIVALS_KNOWN, 0.01)]
    assert STORES.keys() == set(ROWS)
    last = ROWS.index("match")
    assert by_score[-1] == ["distance to match", "M D", *(f"{n + last / 100:.3f} / {n:.3f}" for n in (1.0, 0.3))]
    assert unseen[0] == ["`uncertainty`", "posterior, C D", "1.000"]
    assert [row[0] for row in unseen] == [*OURS.values(), *RIVALS_RIGHT.values(), *RIVALS_LABELLED.values()]
    mine, other = (ROWS.index(row) / 100 for row in ("default/novelty", list(RIVALS_RIGHT)[-1]))
    shares = [
        f"{(number + mine) / (number + other):.3f} {name}"
        for name, number in (("mnist-3-supcon", 0.2), ("mnist-32-triplet", 0.4), ("faces", 1.0))
    ]
    assert weakest.endswith(f"0.9 or more on 1 of 3, least {', '.join(shares)}.")
    del results[1]["rows"]["match"]
    assert [row for row in families_table(results).split("\n\n")[2].splitlines() if "M D" in row] == [
        f"| distance to match | M D | {1.0 + last / 100:.3f} / 1.000 |  |"
    ]
    for found in results:
        (tmp_path / f"{found['name']}.json").write_text(json.dumps(found))
    main(["--results", str(tmp_path)])
    assert capsys.readouterr().out == families_table(results) + "\n"
