"""docs/command_line.md: its commands run, in order, in one folder, with the files that its Python makes."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from contrastive_curvature.apps.cli import cli

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("faiss")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ran = set()
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
        if kind == "py":
            Path(block.splitlines()[0].removeprefix("# ")).write_text(block)
        elif kind == "python":
            exec(compile(block, "docs/command_line.md", "exec"), {"__name__": "page"})
        else:
            for line in block.splitlines():
                words = shlex.split(line.split(" > ")[0])
                assert words[0] == "contrastive-curvature"
                result = CliRunner().invoke(cli, words[1:])
                assert result.exit_code == 0, result.output
                ran.add(words[1])
    written = {path.name for path in tmp_path.iterdir()}
    assert {"posterior", "photo_posterior", "scores.csv", "hits.csv", "photos.parquet"} <= written
    assert ran == set(cli.commands) - {"evaluate"}
    sys.modules.pop("my_encoder", None)


def test_evaluate_is_found_as_report() -> None:
    shown = [CliRunner().invoke(cli, words).output for words in (["--help"], ["report", "--help"])]
    assert re.search(r"evaluate .*report", shown[0])
    assert "The command report is the same" in shown[1]
