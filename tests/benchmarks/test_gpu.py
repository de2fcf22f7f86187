"""``make gpu``: parts have time limits, a failure does not stop the others, and a second call goes on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from devices import DEVICES

from benchmarks import machine
from benchmarks.experiments.plan import table_rows
from benchmarks.gpu import cli, driver, fractions, rates, suite, table2
from benchmarks.gpu.driver import Driver, run_limited
from benchmarks.gpu.parts import Part, Places, real_parts, rehearsed_parts

pytestmark = pytest.mark.parametrize("device", DEVICES)

ROOT = Path(__file__).parents[2]


def script(name: str, text: str, minutes: float = 1.0, goes_on: bool = False) -> Part:
    return Part(name, ("-c", text), minutes, goes_on)


def run(parts: list[Part], folder: Path, seconds: float = 300.0, **more: object) -> tuple[int, dict, list[str]]:
    said: list[str] = []
    pack = more.pop("pack", None)
    made = Driver(parts, folder / "results", folder / "logs", {"gpu": "none"}, pack, said.append)
    status = made.run(seconds, **more)
    return status, json.loads((folder / "results" / "gpu.json").read_text())["parts"], said


def test_a_failure_does_not_stop_the_others(device: str, tmp_path: Path) -> None:
    del device
    parts = [script("bad", "print('the reason'); raise SystemExit(7)"), script("good", "pass")]
    status, account, said = run(parts, tmp_path)
    assert status == 1
    assert (account["bad"]["status"], account["bad"]["why"]) == ("failed", "exit status 7")
    assert account["bad"]["last_lines"] == ["the reason"]
    assert account["good"]["status"] == "finished"
    assert any(line.startswith("failed: bad.") for line in said)
    assert "the reason" in (tmp_path / "results" / "gpu.md").read_text()


def test_only_what_is_not_finished_runs_again(device: str, tmp_path: Path) -> None:
    del device
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    fixed = tmp_path / "fixed"
    parts = [
        script("once", count),
        script("broken", f"import os; raise SystemExit(not os.path.exists({str(fixed)!r}))"),
    ]
    assert run(parts, tmp_path)[0] == 1
    fixed.touch()
    status, account, said = run(parts, tmp_path)
    assert (status, account["broken"]["status"]) == (0, "finished")
    assert "once: finished earlier" in said
    assert (tmp_path / "count").read_text() == "x"
    assert run(parts, tmp_path, again=["once"])[0] == 0
    assert (tmp_path / "count").read_text() == "xx"


def impatient(ready: Path) -> type[subprocess.Popen[bytes]]:
    """Processes whose time is over when a file has content, however slow the machine is."""

    class Impatient(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != LIMIT:
                return super().wait(timeout)
            while self.poll() is None:
                if ready.is_file() and ready.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return self.returncode

    return Impatient


LIMIT = 60.0


def test_what_is_over_its_time_is_ended_with_all_that_it_started(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what ignores the interruption, and what its own parent has left behind."""
    del device
    ready = tmp_path / "pid"
    child = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    monkeypatch.setattr(driver.subprocess, "Popen", impatient(ready))
    status, account, _ = run([script("slow", parent), script("next", "pass", minutes=2)], tmp_path)
    assert status == 1
    assert account["slow"]["why"] == "over its limit of 1 minutes"
    assert account["next"]["status"] == "finished"
    # What was killed may still be on its way out; then it is a zombie, or gone.
    stat = Path("/proc", ready.read_text(), "stat")
    for _ in range(500):
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the process that the part had started is still there")


