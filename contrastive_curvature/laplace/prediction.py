"""Predictions of the contrastive Laplace classes: distributions and samples of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from laplace.utils.enums import LinkApprox, PredType
from torch import Tensor

from contrastive_curvature.arguments import check_flag
from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace.checks import check_finite_outputs
from contrastive_curvature.laplace.fitted import FittedOnly
from contrastive_curvature.laplace.tuning import PriorTuning, parse_pred_type
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.module import ModulePullback

__all__ = ["SpherePrediction"]


class SpherePrediction(FittedOnly, PriorTuning):
    """Part of the contrastive mixin that predicts: embeddings in place of the host's softmax."""

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
            InputError: An option is unknown or malformed, or an input has no finite output.
            NotFittedError: Before ``fit``.
        """
        self._check_sampling(n_samples, generator)
        _refuse_link(link_approx)
        if model_kwargs:
            raise InputTypeError(expected("la(x)", "no further arguments", str(sorted(model_kwargs))))
        for name, value in (("joint", joint), ("diagonal_output", diagonal_output), ("fitting", fitting)):
            check_flag(name, value)
        if joint and diagonal_output:
            raise InputError(expected("joint, diagonal_output", "at most one of them", "both"))
        if parse_pred_type(pred_type) is PredType.NN:
            if n_samples < 2:
                hint = "A concentration is estimated from them."
                raise InputError(expected("n_samples for pred_type='nn'", "at least 2 samples", n_samples, hint))
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

        Raises:
            InputError: An option is unknown or malformed, or an input has no finite output.
            NotFittedError: Before ``fit``.
        """
        self._check_sampling(n_samples, generator)
        linearized = parse_pred_type(pred_type) is PredType.GLM
        check_flag("joint", joint)
        check_flag("diagonal_output", diagonal_output)
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

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        x = self._moved(x)
        jacobians, z = self.backend.jacobians(x, enable_backprop=self.enable_backprop)
        check_finite_outputs(x, z)
        if joint:
            return EmbeddingDistribution.trusted(z, joint_covariance=self.functional_covariance(jacobians))
        covariance = self.functional_variance(jacobians)
        if diagonal:
            return EmbeddingDistribution.trusted(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution.trusted(z, covariance=covariance)

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
        moved = self._moved(x)
        context = self._sampling_context(moved)
        parts = [self._outputs_at(context, theta, linearized) for theta in self._weights(n_samples, generator)]
        samples = torch.cat(parts)
        check_finite_outputs(moved, samples)
        return samples

    def _weights(self, n_samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Sampled weights in chunks of bounded size, each (S, P)."""
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


def _refuse_link(link_approx: object) -> None:
    if link_approx is not None and link_approx != LinkApprox.PROBIT:
        msg = (
            f"link_approx={str(link_approx)!r}: embeddings have no link function. Leave it out; pred_type chooses "
            "between the closed form ('glm') and sampled weights ('nn')."
        )
        raise UnsupportedError(msg)
