"""Runs parts one after another, each in a process of its own with a time limit, and keeps account of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"
LEAST_SECONDS = 20.0
"""A part is not begun with less time than this."""
GRACE_SECONDS = 40.0
"""What a part that is asked to end has for writing what it knows, before it is killed."""
_SHOWN_LINES = 15

Account = dict[str, dict[str, Any]]


def run_limited(command: Sequence[str], seconds: float, log: Path, grace: float = GRACE_SECONDS) -> int | None:
    """Run a command with everything it starts, and end all of it when its time is over.

    Args:
        command: Program and arguments.
        seconds: From which on it is interrupted as by Ctrl-C.
        log: Where its output goes, added to what is there.
        grace: Seconds after which it is killed.

    Returns:
        Its exit status; ``None`` when its time was over.
    """
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_hear_interruptions
        )
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child, grace)


def _hear_interruptions() -> None:
    """A shell starts what runs in the background with interruptions ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    """The child, and whatever is left of its group."""
    if child.poll() is None:
        _signal(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    _signal(child.pid, signal.SIGKILL)
    child.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def read_account(path: Path) -> Account:
    """What earlier calls have done; nothing where there is no such file, or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["parts"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


class Driver:
    """Parts in their order; what an earlier call has finished is not run again.

    Args:
        parts: What to run.
        results: Folder of small files: those of the parts, and ``gpu.json`` and ``gpu.md``, the account.
        logs: Folder of the parts' output.
        machine: What the account says of the machine.
        pack: Archive (``.tar.gz``) of ``results``, written after every part; ``None`` for none.
        say: Called with a line at a time.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        results: Path,
        logs: Path,
        machine: dict[str, Any],
        pack: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.parts, self.results, self.logs = list(parts), results, logs
        self.machine, self.pack, self.say = machine, pack, say
        results.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        self.account = read_account(results / "gpu.json")

    def run(self, seconds: float, again: Sequence[str] = ()) -> int:
        """Run what is not finished.

        Args:
            seconds: For all of it.
            again: Parts to run though they are finished.

        Returns:
            Exit status: 0 when all parts are finished, 1 when one failed, 3 when time was over before all were done.
        """
        end = time.monotonic() + seconds
        for part in self.parts:
            before = self.account.get(part.name, {})
            if part.name not in again and before.get("status") == FINISHED:
                self.say(f"{part.name}: finished earlier")
                continue
            left = end - time.monotonic()
            if left < LEAST_SECONDS:
                self.account[part.name] = {**before, "status": UNFINISHED, "why": "not begun: no time was left"}
            else:
                self.account[part.name] = self._one(part, left, float(before.get("seconds_before", 0.0)))
            self._write()
            self.say(self._line(part.name))
        self._write()
        return self._verdict()

    def _one(self, part: Part, left: float, before: float) -> dict[str, Any]:
        limit = min(60 * part.minutes, left)
        log = self.logs / f"{part.name}.log"
        if not before:
            log.unlink(missing_ok=True)
        self.say(f"{part.name}: running, at most {limit / 60:.1f} minutes; its output is in {log}")
        start = time.monotonic()
        status = run_limited([sys.executable, *part.command], limit, log)
        seconds = round(time.monotonic() - start, 1)
        found: dict[str, Any] = {"seconds": round(before + seconds, 1), "limit_minutes": part.minutes}
        if status == 0:
            return {**found, "status": FINISHED}
        if status is None and (part.goes_on or limit < 60 * part.minutes):
            # Only what goes on from where it was has used this time well.
            kept = {"seconds_before": found["seconds"]} if part.goes_on else {}
            return {**found, **kept, "status": UNFINISHED, "why": f"stopped after {limit / 60:.1f} minutes"}
        why = f"exit status {status}" if status is not None else f"over its limit of {part.minutes:g} minutes"
        return {**found, "status": FAILED, "why": why, "last_lines": _last_lines(log)}

    def _line(self, name: str) -> str:
        entry = self.account[name]
        why = f" ({entry['why']})" if "why" in entry else ""
        return f"{name}: {entry['status']}{why}, {entry.get('seconds', 0):.0f} s"

    def _verdict(self) -> int:
        status = {part.name: self.account.get(part.name, {}).get("status") for part in self.parts}
        failed = [name for name, found in status.items() if found == FAILED]
        unfinished = [name for name, found in status.items() if found == UNFINISHED]
        if failed:
            self.say(f"failed: {', '.join(failed)}. Logs: {self.logs}")
        if unfinished:
            self.say(f"unfinished: {', '.join(unfinished)}. The same command goes on.")
        return 1 if failed else 3 if unfinished else 0

    def _write(self) -> None:
        whole = {"machine": self.machine, "parts": self.account}
        _replace(self.results / "gpu.json", json.dumps(whole, indent=1) + "\n")
        _replace(self.results / "gpu.md", self._markdown())
        if self.pack is not None:
            self.pack.parent.mkdir(parents=True, exist_ok=True)
            partial = self.pack.with_name(f".{self.pack.name}.partial")
            with tarfile.open(partial, "w:gz") as archive:
                archive.add(self.results, arcname=self.results.name)
            partial.replace(self.pack)

    def _markdown(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = ["# What ran on the GPU", "", f"`python -m benchmarks.gpu`: {about}.", ""]
        lines += ["| part | state | seconds | |", "|---|---|---:|---|"]
        for part in self.parts:
            entry = self.account.get(part.name, {"status": "not begun"})
            page = f"[{part.name}.md]({part.name}.md)" if (self.results / f"{part.name}.md").is_file() else ""
            why = f"{entry['status']}: {entry['why']}" if "why" in entry else entry["status"]
            lines.append(f"| {part.name} | {why} | {entry.get('seconds', 0):.0f} | {page} |")
        for name, entry in self.account.items():
            if entry.get("status") == FAILED:
                lines += ["", f"## {name}: the end of its output", "", "```text", *entry.get("last_lines", []), "```"]
        return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _last_lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:300] for line in lines[-_SHOWN_LINES:]]
