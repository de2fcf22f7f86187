"""``completion``: click's completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


@click.command(epilog="Example: contrastive-curvature completion bash >> ~/.bashrc")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete this command's options.

    \b
    bash: contrastive-curvature completion bash >> ~/.bashrc
    zsh:  contrastive-curvature completion zsh >> ~/.zshrc
    fish: contrastive-curvature completion fish > ~/.config/fish/completions/contrastive-curvature.fish
    """  # noqa: D301
    kind = get_completion_class(shell)
    assert kind is not None
    name = "contrastive-curvature"
    click.echo(kind(ctx.find_root().command, {}, name, "_CONTRASTIVE_CURVATURE_COMPLETE").source())
