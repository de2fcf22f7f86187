"""Calibrated probabilities: are two embeddings of one class, and is the nearest neighbour of a query right?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from contrastive_curvature import metrics, validate
from contrastive_curvature.codec import check_seal, sealed
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.match_regression import Regression
from contrastive_curvature.embedding.similarity import angle_variance
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.metrics._checks import check_embeddings, check_labels, check_tensor

_Embeddings = EmbeddingDistribution | Tensor

_VERSION = 3
"""Of the features, in saved states."""


@dataclass(frozen=True, eq=False)
class NearestMatch:
    """The nearest neighbours of N queries, and whether they are to be believed.

    Attributes:
        index: Positions of the neighbours in the gallery, int64, shape (N,).
        right: Probability that the neighbour is of the query's class, shape (N,).
    """

    index: Tensor
    right: Tensor

    @property
    def no_match(self) -> Tensor:
        """Probability that the neighbour is of another class than the query, ``1 - right``, shape (N,).

        Either the gallery has nothing of the query's class, or it has and something else is nearer.
        """
        return 1 - self.right


class MatchProbability:
    """Probability that two embeddings belong to one class, fitted on labelled pairs.

    Two questions, each with a fit of its own: ``fit_pairs`` and then :meth:`same` for given pairs ("are these two
    photographs of one person?"), ``fit_retrieval`` and then :meth:`nearest` for searches ("is the best hit right?").
    The second cannot be answered by the first: a best hit of many is not like a pair picked at random.

    A logistic regression (scikit-learn, features standardised) on the cosine and, unless switched off, the log of the
    variance of the angle between the two, its product with the cosine, and the logs of both uncertainties. At given
    uncertainties the probability never falls as the cosine grows. An uncertainty beyond those of the validation data
    counts as the largest (or the smallest) of them.

    Fit it on data that the encoder was not trained on, of the same mixture as later: the same share of pairs of one
    class, of queries without a match and of corrupted inputs, a gallery of about the same size.

    Args:
        use_uncertainty: If false, the cosine alone; then plain tensors of embeddings are accepted too.
        curve: ``"logistic"``, or ``"isotonic"``: an isotonic regression on the logit, for a thousand pairs and more
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
        self._fitted: dict[str, tuple[Regression, int]] = {}
        self._gallery_size = 0

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
            InputError: Shapes, dimensions or devices disagree; there are fewer than ten pairs of a kind; or pairs of
                one class do not become more frequent as the cosine grows.
        """
        features, dim = self._pairs(a, b)
        labels = check_tensor("same", same)
        if labels.is_floating_point() or labels.is_complex():
            raise InputTypeError("same", "a bool tensor, or integers 0 and 1", str(labels.dtype))
        if tuple(labels.shape) != (len(features),):
            raise InputError("same", f"shape ({len(features)},)", f"shape {tuple(labels.shape)}")
        if not bool(((labels == 0) | (labels == 1)).all()):
            hint = "Classes go into fit_retrieval; here, pass labels_a == labels_b."
            raise InputError("same", "a bool tensor, or integers 0 and 1", "other integers", hint)
        kinds = "pairs of one class and of two classes"
        fitted = Regression.fit(features, labels.bool(), isotonic=self._isotonic, argument="same", kinds=kinds)
        self._fitted["pairs"] = (fitted, dim)
        return self

    def same(self, a: _Embeddings, b: _Embeddings, prevalence: float | None = None) -> Tensor:
        """Return the probability that row i of ``a`` and row i of ``b`` belong to one class.

        Args:
            a: N embeddings.
            b: N embeddings. Exchanging ``a`` and ``b`` changes nothing.
            prevalence: Share of pairs of one class among such pairs, in (0, 1), where it is not that of the fit. It
                moves the logit by ``logit(prevalence) - logit(prevalence of the fit)``: exact where both kinds of
                pairs are as in the fit and only their shares differ (Saerens et al., 2002).

        Returns:
            Probabilities, shape (N,), of the dtype of the embeddings (float32 for half precision).

        Raises:
            NotFittedError: Before :meth:`fit_pairs`.
            InputTypeError: An argument has a wrong type.
            InputError: Shapes, dimensions or devices disagree, the fit was in another dimension, or ``prevalence`` is
                not in (0, 1).
        """
        regression, dim = self._need("pairs", "fit_pairs(a, b, same)")
        share = None if prevalence is None else validate.fraction("prevalence", prevalence)
        features, now = self._pairs(a, b)
        _check_dim("a, b", now, dim)
        return regression(features, share).to(_result_dtype(a))

    def fit_retrieval(
        self,
        queries: _Embeddings,
        labels: Tensor,
        gallery: _Embeddings | None = None,
        gallery_labels: Tensor | None = None,
    ) -> Self:
        """Fit the probability that the nearest neighbour of a query is of its class.

        Args:
            queries: Embeddings of N validation queries, those without a match in the gallery among them, as often as
                they will come.
            labels: Their classes, integers, shape (N,).
            gallery: Embeddings that are searched, none of which is one of the queries. ``None`` searches the other
                queries, each query left out of its own search.
            gallery_labels: Their classes, shape (M,).

        Returns:
            The object itself.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: Only one of ``gallery`` and ``gallery_labels`` is given; the gallery has fewer than two points;
                shapes, dimensions or devices disagree; fewer than ten neighbours are right, or wrong; or neighbours
                are not right more often as the cosine grows.
        """
        if (gallery is None) != (gallery_labels is None):
            received = "gallery alone" if gallery_labels is None else "gallery_labels alone"
            raise InputError("gallery, gallery_labels", "both or neither", received)
        asking, found, index, size = self._search(queries, gallery)
        classes = check_labels("labels", labels, len(asking)).to(asking.mu.device)
        theirs = classes
        if gallery_labels is not None:
            theirs = check_labels("gallery_labels", gallery_labels, size).to(asking.mu.device)
        fitted = Regression.fit(
            pair_features(asking, found, symmetric=False),
            theirs[index] == classes,
            isotonic=self._isotonic,
            argument="labels",
            kinds="queries whose nearest neighbour is right and queries whose is wrong",
        )
        self._fitted["retrieval"], self._gallery_size = (fitted, asking.mu.shape[1]), size
        return self

    def nearest(
        self, queries: _Embeddings, gallery: _Embeddings | None = None, prevalence: float | None = None
    ) -> NearestMatch:
        """Find the nearest neighbour of every query by cosine, and the probability that it is of the query's class.

        Args:
            queries: N embeddings.
            gallery: Embeddings that are searched. ``None`` searches the other queries.
            prevalence: Share of such queries whose nearest neighbour is of their class, in (0, 1), where it is not
                that of the fit; as in :meth:`same`.

        Returns:
            The neighbours' positions, ``right`` and ``no_match = 1 - right``, each of shape (N,). Compare ``no_match``
            with a threshold of your own to answer "nothing in the gallery".

        Raises:
            NotFittedError: Before :meth:`fit_retrieval`.
            InputTypeError: An argument has a wrong type.
            InputError: The gallery has fewer than two points, dimensions or devices disagree, the fit was in another
                dimension, or ``prevalence`` is not in (0, 1).

        Warns:
            UserWarning: The gallery is less than half or more than twice as large as the one of the fit. The nearest of
                more points is nearer, whether right or wrong.
        """
        self._need("retrieval", "fit_retrieval(queries, labels, gallery, gallery_labels)")
        share = None if prevalence is None else validate.fraction("prevalence", prevalence)
        asking, found, index, size = self._search(queries, gallery)
        return NearestMatch(index, self._right(asking, found, size, "gallery", share).to(_result_dtype(queries)))

    def hits(self, queries: _Embeddings, hits: _Embeddings, *, gallery_size: int) -> Tensor:
        """Probability that given best hits are right, as :meth:`nearest` gives it: for searches done elsewhere.

        Args:
            queries: N embeddings.
            hits: The nearest point of each among those that were searched, N embeddings.
            gallery_size: Number of points that were searched.

        Returns:
            Probabilities, shape (N,).

        Raises:
            NotFittedError: Before :meth:`fit_retrieval`.
            InputTypeError: An argument has a wrong type.
            InputError: There is not one hit for each query, dimensions or devices disagree, or the fit was in another
                dimension.

        Warns:
            UserWarning: The number of points that were searched is less than half or more than twice that of the fit.
                The nearest of more points is nearer, whether right or wrong.
        """
        validate.count("gallery_size", gallery_size)
        asking, found = self._sides(queries=queries, hits=hits)
        if len(asking) != len(found):
            raise InputError("hits", f"{len(asking)} embeddings, one for each query", len(found))
        return self._right(asking, found, gallery_size, "gallery_size").to(_result_dtype(queries))

    def _right(self, asking: Side, found: Side, size: int, argument: str, prevalence: float | None = None) -> Tensor:
        """Return the probability that the nearest points of queries, found among ``size``, are right."""
        regression, dim = self._need("retrieval", "fit_retrieval(queries, labels, gallery, gallery_labels)")
        _check_dim("queries", asking.mu.shape[1], dim)
        if not self._gallery_size <= 2 * size <= 4 * self._gallery_size:
            fitted = f"the probabilities were fitted with {self._gallery_size} points to search, {size} were searched"
            warnings.warn(f"{argument}: {fitted}. Fit again with a gallery of about this size.", stacklevel=3)
        return regression(pair_features(asking, found, symmetric=False), prevalence)

    def state_dict(self) -> dict[str, Any]:
        """Everything that was fitted: tensors, numbers and strings, for ``torch.save``."""
        out: dict[str, Any] = {"version": _VERSION, "use_uncertainty": self.use_uncertainty, "curve": self.curve}
        for question, (regression, dim) in self._fitted.items():
            out |= {f"{question}.{name}": value for name, value in regression.state().items()}
            out[f"{question}.dim"] = dim
        if "retrieval" in self._fitted:
            out["retrieval.gallery_size"] = self._gallery_size
        return sealed(out)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, in place of what was fitted.

        Args:
            state: The state of an object with the same options.

        Raises:
            InputError: It is not such a state, is damaged, or was saved with other options. Then nothing is changed.
        """
        own = {"version": _VERSION, "use_uncertainty": self.use_uncertainty, "curve": self.curve}
        for name, value in own.items():
            saved = state.get(name) if isinstance(state, Mapping) else state
            if type(saved) is not type(value) or saved != value:
                hint = "Make the object with the options with which it was saved; of another version, fit it again."
                raise InputError(f"state_dict[{name!r}]", repr(value), repr(saved), hint)
        check_seal(state)
        fitted = {}
        for question in ("pairs", "retrieval"):
            if f"{question}.dim" in state:
                regression = Regression.from_state(state, f"{question}.", 4 if self.use_uncertainty else 1)
                dim = validate.count(f"state_dict['{question}.dim']", state[f"{question}.dim"])
                fitted[question] = regression, dim
        if "retrieval" in fitted:
            size = state.get("retrieval.gallery_size")
            self._gallery_size = validate.count("state_dict['retrieval.gallery_size']", size)
        self._fitted = fitted

    def __repr__(self) -> str:
        """The options, and what was fitted."""
        fitted = " and ".join(self._fitted) or "nothing"
        return f"MatchProbability(use_uncertainty={self.use_uncertainty}, curve={self.curve!r}), fitted for {fitted}"

    @property
    def _isotonic(self) -> bool:
        return self.curve == "isotonic"

    def _need(self, question: str, call: str) -> tuple[Regression, int]:
        if question not in self._fitted:
            raise NotFittedError(
                f"MatchProbability: expected a fit before it is used. Call {call}, or load_state_dict(...)."
            )
        return self._fitted[question]

    def _sides(self, **embeddings: object) -> tuple[Side, Side]:
        """Read the two sides of pairs, which have one dimension and device."""
        (name, a), (other, b) = (
            (name, Side.of(name, value, use_uncertainty=self.use_uncertainty)) for name, value in embeddings.items()
        )
        if a.mu.shape[1] != b.mu.shape[1]:
            raise InputError(other, f"D = {a.mu.shape[1]}, that of {name}", f"D = {b.mu.shape[1]}")
        if a.mu.device != b.mu.device:
            raise InputError(other, f"device {a.mu.device}, that of {name}", str(b.mu.device))
        return a, b

    def _pairs(self, a: object, b: object) -> tuple[Tensor, int]:
        """Return features of pairs, and the dimension of the embeddings."""
        one, other = self._sides(a=a, b=b)
        if len(one) != len(other):
            raise InputError("b", f"{len(one)} embeddings, as many as in a", len(other))
        return pair_features(one, other, symmetric=True), one.mu.shape[1]

    def _search(self, queries: object, gallery: object) -> tuple[Side, Side, Tensor, int]:
        """Return queries, their neighbours, the neighbours' positions, and how many points were searched."""
        if gallery is None:
            asking = searched = Side.of("queries", queries, use_uncertainty=self.use_uncertainty)
        else:
            asking, searched = self._sides(queries=queries, gallery=gallery)
        size = len(searched) - (gallery is None)
        if size < 2:
            hint = "One point is no search: same(a, b) is for given pairs."
            raise InputError("gallery", "at least two points to search", size, hint)
        index = metrics.nearest_neighbors(asking.mu, None if gallery is None else searched.mu, k=1).squeeze(1)
        return asking, searched[index], index, size


def _result_dtype(embeddings: _Embeddings) -> torch.dtype:
    """Return the dtype of probabilities: that of the embeddings, float32 for half precision."""
    dtype = (embeddings if isinstance(embeddings, Tensor) else embeddings.raw_mean).dtype
    return torch.promote_types(dtype, torch.float32)


def _check_dim(name: str, now: int, fitted: int) -> None:
    if now != fitted:
        raise InputError(name, f"D = {fitted}, that of the fit", f"D = {now}")


@dataclass(frozen=True, eq=False)
class Side:
    """One side of N pairs: unit vectors (N, D), and the embeddings where their uncertainties are used."""

    name: str
    mu: Tensor
    embeddings: EmbeddingDistribution | None = None

    @classmethod
    def of(cls, name: str, embeddings: object, *, use_uncertainty: bool) -> Side:
        """Read what the features need of an EmbeddingDistribution, or without uncertainties of a tensor (N, D)."""
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

    def __len__(self) -> int:
        """Number of embeddings."""
        return len(self.mu)

    def __getitem__(self, rows: Tensor) -> Side:
        """Return some of the embeddings."""
        return Side(self.name, self.mu[rows], None if self.embeddings is None else self.embeddings[rows])


def pair_features(a: Side, b: Side, *, symmetric: bool) -> Tensor:
    """Return features of row i of ``a`` with row i of ``b``, float64, shape (N, 4), or (N, 1) without uncertainties.

    They are the cosine, the log of the variance of the angle between the two, and the logs of both uncertainties. Where
    exchanging the sides must not matter (``symmetric``), the larger of the two uncertainties comes first.
    """
    cosine = (a.mu.double() * b.mu.double()).sum(1, keepdim=True)
    if a.embeddings is None or b.embeddings is None:
        return cosine
    with torch.no_grad():
        both = torch.stack([_uncertainty(a.name, a.embeddings), _uncertainty(b.name, b.embeddings)], 1)
        # To first order, the variance of the angle is the sum. Unlike that of the cosine, it says nothing of the angle.
        angle = angle_variance(a.name, a.embeddings, b.mu) + angle_variance(b.name, b.embeddings, a.mu)
    if symmetric:
        both = both.sort(1, descending=True).values
    return torch.cat([cosine, angle.unsqueeze(1).log(), both.log()], 1)


def _uncertainty(name: str, embeddings: EmbeddingDistribution) -> Tensor:
    uncertainty = embeddings.uncertainty.double()
    if not bool(uncertainty.isfinite().all()):
        raise InputError(name, "finite uncertainties", "NaN or infinity")
    return uncertainty
