"""``optimize_prior_precision`` for embeddings: a principled default, and the host's own methods."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from laplace.utils.enums import PredType
from torch import Tensor
from tqdm import tqdm

from contrastive_curvature import metrics
from contrastive_curvature.arguments import check_count, check_flag
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace.checks import (
    check_number,
    check_prior_precision,
)
from contrastive_curvature.laplace.host import Host
from contrastive_curvature.laplace.prior import STRENGTH, PriorMethod, average_information
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.loader import check_batches, check_whole

__all__ = ["PRIOR_STRUCTURES", "PriorTuning", "RetrievalCriterion", "parse_pred_type"]

RetrievalCriterion = Callable[[Tensor, Tensor], float]
"""``criterion(samples (S, N, D) on the sphere, labels (N,)) -> float``, the lower the better."""


PRIOR_STRUCTURES = ("scalar", "layerwise", "diag")


def parse_pred_type(value: PredType | str) -> PredType:
    """Turn ``"glm"`` or ``"nn"`` into the host's enumeration.

    Raises:
        InputError: Neither of them.
    """
    try:
        return PredType(value)
    except ValueError:
        raise InputError(expected("pred_type", "'glm' or 'nn'", value)) from None


def _grid(low: float, high: float, size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Values that a grid search tries, shape (size,)."""
    check_count("grid_size", size)
    check_number("log_prior_prec_min", low, most=1e3)
    check_number("log_prior_prec_max", high, most=1e3)
    check_number("log_prior_prec_base", base, positive=True, most=1e30)
    grid = torch.logspace(low, high, size, base=base)
    if not bool(((grid.to(dtype) > 0) & grid.isfinite()).all()):
        wanted = f"exponents whose powers of {base:g} are positive and finite"
        raise InputError(expected("log_prior_prec_min, log_prior_prec_max", wanted, f"{low} and {high}"))
    return grid


