"""Calibrated probabilities: are two embeddings of one class, and is the nearest neighbour of a query right?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from contrastive_curvature import metrics, validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, NotFittedError, expected
from contrastive_curvature.matching.checks import check_dim, check_same, read_whole, result_dtype
from contrastive_curvature.matching.features import Side, check_sides, pair_features
from contrastive_curvature.matching.regression import Regression
from contrastive_curvature.metrics._checks import check_labels

__all__ = ["MatchProbability", "NearestMatch"]

_Embeddings = EmbeddingDistribution | Tensor

_VERSION = 2
"""Of the features, in saved states; those of 0.1.0 had no number."""


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
    variance of the angle between the two (to first order: that of each direction along the great circle through both,
    added), its product with the cosine, and the logs of both uncertainties. At given uncertainties the probability
    never falls as the cosine grows. An uncertainty beyond those of the validation data counts as the largest (or the
    smallest) of them.

    Fit it on data that the encoder was not trained on, and that is like what comes later: the same share of pairs of
    one class, of queries without a match and of harmed inputs, a gallery of about the same size. A probability holds
    for the mixture that it was fitted on.

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
        if not isinstance(curve, str) or curve not in ("logistic", "isotonic"):
            raise InputError(expected("curve", "'logistic' or 'isotonic'", curve))
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
        labels = check_same(same, len(features))
        kinds = "pairs of one class and of two classes"
        fitted = Regression.fit(features, labels, isotonic=self._isotonic, argument="same", kinds=kinds)
        self._fitted["pairs"] = (fitted, dim)
        return self

    def same(self, a: _Embeddings, b: _Embeddings) -> Tensor:
        """Return the probability that row i of ``a`` and row i of ``b`` belong to one class.

        Args:
            a: N embeddings.
            b: N embeddings. Exchanging ``a`` and ``b`` changes nothing.

        Returns:
            Probabilities, shape (N,), of the dtype of the embeddings (float32 for half precision).

        Raises:
            NotFittedError: Before :meth:`fit_pairs`.
            InputTypeError: An argument has a wrong type.
            InputError: Shapes, dimensions or devices disagree, or the fit was in another dimension.
        """
        regression, dim = self._need("pairs", "fit_pairs(a, b, same)")
        features, now = self._pairs(a, b)
        check_dim("a, b", now, dim)
        return regression(features).to(result_dtype(a))

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
            raise InputError(expected("gallery, gallery_labels", "both or neither", received))
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

    def nearest(self, queries: _Embeddings, gallery: _Embeddings | None = None) -> NearestMatch:
        """Find the nearest neighbour of every query by cosine, and the probability that it is of the query's class.

        Args:
            queries: N embeddings.
            gallery: Embeddings that are searched. ``None`` searches the other queries.

        Returns:
            The neighbours' positions, ``right`` and ``no_match = 1 - right``, each of shape (N,). Compare ``no_match``
            with a threshold of your own to answer "nothing in the gallery".

        Raises:
            NotFittedError: Before :meth:`fit_retrieval`.
            InputTypeError: An argument has a wrong type.
            InputError: The gallery has fewer than two points, dimensions or devices disagree, or the fit was in another
                dimension.

        Warns:
            UserWarning: The gallery is less than half or more than twice as large as the one of the fit. The nearest of
                more points is nearer, whether right or wrong.
        """
        self._need("retrieval", "fit_retrieval(queries, labels, gallery, gallery_labels)")
        asking, found, index, size = self._search(queries, gallery)
        return NearestMatch(index, self._right(asking, found, size, "gallery").to(result_dtype(queries)))

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
        asking, found = (
            Side.of(name, value, use_uncertainty=self.use_uncertainty)
            for name, value in (("queries", queries), ("hits", hits))
        )
        check_sides(("queries", "hits"), asking, found)
        if len(asking) != len(found):
            raise InputError(expected("hits", f"{len(asking)} embeddings, one for each query", len(found)))
        return self._right(asking, found, gallery_size, "gallery_size").to(result_dtype(queries))

    def _right(self, asking: Side, found: Side, size: int, argument: str) -> Tensor:
        """Probability that the nearest points of queries, found among ``size``, are right."""
        regression, dim = self._need("retrieval", "fit_retrieval(queries, labels, gallery, gallery_labels)")
        check_dim("queries", asking.mu.shape[1], dim)
        if not self._gallery_size <= 2 * size <= 4 * self._gallery_size:
            text = (
                f"{argument}: the probabilities were fitted with {self._gallery_size} points to search, {size} were "
                "searched here. Fit again with a gallery of about this size."
            )
            warnings.warn(text, stacklevel=3)
        return regression(pair_features(asking, found, symmetric=False))

    def state_dict(self) -> dict[str, Any]:
        """Everything that was fitted: tensors, numbers and strings, for ``torch.save``."""
        out: dict[str, Any] = {"version": _VERSION, "use_uncertainty": self.use_uncertainty, "curve": self.curve}
        for question, (regression, dim) in self._fitted.items():
            out |= {f"{question}.{name}": value for name, value in regression.state().items()}
            out[f"{question}.dim"] = dim
        if "retrieval" in self._fitted:
            out["retrieval.gallery_size"] = self._gallery_size
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, in place of what was fitted.

        Args:
            state: The state of an object with the same options.

        Raises:
            InputError: It is not such a state, or was saved with other options. Then nothing is changed.
        """
        if not isinstance(state, Mapping) or not {"use_uncertainty", "curve"} <= state.keys():
            raise InputError(expected("state_dict", "what state_dict() gave", f"a {type(state).__name__}"))
        if state.get("version") != _VERSION:
            hint = "Other versions of the library have other features: fit it again."
            raise InputError(expected("state_dict['version']", str(_VERSION), state.get("version"), hint))
        for name in ("use_uncertainty", "curve"):
            mine, saved = getattr(self, name), state[name]
            if type(saved) is not type(mine) or saved != mine:
                hint = f"Make the object with MatchProbability({name}=...) as it was saved."
                raise InputError(expected(f"state_dict[{name!r}]", repr(mine), repr(saved), hint))
        fitted = {}
        for question in ("pairs", "retrieval"):
            if f"{question}.dim" in state:
                regression = Regression.from_state(state, f"{question}.", 4 if self.use_uncertainty else 1)
                fitted[question] = (regression, read_whole(state, f"{question}.dim"))
        size = read_whole(state, "retrieval.gallery_size") if "retrieval" in fitted else 0
        self._fitted, self._gallery_size = fitted, size

    def __repr__(self) -> str:
        """The options, and what was fitted."""
        fitted = " and ".join(self._fitted) or "nothing"
        return f"MatchProbability(use_uncertainty={self.use_uncertainty}, curve={self.curve!r}), fitted for {fitted}"

    @property
    def _isotonic(self) -> bool:
        return self.curve == "isotonic"

    def _need(self, question: str, call: str) -> tuple[Regression, int]:
        if question not in self._fitted:
            msg = f"MatchProbability: expected a fit before it is used. Call {call}, or load_state_dict(...)."
            raise NotFittedError(msg)
        return self._fitted[question]

    def _pairs(self, a: object, b: object) -> tuple[Tensor, int]:
        """Features of pairs, and the dimension of the embeddings."""
        one, other = (
            Side.of(name, value, use_uncertainty=self.use_uncertainty) for name, value in (("a", a), ("b", b))
        )
        check_sides(("a", "b"), one, other)
        if len(one) != len(other):
            raise InputError(expected("b", f"{len(one)} embeddings, as many as in a", len(other)))
        return pair_features(one, other, symmetric=True), one.mu.shape[1]

    def _search(self, queries: object, gallery: object) -> tuple[Side, Side, Tensor, int]:
        """Queries, their neighbours, the neighbours' positions, and how many points were searched."""
        asking = Side.of("queries", queries, use_uncertainty=self.use_uncertainty)
        searched = asking
        if gallery is not None:
            searched = Side.of("gallery", gallery, use_uncertainty=self.use_uncertainty)
            check_sides(("queries", "gallery"), asking, searched)
        size = len(searched) - (gallery is None)
        if size < 2:
            hint = "One point is no search: same(a, b) is for given pairs."
            raise InputError(expected("gallery", "at least two points to search", size, hint))
        index = metrics.nearest_neighbors(asking.mu, None if gallery is None else searched.mu, k=1).squeeze(1)
        return asking, searched[index], index, size
