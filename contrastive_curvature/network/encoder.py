"""Analysis of an encoder: its raw outputs, and the linear layer that computes them.

An encoder may end in an l2-normalisation module, of any class, or its ``forward`` in ``F.normalize`` of what a module
puts out; the curvature is that of the raw outputs before. An encoder whose raw outputs cannot be reached is refused:
every Jacobian would be that of another function, without any sign of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.network.call import (
    ModelCall,
    describe_points,
    eager,
    entry_of,
    naming_the_input,
    refuse_compiled_layer,
    uncompiled,
)
from contrastive_curvature.network.digest import trunk_tensors, versions
from contrastive_curvature.network.given_features import (
    FeatureSource,
    check_source,
    has_features,
    read_features,
    refuse_features,
    source_of,
)
from contrastive_curvature.network.inputs import Inputs, slice_inputs
from contrastive_curvature.network.raw_outputs import Key, Place, carries, feeds, find_raw, is_same, trace
from contrastive_curvature.network.threads import evaluation_mode as evaluation_mode
from contrastive_curvature.network.threads import watched


def flatten_parameters(parameters: Iterable[Tensor]) -> Tensor:
    """Return all entries as one vector, shape (P,), in the order of their indices."""
    # torch's parameters_to_vector refuses weights in other memory formats, such as channels_last.
    return torch.cat([p.reshape(-1) for p in parameters])


def at_least_float32(t: Tensor) -> Tensor:
    """Return half precision (an encoder's, or autocast's) as float32: sums of curvatures need that precision."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


