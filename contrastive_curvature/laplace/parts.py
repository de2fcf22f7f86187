"""A fit in parts: two calls for every part of the data, wherever it is, and one that puts the results together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.laplace import fitting
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.network.inputs import Inputs, asks_for_example, input_length, made_up_inputs
from contrastive_curvature.network.loader import check_loader, loader_parts
from contrastive_curvature.parts.rows import Rows
from contrastive_curvature.parts.state import CURVATURE, PROBE, STATISTICS, Origin, State, digest_of

__all__ = ["PartwiseFit"]

_PROBES = 2
_SHARED = "shared/"
"""Inputs in a state, so that a process without data can look at the encoder."""


class PartwiseFit:
    """Part of a contrastive Laplace class."""

    fits_in_parts: ClassVar[bool] = True

    def part_statistics(
        self: Any, loader: Iterable[Any], part: tuple[int, int], progress_bar: bool | None = None
    ) -> State:
        """First pass over a part of the data: what all other parts have to know of it.

        Save it with ``state.save(path)``, load it with ``State.load(path)``, and merge those of all parts with
        ``State.merged(states)``, in any order. A part that was lost is computed again alone.

        Args:
            loader: Batches ``(x, labels)`` or mappings with the points of the part; perhaps none.
            part: Index of the part, from 0, and number of all parts.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            Numbers and sums of the classes, and ``negative_samples`` points (``"auto"``: 29,999 at most); with
            ``negative_samples=None`` and a margin, or with a loss whose positives have to be known one by one, all
            embeddings of the part.

        Raises:
            InputError: Malformed batches, or ``part`` is no such pair.
            UnsupportedError: The structure or an option has no fit in parts.
        """
        return self._pass(loader, part, None, progress_bar)

    def part_curvature(
        self: Any, loader: Iterable[Any], part: tuple[int, int], statistics: State, progress_bar: bool | None = None
    ) -> State:
        """Second pass over a part of the data: what it adds to the curvature.

        Args:
            loader: The same points as in the first pass over this part, in any order.
            part: Index of the part, from 0, and number of all parts.
            statistics: Of ALL parts, merged.
            progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

        Returns:
            The unclamped curvature of the part, to be saved and merged like the statistics.

        Raises:
            InputError: The statistics lack a part, or are of other data, another encoder or other options; malformed
                batches; or a curvature that is not finite.
            UnsupportedError: The structure or an option has no fit in parts.
        """
        _check_kind("statistics", statistics, STATISTICS)
        statistics.check_complete()
        return self._pass(loader, part, statistics, progress_bar)

    def fit_parts(self: Any, statistics: State, curvature: State, example: Inputs | None = None) -> None:
        """Fit the posterior from what the two passes over all parts gave; no data are needed.

        Args:
            statistics: Of :meth:`part_statistics`, merged over all parts.
            curvature: Of :meth:`part_curvature`, merged over all parts.
            example: Two inputs, where the encoder does not take the made-up ones that are in the states.

        Raises:
            InputError: A part is missing, the states are of other data, another encoder or other options, or an example
                is needed. The posterior is as it was.
        """
        self._check_parts()
        _check_kind("statistics", statistics, STATISTICS)
        _check_kind("curvature", curvature, CURVATURE)
        for state in (statistics, curvature):
            state.check_complete()
        found = [probe for probe in map(_probe_of, (statistics, curvature)) if probe is not None]
        if not found:
            raise InputError(expected("statistics", "at least one point", "none in any part"))
        probe = _moved(found[0] if example is None else example, self._device)
        with asks_for_example(example):
            fitting.look_at(self, probe)
        self._take(self.backend.fit_of_parts(self.structure, statistics, curvature, probe), override=True)

    def _pass(
        self: Any, loader: Iterable[Any], part: tuple[int, int], statistics: State | None, progress_bar: bool | None
    ) -> State:
        self._check_parts()
        check_loader(loader, "loader")
        part = _checked_part(part, statistics)
        _check_sampler(loader, part)
        if progress_bar is not None:
            validate.flag("progress_bar", progress_bar)
        probe = fitting.first_inputs(self, loader)
        if probe is None:
            return self._empty(part, statistics)
        fitting.look_at(self, probe)
        state = self.backend.fit_part(loader, self.structure, part, statistics, progress_bar)
        return replace(state, kept={**state.kept, PROBE: _kept_probe(made_up_inputs(probe, _PROBES), part[0])})

    def _empty(self: Any, part: tuple[int, int], statistics: State | None) -> State:
        """The state of a part without points."""
        index, count = part
        backend = self._backend_without_data()
        backend.check_parts()
        identity = backend.identity(self.structure)
        if statistics is not None:
            identity["statistics"] = digest_of(statistics)
        kind = STATISTICS if statistics is None else CURVATURE
        return State(kind, identity, {index: Origin(0, 0, 0.0, 0.0)}, count)

    def _backend_without_data(self: Any) -> ContrastiveBackend:
        """A backend that says which fit this is, though no input has shown which layer is the last."""
        if not self._backend_kwargs.get("last_layer") or self.model.last_layer is not None:
            fitting.renew_backend(self)
            return self.backend
        options = {**self._backend_kwargs, "last_layer": False}
        keys = {"dict_key_x": self.dict_key_x, "dict_key_y": self.dict_key_y}
        backend = self._backend_cls(self.model.model, CONTRASTIVE, **keys, **options)
        backend.last_layer, backend.sketches_inputs = True, self.sketches_inputs
        return backend

    def _check_parts(self: Any) -> None:
        if not self.fits_in_parts:
            msg = (
                f"{type(self).__name__}: this structure does not add up over parts of the data. Use "
                "hessian_structure='diag', 'kron', 'kron_lowrank' or 'full', or fit in one process."
            )
            raise UnsupportedError(msg)


def _check_kind(argument: str, state: object, kind: str) -> None:
    if not isinstance(state, State):
        hint = "State.load(path) reads a file, State.merged(states) merges several."
        raise InputTypeError(expected(argument, "a merged State", f"a {type(state).__name__}", hint))
    if state.kind != kind:
        raise InputError(expected(argument, f"a state of kind {kind!r}", f"{state.kind!r}"))


def _checked_part(part: Any, statistics: State | None) -> tuple[int, int]:
    whole = isinstance(part, (tuple, list)) and len(part) == 2
    if not whole or not all(isinstance(k, int) and not isinstance(k, bool) for k in part):
        raise InputError(expected("part", "an index and the number of all parts, as (0, 8)", part))
    index, count = int(part[0]), int(part[1])
    if not 0 <= index < count:
        raise InputError(expected("part", f"an index from 0 to {max(0, count - 1)} of {count} parts", f"{index}"))
    if statistics is not None and statistics.count != count:
        raise InputError(expected("part", f"one of {statistics.count} parts, as in the statistics", f"one of {count}"))
    return index, count


def _check_sampler(loader: Any, part: tuple[int, int]) -> None:
    """Refuse a sampler that gives another part of the data than this one is called.

    Raises:
        InputError: It says so.
    """
    for sampler in loader_parts(loader):
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != part:
            came = f"rank {sampler.rank} of {sampler.num_replicas} in its DistributedSampler"
            raise InputError(expected("loader", f"part {part[0]} of {part[1]}, as part= says", came))


def _kept_probe(x: Inputs, index: int) -> Rows:
    columns = {"": x} if isinstance(x, Tensor) else {k: v for k, v in x.items() if isinstance(v, Tensor)}
    kept, count = {}, input_length(x)
    for name, part in columns.items():
        if part.ndim and part.shape[0] == count:
            kept[f"x/{name}"] = part
        else:
            # Of all points together: every row has it.
            kept[f"{_SHARED}{name}"] = part.unsqueeze(0).expand(count, *part.shape)
    return Rows(_PROBES, _PROBES * index + torch.arange(count), kept)


def _probe_of(state: State) -> Inputs | None:
    rows = state.kept.get(PROBE)
    if rows is None or not len(rows):
        return None
    found = {
        name.removeprefix(_SHARED).removeprefix("x/"): part[0] if name.startswith(_SHARED) else part
        for name, part in rows.columns.items()
    }
    return found[""] if set(found) == {""} else found


def _moved(x: Inputs, device: Any) -> Inputs:
    return x.to(device) if isinstance(x, Tensor) else {k: v.to(device) for k, v in x.items()}
