"""What all contrastive Laplace classes share: options, exact fitting over a data set, and predictions on the sphere.

The host's classes keep what they are good at (posterior precision, sampling, marginal likelihood, priors); this mixin
stands in front of them and replaces what assumes a sum over points or a softmax.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor, nn

from contrastive_curvature.arguments import check_flag
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.backends.torch_func import ContrastiveGGN
from contrastive_curvature.laplace.hyperparameters import Hyperparameters
from contrastive_curvature.laplace.options import arguments_by_name, check_arguments, check_options
from contrastive_curvature.laplace.prediction import SpherePrediction
from contrastive_curvature.laplace.state import (
    check_class,
    check_options_agree,
    check_settings,
    find_backend,
    unchanged_on_error,
)
from contrastive_curvature.laplace.state_values import refuse
from contrastive_curvature.network.encoder import flatten_parameters, weight_norms
from contrastive_curvature.network.inputs import Inputs, slice_inputs
from contrastive_curvature.network.loader import check_loader, check_model, check_whole, read_batch
from contrastive_curvature.options import Structure

__all__ = ["CONTRASTIVE", "ContrastiveLaplace"]

_log = logging.getLogger("contrastive_curvature")

CONTRASTIVE = "contrastive"
"""The likelihood's name in ``laplace.Laplace(model, likelihood="contrastive")``."""


