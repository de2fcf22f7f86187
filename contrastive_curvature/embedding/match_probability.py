"""The calibrated probability that two embeddings belong to one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.codec import check_seal, sealed
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.match_regression import Regression
from contrastive_curvature.embedding.similarity import angle_variance
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_embeddings, check_tensor

_Embeddings = EmbeddingDistribution | Tensor

_VERSION = 4
"""Of the features, in saved states."""


class MatchProbability:
    """Probability that two embeddings belong to one class, fitted on labelled pairs.

    Use it for single pairs ("do these two photographs show one person?"): :meth:`fit_pairs`, then :meth:`same`. The
    best hit of a search is not like a random pair; for search use :class:`.Retriever`.

    It is a logistic regression (scikit-learn, features standardised) on the cosine. With ``use_uncertainty``, it also
    uses the log of the variance of the angle between the two, the product of this log and the cosine, and the logs of
    both uncertainties. At fixed uncertainties the probability never falls as the cosine grows. An uncertainty outside
    the range of the validation data counts as the end of that range.

    Fit it on data that the encoder was not trained on, with the same mixture as in later use: the same share of pairs
    of one class, and the same share of corrupted inputs.

    Args:
        use_uncertainty: If false, only the cosine is used, and plain tensors of embeddings are accepted too.
        curve: ``"logistic"`` or ``"isotonic"``, an isotonic regression on the logit, for at least a thousand pairs
            whose frequencies do not follow a logistic curve.

    Raises:
        InputTypeError: ``use_uncertainty`` is not a bool.
        InputError: ``curve`` is unknown.
    """

    def __init__(self, *, use_uncertainty: bool = True, curve: Literal["logistic", "isotonic"] = "logistic") -> None:
        validate.flag("use_uncertainty", use_uncertainty)
        validate.choice("curve", curve, ("logistic", "isotonic"))
        self.use_uncertainty = use_uncertainty
        self.curve = curve
        self._fitted: tuple[Regression, int] | None = None

    def fit_pairs(self, a: _Embeddings, b: _Embeddings, same: Tensor) -> Self:
        """Fit the probability that two embeddings belong to one class.

        Args:
            a: Embeddings of one side of N validation pairs.
            b: Embeddings of the other side.
            same: Whether pair i is of one class, bool (or integers 0 and 1), shape (N,).

        Returns:
            The object itself.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: Shapes, dimensions or devices disagree; there are fewer than ten pairs of one class or of two
                classes; or pairs of one class do not become more frequent as the cosine grows.
        """
        features, dim = self._pairs(a, b)
        labels = check_tensor("same", same)
        if labels.is_floating_point() or labels.is_complex():
            raise InputTypeError("same", "a bool tensor, or integers 0 and 1", str(labels.dtype))
        if tuple(labels.shape) != (len(features),):
            raise InputError("same", f"shape ({len(features)},)", f"shape {tuple(labels.shape)}")
        if not bool(((labels == 0) | (labels == 1)).all()):
            hint = "Pass labels_a == labels_b."
            raise InputError("same", "a bool tensor, or integers 0 and 1", "other integers", hint)
        self._fitted = Regression.fit(features, labels.bool(), isotonic=self.curve == "isotonic"), dim
        return self

    def same(self, a: _Embeddings, b: _Embeddings, prevalence: float | None = None) -> Tensor:
        """Return the probability that row i of ``a`` and row i of ``b`` belong to one class.

        Args:
            a: N embeddings.
            b: N embeddings. Exchanging ``a`` and ``b`` changes nothing.
            prevalence: Share of pairs of one class among these pairs, in (0, 1), if it differs from the fit. It moves
                the logit by ``logit(prevalence) - logit(prevalence of the fit)``: exact if both kinds of pairs are as
                in the fit and only their shares differ (Saerens et al., 2002).

        Returns:
            Probabilities, shape (N,), of the dtype of the embeddings (float32 for half precision).

        Raises:
            NotFittedError: Before :meth:`fit_pairs`.
            InputTypeError: An argument has a wrong type.
            InputError: Shapes, dimensions or devices disagree, the fit was in another dimension, or ``prevalence`` is
                not in (0, 1).
        """
        if self._fitted is None:
            raise NotFittedError(
                "MatchProbability: expected a fit before use. Call fit_pairs(a, b, same), or load_state_dict(...)."
            )
        regression, dim = self._fitted
        share = None if prevalence is None else validate.fraction("prevalence", prevalence)
        features, now = self._pairs(a, b)
        if now != dim:
            raise InputError("a, b", f"D = {dim}, that of the fit", f"D = {now}")
        dtype = (a if isinstance(a, Tensor) else a.raw_mean).dtype
        return regression(features, share).to(torch.promote_types(dtype, torch.float32))

    def state_dict(self) -> dict[str, Any]:
        """Return the fit as tensors, numbers and strings, for ``torch.save``."""
        out: dict[str, Any] = {"version": _VERSION, "use_uncertainty": self.use_uncertainty, "curve": self.curve}
        if self._fitted is not None:
            regression, dim = self._fitted
            out |= {f"pairs.{name}": value for name, value in regression.state().items()} | {"pairs.dim": dim}
        return sealed(out)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the fit by a state of :meth:`state_dict`.

        Args:
            state: The state of an object with the same options.

        Raises:
            InputError: ``state`` is not such a state, is damaged, or was saved with other options. Then the object does
                not change.
        """
        own = {"version": _VERSION, "use_uncertainty": self.use_uncertainty, "curve": self.curve}
        for name, value in own.items():
            saved = state.get(name) if isinstance(state, Mapping) else state
            if type(saved) is not type(value) or saved != value:
                hint = "Make the object with the options of the saved one; fit one of another version again."
                raise InputError(f"state_dict[{name!r}]", repr(value), repr(saved), hint)
        check_seal(state)
        fitted = None
        if "pairs.dim" in state:
            regression = Regression.from_state(state, "pairs.", 4 if self.use_uncertainty else 1)
            fitted = regression, validate.count("state_dict['pairs.dim']", state["pairs.dim"])
        self._fitted = fitted

    def __repr__(self) -> str:
        """Return the options, and whether it is fitted."""
        fitted = "not fitted" if self._fitted is None else "fitted"
        return f"MatchProbability(use_uncertainty={self.use_uncertainty}, curve={self.curve!r}), {fitted}"

    def _pairs(self, a: object, b: object) -> tuple[Tensor, int]:
        """Return features of pairs, and the dimension of the embeddings."""
        one, other = (Side.of(name, side, use_uncertainty=self.use_uncertainty) for name, side in (("a", a), ("b", b)))
        if one.mu.shape != other.mu.shape:
            wanted = "{} embeddings, as many as in a, of D = {}".format(*one.mu.shape)
            raise InputError("b", wanted, "{} of D = {}".format(*other.mu.shape))
        if one.mu.device != other.mu.device:
            raise InputError("b", f"device {one.mu.device}, that of a", str(other.mu.device))
        return pair_features(one, other), one.mu.shape[1]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of N pairs: unit vectors (N, D), and the embeddings if their uncertainties are used."""

    name: str
    mu: Tensor
    embeddings: EmbeddingDistribution | None = None

    @classmethod
    def of(cls, name: str, embeddings: object, *, use_uncertainty: bool) -> Side:
        """Build a side from an EmbeddingDistribution or, without uncertainties, from a tensor (N, D)."""
        if isinstance(embeddings, Tensor) and not use_uncertainty:
            checked = check_embeddings(name, embeddings)
            return cls(name, normalize(checked.to(torch.promote_types(checked.dtype, torch.float32)))[0])
        if not isinstance(embeddings, EmbeddingDistribution):
            wanted = "an EmbeddingDistribution, such as la(x)" + ("" if use_uncertainty else ", or a tensor (N, D)")
            hint = "MatchProbability(use_uncertainty=False) takes plain embeddings." if use_uncertainty else ""
            raise InputTypeError(name, wanted, f"a {type(embeddings).__name__}", hint)
        if not len(embeddings):
            raise InputError(name, "at least one embedding", "none")
        with torch.no_grad():
            return cls(name, embeddings.mu, embeddings if use_uncertainty else None)


def pair_features(a: Side, b: Side) -> Tensor:
    """Return features of row i of ``a`` with row i of ``b``, float64, shape (N, 4), or (N, 1) without uncertainties.

    The features are the cosine, the log of the variance of the angle between the two, and the logs of both
    uncertainties. The larger uncertainty comes first, so exchanging the sides changes nothing.
    """
    cosine = (a.mu.double() * b.mu.double()).sum(1, keepdim=True)
    if a.embeddings is None or b.embeddings is None:
        return cosine
    with torch.no_grad():
        both = torch.stack([_uncertainty(a.name, a.embeddings), _uncertainty(b.name, b.embeddings)], 1)
        # To first order, the variance of the angle is this sum. Unlike the variance of the cosine, it does not depend
        # on the angle.
        angle = angle_variance(a.name, a.embeddings, b.mu) + angle_variance(b.name, b.embeddings, a.mu)
    return torch.cat([cosine, angle.unsqueeze(1).log(), both.sort(1, descending=True).values.log()], 1)


def _uncertainty(name: str, embeddings: EmbeddingDistribution) -> Tensor:
    uncertainty = embeddings.uncertainty.double()
    if not bool(uncertainty.isfinite().all()):
        raise InputError(name, "finite uncertainties", "NaN or infinity")
    return uncertainty
