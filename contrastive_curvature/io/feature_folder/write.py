"""``features(encoder, loader, path)``: one pass of the encoder over the data, kept on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.feature_folder.folder import FeatureFolder
from contrastive_curvature.io.feature_folder.header import HEADER, read_header
from contrastive_curvature.io.feature_folder.options import Options, check_loader_order
from contrastive_curvature.io.feature_folder.place import check_path, only_writer, prepare_folder
from contrastive_curvature.io.feature_folder.resume import check_same_options
from contrastive_curvature.io.feature_folder.writer import Writer
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.loader import check_model
from contrastive_curvature.progress import Progress

__all__ = ["features"]


def features(
    encoder: nn.Module,
    loader: Iterable[Any],
    path: str | PathLike[str],
    *,
    dtype: str | torch.dtype = "float32",
    format: str = "memmap",
    identifiers: Sequence[int] | Sequence[str] | NDArray[Any] | Tensor | None = None,
    last_layer_name: str | None = None,
    label_key: str = "labels",
    rows_per_part: int | None = None,
    progress_bar: bool | None = None,
) -> FeatureFolder:
    """Write what the last linear layer of an encoder takes in, with targets and identifiers, into a folder.

    Afterwards ``fit``, ``optimize_prior_precision``, ``calibrate`` and ``measure_classes`` of a last-layer posterior
    take the folder in place of the loader, without another forward pass through the encoder. The last layer itself may
    be trained further in between; everything before it must stay as it is.

    A run that was interrupted goes on when it is called again with the same arguments: parts that are there with the
    right checksum are kept and compared with the data, the rest is computed. A folder that is complete is checked and
    returned. Nothing that is there is overwritten by features of another encoder, other options or other data.

    Args:
        encoder: Any module that maps a batch to (N, D) and ends in a linear layer, after which only an l2-normalisation
            module may follow. It runs in evaluation mode.
        loader: Batches ``(x, targets)`` or mappings; run over once. A shuffling ``DataLoader`` is read in the order of
            its data set. Targets are tensors with one entry a point: class labels, or whatever a relation takes.
        path: The folder; it is made if need be, inside a folder that exists.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` (at most 65504 in absolute value) or ``"float64"``.
        format: ``"memmap"``: plain arrays, which are mapped into memory. ``"parquet"``: Parquet files, for other tools;
            needs pyarrow.
        identifiers: One whole number or one text a point, all different; ``None`` numbers the points from 0.
        last_layer_name: Name of the last layer, ``None`` to find it.
        label_key: Where batches that are mappings keep the targets; ``dict_key_y`` of laplace-torch.
        rows_per_part: Points of one part, which is written, checked and lost as a whole; ``None`` for 64 MiB of
            features.
        progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

    Returns:
        The folder, with batches of 4,096 points.

    Raises:
        InputError: An argument or a batch is malformed; a feature is not finite, or too large for ``dtype``; the loader
            is empty; the folder is of another encoder, of other options or of other data, or somebody else writes it.
        UnsupportedError: Batches of two views; a loader that leaves points out; no last linear layer, or raw outputs
            that cannot be reached; pyarrow is missing.
    """
    check_model(encoder, half=True)
    options = Options.checked(dtype, format, identifiers, last_layer_name, label_key, rows_per_part)
    if progress_bar is not None:
        validate.flag("progress_bar", progress_bar)
    loader, folder = check_loader_order(loader), check_path(path)
    options.identifiers.check_number(_length(loader))
    prepare_folder(folder)
    with only_writer(folder), evaluation_mode(encoder), torch.no_grad():
        _write(encoder, loader, folder, options, progress_bar)
    return FeatureFolder(folder)


def _write(model: nn.Module, loader: Iterable[Any], folder: Path, options: Options, progress_bar: bool | None) -> None:
    writer = Writer(model, folder, options)
    if (folder / HEADER).is_file():
        header = read_header(folder)
        check_same_options(folder, header, model, options)
        writer.go_on(header)
    for batch in Progress(progress_bar).over(loader, "[features]"):
        writer.add(batch)
        if writer.nothing_to_do(_length(loader)):
            return
    if not writer.points:
        raise InputError(expected("loader", "at least one batch", "an empty loader"))
    writer.finish()


def _length(loader: Any) -> int | None:
    """Number of points of a loader's data set, ``None`` where it is not known."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
