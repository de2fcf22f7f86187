"""An interrupted folder goes on: what is kept of it, and whether it is of the same encoder, options and data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.feature_folder.header import Header
from contrastive_curvature.io.feature_folder.options import Options
from contrastive_curvature.io.feature_folder.storage import Rows, Storage
from contrastive_curvature.network.given_features import difference

__all__ = ["check_same_features", "check_same_options", "check_same_rows", "whole_parts"]

_OTHER = "Use another path; nothing has been changed."

_ROUNDING = 1e-2
"""Largest difference of a point's features, relative to their norm: half precision, and batches of other sizes."""


def check_same_options(folder: Path, header: Header, model: nn.Module, options: Options) -> None:
    """Refuse to go on with a folder of another encoder or other options.

    Raises:
        InputError: It is; the message names what differs.
    """
    there, given = header.identifiers, options.identifiers.type
    for name, before, now in (
        ("format", header.storage, options.storage),
        ("dtype", header.precision.name, options.precision.name),
        ("identifiers", f"{there.kind} of {there.bytes} bytes", f"{given.kind} of {given.bytes} bytes"),
        ("rows_per_part", header.rows_per_part, options.rows_per_part or header.rows_per_part),
        ("last_layer_name", header.source.last_layer, options.last_layer_name or header.source.last_layer),
    ):
        if before != now:
            raise InputError(expected(name, f"{before!r}, that of the folder {folder}", repr(now), _OTHER))
    reason = difference(model, header.source)
    if reason is not None:
        raise InputError(expected("path", f"features of this encoder in {folder}", reason, _OTHER))


def whole_parts(header: Header, storage: Storage) -> set[int]:
    """The parts whose checksums are right."""
    listed = [(part, checksum) for part, checksum in enumerate(header.parts) if checksum is not None]
    return {part for part, checksum in listed if storage.checksum(part, *header.rows_of(part)) == checksum}


def check_same_rows(folder: Path, kept: Rows, targets: Tensor, identifiers: object, start: int) -> None:
    """Refuse other targets or identifiers than those of a part that is kept.

    Args:
        folder: For the message.
        kept: The points that are there.
        targets: What the loader gives in their place.
        identifiers: What the user gives in their place, as stored.
        start: Number of the first of them.

    Raises:
        InputError: They differ.
    """
    mine = targets.detach().cpu().numpy().astype(kept.targets.dtype, copy=False)
    if mine.shape != kept.targets.shape or mine.tobytes() != kept.targets.tobytes():
        raise _other_data(folder, "targets", start)
    if not bool((kept.identifiers == identifiers).all()):
        raise _other_data(folder, "identifiers", start)


def check_same_features(folder: Path, kept: Tensor, again: Tensor, start: int) -> None:
    """Refuse other features, beyond rounding, than those that are there.

    Raises:
        InputError: They differ.
    """
    before, now = kept.double(), again.detach().cpu().double()
    apart = torch.linalg.vector_norm(before - now, dim=1)
    if bool((apart > _ROUNDING * torch.linalg.vector_norm(before, dim=1)).any()):
        raise _other_data(folder, "features", start, " Random augmentation must be off.")


def _other_data(folder: Path, what: str, start: int, hint: str = "") -> InputError:
    wanted = f"the data of the folder {folder}, in the same order"
    received = f"other {what} for the points from row {start} on"
    return InputError(expected("loader", wanted, received, _OTHER + hint))
