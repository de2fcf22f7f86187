"""``features`` and ``export``: what other tools and other commands read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import contrastive_curvature as cc
from contrastive_curvature.apps.cli.console import BadInputError, Console, Result, readable
from contrastive_curvature.apps.cli.encoders import check_device, encoder_of
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source, shared_labels


def features(
    console: Console,
    *,
    sources: Mapping[str, Source],
    out: Path,
    dtype: str,
    encoder: str | None,
    encoder_options: Mapping[str, Any],
    device: str,
    batch_size: int,
) -> Result:
    """Write a feature folder of a source."""
    source = sources["source"]
    if source.kind == "features":
        raise BadInputError(f"{source.path}", "inputs of an encoder", "features that are there already")
    if encoder is None:
        hint = "Give --encoder module:function, timm:NAME or sentence-transformers:NAME."
        raise BadInputError("--encoder", f"an encoder for {source.kind}", "none", hint)
    check_device(device)
    made = encoder_of(encoder, encoder_options)
    made.module.to(device).eval()
    source.prepare(made)
    (labels,), names = shared_labels(source)
    loader = Loader(source, batch_size, labels=labels)
    options: dict[str, Any] = {"identifiers": source.ids, "class_names": names, "dtype": dtype}
    folder = cc.features(made.module, loader, out, **options, progress_bar=console.progress)
    values = {"folder": str(out), "inputs": len(source), "width": folder.width, "dtype": dtype}
    return values, f"{readable(str(out))}: {len(source):,} x {folder.width} features in {dtype}"


def export(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    out: Path,
    p_value: bool | None,
    dynamic_axes: Any,
    batch_size: int,
    **encoder: Any,
) -> Result:
    """Write a posterior as a graph or a scorer; ``encoder`` has the options of :func:`.open_posterior`."""
    la, _ = open_posterior(folder, sources, **encoder, note=console.note)
    few = None
    if "example" in sources:
        few, *_ = next(iter(Loader(sources["example"], min(2, batch_size))))
    outputs = la.export(out, few, p_value=p_value, dynamic_axes=dynamic_axes)
    values = {"file": str(out), "outputs": outputs, "bytes": out.stat().st_size}
    return values, f"{readable(str(out))}: {', '.join(outputs)}; {values['bytes']:,} bytes"
