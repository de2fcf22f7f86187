"""Distributions of embeddings of inputs some of which have no finite output: rows of NaN beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.fit.class_centres import ClassCentres

__all__ = ["WithInvalidRows"]


class WithInvalidRows(EmbeddingDistribution):
    """A distribution with rows of NaN, as ``la(x, on_invalid="nan")`` gives it.

    Args:
        good: Of the inputs that have an embedding.
        valid: Which of the B inputs these are, booleans, shape (B,).
    """

    def __init__(self, good: EmbeddingDistribution, valid: Tensor) -> None:
        self._good, self._valid = good, valid.to(good.raw_mean.device)
        self._store(self._filled(good.raw_mean), None, None, None)
        super().relative_to(good._typical_norm, good._class_centres)

    def relative_to(self, typical_norm: float | None, class_centres: ClassCentres | None = None) -> WithInvalidRows:
        """See :meth:`.EmbeddingDistribution.relative_to`."""
        super().relative_to(typical_norm, class_centres)
        # A copy, because copies of this object share the original.
        judge, self._good = self._good._judge, copy(self._good)
        self._good.relative_to(typical_norm, class_centres)._judge = judge
        return self

    @property
    def mu(self) -> Tensor:
        """Mean directions, shape (B, D)."""
        return self._filled(self._good.mu)

    @property
    def kappa(self) -> Tensor:
        """Concentrations, shape (B,)."""
        return self._filled(self._good.kappa)

    @property
    def uncertainty(self) -> Tensor:
        """Angles in radians, shape (B,)."""
        return self._filled(self._good.uncertainty)

    @property
    def tangential_variance(self) -> Tensor:
        """Variances perpendicular to the mean, relative, shape (B,)."""
        return self._filled(self._good.tangential_variance)

    @property
    def variance(self) -> Tensor:
        """Variances of the raw outputs, shape (B, D)."""
        return self._filled(self._good.variance)

    @property
    def covariance(self) -> Tensor:
        """Covariances of the raw outputs, shape (B, D, D)."""
        return self._filled(self._good.covariance)

    @property
    def joint_covariance(self) -> Tensor:
        """Covariance of all raw outputs together, shape (B D, B D); NaN wherever an invalid input takes part."""
        n, dim = self.raw_mean.shape
        rows = self._valid.nonzero().flatten()
        out = self.raw_mean.new_full((n, dim, n, dim), torch.nan)
        blocks = self._good.joint_covariance.view(len(rows), dim, len(rows), dim)
        out[rows[:, None], :, rows[None, :]] = blocks.permute(0, 2, 1, 3)
        return out.view(n * dim, n * dim)

    @property
    def novelty(self) -> Tensor:
        """See :attr:`.EmbeddingDistribution.novelty`."""
        return self._filled(self._good.novelty)

    @property
    def p_value(self) -> Tensor:
        """See :attr:`.EmbeddingDistribution.p_value`."""
        return self._filled(self._good.p_value)

    def is_known(self, alpha: float = 0.01) -> Tensor:
        """See :meth:`.EmbeddingDistribution.is_known`; false for an invalid input."""
        out = torch.zeros_like(self._valid)
        out[self._valid] = self._good.is_known(alpha)
        return out

    def raw_samples(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """See :meth:`.EmbeddingDistribution.raw_samples`; NaN for an invalid input."""
        return self._filled_samples(self._good.raw_samples(n_samples, generator))

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """See :meth:`.EmbeddingDistribution.sample`; NaN for an invalid input."""
        return self._filled_samples(self._good.sample(n_samples, generator))

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> WithInvalidRows:
        """See :meth:`.EmbeddingDistribution.to`."""
        return WithInvalidRows(self._good.to(device, dtype), self._valid)

    def _select(self, rows: Tensor) -> EmbeddingDistribution:  # type: ignore[override]
        valid = self._valid[rows]
        place = self._valid.cumsum(0) - 1
        good = self._good._select(place[rows[valid]])
        return good if bool(valid.all()) else WithInvalidRows(good, valid)

    def __repr__(self) -> str:
        """As of other distributions, and the number of invalid embeddings."""
        n, dim = self.raw_mean.shape
        return f"EmbeddingDistribution({n} embeddings in {dim} dimensions, {n - len(self._good)} of them NaN)"

    def __getstate__(self) -> dict[str, Any]:
        """As of other distributions."""
        return {**super().__getstate__(), "_good": copy(self._good)}

    @property
    def _kind(self) -> str:
        return self._good._kind

    def _filled(self, values: Tensor) -> Tensor:
        """Values (G, ...) of the good rows in their places, shape (B, ...)."""
        out = values.new_full((len(self._valid), *values.shape[1:]), torch.nan)
        out[self._valid] = values
        return out

    def _filled_samples(self, samples: Tensor) -> Tensor:
        return self._filled(samples.transpose(0, 1)).transpose(0, 1)

    @classmethod
    def of_parts(cls, parts: Sequence[EmbeddingDistribution]) -> tuple[list[EmbeddingDistribution], Tensor]:
        """The good embeddings of parts of a concatenation, and which of all rows they are.

        A part without good ones is left out, unless there are none at all: it is of no kind.
        """
        device = parts[0].raw_mean.device
        valid = [
            part._valid.to(device) if isinstance(part, cls) else torch.ones(len(part), dtype=torch.bool, device=device)
            for part in parts
        ]
        good = [part._good if isinstance(part, cls) else part for part in parts]
        some = [one for one, part in zip(good, parts, strict=True) if len(one) or not isinstance(part, cls)]
        return some or good[:1], torch.cat(valid)
