"""The base of all structures: a curvature adds up over points, and its positive part is used in a basis.

A structure defines which part of ``J^T H J`` (P, P) is kept. The fields of a :class:`Structure` are its sums over
points. The clamped and decomposed sums are a :class:`Clamped`, which computes all results for the posterior with the
precision ``factor * H + prior``. To add a structure, write a subclass of each, and add the first one to
:data:`contrastive_curvature.structures.STRUCTURES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.pullback import Pullback, full_precision
from contrastive_curvature.structures.at_features import AtFeatures, DenseAtFeatures

_S = TypeVar("_S", bound="Structure")


@dataclass(frozen=True, eq=False)
class Structure(ABC):
    """Sums over points, not clamped: tensors, or lists of lists of them.

    Attributes:
        name: Name for users.
        couples: Whether cross terms between points are kept. Kronecker factors leave them out.
        weights: Values of ``subset_of_weights`` that support it.
        mc_estimable: Whether the option ``mc_samples`` gives an unbiased estimate of it.
        priors: Supported priors: one number, one for each parameter tensor, or one for each parameter.
        options: Names of arguments of :meth:`clamped` that users may set.
    """

    name: ClassVar[str]
    weights: ClassVar[tuple[str, ...]] = ("last_layer", "all")
    couples: ClassVar[bool] = True
    mc_estimable: ClassVar[bool] = False
    priors: ClassVar[tuple[str, ...]] = ("scalar", "layerwise")
    options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def term(cls, pullback: Pullback, context: Any, blocks: Blocks) -> Self:
        """Return the sum over single points, ``sum_i J_i^T H_ii J_i``."""
        raise NotImplementedError

    @classmethod
    def coupled_term(cls, pullback: Pullback, context: Any, hessian: OutputHessian) -> Self:
        """Return the sum over points that are coupled only with each other, ``sum_ij J_i^T H_ij J_j``."""
        return cls.term(pullback, context, hessian.blocks)

    @classmethod
    def cross(cls, pullback: Pullback, left: Any, right: Any, cross: CrossBlocks) -> Self:
        """Return ``sum_ij J_i^T H_ij J_j`` of points i and j; only the sum over a symmetric Hessian has a meaning."""
        raise NotImplementedError

    @classmethod
    def products(cls, left: Tensor, right: Tensor) -> Self:
        """Return ``sum_k left_k right_k^T`` of rows (K, P)."""
        raise NotImplementedError

    @classmethod
    def tile(cls, pullback: Pullback, dim: int) -> int:
        """Return how many points with ``dim`` outputs a tile of cross terms may have on each side."""
        return pullback.points_at_once(dim)

    @abstractmethod
    def clamped(self, sizes: list[int]) -> Clamped:
        """Return the positive semidefinite part, decomposed.

        Args:
            sizes: Numbers of entries of the parameter tensors, P in all.

        Raises:
            InputError: The curvature is not finite, or cannot be decomposed.
        """

    @abstractmethod
    def plain(self) -> Any:
        """Return the unclamped curvature in laplace-torch's form."""

    def positive(self) -> Self:
        """Return the positive semidefinite part as sums again; online training adds up clamped curvatures."""
        raise NotImplementedError

    @abstractmethod
    def traces(self) -> Tensor:
        """Return the sum of the absolute diagonal, shape (1,), or of each of G factors, shape (G,)."""

    def reached(self, sizes: list[int]) -> Tensor:
        """Return whether each parameter tensor has a curvature other than zero, before it is clamped, booleans."""
        return torch.ones(len(sizes), dtype=torch.bool, device="cpu")

    def scaled(self, number: float | Tensor) -> Self:
        """Return the curvature times a number, of the same points."""
        return self.map(lambda tensor: number * tensor)

    def map(self, change: Callable[..., Tensor], *others: Self) -> Self:
        """Return the same structure with ``change`` applied to every tensor and its counterparts in ``others``."""
        parts = [[getattr(one, field.name) for one in (self, *others)] for field in fields(self)]
        return replace(self, **{f.name: _mapped(change, *part) for f, part in zip(fields(self), parts, strict=True)})

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in order."""
        return [tensor for field in fields(self) for tensor in _flat(getattr(self, field.name))]

    def shapes(self, room: Room) -> dict[str, Any]:
        """Return the shapes that the fields of a curvature from a file must have, by name.

        ``None`` is any length, and a dtype is a single number of this dtype.
        """
        del room
        return {}

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Return the same structure with other tensors, in the order of :meth:`tensors`."""
        given = iter(tensors)
        return self.map(lambda _: next(given))

    def __add__(self, other: Self) -> Self:
        """Return the sum over the points of both structures."""
        return self.map(lambda one, two: one + two.to(one.device), other)


