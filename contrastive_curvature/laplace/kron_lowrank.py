"""``hessian_structure="kron_lowrank"``: Kronecker factors of the last layer at any number of features."""

from __future__ import annotations

from typing import Any

import torch
from laplace.lllaplace import LLLaplace
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.laplace.forms import KronLowRankForm
from contrastive_curvature.laplace.kron_lowrank_precision import KronLowRankPrecision
from contrastive_curvature.laplace.last_layer import LastLayerLaplace
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.output_spread import AxesSpread
from contrastive_curvature.laplace.prediction import check_joint_size, joint_distribution
from contrastive_curvature.network.full_precision import full_precision
from contrastive_curvature.options import Structure


class _KronLowRankHost(LLLaplace):
    """The algebra of a posterior with such a precision, in the form that laplace-torch's classes have."""

    _key: tuple[str, ...] = ("last_layer", "kron_lowrank", CONTRASTIVE, "host")

    H: Any

    @property
    def posterior_precision(self) -> KronLowRankPrecision:
        self._check_H_init()
        return KronLowRankPrecision(self.H, self._H_factor, self.prior_precision)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        return self.posterior_precision.logdet().to(self._dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        return self.posterior_precision.logdet_ratio().to(self._dtype)

    @full_precision
    def square_norm(self, value: Tensor) -> Tensor:
        delta = value - self.mean
        return delta @ self.posterior_precision.bmm(delta)

    def functional_variance(self, Js: Tensor) -> Tensor:
        return self.posterior_precision.inv_square_form(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        return self.posterior_precision.inv_square_form(Js.flatten(0, 1).unsqueeze(0)).squeeze(0)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        like = {"device": self._device, "dtype": self._dtype}
        noise = torch.randn(n_samples, self.n_params, generator=generator, **like)
        return self.mean + self.posterior_precision.bmm(noise, -0.5)


class ContrastiveKronLowRankLLLaplace(LastLayerLaplace, _KronLowRankHost):
    """Last linear layer, Kronecker-factored precision whose input factor is of low rank with an isotropic rest.

    The precision is ``G (x) A / T + prior`` with the curvature factor ``G`` (D, D) and the input factor ``A = Q diag(l)
    Q^T + rho (I - Q Q^T)`` (F, F). ``Q`` and ``l`` are leading eigenvectors and eigenvalues of the mean ``phi phi^T``
    of the features, ``rho`` the mean of its other eigenvalues, as in probabilistic principal component analysis
    (Tipping and Bishop, 1999). ``fit`` takes the two passes over the data that all structures take and stores O(F R)
    numbers, from a sketch of ``A`` (Tropp et al., 2017); prediction is in closed form at O(F R) a point. At full rank
    it is :class:`~contrastive_curvature.laplace.ContrastiveKronLLLaplace`, which ``rank="full"`` takes.

    See :class:`~contrastive_curvature.laplace.ContrastiveKronLaplace` for the fixes ``full`` and
    ``positive``.

    ``backend_kwargs=dict(rank=...)`` sets the rank R. By default all eigenvectors of up to 2,048 features are kept; of
    more features, the smallest number that leaves at most 1 % of the trace of ``A`` that the first eigenvector leaves,
    and at most 64.
    """

    _key = ("last_layer", "kron_lowrank", CONTRASTIVE)
    structure = Structure.KRON
    prior_structures = ("scalar", "layerwise")
    takes_rank = True

    @property
    def form(self) -> KronLowRankForm:  # type: ignore[override]
        """Kronecker factors with a sketched input factor."""
        return KronLowRankForm(self.curvature_options.rank)

    @property
    def rank(self) -> int:
        """Number of eigenvectors of the input factor that the posterior keeps.

        Raises:
            NotFittedError: Before ``fit``.
        """
        self.check_fitted()
        return int(self.H.rank)

    def _state(self) -> dict[str, Any]:
        # The curvature as it was before its decomposition.
        state = super()._state()
        return {**state, "H": state["H_raw"]}

    def _gaussian(self, x: Any, joint: bool, diagonal: bool) -> EmbeddingDistribution:
        if not joint:
            return super()._gaussian(x, joint, diagonal)
        z, phi = self._features(x)
        check_joint_size(len(z), z.shape[1], 0)
        return joint_distribution(z, self.posterior_precision.joint_covariance(phi))

    def _make_spread(self) -> AxesSpread:
        return self.posterior_precision.output_spread()
