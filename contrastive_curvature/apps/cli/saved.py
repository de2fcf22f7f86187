"""The folder of a posterior that the command line writes: the posterior, and how its encoder is made again.

``la.save_pretrained`` writes the posterior, its options and a model card; :mod:`.encoder_file` has the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.cli.encoder_file import (
    ENCODER,
    WEIGHTS,
    check_trusted,
    content_of,
    read_encoder,
    read_spec,
    write_content,
    write_spec,
    write_weights,
)
from contrastive_curvature.apps.cli.encoders import Encoder, encoder_of
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.folders import check_writable
from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import expected
from contrastive_curvature.io.pretrained import load_pretrained
from contrastive_curvature.io.pretrained.layout import CONFIG

__all__ = ["check_target", "open_posterior", "write_posterior"]


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot or must not be written, before anything is computed.

    Raises:
        BadInputError: It is there and ``--overwrite`` was not given, or it cannot be written.
        InputError: It holds something else than a saved posterior.
    """
    from contrastive_curvature.io.pretrained.folder import check_target as check
    from contrastive_curvature.io.pretrained.folder import checked_path

    if (folder / "config.json").exists() and not overwrite:
        hint = "Give --overwrite to replace it, or another folder."
        raise BadInputError(expected(f"--out {folder}", "a new folder", "one that holds a saved posterior", hint))
    target = checked_path(folder)
    check(target, overwrite=overwrite)
    check_writable(folder, target)


def write_posterior(la: Any, encoder: Encoder, folder: Path, *, overwrite: bool, about: Mapping[str, Any]) -> None:
    """Write a fitted posterior with what is needed to use it without the fit's arguments.

    A new folder appears whole or not at all. In one that is there, the posterior is replaced in one step, and files
    that are not of a posterior stay.

    Args:
        la: The posterior.
        encoder: What it was fitted around.
        folder: From the user, seen by :func:`check_target`.
        overwrite: Whether a saved posterior may be replaced.
        about: Of the data and the encoder, for the model card.

    Raises:
        InputError: The folder cannot be written.
    """
    from contrastive_curvature.io.pretrained.folder import checked_path

    target = checked_path(folder)
    if target.exists() and os.listdir(target):
        _replace(la, encoder, target, overwrite, about)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    made.mkdir()
    try:
        # The model card tells the folder's name.
        inner = made / target.name
        la.save_pretrained(inner, **about)
        write_spec(encoder, inner, write_weights(encoder, inner))
        os.rename(inner, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _replace(la: Any, encoder: Encoder, target: Path, overwrite: bool, about: Mapping[str, Any]) -> None:
    """Replace the posterior in a folder: ``config.json`` decides which one is there, and with it, which encoder."""
    names, config = set(os.listdir(target)), content_of(target / CONFIG)
    kept = content_of(target / ENCODER)
    try:
        earlier = read_spec(target)
    except BadInputError:
        earlier = None
    before = None if config is None else {"config": hashlib.sha256(config).hexdigest(), "spec": earlier}
    weights: str | None = None
    try:
        weights = write_weights(encoder, target)
        write_spec(encoder, target, weights, before)
        la.save_pretrained(target, overwrite=overwrite, **about)
    except BaseException:
        if content_of(target / CONFIG) == config:
            # Where this fails too, the file says both.
            with contextlib.suppress(OSError):
                _put_back(target, kept)
                if weights is not None and weights not in names:
                    os.unlink(target / weights)
        raise
    # The new posterior is there. What cannot be tidied up does no harm.
    with contextlib.suppress(OSError):
        write_spec(encoder, target, weights)
        for name in names - {weights}:
            if WEIGHTS.fullmatch(name):
                os.unlink(target / name)


def _put_back(target: Path, kept: bytes | None) -> None:
    if kept is not None:
        write_whole(target / ENCODER, lambda file: write_content(file, kept))
    elif (target / ENCODER).exists():
        os.unlink(target / ENCODER)


def open_posterior(
    folder: Path,
    encoder: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    note: Callable[[str], None] | None = None,
) -> tuple[Any, Encoder]:
    """A saved posterior and its encoder.

    Args:
        folder: What ``fit`` or ``la.save_pretrained`` wrote.
        encoder: ``--encoder``, in place of the one that the folder names.
        options: ``--encoder-options``.
        device: Of the computation.
        note: Takes a line that names the encoder, before it is made.

    Raises:
        BadInputError: The folder is missing, names no encoder and none is given, or names code of its user and that
            is not given.
        InputError: The folder is damaged, of a later version, or of another encoder.
    """
    if not folder.is_dir():
        hint = "contrastive-curvature fit writes one."
        raise BadInputError(expected(f"{folder}", "the folder of a saved posterior", "a path where none is", hint))
    if encoder is None and options:
        raise BadInputError(expected("--encoder-options", "them with --encoder", "no encoder"))
    spec = (read_spec(folder) or {}) if encoder is None or not options else {}
    if encoder is not None and not options and spec.get("encoder") == encoder and isinstance(spec.get("options"), dict):
        options = spec["options"]
    named = spec.get("encoder") if encoder is None else encoder
    if encoder is None:
        check_trusted(spec, folder)
    if note is not None and named is not None:
        note(f"encoder {named}" + (f", as {folder} names it" if encoder is None else ""))
    found = read_encoder(folder) if encoder is None else encoder_of(encoder, options)
    if found is None:
        hint = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."
        raise BadInputError(expected(f"{folder}", f"an {ENCODER} that names the encoder", "none", hint))
    found.module.to(device).eval()
    la = load_pretrained(folder, encoder=found.module)
    return la, found
