"""The prediction of a Bayesian encoder for an input: a distribution over embeddings on the unit sphere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contrastive_curvature import vmf
from contrastive_curvature.embedding.axis_covariance import AxisCovariance
from contrastive_curvature.embedding.checks import (
    InvalidRowsError,
    check_all_finite,
    check_draw,
    check_floats,
    check_mean,
    check_semidefinite,
    check_spread,
    check_typical_norm,
)
from contrastive_curvature.embedding.known import Judge
from contrastive_curvature.embedding.p_values import EmbeddingKnown
from contrastive_curvature.embedding.rows import EmbeddingRows
from contrastive_curvature.embedding.samples import gaussian_samples, sample_covariance
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.vmf._checks import unit
from contrastive_curvature.vmf.gaussian import concentration

__all__ = ["EmbeddingDistribution"]


class EmbeddingDistribution(EmbeddingRows, EmbeddingKnown):
    """Distribution of B embeddings on the sphere; ``mu, kappa = distribution`` unpacks its von Mises-Fisher summary.

    Built from a Gaussian over the raw outputs (closed form), or from samples of the raw outputs (:meth:`from_samples`).
    ``len(distribution)`` is B, ``distribution[rows]`` the distribution of some of the embeddings;
    ``EmbeddingDistribution.cat`` puts several together, and ``.to(...)`` and ``.cpu()`` move one.

    Args:
        raw_mean: Mean of the raw outputs, shape (B, D), D >= 2.
        variance: Variances of the raw outputs, shape (B, D), for a diagonal covariance.
        covariance: Covariances of the raw outputs, shape (B, D, D).
        joint_covariance: Covariance of all raw outputs together, shape (B D, B D). Give exactly one of ``variance``,
            ``covariance`` and ``joint_covariance``.
        typical_norm: Typical norm of the encoder's raw outputs, positive, for :attr:`uncertainty`; predictions of a
            posterior have the mean over its training inputs.

    Attributes:
        raw_mean: Mean of the raw outputs, shape (B, D), its norm as the encoder gives it. :attr:`mu` has norm 1;
            there is no ``mean``, which could be either.

    Raises:
        InputTypeError: An argument is not a floating-point tensor.
        InputError: Not exactly one of the three spreads is given; a shape, dtype or device disagrees; an entry is not
            finite; a row of the mean is zero; a variance is negative; a covariance is not symmetric positive
            semidefinite, beyond rounding; or the typical norm is not positive.
    """

    def __init__(
        self,
        raw_mean: Tensor,
        *,
        variance: Tensor | None = None,
        covariance: Tensor | None = None,
        joint_covariance: Tensor | None = None,
        typical_norm: float | None = None,
    ) -> None:
        given = [
            name
            for name, value in (
                ("variance", variance),
                ("covariance", covariance),
                ("joint_covariance", joint_covariance),
            )
            if value is not None
        ]
        if len(given) != 1:
            raise InputError(expected("variance, covariance, joint_covariance", "exactly one", str(given or "none")))
        check_mean(raw_mean)
        if variance is not None:
            check_spread("variance", variance, raw_mean, raw_mean.shape)
            if bool((variance < 0).any()):
                raise InputError(
                    expected("variance", "variances >= 0", f"a smallest variance of {float(variance.min())}")
                )
        elif covariance is not None:
            check_spread("covariance", covariance, raw_mean, (*raw_mean.shape, raw_mean.shape[1]))
            check_semidefinite("covariance", covariance)
        elif joint_covariance is not None:
            check_spread("joint_covariance", joint_covariance, raw_mean, (raw_mean.numel(), raw_mean.numel()))
            check_semidefinite("joint_covariance", joint_covariance)
        self._store(raw_mean, variance, covariance, joint_covariance)
        self.relative_to(typical_norm)

    def _store(
        self,
        raw_mean: Tensor,
        variance: Tensor | None,
        covariance: Tensor | AxisCovariance | None,
        joint_covariance: Tensor | None,
    ) -> None:
        self.raw_mean = raw_mean
        self._variance = variance
        self._joint = joint_covariance
        self._samples: Tensor | None = None
        self._judge: Judge | None = None
        self._typical_norm: float | None = None
        self._class_centres: ClassCentres | None = None
        if joint_covariance is not None:
            n, dim = raw_mean.shape
            points = torch.arange(n, device=raw_mean.device)
            covariance = joint_covariance.view(n, dim, n, dim)[points, :, points, :]
        # Their dense form is made when it is asked for.
        self._axes = covariance if isinstance(covariance, AxisCovariance) else None
        self._covariance = None if isinstance(covariance, AxisCovariance) else covariance

    @classmethod
    def trusted(
        cls,
        raw_mean: Tensor,
        *,
        variance: Tensor | None = None,
        covariance: Tensor | AxisCovariance | None = None,
        joint_covariance: Tensor | None = None,
    ) -> EmbeddingDistribution:
        """Build a distribution without checking symmetry and sign, for the library's own posteriors.

        Rounding alone could fail these checks: a covariance computed as a difference of large matrices has the rounding
        errors of the large matrices, which a tolerance relative to the small difference does not cover. The checks
        would also need a matrix decomposition for every prediction.

        Args:
            raw_mean: Mean of the raw outputs, shape (B, D), finite.
            variance: Variances of the raw outputs, shape (B, D).
            covariance: Covariances of the raw outputs, shape (B, D, D), or their parts.
            joint_covariance: Covariance of all raw outputs together, shape (B D, B D).

        Raises:
            InputError: The given spread is not finite.
        """
        for name, spread in (
            ("variance", variance),
            ("covariance", covariance),
            ("joint_covariance", joint_covariance),
        ):
            if spread is not None and not _is_finite(spread):
                bad = ~_finite_rows(spread, len(raw_mean))
                hint = "The prior precision or the temperature may be too small, or an input's Jacobian too large."
                received = f"NaN or infinity in rows {bad.nonzero().flatten()[:5].tolist()}"
                raise InvalidRowsError(expected(f"la(x): {name}", "finite numbers", received, hint), bad)
        out = cls.__new__(cls)
        out._store(raw_mean, variance, covariance, joint_covariance)
        return out

    @classmethod
    def from_samples(cls, samples: Tensor) -> EmbeddingDistribution:
        """Summarise samples of raw outputs.

        Args:
            samples: Shape (S, B, D), S >= 2; sample s comes from one network for all B inputs.

        Returns:
            A distribution whose ``mu`` and ``kappa`` are estimated from the normalised samples (Sra 2012; paper, Eq.
            42-43), and whose :meth:`raw_samples` returns the given samples.

        Raises:
            InputTypeError: ``samples`` is not a floating-point tensor.
            InputError: The shape is wrong, there are fewer than two samples, or an entry is not finite.
        """
        hint = "Sample s comes from one network for all B inputs, as la.functional_samples(x, joint=True) gives them."
        wanted = "shape (S, B, D) with S >= 2 and D >= 2"
        check_floats("samples", samples, wanted)
        if samples.ndim != 3 or samples.shape[0] < 2 or samples.shape[2] < 2:
            raise InputError(expected("samples", wanted, f"shape {tuple(samples.shape)}", hint))
        check_all_finite("samples", samples)
        out = cls.__new__(cls)
        # The covariance is computed on request only: for very large outputs it overflows.
        out._store(samples.mean(0), None, None, None)
        out._samples = samples
        return out

    def relative_to(
        self, typical_norm: float | None, class_centres: ClassCentres | None = None
    ) -> EmbeddingDistribution:
        """This object, with what :attr:`uncertainty` compares it with.

        Args:
            typical_norm: Typical norm of the raw outputs; ``None`` for none.
            class_centres: Centres of the classes of training; ``None`` for none.

        Raises:
            InputTypeError: The norm is no number.
            InputError: The norm is not positive.
        """
        check_typical_norm(typical_norm)
        self._typical_norm, self._class_centres = typical_norm, class_centres
        return self

    @property
    def mu(self) -> Tensor:
        """Mean directions on the sphere, shape (B, D)."""
        if self._samples is not None:
            return vmf.fit(self._samples)[0]
        # An output of zeros has none, which is an error here.
        unit("raw_mean", self.raw_mean)
        return normalize(self.raw_mean)[0]

    @property
    def kappa(self) -> Tensor:
        """Concentrations, shape (B,): in closed form to second order in the spread, or estimated from the samples."""
        if self._samples is not None:
            return vmf.fit(self._samples)[1]
        return concentration(self.tangential_variance, self.raw_mean.shape[1])

    @property
    def uncertainty(self) -> Tensor:
        """How far the embedding may turn: an angle in radians, in [0, pi / 2].

        Rank embeddings by it: the larger, the less certain is the direction, and the less likely is its nearest
        neighbour of its class. Whether an input is of a known kind is another question; ask :attr:`p_value`.

        It is ``arctan(sqrt(V / n^2) sqrt(t / n) exp(3 (r - r_t)))`` with the variance ``V`` tangential to the mean, the
        norm ``n`` of the mean and the typical norm ``t``. A step of length ``sqrt(V)`` across a vector of length ``n``
        turns it by ``arctan(sqrt(V) / n)``: so far do the networks of the posterior typically turn it. The other
        factors are empirical, and about 1 for typical inputs (``docs/defaults.md``). Training gives short outputs to
        inputs that it places badly, which the posterior does not know: ``sqrt(t / n)``. And an embedding between two
        classes has a wrong neighbour more often than one near a class centre: ``r``, at most 0.85, is the distance to
        the nearest centre over that to the second, and ``r_t`` its mean in training, where each input is left out of
        its own centre. Without a typical norm, and without class centres, these factors are 1.
        """
        # Finite numbers whose quotient overflows make NaN; such an output may point anywhere.
        spread = self.tangential_variance.nan_to_num(nan=torch.inf, posinf=torch.inf)
        # Where there is none, the root has no derivative.
        angle = torch.where(spread > 0, spread, 1).sqrt() * (spread > 0)
        if self._typical_norm is not None:
            # The quotient first: either norm may be near the limits of its dtype.
            angle = angle * (self._typical_norm / unit("raw_mean", self.raw_mean)[1]).sqrt()
        if self._class_centres is not None:
            angle = angle * self._class_centres.factor(self.raw_mean)
        return angle.arctan()

    @property
    def tangential_variance(self) -> Tensor:
        """Variance perpendicular to the mean, over the squared norm of the mean, shape (B,), in squared radians."""
        if self._variance is not None:
            return vmf.tangential_variance(self.raw_mean, variance=self._variance)
        if self._samples is not None:
            samples, mean, _ = self._scaled_samples()
            return vmf.tangential_variance(mean, covariance=sample_covariance(samples))
        if self._axes is not None:
            u, norm = unit("raw_mean", self.raw_mean)
            size, total, radial = self._axes.total_and_radial(u.double())
            # Divided twice, because the square of a tiny or huge norm underflows or overflows.
            return ((total - radial).clamp(min=0) * (size / norm / norm)).to(u.dtype)
        return vmf.tangential_variance(self.raw_mean, covariance=self._covariance)

    @property
    def covariance(self) -> Tensor:
        """Covariance of the raw outputs, shape (B, D, D)."""
        if self._axes is not None and self._covariance is None:
            self._covariance = self._axes.dense()
        if self._covariance is not None:
            return self._covariance
        if self._samples is not None:
            return sample_covariance(self._samples)
        return torch.diag_embed(self.variance)

    @property
    def variance(self) -> Tensor:
        """Variances of the raw outputs, shape (B, D)."""
        if self._variance is not None:
            return self._variance
        if self._axes is not None:
            return self._axes.variance()
        return self.covariance.diagonal(dim1=1, dim2=2)

    @property
    def joint_covariance(self) -> Tensor:
        """Covariance of all raw outputs together, shape (B D, B D).

        Raises:
            UnsupportedError: The prediction was requested without ``joint=True``.
        """
        if self._joint is None:
            msg = "joint_covariance: this distribution holds one marginal an input. Call la(x, joint=True)."
            raise UnsupportedError(msg)
        return self._joint

    def raw_samples(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw raw outputs.

        Args:
            n_samples: Number S of samples.
            generator: Random generator on the device of the mean; torch's default one if not given.

        Returns:
            Shape (S, B, D). A distribution with a joint covariance, or built from samples, gives outputs of one network
            for all inputs in each sample (:meth:`cat` says where one of parts does not); any other draws every input
            independently from its own marginal.

        Raises:
            InputTypeError: ``generator`` is not a ``torch.Generator``.
            InputError: ``n_samples`` is not a positive whole number, or exceeds the number of samples that the
                distribution was built from; or ``generator`` lives on another device.
        """
        check_draw(n_samples, generator, self.raw_mean.device)
        if self._samples is not None:
            if n_samples > self._samples.shape[0]:
                hint = "This distribution was built from those samples; request more of them in the prediction."
                raise InputError(expected("n_samples", f"at most {self._samples.shape[0]}", n_samples, hint))
            return self._samples[:n_samples]
        if self._joint is not None:
            flat = gaussian_samples(self.raw_mean.reshape(1, -1), None, self._joint.unsqueeze(0), n_samples, generator)
            return flat.view(n_samples, *self.raw_mean.shape)
        covariance = self.covariance if self._variance is None else None
        return gaussian_samples(self.raw_mean, self._variance, covariance, n_samples, generator)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw embeddings: :meth:`raw_samples`, each divided by its norm. Shape (S, B, D)."""
        raw = self.raw_samples(n_samples, generator)
        return normalize(raw.flatten(0, 1))[0].view_as(raw)

    def __repr__(self) -> str:
        """Number and dimension of the embeddings, and the kind of the distribution."""
        n, dim = self.raw_mean.shape
        kind = {"samples": "samples", "joint covariance": "joint Gaussian"}.get(self._kind, "Gaussian")
        return f"EmbeddingDistribution({n} embeddings in {dim} dimensions, from {kind})"

    if not TYPE_CHECKING:  # a type checker then refuses ``mean`` itself

        @property
        def mean(self) -> Tensor:
            """There is none: it could be either :attr:`raw_mean` or :attr:`mu`."""
            msg = "an embedding has no 'mean': use raw_mean (the encoder's output, norm as it is) or mu (norm 1)"
            raise AttributeError(msg)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but the posterior behind :attr:`p_value`, which holds the encoder."""
        return {**self.__dict__, "_judge": None}

    @property
    def _kind(self) -> str:
        """What the spread is given by."""
        if self._samples is not None:
            return "samples"
        if self._joint is not None:
            return "joint covariance"
        return "covariance" if self._variance is None else "variance"

    def _scaled_samples(self) -> tuple[Tensor, Tensor, Tensor]:
        """Samples (S, B, D) and their mean (B, D), both divided by each input's largest entry, and that entry (B,)."""
        if self._samples is None:
            msg = "this distribution was not built from samples"
            raise TypeError(msg)
        scale = self._samples.detach().abs().amax((0, 2))
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        samples = self._samples / scale.unsqueeze(1)
        return samples, samples.mean(0), scale


def _is_finite(spread: Tensor | AxisCovariance) -> bool:
    return spread.isfinite() if isinstance(spread, AxisCovariance) else bool(spread.detach().isfinite().all())


def _finite_rows(spread: Tensor | AxisCovariance, n: int) -> Tensor:
    """Which of n embeddings have finite variances, shape (n,); of a joint covariance, their own come first."""
    if isinstance(spread, AxisCovariance):
        return spread.variance().detach().isfinite().all(1)
    finite = spread.detach().isfinite()
    if spread.ndim != 2 or len(spread) == n:
        return finite.flatten(1).all(1)
    dim, points = len(spread) // n, torch.arange(n, device=spread.device)
    own = finite.view(n, dim, n, dim)[points, :, points].flatten(1).all(1)
    return own if not bool(own.all()) else finite.view(n, -1).all(1)
