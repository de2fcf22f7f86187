"""What all contrastive Laplace classes share: options, exact fitting over a data set, and predictions on the sphere.

The host's classes keep what they are good at (posterior precision, sampling, marginal likelihood, priors); this mixin
stands in front of them and replaces what assumes a sum over points or a softmax.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor, nn

from contrastive_curvature.backends.base import ContrastiveBackend
from contrastive_curvature.backends.checks import check_loader, check_model, read_batch
from contrastive_curvature.backends.choice import backend_named, choose_backend
from contrastive_curvature.backends.torch_func import ContrastiveGGN
from contrastive_curvature.encoder import Inputs, flatten_parameters, slice_inputs, weight_norms
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.laplace.options import check_options
from contrastive_curvature.laplace.prediction import SpherePrediction
from contrastive_curvature.options import Structure

__all__ = ["CONTRASTIVE", "ContrastiveLaplace"]

CONTRASTIVE = "contrastive"
"""The likelihood's name in ``laplace.Laplace(model, likelihood="contrastive")``."""


class ContrastiveLaplace(SpherePrediction):
    """Mixin that makes a laplace-torch class approximate the posterior of a contrastive encoder.

    Args:
        model: The encoder; an l2-normalisation module at its end is looked through.
        likelihood: ``"contrastive"``.
        *args: As in the host's class.
        backend: ``ContrastiveGGN``, ``BackPackContrastiveGGN``, ``CurvlinopsContrastiveGGN``,
            ``StochManContrastiveGGN`` or a :class:`~contrastive_curvature.backends.ContrastiveBackend` of your own. By
            default ``fit`` takes the fastest one that is exact for the model
            (:func:`~contrastive_curvature.backends.choice.choose_backend`).
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
        kwargs = {**_by_name(type(self), args), **kwargs}
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
    def temperature(self) -> float:
        """Temperature of the likelihood: the curvature is divided by it."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if not value > 0:
            raise InputError(expected("temperature", "a positive number", value))
        self._temperature = float(value)
        # The host caches a root of the covariance, and forgets to drop it here.
        self._posterior_scale = None

    @property
    def prior_precision(self) -> Tensor:
        """Precision of the prior: one number, one a parameter tensor, or one a parameter."""
        return super().prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        given = torch.as_tensor(value)
        if not bool(((given > 0) & given.isfinite()).all()):
            came = str(value) if given.numel() == 1 else f"a smallest value of {float(given.min())}"
            raise InputError(expected("prior_precision", "positive numbers", came))
        super(ContrastiveLaplace, type(self)).prior_precision.fset(self, value)

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

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> None:
        """Fit the posterior, exactly over all pairs of the data set (or its batches, with ``pairs="batch"``).

        Args:
            train_loader: Batches ``(x, labels)`` or mappings; iterated several times, and may shuffle in between.
            override: ``False`` adds to an earlier fit, as a further data set: pairs between the two are not formed.
            progress_bar: Whether to show progress bars.

        Raises:
            InputError: No data, one point, no positive pair, malformed batches, or other data in the second pass.
            UnsupportedError: The encoder cannot be looked through, or the structure has no answer for the fix.
        """
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

        Warns where the encoder has other weights than the one it was saved from.

        Raises:
            InputError: It belongs to other options, or to another likelihood.
        """
        if "contrastive" not in state_dict:
            raise InputError(expected("state_dict", "one of a contrastive Laplace", "one of another likelihood"))
        now, was = self._plain_options(), state_dict["contrastive"]
        differ = [name for name in now | was if now.get(name) != was.get(name)]
        if differ:
            wanted, came = (", ".join(f"{name}={given.get(name)!r}" for name in differ) for given in (now, was))
            hint = "Give this object the same backend_kwargs."
            raise InputError(expected("state_dict", f"this object's options {wanted}", came, hint))
        if self._chooses_backend:
            # All give the same numbers, but not to the last bit.
            indices = self.backend.subnetwork_indices
            self._backend_cls, self._backend = backend_named(state_dict["backend"]), None
            self.backend.subnetwork_indices = indices
        # The host warns where the temperatures differ; here they do whenever the default method has set one.
        self.temperature = state_dict["temperature"]
        self._temperature_given = state_dict["temperature_given"]
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.H_raw, self.cost = state_dict["H_raw"], state_dict["cost"]
        self._posterior_scale = None
        if "encoder_norms" in state_dict:  # files written before this check was have none
            self._warn_of_other_weights(state_dict["encoder_norms"])

    def _warn_of_other_weights(self, saved: Tensor) -> None:
        now = weight_norms(self.model)
        # Not an error: the encoder's own weights may be loaded after this. The tolerance is for other precisions.
        if saved.shape != now.shape or not torch.allclose(now, saved, rtol=1e-3, atol=1e-12):
            msg = (
                "The encoder has other weights than the one whose posterior is loaded, so predictions will be wrong. "
                "Load the encoder's state_dict first: laplace-torch keeps it apart from the posterior's."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)

    def _plain_options(self) -> dict[str, Any]:
        """The options as strings and numbers; of a relation only that there is one."""
        plain = {k: str(v) if isinstance(v, str) else v for k, v in self._curvature_options.items()}
        return {**plain, "relation": plain["relation"] is not None}

    def _begin(self, loader: Iterable[Any]) -> None:
        """Look at the first batch: what has to be known before the backend exists, and which backend it is."""
        check_loader(loader)
        self.model.eval()
        for batch in loader:
            x, _ = read_batch(batch, self._device, self.dict_key_y)
            probe = slice_inputs(x, slice(0, 8))
            self._prepare(probe)
            self._choose(probe)
            return
        raise InputError(expected("train_loader", "at least one batch", "an empty loader"))

    def _choose(self, probe: Inputs) -> None:
        """Make the fastest backend, unless the user named one."""
        if not self._chooses_backend:
            return
        self._backend = choose_backend(
            self.model,
            probe,
            self.structure,
            keeps_graph=self.enable_backprop,
            likelihood=CONTRASTIVE,
            dict_key_x=self.dict_key_x,
            dict_key_y=self.dict_key_y,
            # The host's subnetwork classes tell the backend their indices, nobody else.
            **{"subnetwork_indices": self.backend.subnetwork_indices, **self._backend_kwargs},
        )

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


def _by_name(cls: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """Names of the positional arguments that follow model and likelihood, from the host's own constructor."""
    host: Any = next(c for c in cls.__mro__ if c.__module__.startswith("laplace."))
    bound = inspect.signature(host.__init__).bind_partial(None, None, None, *args).arguments
    return dict(list(bound.items())[3:])
