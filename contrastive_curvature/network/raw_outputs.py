"""Where an encoder's raw outputs are, before the l2-normalisation at its end.

One run of the encoder on a probe is recorded, and followed back from the output. Equal numbers alone may be a
coincidence: an adapter that starts at zero adds nothing to a layer's output, and a momentum copy of a layer puts out
the same. Only the layer whose output the embeddings are made of carries other values on to them, and nothing else has a
gradient then (:func:`carries`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.call import ModelCall, check_output, entry_of, named_entries, naming_the_input
from contrastive_curvature.network.inputs import Inputs, few_points, made_up_inputs, slice_inputs
from contrastive_curvature.network.threads import users_hooks, watched

Key = str | int | None
"""Name of an entry of a mapping that a module takes and returns; ``None`` where it takes and returns tensors."""

_UNIT_TOLERANCE = 1e-4

_LAYER_NORM = (0.97, 1.001)
"""Norm of a row of a layer norm with scale one, divided by the root of its length: less than 1 by the added epsilon."""

_OF_BATCH = (
    "model: in evaluation mode the embedding of a point depends on the rest of its batch (batch normalisation without "
    "running statistics?), so a point has no Jacobian of its own. Use track_running_stats=True, or LayerNorm."
)


class Place(NamedTuple):
    """Where the raw outputs are: in what the model returns, or at a run of one of its modules.

    Attributes:
        module: The module; ``None``: the model's own output is the raw output.
        run: Which run of it, counted from zero.
        entry: Name of the tensor among its inputs, ``None`` where it takes a tensor.
        key: Name of the tensor among its outputs, ``None`` where it puts out a tensor.
        normalizes: Whether it takes the raw outputs and normalises them. Otherwise it puts them out, and ``forward``
            normalises them.
    """

    module: nn.Module | None = None
    run: int = 0
    entry: Key = None
    key: Key = None
    normalizes: bool = False


def find_raw(records: Sequence[Record], out: Tensor, made_of: Callable[[Record], bool]) -> tuple[Tensor, Place, bool]:
    """Go back from the output (N, D) through normalisations, and through modules that return their input unchanged.

    Args:
        records: What the innermost modules of an encoder did, in order.
        out: Its output.
        made_of: Returns whether the directions of the output are those of a record's output, for all values of both.

    Returns:
        The raw outputs (N, D), where they are, and whether they are normalised still.
    """

    def last(matches: Callable[[Any, Tensor], bool], end: int) -> int:
        """Return the index of the last record before ``end`` that matches, and that the output is made of, or -1."""
        indices = reversed(range(end))
        return next((k for k in indices if matches(records[k].output, raw) and made_of(records[k])), -1)

    raw, place, end = out, Place(), len(records)
    while has_constant_norm(raw):
        k = last(is_same, end)
        if k >= 0:
            record = records[k]
            if isinstance(record.module, nn.Linear):
                break
            entry = record.rescaled()
            if entry is False:
                # A layer norm gives rows of a common norm other than one; that is no l2-normalisation.
                return raw, place, has_unit_norm(raw)
            raw, place = record.inputs[entry], Place(record.module, record.run, entry, record.key, normalizes=True)
            end = k
        elif out.shape[1] == 1:
            break
        else:
            k = last(feeds, end)
            if k < 0:
                _refuse_hidden_normalization(raw)
                break
            raw, place = records[k].output, Place(records[k].module, records[k].run, key=records[k].key)
            # The module may be a normalisation, too.
            end = k + 1
    return raw, place, False


def _refuse_hidden_normalization(out: Tensor) -> None:
    """Refuse outputs of one norm that no module makes, except those of a layer norm whose scale is still one."""
    norm, of_layer_norm = float(out.float().norm(dim=1).mean()), out.shape[1] ** 0.5
    if _LAYER_NORM[0] * of_layer_norm < norm < _LAYER_NORM[1] * of_layer_norm:
        return
    raise UnsupportedError(
        f"model: the encoder normalises its output inside forward (every output of the first batch has norm {norm:.4g},"
        " and no module at its end does it). The curvature needs the Jacobian of the raw outputs, which are hidden "
        "there. Remove F.normalize from forward and end the encoder in the module contrastive_curvature.L2Norm(), or "
        "in no normalisation at all: the predictions and the curvature are those of the unit embeddings either way."
    )


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
        """Return the name of the input whose rows are positive multiples of the output's; ``False``: there is none."""
        # A module with parameters is no rescaling.
        if next(self.module.parameters(), None) is not None:
            return False
        names = sorted(self.inputs, key=lambda name: name != self.key)
        return next((name for name in names if feeds(self.inputs[name], self.output)), False)


