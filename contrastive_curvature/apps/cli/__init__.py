"""The command line: ``contrastive-curvature`` and ``python -m contrastive_curvature``; see docs/command_line.md."""

from contrastive_curvature.apps.cli.commands import cli, main

__all__ = ["cli", "main"]
