"""``la.export(path, example)``: write a posterior so that it can be used without this library."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import final_target, write_whole
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.io.serving.served_encoder import ServedEncoder, refusing
from contrastive_curvature.network.inputs import (
    asks_for_example,
    check_inputs,
    input_length,
    move_inputs,
    tokenized,
)

FORMATS = ("pt2", "onnx")

METADATA = "contrastive_curvature.json"
"""Name of the extra file in a ``.pt2``, and of the entry among the metadata of an ONNX model."""

Example = Tensor | dict[str, Tensor]

_AGREE = 1e-3
"""Relative difference above which a graph is no other rounding, but another function."""

_MOST_BYTES = 2**31 - 1
"""Of a protocol buffer."""


def export(
    la: Any,
    path: Path | str,
    example: Any = None,
    *,
    format: str | None = None,
    p_value: bool | None = None,
    dynamic_axes: Any = None,
) -> tuple[str, ...]:
    """See :meth:`contrastive_curvature.laplace.posterior.ContrastiveLaplace.export`."""
    kind = _format_of(path, format)
    if p_value is not None:
        validate.flag("p_value", p_value)
    final_target(path)
    module = ServedEncoder(la, p_value)
    if kind == "onnx":
        _check_onnx(la)
    with asks_for_example(example):
        batch = _batch(la, example)
        # Run before tracing: this call's errors name the example, errors in tracing do not.
        prediction = la(batch)
    axes = _axes(dynamic_axes, batch)
    module.head.float32_arctan = kind == "onnx"
    program = _trace(module, batch, axes)
    _check_same(program, module, batch, prediction.mu)
    write_whole(path, _pt2_file(program, module) if kind == "pt2" else _onnx_file(program, module, batch))
    return module.outputs


def _format_of(path: Any, given: Any) -> str:
    """Return the format of a file, from the user's argument or the file name."""
    if not isinstance(path, (str, Path)):
        raise InputTypeError("path", "a path, as 'model.pt2'", f"a {type(path).__name__}")
    if given is not None:
        validate.choice("format", given, FORMATS)
        return str(given)
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        hint = "Or say which with format=. For features that another program computes, export a posterior of the last "
        hint += "layer alone: docs/keep_and_serve.md#features-from-another-program."
        raise InputError("path", "a name that ends in '.pt2' or '.onnx'", repr(str(path)), hint)
    return suffix


def _check_onnx(la: Any) -> None:
    """Refuse ONNX without its packages, and encoders that its runtime cannot load, before any computation."""
    for package in ("onnx", "onnxscript"):
        validate.package("format='onnx'", package, "onnx")
    if any(p.dtype == torch.bfloat16 for p in la.model.parameters()):
        raise UnsupportedError(
            "export: onnxruntime has no linear layer in bfloat16, and would not load the file. Use a path that ends in "
            "'.pt2', or fit the posterior to encoder.float() or encoder.half() and export that."
        )


def _batch(la: Any, example: Any) -> Example:
    """Return a batch for tracing: tensors of two or more points; made-up points without an example."""
    given = la.data if example is None else tokenized(la.model, example, "example")
    if given is not example and not isinstance(given, Tensor):
        # The first batch of ``fit`` and a tokenizer's result may contain other entries.
        given = {key: value for key, value in given.items() if isinstance(value, Tensor) and key != la.dict_key_y}
    batch = check_inputs(given, "example")
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            if not isinstance(key, str) or not isinstance(value, Tensor):
                wanted = "a mapping of names to tensors"
                hint = "What is no tensor is a part of the graph: set it in the encoder, and leave it out here."
                raise InputTypeError("example", wanted, f"{key!r} of type {type(value).__name__}", hint)
    n, moved = input_length(batch), cast(Example, move_inputs(batch, la._device))
    # A graph traced with one point may be valid only for one point.
    return moved if n > 1 else _mapped(moved, lambda _, x: x.repeat_interleave(2, 0) if _of_batch(x, n) else x)


def _mapped(example: Any, function: Callable[[str, Tensor], Any]) -> Any:
    """Apply a function to every tensor and its name (``""`` for a single tensor)."""
    if isinstance(example, Tensor):
        return function("", example)
    return {key: function(key, value) for key, value in example.items()}


def _of_batch(value: Tensor, n: int) -> bool:
    return value.ndim > 0 and value.shape[0] == n


