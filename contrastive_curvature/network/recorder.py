"""Operations that apply parameters, noted while an encoder runs: what they take in, and where their gradients arrive.

A function mode of torch sees every call of a function in its own thread, whichever module or ``forward`` makes it. That
is more than hooks on modules see: layers called through ``torch.nn.functional``, the projections inside of
``nn.MultiheadAttention``, tokens that are added or concatenated. Hooks of the user's, other threads and the modules
themselves are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from contrastive_curvature.network.module import with_globals


class Fold(Enum):
    """What an axis holds beside the points."""

    NONE = "points"
    MAJOR = "(points, positions), flattened"
    MINOR = "(positions, points), flattened"


class BatchAxis(NamedTuple):
    """Where the points lie.

    Attributes:
        axis: The axis.
        fold: What else it holds.
    """

    axis: int
    fold: Fold = Fold.NONE


_IN_FRONT = BatchAxis(0)


def by_point(t: Tensor, batch_axis: BatchAxis, n: int) -> Tensor:
    """Reshape a tensor to (n, positions of a folded axis or 1, *the other axes)."""
    axis, fold = batch_axis
    if fold is Fold.NONE:
        return (t.movedim(axis, 0) if axis else t).unsqueeze(1)
    if fold is Fold.MAJOR:
        return t.unflatten(axis, (n, -1)).movedim((axis, axis + 1), (0, 1))
    return t.unflatten(axis, (-1, n)).movedim((axis + 1, axis), (0, 1))


def possible_axes(shape: torch.Size, axes: tuple[int, ...], n: int) -> list[BatchAxis]:
    """Return where points may lie in a tensor of this shape, the likely axes first."""
    folded = [j for j in axes if shape[j] > n and shape[j] % n == 0]
    found = [BatchAxis(j) for j in axes if shape[j] == n]
    return found + [BatchAxis(j, fold) for fold in (Fold.MAJOR, Fold.MINOR) for j in folded]


def fits(shape: torch.Size, batch_axis: BatchAxis, n: int) -> bool:
    """Return whether the points of another batch can lie along this axis of a tensor."""
    if batch_axis.axis >= len(shape):
        return False
    size = shape[batch_axis.axis]
    return size == n if batch_axis.fold is Fold.NONE else size % n == 0


def separates(batch_axis: BatchAxis, n: int, of_first: Tensor, of_others: Tensor) -> bool:
    """Return whether gradients of the first point's output alone, and of all others', lie in its rows."""
    first, others = by_point(of_first, batch_axis, n), by_point(of_others, batch_axis, n)
    return not bool(first[1:].any()) and not bool(others[0].any())


@dataclass(frozen=True)
class ParameterSubset:
    """Entries of a parameter, in the shape of a tensor that has them: of the whole parameter, or of a view of it.

    Args:
        number: Which parameter.
        entries: Index of every entry in the flat parameter, or ``None`` where the tensor is the parameter.
    """

    number: int
    entries: Tensor | None = None

    def indices(self, shape: torch.Size) -> Tensor:
        """Return the entries as indices, in the shape of the tensor."""
        return torch.arange(shape.numel()).view(shape) if self.entries is None else self.entries


@dataclass
class Call:
    """One call of a function that applies parameters.

    Args:
        edge: Where the gradient with respect to its output arrives.
        shape: Of the output.
        axes: Axes of the output that points can lie along.
        device: Of the output.
        dtype: Of the output.
    """

    edge: GradientEdge
    shape: torch.Size
    axes: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


@dataclass
class ParameterUse:
    """How one parameter enters a call.

    Args:
        call: The call.
        subset: Its entries.
        kind: ``"linear"``, ``"convolution"``, ``"embedding"`` or ``"entrywise"``.
        shape: Of the tensor with the entries, as the function takes it; of ``entrywise`` ones aligned with the output.
        source: What the entries are multiplied with: the input of a linear layer or a convolution, the tokens of an
            embedding, the other factor of an ``entrywise`` product (``None``: a sum).
        options: Of the function.
        version: Of the source, when the function ran.
        batch_axis: Where the points lie, once that is known.
    """

    call: Call
    subset: ParameterSubset
    kind: str
    shape: torch.Size
    source: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    batch_axis: BatchAxis = _IN_FRONT


class Recorder(TorchFunctionMode):
    """Notes how parameters are used while it is active, in this thread.

    Args:
        parameters: What to look for.
        lookups: Numbers of the embeddings whose tokens do not depend on the points, as those of positions.

    Attributes:
        uses: In the order of the calls.
        unknown: Numbers of parameters that a function without a rule takes, or a function within another one.
    """

    def __init__(self, parameters: list[Tensor], lookups: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._tracked: dict[int, ParameterSubset] = {
            id(p): ParameterSubset(k) for k, p in enumerate(parameters) if p.numel()
        }
        # The identity of a tensor that is gone may be another one's.
        self._kept: list[Tensor] = list(parameters)
        self._lookups = lookups
        self.uses: list[ParameterUse] = []
        self.unknown: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function, and note what it does with the parameters."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **kwargs)
        out = func(*args, **kwargs)
        found = [s for s in map(self._subset, _flat((*args, *kwargs.values()))) if s is not None]
        if not found or not any(isinstance(part, Tensor) and part.requires_grad for part in _flat((out,))):
            return out
        return self._note(func, args, kwargs, out, found)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, found: list[ParameterSubset]) -> Any:
        if func in _SELECTING and self._select(func, args, kwargs, out, found):
            return out
        before = len(self.uses)
        noted = 0
        if isinstance(out, Tensor) and out.is_floating_point():
            noted = self._apply(func, args, kwargs, out)
        if noted != len(found):
            del self.uses[before:]
            self.unknown.update(s.number for s in found)
            return out
        # An operation in place on a view goes back to what the view is of, past the noted edge.
        return out.clone() if out._is_view() else out

    def _select(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, found: list[ParameterSubset]) -> bool:
        """Follow a function that only picks and moves entries of one parameter."""
        first = self._subset(args[0]) if args else None
        parts = [out] if isinstance(out, Tensor) else list(out)
        if first is None or len(found) != 1 or not all(isinstance(part, Tensor) for part in parts):
            return False
        if func in _KEEPING:
            self._track(out, first)
            return True
        try:
            on_cpu = tree_map(lambda a: a.cpu() if isinstance(a, Tensor) else a, args[1:])
            moved = func(first.indices(args[0].shape), *on_cpu, **kwargs)
        except RuntimeError:
            # A view that needs the parameter's own order of memory.
            return False
        for part, entries in zip(parts, [moved] if isinstance(moved, Tensor) else moved, strict=True):
            self._track(part, ParameterSubset(first.number, entries))
        return True

    def _apply(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Tensor) -> int:
        """Note a function that applies parameters; return for how many of its arguments there is a rule."""
        kind, names = _RULES.get(func, ("", ()))
        if not kind or len(args) > len(names):
            return 0
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if kind == "linear" and given["weight"].ndim != 2:
            return 0
        if kind == "entrywise":
            return self._entrywise(func, given, out)
        call = _call(out, _point_axes(kind, given, out))
        noted = 0
        for name in ("weight", "bias"):
            subset = self._subset(given.get(name))
            if subset is None:
                continue
            if name == "weight" and kind == "embedding" and subset.number in self._lookups:
                indices = subset.indices(given["weight"].shape)
                moved = F.embedding(given["input"].cpu(), indices.double()).long()
                self._track(out, ParameterSubset(subset.number, moved))
            elif name == "weight" and kind in ("linear", "convolution", "embedding"):
                self._add(call, subset, kind, given[name].shape, given["input"], given)
            else:
                source = _normalized(func, given) if name == "weight" else None
                self._add(call, subset, "entrywise", _aligned(kind, given[name], out), source)
            noted += 1
        return noted

    def _entrywise(self, func: Any, given: dict[str, Any], out: Tensor) -> int:
        """Note a sum or a product with a parameter, or a parameter that is repeated for every point."""
        if func in _REPEATING:
            subset, value, other = self._subset(given["input"]), given["input"], None
        else:
            a, b = given.get("input"), given.get("other")
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or given.get("alpha", 1) != 1:
                return 0
            first = self._subset(a)
            subset, value, other = (first, a, b) if first is not None else (self._subset(b), b, a)
            if value is a and self._subset(b) is not None:
                return 0
        if subset is None or (func in _IN_PLACE and (value is given["input"] or out._is_view())):
            return 0
        aligned = torch.Size((1,) * (out.ndim - value.ndim) + tuple(value.shape))
        if any(size not in (1, whole) for size, whole in zip(aligned, out.shape, strict=True)):
            return 0
        axes = tuple(j for j, size in enumerate(aligned) if size == 1)
        self._add(_call(out, axes), subset, "entrywise", aligned, other if func in _PRODUCTS else None)
        return 1

    def _add(
        self,
        call: Call,
        subset: ParameterSubset,
        kind: str,
        shape: torch.Size,
        source: Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        source = None if source is None else source.detach()
        version = 0 if source is None else source._version
        self.uses.append(ParameterUse(call, subset, kind, shape, source, options or {}, version))

    def _track(self, t: Tensor, subset: ParameterSubset) -> None:
        self._tracked[id(t)] = subset
        self._kept.append(t)

    def _subset(self, value: Any) -> ParameterSubset | None:
        return self._tracked.get(id(value)) if isinstance(value, Tensor) else None


# Its body runs under a mode then, which sees its calls.
_ATTENTION = with_globals(F.multi_head_attention_forward, has_torch_function=lambda _: False)

_CONVOLUTION = ("convolution", ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
_REPEATING = (Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to)

_RULES: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.linear: ("linear", ("input", "weight", "bias")),
    F.conv1d: _CONVOLUTION,
    F.conv2d: _CONVOLUTION,
    F.embedding: ("embedding", _EMBEDDING),
    F.layer_norm: ("layer norm", ("input", "normalized_shape", "weight", "bias", "eps")),
    F.rms_norm: ("layer norm", ("input", "normalized_shape", "weight", "eps")),
    F.group_norm: ("norm", ("input", "num_groups", "weight", "bias", "eps")),
    F.batch_norm: ("norm", _BATCH_NORM),
    F.instance_norm: ("norm", (*_BATCH_NORM[:5], "use_input_stats", *_BATCH_NORM[6:])),
    **dict.fromkeys((*_SUMS, *_IN_PLACE, *_PRODUCTS), ("entrywise", ("input", "other"))),
    **dict.fromkeys(_REPEATING, ("entrywise", ("input", *("size",) * 8))),
}
"""Kinds of the functions that have a rule, and the names of their arguments."""

_KEEPING = (Tensor.contiguous, Tensor.float, Tensor.double, Tensor.type_as, Tensor.to, Tensor.clone)
"""They change neither the shape nor the order of the entries."""
_SELECTING = frozenset(
    (
        *_KEEPING,
        *(Tensor.__getitem__, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.squeeze),
        *(Tensor.unsqueeze, Tensor.transpose, Tensor.permute, Tensor.movedim, Tensor.split, Tensor.chunk),
        *(Tensor.unbind, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.transpose),
        *(torch.permute, torch.movedim, torch.split, torch.chunk, torch.unbind, Tensor.index_select),
    )
)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(value.values())
        else:
            yield value


def _call(out: Tensor, axes: tuple[int, ...]) -> Call:
    return Call(get_gradient_edge(out), out.shape, axes, out.device, out.dtype)


def _point_axes(kind: str, given: dict[str, Any], out: Tensor) -> tuple[int, ...]:
    if kind in ("linear", "embedding"):
        return tuple(range(out.ndim - 1))
    if kind == "layer norm":
        return tuple(range(out.ndim - len(given["normalized_shape"])))
    if kind == "convolution":
        return (0,) if out.ndim == given["weight"].ndim else ()
    return (0,) if out.ndim >= 2 else ()


def _aligned(kind: str, value: Tensor, out: Tensor) -> torch.Size:
    """Return the shape of a scale or a bias, such that it is broadcast to the output."""
    if kind in ("linear", "layer norm"):
        return torch.Size((1,) * (out.ndim - value.ndim) + tuple(value.shape))
    return torch.Size((1, value.numel()) + (1,) * (out.ndim - 2))


def _normalized(norm: Any, given: dict[str, Any]) -> Tensor:
    """Return what a norm multiplies with its scale."""
    with torch.no_grad():
        out: Tensor = norm(**{name: value for name, value in given.items() if name not in ("weight", "bias")})
    return out
