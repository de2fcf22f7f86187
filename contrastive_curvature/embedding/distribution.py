"""The prediction of a Bayesian encoder for an input: a distribution over embeddings on the unit sphere."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Self

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.known import Comparison, check_alpha
from contrastive_curvature.embedding.spread import DenseSpread, DiagonalSpread, Joint, Samples, Spread, taken
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.class_centres import ClassCentres, between_classes, same_centres
from contrastive_curvature.hessian.sphere import normalize, norms
from contrastive_curvature.vmf.checks import unit
from contrastive_curvature.vmf.estimation import check_semidefinite, concentration_of_variance

_Arguments = ParamSpec("_Arguments")


class InvalidRowsError(InputError):
    """Some inputs of a batch have no finite embedding: ``rows``, booleans, shape (B,)."""

    def __init__(self, rows: Tensor, *message: str) -> None:
        super().__init__(*message)
        self.rows = rows

    def __reduce__(self) -> tuple[type[InvalidRowsError], tuple[Tensor, str]]:
        return type(self), (self.rows, str(self))


def turning_angle(
    tangential: Tensor,
    norm: Tensor,
    typical_norm: float | Tensor | None = None,
    between: Tensor | None = None,
    arctan: Callable[[Tensor], Tensor] = torch.arctan,
) -> Tensor:
    """Return ``arctan(sqrt(V / n^2) sqrt(t / n) b)``, shape (B,); see :attr:`EmbeddingDistribution.uncertainty`.

    ``tangential`` is ``V / n^2``, float64, shape (B,), and ``between`` the factor ``b`` for the position between
    classes. A missing typical norm ``t`` or a missing ``b`` makes its factor 1. ``arctan`` replaces ``torch.arctan`` in
    runtimes that lack it.
    """
    # Divide first: either norm may be near the limits of its dtype.
    square = tangential if typical_norm is None else tangential * (typical_norm / norm)
    if square.requires_grad:
        # The root of a spread of zero has no derivative.
        certain = square == 0
        angle = torch.where(certain, 0, torch.where(certain, 1, square).sqrt())
    else:
        angle = square.sqrt()
    return arctan(angle if between is None else angle * between)


def _of_valid_rows(
    answer: Callable[Concatenate[EmbeddingDistribution, _Arguments], Tensor],
) -> Callable[Concatenate[EmbeddingDistribution, _Arguments], Tensor]:
    """Compute an answer (B, ...) for the valid rows; a row of NaN (``on_invalid="nan"``) gets NaN, or false."""

    @functools.wraps(answer)
    def run(self: EmbeddingDistribution, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> Tensor:
        if not self._has_invalid:
            return answer(self, *args, **options)
        valid = ~self.raw_mean.isnan().any(1)
        answers = answer(self[valid], *args, **options)
        missing = False if answers.dtype == torch.bool else torch.nan
        out = answers.new_full((len(valid), *answers.shape[1:]), missing)
        out[valid] = answers
        return out

    return run


class Polar(NamedTuple):
    """Means in polar coordinates and the spread around them, float64.

    Attributes:
        direction: Unit vectors ``u`` of the means, shape (B, D).
        norm: Norms of the means, shape (B,).
        total: Traces of the covariances, shape (B,).
        radial: ``u^T Cov u``, shape (B,).
        directed: Whether no mean is zero; a mean of zero has no direction, and its ``u`` is zero.
        finite: True only if all means and spreads are finite and no mean is zero.
    """

    direction: Tensor
    norm: Tensor
    total: Tensor
    radial: Tensor
    directed: bool
    finite: bool


class EmbeddingDistribution:
    """Distribution of B embeddings on the sphere; :attr:`mu` and :attr:`kappa` are its von Mises-Fisher summary.

    ``mean, covariance = distribution`` unpacks the Gaussian over the raw outputs.

    Built from a Gaussian over the raw outputs (closed form), or from samples of the raw outputs (:meth:`from_samples`).
    ``len(distribution)`` is B, and ``distribution[rows]`` selects embeddings; ``EmbeddingDistribution.cat``
    concatenates several distributions, and ``.to(...)`` and ``.cpu()`` move one.

    Args:
        raw_mean: Mean of the raw outputs, shape (B, D), D >= 2.
        variance: Variances of the raw outputs, shape (B, D), for a diagonal covariance.
        covariance: Covariances of the raw outputs, shape (B, D, D).
        joint_covariance: Covariance of all raw outputs together, shape (B D, B D). Give exactly one of ``variance``,
            ``covariance`` and ``joint_covariance``.
        typical_norm: Typical norm of the encoder's raw outputs, positive, for :attr:`uncertainty`; a posterior passes
            the mean norm over its training inputs.

    Attributes:
        raw_mean: Mean of the raw outputs, shape (B, D), not normalised; :attr:`mu` has norm 1.

    Raises:
        InputTypeError: An argument is not a floating-point tensor.
        InputError: Not exactly one of the three spreads is passed; a shape, dtype or device disagrees; an entry is not
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
        spreads = {"variance": variance, "covariance": covariance, "joint_covariance": joint_covariance}
        names = [name for name, value in spreads.items() if value is not None]
        if len(names) != 1:
            raise InputError(", ".join(spreads), "exactly one", str(names or "none"))
        n, dim = validate.tensor("raw_mean", raw_mean, ("B", "D")).shape
        if dim < 2:
            raise InputError("raw_mean", "shape (B, D) with D >= 2", f"shape {tuple(raw_mean.shape)}")
        zero = (raw_mean.detach() == 0).all(1).nonzero().flatten()[:5].tolist()
        if zero:
            hint = "Zero has no direction."
            raise InputError("raw_mean", "rows that are not zero", f"zero rows {zero}", hint)
        shape = {"variance": (n, dim), "covariance": (n, dim, dim), "joint_covariance": (n * dim, n * dim)}[names[0]]
        checked = validate.tensor(names[0], spreads[names[0]], shape, raw_mean)
        spread: Spread = DiagonalSpread(checked)
        if variance is None:
            _check_semidefinite(names[0], checked)
            spread = Joint(checked.view(n, dim, n, dim)) if covariance is None else DenseSpread(checked)
        elif bool((variance < 0).any()):
            raise InputError("variance", "variances >= 0", f"a smallest variance of {float(variance.min())}")
        self._hold(raw_mean, spread)
        self.relative_to(typical_norm)

    def _hold(self, raw_mean: Tensor, spread: Spread) -> Self:
        self.raw_mean, self.spread = raw_mean, spread
        self._has_invalid = False
        self._polar: tuple[bool, Polar] | None = None
        self._compared: Comparison | None = None
        self._typical_norm: float | None = None
        self._class_centres: ClassCentres | None = None
        return self

    @classmethod
    def trusted(cls, raw_mean: Tensor, spread: Spread) -> EmbeddingDistribution:
        """Build a distribution without checking symmetry and sign, for the library's own posteriors.

        A covariance that is a small difference of large matrices could fail these checks by rounding alone, and the
        checks would decompose matrices in every prediction.
        """
        out = cls.__new__(cls)._hold(raw_mean, spread)
        # A joint covariance also has entries between different outputs, which the polar coordinates do not show.
        certain = not isinstance(spread, Joint) and out.polar().finite
        if not certain and bool((bad := ~spread.finite()).any()):
            hint = "The prior precision or the temperature may be too small, or an input's Jacobian too large."
            got = f"NaN or infinity in rows {bad.nonzero().flatten()[:5].tolist()}"
            raise InvalidRowsError(bad, f"la(x): {spread.kind}", "finite numbers", got, hint)
        return out

    @classmethod
    def from_samples(cls, samples: Tensor) -> EmbeddingDistribution:
        """Summarise samples of raw outputs.

        Args:
            samples: Shape (S, B, D), S >= 2; sample s comes from one network for all B inputs.

        Returns:
            A distribution whose ``mu`` and ``kappa`` are estimated from the normalised samples (Sra 2012; paper, Eq.
            42-43), and whose :meth:`raw_samples` returns these samples.

        Raises:
            InputTypeError: ``samples`` is not a floating-point tensor.
            InputError: The shape is wrong, there are fewer than two samples, or an entry is not finite.
        """
        validate.tensor("samples", samples, ("S", "B", "D"))
        if samples.shape[0] < 2 or samples.shape[2] < 2:
            hint = "Sample s comes from one network for all inputs, as la.functional_samples(x, joint=True) gives them."
            wanted = "shape (S, B, D) with S >= 2 and D >= 2"
            raise InputError("samples", wanted, f"shape {tuple(samples.shape)}", hint)
        return cls.__new__(cls)._hold(samples.mean(0), Samples(samples.transpose(0, 1).contiguous()))

    def relative_to(self, typical_norm: float | None, class_centres: ClassCentres | None = None) -> Self:
        """Set the typical norm and the class centres that :attr:`uncertainty` uses, and return this object.

        Args:
            typical_norm: Typical norm of the raw outputs; ``None`` for none.
            class_centres: Centres of the training classes; ``None`` for none.

        Raises:
            InputTypeError: The norm is not a number.
            InputError: The norm is not positive.
        """
        if typical_norm is not None:
            validate.number("typical_norm", typical_norm, positive=True)
        self._typical_norm, self._class_centres = typical_norm, class_centres
        return self

    @property
    @_of_valid_rows
    def mu(self) -> Tensor:
        """Mean directions on the sphere, shape (B, D)."""
        if isinstance(self.spread, Samples):
            return self.spread.directions()[0]
        return self._directed().direction.to(self.raw_mean.dtype)

    @property
    @_of_valid_rows
    def kappa(self) -> Tensor:
        """Concentrations, shape (B,): in closed form to second order in the spread, or estimated from the samples."""
        if isinstance(self.spread, Samples):
            return self.spread.directions()[1]
        return concentration_of_variance(self.tangential_variance, self.raw_mean.shape[1])

    @property
    @_of_valid_rows
    def uncertainty(self) -> Tensor:
        """How far the embedding may turn: an angle in radians, in [0, pi / 2].

        Use it to rank embeddings: the larger the angle, the less certain the direction, and the more often the nearest
        neighbour is of another class. It does not say whether the encoder knows this kind of input; :attr:`p_value`
        does.

        It is ``arctan(sqrt(V / n^2) sqrt(t / n) exp(3 (r - r_t)))`` with the variance ``V`` tangential to the mean, the
        norm ``n`` of the mean and the typical norm ``t``. ``arctan(sqrt(V) / n)`` is the angle by which a step of
        length ``sqrt(V)`` turns a vector of length ``n``, so networks of the posterior typically turn the embedding by
        this angle. The other two factors are empirical, and about 1 for typical inputs (``docs/defaults.md``).
        ``sqrt(t / n)``: training gives short outputs to inputs that it places badly, and the posterior does not know
        this. ``exp(3 (r - r_t))``: an embedding between two classes has a wrong neighbour more often than an embedding
        near a class centre. ``r``, at most 0.85, is the distance to the nearest centre divided by the distance to the
        second; ``r_t`` is its mean in training, where each input is left out of its own centre. Without a typical norm,
        or without class centres, the factor is 1.
        """
        centres, polar = self._class_centres, self._directed()
        between = None
        if centres is not None:
            ratio = centres.ratio_of_units(polar.direction.to(self.raw_mean.dtype))
            between = between_classes(ratio, centres.typical)
        return turning_angle(self._tangential(), polar.norm, self._typical_norm, between).to(self.raw_mean.dtype)

    @property
    @_of_valid_rows
    def uncertainty_error(self) -> Tensor:
        """Standard error of :attr:`uncertainty`, radians, shape (B,): zero, unless ``n_samples`` samples estimate it.

        The samples of a batch have the same weights, so the errors of its inputs depend on each other.
        """
        relative = self.spread.relative_error(self._directed().direction)
        return (torch.sin(2 * self.uncertainty.double()) / 4 * relative).to(self.raw_mean.dtype)

    @property
    @_of_valid_rows
    def tangential_variance(self) -> Tensor:
        """Variance perpendicular to the mean, divided by the mean's squared norm, in squared radians, shape (B,)."""
        return self._tangential().to(self.raw_mean.dtype)

    def _tangential(self) -> Tensor:
        """Return :attr:`tangential_variance` in float64."""
        _, norm, total, radial, *_ = self._directed()
        if not self.spread.semidefinite:
            rounding = 64 * self.raw_mean.shape[1] * torch.finfo(self.raw_mean.dtype).eps * total.detach()
            check_semidefinite(total - radial, radial, rounding)
        # Divide twice, because the square of a norm can underflow or overflow.
        return ((total - radial) / norm / norm).clamp(0, torch.finfo(torch.float64).max)

    def polar(self) -> Polar:
        """Return the directions and norms of the means, and the spread along them; most answers follow from these."""
        with_graph = torch.is_grad_enabled()
        if self._polar is None or (with_graph and not self._polar[0]):
            mean, double = self.raw_mean, torch.float64
            # No square of a float32 overflows in float64.
            norm = norms(mean) if mean.dtype == double else torch.linalg.vector_norm(mean, dim=1, dtype=double)
            direction = mean / norm.unsqueeze(1)
            total, radial = self.spread.across(direction)
            # Only one synchronisation with the device: a norm of zero or any number that is not finite makes this sum
            # not finite.
            finite = math.isfinite(torch.addcdiv(norm, total - radial, norm).sum().item())
            directed = finite or not bool((norm == 0).any())
            if not directed:
                # A mean of zero has no direction, so its whole spread counts as tangential.
                direction = mean / torch.where(norm > 0, norm, 1).unsqueeze(1)
                total, radial = self.spread.across(direction)
            self._polar = with_graph, Polar(direction, norm, total, radial, directed, finite)
        return self._polar[1]

    def _directed(self) -> Polar:
        """Return :meth:`polar`; raise if a mean is zero."""
        polar = self.polar()
        if not polar.directed:
            # The error of ``unit`` says how many means are zero.
            unit("raw_mean", self.raw_mean)
        return polar

    @property
    @_of_valid_rows
    def covariance(self) -> Tensor:
        """Covariance of the raw outputs, shape (B, D, D)."""
        return self.spread.covariance

    @property
    @_of_valid_rows
    def variance(self) -> Tensor:
        """Variances of the raw outputs, shape (B, D)."""
        return self.spread.variance

    @property
    def joint_covariance(self) -> Tensor:
        """Covariance of all raw outputs together, shape (B D, B D).

        Raises:
            UnsupportedError: The prediction was requested without ``joint=True``.
        """
        return self.spread.joint_covariance

    def raw_samples(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw raw outputs.

        Args:
            n_samples: Number S of samples.
            generator: Random generator on the device of the mean; torch's default one if not given.

        Returns:
            Shape (S, B, D). A distribution with a joint covariance, or built from samples, gives outputs of one network
            for all inputs in each sample (for an exception see :meth:`cat`); any other distribution draws every input
            independently from its own marginal.

        Raises:
            InputTypeError: ``generator`` is not a ``torch.Generator``.
            InputError: ``n_samples`` is not a positive whole number, or exceeds the number of samples that the
                distribution was built from; or ``generator`` lives on another device.
        """
        validate.count("n_samples", n_samples)
        validate.generator(generator, self.raw_mean.device)
        return self._samples_by_row(n_samples, generator).transpose(0, 1)

    @_of_valid_rows
    def _samples_by_row(self, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return self.spread.sample(self.raw_mean, n_samples, generator).transpose(0, 1)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw embeddings: :meth:`raw_samples`, each divided by its norm. Shape (S, B, D)."""
        return normalize(self.raw_samples(n_samples, generator))[0]

    @property
    @_of_valid_rows
    def novelty(self) -> Tensor:
        """How much an input differs from the known inputs (larger: more), without a unit, float64, shape (B,).

        It ranks inputs in the reverse order of :attr:`p_value`. It also ranks inputs that are further out than all
        known inputs, which all have the same p-value. :func:`contrastive_curvature.embedding.known.components` defines
        its parts. The posterior of a last layer needs no calibration for it.

        Raises:
            UnsupportedError: This is not a plain prediction ``la(x)``.
            NotFittedError: The posterior was not calibrated, and had no training inputs to compare with.
        """
        self._compared = self._asked("novelty").measured(self)
        return self._compared.novelty()

    @property
    @_of_valid_rows
    def p_value(self) -> Tensor:
        """Conformal p-values of "the encoder knows this kind of input", float64, shape (B,), in (0, 1].

        A p-value is the share of the known inputs and the input itself that score at least as high as the input. At
        most a share alpha of new known inputs has a p-value of at most alpha (``la.calibrate``), so a small p-value
        says "unknown". Before ``la.calibrate(loader)``, the posterior of a last layer compares with inputs of its fit,
        and one :class:`OptimisticPValueWarning` says that this is optimistic.

        Raises:
            UnsupportedError: This is not a plain prediction ``la(x)``.
            NotFittedError: When it made this prediction, the posterior was not calibrated and had no training inputs to
                compare with, or was calibrated for another prior precision, temperature or encoder.
        """
        self._compared = self._asked("p_value").scored(self)
        return self._compared.p_value()

    @_of_valid_rows
    def is_known(self, alpha: float = 0.01) -> Tensor:
        """Return whether the encoder knows this kind of input: ``p_value > alpha``.

        Args:
            alpha: Share of known inputs that may be flagged, in (0, 1).

        Returns:
            Booleans, shape (B,).

        Raises:
            InputTypeError: ``alpha`` is not a number.
            InputError: ``alpha`` is not in (0, 1), or too small for the number of calibration inputs.
            UnsupportedError: As for :attr:`p_value`.
            NotFittedError: As for :attr:`p_value`.
        """
        check_alpha(alpha)
        self._compared = self._asked("is_known").scored(self)
        self._compared.known.check_alpha(alpha)
        return self._compared.p_value() > alpha

    def to_pandas(self, mu: bool = False) -> Any:
        """Return a pandas table with one row for each embedding: ``embedding.to_pandas().describe()``.

        Args:
            mu: Whether the mean directions are columns too, ``mu_0``, ``mu_1`` and so on.

        Returns:
            A ``pandas.DataFrame`` with the columns ``uncertainty`` and ``kappa``; also ``novelty`` and ``p_value`` if
            the posterior is calibrated, or ``novelty`` alone if it has only training inputs to compare with.

        Raises:
            InputTypeError: ``mu`` is not a bool.
            UnsupportedError: pandas is not installed.
            NotFittedError: See :attr:`p_value`: the posterior was calibrated for another prior precision, temperature
                or encoder.
        """
        validate.flag("mu", mu)
        try:
            import pandas as pd  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise UnsupportedError("to_pandas", "the package pandas", "none installed", "pip install pandas") from None
        names = ["uncertainty", "kappa", *([] if self._compared is None else self._compared.known.names)]
        columns = {name: getattr(self, name) for name in names}
        if mu:
            columns |= {f"mu_{axis}": column for axis, column in enumerate(self.mu.T)}
        # NumPy has no bfloat16.
        wide = {name: c.detach().cpu().to(torch.promote_types(c.dtype, torch.float32)) for name, c in columns.items()}
        return pd.DataFrame({name: column.numpy() for name, column in wide.items()})

    def _asked(self, question: str) -> Comparison:
        if self._compared is None:
            raise UnsupportedError(
                f"{question}: only a plain prediction la(x) of a fitted posterior can be compared with known inputs. A "
                "distribution that was built by hand, from samples or with joint=True or diagonal_output=True, and a "
                "concatenation with one of these or of predictions of two states of a posterior cannot. Call "
                f"la(x).{question}."
            )
        return self._compared

    def _measured(self) -> Comparison | None:
        """Return ``_compared`` with the components of the embeddings."""
        return self._compared if self._compared is None or self._compared.known.empty else self._compared.measured(self)

    def _fixed(self) -> Comparison | None:
        """Return ``_compared`` with all numbers computed."""
        if self._compared is None or not self._has_invalid:
            return None if self._compared is None else self._compared.fixed(self)
        valid = ~self.raw_mean.isnan().any(1)
        good = self[valid]
        return good._asked("p_value").fixed(good).of_rows(torch.where(valid, valid.cumsum(0) - 1, -1))

    def __len__(self) -> int:
        """Number B of embeddings."""
        return len(self.raw_mean)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield mean and covariance of the raw outputs, in the shapes that a regression of laplace-torch returns.

        (B, D) and (B, D, D); of samples or variances (B, D) and (B, D); of a joint covariance (B D,) and (B D, B D).
        For single embeddings, use indices.
        """
        if isinstance(self.spread, Joint):
            return iter((self.raw_mean.flatten(), self.joint_covariance))
        narrow = type(self.spread) in (DiagonalSpread, Samples)
        return iter((self.raw_mean, self.variance if narrow else self.covariance))

    def __getitem__(self, rows: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> Self:
        """Return the distribution of the selected embeddings; ``p_value`` and all other attributes still work.

        Args:
            rows: An integer (for a distribution of one embedding), a slice, or a list or tensor of integers or of B
                booleans.

        Raises:
            InputTypeError: ``rows`` has another type.
            IndexError: There is no such row.
        """
        every = torch.arange(len(self), device=self.raw_mean.device)
        if isinstance(rows, slice):
            return self._select(every[list(range(len(self)))[rows]])
        index = torch.as_tensor(rows, device=every.device)
        if not index.numel():
            index = index.long()
        is_mask = index.dtype == torch.bool
        if isinstance(rows, tuple) or index.ndim > 1 or not torch.can_cast(index.dtype, torch.int64):
            wanted = "an integer, a slice, or a list or tensor of integers or booleans"
            raise InputTypeError("index", wanted, repr(rows))
        if is_mask and index.shape != every.shape:
            raise InputError("index", f"{len(every)} booleans, one an embedding", tuple(index.shape))
        return self._select(every[index if is_mask else index.long()].reshape(-1))

    def _select(self, rows: Tensor) -> Self:
        """Return the embeddings with these numbers, int64, shape (N,); -1 is a row of NaN."""
        compared = None if self._compared is None else self._compared.of_rows(rows)
        return self._changed(taken(self.raw_mean, rows), self.spread.rows(rows), compared)

    @classmethod
    def cat(cls, distributions: Sequence[EmbeddingDistribution]) -> EmbeddingDistribution:
        """Concatenate distributions, for example of all batches, as ``torch.cat`` concatenates tensors.

        Args:
            distributions: One or more, of one kind (``variance``, covariances, or samples of the same number), one
                dimension D, dtype and device.

        Returns:
            The distribution of all their embeddings, in order. ``uncertainty``, ``p_value`` and ``novelty`` keep their
            values; the latter two raise an error if a part is not a plain prediction ``la(x)``, or if the parts come
            from different states of a posterior. Sample s of concatenated samples comes from one network only if all
            parts were drawn with the same seed; ``mu`` and ``kappa`` do not depend on this.

        Raises:
            InputTypeError: The argument is not a sequence of distributions.
            InputError: There are no distributions; or kind, dimension, dtype, device, typical norm or class centres
                differ.
            UnsupportedError: The parts hold joint covariances; covariances between the parts are unknown.
        """
        parts = [] if isinstance(distributions, EmbeddingDistribution) else list(distributions)
        if not parts or not all(isinstance(part, EmbeddingDistribution) for part in parts):
            wanted = "a list of EmbeddingDistributions, such as [la(x) for x in batches]"
            raise InputTypeError("distributions", wanted, f"a {type(distributions).__name__}")
        first, *others = parts
        for number, part in enumerate(others, 1):
            for what, has, now in (
                ("kind of spread", first.spread.kind, part.spread.kind),
                ("dimension", first.raw_mean.shape[1], part.raw_mean.shape[1]),
                ("dtype", first.raw_mean.dtype, part.raw_mean.dtype),
                ("device", first.raw_mean.device, part.raw_mean.device),
                ("typical_norm", first._typical_norm, part._typical_norm),
            ):
                if has != now:
                    wanted = f"parts of one {what}, that of the first, {has}"
                    raise InputError(f"distributions[{number}]", wanted, now)
            if isinstance(part.spread, Joint):
                raise UnsupportedError(
                    "distributions: joint covariances cannot be concatenated, because between the parts there is none. "
                    "Call la(x, joint=True) with all inputs at once, or leave out joint=True."
                )
            if not same_centres(first._class_centres, part._class_centres):
                hint = "The uncertainties of the parts were compared with different ones."
                raise InputError(f"distributions[{number}]", "the class centres of the first", "others", hint)
        scored = any(part._compared is not None and part._compared.scores is not None for part in parts)
        compared = Comparison.joined([part._fixed() if scored else part._measured() for part in parts])
        mean = torch.cat([part.raw_mean for part in parts])
        out = first._changed(mean, first.spread.cat([part.spread for part in others]), compared)
        out._has_invalid = any(part._has_invalid for part in parts)
        return out

    def to(
        self, device: torch.device | str | int | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return the same distribution on another device or in another dtype, as ``torch.Tensor.to`` does.

        ``p_value``, ``novelty`` and ``is_known`` do not change. In another dtype all other results are computed from
        the rounded mean and spread.

        Args:
            device: The device; or the dtype.
            dtype: A floating-point dtype; ``None`` keeps the present one.

        Raises:
            InputTypeError: The dtype is not a floating-point dtype.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputTypeError("dtype", "a floating-point dtype", f"{dtype!r}")
        compared = self._compared if dtype in (None, self.raw_mean.dtype) else self._fixed()
        mean = self.raw_mean.to(device=device, dtype=dtype)
        compared = None if compared is None else compared.to(mean.device)
        return self._changed(mean, self.spread.to(mean.device, dtype), compared)

    def cpu(self) -> Self:
        """Return the same distribution on the CPU."""
        return self.to("cpu")

    def _changed(self, raw_mean: Tensor, spread: Spread, compared: Comparison | None) -> Self:
        out = type(self).__new__(type(self))
        out.__dict__.update(self.__dict__)
        out.raw_mean, out.spread, out._compared, out._polar = raw_mean, spread, compared, None
        return out

    def __repr__(self) -> str:
        """Number and dimension of the embeddings, and the kind of the distribution."""
        n, dim = self.raw_mean.shape
        gaussian = {"variance": "Gaussian", "covariance": "Gaussian", "joint_covariance": "joint Gaussian"}
        text = f"{n} embeddings in {dim} dimensions, from {gaussian.get(self.spread.kind, self.spread.kind)}"
        missing = int(self.raw_mean.isnan().any(1).sum())
        return f"EmbeddingDistribution({text}{f', {missing} of them NaN' if missing else ''})"

    if not TYPE_CHECKING:  # a type checker then refuses ``mean`` itself

        @property
        def mean(self) -> Tensor:
            """Refuse: ``mean`` could be either :attr:`raw_mean` or :attr:`mu`."""
            raise AttributeError(
                "an embedding has no 'mean': use raw_mean (the encoder's output, norm as it is) or mu (norm 1)"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle: the numbers for :attr:`p_value`, but no data of training inputs."""
        compared = self._fixed()
        plain = None if compared is None else replace(compared, known=compared.known.plain())
        return {**self.__dict__, "_compared": plain, "_polar": None}


def with_invalid_rows(good: EmbeddingDistribution, valid: Tensor) -> EmbeddingDistribution:
    """Return B embeddings: those of ``good`` where ``valid`` (B,) is true, rows of NaN elsewhere."""
    valid = valid.to(good.raw_mean.device)
    out = good._select(torch.where(valid, valid.cumsum(0) - 1, -1))
    out._has_invalid = not bool(valid.all())
    return out


def _check_semidefinite(name: str, matrices: Tensor) -> None:
    """Raise for matrices (..., D, D) that are not symmetric positive semidefinite up to the rounding of sums."""
    matrices, eps = matrices.detach(), torch.finfo(matrices.dtype).eps
    if not matrices.numel():
        return
    if matrices.dtype in (torch.float16, torch.bfloat16):
        matrices = matrices.float()
    dim = matrices.shape[-1]
    rounding = eps**0.5 + 16 * dim * eps
    size = matrices.abs().amax((-2, -1), keepdim=True)
    # Scale first: products of very large or very small entries would overflow or underflow.
    scaled = matrices / torch.where(size > 0, size, 1)
    apart = (scaled - scaled.mT).abs().amax((-2, -1))
    if bool((apart > rounding).any()):
        worst = float((apart * size.flatten().view_as(apart)).max())
        got, hint = f"entries that differ from the transposed ones by {worst:.3g}", "Pass (V + V.mT) / 2."
        raise InputError(name, "a symmetric matrix", got, hint)
    eye = torch.eye(dim, dtype=scaled.dtype, device=scaled.device)
    failed = torch.linalg.cholesky_ex((scaled + scaled.mT) / 2 + 2 * rounding * eye).info != 0
    if bool(failed.any()):
        where = f" at rows {failed.nonzero().flatten()[:5].tolist()}" if failed.ndim else ""
        raise InputError(name, "a positive semidefinite matrix", f"one with a negative eigenvalue{where}")