def test_what_goes_on_is_unfinished_and_not_failed(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted as by Ctrl-C, so that it can save; seconds of all calls add up."""
    del device
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    code = (
        "import os, pathlib, time\n"
        f"if pathlib.Path({str(saved)!r}).exists(): raise SystemExit(0)\n"
        "try:\n"
        # No file object: an interruption while one is destroyed would be lost.
        f"    os.write(os.open({str(ready)!r}, os.O_CREAT | os.O_WRONLY), b'ready')\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        f"    pathlib.Path({str(saved)!r}).touch()\n"
        "    raise SystemExit(3)\n"
    )
    part = script("long", code, goes_on=True)
    with monkeypatch.context() as patched:
        patched.setattr(driver.subprocess, "Popen", impatient(ready))
        status, account, said = run([part], tmp_path)
    assert (status, account["long"]["status"]) == (3, "unfinished")
    assert any(line.startswith("unfinished: long.") for line in said)
    assert saved.exists()
    first = account["long"]["seconds"]
    status, account, _ = run([part], tmp_path)
    assert (status, account["long"]["status"]) == (0, "finished")
    assert account["long"]["seconds"] >= first


def test_what_finds_no_time_is_not_begun(device: str, tmp_path: Path) -> None:
    del device
    touched = tmp_path / "touched"
    part = script("late", f"open({str(touched)!r}, 'w')")
    status, account, _ = run([part], tmp_path, seconds=1.0)
    assert (status, account["late"]["status"]) == (3, "unfinished")
    assert not touched.exists()
    assert run([part], tmp_path)[0] == 0
    assert touched.exists()


def test_a_damaged_account_is_begun_anew(device: str, tmp_path: Path) -> None:
    del device
    (tmp_path / "results").mkdir()
    for text in ("{", "[]", '{"parts": 3}'):
        (tmp_path / "results" / "gpu.json").write_text(text)
        assert run([script("part", "pass")], tmp_path)[0] == 0


def test_results_are_packed_after_every_part(device: str, tmp_path: Path) -> None:
    del device
    pack = tmp_path / "out" / "gpu.tar.gz"
    writes = f"open({str(tmp_path / 'results' / 'one.md')!r}, 'w').write('1')"
    looks = f"import tarfile; raise SystemExit('results/one.md' not in tarfile.open({str(pack)!r}).getnames())"
    assert run([script("one", writes), script("two", looks)], tmp_path, pack=pack)[0] == 0
    with tarfile.open(pack) as archive:
        assert {"results/gpu.json", "results/gpu.md", "results/one.md"} <= set(archive.getnames())


def test_output_goes_to_the_log(device: str, tmp_path: Path) -> None:
    del device
    log = tmp_path / "log"
    code = "import sys; print('out'); print('error', file=sys.stderr)"
    assert run_limited([sys.executable, "-u", "-c", code], 60, log) == 0
    assert log.read_text().split() == ["out", "error"]


def test_without_a_gpu_there_is_one_line(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main([]) == 0
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(cli, "_TRACES", ("/nowhere",))
    assert cli.main(["--minutes", "1"]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_a_gpu_without_torch_is_an_error(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del device
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(cli, "_TRACES", (str(tmp_path),))
    assert cli.main([]) == 2
    assert "has no torch" in capsys.readouterr().err


def test_unknown_parts_are_refused(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del device
    assert cli.main(["--rehearse", "--work", str(tmp_path), "--parts", "rates", "tabel2"]) == 2
    assert "tabel2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_line_starts_without_torch(device: str) -> None:
    """A machine that has neither a GPU nor torch gets its line."""
    del device
    code = "import sys; sys.modules['torch'] = None; import benchmarks.gpu.cli"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_every_part_is_there_and_rehearsed(device: str, tmp_path: Path) -> None:
    del device
    places = Places(tmp_path / "results", tmp_path, tmp_path)
    real, rehearsed = real_parts(places, "cuda"), rehearsed_parts(places)
    assert {part.name for part in rehearsed} <= {part.name for part in real}
    assert all(part.minutes > 0 for part in real)
    assert {"contract", "curvature", "backends", "scale", "steps", "table2"} <= {part.name for part in rehearsed}
    for part in (*real, *rehearsed):
        module = ROOT.joinpath(*part.command[1].split("."))
        assert part.command[0] == "-m"
        assert module.with_suffix(".py").is_file()


def test_the_suite_is_run_whole(device: str, tmp_path: Path) -> None:
    """No folder of tests is left out or run twice."""
    del device
    places = Places(tmp_path, tmp_path, tmp_path)
    parts = [part for part in real_parts(places, "cuda") if part.command[1] == "benchmarks.gpu.suite"]
    chosen = [word for part in parts for word in part.command if word.startswith("tests/")]
    rest = [word.partition("=")[2] for word in parts[-1].command if word.startswith("--ignore=")]
    assert parts[-1].command.count("tests") == 1
    assert set(rest) <= set(chosen)
    assert all((ROOT / name).is_dir() for name in rest)


def test_a_piece_of_the_suite_is_counted(device: str, tmp_path: Path) -> None:
    del device
    tests = tmp_path / "test_few.py"
    tests.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='not today')\ndef test_skipped(): pass\n"
    )
    profile = "from hypothesis import settings\nsettings.register_profile('quick')\n"
    (tmp_path / "conftest.py").write_text(profile)
    status = suite.main(["few", "--out", str(tmp_path), "--", str(tests), "-c", os.devnull])
    found = json.loads((tmp_path / "few.json").read_text())
    assert status == 1
    assert found["counts"] == {"passed": 1, "failure": 1, "skipped": 1}
    assert "one is not two" in found["failures"][0]["why"]
    assert "1 skipped: not today" in (tmp_path / "few.md").read_text()


def test_no_report_is_no_test(device: str, tmp_path: Path) -> None:
    del device
    assert suite.read_report(tmp_path / "none.xml")["counts"] == {}
    (tmp_path / "half.xml").write_text("<testsuite><testcase")
    assert suite.read_report(tmp_path / "half.xml")["counts"] == {}


def test_rates_and_fractions(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates.main(["--device", device, "--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "rates.json").read_text())
    assert all(rate > 0 and math.isfinite(rate) for rate in found["rates"].values())
    assert {(row["dtype"]) for row in found["kernels"]} == {"float32", "float64"}
    assert len(found["kernels"]) == 6
    assert all(row["seconds"] > 0 and row["of_flops"] > 0 for row in found["kernels"])
    rows = [{"structure": "diag", "samples": samples, "n": 10, "seconds": 2.0} for samples in (5, None)]
    (tmp_path / "scale.json").write_text(json.dumps({"rows": rows}))
    fractions.main([str(tmp_path)])
    made = json.loads((tmp_path / "fractions.json").read_text())
    # Three products of 10 points with 512 features and 128 dimensions, and the pair sums.
    assert [row["flop"] for row in made["rows"]] == [2 * 10 * (3 * 512 * 128 + m * 257) for m in (5, 10)]
    assert made["missing"] == ["curvature", "backends", "steps"]
    assert (tmp_path / "fractions.md").read_text() in capsys.readouterr().out


def test_fractions_are_of_the_larger_of_both_times(device: str) -> None:
    del device
    shares = rates.fractions_of(10.0, 4.0, 8.0, {"float32": 5.0, "bandwidth": 1.0})
    assert shares["of_flops"] == 10 / 8 / 5
    assert shares["of_bandwidth"] == shares["of_floor"] == 4 / 8


def test_operations_are_counted(device: str) -> None:
    layer, x = torch.nn.Linear(3, 5, bias=False, device=device), torch.randn(7, 3, device=device)
    assert machine.count_flop(lambda: layer(x)) == 2 * 7 * 3 * 5

    def broken() -> None:
        raise RuntimeError

    assert machine.count_flop(broken) is None


def test_table_2_is_shared_out_whole(device: str) -> None:
    """Every method of every seed once; ensembles, which need all seeds, in none."""
    del device
    rows = table_rows(2)
    made = table2.units(rows, ["0", "1"])
    done = [(seed, key) for seed, keys in made for key in keys]
    assert len(set(done)) == len(done)
    assert set(done) == {(seed, row.key) for seed in ("0", "1") for row in rows if not row.is_ensemble}
    assert made[0][1][0] == "deterministic"
    assert all("deterministic" in keys for _, keys in made if "laplace_posthoc" in keys)
