"""``la.export(path, example)``: write a posterior so that it can be used without this library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import final_target, write_whole
from contrastive_curvature.errors import (
    ContrastiveCurvatureError,
    InputError,
    InputTypeError,
    UnsupportedError,
    expected,
)
from contrastive_curvature.io.serving import graph
from contrastive_curvature.io.serving.module import ServedEncoder
from contrastive_curvature.io.serving.numpy_scorer import FORMAT, VERSION
from contrastive_curvature.io.serving.parts import Parts, check_exportable, parts_of
from contrastive_curvature.network.inputs import asks_for_example, tokenized

__all__ = ["FORMATS", "export"]

FORMATS = ("pt2", "onnx", "npz", "safetensors")
"""What a file can be: two graphs of encoder and posterior, and two files of the numpy scorer."""

_AGREE = 1e-3
"""Relative difference above which a graph is no other rounding, but another function."""


def export(
    la: Any,
    path: Path | str,
    example: Any = None,
    *,
    format: str | None = None,
    p_value: bool | None = None,
    dynamic_axes: Any = None,
) -> tuple[str, ...]:
    """See :meth:`contrastive_curvature.laplace.base.ContrastiveLaplace.export`."""
    check_exportable(la)
    kind = _format(path, format)
    if p_value is not None:
        validate.flag("p_value", p_value)
    final_target(path)
    if kind in ("npz", "safetensors"):
        for name, value in (("example", example), ("dynamic_axes", dynamic_axes)):
            if value is not None:
                hint = "The scorer takes the features of the last layer, of any number of inputs."
                raise InputError(expected(name, f"nothing for format={kind!r}", f"a {type(value).__name__}", hint))
        parts = parts_of(la, p_value)
        write_whole(path, _npz(parts) if kind == "npz" else _safetensors(parts))
        return parts.outputs
    if kind == "onnx":
        graph.need_onnx()
        if any(p.dtype == torch.bfloat16 for p in la.model.parameters()):
            msg = (
                "export: onnxruntime has no linear layer in bfloat16, and would not load the file. Use a path that "
                "ends in '.pt2', or fit the posterior to encoder.float() or encoder.half() and export that."
            )
            raise UnsupportedError(msg)
    given = _inputs_for_graph(la, example)
    with asks_for_example(example):
        batch = graph.check_example(given, la._device)
        # Its errors name the example; those of an encoder that is traced cannot.
        prediction = la(batch)
    axes = graph.check_axes(dynamic_axes, batch)
    module = _served(la, p_value)
    module.head.float32_arctan = kind == "onnx"
    program = graph.trace(module, batch, axes)
    _check_same(program, module, batch, prediction.mu)
    if kind == "pt2":
        write_whole(path, lambda file: graph.write_pt2(program, module.metadata, file))
    else:
        content = graph.onnx_bytes(program, batch, module)
        write_whole(path, lambda file: _write(file, content))
    return module.outputs


def _inputs_for_graph(la: Any, example: Any) -> Any:
    """An example for a graph, which takes tensors: made up where there is none, of texts what the tokenizer gives."""
    given = la.data if example is None else tokenized(la.model, example, "example")
    if given is example or isinstance(given, Tensor):
        return given
    return {key: value for key, value in given.items() if isinstance(value, Tensor) and key != la.dict_key_y}


def _format(path: Any, given: Any) -> str:
    """The format of a file, from its name or as the user said."""
    if not isinstance(path, (str, Path)):
        raise InputTypeError(expected("path", "a path, as 'model.pt2'", f"a {type(path).__name__}"))
    if given is not None:
        validate.choice("format", given, FORMATS)
        return str(given)
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        wanted = "a name that ends in " + ", ".join(f"'.{kind}'" for kind in FORMATS)
        raise InputError(expected("path", wanted, repr(str(path)), "Or say which with format=."))
    return suffix


def _served(la: Any, p_value: bool | None) -> ServedEncoder:
    try:
        return ServedEncoder(la, p_value)
    except ContrastiveCurvatureError:
        raise
    except Exception as error:  # what an object raises that cannot be copied has no common base
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        msg = (
            f"export: the encoder cannot be copied ({reason}). Remove what cannot, such as open files and locks, from "
            "its modules."
        )
        raise UnsupportedError(msg) from error


@torch.no_grad()
def _check_same(program: Any, module: ServedEncoder, batch: Any, mu: Tensor) -> None:
    """Refuse a graph that is another function than the encoder: one that draws random numbers, or keeps a state."""
    found, again = program.module()(batch), module(batch)
    pairs = [("mu", found[0], mu), *zip(module.outputs, found, again, strict=True)]
    for name, new, old in pairs:
        apart = (new - old).abs() > _AGREE * old.abs().clamp(min=1 if name == "mu" else 0)
        if bool(apart.any()):
            msg = (
                f"export: {name} of the graph is not that of la(example). The encoder gives other outputs when it runs "
                "again, as with random numbers or a state that it keeps; a graph has neither."
            )
            raise UnsupportedError(msg)


def _npz(parts: Parts) -> Callable[[BinaryIO], None]:
    # Any: numpy before 2.1 has no argument allow_pickle here; no array is one of objects.
    arrays: dict[str, Any] = {name: array.cpu().numpy() for name, array in parts.arrays.items()}
    text = np.array(json.dumps(_metadata(parts)))
    return lambda file: np.savez(file, metadata=text, **arrays)


def _safetensors(parts: Parts) -> Callable[[BinaryIO], None]:
    arrays = {name: array.cpu() for name, array in parts.arrays.items()}
    content = safetensors_bytes(arrays, _metadata(parts))
    return lambda file: _write(file, content)


def _metadata(parts: Parts) -> dict[str, str]:
    return {"format": FORMAT, "version": str(VERSION), "form": parts.form, "structure": parts.structure}


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)
