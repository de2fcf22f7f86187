"""``make gpu``: a failure does not stop the other parts, and a second call goes on."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.plan import table_rows
from benchmarks.gpu import driver, table2
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.driver import Part, parts_of

ROOT = Path(__file__).parents[2]


def script(name: str, text: str) -> Part:
    return Part(name, ("-c", text), 1.0, False)


def run(parts: list[Part], folder: Path, seconds: float = 300.0, again: tuple[str, ...] = ()) -> tuple[int, dict]:
    status = driver.run_parts(parts, folder / "results", folder / "logs", {"gpu": "none"}, seconds, again)
    return status, json.loads((folder / "results" / "gpu.json").read_text())["parts"]


def test_a_failure_does_not_stop_the_others_and_is_run_again(tmp_path: Path) -> None:
    fixed, count = tmp_path / "fixed", tmp_path / "count"
    broken = f"import os; print('the reason'); raise SystemExit(7 * (not os.path.exists({str(fixed)!r})))"
    parts = [script("broken", broken), script("once", f"open({str(count)!r}, 'a').write('x')")]
    status, account = run(parts, tmp_path)
    assert (status, account["broken"]["why"], account["once"]["status"]) == (1, "exit status 7", "finished")
    assert "the reason" in (tmp_path / "results" / "gpu.md").read_text()
    fixed.touch()
    status, account = run(parts, tmp_path)
    assert (status, account["broken"]["status"], count.read_text()) == (0, "finished", "x")
    run(parts, tmp_path, again=("once",))
    assert count.read_text() == "xx"
    assert run([script("late", "pass")], tmp_path, seconds=1.0)[1]["late"]["why"] == "not begun: no time was left"


def test_parts_are_there_and_the_suite_is_run_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, rehearsed = (parts_of(tmp_path, tmp_path, tmp_path, rehearse) for rehearse in (False, True))
    assert {part.name for part in rehearsed} <= {part.name for part in real}
    for part in (*real, *rehearsed):
        module = ROOT.joinpath(*part.command[1].split("."))
        assert part.command[1] == "pytest" or module.with_suffix(".py").is_file(), f"no {module}"
    pieces = [part.command for part in real if part.command[1] == "pytest"]
    chosen = {word for command in pieces for word in command if word.startswith("tests/")}
    left_out = {word.partition("=")[2] for word in pieces[-1] if word.startswith("--ignore=")}
    assert "tests" in pieces[-1]
    assert left_out <= chosen, f"in no piece of the suite: {left_out - chosen}"
    with pytest.raises(SystemExit):
        main(["--rehearse", "--parts", "nothing", "--work", str(tmp_path)])
    assert "--parts: invalid choice: 'nothing'" in capsys.readouterr().err


def test_table_2_is_shared_out_whole() -> None:
    """Every method of every seed once; ensembles, which need all seeds, in none."""
    rows = table_rows("2")
    made = table2.units(rows, ["0", "1"])
    done = [(seed, key) for seed, keys in made for key in keys]
    assert len(set(done)) == len(done)
    assert set(done) == {(seed, row.key) for seed in ("0", "1") for row in rows if row.method != "deep_ensemble"}
    assert made[0][1][0] == "deterministic"
    assert all("deterministic" in keys for _, keys in made if "laplace_posthoc" in keys)
