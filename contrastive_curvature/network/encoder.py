"""Analysis of an encoder: its raw outputs, before a final l2-normalisation, and the layer that computes them.

An encoder may end in an l2-normalisation module of any class, or its ``forward`` may apply ``F.normalize`` to the
output of a module; the curvature needs the raw outputs before this normalisation. An encoder whose raw outputs cannot
be reached is refused: every Jacobian would silently belong to another function.

One run of the encoder on a probe is recorded, and searched backwards from the output. Equal numbers alone may be a
coincidence: an adapter that starts at zero adds nothing to a layer's output, and a momentum copy of a layer has the
same output. So other values replace a layer's output. Only if the embeddings come from this layer do they follow the
other values, and no parameter has a gradient then (:func:`carries`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.network.call import (
    ModelCall,
    check_output,
    describe_points,
    eager,
    entry_of,
    named_entries,
    naming_the_input,
    refuse_compiled_layer,
    uncompiled,
)
from contrastive_curvature.network.given_features import FEATURES, LAST_LAYER, has_features
from contrastive_curvature.network.inputs import Inputs, few_points, made_up_inputs, slice_inputs
from contrastive_curvature.network.threads import OwnThreadHook, users_hooks, watched
from contrastive_curvature.network.threads import evaluation_mode as evaluation_mode

Key = str | int | None
"""Name of an entry of a mapping that a module takes and returns; ``None`` where it takes and returns tensors."""

_UNIT_TOLERANCE = 1e-4

_LAYER_NORM = (0.97, 1.001)
"""Norm of a row of a layer norm with scale one, divided by the root of its length: less than 1 by the added epsilon."""

_OF_BATCH = (
    "model: in evaluation mode the embedding of a point depends on the rest of its batch (batch normalisation without "
    "running statistics?), so a point has no Jacobian of its own. Use track_running_stats=True, or LayerNorm."
)

_IN_PLACE = (
    "model: forward changes its input in place (x -= mean, x.mul_(2)?), so every run on the same batch gives other "
    "embeddings. Write x = x - mean there, or begin forward with x = x.clone()."
)

_RANDOM = (
    "model: in evaluation mode two runs on the same batch give other embeddings (dropout that is always on, a random "
    "augmentation in forward?), so there is no one encoder to be uncertain about. Use nn.Dropout, or "
    "F.dropout(x, p, training=self.training), and augment in the loader."
)


class Place(NamedTuple):
    """The place of the raw outputs: the model's result, or a run of one of its modules.

    Attributes:
        module: The module; with ``None`` the model's own output is the raw output.
        run: Number of the module's run, counted from zero.
        entry: Name of the tensor among the module's inputs; ``None`` if the input is one tensor.
        key: Name of the tensor among the module's outputs; ``None`` if the output is one tensor.
        normalizes: Whether the module's input is the raw outputs, which the module normalises. Otherwise its output is
            the raw outputs, which ``forward`` normalises.
    """

    module: nn.Module | None = None
    run: int = 0
    entry: Key = None
    key: Key = None
    normalizes: bool = False


def find_raw(records: Sequence[Record], out: Tensor, made_of: Callable[[Record], bool]) -> tuple[Tensor, Place, bool]:
    """Go back from the output (N, D) through normalisations and modules that return their input unchanged.

    Args:
        records: Records of an encoder's innermost modules, in order.
        out: Output of the encoder.
        made_of: Function that returns whether the output always has the directions of a record's output.

    Returns:
        The raw outputs (N, D), their place, and whether they are still normalised.
    """

    def last(matches: Callable[[Any, Tensor], bool], end: int) -> int:
        """Return the index of the last record before ``end`` that matches and determines the output, or -1."""
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
                # The output rows of a layer norm have a common norm other than one: this is not an l2-normalisation.
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
            # The module itself may also be a normalisation.
            end = k + 1
    return raw, place, False


def _refuse_hidden_normalization(out: Tensor) -> None:
    """Refuse outputs with one common norm from no module, except outputs of a layer norm with scale one."""
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
    """An output tensor of a module's run, and its inputs; all copied, since in-place operations may change them.

    Attributes:
        module: The module.
        run: Number of earlier runs of the module.
        inputs: Input tensors by name.
        key: Name of the output tensor.
        output: The output tensor.
    """

    module: nn.Module
    run: int
    inputs: dict[Key, Tensor]
    key: Key
    output: Any

    def rescaled(self) -> Key | bool:
        """Return the name of the input with rows that are positive multiples of the output's rows, or ``False``."""
        if next(self.module.parameters(), None) is not None:
            return False
        names = sorted(self.inputs, key=lambda name: name != self.key)
        return next((name for name in names if feeds(self.inputs[name], self.output)), False)


