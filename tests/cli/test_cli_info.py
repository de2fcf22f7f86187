"""``info``, ``completion``, ``--help``, ``--version``, and a newcomer's pages, whose blocks all run in one folder."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import click
import pytest
from cli_support import Run, encoder_file, error_of, rewrite_encoder
from click.testing import CliRunner
from tables import each

import contrastive_curvature
from contrastive_curvature.apps.cli import cli


def test_info_says_what_was_fitted(run: Run) -> None:
    text = run("info", "posterior").stdout
    for part in ("kron_lowrank", "52 weights", "300 inputs", "5 classes", "150 inputs", "last layer, for features"):
        assert part in text
    found = json.loads(run("info", "posterior", "--json").stdout)
    assert found["posteriors"][0]["n_data"] == 300
    assert found["encoder"] == "last layer, for features"


def test_info_of_a_posterior_that_names_no_encoder(run: Run) -> None:
    encoder_file().unlink()
    assert "--encoder" in run("info", "posterior").stdout
    error = error_of(run("score", "posterior", "new.npz", "--out", "scores.csv", code=2))
    assert "--encoder" in error


@each("name", cli.commands)
def test_every_command_has_help_with_an_example_that_it_understands(place: Path, name: str) -> None:
    shutil.copy("new.npz", "test.npz")
    shutil.copy("new.npz", "other.npz")
    shutil.copy("new.npz", "site.npz")
    Path("retriever").mkdir(exist_ok=True)
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert f"Example: contrastive-curvature {name}" in result.stdout
    command = cli.get_command(click.Context(cli), name)
    words = " ".join(str(command.epilog).split()).removeprefix(f"Example: contrastive-curvature {name} ").split(" >")[0]
    context = command.make_context(name, words.split(), resilient_parsing=False)
    assert context.params


def test_the_list_of_commands_and_the_version() -> None:
    text = CliRunner().invoke(cli, ["--help"]).stdout
    assert all(name in text for name in cli.commands)
    assert "130" in text
    assert contrastive_curvature.__version__ in CliRunner().invoke(cli, ["--version"]).stdout


def test_an_unknown_command_is_refused_with_the_nearest_name(run: Run) -> None:
    assert "score" in error_of(run("scor", code=2))


def test_a_foreign_folder_cannot_disguise_its_encoder(run: Run) -> None:
    name = "evil:code\r\x1b[2K  encoder       timm:resnet18\u202e\n"
    rewrite_encoder("posterior", encoder=name, options={})
    shown = run("info", "posterior").stdout
    assert "evil:code\\r\\x1b[2K  encoder       timm:resnet18\\u202e\\n" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


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
