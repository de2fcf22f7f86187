"""What a Bayesian encoder says of an input: a distribution over embeddings on the unit sphere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastive_curvature import vmf
from contrastive_curvature.embedding_checks import (
    check_all_finite,
    check_draw,
    check_floats,
    check_mean,
    check_semidefinite,
    check_spread,
)
from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.vmf._checks import unit

__all__ = ["EmbeddingDistribution", "gaussian_samples"]


class EmbeddingDistribution:
    """Distribution of B embeddings on the sphere; ``mu, kappa = distribution`` unpacks its von Mises-Fisher summary.

    Made from a Gaussian over the raw outputs (closed form), or from samples of them (:meth:`from_samples`).

    Args:
        mean: Mean of the raw outputs, shape (B, D), D >= 2.
        variance: Their variances, shape (B, D), when the covariance is diagonal.
        covariance: Their covariances, shape (B, D, D). Exactly one of the three spreads is given.
        joint_covariance: Covariance of all raw outputs together, shape (B D, B D).

    Attributes:
        mean: Mean of the raw outputs, shape (B, D).

    Raises:
        InputTypeError: Something is no tensor of floats.
        InputError: None or several of the spreads are given; a shape, dtype or device disagrees; something is not
            finite, a row of the mean is zero, a variance negative, or a covariance not symmetric positive semidefinite
            beyond rounding.
    """

    def __init__(
        self,
        mean: Tensor,
        *,
        variance: Tensor | None = None,
        covariance: Tensor | None = None,
        joint_covariance: Tensor | None = None,
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
        check_mean(mean)
        if variance is not None:
            check_spread("variance", variance, mean, mean.shape)
            if bool((variance < 0).any()):
                raise InputError(expected("variance", "variances >= 0", f"a smallest one of {float(variance.min())}"))
        elif covariance is not None:
            check_spread("covariance", covariance, mean, (*mean.shape, mean.shape[1]))
            check_semidefinite("covariance", covariance)
        elif joint_covariance is not None:
            check_spread("joint_covariance", joint_covariance, mean, (mean.numel(), mean.numel()))
            check_semidefinite("joint_covariance", joint_covariance)
        self._keep(mean, variance, covariance, joint_covariance)

    def _keep(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, joint_covariance: Tensor | None
    ) -> None:
        self.mean = mean
        self._variance = variance
        self._joint = joint_covariance
        self._samples: Tensor | None = None
        if joint_covariance is not None:
            n, dim = mean.shape
            points = torch.arange(n, device=mean.device)
            covariance = joint_covariance.view(n, dim, n, dim)[points, :, points, :]
        self._covariance = covariance

    @classmethod
    def trusted(
        cls,
        mean: Tensor,
        *,
        variance: Tensor | None = None,
        covariance: Tensor | None = None,
        joint_covariance: Tensor | None = None,
    ) -> EmbeddingDistribution:
        """The same without the checks of symmetry and sign: for posteriors, whose spreads fail them by rounding alone.

        A covariance that is a difference of large matrices has the rounding of those, which no tolerance relative to
        its own size allows for. And a prediction should not cost a decomposition.

        Args:
            mean: Shape (B, D), finite.
            variance: As in the constructor.
            covariance: As in the constructor.
            joint_covariance: As in the constructor.

        Raises:
            InputError: The spread is not finite.
        """
        for name, spread in (
            ("variance", variance),
            ("covariance", covariance),
            ("joint_covariance", joint_covariance),
        ):
            if spread is not None and not bool(spread.detach().isfinite().all()):
                hint = "The prior precision or the temperature may be too small, or an input's Jacobian too large."
                raise InputError(expected(f"la(x): {name}", "finite numbers", "NaN or infinity", hint))
        out = cls.__new__(cls)
        out._keep(mean, variance, covariance, joint_covariance)
        return out

    @classmethod
    def from_samples(cls, samples: Tensor) -> EmbeddingDistribution:
        """Summarise samples of raw outputs.

        Args:
            samples: Shape (S, B, D), S >= 2; sample s comes from one network for all B inputs.

        Returns:
            A distribution whose ``mu`` and ``kappa`` are those of the normalised samples (Sra 2012; paper, Eq. 42-43),
            and whose samples are these.

        Raises:
            InputTypeError: No tensor of floats.
            InputError: Another shape, fewer than two samples, or not finite.
        """
        hint = "Sample s comes from one network for all B inputs, as la.functional_samples(x, joint=True) gives them."
        wanted = "shape (S, B, D) with S >= 2 and D >= 2"
        check_floats("samples", samples, wanted)
        if samples.ndim != 3 or samples.shape[0] < 2 or samples.shape[2] < 2:
            raise InputError(expected("samples", wanted, f"shape {tuple(samples.shape)}", hint))
        check_all_finite("samples", samples)
        out = cls.__new__(cls)
        # The covariance waits until somebody asks: of very large outputs it is no number any more.
        out._keep(samples.mean(0), None, None, None)
        out._samples = samples
        return out

    @property
    def mu(self) -> Tensor:
        """Mean directions on the sphere, shape (B, D)."""
        return self._summary[0]

    @property
    def kappa(self) -> Tensor:
        """Concentrations, shape (B,); in closed form to second order in the spread, or estimated from samples."""
        return self._summary[1]

    @property
    def uncertainty(self) -> Tensor:
        """The scalar to rank and to threshold by, shape (B,): ``E|z| - |E z|``, in units of the raw outputs.

        How much length raw embeddings lose when they are averaged over the posterior; zero when all networks agree on
        the direction. For the Gaussian it is ``tr(P V P) / (2 n)`` to second order, which is ``n / 2`` times the
        tangential variance that ``kappa`` is made of. It therefore still sees how far an input drives the outputs,
        which the angle alone forgets; ``1 / kappa`` is the purely angular score. Comparable within one encoder.
        """
        if self._samples is not None:
            samples, mean, scale = self._scaled_samples()
            return (samples.norm(dim=2).mean(0) - mean.norm(dim=1)).clamp(min=0) * scale
        u, n = unit("mean", self.mean)
        # n times the variance is that of a unit mean with V / n: without the square of n, which may leave the numbers.
        if self._variance is not None:
            return vmf.tangential_variance(u, variance=self._variance / n.unsqueeze(1)) / 2
        return vmf.tangential_variance(u, covariance=self.covariance / n[:, None, None]) / 2

    @property
    def tangential_variance(self) -> Tensor:
        """Variance across the mean direction over the squared norm, shape (B,), in squared radians."""
        if self._variance is not None:
            return vmf.tangential_variance(self.mean, variance=self._variance)
        if self._samples is not None:
            samples, mean, _ = self._scaled_samples()
            return vmf.tangential_variance(mean, covariance=sample_covariance(samples))
        return vmf.tangential_variance(self.mean, covariance=self._covariance)

    @property
    def covariance(self) -> Tensor:
        """Covariance of the raw outputs, shape (B, D, D)."""
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
        return self.covariance.diagonal(dim1=1, dim2=2)

    @property
    def joint_covariance(self) -> Tensor:
        """Covariance of all raw outputs together, shape (B D, B D).

        Raises:
            UnsupportedError: Only marginal distributions were asked for.
        """
        if self._joint is None:
            msg = "joint_covariance: this distribution holds one marginal an input. Ask for la(x, joint=True)."
            raise UnsupportedError(msg)
        return self._joint

    def raw_samples(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw raw outputs.

        Args:
            n_samples: Number S of samples.
            generator: Source of randomness.

        Returns:
            Shape (S, B, D). With a joint covariance, or made from samples, a sample comes from the same weights for all
            inputs; else every input is drawn from its own marginal.

        Raises:
            InputTypeError: ``generator`` is no ``torch.Generator``.
            InputError: ``n_samples`` is no positive whole number, or more than there are, when made from samples; or
                ``generator`` is another device's.
        """
        check_draw(n_samples, generator, self.mean.device)
        if self._samples is not None:
            if n_samples > self._samples.shape[0]:
                hint = "This distribution was made from them; ask for more when predicting."
                raise InputError(expected("n_samples", f"at most {self._samples.shape[0]}", n_samples, hint))
            return self._samples[:n_samples]
        if self._joint is not None:
            flat = gaussian_samples(self.mean.reshape(1, -1), None, self._joint.unsqueeze(0), n_samples, generator)
            return flat.view(n_samples, *self.mean.shape)
        return gaussian_samples(self.mean, self._variance, self._covariance, n_samples, generator)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw embeddings: :meth:`raw_samples`, projected on the sphere. Shape (S, B, D)."""
        raw = self.raw_samples(n_samples, generator)
        return normalize(raw.flatten(0, 1))[0].view_as(raw)

    def __iter__(self) -> Iterator[Tensor]:
        """``mu`` and ``kappa``."""
        return iter((self.mu, self.kappa))

    def __len__(self) -> int:
        """Two, for ``mu`` and ``kappa``: what unpacking gives."""
        return 2

    def __repr__(self) -> str:
        """Sizes only."""
        n, dim = self.mean.shape
        kind = "samples" if self._samples is not None else "joint Gaussian" if self._joint is not None else "Gaussian"
        return f"EmbeddingDistribution({n} embeddings in {dim} dimensions, from {kind})"

    def _scaled_samples(self) -> tuple[Tensor, Tensor, Tensor]:
        """Samples (S, B, D) and their mean (B, D) over the largest entry of each input, and that entry (B,)."""
        if self._samples is None:
            msg = "this distribution was not made from samples"
            raise TypeError(msg)
        scale = self._samples.detach().abs().amax((0, 2))
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        samples = self._samples / scale.unsqueeze(1)
        return samples, samples.mean(0), scale

    @property
    def _summary(self) -> tuple[Tensor, Tensor]:
        if self._samples is not None:
            return vmf.fit(self._samples)
        mu = normalize(self.mean)[0]
        if self._variance is not None:
            return mu, vmf.concentration_from_gaussian(self.mean, variance=self._variance)
        return mu, vmf.concentration_from_gaussian(self.mean, covariance=self._covariance)


def sample_covariance(samples: Tensor) -> Tensor:
    """Covariance (B, D, D) of samples (S, B, D)."""
    centred = (samples - samples.mean(0)).permute(1, 2, 0)
    return centred @ centred.mT / (samples.shape[0] - 1)


def gaussian_samples(
    mean: Tensor, variance: Tensor | None, covariance: Tensor | None, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Draw from independent Gaussians.

    Args:
        mean: Shape (B, D).
        variance: Shape (B, D), or ``None``.
        covariance: Shape (B, D, D), positive semidefinite (it may be singular), or ``None``.
        n_samples: Number S of samples.
        generator: Source of randomness.

    Returns:
        Shape (S, B, D).
    """
    noise = torch.randn(n_samples, *mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
    if covariance is None:
        if variance is None:
            msg = "a variance or a covariance is needed"
            raise TypeError(msg)
        return mean + noise * variance.sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return mean + torch.einsum("bde,sbe->sbd", root, noise)
