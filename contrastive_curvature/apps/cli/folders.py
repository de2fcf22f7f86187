"""``--out FOLDER``: whether a folder can be made or written is known before anything is computed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.errors import expected

__all__ = ["check_writable"]


def check_writable(folder: Path, target: Path) -> None:
    """Refuse a folder that cannot be made, or not be written.

    Args:
        folder: From the user.
        target: The same with all links followed.

    Raises:
        BadInputError: It is no folder, or the system refuses a folder beside it (or in it, where it is there).
    """
    above = target
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise BadInputError(expected(f"--out {folder}", "a folder", f"{above}, which is none"))
    wanted = "a folder that can be written"
    if not os.access(above, os.W_OK | os.X_OK):
        raise BadInputError(expected(f"--out {folder}", wanted, f"{above}, which cannot"))
    # Permissions do not tell of a file system that takes no folders, or no long names. Writers use such a name too.
    probe = above / f".{target.name}.{secrets.token_hex(6)}.tmp"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        came = f"{above}: {error.strerror or error}"
        raise BadInputError(expected(f"--out {folder}", wanted, came)) from error
