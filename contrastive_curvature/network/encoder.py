"""Analysis of an encoder: its raw outputs, and the linear layer that computes them.

An encoder may end in an l2-normalisation module, of any class, or its ``forward`` in ``F.normalize`` of what a module
puts out; the curvature is that of the raw outputs before. An encoder whose raw outputs cannot be reached is refused:
every Jacobian would be that of another function, without any sign of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

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
from contrastive_curvature.network.given_features import FEATURES, SOURCE, FeatureSource, difference, has_features
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


class Features(NamedTuple):
    """What the last layer makes of a batch, and what it takes in; a last-layer posterior takes it in place of inputs.

    Attributes:
        outputs: Raw outputs, shape (B, D).
        features: Inputs of the last layer, shape (B, F).
    """

    outputs: Tensor
    features: Tensor


class Encoder(nn.Module):
    """An analysed encoder; calling it gives the raw outputs, before any l2-normalisation.

    It is the feature extractor of a last-layer posterior, too: laplace-torch's own takes the last module that runs for
    the last layer, and in an encoder that is often a normalisation.

    Args:
        model: Any module that maps a batch to (N, D), or to a mapping or an object with the embeddings; parameters are
            shared, not copied.
        probe: A batch for :meth:`analyse`; ``None`` where that is called later, or by the first inputs.
        last_layer_name: Name of the linear layer that computes the raw outputs; ``None`` detects the layer.
        takes_features: Whether saved features (:mod:`contrastive_curvature.network.given_features`) may take the place
            of inputs, of the probe too.
        label_key: Where batches that are mappings keep the labels, which no ``forward`` gets by keyword.

    Attributes:
        model: The wrapped module.
        dim: D; of a ``SentenceTransformer`` with a ``truncate_dim``, that many.
        last_layer_name: Name in ``model.named_modules()`` of the linear layer whose output is the raw output, or
            ``None``.
        place: Where the raw outputs are.
        normalized: Whether the raw outputs have unit norm, because no earlier output could be reached.
        call: How the model is called, and which of its outputs are the embeddings.
    """

    dim: int

    def __init__(
        self,
        model: nn.Module,
        probe: Inputs | None = None,
        last_layer_name: str | None = None,
        *,
        takes_features: bool = False,
        label_key: str = "labels",
    ) -> None:
        super().__init__()
        self.model = uncompiled(model)
        self.call = ModelCall(label_key)
        self.place = Place()
        self.normalized = False
        self.last_layer_name: str | None = None
        self._wanted_layer, self._takes_features = last_layer_name, takes_features
        self._probe_points: str | None = None
        self._checked: tuple[Any, ...] | None = None
        self._saw_inputs = False
        if probe is not None:
            self.analyse(probe)

    def analyse(self, probe: Inputs) -> None:
        """Find the raw outputs and the last layer, once: the first points of a batch are run and recorded.

        One point is enough; with two or more, common norms and dependence on the batch are detected too. Saved features
        say what was found when they were written; the analysis is then made up for as soon as there are inputs.

        Raises:
            InputError: Outputs are not finite, the layer that was named is not the last one, or saved features are of
                another encoder.
            UnsupportedError: The raw outputs cannot be reached.
        """
        if self._saw_inputs:
            return
        if has_features(probe):
            self.last_layer_name, self._runs = self._check_source(probe).last_layer, 1
            layer: Any = self.last_layer
            self.dim = self._kept(layer.out_features)
            self.require_last_layer()
            return
        probe, few = slice_inputs(probe, slice(0, 8)), slice_inputs(probe, slice(0, 2))
        makes_out = partial(carries, self.model, lambda: self.call(self.model, few), matches=feeds)
        makes_raw = partial(carries, self.model, lambda: self._raw_outputs(few), matches=is_same)
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
        self._saw_inputs = True

    def _check_source(self, x: Mapping[str, Any]) -> FeatureSource:
        """Refuse features of another encoder, or where inputs are needed; return where the features are from."""
        if not self._takes_features:
            raise UnsupportedError(
                "features: this needs the encoder's own inputs. Use subset_of_weights='last_layer' of laplace.Laplace, "
                "with hessian_structure='diag', 'kron', 'kron_lowrank' or 'full', or pass the loader of the inputs."
            )
        source = FeatureSource.of_plain(json.loads(x[SOURCE]))
        name = self.last_layer_name or self._wanted_layer or source.last_layer
        # Weights are read again only where one of them may have changed.
        state = (source, name, versions(trunk_tensors(self.model, name)))
        if state != self._checked:
            received = difference(self.model, source, name)
            if received is not None:
                hint = (
                    "Load the weights that the encoder had when they were written, or write those of this encoder with "
                    "contrastive_curvature.features(encoder, loader, another_path)."
                )
                raise InputError("features", "those of this encoder", received, hint)
            self._checked = state
        return source

    def _kept(self, outputs: int) -> int:
        """Return how many outputs are embeddings: sentence-transformers' ``encode`` cuts what ``forward`` returns."""
        cut = getattr(self.model, "truncate_dim", None)
        return min(outputs, cut) if isinstance(cut, int) and hasattr(self.model, "encode") else outputs

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
            return self.forward_with_features(x).outputs
        self.analyse(x)
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

    def forward_with_features(self, x: Inputs) -> Features:
        """Return raw outputs (N, D), and the inputs of the last layer, (N, F); saved features come back as they are."""
        if not has_features(x):
            self.analyse(x)
            phi, z = self.passed(self.require_last_layer(), x)
            return Features(z, phi)
        self._check_source(x)
        layer = self.require_last_layer()
        # A layer in half precision computes its outputs in it, but curvatures are sums of products of features.
        phi = x[FEATURES].to(layer.weight.device, torch.promote_types(layer.weight.dtype, torch.float32))
        return Features(at_least_float32(layer(phi.to(layer.weight.dtype))), phi)

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
