"""The contrastive Laplace classes: one for every combination of weights and structure that laplace-torch offers.

Each has a ``_key`` of its own. laplace-torch looks classes up by ``(subset_of_weights, hessian_structure)`` among all
subclasses; an inherited key would replace laplace-torch's class for every user of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, LowRankLaplace
from laplace.lllaplace import DiagLLLaplace, FullLLLaplace, KronLLLaplace
from laplace.subnetlaplace import DiagSubnetLaplace, FullSubnetLaplace
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.laplace.advice import advise_on_norms
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.dense import DensePosterior
from contrastive_curvature.laplace.forms import DenseForm, DiagonalForm, EigenpairForm, KroneckerForm
from contrastive_curvature.laplace.last_layer import LastLayerLaplace
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.output_spread import AxesSpread, DenseSpread, DiagonalSpread
from contrastive_curvature.options import Structure
from contrastive_curvature.pairs.rows import Rows


class ContrastiveDiagLaplace(ContrastiveLaplace, DiagLaplace):
    """All parameters, diagonal precision; exact diagonal of the generalised Gauss-Newton, for every ``pd_fix``."""

    _key = ("all", "diag", CONTRASTIVE)
    structure = Structure.DIAG
    form = DiagonalForm()


class ContrastiveFullLaplace(ContrastiveLaplace, DensePosterior, FullLaplace):
    """All parameters, dense precision; exact generalised Gauss-Newton, for every ``pd_fix``."""

    _key = ("all", "full", CONTRASTIVE)
    structure = Structure.FULL
    form = DenseForm()


class _KroneckerFactors(ContrastiveLaplace):
    structure = Structure.KRON
    prior_structures = ("scalar", "layerwise")

    @property
    def form(self) -> KroneckerForm:  # type: ignore[override]
        """Kronecker factors, damped or not."""
        return KroneckerForm(self.damping)


class ContrastiveKronLaplace(_KroneckerFactors, KronLaplace):
    """All parameters, Kronecker-factored precision (K-FAC).

    The fixes ``full``, ``positive`` and ``ggn`` have cross terms between two points, which the factors leave out; the
    constructor says so.
    """

    _key = ("all", "kron", CONTRASTIVE)


class _LowRankHost(LowRankLaplace):
    """laplace-torch's low-rank algebra without its constructor, which asks for the package of an unused backend."""

    _key: tuple[str, ...] = ("all", "lowrank", CONTRASTIVE, "host")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(LowRankLaplace, self).__init__(*args, **kwargs)


