"""``fit``: which encoder a source is for, and the source opened for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.archive import read_archive
from contrastive_curvature.apps.cli.console import Console
from contrastive_curvature.apps.cli.encoders import Encoder, encoder_of, last_layer_encoder
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.source_files import ArraySource, FeatureFolderSource
from contrastive_curvature.apps.cli.sources import Columns, Source, open_source
from contrastive_curvature.errors import expected

__all__ = ["encoder_and_source"]

_UNIT = 1e-3
"""How far norms are from 1 that were rounded to half precision."""


def encoder_and_source(
    console: Console,
    path: Path,
    text: str | None,
    given: dict[str, Any],
    last_layer: Path | None,
    columns: Columns,
) -> tuple[Encoder, Source]:
    """The encoder of a fit, and its training data.

    Args:
        console: For a warning.
        path: Of the data.
        text: ``--encoder``.
        given: ``--encoder-options``.
        last_layer: ``--last-layer``.
        columns: Of a table.

    Raises:
        BadInputError: The data have no classes, the encoder is missing, or an option has no effect.
    """
    if text is not None:
        if last_layer is not None:
            raise BadInputError(expected("--last-layer", "it without --encoder, which has a last layer", "both"))
        # A source that is missing or damaged is told before a large model is loaded.
        open_source(path, columns=columns).need_labels("SOURCE")
        encoder = encoder_of(text, given)
        return encoder, open_source(path, encoder, columns)
    if given:
        raise BadInputError(expected("--encoder-options", "them with --encoder", "no encoder"))
    source = open_source(path, columns=columns)
    source.need_labels("SOURCE")
    if isinstance(source, FeatureFolderSource):
        if last_layer is None:
            hint = "Give --last-layer FILE.npz with weight and bias, or --encoder module:function."
            raise BadInputError(expected(f"{path}", "the last layer of the encoder of these features", "none", hint))
        arrays, width = read_archive(last_layer), source.encoder_of.width
        weight, bias = arrays.weight(), arrays.bias()
        if weight is None:
            raise BadInputError(expected(f"--last-layer {last_layer}", "the arrays weight and bias", "no weight"))
        encoder = last_layer_encoder(weight, bias, width, source.encoder_of)
        if len(weight) != source.encoder_of.outputs:
            wanted = f"{source.encoder_of.outputs} outputs, as the encoder of {path} has"
            raise BadInputError(expected(f"--last-layer {last_layer}", wanted, f"{len(weight)}"))
    elif isinstance(source, ArraySource) and source.kind == "features":
        if last_layer is not None:
            raise BadInputError(
                expected("--last-layer", "it for a feature folder", "an .npz, which has its own weight and bias")
            )
        if source.weight is None and not source.are_embeddings:
            hint = "Add them, or name the array embeddings if it holds the encoder's outputs."
            raise BadInputError(expected(f"{path}", "weight (and bias, if there is one) beside features", "none", hint))
        if source.weight is None:
            console.warn(
                f"{path}: the embeddings are taken as features of a last layer that is the identity, which the "
                "library's evaluation does not cover; with features, weight and bias it does."
                + _unit_hint(source.values)
            )
        encoder = last_layer_encoder(source.weight, source.bias, source.values.shape[1], None)
    else:
        hint = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."
        raise BadInputError(expected(f"{path}", f"an encoder for {source.kind}", "none", hint))
    source.prepare(encoder)
    return encoder, source


def _unit_hint(embeddings: NDArray[np.float32]) -> str:
    """What is lost where all embeddings have norm 1, as a sentence."""
    if not np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=_UNIT):
        return ""
    return " All of them have norm 1: save them before they are normalised, because novelty needs the norm."