class Room(NamedTuple):
    """Sizes that a curvature from a file must match.

    Args:
        parameters: Parameters of the posterior.
        rank: The option ``rank``, for structures that have it.
    """

    parameters: list[Tensor]
    rank: int | None

    @property
    def total(self) -> int:
        """Number P of entries of all parameters."""
        return sum(p.numel() for p in self.parameters)


class Against(NamedTuple):
    """A curvature and a prior precision, diagonal in one basis; both are multiplied by ``scale`` on either side.

    Args:
        basis: The curvature ``scale H scale`` in its eigenbasis.
        prior: ``scale * prior * scale`` in this basis, shape (K,).
        scale: One number, or one for each weight, shape (P,).
    """

    basis: Clamped
    prior: Tensor
    scale: Tensor | float


@dataclass(frozen=True, eq=False)
class Clamped(ABC):
    """A curvature ``H = B diag(values) B^T`` (P, P), positive semidefinite, with ``B B^T = I``.

    A structure whose basis depends on the prior overrides :meth:`against`; a structure with a closed form for a last
    layer overrides :meth:`at_features`.

    Attributes:
        independent: Whether the weights of the posterior do not depend on each other.
        values: Eigenvalues, not negative, shape (K,); K = P unless :attr:`times` differs from 1.
        sizes: Numbers of entries of the parameter tensors, P in all.
    """

    independent: ClassVar[bool] = False

    values: Tensor
    sizes: list[int]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which :meth:`into` and :meth:`out_of` compute."""
        return self.values.dtype

    @property
    def times(self) -> Tensor | float:
        """Multiplicity of each eigenvalue, a number or shape (K,)."""
        return 1.0

    @abstractmethod
    def into(self, v: Tensor) -> Tensor:
        """Return ``v B`` (..., K) of rows (..., P)."""

    @abstractmethod
    def out_of(self, x: Tensor) -> Tensor:
        """Return ``B x`` (..., P) of rows (..., K) in the basis."""

    def draw(self, noise: Tensor, deviations: Tensor) -> Tensor:
        """Return rows (S, P) with the covariance ``B diag(deviations^2) B^T``, from standard normal numbers (S, P).

        Here the numbers are turned into the basis too, so that a draw does not depend on the signs of eigenvectors and
        on the basis of equal eigenvalues, which differ between machines.
        """
        return self.out_of(self.into(noise) * deviations)

    @abstractmethod
    def diagonal_of(self, values: Tensor) -> Tensor:
        """Return the diagonal of ``B diag(values) B^T``, shape (P,), for any values (K,)."""

    def diagonal(self) -> Tensor:
        """Return the diagonal of ``H``, shape (P,)."""
        return self.diagonal_of(self.values)

    def plain(self) -> Any:
        """Return ``H`` in laplace-torch's form, or the object itself."""
        return self

    def against(self, prior: Tensor) -> Against:
        """Return a basis that makes the prior precision diagonal too.

        Args:
            prior: One number, one for each parameter tensor, or one for each parameter.
        """
        return Against(self, of_each_weight(prior, self.sizes), 1.0)

    def precision(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        """Return the eigenvalues of ``factor * H + prior``, shape (K,), for the prior of :meth:`against`."""
        return factor * self.values + prior

    def effective_parameters(self, prior: Tensor) -> float:
        """Return ``tr(H (H + prior)^-1)``, the effective number of parameters at the temperature 1.

        Source: MacKay (1992), "Bayesian interpolation", section 4.
        """
        basis, d, _ = self.against(prior.detach().double())
        total = basis.values.double() + d
        return float((basis.times * basis.values.double() / torch.where(total > 0, total, 1)).sum())

    def log_det_ratio(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        """Return the log of det(posterior precision) / det(prior precision); differentiable in the prior."""
        basis, d, _ = self.against(prior.double())
        return (basis.times * (basis.precision(d, factor) / d).log()).sum().to(prior)

    def sampler(self, prior: Tensor, factor: float | Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function from standard normal numbers (S, P) to deviations from the posterior's mean (S, P)."""
        basis, d, scale = self.against(prior)
        deviations = basis.precision(d, factor).rsqrt().to(basis.dtype)

        @full_precision
        def sample(noise: Tensor) -> Tensor:
            drawn = basis.draw(noise.to(basis.dtype), deviations)
            # A product with the number one would be a copy of all samples.
            return (scale * drawn if isinstance(scale, Tensor) else drawn).to(noise)

        return sample

    @full_precision
    def covariance(self, jacobians: Tensor, prior: Tensor, factor: float | Tensor) -> Tensor:
        """Return ``J Sigma J^T`` (..., D, D) of Jacobians (..., D, P) with the covariance of the posterior."""
        basis, d, scale = self.against(prior)
        moved = basis.into(scale * jacobians.to(basis.dtype))
        return ((moved / basis.precision(d, factor).to(moved)) @ moved.mT).to(jacobians)

    @full_precision
    def solve(self, v: Tensor, prior: Tensor, factor: float | Tensor) -> Tensor:
        """Return ``(factor * H + prior)^-1 v`` of rows (..., P)."""
        basis, d, scale = self.against(prior)
        moved = basis.into(scale * v.to(basis.dtype))
        return (scale * basis.out_of(moved / basis.precision(d, factor).to(moved))).to(v)

    @full_precision
    def square_norm(self, delta: Tensor, prior: Tensor, factor: float | Tensor) -> Tensor:
        """Return ``delta^T (factor * H + prior) delta`` for weights (P,)."""
        basis, d, scale = self.against(prior)
        moved = basis.into(delta.to(basis.dtype) / scale)
        return (moved.square() @ basis.precision(d, factor).to(moved)).to(delta)

    def posterior_precision(self, prior: Tensor, factor: float | Tensor) -> Any:
        """Return ``factor * H + prior`` in laplace-torch's form; by default the matrix (P, P)."""
        basis, d, scale = self.against(prior)
        turned = basis.into(torch.eye(sum(self.sizes), dtype=basis.dtype, device=self.values.device) / scale)
        return (turned * basis.precision(d, factor).to(turned)) @ turned.T

    def variances(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        """Return the posterior variance of every weight, shape (P,)."""
        basis, d, scale = self.against(prior)
        return scale * basis.diagonal_of(1 / basis.precision(d, factor)) * scale

    def at_features(self, dim: int, prior: Tensor, factor: float | Tensor) -> AtFeatures:
        """Return a function from the features of a last linear layer to the spread of its ``dim`` outputs."""
        eye = torch.eye(sum(self.sizes), dtype=torch.float64, device=self.values.device)
        return DenseAtFeatures(self.covariance(eye, prior, factor), dim)


def added(one: _S | None, other: _S | None) -> _S | None:
    """Return the sum of two structures; either may be missing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def of_each_weight(prior: Tensor, sizes: list[int]) -> Tensor:
    """Return the prior precision of every weight (P,), from one number, one for each tensor, or one for each weight."""
    if 1 < prior.numel() == len(sizes) < sum(sizes):
        return prior.reshape(-1).repeat_interleave(torch.tensor(sizes, device=prior.device))
    return prior.reshape(-1).expand(sum(sizes))


def _mapped(change: Callable[..., Tensor], *trees: Any) -> Any:
    if isinstance(trees[0], list):
        return [_mapped(change, *parts) for parts in zip(*trees, strict=True)]
    return change(*trees)


def _flat(tree: Any) -> list[Tensor]:
    return [tensor for part in tree for tensor in _flat(part)] if isinstance(tree, list) else [tree]