def trace(model: nn.Module, call: ModelCall, probe: Inputs) -> tuple[list[Record], Tensor]:
    """Run an encoder; return what its innermost modules did, in order, and the outputs (N, D).

    One point, or equal ones, of another norm than one do not show whether the encoder gives all points that norm: then
    made-up points take their place, where the encoder takes them.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(norm.running_mean is None for norm in norms):
        raise UnsupportedError(_OF_BATCH)
    records, out = _recorded(model, call, probe)
    check_output(out)
    if _depends_on_batch(model, call, probe, out):
        raise UnsupportedError(_OF_BATCH)
    if bool((out[1:] != out[:1]).any()) or has_unit_norm(out) or not bool(out.isfinite().all()):
        return records, out
    try:
        more, other = _recorded(model, call, made_up_inputs(few_points(probe, 2)))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return records, out
    return (more, other) if bool(other.isfinite().all()) else (records, out)


def _recorded(model: nn.Module, call: ModelCall, probe: Inputs) -> tuple[list[Record], Tensor]:
    """Return what the innermost modules do in one run, and the outputs."""
    started: dict[int, tuple[dict[Key, Tensor], dict[Key, Tensor]]] = {}
    runs: Counter[int] = Counter()
    records: list[Record] = []

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _tensors(next(iter((*args, *kwargs.values())), None))
        started[id(module)] = inputs, {name: t.clone() for name, t in inputs.items()}

    def finish(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        inputs, copies = started.pop(id(module))
        for key, value in _tensors(output).items():
            # What a mapping only passes on is of the module that made it.
            if key is None or value is not inputs.get(key):
                records.append(Record(module, runs[id(module)], copies, key, value.clone()))
        runs[id(module)] += 1

    # Modules in script have no hooks.
    leaves = [m for m in model.modules() if not any(m.children()) and not isinstance(m, torch.jit.ScriptModule)]
    with watched(leaves, before=start, after=finish), naming_the_input(probe):
        out = call(model, probe)
    return records, out


def _depends_on_batch(model: nn.Module, call: ModelCall, probe: Inputs, out: Tensor) -> bool:
    """Return whether an encoder's output for a point is another one without the rest of the batch."""
    if len(out) < 2:
        return False
    alone = call(model, slice_inputs(probe, slice(0, 1)))
    return float((alone - out[:1]).abs().max()) > 1e-2 * float(out.abs().max())


def has_constant_norm(out: Tensor) -> bool:
    """Return whether all rows have norm one or, where they differ, one common norm."""
    if has_unit_norm(out):
        return len(out) > 0
    norms = out.float().norm(dim=1)
    # Equal embeddings have equal norms, whatever the encoder.
    return bool((out[1:] != out[:1]).any()) and bool(((norms / norms[0] - 1).abs() < _tolerance(out)).all())


def has_unit_norm(out: Tensor) -> bool:
    """Return whether all rows have norm one."""
    return bool(((out.float().norm(dim=1) - 1).abs() < _tolerance(out)).all())


def _tolerance(out: Tensor) -> float:
    """Return how far norms may be from one: an encoder in half precision rounds them, and then every entry."""
    return max(_UNIT_TOLERANCE, 2 * torch.finfo(_precision(out)).eps) if out.is_floating_point() else _UNIT_TOLERANCE


