"""The served encoder as a graph: through ``torch.export``, and from there to ONNX; the number of inputs stays free."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.serving.module import ServedEncoder
from contrastive_curvature.network.inputs import check_inputs, input_length, move_inputs

__all__ = ["METADATA", "check_axes", "check_example", "need_onnx", "onnx_bytes", "trace", "write_pt2"]

METADATA = "contrastive_curvature.json"
"""Name of the extra file in a ``.pt2``, and of the entry among the metadata of an ONNX model."""

Example = Tensor | dict[str, Tensor]

_MOST_BYTES = 2**31 - 1
"""Of a protocol buffer."""


def check_example(example: Any, device: torch.device) -> Example:
    """A batch to trace with: two points or more, as a graph traced with one point may hold for one only.

    Args:
        example: What the user gave.
        device: Of the posterior.

    Raises:
        InputTypeError: Neither a tensor nor a mapping of names to tensors.
        InputError: Without points.
    """
    batch = check_inputs(example, "example")
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            if not isinstance(key, str) or not isinstance(value, Tensor):
                wanted = "a mapping of names to tensors"
                hint = "What is no tensor is a part of the graph: set it in the encoder, and leave it out here."
                received = f"{key!r} of type {type(value).__name__}"
                raise InputTypeError(expected("example", wanted, received, hint))
    n, batch = input_length(batch), move_inputs(batch, device)
    if isinstance(batch, Tensor):
        return batch if n > 1 else batch.repeat_interleave(2, dim=0)
    plain = dict(batch)
    if n > 1:
        return plain
    return {key: value.repeat_interleave(2, dim=0) if _of_batch(value, n) else value for key, value in plain.items()}


def check_axes(axes: Any, example: Example) -> dict[str, list[int]]:
    """Axes besides that of the batch that may have other sizes, for every tensor of the example (``""``: the only one).

    Args:
        axes: Their numbers, as ``[1]``; for a mapping by the name of the tensor first; or ``None``.
        example: From :func:`check_example`.

    Raises:
        InputTypeError: Something else.
        InputError: There is no such tensor or axis.
    """
    named = example if isinstance(example, dict) else {"": example}
    given = {} if axes is None else axes if isinstance(example, dict) else {"": axes}
    wanted = "{tensor: [axis, ...]}" if isinstance(example, dict) else "[axis, ...]"
    if not isinstance(given, Mapping) or not all(isinstance(numbers, Sequence) for numbers in given.values()):
        raise InputTypeError(expected("dynamic_axes", wanted, repr(axes)))
    for key, numbers in given.items():
        if key not in named:
            raise InputError(expected("dynamic_axes", f"tensors of the example, {sorted(named)}", repr(key)))
        room = range(1, named[key].ndim)
        wrong = [axis for axis in numbers if isinstance(axis, bool) or not isinstance(axis, int) or axis not in room]
        if wrong:
            raise InputError(expected("dynamic_axes", f"numbers of axes, of {list(room)}", repr(wrong[0])))
    return {key: list(given.get(key, ())) for key in named}


def trace(module: ServedEncoder, example: Example, axes: dict[str, list[int]]) -> Any:
    """The exported program, for any number of points.

    Args:
        module: The encoder with its posterior.
        example: From :func:`check_example`.
        axes: From :func:`check_axes`.

    Raises:
        UnsupportedError: torch.export cannot trace the encoder.
    """
    # The bound says nothing of ours: torch 2.6 refuses a length that could be the largest integer.
    n, batch = input_length(example), torch.export.Dim("batch", max=2**31)

    def shape_of(key: str, value: Tensor) -> dict[int, Any]:
        shape: dict[int, Any] = {0: batch} if _of_batch(value, n) else {}
        # Sizes that an encoder needs, such as those of a kernel, become the range of the axis.
        return shape | dict.fromkeys(axes[key], torch.export.Dim.DYNAMIC)

    if isinstance(example, dict):
        shapes: Any = {key: shape_of(key, value) for key, value in example.items()}
    else:
        shapes = shape_of("", example)
    try:
        with torch.no_grad():
            return torch.export.export(module, (example,), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # what an encoder raises while it is traced has no common base
        raise UnsupportedError(_cannot_trace(error)) from error


def write_pt2(program: Any, metadata: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a program in torch's own format, without the inputs that it was traced with."""
    program.example_inputs = None
    torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})


def need_onnx() -> None:
    """Refuse ONNX before anything is computed where a package is missing.

    Raises:
        UnsupportedError: One is.
    """
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            hint = "pip install 'contrastive-curvature[onnx]'."
            message = expected("format='onnx'", f"the package {package}", "none installed", hint)
            raise UnsupportedError(message) from None


def onnx_bytes(program: Any, example: Example, module: ServedEncoder) -> bytes:
    """An ONNX model, with the inputs named as in the mapping, or ``x``.

    Raises:
        UnsupportedError: The graph has an operation that ONNX does not have, or is larger than an ONNX file can be.
    """
    names = list(example) if isinstance(example, dict) else ["x"]
    try:
        with warnings.catch_warnings():
            # Of torch's exporter about its own insides.
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                program, (example,), dynamo=True, verbose=False, input_names=names, output_names=list(module.outputs)
            )
    except Exception as error:  # as in trace
        msg = (
            f"export: torch.onnx cannot write this encoder ({_first_line(error)}). Use a path that ends in '.pt2', or "
            "replace the operation that it names."
        )
        raise UnsupportedError(msg) from error
    model: Any = None if exported is None else exported.model_proto
    if model is None or model.ByteSize() > _MOST_BYTES:
        msg = "export: the encoder is larger than 2 GiB, which an ONNX file cannot be. Use a path that ends in '.pt2'."
        raise UnsupportedError(msg)
    model.metadata_props.add(key=METADATA, value=json.dumps(module.metadata))
    content: bytes = model.SerializeToString()
    return content


def _of_batch(value: Tensor, n: int) -> bool:
    return value.ndim > 0 and value.shape[0] == n


def _cannot_trace(error: Exception) -> str:
    return (
        f"export: torch.export cannot trace the encoder ({_first_line(error)}). Its forward must not choose what to "
        "run by the values or the number of its inputs, nor leave torch: replace such ifs by torch.where, or export "
        "the numpy scorer, la.export('scorer.npz'), and compute its features in Python."
    )


def _first_line(error: BaseException) -> str:
    while isinstance(error, InputError) and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines[0] else type(error).__name__