def trace(model: nn.Module, call: ModelCall, probe: Inputs) -> tuple[list[Record], Tensor]:
    """Run an encoder; return the records of its innermost modules, in order, and the outputs (N, D).

    One point (or equal points) with a norm other than one cannot show whether all points have that norm. Then made-up
    points replace them, if the encoder accepts these.
    """
    if any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules()):
        raise UnsupportedError(_OF_BATCH)
    before = _versions(probe)
    records, out = _recorded(model, call, probe)
    check_output(out)

    def differs(run: Tensor) -> bool:
        return float((run - out[: len(run)]).abs().max()) > 1e-2 * float(out.abs().max())

    if len(out) > 1 and differs(call(model, slice_inputs(probe, slice(0, 1)))):
        if _versions(probe) != before:
            raise UnsupportedError(_IN_PLACE)
        raise UnsupportedError(_RANDOM if differs(call(model, probe)) else _OF_BATCH)
    if bool((out[1:] != out[:1]).any()) or has_unit_norm(out) or not bool(out.isfinite().all()):
        return records, out
    try:
        more, other = _recorded(model, call, made_up_inputs(few_points(probe, 2)))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return records, out
    return (more, other) if bool(other.isfinite().all()) else (records, out)


def _versions(x: Inputs) -> list[int]:
    """Return how often each tensor of a batch was changed in place."""
    parts = x.values() if isinstance(x, Mapping) else [x]
    return [t._version for t in parts if isinstance(t, Tensor) and not t.is_inference()]


