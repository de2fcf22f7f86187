"""The predictions of a posterior for a part of the data, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.feature_folder import FeatureFolder
from contrastive_curvature.io.jobs.columns import list_column
from contrastive_curvature.io.jobs.packages import arrow
from contrastive_curvature.io.jobs.parquet_parts import ParquetPart, ParquetParts
from contrastive_curvature.io.jobs.sources import FolderParts, Parts
from contrastive_curvature.network.inputs import check_inputs, input_length, move_inputs, tokenized

__all__ = ["OWN", "embedded", "output_schema"]

OWN = ("identifier", "mu", "kappa", "uncertainty", "p_value")
"""Columns of embeddings; the last one where the posterior is calibrated. Others are passed through."""


def output_schema(parts: Parts, dim: int, calibrated: bool, keep: Sequence[str] | None) -> Any:
    """The columns of embeddings.

    Args:
        parts: The data.
        dim: Number D of outputs.
        calibrated: Whether there are p-values.
        keep: Columns to pass through; ``None`` for all but those of features.

    Raises:
        InputError: There is no such column, or it has the name of a result.
    """
    pa = arrow()
    given = _schema(parts)
    identifier = pa.int64() if given is None or "identifier" not in given else given["identifier"]
    columns = dict.fromkeys(keep) if keep is not None else [name for name in given or {} if name != "identifier"]
    unknown = [name for name in columns if name not in (given or {})]
    if unknown:
        raise InputError(expected("keep", f"columns of the source: {', '.join(given or {})}", str(unknown)))
    twice = [name for name in columns if name in OWN]
    if twice:
        hint = "Name the columns to pass through with keep=."
        raise InputError(expected("source", f"columns other than {', '.join(OWN)}", str(twice), hint))
    fields = [
        ("identifier", identifier),
        ("mu", pa.list_(pa.float32(), dim)),
        ("kappa", pa.float32()),
        ("uncertainty", pa.float32()),
        *([("p_value", pa.float64())] if calibrated else []),
        *((name, given[name]) for name in columns if given is not None),
    ]
    return pa.schema(fields)


def embedded(la: Any, part: Any, schema: Any) -> Iterator[Any]:
    """Tables of one batch each, with the columns of ``schema``.

    Raises:
        InputError: A batch is malformed, or the encoder gives no finite output for it.
    """
    others = [name for name in schema.names if name not in OWN]
    pa, device = arrow(), la._device
    for x, identifiers, columns in _batches(part, others):
        inputs = x[0] if isinstance(x, (tuple, list)) and len(x) == 2 else x
        inputs = tokenized(la.model, inputs, "read: inputs of a batch")
        if not isinstance(inputs, (Tensor, Mapping)):
            wanted = "x, or (x, targets): tensors or mappings of them"
            raise InputTypeError(expected("read", wanted, f"a {type(inputs).__name__}"))
        inputs = move_inputs(check_inputs(inputs, "read: inputs of a batch"), device)
        if input_length(inputs) != len(identifiers):
            raise InputError(expected("read", f"{len(identifiers)} inputs, one a row", f"{input_length(inputs)}"))
        with torch.no_grad():
            found = la(inputs)
            mu, kappa = found
            own = {
                "identifier": identifiers,
                "mu": list_column(_array(mu).astype(np.float32)),
                "kappa": pa.array(_array(kappa).astype(np.float32)),
                "uncertainty": pa.array(_array(found.uncertainty).astype(np.float32)),
            }
            if "p_value" in schema.names:
                own["p_value"] = pa.array(_array(found.p_value).astype(np.float64))
        found_columns = {**own, **columns}
        yield pa.Table.from_arrays([found_columns[name] for name in schema.names], schema=schema)


def _schema(parts: Parts) -> dict[str, Any] | None:
    """Types of the columns that may be passed through, and of identifiers."""
    pa = arrow()
    if isinstance(parts, ParquetParts):
        names = {parts.identifier: "identifier"}
        types = {names.get(field.name, field.name): field.type for field in parts.table.schema}
        types.pop(parts.features, None)
        return types
    if isinstance(parts, FolderParts):
        texts = parts.folder.shard(0, parts.count).identifiers.dtype.kind not in "iu"
        return {"identifier": pa.string() if texts else pa.int64()}
    return None


def _batches(part: Any, others: list[str]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Inputs, identifiers and further columns of every batch."""
    pa = arrow()
    if isinstance(part, FeatureFolder):
        identifiers, start = part.identifiers, 0
        for x, y in part:
            taken = identifiers[start : start + len(y)]
            start += len(y)
            yield x, pa.array(taken), {}
        return
    if not isinstance(part, ParquetPart):
        raise InputTypeError(expected("part", "a part of ParquetParts or of a FeatureFolder", f"a {type(part)}"))
    start = part.start
    for table in part.tables(part.columns_for(others)):
        numbers = np.arange(start, start + len(table))
        start += len(table)
        named = part.identifier in table.column_names
        identifiers = table.column(part.identifier) if named else pa.array(numbers)
        yield part.batch(table), identifiers, {name: table.column(name) for name in others}


def _array(values: Tensor) -> Any:
    return values.detach().cpu().numpy()
