"""``hessian_structure="gp"``: the posterior seen as a Gaussian process over some points of the data set.

With the square root ``S`` of the output Hessian of M points and ``A = S^T J``, the posterior precision is ``p I + h A^T
A`` (``p`` the prior precision, ``h`` the likelihood factor), so everything follows from the kernel ``J J^T`` between
points: no matrix of the size of the parameters is formed. With all points chosen it is the ``full`` structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from laplace.baselaplace import ParametricLaplace
from laplace.lllaplace import LLLaplace
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.finite import eigenpairs
from contrastive_curvature.fit.loop import mean_norm
from contrastive_curvature.laplace import fitting
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.checks import check_finite_outputs, check_output_shape
from contrastive_curvature.laplace.forms import KernelForm
from contrastive_curvature.laplace.kernel import (
    held_jacobians,
    held_subset,
    joint_spread,
    kernel_between,
    kernels_of_points,
    marginal_spread,
    project_weights,
    refuse_infinite_jacobian,
    warn_of_one_point,
)
from contrastive_curvature.laplace.last_layer import LastLayerLaplace
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.prediction import check_joint_size, timed_chunks, to_device
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length

__all__ = ["ContrastiveFunctionalLLLaplace", "ContrastiveFunctionalLaplace"]

_KERNEL_LIMIT = 2**13


class _FunctionSpace(ContrastiveLaplace):
    """Posterior in function space.

    Args:
        model: The encoder.
        likelihood: ``"contrastive"``.
        n_subset: Number M of points that represent the data set.
        *args: As in laplace-torch's other classes.
        seed: Seed of the random choice of the points.
        independent_outputs: Refused: the covariance between outputs is part of the kernel.
        **kwargs: As in laplace-torch's other classes.

    Raises:
        InputError: ``n_subset`` is missing or not a positive whole number, or ``seed`` is not a whole number.
    """

    structure = None  # type: ignore[assignment]
    fits_in_parts = False
    form = KernelForm()
    prior_structures = ("scalar",)
    keeps_features = False

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = CONTRASTIVE,
        n_subset: int | None = None,
        *args: Any,
        seed: int = 0,
        independent_outputs: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(n_subset, bool) or not isinstance(n_subset, int) or n_subset < 1:
            hint = "It is how many points of the training data the Gaussian process keeps."
            raise InputError(expected("n_subset", "a positive whole number", n_subset, hint))
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise InputError(expected("seed", "a whole number of 64 bits", seed))
        validate.flag("independent_outputs", independent_outputs)
        if independent_outputs:
            msg = "independent_outputs=True: the kernel between outputs is computed exactly. Leave it out."
            raise UnsupportedError(msg)
        self.n_subset, self.seed = n_subset, seed
        super().__init__(model, likelihood, *args, **kwargs)

    def plain_options(self) -> dict[str, Any]:
        """See :meth:`ContrastiveLaplace.plain_options`."""
        return {**super().plain_options(), "n_subset": self.n_subset, "seed": self.seed}

    def _init_H(self) -> None:
        self.H = None

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit the posterior on some of the points, their Hessian taken from the pairs of the whole data set.

        Args:
            train_loader: Batches ``(x, labels)`` or mappings; iterated several times, and may shuffle in between.
            override: Must be ``True``.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Raises:
            InputError: No data, one point, no positive pair, more points asked for than there are, or a kernel matrix
                that is too large.
            UnsupportedError: The output Hessian is not positive semidefinite, or ``override=False``.
        """
        validate.flag("override", override)
        if not override:
            msg = "override=False: two subsets do not add up. Use hessian_structure='diag', 'kron' or 'full'."
            raise UnsupportedError(msg)
        fitting.begin(self, train_loader)
        subset, loss, cost, n = self.backend.fit_subset(train_loader, self.n_subset, self.seed, progress_bar)
        columns = subset.columns
        if columns > _KERNEL_LIMIT:
            hint = "Use a smaller n_subset, or hessian_structure='diag' or 'kron'."
            wanted = f"a kernel matrix of at most {_KERNEL_LIMIT} rows"
            raise InputError(expected("n_subset", wanted, f"{self.n_subset} points, {columns} rows", hint))
        with evaluation_mode(self.model), torch.no_grad():
            z, context = self._embed(subset.inputs)
            subset = replace(subset, factor=subset.factor.double())
            kernel = self._kernel(context, context)
            if not bool(kernel.isfinite().all()):
                refuse_infinite_jacobian(self, context)
            gram = subset.project(subset.project(kernel).movedim(2, 0))
            values, vectors = eigenpairs((gram + gram.T) / 2)
            warn_of_one_point(subset, kernel)
        # Everything that can fail runs before the first assignment, so that a failed fit leaves the last one whole.
        self.H = {
            "inputs": subset.inputs,
            "factor": subset.factor,
            "coupled": subset.coupled,
            "values": values.clamp(min=0),
            "vectors": vectors,
        }
        fitting.remember(self, loss, float(cost), n, mean_norm(z))

    @property
    def prior_precision(self) -> Tensor:
        """Precision of the prior of every parameter, one number."""
        return super().prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor) and value.numel() != 1:
            hint = "A kernel has one prior for all parameters; hessian_structure='diag' has room for more."
            raise InputError(expected("prior_precision", "one number", f"shape {tuple(value.shape)}", hint))
        super(_FunctionSpace, type(self)).prior_precision.fset(self, value)  # type: ignore[attr-defined]

    @property
    def posterior_precision(self) -> Tensor:
        """Never formed.

        Raises:
            UnsupportedError: Always.
        """
        msg = (
            "posterior_precision: a posterior in function space has no matrix of weights. Use hessian_structure='full'."
        )
        raise UnsupportedError(msg)

    @property
    def log_det_ratio(self) -> Tensor:
        """``log det(I + (h / p) A A^T)``, the posterior precision over the prior's."""
        self.check_fitted()
        return (self._H_factor * self.H["values"] / self.prior_precision.squeeze()).log1p().sum()

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log determinant of ``p I + h A^T A``."""
        return self.log_det_ratio + self.n_params * self.prior_precision.squeeze().log()

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T (p I + h A^T A) (value - mean)`` for weights (P,)."""
        self.check_weights(value)
        delta = value - self.mean
        moved = project_weights(self, delta.unsqueeze(0))
        return self.prior_precision.squeeze() * delta.square().sum() + self._H_factor * moved.square().sum()

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights from the posterior, shape (n_samples, P).

        A sample of the prior is corrected by its residual at the data (Matheron's rule).
        """
        self.check_sampling(n_samples, generator)
        prior, h = self.prior_precision.squeeze(), self._H_factor
        values, vectors = self.H["values"], self.H["vectors"]
        like: dict[str, Any] = {"dtype": values.dtype, "device": self.mean.device, "generator": generator}
        drawn = torch.randn(n_samples, self.n_params, **like) / prior.sqrt()
        noise = torch.randn(n_samples, values.numel(), **like) / h**0.5
        residual = (project_weights(self, drawn) + noise) @ vectors / (values + prior / h)
        lifted = held_subset(self).lift(residual @ vectors.T)
        with evaluation_mode(self.model), torch.no_grad():
            for rows, jacobian in held_jacobians(self):
                drawn -= torch.einsum("smd,mdp->sp", lifted[:, rows], jacobian.double())
        return self.mean.detach() + drawn.to(self.mean.dtype)

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        x = to_device(self, x)
        if joint:
            check_joint_size(input_length(x), self.n_outputs, 0)
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            z, context = self._embed(x)
            check_output_shape(x, z, self.n_outputs)
            check_finite_outputs(x, z)
            held = self._embed(self.H["inputs"])[1]
            if joint:
                return EmbeddingDistribution.trusted(z, joint_covariance=joint_spread(self, context, held).to(z.dtype))
            parts = [marginal_spread(self, part, held, diagonal) for part in self._context_chunks(context, *z.shape)]
            spread = torch.cat(parts).to(z.dtype)
        if diagonal:
            return EmbeddingDistribution.trusted(z, variance=spread)
        return EmbeddingDistribution.trusted(z, covariance=spread)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Never computed from Jacobians.

        Raises:
            UnsupportedError: Always.
        """
        msg = "functional_variance: a posterior in function space works with kernels. Use la(x).covariance."
        raise UnsupportedError(msg)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Never computed from Jacobians.

        Raises:
            UnsupportedError: Always.
        """
        msg = "functional_covariance: a posterior in function space works with kernels. Use la(x, joint=True)."
        raise UnsupportedError(msg)

    def _embed(self, x: Inputs) -> tuple[Tensor, Any]:
        """Raw outputs (B, D), and what a pullback needs of the points."""
        return self.backend.encoder(x)(x), x

    def _kernel(self, left: Any, right: Any) -> Tensor:
        return kernel_between(self, left, right)

    def _kernels_of_points(self, points: Any, held: Any, diagonal: bool) -> tuple[Tensor, Tensor]:
        return kernels_of_points(self, points, held, diagonal)

    def _context_chunks(self, context: Any, n: int, dim: int) -> Iterator[Any]:
        """Parts of a context whose Jacobians fit a chunk."""
        pullback = self.backend.pullback(context)
        return (pullback.slice_context(context, rows) for rows in timed_chunks(pullback, n, dim))


class ContrastiveFunctionalLaplace(_FunctionSpace, ParametricLaplace):
    """All parameters, in function space; every fix whose output Hessian is positive semidefinite."""

    _key = ("all", "gp", CONTRASTIVE)


class ContrastiveFunctionalLLLaplace(_FunctionSpace, LastLayerLaplace, LLLaplace):
    """Last linear layer, in function space: the kernel is that of the features, in closed form."""

    _key = ("last_layer", "gp", CONTRASTIVE)

    def _embed(self, x: Inputs) -> tuple[Tensor, Any]:
        return self._features(x)

    def _kernel(self, left: Any, right: Any) -> Tensor:
        features = left.double() @ right.double().T
        if self.model.last_layer.bias is not None:
            features = features + 1
        eye = torch.eye(self._encoder_dim(), dtype=features.dtype, device=features.device)
        return torch.einsum("ab,de->adbe", features, eye)

    def _kernels_of_points(self, points: Any, held: Any, diagonal: bool) -> tuple[Tensor, Tensor]:
        phi = points.double()
        own = phi.square().sum(1) + (self.model.last_layer.bias is not None)
        variances = own.unsqueeze(1).expand(-1, self._encoder_dim())
        return variances if diagonal else torch.diag_embed(variances), self._kernel(points, held)

    def _context_chunks(self, context: Any, n: int, dim: int) -> Iterator[Any]:
        return iter((context,))
