"""Is an embedding that of an input like the known ones? What a prediction answers, by its judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from contrastive_curvature.embedding.known import Judge
from contrastive_curvature.errors import UnsupportedError

if TYPE_CHECKING:
    from contrastive_curvature.embedding.distribution import EmbeddingDistribution

__all__ = ["EmbeddingKnown"]


class EmbeddingKnown:
    """The part of :class:`.EmbeddingDistribution` that compares its inputs with known ones."""

    _judge: Judge | None

    @property
    def novelty(self) -> Tensor:
        """How unlike the known inputs an input is, float64, shape (B,); larger is less like them, without a unit.

        It ranks inputs as :attr:`p_value` does, in reverse, and tells apart those that are further out than all known
        inputs, where p-values end. See :func:`contrastive_curvature.embedding.known.components` for what it
        is made of. The posterior of a last layer needs no calibration for it.

        Raises:
            UnsupportedError: This is no plain prediction ``la(x)``.
            NotFittedError: The posterior is not calibrated, and has no training inputs to compare with.
            InputError: The posterior has changed since this prediction.
        """
        return self._require_judge("novelty").novelty(self._this)

    @property
    def p_value(self) -> Tensor:
        """Conformal p-values of "this input is of the kind that the encoder knows", float64, shape (B,), in (0, 1].

        The share of known inputs, the input itself counted in, that are at least as unlike the others. Of new known
        inputs at most a share alpha has a p-value of at most alpha (``la.calibrate``), so a small one says "unknown".
        Before ``la.calibrate(loader)``, the posterior of a last layer compares with inputs of its fit and says once,
        with an :class:`OptimisticPValueWarning`, that this is optimistic.

        Raises:
            UnsupportedError: This is no plain prediction ``la(x)``.
            NotFittedError: The posterior is not calibrated and has no training inputs to compare with, or was
                calibrated for another prior precision, temperature or encoder.
            InputError: The posterior has changed since this prediction.
        """
        return self._require_judge("p_value").p_value(self._this)

    def is_known(self, alpha: float = 0.01) -> Tensor:
        """Whether inputs are of the kind that the encoder knows: ``p_value > alpha``.

        Args:
            alpha: Share of known inputs that may be flagged, in (0, 1).

        Returns:
            Booleans, shape (B,).

        Raises:
            InputTypeError: ``alpha`` is no number.
            InputError: ``alpha`` is not in (0, 1), or too small for the number of calibration inputs.
            UnsupportedError: As for :attr:`p_value`, like the following.
            NotFittedError: The posterior is not calibrated, or for another posterior.
        """
        return self._require_judge("is_known").is_known(self._this, alpha)

    def _require_judge(self, asked: str) -> Judge:
        if self._judge is None:
            msg = (
                f"{asked}: only a plain prediction la(x) of a fitted posterior can be compared with known inputs. A "
                "distribution that was built by hand, from samples or with joint=True or diagonal_output=True, a copy, "
                "and a concatenation with one of these or of predictions of two states of a posterior cannot. Call "
                f"la(x).{asked}."
            )
            raise UnsupportedError(msg)
        return self._judge

    @property
    def _this(self) -> EmbeddingDistribution:
        return cast("EmbeddingDistribution", self)