def _axes(axes: Any, example: Example) -> dict[str, list[int]]:
    """Return the axes of variable size besides the batch axis, by tensor name (``""`` for a single tensor)."""
    named = example if isinstance(example, dict) else {"": example}
    given = {} if axes is None else axes if isinstance(example, dict) else {"": axes}
    wanted = "{tensor: [axis, ...]}" if isinstance(example, dict) else "[axis, ...]"
    if not isinstance(given, Mapping) or not all(isinstance(numbers, Sequence) for numbers in given.values()):
        raise InputTypeError("dynamic_axes", wanted, repr(axes))
    for key, numbers in given.items():
        if key not in named:
            raise InputError("dynamic_axes", f"tensors of the example, {sorted(named)}", repr(key))
        room = range(1, named[key].ndim)
        for axis in numbers:
            if axis not in room:
                raise InputError("dynamic_axes", f"numbers of axes, of {list(room)}", repr(axis))
    return {key: list(given.get(key, ())) for key in named}


def _trace(module: ServedEncoder, example: Example, axes: dict[str, list[int]]) -> Any:
    """Return the exported program, for any number of points."""
    # The bound is only for torch 2.6, which refuses a length that could be the largest integer.
    n, batch = input_length(example), torch.export.Dim("batch", max=2**31)

    def shape_of(key: str, value: Tensor) -> dict[int, Any]:
        shape: dict[int, Any] = {0: batch} if _of_batch(value, n) else {}
        # Size limits of the encoder, such as the size of a kernel, become the range of the axis.
        return shape | dict.fromkeys(axes[key], torch.export.Dim.DYNAMIC)

    message = (
        "export: torch.export cannot trace the encoder ({}). Its forward must not choose what to run by the values or "
        "the number of its inputs, nor leave torch: replace such ifs by torch.where, or export a posterior of the last "
        "layer alone (docs/keep_and_serve.md#features-from-another-program), and compute its features in Python."
    )
    with refusing(message), torch.no_grad():
        shapes = (_mapped(example, shape_of),)
        program = torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ():
            # Lines of the encoder's code, with the paths of its files.
            node.meta.pop("stack_trace", None)
    return program


@torch.no_grad()
def _check_same(program: Any, module: ServedEncoder, batch: Any, mu: Tensor) -> None:
    """Refuse a graph that differs from the encoder because it draws random numbers or keeps a state."""
    found, again = program.module()(batch), module(batch)
    pairs = [("mu", found[0], mu), *zip(module.outputs, found, again, strict=True)]
    for name, new, old in pairs:
        apart = (new - old).abs() > _AGREE * old.abs().clamp(min=1 if name == "mu" else 0)
        if bool(apart.any()):
            raise UnsupportedError(
                f"export: {name} of the graph is not that of la(example). The encoder gives other outputs when it runs "
                "again, as with random numbers or a state that it keeps; a graph has neither."
            )


def _pt2_file(program: Any, module: ServedEncoder) -> Callable[[BinaryIO], object]:
    # The file must not contain the traced inputs. The setter of torch 2.6 refuses None.
    program._example_inputs = None
    # Saved to memory first: on a full disk, torch's archive writer throws in a destructor, which ends the process.
    whole = io.BytesIO()
    torch.export.save(program, whole, extra_files={METADATA: json.dumps(module.metadata)})
    return lambda file: file.write(whole.getbuffer())


def _onnx_file(program: Any, module: ServedEncoder, example: Example) -> Callable[[BinaryIO], object]:
    """Make an ONNX model with the mapping's input names, or ``x``; return the function that writes it."""
    names = list(example) if isinstance(example, dict) else ["x"]
    message = (
        "export: torch.onnx cannot write this encoder ({}). Use a path that ends in '.pt2', or replace the operation "
        "that it names."
    )
    with refusing(message), warnings.catch_warnings():
        # Warnings of torch's exporter about its own internals.
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            program, (example,), dynamo=True, verbose=False, input_names=names, output_names=list(module.outputs)
        )
    model: Any = None if exported is None else exported.model_proto
    if model is None or model.ByteSize() > _MOST_BYTES:
        raise UnsupportedError(
            "export: the encoder is larger than 2 GiB, which an ONNX file cannot be. Use a path that ends in '.pt2'."
        )
    model.metadata_props.add(key=METADATA, value=json.dumps(module.metadata))
    return lambda file: file.write(model.SerializeToString())