class ContrastiveLowRankLaplace(ContrastiveLaplace, _LowRankHost):
    """All parameters, the leading eigenpairs of the generalised Gauss-Newton; every fix.

    ``backend_kwargs=dict(rank=...)`` says how many.
    """

    _key = ("all", "lowrank", CONTRASTIVE)
    structure = None  # type: ignore[assignment]
    fits_in_parts = False
    form = EigenpairForm()
    takes_rank = True

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool | None = None) -> None:
        """Fit; of a shuffling ``DataLoader`` the data set is taken in its own order, in every pass of Lanczos.

        Raises:
            InputError: No data, one point, no positive pair, batches in another order, or no positive eigenvalue.
            UnsupportedError: ``override=False``: eigenpairs of two data sets do not add up.
        """
        if override is False:
            msg = "override=False: eigenpairs of two data sets do not add up. Use hessian_structure='diag' or 'kron'."
            raise UnsupportedError(msg)
        self._begin(train_loader, override, progress_bar)
        result = self.backend.fit_lowrank(train_loader, progress_bar)
        if not result.curvature[1].numel():
            hint = "All negatives may lie inside the margin; use pd_fix='psd' or 'positive'."
            raise InputError(expected("train_loader", "data with a positive eigenvalue of the curvature", "none", hint))
        self.set_curvature(result)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` for weights (P,)."""
        self.check_weights(value)
        (vectors, values), prior = self.posterior_precision
        delta = value - self.mean
        return (values * (vectors.T @ delta).square()).sum() + (prior * delta.square()).sum()


class _Subnetwork(ContrastiveLaplace):
    """Chosen parameters; laplace-torch knows one prior precision for all of them, and one mean."""

    prior_structures = ("scalar",)

    def _check_subnetwork_indices(self, subnetwork_indices: Any) -> None:
        # laplace-torch takes indices on the CPU.
        moved = subnetwork_indices.cpu() if isinstance(subnetwork_indices, Tensor) else subnetwork_indices
        super()._check_subnetwork_indices(moved)

    def square_norm(self, value: Tensor) -> Tensor:
        """``(value - mean)^T P (value - mean)`` for the chosen weights, shape (K,)."""
        self.check_weights(value)
        delta, precision = value - self.mean_subnet, self.posterior_precision
        return delta @ (precision @ delta if precision.ndim == 2 else precision * delta)

    def _prior_mean_sizes(self) -> set[int] | None:
        return {1}

    def parameter_sizes(self) -> list[int]:
        """The number of chosen weights: a subnetwork is one part."""
        return [self.n_params_subnet]

    @property
    def n_weights(self) -> int:
        """Number of chosen weights."""
        return self.n_params_subnet


class ContrastiveDiagSubnetLaplace(_Subnetwork, DiagSubnetLaplace):
    """Chosen parameters, diagonal precision; exact, for every ``pd_fix``."""

    _key = ("subnetwork", "diag", CONTRASTIVE)
    structure = Structure.DIAG
    form = DiagonalForm()


class ContrastiveFullSubnetLaplace(_Subnetwork, DensePosterior, FullSubnetLaplace):
    """Chosen parameters, dense precision; exact, for every ``pd_fix``."""

    _key = ("subnetwork", "full", CONTRASTIVE)
    structure = Structure.FULL
    form = DenseForm()


class ContrastiveDiagLLLaplace(LastLayerLaplace, DiagLLLaplace):
    """Last linear layer, diagonal precision; curvature and prediction exact, in closed form, for every ``pd_fix``.

    ``fit`` warns (:class:`~contrastive_curvature.FeatureNormWarning`) where the variance says little more than the norm
    of the features.
    """

    _key = ("last_layer", "diag", CONTRASTIVE)
    structure = Structure.DIAG
    form = DiagonalForm()

    def _advise(self, features: Rows | None, diagonal: Tensor) -> None:
        if features is not None:
            weight, *bias = self.posterior_parameters()
            advise_on_norms(features.columns["features"], weight, bias[0] if bias else None, diagonal)

    def _make_spread(self) -> DiagonalSpread:
        return DiagonalSpread(self.posterior_variance, self.n_outputs)


class ContrastiveKronLLLaplace(_KroneckerFactors, LastLayerLaplace, KronLLLaplace):
    """Last linear layer, Kronecker-factored precision (K-FAC); prediction in closed form.

    See :class:`ContrastiveKronLaplace` for the fixes ``full`` and ``positive``.
    """

    _key = ("last_layer", "kron", CONTRASTIVE)

    def _make_spread(self) -> AxesSpread:
        """In the eigenbasis of ``G (x) A + delta I`` the variances are ``1 / (g_k a_f + delta)``."""
        precision = self.posterior_precision
        (axes, basis), (g, a) = precision.eigenvectors[0], precision.eigenvalues[0]
        delta, bias = precision.deltas[0], None
        damp = delta.sqrt()
        scale = torch.outer(g + damp, a + damp) if precision.damping else torch.outer(g, a) + delta
        if len(precision.eigenvalues) > 1:
            bias = precision.eigenvectors[1][0], 1 / (precision.eigenvalues[1][0] + precision.deltas[1])
        return AxesSpread.of(axes, basis, 1 / scale, None, bias)


class ContrastiveFullLLLaplace(LastLayerLaplace, DensePosterior, FullLLLaplace):
    """Last linear layer, dense precision; curvature and prediction exact, in closed form, for every ``pd_fix``."""

    _key = ("last_layer", "full", CONTRASTIVE)
    structure = Structure.FULL
    form = DenseForm()

    def _make_spread(self) -> DenseSpread:
        return DenseSpread(self.wide_covariance(), self.n_outputs)
