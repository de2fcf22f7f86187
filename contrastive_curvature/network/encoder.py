"""Analysis of an encoder: its raw outputs, and the linear layer that computes them.

An encoder may end in an l2-normalisation module, of any class; the curvature is that of the inputs of this module. An
encoder whose raw outputs cannot be reached (``F.normalize`` inside ``forward``) is refused: every Jacobian would be
that of another function, without any sign of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.network.given_features import (
    SourceCheck,
    has_features,
    read_features,
    refuse_features,
    source_of,
)
from contrastive_curvature.network.inputs import Inputs, slice_inputs
from contrastive_curvature.network.refusal import describe_points, naming_the_input
from contrastive_curvature.network.threads import evaluation_mode, watched

__all__ = [
    "Encoder",
    "evaluation_mode",
    "flatten_parameters",
    "weight_norms",
]

_UNIT_TOLERANCE = 1e-4


def flatten_parameters(parameters: Iterable[Tensor]) -> Tensor:
    """All entries as one vector, shape (P,), in the order of their indices.

    torch's ``parameters_to_vector`` refuses weights in other memory formats, such as channels_last.
    """
    return torch.cat([p.reshape(-1) for p in parameters])


def weight_norms(model: nn.Module) -> Tensor:
    """Norms of all parameters, float64 on the CPU: enough to distinguish one trained encoder from another.

    The norms are sorted, because wrappers around an encoder may list its modules in another order.
    """
    return torch.stack([p.detach().norm().cpu().double() for p in model.parameters()]).sort().values


class Encoder(nn.Module):
    """An analysed encoder; calling it gives the raw outputs, before any l2-normalisation.

    Args:
        model: Any module that maps a batch to (N, D); parameters are shared, not copied.
        probe: A batch that is run once to record the order of execution. One point is enough; with two or more, common
            norms and dependence on the batch are detected too.
        last_layer_name: Name of the linear layer that computes the raw outputs; ``None`` detects the layer.
        takes_features: Whether saved features (:mod:`contrastive_curvature.network.given_features`) may take the place
            of inputs, of the probe too. The analysis of inputs is then made up for as soon as there are any.

    Attributes:
        model: The wrapped module.
        dim: D.
        last_layer: The linear layer whose output is the raw output, or ``None``.
        last_layer_name: Its name in ``model.named_modules()``, or ``None``.
        normalization: The module whose input is the raw output, or ``None`` if the model returns the raw output.
        normalization_run: Which run of ``normalization`` takes the raw output, counted from zero; a module may run
            several times in one ``forward``.
        normalized: Whether the raw outputs have unit norm, because no earlier output could be reached.

    Raises:
        InputTypeError: The model does not return a tensor.
        InputError: The model cannot process the probe, does not return (N, D), or has no layer of that name.
        UnsupportedError: The model normalises inside ``forward``, or a point's output depends on the rest of its batch;
            or saved features where they are not taken.
    """

    def __init__(
        self, model: nn.Module, probe: Inputs, last_layer_name: str | None = None, *, takes_features: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.normalization: nn.Module | None = None
        self.normalization_run = 0
        self.normalized = False
        self.last_layer_name: str | None = None
        self._probe_points: str | None = None
        self._check_source = SourceCheck() if takes_features else None
        self._saw_inputs = not has_features(probe)
        if self._saw_inputs:
            self._analyse(probe, last_layer_name)
        else:
            self._stand_in(probe, last_layer_name)

    def _stand_in(self, probe: Any, last_layer_name: str | None) -> None:
        """Take what the analysis found when the features were written, in the place of one."""
        if self._check_source is None:
            raise refuse_features()
        source = source_of(probe)
        self._check_source(self.model, last_layer_name or source.last_layer, source)
        self.last_layer_name, self._runs = source.last_layer, 1
        self.dim = self.require_last_layer().out_features

    def _see_inputs(self, x: Inputs) -> None:
        """Analyse the encoder with its first inputs, where only features have been there before.

        Raises:
            InputError: The last layer is not the one whose features were taken.
        """
        if self._saw_inputs:
            return
        with evaluation_mode(self.model):
            self._analyse(slice_inputs(x, slice(0, 8)), self.last_layer_name)
        self._saw_inputs = True

    def _analyse(self, probe: Inputs, last_layer_name: str | None) -> None:
        records, out = _trace(self.model, probe)
        self._probe_points = describe_points(probe)
        self.dim = out.shape[1]
        _check_finite(out)
        raw, self.normalized = self._undo_normalizations(records, out)
        layers = [r for r in records if isinstance(r.module, nn.Linear) and _is_same(r.output, raw)]
        named = dict(self.model.named_modules())
        if last_layer_name is not None and not isinstance(named.get(last_layer_name), nn.Linear):
            linear = [name for name, module in named.items() if isinstance(module, nn.Linear)]
            raise InputError(
                expected("last_layer_name", f"the name of a linear layer, one of {linear}", last_layer_name)
            )
        if last_layer_name is not None and not any(r.module is named[last_layer_name] for r in layers):
            hint = "Its output must be the raw embedding, which only an l2-normalisation may follow."
            raise InputError(
                expected("last_layer_name", "the layer that computes the raw outputs", last_layer_name, hint)
            )
        if layers:
            module = layers[-1].module if last_layer_name is None else named[last_layer_name]
            self.last_layer_name = next(name for name, other in named.items() if other is module)
            self._runs = sum(r.module is module for r in records)

    def _undo_normalizations(self, records: list[_Record], out: Tensor) -> tuple[Tensor, bool]:
        """Go back from the output through normalisations, and through modules that return their input unchanged.

        Returns:
            The raw outputs of the probe, and whether the raw outputs are still normalised.
        """
        raw, k = out, len(records)
        while _has_constant_norm(raw):
            k = next((i for i in reversed(range(k)) if _is_same(records[i].output, raw)), -1)
            if k < 0:
                if raw.shape[1] > 1:
                    raise UnsupportedError(_NORMALIZES_INSIDE)
                return raw, False
            if isinstance(records[k].module, nn.Linear):
                return raw, False
            if not records[k].only_rescales():
                # A layer norm gives rows of a common norm other than one; that is no l2-normalisation.
                return raw, bool(((raw.float().norm(dim=1) - 1).abs() < _UNIT_TOLERANCE).all())
            raw, self.normalization = records[k].input, records[k].module
            self.normalization_run = sum(record.module is self.normalization for record in records[:k])
        return raw, False

    @property
    def last_layer(self) -> nn.Linear | None:
        """The linear layer that computes the raw outputs."""
        if self.last_layer_name is None:
            return None
        layer = self.model.get_submodule(self.last_layer_name)
        if not isinstance(layer, nn.Linear):
            msg = f"{self.last_layer_name} was a linear layer when the encoder was analysed, and is now a {type(layer)}"
            raise TypeError(msg)
        return layer

    def require_last_layer(self) -> nn.Linear:
        """The last layer, if a last-layer curvature of it is exact.

        Raises:
            UnsupportedError: There is no last layer, the last layer runs more than once, or its weight is
                reparametrised.
        """
        hint = (
            "End the encoder in nn.Linear (followed at most by a normalisation module such as "
            "contrastive_curvature.L2Norm), or use subset_of_weights='all'."
        )
        layer = self.last_layer
        if layer is None:
            msg = f"subset_of_weights='last_layer': no linear layer computes the raw outputs of this encoder. {hint}"
            raise UnsupportedError(msg)
        if self._runs > 1:
            msg = f"subset_of_weights='last_layer': layer {self.last_layer_name!r} runs {self._runs} times. {hint}"
            raise UnsupportedError(msg)
        if [name for name, _ in layer.named_parameters()] not in (["weight"], ["weight", "bias"]):
            msg = (
                f"subset_of_weights='last_layer': the weight of layer {self.last_layer_name!r} is reparametrised "
                "(weight or spectral norm), so its outputs are not linear in its parameters. Remove the "
                "reparametrisation."
            )
            raise UnsupportedError(msg)
        return layer

    def forward(self, x: Inputs) -> Tensor:
        """Raw outputs, shape (N, D).

        Raises:
            InputError: The model raises an error for inputs of another shape or dtype than the probe.
            UnsupportedError: The normalisation did not run in this thread.
        """
        if has_features(x):
            return self.features(x)[0]
        self._see_inputs(x)
        if self.normalization is None:
            return _at_least_float32(self._run(x))
        return self._output_and_input(self.normalization, x, self.normalization_run)[1]

    def features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Raw outputs (N, D), and the inputs of the last layer, (N, F).

        Raises:
            InputError: Saved features of another encoder, or of another shape.
            UnsupportedError: There is no one last layer, or saved features where they are not taken.
        """
        if isinstance(x, Mapping) and has_features(x):
            if self._check_source is None:
                raise refuse_features()
            layer = self.require_last_layer()
            self._check_source(self.model, self.last_layer_name, source_of(x))
            phi = read_features(x, layer)
            return _at_least_float32(layer(phi)), phi
        self._see_inputs(x)
        return self._output_and_input(self.require_last_layer(), x)

    def _output_and_input(self, module: nn.Module, x: Inputs, run: int = 0) -> tuple[Tensor, Tensor]:
        """Output and input of one run of a module; copies, because a later in-place operation may change them."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with watched(
            [module],
            before=lambda _, args, kwargs: inputs.append(
                _at_least_float32((args[0] if args else kwargs["input"]).clone())
            ),
            after=lambda _, __, out: outputs.append(_at_least_float32(out.clone())),
        ):
            self._run(x)
        if len(outputs) <= run:
            raise UnsupportedError(self._why_not(module))
        return outputs[run], inputs[run]

    def _why_not(self, module: nn.Module) -> str:
        """Why a module may not have run in this thread."""
        name = next((name for name, other in self.model.named_modules() if other is module), "")
        which = (
            f"model: layer {name!r} ({type(module).__name__}), which made the outputs of the first batch, did not run"
        )
        if any(isinstance(other, nn.DataParallel) for other in self.model.modules()):
            return f"{which} in this thread, as nn.DataParallel runs copies. Pass the module inside it."
        return (
            f"{which} for this one, or only in another thread. An encoder with other last layers for other inputs (two "
            "heads) has no one last layer: make each path a module of its own and fit each, cc.TwoTowers(path_a, "
            "path_b) for pairs of both; or use subset_of_weights='all', which takes all layers."
        )

    def _run(self, x: Inputs) -> Tensor:
        """The outputs of the model; an error that ``x`` causes inside the model becomes one that names ``x``."""
        with naming_the_input(x, self._probe_points):
            out: Tensor = self.model(x)
        return out


def _at_least_float32(t: Tensor) -> Tensor:
    """Half precision (as under autocast) becomes float32, because sums of curvatures need that precision."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


