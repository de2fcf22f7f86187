"""A logistic regression on features of pairs, fitted by scikit-learn and evaluated in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError

_LEAST = 10
"""Fewest examples of each kind: with fewer, no weight has a sign that can be trusted."""


@dataclass(frozen=True, eq=False)
class Regression:
    """Probability of a positive outcome, from F features: a cosine, and if F > 1 the log of a variance and other logs.

    The logit is linear in the features and in the product of the first two: the more uncertain a pair, the less its
    cosine says. It never falls as the cosine grows; where the fitted slope is negative, the slope is zero. A log
    outside the range of the fit counts as the end of the range.

    Attributes:
        shift: Means of the features, float64, shape (F,).
        scale: Standard deviations of the features, shape (F,).
        low: Lower limits of the features, shape (F,); a smaller value counts as the limit.
        high: Upper limits of the features, shape (F,); a larger value counts as the limit.
        weight: Weights of the standardised features and, if F > 1, of the product; shape (1,) or (F + 1,).
        bias: Shape ().
        knots: Logits at which the isotonic curve bends, increasing, shape (K,); empty for the logistic curve.
        levels: Probabilities there, shape (K,).
        prevalence: Share of positive outcomes in the fit, shape ().
    """

    shift: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    weight: Tensor
    bias: Tensor
    knots: Tensor
    levels: Tensor
    prevalence: Tensor

    @classmethod
    def fit(cls, features: Tensor, same: Tensor, *, isotonic: bool) -> Regression:
        """Fit features (N, F), float64, to whether each pair is of one class, shape (N,).

        A log of zero, minus infinity, counts as the smallest other value. ``isotonic`` replaces the logistic curve by
        an isotonic regression of the outcomes on the logit.
        """
        n_same = int(same.sum())
        if min(n_same, len(same) - n_same) < _LEAST:
            wanted = f"at least {_LEAST} pairs of one class and of two classes each"
            hint = "A probability cannot be fitted to one kind alone, nor to a few examples."
            raise InputError("same", wanted, f"{n_same} and {len(same) - n_same}", hint)
        from sklearn.linear_model import LogisticRegression  # imported at first use, because it takes a second

        x, y = features.detach().cpu().double(), same.cpu().numpy()
        low = torch.where(x.isfinite(), x, torch.full_like(x, torch.inf)).amin(0)
        low = torch.where(low.isfinite(), low, torch.zeros_like(low))
        x = torch.maximum(x, low)
        high, shift, scale = x.amax(0), x.mean(0), x.std(0)
        # A feature that does not vary, up to rounding, has no effect.
        varies = scale > 1e-9 * (1 + shift.abs())
        scale = torch.where(varies, scale, torch.full_like(scale, torch.inf))
        standardised = (x - shift) / scale
        # With one feature, the product has no columns.
        terms = torch.cat([standardised, standardised[:, :1] * standardised[:, 1:2]], 1)
        model = LogisticRegression(max_iter=10_000, tol=1e-8).fit(terms.numpy(), y)
        weight = torch.from_numpy(model.coef_[0]).double()
        if not bool(weight[0] > 0):
            hint = "The cosine does not tell the two kinds apart here. Are the labels those of the embeddings?"
            wanted = "pairs of one class and of two classes, the first more often at larger cosines"
            raise InputError("same", wanted, f"a fitted weight of {float(weight[0]):.2g}", hint)
        low[0], high[0] = -torch.inf, torch.inf
        none = torch.zeros(0, dtype=torch.float64)
        bias = torch.tensor(float(model.intercept_[0]), dtype=torch.float64)
        prevalence = torch.tensor(n_same / len(same), dtype=torch.float64)
        plain = cls(shift, scale, low, high, weight, bias, none, none, prevalence)
        if not isotonic:
            return plain
        from sklearn.isotonic import IsotonicRegression

        # No finite sample shows that a match is certain.
        edge = 1 / (len(y) + 2)
        curve = IsotonicRegression(y_min=edge, y_max=1 - edge).fit(plain.logit(x).numpy(), y)
        knots, levels = (torch.from_numpy(v).double() for v in (curve.X_thresholds_, curve.y_thresholds_))
        return cls(shift, scale, low, high, weight, bias, knots, levels, prevalence)

    def logit(self, features: Tensor) -> Tensor:
        """Return logits (N,), float64, of features (N, F)."""
        device = features.device
        x = torch.minimum(torch.maximum(features.double(), self.low.to(device)), self.high.to(device))
        x, weight = (x - self.shift.to(device)) / self.scale.to(device), self.weight.to(device)
        n_features = x.shape[1]
        slope = weight[0] + weight[n_features:].sum() * x[:, min(1, n_features - 1)]
        return slope.clamp(min=0) * x[:, 0] + x[:, 1:] @ weight[1:n_features] + self.bias.to(device)

    def __call__(self, features: Tensor, prevalence: float | None = None) -> Tensor:
        """Return probabilities (N,), float64, of features (N, F); ``prevalence`` replaces the prevalence of the fit."""
        if prevalence is None:
            return self._fitted(features)
        moved = torch.tensor(prevalence, dtype=torch.float64).logit() - self.prevalence.logit()
        return (self._fitted(features).logit() + moved.to(features.device)).sigmoid()

    def _fitted(self, features: Tensor) -> Tensor:
        """Return probabilities (N,) at the prevalence of the fit."""
        logit = self.logit(features)
        if not len(self.knots):
            return logit.sigmoid()
        knots, levels = self.knots.to(logit.device), self.levels.to(logit.device)
        if len(knots) == 1:
            return levels.expand(len(logit)).clone()
        at = logit.clamp(knots[0], knots[-1])
        right = torch.searchsorted(knots, at).clamp(1, len(knots) - 1)
        share = (at - knots[right - 1]) / (knots[right] - knots[right - 1])
        return torch.lerp(levels[right - 1], levels[right], share)

    def state(self) -> dict[str, Tensor]:
        """Return tensors by name."""
        return {field.name: getattr(self, field.name).clone() for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prefix: str, n_features: int) -> Regression:
        """Rebuild from :meth:`state`, with keys that begin with ``prefix``; raise for other dtypes, shapes and NaN."""
        knots = state.get(f"{prefix}knots")
        curve = (len(knots),) if isinstance(knots, Tensor) and knots.ndim else ()
        shapes = {"bias": (), "prevalence": (), "knots": curve, "levels": curve}
        shapes["weight"] = (n_features + (n_features > 1),)
        parts = {}
        for field in fields(cls):
            value, shape = state.get(prefix + field.name), shapes.get(field.name, (n_features,))
            kind = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
            missing = isinstance(value, Tensor) and bool(value.isnan().any())
            if not isinstance(value, Tensor) or kind != (torch.float64, shape) or missing:
                wanted = f"a float64 tensor of shape {shape} without NaN"
                raise InputError(f"state_dict[{prefix + field.name!r}]", wanted, str(kind))
            parts[field.name] = value.detach().cpu().clone()
        return cls(**parts)