def _precision(out: Tensor) -> torch.dtype:
    """Return the type in which numbers were computed, also where ``forward`` made them float32 at its end."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(out.dtype).eps and torch.equal(out.to(dtype).to(out.dtype), out):
            return dtype
    return out.dtype


def is_same(output: Any, raw: Tensor) -> bool:
    """Return whether a module put out these numbers, in whatever precision."""
    # Nested tensors, and those within torch.vmap, have no equal.
    if not isinstance(output, Tensor) or output.is_nested or output.shape != raw.shape:
        return False
    both = torch.promote_types(output.dtype, raw.dtype)
    return torch.equal(output.to(both), raw.to(both))


def feeds(output: Any, normalized: Tensor) -> bool:
    """Return whether ``normalized`` (N, D) is a module's output with every row divided by its norm, up to rounding."""
    if not isinstance(output, Tensor) or output.is_nested or not output.is_floating_point():
        return False
    if output.shape != normalized.shape:
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
    """Return a tensor, or those of a mapping that may be embeddings; others would take memory for nothing."""
    if isinstance(value, Tensor):
        return {None: value}
    if not isinstance(value, Mapping):
        return {}
    return {name: t for name, t in named_entries(value) if isinstance(t, Tensor) and not t.is_nested and t.ndim == 2}


def carries(
    model: nn.Module, run: Callable[[], Tensor], record: Record, matches: Callable[[Tensor, Tensor], bool]
) -> bool:
    """Return whether the result of a run comes from one output of a module, and from nothing else.

    Other values are put in the place of that output. An encoder with hooks of the user's runs without a graph, so that
    only values are compared.

    Args:
        model: The encoder.
        run: Runs it on a few points.
        record: The output.
        matches: Returns whether the values in its place (N, D) and the result (N, D) belong together. With
            :func:`feeds`, other parameters may change the norms of the result, such as a learned temperature.
    """

    def passes() -> Tensor | None:
        with _substituted(record) as put:
            out = run()
        return out if put and matches(put[0], out.detach()) else None

    # A hook, such as those of a module that BackPACK extended, may keep what belongs to the user's own backward pass.
    hooked = any(users_hooks(m) or m._backward_hooks or m._backward_pre_hooks for m in model.modules())
    try:
        with torch.set_grad_enabled(not hooked):
            out = passes()
            carried = out is not None and not _has_gradient(model, out, direction_only=matches is feeds)
        del out
    except UnsupportedError:
        carried = False
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # Some encoders run only without a graph; they have no gradients that could be wrong.
        with torch.no_grad(), suppress(UnsupportedError):
            return passes() is not None
        return False
    # A module may keep what it computed last: other values, with a graph that cannot be copied.
    with torch.no_grad():
        run()
    return carried


@contextmanager
def _substituted(record: Record) -> Iterator[list[Tensor]]:
    """Put other values in the place of one output of a module, and give a list that will hold them."""
    put: list[Tensor] = []
    run, generator = count(), torch.Generator().manual_seed(0)

    def replace(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        if next(run) != record.run:
            return None
        put.append(other_values(out if record.key is None else entry_of(out, record.key), generator))
        # A copy, because an in-place operation may change what goes on.
        values = put[0].clone()
        if record.key is None:
            return values
        if isinstance(out, MutableMapping):
            out[record.key] = values
            return None
        return {**out, record.key: values}

    with watched([record.module], after=replace):
        yield put


def other_values(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal numbers of the shape, type and root mean square of a tensor, without a graph."""
    size = like.detach().float().square().mean().sqrt()
    size = torch.where(size.isfinite() & (size > 0), size, torch.ones_like(size))
    return (torch.randn(like.shape, generator=generator).to(like.device) * size).to(like.dtype)


def _has_gradient(model: nn.Module, out: Tensor, direction_only: bool) -> bool:
    """Return whether parameters change the result though the values that it should be made of are constants."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not out.requires_grad or not parameters:
        return False
    v = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    if direction_only:
        values = out.detach().float()
        unit = nn.functional.normalize(values, dim=1)
        v = nn.functional.normalize(v - (v * unit).sum(1, keepdim=True) * unit, dim=1)
        v = v / values.norm(dim=1, keepdim=True).clamp(min=1e-12)
    gradients = torch.autograd.grad(out, parameters, v.to(out.dtype), allow_unused=True)
    # The gradient of a temperature is zero but for the rounding of v; that of a weight of a layer has no such excuse.
    rounding = 32 * torch.finfo(out.dtype).eps if direction_only else 0.0
    return any(
        float(g.coalesce().values().norm() if g.is_sparse else g.norm()) > (rounding if g.numel() == 1 else 0.0)
        for g in gradients
        if g is not None
    )
