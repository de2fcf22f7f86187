"""The pages of a newcomer: all blocks run, in order, in one folder that was empty."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from contrastive_curvature.apps.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md", "docs/command_line.md")
"""As a newcomer reads them."""


def test_every_block_runs_after_the_ones_before_it_in_one_folder(tmp_path, monkeypatch) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("faiss")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ran = set()
    for page in PAGES:
        names = {"__name__": "page"}
        text = (ROOT / page).read_text(encoding="utf-8")
        for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            if kind == "py":
                Path(block.splitlines()[0].removeprefix("# ")).write_text(block)
            elif kind == "python":
                exec(compile(block, page, "exec"), names)
            # What runs in a copy of the repository is no block for this folder.
            elif not block.startswith(("make ", "pip ")):
                for line in block.splitlines():
                    words = shlex.split(line.split(" > ")[0])
                    assert words[0] == "contrastive-curvature"
                    result = CliRunner().invoke(cli, words[1:])
                    assert result.exit_code == 0, result.output
                    ran.add(words[1])
    written = {path.name for path in tmp_path.iterdir()}
    assert {"posterior", "photo_posterior", "scores.csv", "photos.parquet"} <= written
    assert ran == set(cli.commands)
    sys.modules.pop("my_encoder", None)


def test_evaluate_is_found_as_report() -> None:
    shown = [CliRunner().invoke(cli, words).output for words in (["--help"], ["report", "--help"])]
    assert re.search(r"evaluate .*report", shown[0])
    assert "the command report is the same" in " ".join(shown[1].split())
