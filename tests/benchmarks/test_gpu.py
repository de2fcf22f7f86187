"""``make gpu``: parts have time limits, a failure does not stop the others, and a second call goes on."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.experiments.plan import table_rows
from benchmarks.gpu import driver, table2
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import Part, Places, real_parts, rehearsed_parts

ROOT = Path(__file__).parents[2]
LIMIT = 60.0


def script(name: str, text: str, minutes: float = LIMIT / 60, goes_on: bool = False) -> Part:
    return Part(name, ("-c", text), minutes, goes_on)


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


def test_what_is_over_its_time_is_interrupted_and_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, saved = tmp_path / "pid", tmp_path / "saved"

    class Impatient(subprocess.Popen[bytes]):
        """Its time is over when the file ``ready`` has content, however slow the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout == LIMIT and self.poll() is None:
                if ready.is_file() and ready.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait(timeout)

    child = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = (
        f"import pathlib, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"try: time.sleep(600)\nexcept KeyboardInterrupt: pathlib.Path({str(saved)!r}).touch()"
    )
    monkeypatch.setattr(driver.subprocess, "Popen", Impatient)
    status, account = run([script("slow", parent), script("next", "pass", minutes=2)], tmp_path)
    assert (status, account["slow"]["why"]) == (1, "over its limit of 1 minutes")
    assert account["next"]["status"] == "finished"
    assert saved.exists(), "it was not interrupted before it was killed"
    ready.unlink()
    assert run([script("long", parent, goes_on=True)], tmp_path)[1]["long"]["status"] == "unfinished"
    # What was killed may still be on its way out; then it is a zombie, or gone.
    stat = Path("/proc", ready.read_text(), "stat")
    for _ in range(500):
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the process that the part had started is still there")


def test_parts_are_there_and_the_suite_is_run_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = Places(tmp_path / "results", tmp_path, tmp_path)
    real, rehearsed = real_parts(places), rehearsed_parts(places)
    assert {part.name for part in rehearsed} <= {part.name for part in real}
    for part in (*real, *rehearsed):
        module = ROOT.joinpath(*part.command[1].split("."))
        assert part.command[1] == "pytest" or module.with_suffix(".py").is_file(), f"no {module}"
    pieces = [part.command for part in real if part.command[1] == "pytest"]
    chosen = {word for command in pieces for word in command if word.startswith("tests/")}
    left_out = {word.partition("=")[2] for word in pieces[-1] if word.startswith("--ignore=")}
    assert "tests" in pieces[-1]
    assert left_out <= chosen, f"in no piece of the suite: {left_out - chosen}"
    assert main(["--rehearse", "--parts", "nothing", "--work", str(tmp_path)]) == 2
    assert "--parts: expected some of rates, contract" in capsys.readouterr().err


def test_table_2_is_shared_out_whole() -> None:
    """Every method of every seed once; ensembles, which need all seeds, in none."""
    rows = table_rows(2)
    made = table2.units(rows, ["0", "1"])
    done = [(seed, key) for seed, keys in made for key in keys]
    assert len(set(done)) == len(done)
    assert set(done) == {(seed, row.key) for seed in ("0", "1") for row in rows if not row.is_ensemble}
    assert made[0][1][0] == "deterministic"
    assert all("deterministic" in keys for _, keys in made if "laplace_posthoc" in keys)
