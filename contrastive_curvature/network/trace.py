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
from contrastive_curvature.network.substitute import Key, other_values
from contrastive_curvature.network.threads import evaluation_mode, watched

__all__ = ["Record", "feeds", "has_constant_norm", "has_unit_norm", "is_same", "trace"]

_UNIT_TOLERANCE = 1e-4


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
        What its innermost modules did, in order, and the outputs (N, D). One point, or equal ones, of another
        norm than one do not show whether the encoder gives all points that norm: then the rows of a second run, with
        other values put out by all modules with parameters, follow those of the first.

    Raises:
        InputTypeError: The model does not return a tensor.
        InputError: The model cannot process the probe, or does not return (N, D).
        UnsupportedError: A point's output depends on the rest of its batch.
    """
    _refuse_batch_statistics(model)
    records, out = _recorded(model, call, probe)
    check_output(out)
    with torch.no_grad(), evaluation_mode(model), eager(model):
        _check_batch_independence(model, call, probe, out)
    if bool((out[1:] != out[:1]).any()) or has_unit_norm(out) or not bool(out.isfinite().all()):
        return records, out
    try:
        more, other = _recorded(model, call, probe, others=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # Not every module takes any values.
        return records, out
    alike = [(r.module, r.key, r.output.shape) for r in records] == [(r.module, r.key, r.output.shape) for r in more]
    if not alike or other.shape != out.shape or not bool(other.isfinite().all()):
        return records, out
    return [_joined(one, two) for one, two in zip(records, more, strict=True)], torch.cat([out, other])


def _recorded(model: nn.Module, call: ModelCall, probe: Inputs, *, others: bool = False) -> tuple[list[Record], Tensor]:
    """What the innermost modules do in one run, and the outputs."""
    running: dict[int, dict[Key, Tensor]] = {}
    entered: dict[int, dict[Key, Tensor]] = {}
    runs: Counter[int] = Counter()
    records: list[Record] = []
    places = {id(module): k for k, module in enumerate(model.modules())}

    def other(module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        weighted = next(module.parameters(), None) is not None
        if not weighted or not isinstance(output, Tensor) or output.is_nested or not output.is_floating_point():
            return None
        # One module puts out the same in all its runs, as it does for equal inputs.
        return other_values(output, torch.Generator().manual_seed(places[id(module)]))

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
        watched(leaves if others else [], after=other),
        watched(leaves, before=start, after=finish),
        naming_the_input(probe),
    ):
        out = call(model, probe)
    return records, out


def _joined(one: Record, two: Record) -> Record:
    """The rows of two runs after each other."""

    def rows(a: Tensor, b: Tensor) -> Tensor:
        fit = not a.is_nested and a.ndim > 0 and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
        return torch.cat([a, b]) if fit else a

    inputs = {name: rows(t, two.inputs[name]) if name in two.inputs else t for name, t in one.inputs.items()}
    return Record(one.module, one.run, inputs, one.key, rows(one.output, two.output))


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
    return max(_UNIT_TOLERANCE, 2 * torch.finfo(_precision(out)).eps) if out.is_floating_point() else _UNIT_TOLERANCE


def _precision(out: Tensor) -> torch.dtype:
    """The type in which numbers were computed: half precision that ``forward`` made float32 at its end is seen."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(out.dtype).eps and torch.equal(out.to(dtype).to(out.dtype), out):
            return dtype
    return out.dtype


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
    raw = output.detach().double()
    one, other = (nn.functional.normalize(t, dim=1) for t in (raw, normalized.detach().double()))
    # Rows of NaN, which somebody else reports, are equal.
    apart = (one - other).masked_fill(one.isnan() & other.isnan(), 0).abs()
    # Rounding is relative to an entry; the smallest numbers of half precision are rounded as if they were larger.
    info = torch.finfo(_precision(normalized))
    smallest = info.smallest_normal * info.eps * (1 + 1 / raw.norm(dim=1, keepdim=True).clamp(min=info.tiny))
    return bool((apart <= 4 * info.eps * one.nan_to_num().abs() + 4 * smallest.nan_to_num()).all())


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
