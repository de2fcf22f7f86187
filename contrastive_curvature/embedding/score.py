"""The score that p-values compare: the novelty, the uncertainty, or a function of the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.codec import NOT_SAVED
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.known import NOVELTY, UNCERTAINTY
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError
from contrastive_curvature.fit.class_centres import ClassCentres
from contrastive_curvature.network.digest import same_encoder, summary

_PROBES = 8
"""Made-up embeddings whose scores tell one function from another."""

_APART = 1e-3
"""Relative difference of these scores above which a function is another one, and not on another device."""


@dataclass(frozen=True, eq=False)
class Score:
    """The score that a calibration compares.

    Attributes:
        name: ``"novelty"``, ``"uncertainty"``, or the name of a function.
        by_class: Whether inputs are compared only with inputs of the same predicted class.
        marks: Summary of the typical norm and the class centres that scores depend on; ``None`` if they depend on none.
        probe: The function's scores of made-up embeddings, float64, shape (8,).
        function: The function; ``None`` for the two names, and after loading until :meth:`given`.
    """

    name: str = NOVELTY
    by_class: bool = False
    marks: Tensor | None = None
    probe: Tensor | None = None
    function: Callable[[EmbeddingDistribution], Any] | None = field(default=None, metadata=NOT_SAVED)

    def __str__(self) -> str:
        """Name of the score, and whether it is by class."""
        return f"{self.name} by class" if self.by_class else self.name

    @classmethod
    def chosen(cls, example: EmbeddingDistribution, score: Any, by_class: bool) -> Score:
        """Build the score that a user chose; ``example`` is :func:`made_up` for the posterior."""
        validate.flag("by_class", by_class)
        if by_class and example._class_centres is None:
            hint = "Fit with the labels of two classes or more, or call la.measure_classes(loader)."
            raise UnsupportedError("by_class=True", "a posterior with class centres", "one without", hint)
        if not callable(score):
            validate.choice("score", score, (NOVELTY, UNCERTAINTY))
            marks = _marks(example) if by_class or score != NOVELTY else None
            return cls(score, by_class, marks)
        name = getattr(score, "__name__", "<lambda>")
        if name in ("<lambda>", NOVELTY, UNCERTAINTY):
            wanted = "a function with a name of its own, under which it is saved"
            raise InputTypeError("score", wanted, repr(score), "Write def my_score(embedding): ...")
        return cls(name, by_class, _marks(example), called(name, score, example), score)

    def given(self, example: EmbeddingDistribution, function: Any) -> Score:
        """Return this score with its function, which the user passes again after loading."""
        name = getattr(function, "__name__", None)
        if self.probe is None or name != self.name:
            wanted = f"the function {self.name!r}" if self.probe is not None else "none: the score needs no function"
            raise InputError("score", f"{wanted}, as la was calibrated", repr(name or function))
        score = replace(self, function=function)
        score._check_function(example)
        return score

    def check(self, embedding: EmbeddingDistribution) -> None:
        """Refuse an embedding whose score would differ from the calibrated one."""
        if self.marks is not None:
            now = _marks(embedding)
            if not torch.allclose(now[:2], self.marks[:2], rtol=1e-9) or not same_encoder(now[2:], self.marks[2:]):
                raise NotFittedError(
                    f"p_value: la was calibrated for {self} with other class centres or another typical norm. Call "
                    "la.calibrate(loader, ...) again."
                )
        if self.probe is not None:
            mean = embedding.raw_mean.detach()
            like = mean.to(torch.promote_types(mean.dtype, torch.float32))
            self._check_function(made_up(like, embedding._typical_norm, embedding._class_centres))

    def of(self, embedding: EmbeddingDistribution) -> Tensor:
        """Return the scores of embeddings, float64, shape (B,); not for the novelty."""
        if self.function is None:
            return embedding.uncertainty.detach().double()
        return called(self.name, self.function, embedding)

    def classes(self, embedding: EmbeddingDistribution) -> Tensor | None:
        """Return the index of the nearest class centre as a number, float64, shape (B,); ``None`` unless by class."""
        if not self.by_class:
            return None
        centres = embedding._class_centres
        assert centres is not None
        return centres.nearest(embedding.raw_mean.detach()).double()

    def _check_function(self, example: EmbeddingDistribution) -> None:
        assert self.probe is not None
        if self.function is None:
            raise NotFittedError(
                f"p_value: la was calibrated for the function {self.name!r}, which no file holds. Give it again: "
                f"la.set_score({self.name})."
            )
        now = called(self.name, self.function, example).cpu()
        if float((now - self.probe).abs().max()) > _APART * float(self.probe.abs().max()):
            raise NotFittedError(
                f"p_value: the function {self.name!r} gives other scores than at the calibration; has its gallery "
                f"changed? Call la.calibrate(loader, score={self.name}) again."
            )


def called(name: str, function: Callable[[EmbeddingDistribution], Any], embedding: EmbeddingDistribution) -> Tensor:
    """Return a user's function of embeddings: finite numbers, float64, shape (B,).

    The function cannot use p-values or the novelty, because p-values will be computed from it.
    """
    with torch.no_grad():
        scores = function(embedding._changed(embedding.raw_mean, embedding.spread, None))
    scores = scores if isinstance(scores, Tensor) else torch.as_tensor(scores, device="cpu")
    scores = scores.detach().double()
    if scores.shape != (len(embedding),) or not bool(scores.isfinite().all()):
        shown = "NaN or infinity" if scores.shape == (len(embedding),) else f"shape {tuple(scores.shape)}"
        wanted = f"{len(embedding)} finite numbers, one an embedding"
        raise InputError(f"score: {name}(embedding)", wanted, shown)
    return scores.to(embedding.raw_mean.device)


def made_up(like: Tensor, typical_norm: float | None, centres: ClassCentres | None) -> EmbeddingDistribution:
    """Return made-up embeddings in the dimension, dtype and device of ``like`` (B, D), equal in every process."""
    dim, size = like.shape[1], typical_norm or 1.0
    wave = (1.7 * torch.arange(1, _PROBES * dim + 1, dtype=torch.float64, device="cpu")).sin().view(_PROBES, dim)
    mean = (wave * size * (2 / dim) ** 0.5).to(like)
    variance = torch.full_like(mean, 0.01 * size**2 / dim)
    return EmbeddingDistribution(mean, variance=variance).relative_to(typical_norm, centres)


def _marks(embedding: EmbeddingDistribution) -> Tensor:
    """Return typical norm, typical position between classes, and a summary of the centres; float64, shape (6,)."""
    centres = embedding._class_centres
    typical = [embedding._typical_norm or 0.0, 0.0 if centres is None else centres.typical]
    sums = [] if centres is None else [centres.sums]
    return torch.cat([torch.tensor(typical, dtype=torch.float64, device="cpu"), summary(sums)])