class _Record:
    """Input and output of one run of a module; copies, because a later in-place operation may change them."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.module = module
        self.input: Any = args[0].clone() if args and isinstance(args[0], Tensor) else None
        self.output: Any = None

    def only_rescales(self) -> bool:
        """Whether the module has no parameters, and every row of its output is a positive multiple of its input row."""
        z, out = self.input, self.output
        if (
            not isinstance(z, Tensor)
            or not isinstance(out, Tensor)
            or z.shape != out.shape
            or next(self.module.parameters(), None) is not None
        ):
            return False
        if not bool((z != 0).any(dim=1).all()):
            return True
        aligned = (normalize(z)[0] * normalize(out)[0]).sum(1)
        return bool((aligned > 1 - _UNIT_TOLERANCE).all())


def _trace(model: nn.Module, probe: Inputs) -> tuple[list[_Record], Any]:
    running: dict[int, _Record] = {}
    records: list[_Record] = []

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running[id(module)] = _Record(module, args or tuple(kwargs.values()))

    def finish(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        record = running.pop(id(module))
        record.output = output.clone() if isinstance(output, Tensor) else output
        records.append(record)

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
        watched(leaves, before=start, after=finish),
        naming_the_input(probe),
    ):
        out = model(probe)
    _check_output(out)
    with torch.no_grad(), evaluation_mode(model):
        _check_batch_independence(model, probe, out)
    return records, out


def _check_output(out: object) -> None:
    if not isinstance(out, Tensor):
        raise InputTypeError(expected("model", "a module that returns a tensor (N, D)", f"a {type(out).__name__}"))
    if out.ndim != 2 or out.shape[1] == 0:
        hint = "One row is one embedding: pool or flatten inside the encoder."
        raise InputError(expected("model", "outputs of shape (N, D)", f"shape {tuple(out.shape)}", hint))


def _check_finite(out: Tensor) -> None:
    if not bool(out.isfinite().all()):
        rows = (~out.isfinite().all(dim=1)).nonzero().flatten()[:5].tolist()
        raise InputError(expected("model(x)", "finite embeddings", f"NaN or infinity in rows {rows}"))


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            msg = (
                f"model: {name!r} normalises with the statistics of the batch even in evaluation mode, so a point has "
                "no Jacobian of its own. Use track_running_stats=True, or LayerNorm."
            )
            raise UnsupportedError(msg)


def _check_batch_independence(model: nn.Module, probe: Inputs, out: Tensor) -> None:
    """Refuse an encoder whose output for a point depends on the rest of the batch."""
    if out.shape[0] < 2:
        return
    alone = model(slice_inputs(probe, slice(0, 1)))
    size = float(out.abs().max())
    if float((alone - out[:1]).abs().max()) > 1e-2 * size:
        msg = (
            "model: in evaluation mode the embedding of a point depends on the rest of its batch (batch "
            "normalisation without running statistics?), so a point has no Jacobian of its own. Use "
            "track_running_stats=True, or LayerNorm."
        )
        raise UnsupportedError(msg)


def _has_constant_norm(out: Tensor) -> bool:
    """Whether all rows have norm one or, if there are two rows or more, one common norm."""
    norms = out.float().norm(dim=1)
    if not out.shape[0]:
        return False
    one = bool(((norms - 1).abs() < _UNIT_TOLERANCE).all())
    return one or (out.shape[0] > 1 and bool(((norms / norms[0] - 1).abs() < _UNIT_TOLERANCE).all()))


def _is_same(output: Any, raw: Tensor) -> bool:
    """Whether a module put out these numbers; nested tensors, and those within ``torch.vmap``, have no ``equal``."""
    if not isinstance(output, Tensor) or output.is_nested or output.shape != raw.shape:
        return False
    return torch.equal(output, raw)


_NORMALIZES_INSIDE = (
    "model: the encoder normalises its output inside forward (every output has norm 1, and no module at its end does "
    "it). The curvature needs the Jacobian of the raw outputs, which are hidden there. Remove F.normalize from "
    "forward and end the encoder in the module contrastive_curvature.L2Norm(), or in no normalisation at all: the "
    "predictions and the curvature are those of the unit embeddings either way."
)
