"""``hessian_structure="gp"``: the posterior seen as a Gaussian process over some points of the data set.

With the square root ``S`` of the output Hessian of M points and ``A = S^T J``, the posterior precision is ``p I + h A^T
A`` (``p`` the prior precision, ``h`` the likelihood factor), so everything follows from the kernel ``J J^T`` between
points: no matrix of the size of the parameters is formed. With all points chosen it is the ``full`` structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from laplace.baselaplace import ParametricLaplace
from laplace.lllaplace import LLLaplace
from torch import Tensor, nn

from contrastive_curvature.arguments import check_flag
from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.ggn.dominance import FEWEST_POINTS, MOST, warn_of_point
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.spectrum import eigenpairs
from contrastive_curvature.ggn.subset import HessianSubset
from contrastive_curvature.laplace.base import CONTRASTIVE, ContrastiveLaplace
from contrastive_curvature.laplace.checks import check_finite_outputs
from contrastive_curvature.laplace.last_layer import LastLayerLaplace
from contrastive_curvature.laplace.state_curvature import check_eigenbasis, check_kernel
from contrastive_curvature.laplace.state_values import check_takes
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS

__all__ = ["ContrastiveFunctionalLLLaplace", "ContrastiveFunctionalLaplace"]

_KERNEL_LIMIT = 2**13


class _FunctionSpace(ContrastiveLaplace):
    """Posterior in function space.

    Args:
        model: The encoder.
        likelihood: ``"contrastive"``.
        n_subset: Number M of points that stand for the data set.
        *args: As in laplace-torch's other classes.
        seed: Of the draw of the points.
        independent_outputs: Refused: the covariance between outputs is part of the kernel.
        **kwargs: As in laplace-torch's other classes.

    Raises:
        InputError: ``n_subset`` is missing or no positive whole number, or ``seed`` no whole number.
    """

    structure = None  # type: ignore[assignment]
    prior_structures = ("scalar",)

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
        check_flag("independent_outputs", independent_outputs)
        if independent_outputs:
            msg = "independent_outputs=True: the kernel between outputs is computed exactly. Leave it out."
            raise UnsupportedError(msg)
        self.n_subset, self.seed = n_subset, seed
        super().__init__(model, likelihood, *args, **kwargs)

    def _plain_options(self) -> dict[str, Any]:
        return {**super()._plain_options(), "n_subset": self.n_subset, "seed": self.seed}

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
        check_flag("override", override)
        if not override:
            msg = "override=False: two subsets do not add up. Use hessian_structure='diag', 'kron' or 'full'."
            raise UnsupportedError(msg)
        self._begin(train_loader)
        subset, loss, cost, n = self.backend.fit_subset(train_loader, self.n_subset, self.seed, progress_bar)
        columns = subset.columns
        if columns > _KERNEL_LIMIT:
            hint = "Use a smaller n_subset, or hessian_structure='diag' or 'kron'."
            wanted = f"a kernel matrix of at most {_KERNEL_LIMIT} rows"
            raise InputError(expected("n_subset", wanted, f"{self.n_subset} points, {columns} rows", hint))
        with evaluation_mode(self.model), torch.no_grad():
            context = self._embed(subset.inputs)[1]
            subset = replace(subset, factor=subset.factor.double())
            kernel = self._kernel(context, context)
            if not bool(kernel.isfinite().all()):
                self._refuse_infinite(context)
            gram = subset.project(subset.project(kernel).movedim(2, 0))
            values, vectors = eigenpairs((gram + gram.T) / 2)
            _warn_of_point(subset, kernel)
        # Everything that can fail comes before the first assignment, so that a failed fit leaves the last one whole.
        self.H = {
            "inputs": subset.inputs,
            "factor": subset.factor,
            "coupled": subset.coupled,
            "values": values.clamp(min=0),
            "vectors": vectors,
        }
        self._remember(loss, float(cost), n)

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
        self._check_fitted()
        return (self._H_factor * self.H["values"] / self.prior_precision.squeeze()).log1p().sum()

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log determinant of ``p I + h A^T A``."""
        return self.log_det_ratio + self.n_params * self.prior_precision.squeeze().log()

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T (p I + h A^T A) (value - mean)`` for weights (P,)."""
        self._check_value(value)
        delta = value - self.mean
        moved = self._project_weights(delta.unsqueeze(0))
        return self.prior_precision.squeeze() * delta.square().sum() + self._H_factor * moved.square().sum()

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights from the posterior, shape (n_samples, P).

        A draw from the prior is corrected by what the data say of it (Matheron's rule).
        """
        self._check_sampling(n_samples, generator)
        prior, h = self.prior_precision.squeeze(), self._H_factor
        values, vectors = self.H["values"], self.H["vectors"]
        like: dict[str, Any] = {"dtype": values.dtype, "device": self.mean.device, "generator": generator}
        drawn = torch.randn(n_samples, self.n_params, **like) / prior.sqrt()
        noise = torch.randn(n_samples, values.numel(), **like) / h**0.5
        residual = (self._project_weights(drawn) + noise) @ vectors / (values + prior / h)
        lifted = self._subset().lift(residual @ vectors.T)
        with evaluation_mode(self.model), torch.no_grad():
            for rows, jacobian in self._held_jacobians():
                drawn -= torch.einsum("smd,mdp->sp", lifted[:, rows], jacobian.double())
        return self.mean.detach() + drawn.to(self.mean.dtype)

    def _gaussian(self, x: Inputs, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        subset, prior = self._subset(), self.prior_precision.squeeze()
        with evaluation_mode(self.model), torch.set_grad_enabled(self.enable_backprop):
            z, context = self._embed(self._moved(x))
            check_finite_outputs(x, z)
            (b, d), own = z.shape, self._kernel(context, context)
            held = self._embed(subset.inputs)[1]
            k = subset.project(self._kernel(context, held)) @ self.H["vectors"]
            explained = k / (self.H["values"] + prior / self._H_factor)
            if joint:
                flat = k.reshape(b * d, -1)
                whole = own.reshape(b * d, b * d) - explained.reshape(b * d, -1) @ flat.T
                return EmbeddingDistribution.trusted(z, joint_covariance=(whole / prior).to(z.dtype))
            points = torch.arange(b, device=z.device)
            covariance = (own[points, :, points, :] - explained @ k.mT) / prior
            # What the prior leaves may be less than the rounding of what it started from.
            variances = covariance.diagonal(dim1=1, dim2=2)
            covariance = (covariance + torch.diag_embed(variances.clamp(min=0) - variances)).to(z.dtype)
        if diagonal:
            return EmbeddingDistribution.trusted(z, variance=covariance.diagonal(dim1=1, dim2=2))
        return EmbeddingDistribution.trusted(z, covariance=covariance)

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

    def _check_curvature(self, state: Mapping[str, Any], like: Tensor) -> None:
        check_kernel(state, like, self.n_subset)
        parts = state["H"]
        with evaluation_mode(self.model), torch.no_grad():
            check_takes("H", parts["inputs"], state["n_outputs"], self.model, self._moved)
            if self._has_weights(state.get("encoder_norms")):
                # The object has no curvature of its own yet that could be asked; a refusal puts back what it had.
                self.H = parts
                check_eigenbasis(parts, self._kernel_product)

    def _kernel_product(self, vector: Tensor) -> Tensor:
        """Kernel matrix times a vector (R,), from one pullback and one product: no matrix is formed."""
        lifted = self._subset().lift(vector)
        rows = (torch.einsum("md,mdp->p", lifted[some], part.double()) for some, part in self._held_jacobians())
        return self._project_weights(torch.stack(list(rows)).sum(0, keepdim=True))[0]

    def _curvature_diagonal(self) -> Tensor:
        """The mean of the diagonal, shape (1,): the one prior precision needs no more."""
        return (self.H["values"].sum() / self.n_params).reshape(1)

    def _subset(self) -> HessianSubset:
        return HessianSubset(self.H["inputs"], self.H["factor"], self.H["coupled"])

    def _embed(self, x: Inputs) -> tuple[Tensor, Any]:
        """Raw outputs (B, D), and what a pullback needs of the points."""
        return self.backend.encoder(x)(x), x

    def _kernel(self, left: Any, right: Any) -> Tensor:
        """``J J^T`` between points in float64, shape (A, D, B, D): the posterior is a difference of such numbers."""
        pullback = self.backend.pullback(left)
        rows = []
        for _, some in self._jacobians(pullback, left):
            mine = some.double()
            others = (jacobian.double() for _, jacobian in self._jacobians(pullback, right))
            rows.append(torch.cat([torch.einsum("adp,bep->adbe", mine, other) for other in others], dim=2))
        return torch.cat(rows)

    def _jacobians(self, pullback: Any, context: Any) -> Iterator[tuple[slice, Tensor]]:
        """Jacobians (B, D, P) of points, in chunks of bounded size."""
        dim, n = self._encoder_dim(), input_length(context)
        axes = torch.eye(dim, dtype=self._dtype, device=self._device)
        step = max(1, JACOBIAN_ELEMENTS // (dim * pullback.width))
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            part = pullback.slice_context(context, rows)
            yield rows, pullback.vjp(part, axes.expand(rows.stop - start, -1, -1))

    def _refuse_infinite(self, context: Any) -> None:
        """Name the layer whose Jacobian is not finite at the chosen points."""
        pullback = self.backend.pullback(context)
        for rows, jacobian in self._jacobians(pullback, context):
            where = f"the points {rows.start} to {rows.stop - 1} of those that stand for the data"
            check_finite(jacobian.abs().sum((0, 1)), pullback, where)

    def _held_jacobians(self) -> Iterator[tuple[slice, Tensor]]:
        inputs = self._subset().inputs
        pullback = self.backend.pullback(inputs)
        return self._jacobians(pullback, self._embed(inputs)[1])

    def _project_weights(self, weights: Tensor) -> Tensor:
        """``A w`` for weights (S, P)."""
        with evaluation_mode(self.model), torch.no_grad():
            jacobians = (jacobian.double() for _, jacobian in self._held_jacobians())
            parts = [torch.einsum("mdp,sp->smd", jacobian, weights.double()) for jacobian in jacobians]
        return self._subset().project(torch.cat(parts, dim=1))


def _warn_of_point(subset: HessianSubset, kernel: Tensor) -> None:
    """Warn where one of the chosen points carries most of ``tr(S^T K S)``; the kernel has shape (M, D, M, D)."""
    points = torch.arange(kernel.shape[0], device=kernel.device)
    own = kernel[points, :, points, :]
    parts = torch.einsum("mdr,mde,mer->m", subset.factor, own, subset.factor)
    share = float(parts.max() / parts.sum()) if bool(parts.sum() > 0) else 0.0
    if len(parts) >= FEWEST_POINTS and share > MOST:
        warn_of_point(share, f"point {int(parts.argmax())} of the chosen ones", "of the points that stand for the data")


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