class ContrastiveLaplace(Hyperparameters, SpherePrediction):
    """Mixin that makes a laplace-torch class approximate the posterior of a contrastive encoder.

    Args:
        model: The encoder; an l2-normalisation module at its end is looked through.
        likelihood: ``"contrastive"``.
        *args: As in the host's class.
        backend: ``ContrastiveGGN``, ``BackPackContrastiveGGN``, ``CurvlinopsContrastiveGGN``,
            ``StochManContrastiveGGN`` or a :class:`~contrastive_curvature.ContrastiveBackend` of your own. The default,
            ``ContrastiveGGN``, is exact for every encoder and needs no host.
        backend_kwargs: ``distance``, ``pd_fix``, ``margin``, ``negative_weight``, ``normalization``, ``pairs``,
            ``relation``, ``rank``: see the backend.
        **kwargs: As in the host's class (``prior_precision``, ``prior_mean``, ``temperature``, ...).

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The combination has no correct answer.
    """

    structure: ClassVar[Structure]
    takes_rank: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        *args: Any,
        backend: type[ContrastiveBackend] | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if likelihood != CONTRASTIVE:
            raise InputError(expected("likelihood", repr(CONTRASTIVE), likelihood))
        check_model(model)
        kwargs = arguments_by_name(type(self), args, kwargs)
        backend, backend_kwargs = kwargs.pop("backend", backend), kwargs.pop("backend_kwargs", backend_kwargs)
        check_arguments(kwargs, next(model.parameters()).dtype)
        self._temperature_given = "temperature" in kwargs
        self.cost = 0.0
        self._curvature_options = check_options(self.structure, backend, backend_kwargs, kwargs, self.takes_rank)
        self.H_raw: Any = None
        self._chooses_backend = backend is None
        # The host knows no contrastive likelihood: of those it knows, regression adds the least of its own.
        super().__init__(  # type: ignore[call-arg]
            model,
            Likelihood.REGRESSION,
            backend=backend or ContrastiveGGN,
            backend_kwargs=dict(self._curvature_options),
            **kwargs,
        )
        self.likelihood = CONTRASTIVE

    @property
    def backend(self) -> ContrastiveBackend:
        """The curvature backend, made at first use."""
        if self._backend is None:
            self._backend = self._backend_cls(
                self.model,
                CONTRASTIVE,
                dict_key_x=self.dict_key_x,
                dict_key_y=self.dict_key_y,
                **self._backend_kwargs,
            )
        return self._backend

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit the posterior, exactly over all pairs of the data set (or its batches, with ``pairs="batch"``).

        Args:
            train_loader: Batches ``(x, labels)`` or mappings; iterated several times, and may shuffle in between.
            override: ``False`` adds to an earlier fit, as a further data set: pairs between the two are not formed.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on. A fit that will
                take more than a minute says so before it starts, whatever this is.

        Raises:
            InputError: No data, one point, no positive pair, malformed batches, other data in the second pass, or a
                curvature that is not finite.
            UnsupportedError: The encoder cannot be looked through, the structure has no answer for the fix, or the
                loader gives every process its own part of the data.
        """
        check_flag("override", override)
        if progress_bar is not None:
            check_flag("progress_bar", progress_bar)
        self._begin(train_loader)
        result = self.backend.fit(train_loader, self.structure, progress_bar)
        earlier = 0 if override else self.n_data
        # Everything that can fail comes before the first assignment, so that a failed fit leaves the last one whole.
        self._absorb(result, earlier)
        loss, cost = (self.loss, float(self.cost)) if earlier else (0.0, 0.0)
        self._remember(result.loss + loss, float(result.cost) + cost, result.n + earlier)

    def adopt(self, result: DatasetCurvature) -> None:
        """Take over a curvature that was made elsewhere, at the encoder's present weights, as ``fit`` does its own.

        Args:
            result: Unclamped curvature, loss, cost and number of points, in the form that the structure has. The
                backend has analysed the encoder before.
        """
        self._absorb(result, 0)
        self._remember(result.loss, float(result.cost), result.n)

    def state_dict(self) -> dict[str, Any]:
        """Everything the posterior needs besides the encoder: tensors, numbers and strings only.

        ``torch.load(..., weights_only=True)`` reads it back.
        """
        self._check_fitted()
        state = super().state_dict()  # type: ignore[misc]
        state.update(contrastive=self._plain_options(), H_raw=self.H_raw, cost=self.cost)
        state["temperature_given"] = self._temperature_given
        state["backend"] = type(self.backend).__name__
        state["encoder_norms"] = weight_norms(self.model)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, into an object made with the same options.

        Everything in it is checked first, so that a state that is refused leaves this object as it was. Warns where the
        encoder has other weights than the one it was saved from.

        Raises:
            InputError: It belongs to another class, likelihood or options, a key is missing, or something in it has
                another type or shape or cannot be right, as a negative curvature.
        """
        check_class(state_dict, type(self).__name__, CONTRASTIVE)
        check_options_agree(state_dict, self._plain_options())
        with unchanged_on_error(self):
            self._prepare_to_load(state_dict)
            like = next(self.model.parameters()).detach()
            sizes = self._prior_mean_sizes() or set(), self._prior_sizes() or set()
            check_settings(state_dict, like, self.n_params, *sizes)
            kind = find_backend(state_dict["backend"], ContrastiveGGN if self._chooses_backend else self._backend_cls)
            if state_dict["enable_backprop"] and not kind.keeps_graph:
                refuse("enable_backprop", f"False, since {kind.__name__} keeps no graph", True)
            self._check_curvature(state_dict, like)
            self._take(state_dict, kind)

    def _prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """What must be known before a state can be checked; nothing here."""

    @abstractmethod
    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        """Check ``H`` and ``H_raw`` of a state."""

    def _take(self, state: Mapping[str, Any], kind: type[ContrastiveBackend]) -> None:
        """Assign what has been checked. The host's own method is not used: it assigns while it checks."""
        if self._chooses_backend:
            # All give the same numbers, but not to the last bit.
            indices = self.backend.subnetwork_indices
            self._backend_cls, self._backend = kind, None
            self.backend.subnetwork_indices = indices
        if self.enable_backprop != state["enable_backprop"]:
            msg = "enable_backprop: the state was saved with another value, which now holds."
            warnings.warn(msg, UserWarning, stacklevel=4)
        for name in ("mean", "loss", "cost", "prior_mean", "prior_precision", "sigma_noise", "n_data", "n_outputs"):
            setattr(self, name, state[name])
        self.temperature, self._temperature_given = state["temperature"], state["temperature_given"]
        self.enable_backprop = state["enable_backprop"]
        self.model.output_size = self.n_outputs
        self.H_raw = state["H_raw"]
        self._take_curvature(state)
        self._posterior_scale = None
        if "encoder_norms" in state:  # files written before this check was have none
            self._warn_of_other_weights(state["encoder_norms"])

    def _take_curvature(self, state: Mapping[str, Any]) -> None:
        self.H = state["H"]

    def _has_weights(self, saved: Tensor | None) -> bool:
        """Whether the encoder is the one that a state was saved from, as far as norms tell."""
        now = weight_norms(self.model)
        # The tolerance is for other precisions.
        return (
            saved is not None and saved.shape == now.shape and torch.allclose(now, saved.to(now), rtol=1e-3, atol=1e-12)
        )

    def _warn_of_other_weights(self, saved: Tensor) -> None:
        # Not an error: the encoder's own weights may be loaded after this.
        if not self._has_weights(saved):
            msg = (
                "The encoder has other weights than the one whose posterior is loaded, so predictions will be wrong. "
                "Load the encoder's state_dict first: laplace-torch keeps it apart from the posterior's."
            )
            warnings.warn(msg, UserWarning, stacklevel=4)

    def _plain_options(self) -> dict[str, Any]:
        """The options as strings and numbers; of a relation only that there is one."""
        plain = {k: str(v) if isinstance(v, str) else v for k, v in self._curvature_options.items()}
        if "loss" in plain:
            plain["loss"] = repr(plain["loss"])
        return {**plain, "relation": plain["relation"] is not None}

    def _begin(self, loader: Iterable[Any]) -> None:
        """Look at the first batch: what has to be known before the backend exists; and make the backend."""
        check_loader(loader)
        check_whole(loader)
        self.model.eval()
        for batch in loader:
            x, _ = read_batch(batch, self._device, self.dict_key_y)
            probe = slice_inputs(x, slice(0, 8))
            self._prepare(probe)
            self._choose()
            return
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))

    def _choose(self) -> None:
        """Make the default backend anew, unless the user named one: the encoder may be another than at the last fit."""
        if not self._chooses_backend:
            return
        indices = self.backend.subnetwork_indices
        self._backend_cls, self._backend = ContrastiveGGN, None
        # The host's subnetwork classes tell the backend their indices, nobody else.
        self.backend.subnetwork_indices = indices
        _log.info("curvature by ContrastiveGGN: the default, exact for every encoder (backend=... takes another)")

    def _remember(self, loss: Tensor, cost: float, n_data: int) -> None:
        """What every fit leaves besides the curvature."""
        self.loss, self.cost, self.n_data = loss.detach(), cost, n_data
        self.mean = self._parameter_vector()
        self.n_outputs = self._encoder_dim()
        self.model.output_size = self.n_outputs
        self._posterior_scale = None

    def _prepare(self, probe: Inputs) -> None:
        """What must be known before the backend exists; nothing here."""

    def _parameter_vector(self) -> Tensor:
        vector = flatten_parameters(self.params)
        return vector if self.enable_backprop else vector.detach()

    def _encoder_dim(self) -> int:
        return self.backend.encoder({}).dim

    def _absorb(self, result: DatasetCurvature, earlier: int) -> None:
        """Add a raw curvature to that of ``earlier`` points, and derive the clamped one that the posterior uses."""
        raw = result.curvature
        if earlier:
            raw = self.H_raw + raw
        clamped = clamp_curvature(raw)
        if bool((clamped == 0).all()):
            warnings.warn(
                "The clamped curvature is zero everywhere: the posterior is the prior. All negatives may lie inside "
                "the margin; use pd_fix='positive' or a smaller negative_weight or margin.",
                stacklevel=3,
            )
        self.H_raw, self.H = raw, clamped
