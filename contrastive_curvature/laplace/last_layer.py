"""What the contrastive classes of the last linear layer share; a first or a saved batch shows which layer it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import Spread
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.features import Features, RawFeatureExtractor
from contrastive_curvature.laplace.options import CONTRASTIVE, arguments_by_name
from contrastive_curvature.laplace.prediction import check_outputs, distribution, moved_inputs
from contrastive_curvature.laplace.state import kind_of, refuse
from contrastive_curvature.network.call import uncompiled
from contrastive_curvature.network.digest import versions
from contrastive_curvature.network.encoder import at_least_float32, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, made_up_inputs

OutputSpread = Callable[[Tensor], Spread]
"""From features (B, F) to the spread of the outputs."""


class LastLayerLaplace(ContrastiveLaplace):
    """The last linear layer: closed forms for curvature, prediction and samples."""

    keeps_features = True
    shares_encoder = False

    def __init__(self, model: nn.Module, likelihood: str = CONTRASTIVE, *args: Any, **kwargs: Any) -> None:
        named = arguments_by_name(type(self), args, kwargs)
        last_layer_name = named.pop("last_layer_name", None)
        try:
            super().__init__(model, likelihood, **named)
        except RuntimeError as error:
            if "deepcopy" not in str(error):
                raise
            msg = (
                "model: a module keeps a tensor of its last run together with the graph, which cannot be copied; so do "
                "torch.nn.utils.weight_norm and spectral_norm. Run it once without: with torch.no_grad(): model(x)"
            )
            raise UnsupportedError(msg) from error
        self._last_layer_name = last_layer_name
        self._made_spread: tuple[Tensor, Any, OutputSpread] | None = None
        self._hold(self.model.model)

    def _hold(self, encoder: nn.Module) -> None:
        self.model = RawFeatureExtractor(
            uncompiled(encoder), self._last_layer_name, self.enable_backprop, self.dict_key_y
        )

    def _analyse(self, probe: Inputs) -> None:
        if self.model.last_layer is not None:
            return
        chosen = self._prior_chosen
        with self.unchanged_on_error():
            self.model.analyse(probe)
            # Saved with the posterior, to find the layer again.
            self.data = made_up_inputs(probe)
            self.n_params = sum(self.parameter_sizes())
            self.n_layers = len(self.parameter_sizes())
            # They could not be checked before the layer is known.
            self.prior_precision = self._prior_precision
            self.prior_mean = self._prior_mean
        self._prior_chosen = chosen

    def posterior_parameters(self) -> list[Tensor]:
        """The parameters of the layer."""
        return [at_least_float32(p) for p in self.model.last_layer.parameters()]

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior precision of every parameter of the layer, shape (P,); also from one value a parameter tensor."""
        if self.n_params is None:
            # The first batch shows how many parameters there are.
            self.check_fitted()
        prior = self.prior_precision
        if len(prior) in (1, self.n_params):
            return prior.expand(self.n_params)
        return torch.cat([p.expand(size) for p, size in zip(prior, self.parameter_sizes(), strict=True)])

    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Means and variances of the raw outputs, shape (B, D) each."""
        self.check_fitted()
        out = self._gaussian(X, False, True)
        return out.raw_mean, out.variance

    def _prepare_to_load(self, state: Mapping[str, Any]) -> None:
        missing = [key for key in ("data", "_last_layer_name") if key not in state]
        if missing:
            raise InputError(expected("state_dict", "the keys data and _last_layer_name", f"none of {missing}"))
        name = state["_last_layer_name"]
        if not isinstance(name, (str, type(None))) or name != self._last_layer_name:
            refuse("_last_layer_name", f"{self._last_layer_name!r}, that of this object", kind_of(name))
        if state["data"] is None and self.model.last_layer is not None:
            return
        try:
            self._analyse(moved_inputs(self.model, state["data"], self._device))
        except UnsupportedError:
            raise
        except Exception as error:  # what an encoder raises at inputs of another kind has no common base
            reason = (str(error) or type(error).__name__).splitlines()[0]
            hint = "Where these are made up and the encoder needs real ones, set state_dict['data'] = x[:2] of yours."
            refuse("data", "inputs that the encoder takes", f"{kind_of(state['data'])} ({reason})", hint)
        if state["n_outputs"] != self.model.encoder.dim:
            refuse("n_outputs", f"{self.model.encoder.dim}, that of the encoder", kind_of(state["n_outputs"]))
        self.data = state["data"]

    def observe(self, x: Any) -> tuple[EmbeddingDistribution, Tensor | None]:
        """Return the distribution of B embeddings, and their features (B, F)."""
        z, phi = self._features(x)
        return self._gaussian(Features(z, phi), False, False), phi

    def _gaussian(self, x: Any, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        return distribution(z, self.output_spread()(phi), diagonal)

    def output_spread(self) -> OutputSpread:
        """Return what gives the spread of the outputs at features (B, F): made once for a prior and a temperature."""
        prior = self.prior_precision
        counted = (self.known.fits, self.temperature, versions([prior]))
        made = self._made_spread
        if made is None or made[0] is not prior or made[1] != counted or prior.requires_grad:
            made = self._made_spread = prior, counted, self._make_spread()
        return made[2]

    def _make_spread(self) -> OutputSpread:
        raise NotImplementedError

    def _features(self, x: Inputs | Features) -> tuple[Tensor, Tensor]:
        if isinstance(x, Features):
            return x
        x = moved_inputs(self.model, x, self._device)
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            z, phi = self.model.forward_with_features(x)
        check_outputs(x, z, self.model.last_layer.out_features)
        return z, phi

    def sampling_context(self, x: Inputs) -> Any:
        """The features."""
        return self._features(x)[1]

    def outputs_at(self, context: Any, theta: Tensor, linearized: bool) -> Tensor:
        """A linear layer is its own linearisation."""
        layer = self.model.last_layer
        weight = theta[:, : layer.weight.numel()].view(-1, *layer.weight.shape)
        out = torch.einsum("bf,sdf->sbd", context, weight)
        return out if layer.bias is None else out + theta[:, None, layer.weight.numel() :]