class Encoder(nn.Module):
    """An analysed encoder; calling it gives the raw outputs, before any l2-normalisation.

    Args:
        model: Any module that maps a batch to (N, D), or to a mapping or an object with the embeddings; parameters are
            shared, not copied.
        probe: A batch that is run once to record the order of execution. One point is enough; with two or more, common
            norms and dependence on the batch are detected too.
        last_layer_name: Name of the linear layer that computes the raw outputs; ``None`` detects the layer.
        takes_features: Whether saved features (:mod:`contrastive_curvature.network.given_features`) may take the place
            of inputs, of the probe too. The analysis of inputs is then made up for as soon as there are any.
        label_key: Where batches that are mappings keep the labels, which no ``forward`` gets by keyword.

    Attributes:
        model: The wrapped module.
        dim: D; of a ``SentenceTransformer`` with a ``truncate_dim``, that many.
        last_layer: The linear layer whose output is the raw output, or ``None``.
        last_layer_name: Its name in ``model.named_modules()``, or ``None``.
        place: Where the raw outputs are.
        normalized: Whether the raw outputs have unit norm, because no earlier output could be reached.
        call: How the model is called, and which of its outputs are the embeddings.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Inputs,
        last_layer_name: str | None = None,
        *,
        takes_features: bool = False,
        label_key: str = "labels",
    ) -> None:
        super().__init__()
        self.model = model = uncompiled(model)
        self.call = ModelCall(label_key)
        self.place = Place()
        self.normalized = False
        self.last_layer_name: str | None = None
        self._probe_points: str | None = None
        self._takes_features = takes_features
        self._checked: tuple[Any, ...] | None = None
        self._saw_inputs = not has_features(probe)
        if self._saw_inputs:
            self._analyse(probe, last_layer_name)
        else:
            self._stand_in(probe, last_layer_name)

    def _stand_in(self, probe: Any, last_layer_name: str | None) -> None:
        """Take what the analysis found when the features were written."""
        source = self._check_source(probe, last_layer_name)
        self.last_layer_name, self._runs = source.last_layer, 1
        layer: Any = self.last_layer
        self.dim = self._kept(layer.out_features)
        self.require_last_layer()

    def _check_source(self, x: Mapping[str, Any], last_layer_name: str | None) -> FeatureSource:
        """Refuse features of another encoder, or where inputs are needed; return where the features are from."""
        if not self._takes_features:
            raise refuse_features()
        source = source_of(x)
        name = last_layer_name or source.last_layer
        # Weights are read again only where one of them may have changed.
        state = (source, name, versions(trunk_tensors(self.model, name)))
        if state != self._checked:
            check_source(self.model, name, source)
            self._checked = state
        return source

    def _kept(self, outputs: int) -> int:
        """Return how many outputs are embeddings: sentence-transformers' ``encode`` cuts what ``forward`` returns."""
        cut = getattr(self.model, "truncate_dim", None)
        return min(outputs, cut) if isinstance(cut, int) and hasattr(self.model, "encode") else outputs

    def _see_inputs(self, x: Inputs) -> None:
        """Analyse the encoder with its first inputs, where only features have been there before."""
        if self._saw_inputs:
            return
        self._analyse(slice_inputs(x, slice(0, 8)), self.last_layer_name)
        self._saw_inputs = True

    def _analyse(self, probe: Inputs, last_layer_name: str | None) -> None:
        few = slice_inputs(probe, slice(0, 2))
        makes_out = partial(carries, self.model, lambda: self.call(self.model, few), matches=feeds, direction_only=True)
        makes_raw = partial(carries, self.model, lambda: self._raw_outputs(few), matches=is_same, direction_only=False)
        with torch.no_grad(), evaluation_mode(self.model), eager(self.model):
            records, out = trace(self.model, self.call, probe)
            self._probe_points = describe_points(probe)
            self.dim = self._kept(out.shape[1])
            if not bool(out.isfinite().all()):
                rows = (~out.isfinite().all(dim=1)).nonzero().flatten()[:5].tolist()
                raise InputError("model(x)", "finite embeddings", f"NaN or infinity in rows {rows}")
            raw, self.place, self.normalized = find_raw(records, out, makes_out)
            layers: list[nn.Module] = [
                record.module
                for record in records
                if isinstance(record.module, nn.Linear) and is_same(record.output, raw) and makes_raw(record)
            ]
        if last_layer_name is not None:
            names = [name for name, module in self.model.named_modules() if module in layers]
            if last_layer_name not in names:
                wanted = f"the layer that computes the raw outputs, one of {names}"
                hint = "Only an l2-normalisation may follow its output."
                raise InputError("last_layer_name", wanted, last_layer_name, hint)
            layers = [self.model.get_submodule(last_layer_name)]
        if layers:
            self.last_layer_name = _name_of(layers[-1], self.model)
            self._runs = sum(record.module is layers[-1] for record in records)
            refuse_compiled_layer(self.model, self.last_layer_name)

    @property
    def last_layer(self) -> nn.Linear | None:
        """Return the linear layer that computes the raw outputs."""
        if self.last_layer_name is None:
            return None
        layer: Any = self.model.get_submodule(self.last_layer_name)
        return layer

    def require_last_layer(self) -> nn.Linear:
        """Return the last layer, if a last-layer curvature of it is exact."""
        layer, name = self.last_layer, self.last_layer_name
        if layer is None or layer.out_features != self.dim:
            why = "no linear layer computes the raw outputs of this encoder"
        elif self._runs > 1:
            why = f"layer {name!r} runs {self._runs} times"
        elif _names(layer) not in (["weight"], ["weight", "bias"]):
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
            return self.features(x)[0]
        self._see_inputs(x)
        return self._raw_outputs(x)

    def _raw_outputs(self, x: Inputs) -> Tensor:
        module, run, entry, key, normalizes = self.place
        if module is None:
            z = at_least_float32(self._run(x))
        else:
            taken, given = self.passed(module, x, run, entry, key)
            z = taken if normalizes else given
        return z[..., : self.dim]

    @property
    def normalization(self) -> nn.Module | None:
        """Return the module whose input is the raw output, if any."""
        return self.place.module if self.place.normalizes else None

    @property
    def normalizes_inside(self) -> bool:
        """Return whether ``forward`` normalises what a module puts out, and that output is the raw output."""
        return self.place.module is not None and not self.place.normalizes

    def embeddings(self, z: Tensor) -> Tensor:
        """Return what the model makes of raw outputs (N, D): they themselves, or normalised."""
        if self.normalizes_inside:
            return nn.functional.normalize(z, dim=1)
        if self.normalization is None:
            return z
        entry = self.place.entry
        out: Any = self.normalization(z if entry is None else {entry: z})
        return out if entry is None else entry_of(out, self.place.key)

    def features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return raw outputs (N, D), and the inputs of the last layer, (N, F)."""
        if has_features(x):
            self._check_source(x, self.last_layer_name)
            layer = self.require_last_layer()
            phi = read_features(x, layer)
            # The outputs are those of the encoder, so a layer in half precision computes them as it does for inputs.
            return at_least_float32(layer(phi.to(layer.weight.dtype))), phi
        self._see_inputs(x)
        phi, z = self.passed(self.require_last_layer(), x)
        return z, phi

    def passed(
        self, module: nn.Module, x: Inputs, run: int = 0, entry: Key = None, key: Key = None
    ) -> tuple[Tensor, Tensor]:
        """Return what a module of the encoder takes in and puts out for a batch, copies.

        Args:
            module: The module.
            x: The batch.
            run: Which run of the module, counted from zero.
            entry: Name of the tensor in a mapping that the module takes.
            key: Name of the tensor in a mapping that it puts out.
        """
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
        """Refuse a batch whose output is not the normalised output ``raw`` of a layer, as that of the first one."""
        vectorised: Any = torch._C._functorch
        # A graph that is traced, and a function that is vectorised, are of inputs that were compared before.
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


def _names(layer: nn.Module) -> list[str]:
    """Return the names of the parameters; torch's walk through submodules takes longer than a small layer."""
    return [name for name, _ in layer.named_parameters()] if layer._modules else [*layer._parameters]


def _name_of(module: nn.Module, model: nn.Module) -> str:
    return next((name for name, other in model.named_modules() if other is module), "")


def _copied(value: Any, entry: Key) -> Any:
    """Copy a tensor, or the one under a name: a later in-place operation may change it."""
    found = value if entry is None else entry_of(value, entry)
    return at_least_float32(found.clone()) if isinstance(found, Tensor) else found
