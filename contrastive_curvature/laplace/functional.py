"""``hessian_structure="gp"``: the posterior seen as a Gaussian process over some points of the data set.

With the square root ``S`` of the output Hessian of M points and ``A = S^T J``, the posterior precision is
``p I + h A^T A`` (``p`` the prior precision, ``h`` the likelihood factor), so all results follow from the kernel
``J J^T`` between points, and no matrix of the size of the parameters is formed. If all points are chosen, the posterior
equals the ``full`` structure. Kernels are computed in float64, because the posterior is a small difference of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import Dense, Diagonal
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit.contributions import FEWEST_POINTS, MOST, warn_of_point
from contrastive_curvature.fit.loop import DatasetCurvature, mean_norm
from contrastive_curvature.fit.subset import HessianSubset
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.prediction import (
    check_joint_size,
    check_outputs,
    joint_distribution,
    moved_inputs,
    point_chunks,
)
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.structures import Clamped, Structure
from contrastive_curvature.structures.base import Against, Room
from contrastive_curvature.structures.finite import check_finite, eigenpairs

_KERNEL_LIMIT = 2**13


@dataclass(frozen=True, eq=False)
class Kernel(Structure):
    """Some points, a root of their output Hessian, and the eigenpairs of ``A A^T``; two kernels cannot be added.

    Attributes:
        inputs: The M points.
        factor: ``S``, shape (M, D, R), or one root for each point, shape (M, D, D).
        coupled: Whether the points are coupled, so that ``S`` is one root for all points.
        values: Eigenvalues of ``A A^T``, not negative, shape (R,).
        vectors: Eigenvectors of ``A A^T`` as columns, shape (R, R).
    """

    name = "gp"
    adds = False
    priors = ("scalar",)

    inputs: Inputs
    factor: Tensor
    coupled: bool
    values: Tensor
    vectors: Tensor

    @override
    def shapes(self, room: Room) -> dict[str, Any]:
        (points, dim), columns = self.factor.shape[:2], len(self.values)
        factor = (points, dim, columns if self.coupled else dim)
        return {"factor": factor, "values": (columns,), "vectors": (columns, columns)}

    @override
    def traces(self) -> Tensor:
        return self.values.sum().reshape(1)

    def clamped(self, sizes: list[int]) -> ClampedKernel:
        """See :meth:`Structure.clamped`; ``A^T A`` has the eigenvalues of ``A A^T`` and otherwise zeros."""
        return ClampedKernel(self.values, sizes)

    @property
    def subset(self) -> HessianSubset:
        """The points that represent the data, with the root of their output Hessian."""
        return HessianSubset(self.inputs, self.factor, self.coupled)

    def plain(self) -> dict[str, Any]:
        """Return all fields by name."""
        return dict(vars(self))


class ClampedKernel(Clamped):
    """Eigenvalues alone: the eigenvectors would be as large as all Jacobians."""

    def into(self, v: Tensor) -> NoReturn:
        """Refuse: a posterior in function space has no basis of the weights.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "functional_variance: a posterior in function space works with kernels. Use la(x).covariance."
        )

    def out_of(self, x: Tensor) -> NoReturn:
        """See :meth:`into`."""
        self.into(x)

    def diagonal(self) -> Tensor:
        """Return the mean of the diagonal, shape (1,): a scalar prior precision needs only the mean."""
        return (self.values.sum() / sum(self.sizes)).reshape(1)

    def plain(self) -> Tensor:
        """Return the eigenvalues."""
        return self.values

    def posterior_precision(self, prior: Tensor, factor: float | Tensor) -> NoReturn:
        """Refuse: the matrix is never formed.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "posterior_precision: a posterior in function space has no matrix of weights. Use hessian_structure='full'."
        )

    def against(self, prior: Tensor) -> Against:
        """See :meth:`Clamped.against`; the zero eigenvalues do not change any result that is used."""
        return Against(self, prior.reshape(-1).expand(len(self.values)), 1.0)


class FunctionSpaceLaplace(ContrastiveLaplace):
    """Posterior in function space, for every fix whose output Hessian is positive semidefinite.

    Args:
        model: The encoder.
        likelihood: ``"contrastive"``.
        subset_of_weights: ``"all"``, or ``"last_layer"``, whose kernel is the kernel of the features, in closed form.
        n_subset: Number M of points that represent the data set.
        seed: Seed of the random choice of the points.
        independent_outputs: Refused: the covariance between outputs is part of the kernel.
        **arguments: As in :class:`ContrastiveLaplace`.

    Raises:
        InputError: ``n_subset`` is missing or not a positive whole number, or ``seed`` is not a whole number.
    """

    fits_in_function_space: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        subset_of_weights: str = "all",
        *,
        n_subset: int | None = None,
        seed: int = 0,
        independent_outputs: bool = False,
        **arguments: Any,
    ) -> None:
        self.n_subset, self.seed = validate.count("n_subset", n_subset), seed
        if independent_outputs:
            raise UnsupportedError(
                "independent_outputs=True: the kernel between outputs is computed exactly. Leave it out."
            )
        super().__init__(model, likelihood, subset_of_weights, "gp", **arguments)

    def _structure_of(self, name: object) -> type[Structure]:
        return Kernel

    def plain_options(self) -> dict[str, Any]:
        """Return the options of the curvature and of the sampled points as strings and numbers."""
        return {**super().plain_options(), "n_subset": self.n_subset, "seed": self.seed}

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit the posterior on some points, with their output Hessian over the pairs of the whole data set.

        Args:
            train_loader: Batches ``(x, labels)`` or mappings; see :meth:`ContrastiveLaplace.fit`.
            override: Must be ``True``.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Raises:
            InputError: No data, one point, no positive pair, ``n_subset`` larger than the data set, or a kernel matrix
                that is too large.
            UnsupportedError: The output Hessian is not positive semidefinite, or ``override=False``.
        """
        self._begin(train_loader, override)
        subset, loss, cost, n = self.backend.fit_subset(train_loader, self.n_subset, self.seed, progress_bar)
        columns = subset.columns
        if columns > _KERNEL_LIMIT:
            hint = "Use a smaller n_subset, or hessian_structure='diag' or 'kron'."
            wanted = f"a kernel matrix of at most {_KERNEL_LIMIT} rows"
            raise InputError("n_subset", wanted, f"{self.n_subset} points, {columns} rows", hint)
        with evaluation_mode(self.model), torch.no_grad():
            z, context = self._embed(subset.inputs)
            subset = replace(subset, factor=subset.factor.double())
            kernel = self._kernel(context, context)
            if not bool(kernel.isfinite().all()):
                self._refuse_infinite_jacobian(context)
            gram = subset.project(subset.project(kernel).movedim(2, 0))
            values, vectors = eigenpairs((gram + gram.T) / 2)
            _warn_of_one_point(subset, kernel)
        curvature = Kernel(subset.inputs, subset.factor, subset.coupled, values.clamp(min=0), vectors)
        self.set_curvature(DatasetCurvature(curvature, loss, cost, n, None, mean_norm(z)))

    @property
    def kernel(self) -> Kernel:
        """The curvature."""
        return cast("Kernel", self.curvature)

    @property
    def H(self) -> Any:
        """Points and eigenpairs by name; ``None`` before ``fit``."""
        return self.H_raw

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T (p I + h A^T A) (value - mean)`` for weights (P,)."""
        self.check_weights(value)
        delta = value - self.mean
        moved = self._project(delta.unsqueeze(0))
        return self.prior_precision.squeeze() * delta.square().sum() + self._H_factor * moved.square().sum()

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights from the posterior, shape (n_samples, P).

        A sample of the prior is corrected by its residual at the data (Matheron's rule).
        """
        self.check_sampling(n_samples, generator)
        prior, h = self.prior_precision.squeeze(), self._H_factor
        values, vectors = self.kernel.values, self.kernel.vectors
        like: dict[str, Any] = {"dtype": values.dtype, "device": self.mean.device, "generator": generator}
        drawn = torch.randn(n_samples, self.n_params, **like) / prior.sqrt()
        noise = torch.randn(n_samples, values.numel(), **like) / h**0.5
        residual = (self._project(drawn) + noise) @ vectors / (values + prior / h)
        lifted = self.kernel.subset.lift(residual @ vectors.T)
        with evaluation_mode(self.model), torch.no_grad():
            for rows, jacobian in self._held_jacobians():
                drawn -= torch.einsum("smd,mdp->sp", lifted[:, rows], jacobian.double())
        return self.mean.detach() + drawn.to(self.mean.dtype)

    def _gaussian(self, x: Any, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        x = moved_inputs(self.model, x, self._device)
        if joint:
            check_joint_size(input_length(x), self.n_outputs, 0)
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            z, context = self._embed(x)
            check_outputs(x, z, self.n_outputs)
            held = self._embed(self.kernel.inputs)[1]
            if joint:
                spread = self._joint_spread(context, held).to(z.dtype)
                return joint_distribution(z, spread)
            parts = [self._marginal_spread(part, held, diagonal) for part in self._context_chunks(context, *z.shape)]
            spread = torch.cat(parts).to(z.dtype)
        return EmbeddingDistribution.trusted(z, Diagonal(spread) if diagonal else Dense(spread))

    def _joint_spread(self, points: Any, held: Any) -> Tensor:
        """Return the covariance of all outputs of B points together, shape (B D, B D)."""
        k, explained = (part.flatten(0, 1) for part in self._explained(self._kernel(points, held)))
        own = self._kernel(points, points)
        return (own.reshape(len(k), len(k)) - explained @ k.T) / self.prior_precision.squeeze()

    def _marginal_spread(self, points: Any, held: Any, diagonal: bool) -> Tensor:
        """Return variances (B, D) or covariances (B, D, D) of the outputs of B points."""
        own, cross = self._kernels_of_points(points, held, diagonal)
        (k, explained), prior = self._explained(cross), self.prior_precision.squeeze()
        # A difference of large numbers: rounding can make a small variance negative.
        if diagonal:
            return ((own - (explained * k).sum(2)) / prior).clamp(min=0)
        covariance = (own - explained @ k.mT) / prior
        variances = covariance.diagonal(dim1=1, dim2=2)
        return covariance + torch.diag_embed(variances.clamp(min=0) - variances)

    def _explained(self, cross: Tensor) -> tuple[Tensor, Tensor]:
        """Return kernels (B, D, M, D) in the data's eigenbasis, and these divided by eigenvalues plus prior."""
        k = self.kernel.subset.project(cross) @ self.kernel.vectors
        return k, k / (self.kernel.values + self.prior_precision.squeeze() / self._H_factor)

    def _held_jacobians(self) -> Iterator[tuple[slice, Tensor]]:
        return self._jacobian_chunks(self._embed(self.kernel.inputs)[1])

    def _jacobian_chunks(self, context: Any) -> Iterator[tuple[slice, Tensor]]:
        """Yield Jacobians (C, D, P) of the points of a context in chunks, with the slices of the points."""
        pullback, dim, n = self.backend.pullback(context), self._encoder_dim(), input_length(context)
        axes = torch.eye(dim, dtype=self._dtype, device=self._device)
        for rows in point_chunks(pullback, n, dim):
            part = pullback.slice_context(context, rows)
            yield rows, pullback.vjp(part, axes.expand(rows.stop - rows.start, -1, -1))

    def _project(self, weights: Tensor) -> Tensor:
        """Return ``A w`` with ``A = S^T J`` of the points that represent the data, shape (S, R), for weights (S, P)."""
        with evaluation_mode(self.model), torch.no_grad():
            jacobians = (jacobian.double() for _, jacobian in self._held_jacobians())
            parts = [torch.einsum("mdp,sp->smd", jacobian, weights.double()) for jacobian in jacobians]
        return self.kernel.subset.project(torch.cat(parts, dim=1))

    def _refuse_infinite_jacobian(self, context: Any) -> None:
        """Raise and name the layer if a Jacobian is not finite at the points that represent the data."""
        pullback = self.backend.pullback(context)
        for rows, jacobian in self._jacobian_chunks(context):
            where = f"the points {rows.start} to {rows.stop - 1} of those that stand for the data"
            check_finite(jacobian.abs().sum((0, 1)), pullback, where)

    def _embed(self, x: Inputs) -> tuple[Tensor, Any]:
        """Return raw outputs (B, D), and the context of the points for a pullback."""
        return self._features(x) if self.on_last_layer else (self.backend.encoder(x)(x), x)

    def _kernel(self, left: Any, right: Any) -> Tensor:
        """Return the kernel between two sets of points, shape (A, D, B, D)."""
        if self.on_last_layer:
            features = left.double() @ right.double().T
            if self.model.last_layer.bias is not None:
                features = features + 1
            eye = torch.eye(self._encoder_dim(), dtype=features.dtype, device=features.device)
            return torch.einsum("ab,de->adbe", features, eye)
        return torch.cat([self._times(some.double(), right) for _, some in self._jacobian_chunks(left)])

    def _kernels_of_points(self, points: Any, held: Any, diagonal: bool) -> tuple[Tensor, Tensor]:
        """Return kernels of B points with themselves, (B, D) or (B, D, D), and with ``held`` points, (B, D, M, D)."""
        if self.on_last_layer:
            phi = points.double()
            size = phi.square().sum(1) + (self.model.last_layer.bias is not None)
            variances = size.unsqueeze(1).expand(-1, self._encoder_dim())
            return variances if diagonal else torch.diag_embed(variances), self._kernel(points, held)
        own, cross = [], []
        for _, some in self._jacobian_chunks(points):
            jacobians = some.double()
            own.append(jacobians.square().sum(2) if diagonal else jacobians @ jacobians.mT)
            cross.append(self._times(jacobians, held))
        return torch.cat(own), torch.cat(cross)

    def _times(self, left: Tensor, right: Any) -> Tensor:
        """Return products of Jacobians (A, D, P) with the Jacobians of B points, shape (A, D, B, D)."""
        others = (other.double() for _, other in self._jacobian_chunks(right))
        return torch.cat([torch.einsum("adp,bep->adbe", left, other) for other in others], dim=2)

    def _context_chunks(self, context: Any, n: int, dim: int) -> Iterator[Any]:
        """Return parts of a context whose Jacobians fit into one chunk."""
        if self.on_last_layer:
            return iter((context,))
        pullback = self.backend.pullback(context)
        return (pullback.slice_context(context, rows) for rows in point_chunks(pullback, n, dim))


def _warn_of_one_point(subset: HessianSubset, kernel: Tensor) -> None:
    """Warn if one chosen point carries most of ``tr(S^T K S)``; the kernel has shape (M, D, M, D)."""
    points = torch.arange(kernel.shape[0], device=kernel.device)
    own = kernel[points, :, points, :]
    parts = torch.einsum("mdr,mde,mer->m", subset.factor, own, subset.factor)
    fraction = float(parts.max() / parts.sum()) if bool(parts.sum() > 0) else 0.0
    if len(parts) >= FEWEST_POINTS and fraction > MOST:
        where = f"point {int(parts.argmax())} of the chosen ones"
        warn_of_point(fraction, where, "of the points that stand for the data")
