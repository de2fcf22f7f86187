"""How raw outputs spread around their mean: each kind of spread keeps its own parts, for B outputs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import vmf
from contrastive_curvature.errors import InputError, UnsupportedError

_ENTRIES = 2**17
"""Numbers of a block of dense covariances that is converted to float64 at once: 1 MiB, which stays in the cache."""


@dataclass(frozen=True, eq=False)
class Spread:
    """Spread of B raw outputs of dimension D.

    The methods here use the covariances; a kind with more structure overrides them. The fields are tensors with one row
    for each output, unless a kind says otherwise.
    """

    semidefinite: ClassVar[bool] = False
    """Whether no rounding can have made a variance negative."""

    @property
    def kind(self) -> str:
        """Name of the kind; all parts of a concatenation have the same one."""
        raise NotImplementedError

    @property
    def covariance(self) -> Tensor:
        """Covariances, shape (B, D, D)."""
        raise NotImplementedError

    @property
    def variance(self) -> Tensor:
        """Variances, shape (B, D)."""
        return self.covariance.diagonal(dim1=1, dim2=2)

    @property
    def joint_covariance(self) -> Tensor:
        """Covariance of all outputs together, shape (B D, B D)."""
        raise UnsupportedError(
            "joint_covariance: this distribution holds one marginal an input. Call la(x, joint=True)."
        )

    def finite(self) -> Tensor:
        """Return which outputs have a finite spread, booleans, shape (B,)."""
        return self.covariance.isfinite().flatten(1).all(1)

    def across(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``tr Cov`` and ``u^T Cov u`` of unit vectors ``u`` (B, D), float64, shape (B,) each."""
        radial = [((v @ wide) * v).sum((1, 2)) for wide, v in self._blocks(u.double())]
        return self.variance.double().sum(1), torch.cat(radial)

    def relative_error(self, u: Tensor) -> Tensor:
        """Return the standard error of the variance across ``u`` (B, D), over the variance; float64, shape (B,)."""
        return torch.zeros(len(u), dtype=torch.float64, device=u.device)

    def moments(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``tr Cov``, ``|Cov|_F`` and ``Cov u`` of unit vectors ``u`` (B, D), float64; ``Cov`` is read once."""
        parts = [(torch.linalg.vector_norm(wide, dim=(1, 2)), (v @ wide)[:, 0]) for wide, v in self._blocks(u)]
        size, product = (torch.cat(part) for part in zip(*parts, strict=True))
        return self.variance.double().sum(1), size, product

    def _blocks(self, u: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield covariances in float64, a few at a time, each with its vectors of ``u`` (B, D) as rows (b, 1, D)."""
        step = max(1, _ENTRIES // u.shape[1] ** 2)
        for covariance, some in zip(self.covariance.split(step), u.split(step), strict=True):
            yield covariance.double(), some.unsqueeze(1)

    def sample(self, mean: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draw raw outputs around means (B, D), shape (S, B, D)."""
        noise = _noise(mean, n_samples, generator)
        values, vectors = torch.linalg.eigh(self.covariance.to(noise.dtype))
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        return (mean + torch.einsum("bde,sbe->sbd", root, noise)).to(mean.dtype)

    def rows(self, rows: Tensor | slice) -> Self:
        """Return the spread of the selected outputs; -1 is an output of NaN."""
        return self._mapped(lambda value: taken(value, rows))

    def to(self, device: Any, dtype: torch.dtype | None) -> Self:
        """Return the same spread on another device or in another dtype."""
        return self._mapped(lambda value: value.to(device=device, dtype=dtype))

    def cat(self, others: Sequence[Any]) -> Spread:
        """Concatenate with ``others``, which are of the same kind."""
        parts = (self, *others)
        return replace(self, **{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(self)})

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, **{field.name: change(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True, eq=False)
class DiagonalSpread(Spread):
    """Variances of independent outputs, shape (B, D)."""

    values: Tensor
    kind = "variance"
    semidefinite = True

    @property
    def covariance(self) -> Tensor:
        """Covariances, shape (B, D, D)."""
        return torch.diag_embed(self.values)

    @property
    def variance(self) -> Tensor:
        """The variances."""
        return self.values

    @override
    def finite(self) -> Tensor:
        return self.values.isfinite().all(1)

    @override
    def across(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.values.sum(1, dtype=torch.float64), (self.values * u.square()).sum(1)

    @override
    def moments(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = self.values.double()
        return wide.sum(1), torch.linalg.vector_norm(wide, dim=1), wide * u

    @override
    def sample(self, mean: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        noise = _noise(mean, n_samples, generator)
        return (mean + noise * self.values.to(noise.dtype).sqrt()).to(mean.dtype)


@dataclass(frozen=True, eq=False)
class IndependentSpread(DiagonalSpread):
    """Variances where the covariances are diagonal by themselves, so that no entry was left out."""


@dataclass(frozen=True, eq=False)
class DenseSpread(Spread):
    """Covariances, shape (B, D, D)."""

    matrices: Tensor
    kind = "covariance"

    @property
    def covariance(self) -> Tensor:
        """The covariances."""
        return self.matrices

    def cat(self, others: Sequence[Spread]) -> DenseSpread:
        """See :meth:`Spread.cat`; covariances along axes become dense."""
        return DenseSpread(torch.cat([part.covariance for part in (self, *others)]))


@dataclass(frozen=True, eq=False)
class Axes(Spread):
    """Covariances ``U diag(v_b) U^T + C``, kept as parts, because building B matrices may take longer than the encoder.

    A Kronecker-factored posterior of a last layer gives them.

    Attributes:
        axes: ``U``, orthonormal columns, shape (D, D), float64.
        values: ``v``, not negative, shape (B, D).
        common: ``C``, positive semidefinite, shape (D, D), float64, or ``None`` for zero.
        dtype: Dtype of the covariances.
    """

    axes: Tensor
    values: Tensor
    common: Tensor | None
    dtype: torch.dtype
    kind = "covariance"
    semidefinite = True

    @property
    def covariance(self) -> Tensor:
        """Covariances, shape (B, D, D)."""
        with torch.autocast(self.values.device.type, enabled=False):
            axes = self.axes.to(self.values)
            out = (axes * self.values.unsqueeze(1)) @ axes.T
            return (out if self.common is None else out + self.common.to(out)).to(self.dtype)

    @property
    def variance(self) -> Tensor:
        """Variances, shape (B, D)."""
        with torch.autocast(self.values.device.type, enabled=False):
            out = self.values @ self.axes.to(self.values).square().T
            return (out if self.common is None else out + self.common.diagonal().to(out)).to(self.dtype)

    @override
    def finite(self) -> Tensor:
        # ``amax`` is NaN if one of the numbers is NaN.
        finite = self.values.amax(1).isfinite()
        return finite if self.common is None else finite & self.common.diagonal().isfinite().all()

    @override
    def across(self, u: Tensor) -> tuple[Tensor, Tensor]:
        total = self.values.sum(1, dtype=torch.float64)
        radial = (self.values * (u @ self.axes).square()).sum(1)
        if self.common is None:
            return total, radial
        return total + self.common.diagonal().sum(), radial + ((u @ self.common) * u).sum(1)

    @override
    def moments(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        axes, values = self.axes, self.values.double()
        trace, size = values.sum(1), torch.linalg.vector_norm(values, dim=1)
        product = (u @ axes * values) @ axes.T
        if self.common is None:
            return trace, size, product
        common = self.common
        square = size.square() + 2 * (values @ ((common @ axes) * axes).sum(0)) + common.square().sum()
        return trace + common.diagonal().sum(), square.sqrt(), product + u @ common

    @override
    def rows(self, rows: Tensor | slice) -> Axes:
        return replace(self, values=taken(self.values, rows))

    def to(self, device: Any, dtype: torch.dtype | None) -> Axes:
        """See :meth:`Spread.to`; the parts keep their dtype."""
        common = None if self.common is None else self.common.to(device)
        return Axes(self.axes.to(device), self.values.to(device), common, dtype or self.dtype)

    def cat(self, others: Sequence[Spread]) -> Spread:
        """See :meth:`Spread.cat`; if the axes differ, the covariances become dense."""
        same = [
            p for p in others if isinstance(p, Axes) and _equal(p.axes, self.axes) and _equal(p.common, self.common)
        ]
        if len(same) < len(others):
            return DenseSpread(self.covariance).cat(others)
        return replace(self, values=torch.cat([self.values, *(part.values for part in same)]))


@dataclass(frozen=True, eq=False)
class Joint(Spread):
    """Covariances between all outputs, shape (B, D, B, D)."""

    blocks: Tensor
    kind = "joint_covariance"

    @property
    def covariance(self) -> Tensor:
        """Covariances of single outputs, shape (B, D, D)."""
        points = torch.arange(len(self.blocks), device=self.blocks.device)
        return self.blocks[points, :, points]

    @property
    @override
    def joint_covariance(self) -> Tensor:
        n, dim = self.blocks.shape[:2]
        return self.blocks.reshape(n * dim, n * dim)

    def finite(self) -> Tensor:
        """See :meth:`Spread.finite`; a finite output counts as finite even if another output is not."""
        own = super().finite()
        return own if not bool(own.all()) else self.blocks.isfinite().flatten(1).all(1)

    def sample(self, mean: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """See :meth:`Spread.sample`; all outputs of a sample come from one network."""
        whole = DenseSpread(self.joint_covariance.unsqueeze(0))
        return whole.sample(mean.reshape(1, -1), n_samples, generator).view(n_samples, *mean.shape)

    @override
    def rows(self, rows: Tensor | slice) -> Joint:
        return Joint(taken(taken(self.blocks, rows).transpose(0, 2), rows).transpose(0, 2))


@dataclass(frozen=True, eq=False)
class Deviations(Spread):
    """Covariances as means over S independent deviations of the outputs from their means, shape (B, S, D)."""

    deviations: Tensor
    kind = "covariance"
    semidefinite = True

    @property
    def covariance(self) -> Tensor:
        """Covariances, shape (B, D, D), unbiased, of rank S at most."""
        return self.deviations.mT @ self.deviations / self.deviations.shape[1]

    @override
    def across(self, u: Tensor) -> tuple[Tensor, Tensor]:
        wide, count = self.deviations.double(), self.deviations.shape[1]
        return wide.square().sum((1, 2)) / count, (wide @ u.unsqueeze(2)).square().sum((1, 2)) / count

    @override
    def relative_error(self, u: Tensor) -> Tensor:
        wide = self.deviations.double()
        each = wide.square().sum(2) - (wide @ u.unsqueeze(2))[..., 0].square()
        if each.shape[1] == 1:
            return torch.full_like(each[:, 0], torch.inf)
        mean = each.mean(1)
        return torch.where(mean > 0, each.std(1) / each.shape[1] ** 0.5 / mean, 0)

    def cat(self, others: Sequence[Spread]) -> Spread:
        """See :meth:`Spread.cat`; with covariances that are no samples, or other numbers of samples, they are dense."""
        same = [part for part in others if isinstance(part, Deviations)]
        if len({part.deviations.shape[1] for part in (self, *same)}) > 1 or len(same) < len(others):
            return DenseSpread(self.covariance).cat(others)
        return Deviations(torch.cat([part.deviations for part in (self, *same)]))


@dataclass(frozen=True, eq=False)
class Samples(Spread):
    """Samples of the outputs, shape (B, S, D); sample s of all outputs comes from one network."""

    samples: Tensor
    semidefinite = True

    @property
    def kind(self) -> str:
        """The number of samples."""
        return f"{self.samples.shape[1]} samples"

    @property
    def covariance(self) -> Tensor:
        """Sample covariances, shape (B, D, D)."""
        centred = self.samples - self.samples.mean(1, keepdim=True)
        return centred.mT @ centred / (self.samples.shape[1] - 1)

    def across(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Spread.across`; no covariance is computed."""
        centred = (self.samples - self.samples.mean(1, keepdim=True)).double()
        others = centred.shape[1] - 1
        return centred.square().sum((1, 2)) / others, (centred @ u.unsqueeze(2)).square().sum((1, 2)) / others

    def directions(self) -> tuple[Tensor, Tensor]:
        """Return mean direction (B, D) and concentration (B,) of the normalised samples."""
        return vmf.fit(self.samples.transpose(0, 1))

    def sample(self, mean: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """See :meth:`Spread.sample`; returns the first of the stored samples."""
        most = self.samples.shape[1]
        if n_samples > most:
            hint = "This distribution was built from those samples; request more of them in the prediction."
            raise InputError("n_samples", f"at most {most}", n_samples, hint)
        return self.samples[:, :n_samples].transpose(0, 1)


def taken(values: Tensor, rows: Tensor | slice) -> Tensor:
    """Return rows of ``values`` (B, ...) by indices or a slice; index -1 gives NaN."""
    if isinstance(rows, Tensor) and bool((rows < 0).any()):
        values = torch.cat([values, values.new_full((1, *values.shape[1:]), torch.nan)])
    return values[rows]


def _noise(mean: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    # torch has no decomposition in half precision.
    wide = torch.promote_types(mean.dtype, torch.float32)
    return torch.randn(n_samples, *mean.shape, dtype=wide, device=mean.device, generator=generator)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
