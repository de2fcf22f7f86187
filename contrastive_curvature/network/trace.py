"""One run of an encoder on a probe, with what its innermost modules took in and put out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.network.call import ModelCall, check_output, named_entries
from contrastive_curvature.network.compiled import eager
from contrastive_curvature.network.inputs import Inputs, slice_inputs
from contrastive_curvature.network.refusal import naming_the_input
from contrastive_curvature.network.threads import evaluation_mode, watched

__all__ = ["Key", "Record", "feeds", "has_constant_norm", "has_unit_norm", "is_same", "trace"]

_UNIT_TOLERANCE = 1e-4

Key = str | int | None
"""Name of an entry of a mapping that a module takes and returns; ``None`` where it takes and returns tensors."""


@dataclass
class Record:
    """A tensor that a run of a module put out, and what went in; copies, as in-place operations may change them.

    Attributes:
        module: The module.
        run: How often the module had run before.
        inputs: Tensors that it took, by their names.
        key: Name of the tensor that it put out.
        output: That tensor.
    """

    module: nn.Module
    run: int
    inputs: dict[Key, Tensor]
    key: Key
    output: Any

    def rescaled(self) -> Key | bool:
        """Name of the input whose rows are those of the output times a positive number; ``False``: there is none.

        A module with parameters is no rescaling.
        """
        out = self.output
        if not isinstance(out, Tensor) or next(self.module.parameters(), None) is not None:
            return False
        names = sorted(self.inputs, key=lambda name: name != self.key)
        return next((name for name in names if _only_rescales(self.inputs[name], out)), False)


def trace(model: nn.Module, call: ModelCall, probe: Inputs) -> tuple[list[Record], Tensor]:
    """Run an encoder in evaluation mode.

    Args:
        model: The encoder.
        call: How to call it.
        probe: Some points.

    Returns:
        What its innermost modules did, in order, and the outputs (N, D).

    Raises:
        InputTypeError: The model does not return a tensor.
        InputError: The model cannot process the probe, or does not return (N, D).
        UnsupportedError: A point's output depends on the rest of its batch.
    """
    running: dict[int, dict[Key, Tensor]] = {}
    entered: dict[int, dict[Key, Tensor]] = {}
    runs: Counter[int] = Counter()
    records: list[Record] = []

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (args or tuple(kwargs.values()))[:1]
        entered[id(module)] = _tensors(given[0]) if given else {}
        running[id(module)] = {name: t.clone() for name, t in entered[id(module)].items()}

    def finish(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        inputs, before = running.pop(id(module)), entered.pop(id(module))
        for key, value in _tensors(output).items():
            # What a mapping only passes on is of the module that made it.
            if key is None or value is not before.get(key):
                records.append(Record(module, runs[id(module)], inputs, key, value.clone()))
        runs[id(module)] += 1

    _refuse_batch_statistics(model)
    leaves = [
        module
        for module in model.modules()
        # Modules in script have no hooks.
        if next(module.children(), None) is None and not isinstance(module, torch.jit.ScriptModule)
    ]
    with (
        torch.no_grad(),
        evaluation_mode(model),
        eager(model),
        watched(leaves, before=start, after=finish),
        naming_the_input(probe),
    ):
        out = call(model, probe)
    check_output(out)
    with torch.no_grad(), evaluation_mode(model), eager(model):
        _check_batch_independence(model, call, probe, out)
    return records, out


def has_constant_norm(out: Tensor) -> bool:
    """Whether all rows have norm one or, if there are two rows or more, one common norm."""
    norms = out.float().norm(dim=1)
    if not out.shape[0]:
        return False
    one, tolerance = has_unit_norm(out), _tolerance(out)
    if not one and not bool((out[1:] != out[:1]).any()):
        # Equal embeddings have equal norms, whatever the encoder.
        return False
    return one or (out.shape[0] > 1 and bool(((norms / norms[0] - 1).abs() < tolerance).all()))


def has_unit_norm(out: Tensor) -> bool:
    """Whether all rows have norm one."""
    return bool(((out.float().norm(dim=1) - 1).abs() < _tolerance(out)).all())


def _tolerance(out: Tensor) -> float:
    """How far norms may be from one: an encoder in half precision rounds them, and then every entry."""
    return max(_UNIT_TOLERANCE, 2 * torch.finfo(out.dtype).eps) if out.is_floating_point() else _UNIT_TOLERANCE


def is_same(output: Any, raw: Tensor) -> bool:
    """Whether a module put out these numbers; nested tensors, and those within ``torch.vmap``, have no ``equal``."""
    if not isinstance(output, Tensor) or output.is_nested or output.shape != raw.shape:
        return False
    return torch.equal(output, raw)


def feeds(output: Any, normalized: Tensor) -> bool:
    """Whether ``normalized`` (N, D) is a module's output with every row divided by its norm, up to rounding."""
    if not isinstance(output, Tensor) or output.is_nested or output.shape != normalized.shape:
        return False
    if not output.is_floating_point() or not normalized.numel():
        return False
    one, other = (nn.functional.normalize(t.detach().double(), dim=1) for t in (output, normalized))
    # Rows of NaN, which somebody else reports, are equal.
    apart = (one - other).masked_fill(one.isnan() & other.isnan(), 0).norm(dim=1)
    return bool((apart <= 16 * max(torch.finfo(t.dtype).eps for t in (output, normalized))).all())


def _tensors(value: Any) -> dict[Key, Tensor]:
    """A tensor, or those of a mapping or an object that may be embeddings; others would take memory for nothing."""
    if isinstance(value, Tensor):
        return {None: value}
    if not isinstance(value, Mapping):
        return {}
    return {name: t for name, t in named_entries(value) if isinstance(t, Tensor) and not t.is_nested and t.ndim == 2}


def _only_rescales(z: Tensor, out: Tensor) -> bool:
    """Whether every row of the output is a positive multiple of its input row."""
    if z.shape != out.shape or not z.is_floating_point() or z.ndim != 2:
        return False
    if not bool((z != 0).any(dim=1).all()):
        return True
    aligned = (normalize(z.double())[0] * normalize(out.double())[0]).sum(1)
    return bool((aligned > 1 - _UNIT_TOLERANCE).all())


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            msg = (
                f"model: {name!r} normalises with the statistics of the batch even in evaluation mode, so a point has "
                "no Jacobian of its own. Use track_running_stats=True, or LayerNorm."
            )
            raise UnsupportedError(msg)


def _check_batch_independence(model: nn.Module, call: ModelCall, probe: Inputs, out: Tensor) -> None:
    """Refuse an encoder whose output for a point depends on the rest of the batch."""
    if out.shape[0] < 2:
        return
    alone = call(model, slice_inputs(probe, slice(0, 1)))
    size = float(out.abs().max())
    if float((alone - out[:1]).abs().max()) > 1e-2 * size:
        msg = (
            "model: in evaluation mode the embedding of a point depends on the rest of its batch (batch "
            "normalisation without running statistics?), so a point has no Jacobian of its own. Use "
            "track_running_stats=True, or LayerNorm."
        )
        raise UnsupportedError(msg)