class PriorTuning(Host):
    """Part of the contrastive mixin that chooses the prior.

    Attributes:
        prior_structures: What ``prior_structure`` may be.
        cost: Value of the contrastive loss over the data, each repelling pair counted from the margin (from the largest
            distance, 2, without one), so that it is never negative.
    """

    prior_structures: ClassVar[tuple[str, ...]] = PRIOR_STRUCTURES
    cost: Tensor | float
    temperature: float
    prior_precision: Any
    _temperature_given: bool

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: PriorMethod | str = PriorMethod.AVERAGE_INFORMATION,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: RetrievalCriterion | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 17,
        link_approx: object = None,
        n_samples: int = 30,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        strength: float | None = None,
    ) -> None:
        """Choose the prior precision.

        Args:
            pred_type: For ``"gridsearch"``: ``"glm"`` or ``"nn"`` samples.
            method: ``"average_information"`` (default): ``strength`` times the mean diagonal of the curvature, see
                :func:`~contrastive_curvature.laplace.prior.average_information`; unless the object was made with a
                temperature, that is set too, to the mean loss of a point (the maximum-likelihood scale when the losses
                of points are read as exponential). ``"unit_information"``: the mean divided by the number of
                points, the temperature left alone. ``"marglik"``: laplace-torch's maximisation of the marginal
                likelihood.
                ``"gridsearch"``: minimise ``loss`` on ``val_loader``.
            n_steps: Steps of ``"marglik"``.
            lr: Learning rate of ``"marglik"``.
            init_prior_prec: Start of ``"marglik"``.
            prior_structure: ``"scalar"``, ``"layerwise"`` or ``"diag"``.
            val_loader: Validation data of ``"gridsearch"``, batches ``(x, labels)``.
            loss: Criterion of ``"gridsearch"``, :data:`RetrievalCriterion`; the default is the Brier score of
                1-nearest-neighbour votes of sampled networks, :func:`contrastive_curvature.metrics.retrieval_brier`.
            log_prior_prec_min: Lower end of the grid, as an exponent.
            log_prior_prec_max: Upper end.
            grid_size: Number of values.
            link_approx: Of no effect; the host passes it.
            n_samples: Sampled networks of ``"gridsearch"``.
            verbose: Whether to print the result.
            progress_bar: Whether to show a progress bar.
            log_prior_prec_base: Base of the grid.
            strength: Of ``"average_information"``, a positive number; ``None`` for
                :data:`~contrastive_curvature.laplace.prior.STRENGTH`. A weaker prior detects unknown inputs better, a
                stronger one ranks known ones better (``docs/defaults.md``).

        Raises:
            InputError: An option is unknown, out of range or of no use to the method, or ``"gridsearch"`` has no
                validation data.
            NotFittedError: Before ``fit``.
        """
        self._check_sampling(n_samples, None)
        linearized = parse_pred_type(pred_type) is PredType.GLM
        check_flag("verbose", verbose)
        check_flag("progress_bar", progress_bar)
        try:
            method = PriorMethod(method)
        except ValueError:
            known = ", ".join(repr(m.value) for m in PriorMethod)
            raise InputError(expected("method", f"one of {known}", method)) from None
        if strength is not None and method is not PriorMethod.AVERAGE_INFORMATION:
            hint = "It is for method='average_information'."
            raise InputError(expected(f"strength for {method.value!r}", "None", strength, hint))
        if strength is not None:
            check_number("strength", strength, positive=True)
        if prior_structure not in PRIOR_STRUCTURES:
            raise InputError(expected("prior_structure", f"one of {PRIOR_STRUCTURES}", prior_structure))
        if prior_structure not in self.prior_structures:
            msg = (
                f"prior_structure={prior_structure!r}: this structure of the posterior has room for "
                f"{self.prior_structures} only. Use one of these, or hessian_structure='diag'."
            )
            raise UnsupportedError(msg)
        if method is PriorMethod.MARGLIK:
            self._maximise(n_steps, lr, init_prior_prec, prior_structure, progress_bar)
        elif method is PriorMethod.GRIDSEARCH:
            grid = _grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base, self._dtype)
            if val_loader is None:
                raise InputError(expected("val_loader", "validation data for method='gridsearch'", None))
            if prior_structure != "scalar":
                hint = "Use method='unit_information' or 'marglik' for others."
                raise InputError(expected("prior_structure", "'scalar' for method='gridsearch'", prior_structure, hint))
            if loss is not None and not callable(loss):
                wanted = "a callable (samples, labels) -> float"
                raise InputTypeError(expected("loss", wanted, f"a {type(loss).__name__}"))
            check_batches(val_loader, "val_loader")
            check_whole(val_loader, "val_loader")
            criterion = loss or metrics.retrieval_brier
            self.prior_precision = self._search(grid, val_loader, criterion, linearized, n_samples, progress_bar)
        else:
            self._weigh(method, prior_structure, strength)
        if verbose:
            tqdm.write(f"Prior precision: {self.prior_precision}")

    def _maximise(self, n_steps: int, lr: float, start: float | Tensor, prior_structure: str, progress: bool) -> None:
        """laplace-torch's maximisation of the marginal likelihood."""
        check_count("n_steps", n_steps)
        check_number("lr", lr, positive=True, most=1e30)
        check_prior_precision(start, self._dtype, self._prior_sizes(), "init_prior_prec")
        host: Any = super()
        before = self.prior_precision
        try:
            host.optimize_prior_precision(
                PredType.GLM, "marglik", n_steps, float(lr), start, prior_structure, progress_bar=progress
            )
        except InputError as error:
            self.prior_precision = before
            wanted = "a maximisation that stays among positive finite numbers"
            hint = "Use a smaller lr, or method='average_information'."
            raise InputError(expected("lr, n_steps, init_prior_prec", wanted, f"({error})", hint)) from None
        except BaseException:
            self.prior_precision = before
            raise

    def _weigh(self, method: PriorMethod, prior_structure: str, strength: float | None) -> None:
        """The closed forms: as strong as the data on the average weight, times a number."""
        prior = average_information(self._curvature_diagonal(), self._parameter_sizes(), prior_structure)
        factor, before = 1 / self.n_data, self.temperature
        if method is PriorMethod.AVERAGE_INFORMATION:
            factor = STRENGTH if strength is None else float(strength)
            if not self._temperature_given and float(self.cost) > 0:
                self.temperature = float(self.cost) / self.n_data
        try:
            self.prior_precision = factor * self._H_factor * prior
        except InputError:
            self.temperature = before
            raise

    def _search(
        self,
        grid: Tensor,
        loader: Iterable[Any],
        criterion: RetrievalCriterion,
        linearized: bool,
        n_samples: int,
        progress: bool,
    ) -> Tensor:
        contexts, labels = [], []
        for batch in loader:
            x, y = self.backend.read(batch)
            contexts.append(self._sampling_context(x))
            labels.append(y)
        if not contexts:
            raise InputError(expected("val_loader", "at least one batch", "an empty loader"))
        targets = torch.cat(labels)
        before = self.prior_precision
        best: tuple[float, Tensor] | None = None
        try:
            best = self._best(grid, contexts, targets, criterion, linearized, n_samples, progress)
        finally:
            if best is None:
                self.prior_precision = before
        if best is None:
            raise InputError(expected("loss", "a criterion that is a number somewhere on the grid", "NaN everywhere"))
        return best[1].reshape(1)

    def _best(
        self,
        grid: Tensor,
        contexts: list[Any],
        targets: Tensor,
        criterion: RetrievalCriterion,
        linearized: bool,
        n_samples: int,
        progress: bool,
    ) -> tuple[float, Tensor] | None:
        best: tuple[float, Tensor] | None = None
        for value in tqdm(grid, desc="[prior grid]", disable=not progress):
            self.prior_precision = value
            # The same random numbers for every value, so that the criterion compares priors and not draws.
            generator = torch.Generator(self._device).manual_seed(0)
            samples = []
            for theta in self._weights(n_samples, generator):
                raw = torch.cat([self._outputs_at(context, theta, linearized) for context in contexts], dim=1)
                samples.append(normalize(raw.flatten(0, 1))[0].view_as(raw))
            found = criterion(torch.cat(samples), targets)
            try:
                score = float(found)
            except (TypeError, ValueError, RuntimeError):
                raise InputTypeError(expected("loss", "a number from it", f"a {type(found).__name__}")) from None
            if not math.isnan(score) and (best is None or score < best[0]):
                best = (score, value)
        return best

    @abstractmethod
    def _curvature_diagonal(self) -> Tensor:
        """Diagonal of the clamped curvature, without the likelihood factor, shape (P,)."""

    @abstractmethod
    def _check_sampling(self, n_samples: object, generator: object) -> None:
        """Raise ``NotFittedError`` before ``fit``, and refuse malformed arguments."""

    @abstractmethod
    def _prior_sizes(self) -> set[int] | None:
        """Numbers of prior precisions that there is room for."""

    @abstractmethod
    def _sampling_context(self, x: Inputs) -> Any:
        """What sampled weights are applied to."""

    @abstractmethod
    def _weights(self, n_samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Sampled weights in chunks."""

    @abstractmethod
    def _outputs_at(self, context: Any, theta: Tensor, linearized: bool) -> Tensor:
        """Raw outputs at given weights."""

    def _parameter_sizes(self) -> list[int]:
        return [p.numel() for p in self.params]
