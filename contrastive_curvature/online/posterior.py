"""The laplace objects around a discounted curvature: the one that ``q_t`` is drawn from, and those handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import DivergenceError, InputError
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.fitting import posterior_around
from contrastive_curvature.network.inputs import Inputs, slice_inputs
from contrastive_curvature.online.discount import DiscountedCurvature
from contrastive_curvature.options import KFACApprox, Structure

__all__ = ["OnlinePosterior"]

_STRENGTH = 1.0
"""Of the prior that weights are sampled with in training: as strong as the data, so that a weight of which the steps so
far say nothing is not drawn from afar. The figures of online LAM were all taken with it."""


class OnlinePosterior:
    """Makes laplace objects around an encoder that is being trained, and leaves the encoder as it is.

    Args:
        encoder: The encoder.
        probe: A batch to analyse it with.
        n_data: Number N of training points.
        kind: The class of laplace objects.
        how: Further arguments for it.
        prior_precision: See :class:`~contrastive_curvature.OnlineLaplace`, as for the two that follow.
        temperature: A positive number, or ``None``.
        sampling_temperature: A number, or ``None``.
    """

    def __init__(
        self,
        encoder: nn.Module,
        probe: Inputs,
        n_data: int,
        kind: type[ContrastiveLaplace],
        how: dict[str, Any],
        prior_precision: float | None,
        temperature: float | None,
        sampling_temperature: float | None,
    ) -> None:
        self.encoder, self.n_data, self.kind = encoder, n_data, kind
        self.prior_precision, self.temperature = prior_precision, temperature
        self.sampling_temperature = sampling_temperature
        given = {"prior_precision": prior_precision, "temperature": temperature}
        self._how = {**how, **{name: value for name, value in given.items() if value is not None}}
        # Copies: a view would keep all of the data set that it was cut from, in memory and in saved files.
        self._given_probe = _map_tensors(slice_inputs(probe, slice(0, 8)), lambda t: t.detach().clone())
        self._carrier = self._new()
        # The choice tries the encoder out, which once is enough.
        self._how["backend"] = type(self._carrier.backend)

    @property
    def probe(self) -> Inputs:
        """The probe, on the device and in the precision that the encoder has now."""
        like = next(self.encoder.parameters())
        return _map_tensors(self._given_probe, lambda t: t.to(like if t.is_floating_point() else like.device))

    @property
    def backend(self) -> ContrastiveBackend:
        """The curvature backend."""
        return self._carrier.backend

    @property
    def structure(self) -> Structure:
        """The Hessian structure."""
        return self._carrier.structure

    def options(self) -> dict[str, Any]:
        """Strings and numbers that say what the posterior is."""
        own = {
            "prior_precision": self.prior_precision,
            "temperature": self.temperature,
            "sampling_temperature": self.sampling_temperature,
        }
        return {**self._carrier.plain_options(), **own}

    def fitted(self, discounted: DiscountedCurvature) -> ContrastiveLaplace:
        """A laplace object of the remembered curvature, at the size of the data set, with its prior and temperature."""
        options = self._how["backend_kwargs"]
        # What it is asked to fit later is a data set; only these factors can be made of batches alone.
        pairs = "batch" if options.get("kfac_approx", KFACApprox.EXPAND) != KFACApprox.EXPAND else "dataset"
        made = self._new(backend_kwargs={**options, "pairs": pairs})
        self._update(made, discounted, None)
        return made

    def draw(self, discounted: DiscountedCurvature, n_samples: int) -> list[Tensor | None]:
        """Deviations from the mean weights, drawn from ``q_t``.

        Args:
            discounted: The remembered curvature.
            n_samples: Number S of networks.

        Returns:
            S tensors of shape (P,), or one ``None`` while ``q_t`` has no width to draw from.

        Raises:
            DivergenceError: A precision is not positive, or not finite.
        """
        step = int(discounted.steps) + 1
        if self.sampling_temperature == 0:
            return [None]
        if bool(discounted.positive):
            try:
                drawn = self._draw_remembered(discounted, n_samples)
            except (InputError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                msg = f"the posterior precision is not positive definite ({error})."
                raise DivergenceError(msg, step) from error
        elif self.prior_precision is not None:
            # q_0 is the prior's width around the initial weights.
            like = next(self.encoder.parameters())
            drawn = like.new_empty(n_samples, self._carrier.n_params).normal_() / self.prior_precision**0.5
        else:
            return [None]
        if not bool(drawn.isfinite().all()):
            msg = "the posterior precision is not positive, or not finite."
            raise DivergenceError(msg, step)
        return list(drawn.unbind())

    def _draw_remembered(self, discounted: DiscountedCurvature, n_samples: int) -> Tensor:
        carrier = self._carrier
        self._update(carrier, discounted, _STRENGTH)
        colder = self._colder(discounted)
        carrier.temperature /= colder
        if self.prior_precision is None:
            carrier.prior_precision = carrier.prior_precision * colder
        carrier.mean = torch.zeros_like(carrier.mean)
        return carrier.sample(n_samples)

    def _colder(self, discounted: DiscountedCurvature) -> float:
        """How many times the temperature of ``q_t`` is below that of the final posterior."""
        if self.sampling_temperature is not None:
            return 1 / self.sampling_temperature
        return 1.0 if self.temperature is not None else float(discounted.remembered)

    def _update(self, posterior: ContrastiveLaplace, discounted: DiscountedCurvature, strength: float | None) -> None:
        posterior.set_curvature(discounted.at_scale(self.n_data))
        if self.temperature is not None:
            # The carrier's was divided when it was drawn from before.
            posterior.temperature = self.temperature
        if self.prior_precision is None:
            posterior.optimize_prior_precision(strength=strength)
        elif self.temperature is None and posterior.cost > 0:
            posterior.temperature = float(posterior.cost) / self.n_data

    def _new(self, **changes: Any) -> ContrastiveLaplace:
        return posterior_around(self.kind, self.encoder, self.probe, **{**self._how, **changes})


def _map_tensors(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    if isinstance(x, Tensor):
        return function(x)
    return {key: function(value) if isinstance(value, Tensor) else value for key, value in x.items()}
