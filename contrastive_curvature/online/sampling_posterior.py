"""Laplace posteriors of a discounted curvature: the sampling posterior ``q_t``, and posteriors for the user."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import DivergenceError, InputError
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.network.inputs import Inputs, map_tensors, slice_inputs
from contrastive_curvature.network.loader import check_model
from contrastive_curvature.online.discount import DiscountedCurvature
from contrastive_curvature.posterior.prior import average_information, check_prior, check_temperature
from contrastive_curvature.posterior.value import clamp


class OnlinePosterior:
    """Creates Laplace posteriors around an encoder that is being trained, without changing the encoder.

    Args:
        encoder: The encoder.
        probe: A batch of inputs for the analysis of the encoder.
        n_data: Number N of training points.
        subset_of_weights: See :class:`~contrastive_curvature.OnlineLaplace`.
        hessian_structure: See :class:`~contrastive_curvature.OnlineLaplace`.
        arguments: Other arguments of the posteriors.
        prior_precision: A positive number, or ``None`` for a prior that follows the curvature.
        temperature: A positive number, or ``None`` for the rules of :class:`~contrastive_curvature.OnlineLaplace`.
        sampling_temperature: Temperature of ``q_t`` divided by ``temperature``, or by the mean loss of a point;
            ``None`` for the rule of :class:`~contrastive_curvature.OnlineLaplace`.

    Attributes:
        sampling: The posterior ``q_t``, which gets the present curvature at every draw.
    """

    def __init__(
        self,
        encoder: nn.Module,
        probe: Inputs,
        n_data: int,
        subset_of_weights: str,
        hessian_structure: str,
        arguments: dict[str, Any],
        *,
        prior_precision: float | None,
        temperature: float | None,
        sampling_temperature: float | None,
    ) -> None:
        check_model(encoder)
        self.encoder, self.n_data = encoder, n_data
        self._kind = {"subset_of_weights": subset_of_weights, "hessian_structure": hessian_structure}
        self.prior_precision, self.temperature = prior_precision, temperature
        self.sampling_temperature = sampling_temperature
        numbers = {"prior_precision": prior_precision, "temperature": temperature}
        self._arguments = {**arguments, **{name: value for name, value in numbers.items() if value is not None}}
        # Copied, because a view would keep the whole tensor behind it in memory and in saved files.
        self._probe = map_tensors(slice_inputs(probe, slice(0, 8)), lambda t: t.detach().clone())
        self.sampling = self._new()
        # Choosing a backend runs the encoder, so it is done only once.
        self._arguments["backend"] = type(self.sampling.backend)

    @property
    def probe(self) -> Inputs:
        """Probe, on the present device and in the present dtype of the encoder."""
        like = next(self.encoder.parameters())
        return map_tensors(self._probe, lambda t: t.to(like if t.is_floating_point() else like.device))

    def fitted(self, discounted: DiscountedCurvature) -> ContrastiveLaplace:
        """Return a posterior for the user: the curvature rescaled to the data set, with its prior and temperature."""
        options = self._arguments["backend_kwargs"]
        # The user may call fit(loader) later, which uses all pairs.
        if "pairs" in options:
            options = {**options, "pairs": "dataset"}
        la = self._new(backend_kwargs=options)
        la.posterior = la.after(discounted.at_scale(self.n_data))
        if self.prior_precision is None:
            la.optimize_prior_precision()
        else:
            la.temperature = self._mean_loss(la.cost)
        return la

    def draw(self, discounted: DiscountedCurvature, n_samples: int) -> list[Tensor | None]:
        """Draw deviations from the mean weights, from ``q_t``.

        Args:
            discounted: The discounted curvature.
            n_samples: Number S of networks.

        Returns:
            S tensors of shape (P,), or one ``None`` if ``q_t`` has no variance: at sampling temperature 0, and as long
            as there is neither a curvature nor a prior precision.

        Raises:
            DivergenceError: The posterior precision is not positive definite, or not finite.
        """
        step = int(discounted.steps) + 1
        if self.sampling_temperature == 0:
            return [None]
        if bool(discounted.positive):
            try:
                drawn = self._draw_from_curvature(discounted, n_samples)
            except (InputError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                msg = f"the posterior precision is not positive definite ({error})."
                raise DivergenceError(msg, step) from error
        elif self.prior_precision is not None:
            # Without any curvature, q_0 has the variance of the prior, around the initial weights.
            like = next(self.encoder.parameters())
            drawn = like.new_empty(n_samples, self.sampling.n_weights).normal_() / self.prior_precision**0.5
        else:
            return [None]
        if not bool(drawn.isfinite().all()):
            msg = "the posterior precision is not positive, or not finite."
            raise DivergenceError(msg, step)
        return list(drawn.unbind())

    def _draw_from_curvature(self, discounted: DiscountedCurvature, n_samples: int) -> Tensor:
        read, result = self.sampling.read, discounted.at_scale(self.n_data)
        sizes = [p.numel() for p in read.parameters]
        clamped = clamp(result.curvature, sizes, read.backend.options.rank)
        # The cooling: by default q_t is the posterior of all remembered steps.
        cooling = 1.0 if self.temperature is not None else float(discounted.remembered)
        if self.sampling_temperature is not None:
            cooling = 1 / self.sampling_temperature
        precision = self.sampling.prior_precision
        temperature = check_temperature(self._mean_loss(float(result.cost)) / cooling, precision.dtype)
        if self.prior_precision is None:
            # The prior is as precise as the mean diagonal of the curvature, so that weights without curvature stay near
            # their mean.
            precision = average_information(clamped.diagonal(), sizes, "scalar") / temperature
            check_prior("prior_precision", precision, precision.dtype, None)
        noise = torch.randn(n_samples, sum(sizes), dtype=precision.dtype, device=precision.device)
        return clamped.sampler(precision, 1 / temperature)(noise)

    def _mean_loss(self, cost: float) -> float:
        """Return the user's temperature; by default the mean loss of a point, or one if the loss is zero."""
        if self.temperature is not None:
            return self.temperature
        return cost / self.n_data if cost > 0 else 1.0

    def _new(self, **changes: Any) -> ContrastiveLaplace:
        return ContrastiveLaplace.around(self.encoder, self.probe, **{**self._kind, **self._arguments, **changes})