def _recorded(model: nn.Module, call: ModelCall, probe: Inputs) -> tuple[list[Record], Tensor]:
    """Record the innermost modules in one run; return the records and the outputs."""
    started: dict[int, tuple[dict[Key, Tensor], dict[Key, Tensor]]] = {}
    runs: Counter[int] = Counter()
    records: list[Record] = []

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _tensors(next(iter((*args, *kwargs.values())), None))
        started[id(module)] = inputs, {name: t.clone() for name, t in inputs.items()}

    def finish(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        inputs, copies = started.pop(id(module))
        for key, value in _tensors(output).items():
            # A tensor that a mapping only passes on belongs to the module that made it.
            if key is None or value is not inputs.get(key):
                records.append(Record(module, runs[id(module)], copies, key, value.clone()))
        runs[id(module)] += 1

    # Script modules have no hooks.
    leaves = [m for m in model.modules() if not any(m.children()) and not isinstance(m, torch.jit.ScriptModule)]
    with watched(leaves, before=start, after=finish), naming_the_input(probe):
        out = call(model, probe)
    return records, out


def has_constant_norm(out: Tensor) -> bool:
    """Return whether all rows have norm one or, if the rows differ, a common norm."""
    if has_unit_norm(out):
        return len(out) > 0
    norms = out.float().norm(dim=1)
    # Equal embeddings have equal norms for any encoder.
    return bool((out[1:] != out[:1]).any()) and bool(((norms / norms[0] - 1).abs() < _tolerance(out)).all())


def has_unit_norm(out: Tensor) -> bool:
    """Return whether all rows have norm one."""
    return bool(((out.float().norm(dim=1) - 1).abs() < _tolerance(out)).all())


def _tolerance(out: Tensor) -> float:
    """Return the tolerance of unit norms: half precision rounds the norms, and then every entry."""
    return max(_UNIT_TOLERANCE, 2 * torch.finfo(_precision(out)).eps) if out.is_floating_point() else _UNIT_TOLERANCE


def _precision(out: Tensor) -> torch.dtype:
    """Return the dtype in which numbers were computed, even if ``forward`` converted them to float32 at the end."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(out.dtype).eps and torch.equal(out.to(dtype).to(out.dtype), out):
            return dtype
    return out.dtype


def is_same(output: Any, raw: Tensor) -> bool:
    """Return whether a module's output has these numbers, in any precision."""
    # torch.equal does not support nested tensors and tensors inside torch.vmap.
    if not isinstance(output, Tensor) or output.is_nested or output.shape != raw.shape:
        return False
    both = torch.promote_types(output.dtype, raw.dtype)
    return torch.equal(output.to(both), raw.to(both))


def feeds(output: Any, normalized: Tensor) -> bool:
    """Return whether ``normalized`` (N, D) is a module's output divided by its row norms, up to rounding."""
    if not isinstance(output, Tensor) or output.is_nested or output.shape != normalized.shape:
        return False
    raw = output.detach().double()
    one, other = (nn.functional.normalize(t, dim=1) for t in (raw, normalized.detach().double()))
    # Rows of NaN count as equal; another check reports them.
    apart = (one - other).masked_fill(one.isnan() & other.isnan(), 0).abs()
    # Rounding is relative to an entry; subnormal numbers of half precision have a larger relative error.
    info = torch.finfo(_precision(normalized))
    smallest = info.smallest_normal * info.eps * (1 + 1 / raw.norm(dim=1, keepdim=True).clamp(min=info.tiny))
    return bool((apart <= 4 * info.eps * one.nan_to_num().abs() + 4 * smallest.nan_to_num()).all())


def _tensors(value: Any) -> dict[Key, Tensor]:
    """Return a tensor, or a mapping's tensors that may be embeddings; other tensors would waste memory."""
    if isinstance(value, Tensor):
        return {None: value}
    if not isinstance(value, Mapping):
        return {}
    return {name: t for name, t in named_entries(value) if isinstance(t, Tensor) and not t.is_nested and t.ndim == 2}


def carries(
    model: nn.Module, run: Callable[[], Tensor], record: Record, matches: Callable[[Tensor, Tensor], bool]
) -> bool:
    """Return whether the result of a run depends on one output of a module, and on nothing else.

    The test replaces this output by other values. An encoder with the user's hooks runs without a graph, so that only
    values are compared.

    Args:
        model: The encoder.
        run: Function that runs the encoder on a few points.
        record: The output.
        matches: Function that returns whether the replacing values (N, D) and the result (N, D) belong together. With
            :func:`feeds`, other parameters, such as a learned temperature, may change the norms of the result.
    """

    def passes() -> Tensor | None:
        with _substituted(record) as put:
            out = run()
        return out if put and matches(put[0], out.detach()) else None

    # A hook, for example by BackPACK's ``extend``, may keep tensors for the user's own backward pass.
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
        # Some encoders run only without a graph; then there are no gradients that could be wrong.
        with torch.no_grad(), suppress(UnsupportedError):
            return passes() is not None
        return False
    # A module may keep its last results, here the other values with a graph that cannot be copied.
    with torch.no_grad():
        run()
    return carried


@contextmanager
def _substituted(record: Record) -> Iterator[list[Tensor]]:
    """Replace one output of a module by other values; yield a list that will hold these values."""
    put: list[Tensor] = []
    run, generator = count(), torch.Generator().manual_seed(0)

    def replace(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        if next(run) != record.run:
            return None
        put.append(other_values(out if record.key is None else entry_of(out, record.key), generator))
        # A copy, because a later in-place operation may change it.
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
    """Draw normal numbers with a tensor's shape, dtype and root mean square, without a graph."""
    size = like.detach().float().square().mean().sqrt()
    size = torch.where(size.isfinite() & (size > 0), size, torch.ones_like(size))
    return (torch.randn(like.shape, generator=generator, device="cpu").to(like.device) * size).to(like.dtype)


def _has_gradient(model: nn.Module, out: Tensor, direction_only: bool) -> bool:
    """Return whether parameters change the result although its supposed source is constant."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not out.requires_grad or not parameters:
        return False
    v = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(out.device)
    if direction_only:
        values = out.detach().float()
        unit = nn.functional.normalize(values, dim=1)
        v = nn.functional.normalize(v - (v * unit).sum(1, keepdim=True) * unit, dim=1)
        v = v / values.norm(dim=1, keepdim=True).clamp(min=1e-12)
    gradients = torch.autograd.grad(out, parameters, v.to(out.dtype), allow_unused=True)
    # The gradient of a temperature is zero up to the rounding of v. This tolerance applies only to single numbers, not
    # to the weights of a layer.
    rounding = 32 * torch.finfo(out.dtype).eps if direction_only else 0.0
    return any(
        float(g.coalesce().values().norm() if g.is_sparse else g.norm()) > (rounding if g.numel() == 1 else 0.0)
        for g in gradients
        if g is not None
    )


def flatten_parameters(parameters: Iterable[Tensor]) -> Tensor:
    """Return all entries as one vector, shape (P,), in the order of their indices."""
    # torch's parameters_to_vector refuses weights in other memory formats, such as channels_last.
    return torch.cat([p.reshape(-1) for p in parameters])


def at_least_float32(t: Tensor) -> Tensor:
    """Return half precision (an encoder's, or autocast's) as float32: sums of curvatures need that precision."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


class Features(NamedTuple):
    """Outputs and inputs of the last layer for a batch; a last-layer posterior accepts them in place of inputs.

    Attributes:
        outputs: Raw outputs, shape (B, D).
        features: Inputs of the last layer, shape (B, F).
    """

    outputs: Tensor
    features: Tensor


class Encoder(nn.Module):
    """An analysed encoder; calling it returns the raw outputs, before any l2-normalisation.

    Keep one for many calls of :func:`contrastive_curvature.ggn`, which then do not analyse the model again; its weights
    may change between them.

    This class also replaces laplace-torch's feature extractor for a last-layer posterior. That extractor assumes that
    the last module to run is the last layer; in an encoder, the last module is often a normalisation.

    Args:
        model: Any module that maps a batch to (N, D), or to a mapping or an object with the embeddings; parameters are
            shared, not copied.
        probe: A batch for :meth:`analyse`; with ``None``, call it later, or the first inputs will.
        last_layer_name: Name of the linear layer that computes the raw outputs; ``None`` detects the layer.
        label_key: Key of the labels in batches that are mappings; ``forward`` never receives labels by keyword.

    Attributes:
        model: The wrapped module.
        dim: D; for a ``SentenceTransformer`` with a ``truncate_dim``, this number.
        last_layer_name: Name in ``model.named_modules()`` of the linear layer whose output is the raw output, or
            ``None``.
        place: The place of the raw outputs.
        normalized: Whether the raw outputs have unit norm, because no earlier output could be reached.
        call: Calls the model, and selects the embeddings among its outputs.
        layer_analysis: What :mod:`contrastive_curvature.network.layerwise` found out about the layers, after a key that
            says for which parameters and inputs; every batch is checked against it.
    """

    dim: int

    def __init__(
        self,
        model: nn.Module,
        probe: Inputs | None = None,
        last_layer_name: str | None = None,
        *,
        label_key: str = "labels",
    ) -> None:
        super().__init__()
        self.model = uncompiled(model)
        self.call = ModelCall(label_key)
        self.place = Place()
        self.normalized = False
        self.last_layer_name: str | None = None
        self._wanted_layer = last_layer_name
        self._probe_points: str | None = None
        self._saw_inputs = False
        self._parts: dict[str, tuple[Any, ...]] | None = None
        self.layer_analysis: tuple[Any, Any] | None = None
        if probe is not None:
            self.analyse(probe)

    def analyse(self, probe: Inputs) -> None:
        """Find the raw outputs and the last layer, once, by a recorded run of a batch's first points.

        One point is enough; with two or more, common norms and dependence on the batch are detected too. Features in
        place of inputs name the last layer; the encoder itself is analysed with the first inputs.

        Raises:
            InputError: Outputs are not finite, or the named layer is not the last one.
            UnsupportedError: The raw outputs cannot be reached.
        """
        if self._saw_inputs:
            return
        if has_features(probe):
            self.last_layer_name, self._runs = probe[LAST_LAYER], 1
            layer: Any = self.last_layer
            self.dim = layer.out_features
            return
        probe, few = slice_inputs(probe, slice(0, 8)), slice_inputs(probe, slice(0, 2))
        makes_out = partial(carries, self.model, lambda: self.call(self.model, few), matches=feeds)
        makes_raw = partial(carries, self.model, lambda: self._raw_outputs(few), matches=is_same)
        with torch.no_grad(), evaluation_mode(self.model), eager(self.model):
            records, out = trace(self.model, self.call, probe)
            self._probe_points = describe_points(probe)
            # ``encode`` of sentence-transformers truncates the result of ``forward``.
            cut = getattr(self.model, "truncate_dim", None) if hasattr(self.model, "encode") else None
            self.dim = min(out.shape[1], cut) if isinstance(cut, int) else out.shape[1]
            if not bool(out.isfinite().all()):
                rows = (~out.isfinite().all(dim=1)).nonzero().flatten()[:5].tolist()
                raise InputError("model(x)", "finite embeddings", f"NaN or infinity in rows {rows} of the first batch")
            raw, self.place, self.normalized = find_raw(records, out, makes_out)
            layers: list[nn.Module] = [
                record.module
                for record in records
                if isinstance(record.module, nn.Linear) and is_same(record.output, raw) and makes_raw(record)
            ]
        wanted_layer = self.last_layer_name or self._wanted_layer
        if wanted_layer is not None:
            names = [name for name, module in self.model.named_modules() if module in layers]
            if wanted_layer not in names:
                wanted = f"the layer that computes the raw outputs, one of {names}"
                hint = "Only an l2-normalisation may follow its output."
                raise InputError("last_layer_name", wanted, wanted_layer, hint)
            layers = [self.model.get_submodule(wanted_layer)]
        if layers:
            self.last_layer_name = _name_of(layers[-1], self.model)
            self._runs = sum(record.module is layers[-1] for record in records)
            refuse_compiled_layer(self.model, self.last_layer_name)
        self._parts, self._saw_inputs = _parts_of(self.model), True

    def require_unchanged(self) -> None:
        """Refuse a model that is not as it was when it was analysed, apart from its weights.

        Raises:
            InputError: A module, a hook, or an option of a module (a number, a text or a function) differs.
        """
        now, before = _parts_of(self.model), self._parts
        if before is None or now == before:
            return
        name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
        which = f"module {name!r}" if name else "the model itself"
        wanted = "an Encoder whose model is as it was when it was analysed, apart from its weights"
        got = f"other modules, hooks or options of {which}"
        raise InputError("model", wanted, got, "Make a new one, contrastive_curvature.Encoder(model, x).")

    @property
    def last_layer(self) -> nn.Linear | None:
        """Return the linear layer that computes the raw outputs."""
        if self.last_layer_name is None:
            return None
        layer: Any = self.model.get_submodule(self.last_layer_name)
        return layer

    def require_last_layer(self) -> nn.Linear:
        """Return the last layer, if its last-layer curvature is exact; otherwise refuse."""
        layer, name = self.last_layer, self.last_layer_name
        if layer is None or layer.out_features != self.dim:
            why = "no linear layer computes the raw outputs of this encoder"
        elif self._runs > 1:
            why = f"layer {name!r} runs {self._runs} times"
        elif layer._modules or any(name not in ("weight", "bias") for name in layer._parameters):
            why = (
                f"the weight of layer {name!r} is reparametrised (weight or spectral norm), so its outputs are not "
                "linear in its parameters"
            )
        else:
            return layer
        raise UnsupportedError(
            f"subset_of_weights='last_layer': {why}. End the encoder in nn.Linear (followed at most by a "
            "normalisation): pass contrastive_curvature.with_last_layer(encoder, x), with x a batch of inputs. It "
            "changes no embedding: it joins a linear layer and what follows it into one, or adds one. Or use "
            "subset_of_weights='all'."
        )

    def forward(self, x: Inputs) -> Tensor:
        """Return raw outputs, shape (N, D)."""
        if has_features(x):
            return self.forward_with_features(x).outputs
        self.analyse(x)
        return self._raw_outputs(x)

    def _raw_outputs(self, x: Inputs) -> Tensor:
        if self.place.module is None:
            z = at_least_float32(self._run(x))
        else:
            z = self.passed(self.place, x)[0 if self.place.normalizes else 1]
        return z[..., : self.dim]

    @property
    def normalization(self) -> nn.Module | None:
        """Return the module whose input is the raw output, if any."""
        return self.place.module if self.place.normalizes else None

    @property
    def normalizes_inside(self) -> bool:
        """Return whether the raw output is a module's output that ``forward`` then normalises."""
        return self.place.module is not None and not self.place.normalizes

    def embeddings(self, z: Tensor) -> Tensor:
        """Return the model's embeddings for raw outputs (N, D): unchanged, or normalised."""
        if self.normalizes_inside:
            return nn.functional.normalize(z, dim=1)
        if self.normalization is None:
            return z
        entry = self.place.entry
        out: Any = self.normalization(z if entry is None else {entry: z})
        return out if entry is None else entry_of(out, self.place.key)

    def forward_with_features(self, x: Inputs) -> Features:
        """Return raw outputs (N, D) and last-layer inputs (N, F); given features are returned unchanged."""
        if not has_features(x):
            self.analyse(x)
            phi, z = self.passed(Place(self.require_last_layer()), x)
            return Features(z, phi)
        layer = self.require_last_layer()
        # A half-precision layer computes its outputs in half precision, but curvatures sum products of features.
        phi = x[FEATURES].to(layer.weight.device, torch.promote_types(layer.weight.dtype, torch.float32))
        return Features(at_least_float32(layer(phi.to(layer.weight.dtype))), phi)

    def passed(self, place: Place, x: Inputs) -> tuple[Tensor, Tensor]:
        """Run a batch, and return copies of the input and the output of a module's run."""
        module, run, entry, key, _ = place
        assert module is not None
        inputs: list[Any] = []
        outputs: list[Any] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(_copied(args[0] if args else next(iter(kwargs.values())), entry))

        with watched([module], before=note, after=lambda _, __, out: outputs.append(_copied(out, key))):
            embeddings = self._run(x)
        if len(outputs) <= run:
            name = _name_of(module, self.model)
            raise UnsupportedError(
                f"model: layer {name!r} ({type(module).__name__}), which made the outputs of the first batch, did not "
                "run for this one, or only in another thread (of nn.DataParallel pass the module inside it). An "
                "encoder with other last layers for other inputs (two heads) has no one last layer: make each path a "
                "module of its own and fit each, cc.TwoTowers(path_a, path_b) for pairs of both; or use "
                "subset_of_weights='all', which takes all layers."
            )
        if self.normalizes_inside and module in (self.last_layer, self.place.module):
            self._check_feeds(outputs[run], embeddings)
        return inputs[run], outputs[run]

    def _check_feeds(self, raw: Tensor, out: Tensor) -> None:
        """Refuse a batch whose output, unlike the probe's, is not the normalised layer output ``raw``."""
        vectorised: Any = torch._C._functorch
        # A traced graph or a vectorised function has inputs that were compared before.
        if torch.compiler.is_compiling() or vectorised.is_functorch_wrapped_tensor(out) or feeds(raw, out):
            return
        raise UnsupportedError(
            "model: of the first batch, the output was the normalised output of a layer, and of this one it is not. "
            "Remove F.normalize from forward and end the encoder in the module contrastive_curvature.L2Norm(), or in "
            "no normalisation at all."
        )

    def _run(self, x: Inputs) -> Tensor:
        """Run the model; an error that ``x`` causes inside it becomes one that names ``x``."""
        with naming_the_input(x, self._probe_points):
            return self.call(self.model, x)


def _parts_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return by name every module, the keys of its forward hooks, which torch never gives twice, and its options."""
    parts = {}
    for name, module in model.named_modules():
        tables = module._forward_pre_hooks, module._forward_hooks
        hooks = [key for table in tables for key, hook in table.copy().items() if not isinstance(hook, OwnThreadHook)]
        # What torch.compile leaves in a module is not copied with it.
        own = {} if "_orig_mod" in module._modules else vars(module)
        options = {
            key: value
            for key, value in own.items()
            if key not in ("training", "_compiled_call_impl")
            and (isinstance(value, (bool, int, float, str)) or callable(value))
        }
        parts[name] = module, hooks, options
    return parts


def _name_of(module: nn.Module, model: nn.Module) -> str:
    return next((name for name, other in model.named_modules() if other is module), "")


def _copied(value: Any, entry: Key) -> Any:
    """Copy a tensor, or the tensor under a name, since a later in-place operation may change it."""
    part = value if entry is None else entry_of(value, entry)
    return at_least_float32(part.clone()) if isinstance(part, Tensor) else part
