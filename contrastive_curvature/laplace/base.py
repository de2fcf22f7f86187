"""What all contrastive Laplace classes share: options, exact fitting over a data set, and predictions on the sphere.

The host's classes keep what they are good at (posterior precision, sampling, marginal likelihood, priors); this mixin
stands in front of them and replaces what assumes a sum over points or a softmax.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from laplace.utils.enums import Likelihood, LinkApprox, PredType
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from contrastive_curvature.backends.torch_func import ContrastiveGGN, check_loader
from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.encoder import Encoder, Inputs, evaluation_mode
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.ggn.dataset import DatasetCurvature
from contrastive_curvature.ggn.pullback import ModulePullback
from contrastive_curvature.laplace.options import check_model, check_options
from contrastive_curvature.laplace.tuning import PriorTuning, parse_pred_type
from contrastive_curvature.options import Structure
from contrastive_curvature.sphere import normalize

__all__ = ["CONTRASTIVE", "ContrastiveLaplace"]

CONTRASTIVE = "contrastive"
"""The likelihood's name in ``laplace.Laplace(model, likelihood="contrastive")``."""


class ContrastiveLaplace(PriorTuning):
    """Mixin that makes a laplace-torch class approximate the posterior of a contrastive encoder.

    Args:
        model: The encoder; an l2-normalisation module at its end is looked through.
        likelihood: ``"contrastive"``.
        *args: As in the host's class.
        backend: :class:`~contrastive_curvature.backends.ContrastiveGGN` or a subclass; the default.
        backend_kwargs: ``distance``, ``pd_fix``, ``margin``, ``negative_weight``, ``normalization``, ``pairs``,
            ``relation``, ``rank``: see the backend.
        **kwargs: As in the host's class (``prior_precision``, ``prior_mean``, ``temperature``, ...).

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The combination has no correct answer.
    """

    structure: ClassVar[Structure]

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        *args: Any,
        backend: type[ContrastiveGGN] | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if likelihood != CONTRASTIVE:
            raise InputError(expected("likelihood", repr(CONTRASTIVE), likelihood))
        check_model(model)
        kwargs = {**_by_name(type(self), args), **kwargs}
        self._temperature_given = "temperature" in kwargs
        self.cost = 0.0
        self._curvature_options = check_options(self.structure, backend, backend_kwargs, kwargs)
        self.H_raw: Any = None
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
    def backend(self) -> ContrastiveGGN:
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
            train_loader: Batches ``(x, labels)`` or mappings; iterated twice, and may shuffle in between.
            override: ``False`` adds to an earlier fit, as a further data set: pairs between the two are not formed.
            progress_bar: Whether to show progress bars.

        Raises:
            InputError: No data, one point, no positive pair, malformed batches, or other data in the second pass.
            UnsupportedError: The encoder cannot be looked through, or the structure has no answer for the fix.
        """
        check_loader(train_loader)
        self.model.eval()
        self._prepare(train_loader)
        result = self.backend.fit(train_loader, self.structure, progress_bar)
        earlier = 0 if override else self.n_data
        # Everything that can fail comes before the first assignment, so that a failed fit leaves the last one whole.
        self._absorb(result, earlier)
        self.loss = result.loss.detach() + (self.loss if earlier else 0.0)
        self.cost = float(result.cost) + (self.cost if earlier else 0.0)
        self.n_data = result.n + earlier
        self.mean = self._parameter_vector()
        self.n_outputs = self._encoder_dim()
        self.model.output_size = self.n_outputs
        self._posterior_scale = None

    def __call__(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> EmbeddingDistribution:
        """Distribution of embeddings; ``mu, kappa = la(x)``.

        Args:
            x: A batch of B inputs.
            pred_type: ``"glm"``: Gaussian over the raw outputs of the linearised network, in closed form, no samples
                (exact for a last layer). ``"nn"``: from networks with sampled weights.
            joint: With ``"glm"``, keep the covariance between inputs, (B D)^2 numbers.
            link_approx: Must be left alone: a sphere has no link function.
            n_samples: Number of networks for ``"nn"``.
            diagonal_output: With ``"glm"``, keep only the variances of the raw outputs.
            generator: Source of randomness for ``"nn"``.
            fitting: Of no effect; the host passes it.
            **model_kwargs: Refused.

        Returns:
            The distribution.

        Raises:
            InputError: An option is unknown or malformed.
            AttributeError: Not fitted.
        """
        self._check_fitted()
        _refuse_link(link_approx)
        if model_kwargs:
            raise InputTypeError(expected("la(x)", "no further arguments", str(sorted(model_kwargs))))
        if joint and diagonal_output:
            raise InputError(expected("joint, diagonal_output", "at most one of them", "both"))
        if parse_pred_type(pred_type) is PredType.NN:
            return EmbeddingDistribution.from_samples(self._joint_samples(x, n_samples, generator, linearized=False))
        return self._gaussian(x, joint, diagonal_output)

    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Draw raw outputs, before normalisation.

        Args:
            x: A batch of B inputs.
            pred_type: ``"glm"`` or ``"nn"``, as in calling.
            n_samples: Number S of samples.
            diagonal_output: With marginal ``"glm"`` samples, ignore covariances between outputs.
            generator: Source of randomness.
            joint: ``True``: sample s comes from the same weights for all inputs, as retrieval metrics need. ``False``
                with ``"glm"``: every input from its own marginal, at the price of one forward pass. ``"nn"`` is always
                joint.

        Returns:
            Shape (S, B, D).
        """
        self._check_fitted()
        linearized = parse_pred_type(pred_type) is PredType.GLM
        _check_count(n_samples)
        if joint or not linearized:
            return self._joint_samples(x, n_samples, generator, linearized)
        return self._gaussian(x, False, diagonal_output).raw_samples(n_samples, generator)

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
    ) -> Tensor:
        """Draw embeddings on the sphere: :meth:`functional_samples`, normalised. Shape (S, B, D)."""
        raw = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator, joint)
        return normalize(raw.flatten(0, 1))[0].view_as(raw)

    def state_dict(self) -> dict[str, Any]:
        """Everything the posterior needs besides the encoder: tensors, numbers and strings only.

        ``torch.load(..., weights_only=True)`` reads it back.
        """
        self._check_fitted()
        state = super().state_dict()  # type: ignore[misc]
        state.update(contrastive=self._plain_options(), H_raw=self.H_raw, cost=self.cost)
        state["temperature_given"] = self._temperature_given
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, into an object made with the same options.

        Raises:
            InputError: It belongs to other options, or to another likelihood.
        """
        if "contrastive" not in state_dict:
            raise InputError(expected("state_dict", "one of a contrastive Laplace", "one of another likelihood"))
        if self._plain_options() != state_dict["contrastive"]:
            wanted = f"the options {self._plain_options()} of this object"
            raise InputError(expected("state_dict", wanted, str(state_dict["contrastive"])))
        # The host warns where the temperatures differ; here they do whenever the default method has set one.
        self.temperature = state_dict["temperature"]
        self._temperature_given = state_dict["temperature_given"]
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.H_raw, self.cost = state_dict["H_raw"], state_dict["cost"]
        self._posterior_scale = None

    def _plain_options(self) -> dict[str, Any]:
        """The options as strings and numbers; of a relation only that there is one."""
        plain = {k: str(v) if isinstance(v, str) else v for k, v in self._curvature_options.items()}
        return {**plain, "relation": plain["relation"] is not None}

    def _check_fitted(self) -> None:
        if not self.n_data:
            msg = "Laplace not fitted. Run la.fit(train_loader) first."
            raise AttributeError(msg)

    def _prepare(self, loader: Iterable[Any]) -> None:
        """What must be known before the backend exists; nothing here."""

    def _parameter_vector(self) -> Tensor:
        vector = parameters_to_vector(self.params)
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

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        x = self._moved(x)
        jacobians, z = self.backend.jacobians(x, enable_backprop=self.enable_backprop)
        if joint:
            return EmbeddingDistribution(z, joint_covariance=self.functional_covariance(jacobians))
        covariance = self.functional_variance(jacobians)
        if diagonal:
            return EmbeddingDistribution(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution(z, covariance=covariance)

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The host's own form of the Gaussian: means and covariances of the raw outputs."""
        out = self._gaussian(X, joint, diagonal_output)
        if joint:
            return out.mean.flatten(), out.joint_covariance
        return out.mean, out.variance if diagonal_output else out.covariance

    def _joint_samples(self, x: Inputs, n_samples: int, generator: torch.Generator | None, linearized: bool) -> Tensor:
        """Raw outputs (S, B, D) of S networks."""
        context = self._sampling_context(self._moved(x))
        parts = [self._outputs_at(context, theta, linearized) for theta in self._weights(n_samples, generator)]
        return torch.cat(parts)

    def _weights(self, n_samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Sampled weights in chunks of bounded size, each (S, P)."""
        _check_count(n_samples)
        step = max(1, 2**26 // self.mean.numel())
        for start in range(0, n_samples, step):
            yield self.sample(min(step, n_samples - start), generator)

    def _sampling_context(self, x: Inputs) -> Any:
        return x

    def _outputs_at(self, context: Any, theta: Tensor, linearized: bool) -> Tensor:
        """Raw outputs (S, B, D) at given weights (S, P)."""
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            encoder: Encoder = self.backend.encoder(context)
            pullback = ModulePullback(encoder)
            if linearized:
                moved = [pullback.jvp(context, sample - self.mean) for sample in theta]
                return torch.stack([z + shift for z, shift in moved])
            return torch.stack([pullback.outputs_at(context, sample) for sample in theta])

    def _moved(self, x: Inputs) -> Inputs:
        if not isinstance(x, (Tensor, Mapping)):
            raise InputTypeError(expected("x", "a tensor or a mapping of tensors", f"a {type(x).__name__}"))
        if isinstance(x, Tensor):
            return x.to(self._device)
        return {k: v.to(self._device) if isinstance(v, Tensor) else v for k, v in x.items()}


def _by_name(cls: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """Names of the positional arguments that follow model and likelihood, from the host's own constructor."""
    host: Any = next(c for c in cls.__mro__ if c.__module__.startswith("laplace."))
    bound = inspect.signature(host.__init__).bind_partial(None, None, None, *args).arguments
    return dict(list(bound.items())[3:])


def _check_count(n_samples: object) -> None:
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise InputError(expected("n_samples", "a positive whole number", n_samples))


def _refuse_link(link_approx: object) -> None:
    if link_approx is not None and link_approx != LinkApprox.PROBIT:
        msg = (
            f"link_approx={str(link_approx)!r}: embeddings have no link function. Leave it out; pred_type chooses "
            "between the closed form ('glm') and sampled weights ('nn')."
        )
        raise UnsupportedError(msg)
