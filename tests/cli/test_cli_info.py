"""``info``, ``completion``, ``--help`` and ``--version``."""

import json
import shutil
from pathlib import Path

import click
import pytest
from cli_support import Run, encoder_file, error_of, rewrite_encoder
from click.testing import CliRunner

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


@pytest.mark.parametrize("name", cli.commands)
def test_every_command_has_help_with_an_example_that_it_understands(place: Path, name: str) -> None:
    shutil.copy("new.npz", "test.npz")
    shutil.copy("new.npz", "other.npz")
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert f"Example: contrastive-curvature {name}" in result.stdout
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    words = " ".join(str(command.epilog).split()).removeprefix(f"Example: contrastive-curvature {name} ").split(" >")[0]
    context = command.make_context(name, words.split(), resilient_parsing=False)
    assert context.params


def test_the_list_of_commands_and_the_version() -> None:
    text = CliRunner().invoke(cli, ["--help"]).stdout
    assert all(name in text for name in cli.commands)
    assert "130" in text
    assert contrastive_curvature.__version__ in CliRunner().invoke(cli, ["--version"]).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = CliRunner().invoke(cli, ["completion", shell]).stdout
    assert "_CONTRASTIVE_CURVATURE_COMPLETE" in script
    monkeypatch.setenv("_CONTRASTIVE_CURVATURE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "contrastive-curvature sc")
    monkeypatch.setenv("COMP_CWORD", "sc" if shell == "fish" else "1")
    answer = CliRunner().invoke(cli, [], prog_name="contrastive-curvature").stdout
    assert "score" in answer
    assert "search" not in answer


def test_nothing_asked_is_answered_with_the_help() -> None:
    result = CliRunner().invoke(cli, [])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr
    assert "error" not in result.stderr


def test_an_unknown_command_is_refused_with_the_nearest_name(run: Run) -> None:
    assert "score" in error_of(run("scor", code=2))


def test_completion_after_a_mistyped_command_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CONTRASTIVE_CURVATURE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "contrastive-curvature scor --o")
    monkeypatch.setenv("COMP_CWORD", "2")
    answer = CliRunner().invoke(cli, [], prog_name="contrastive-curvature")
    assert (answer.stderr, answer.exception is None or isinstance(answer.exception, SystemExit)) == ("", True)
    assert "error" not in answer.output


def test_a_foreign_folder_cannot_disguise_its_encoder(run: Run) -> None:
    name = "evil:code\r\x1b[2K  encoder       timm:resnet18\u202e\n"
    rewrite_encoder("posterior", encoder=name, options={})
    shown = run("info", "posterior").stdout
    assert "evil:code\\r\\x1b[2K  encoder       timm:resnet18\\u202e\\n" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
    # For programs, the name as it is.
    assert json.loads(run("info", "posterior", "--json").stdout)["encoder"] == name
    refused = run("score", "posterior", "new.npz", "--out", "scores.csv", code=2)
    assert all(character.isprintable() or character == "\n" for character in refused.stderr)
    # It is not said to be used before it is refused.
    assert "names it" not in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
