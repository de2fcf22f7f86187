"""``cc.Retriever``: a search that answers, is unsure, or does not know, each at a stated rate of errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.decisions.fitted import Fitted, clopper_pearson, one_of_each, percent
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace.influence import influence
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.batches import batches, by_length, results
from contrastive_curvature.network.given_features import feature_inputs
from contrastive_curvature.network.inputs import in_memory, is_texts
from contrastive_curvature.network.loader import check_loader, in_fixed_order
from contrastive_curvature.posterior.calibration import present_calibration, present_training
from contrastive_curvature.retriever.evidence import FLOOR, Embedded, evidence
from contrastive_curvature.retriever.head import AT_ONCE, Headed, last_layer_features, outputs, with_head
from contrastive_curvature.retriever.index import Index, nearest
from contrastive_curvature.retriever.rule import Labelled, Rates, Rule, certified

_SAME = math.log(1.001 * FLOOR)
"""Log-distance to a match below which the query is the match."""

_NAMED = 5
"""Classes that are named in a message."""

_EDGE = 1.25
"""Times as many answered held-out queries as the first test of a limit takes: below, few fits answer anything."""

_ASKED = 64
"""Queries that are explained at once, with N D numbers each."""


class _Sized(Protocol):
    def __len__(self) -> int: ...


_T = TypeVar("_T", bound=_Sized)


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to N queries, as arrays of shape (N,).

    Attributes:
        decision: ``"answer"``, ``"unsure"`` or ``"unknown"``.
        label: Label of the match, as passed with the gallery.
        neighbour: Identifier of the match: its position in the gallery of the fit, or what ``add`` returned.
        confidence: Probability that the match is right, in (0, 1), if one query in eleven is of a class that the
            gallery lacks, and the other queries are like the held-out queries.
        p_value: Share of the held-out queries that are at least as unlike the known inputs, in (0, 1].
    """

    decision: NDArray[np.str_]
    label: NDArray[Any]
    neighbour: NDArray[np.int64]
    confidence: NDArray[np.float64]
    p_value: NDArray[np.float64]

    def __len__(self) -> int:
        """Number N of queries."""
        return len(self.decision)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row a query.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        pandas = validate.package("to_pandas", "pandas", "test")
        return pandas.DataFrame({field.name: getattr(self, field.name) for field in fields(self)})


class Rate(NamedTuple):
    """An asked rate and the observed rate.

    Attributes:
        asked: The asked bound, or ``None``.
        observed: The observed rate; NaN if there are no queries.
        low: Lower end of the exact 95 % interval of the observed rate (Clopper and Pearson, 1934).
        high: Upper end of the interval.
        queries: Number of queries in the denominator.
    """

    asked: float | None
    observed: float
    low: float
    high: float
    queries: int

    @classmethod
    def of(cls, asked: float | None, happened: NDArray[np.bool_]) -> Rate:
        """Return the rate of what happened to queries (N,)."""
        n, count = len(happened), int(happened.sum())
        return cls(asked, count / n if n else math.nan, *clopper_pearson(count, n), n)


class Points(NamedTuple):
    """A gallery of M points.

    Attributes:
        directions: Unit vectors, shape (M, D).
        classes: Numbers of their labels, int64, shape (M,).
        identifiers: int64, ascending, shape (M,).
        following: Identifier of the next point that is added: no identifier is given twice.
    """

    directions: Tensor
    classes: Tensor
    identifiers: NDArray[np.int64]
    following: int


class Retriever(Fitted):
    """Answer a query with its nearest gallery point, or say that it is unsure or unknown, at stated rates of errors.

    P(right) is a logistic regression on six numbers of the search and the posterior (:mod:`.evidence`); a second
    regression finds queries whose class the gallery lacks. Held-out queries with labels set the limits of both. Each
    rate holds for queries drawn like the held-out queries, and ``None`` limits nothing:

    - ``wrong_answers``: at most this share of the answers is wrong, with probability ``confidence_level`` over the
      held-out queries. An answer is also wrong if the gallery lacks the query's class.
    - ``false_matches``: at most this share of such queries is answered if their class is taken out of the gallery, on
      average. More may be answered of kinds that neither the encoder nor the held-out queries know.
    - ``false_alarms``: at most this share of such queries is called unknown, on average.

    The first two are tested with scores from other held-out queries, and hold in simulations (``docs/statistics.md``);
    the third is a conformal p-value. If no limit keeps a rate, nothing is answered: :attr:`reasons` and a warning say
    why. The limits are computed again whenever the gallery or the held-out queries change; the level holds for
    each computation alone.

    Args:
        encoder: A trained encoder, to which ``fit`` fits a posterior; or a fitted posterior of
            ``likelihood="contrastive"``; or ``None`` if the inputs are embeddings (N, D). Without a posterior there is
            no uncertainty, and an input is unknown if it is far from its ten nearest gallery points of any class.
        wrong_answers: In (0, 1), or ``None``.
        false_matches: In (0, 1), or ``None``.
        false_alarms: In (0, 1), or ``None``.
        confidence_level: In (0, 1).
        head: Whether ``fit`` trains a head of two layers on the outputs of the encoder, or on the embeddings, and fits
            a posterior to the head: for an encoder that was not trained on ``x`` and ``y``. It takes seconds, and the
            same inputs give the same head.
        index: Index that is searched in place of the gallery, see :class:`.Index`. It holds the embeddings of the
            gallery, with the identifiers of :class:`Answers`. Add and remove points in both, first in the index. The
            embeddings are ``la(x).mu``, or the normalised inputs without a posterior.

    Attributes:
        la: The posterior; ``None`` if inputs are embeddings and there is no head.
        answered: Share of the held-out queries that are answered.
        reasons: Reasons why nothing is answered, or nothing is called unknown, by the name of the rate.
        uncovered: Labels of the gallery without a held-out query; no rate covers them.

    Raises:
        InputTypeError: The encoder is not an encoder, or a rate is not a number.
        InputError: A rate is not in (0, 1), or ``head`` is true for a fitted posterior.

    Source: Angelopoulos et al. (2021), arXiv 2110.01052, for the limits; Lowe (2004) for the gap to another class.
    """

    la: ContrastiveLaplace | None
    _gallery: Points
    _held: Embedded
    _truth: Tensor
    _rule: Rule
    answered: float
    reasons: dict[str, str]
    uncovered: list[Any]

    def __init__(
        self,
        encoder: nn.Module | ContrastiveLaplace | None,
        wrong_answers: float | None = 0.02,
        false_matches: float | None = 0.05,
        false_alarms: float | None = 0.01,
        confidence_level: float = 0.9,
        *,
        head: bool = False,
        index: Index | None = None,
    ) -> None:
        if not isinstance(encoder, (nn.Module, ContrastiveLaplace, type(None))):
            wanted = "a torch.nn.Module, a fitted posterior of likelihood='contrastive', or None for embeddings"
            raise InputTypeError("encoder", wanted, f"a {type(encoder).__name__}")
        if isinstance(encoder, ContrastiveLaplace):
            encoder.check_fitted()
            if head:
                raise InputError("head", "False for a fitted posterior", "True", "Pass the encoder instead.")
        asked = {"wrong_answers": wrong_answers, "false_matches": false_matches, "false_alarms": false_alarms}
        given = {name: None if rate is None else validate.fraction(name, rate) for name, rate in asked.items()}
        validate.flag("head", head)
        self.encoder, self.head, self.index = encoder, head, index
        self.rates = Rates(**given, confidence_level=validate.fraction("confidence_level", confidence_level))
        self._codes: dict[Hashable, int] = {}
        self._feedback: tuple[Embedded, Tensor] | None = None
        self._head: Headed | None = None
        self._ceiling = math.inf

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        held_out: Any,
        gallery: Any = None,
        groups: Any = None,
        progress_bar: bool | None = None,
    ) -> Self:
        """Fit the posterior, embed the gallery, and find the limits.

        Inputs are a tensor, a mapping of tensors, a NumPy array, a table, a list of vectors, a list or a column of
        texts if the encoder takes texts, or a loader of batches ``(inputs, labels)``, without a second argument for
        labels. Labels are a tensor, an array, a column or a list of N numbers, strings or other hashable values.

        Args:
            x: Training inputs; ignored if the encoder is a fitted posterior and ``gallery`` is passed. The encoder runs
                once over each; the inputs of its last layer stay in memory during the fit.
            y: Their labels.
            held_out: ``(inputs, labels)``, or a loader: at least two queries like the future ones, which neither
                trained the encoder nor are in the gallery. A posterior that is not calibrated is calibrated with them;
                they may be the inputs of ``la.calibrate`` too, as long as the posterior has its training inputs, from
                which it then measures novelty.
            gallery: The points that are searched, as ``held_out``; ``None`` for ``x`` and ``y``.
            groups: Groups of the held-out queries, N numbers or strings, where queries depend on each other: pictures
                of one person, paraphrases of one question. One query of each group, drawn at random, is held out.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            The object itself.

        Raises:
            InputTypeError: Inputs or labels have another type.
            InputError: Numbers of inputs and labels differ, there are too few, a label is missing (``None``, NaN or
                ``pandas.NA``), or the encoder does not take them.
            UnsupportedError: The library has no posterior for this encoder.
            NotFittedError: The encoder is a posterior that is neither calibrated nor has a sample of its training
                inputs, because it was loaded or is not of the last layer; or it changed after its calibration.

        Warns:
            UserWarning: Nothing is answered, most held-out queries are in the gallery, or some are repetitions of
                others, which count once: independent draws alone tell how sure the rates are.
            OptimisticPValueWarning: Held-out queries are among the training inputs.
        """
        x, queries = in_memory(x, "x"), _pair("held_out", held_out)
        searched = (x, y) if gallery is None else _pair("gallery", gallery)
        fitted = isinstance(self.encoder, ContrastiveLaplace) or (self.encoder is None and not self.head)
        given = {"held_out": queries, "x" if gallery is None else "gallery": searched}
        # Before a fit that may be long.
        for argument, (inputs, labels) in (given if fitted else {"x": (x, y), **given}).items():
            if labels is not None or _in_memory(inputs):
                _checked_labels(argument, inputs, labels)
            else:
                check_loader(inputs, argument)
        # A fit that fails leaves nothing of an earlier fit, which numbers labels in another way.
        for name in Retriever.__annotations__:
            vars(self).pop(name, None)
        self._codes = {}
        if isinstance(self.encoder, ContrastiveLaplace):
            la: ContrastiveLaplace | None = self.encoder
        elif fitted:
            la = None
        else:
            la, trained = self._posterior(x, y, progress_bar)
            searched = trained if gallery is None else searched
        calibrated = la is None or present_calibration(la.posterior, la.read) is not None
        if la is not None and not calibrated and present_training(la.posterior, la.read) is None:
            raise NotFittedError(
                "encoder: this posterior has no training inputs to compare with, so its novelty is measured from the "
                "inputs of la.calibrate(loader). Call it with others than the held-out ones, which would seem less "
                "novel than new queries."
            )
        self.la = la
        queries = _encoded(la, "held_out", *queries, progress_bar)
        held, truth = self._embedded("held_out", *queries, progress_bar)
        if groups is not None:
            if len(names := _labels("groups", groups)) != len(held):
                raise InputError("groups", f"{len(held)}, one a held-out query", f"{len(names)}")
            rows = one_of_each(names)
            held, truth = held[rows], truth[rows]
        held, truth = _without_repetitions("held_out", held, truth)
        if len(held) < 2:
            raise InputError("held_out", "at least two queries", f"{len(held)}")
        if la is not None and not calibrated:
            # For a saved file; p-values of the retriever compare with all held-out queries, later ones too.
            items, inputs_of = batches(la.model, queries[0], AT_ONCE, "held_out")
            la.calibrate((inputs_of(item) for item in items), progress_bar)
        points, classes = self._embedded("x" if gallery is None else "gallery", *searched, progress_bar)
        self._gallery = Points(points.directions, classes, np.arange(len(points)), len(points))
        self._held, self._truth, self._feedback = held, truth, None
        seen = self._certify()
        if (share := float((seen.evidence[:, 0] < _SAME).mean())) > 0.5:
            wanted = "No rate holds for new queries: hold out others than those that are searched."
            warnings.warn(f"held_out: {percent(share)} of the queries are in the gallery. {wanted}", UserWarning, 2)
        return self

    def __call__(self, queries: Any) -> Answers:
        """Answer queries.

        Args:
            queries: Inputs as of :meth:`fit`; labels of a loader are ignored.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: The queries have another type.
            InputError: There are no queries, or the encoder does not take them.
        """
        asked, rule = embedded(self.la, queries, "queries"), self._rule
        columns, match, novelty = self._search(asked)
        names, codes = list(self._codes), self._gallery.classes[match].tolist()
        return Answers(
            rule.decision(columns, novelty),
            _as_array([names[code] for code in codes]),
            self._gallery.identifiers[match],
            np.exp(-np.logaddexp(0, rule.right(columns))),
            rule.p_value(novelty),
        )

    def add(self, items: Any, labels: Any = None) -> NDArray[np.int64]:
        """Add points to the gallery, and compute the limits again.

        Args:
            items: Inputs as of :meth:`fit`, M of them.
            labels: Their labels.

        Returns:
            Their identifiers, int64, shape (M,), which no other point has had since :meth:`fit`.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: As of :meth:`fit`.
            InputError: As of :meth:`fit`.

        Warns:
            UserWarning: An added class has no held-out query: no rate covers it.
        """
        now, before = self._gallery, self.uncovered
        added, classes = self._embedded("items", items, labels)
        identifiers = np.arange(now.following, now.following + len(added))
        self._gallery = Points(
            torch.cat([now.directions, added.directions]),
            torch.cat([now.classes, classes]),
            np.concatenate([now.identifiers, identifiers]),
            now.following + len(added),
        )
        self._certify()
        if len(self.uncovered) > len(before):
            warnings.warn(f"add: {self._not_covered()}", UserWarning, stacklevel=2)
        return identifiers

    def remove(self, identifiers: Any) -> Self:
        """Remove points from the gallery, and compute the limits again.

        Args:
            identifiers: Whole numbers from ``answers.neighbour`` or :meth:`add`, shape (M,).

        Returns:
            The object itself.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: The identifiers are not whole numbers.
            InputError: An identifier is not in the gallery, or no point would be left.
        """
        now, gone = self._gallery, np.asarray(identifiers.cpu() if isinstance(identifiers, Tensor) else identifiers)
        if gone.size and gone.dtype.kind not in "iu":
            hint = "numpy.flatnonzero(mask) numbers the points of a mask, as long as none was removed."
            raise InputTypeError("identifiers", "whole numbers", f"{gone.dtype}", hint)
        missing = np.setdiff1d(gone, now.identifiers)
        if len(missing):
            raise InputError("identifiers", "those of points in the gallery", f"{missing[:_NAMED].tolist()}")
        keep = ~np.isin(now.identifiers, gone)
        if not keep.any():
            raise InputError("identifiers", "some of the points", "all", "Fit again, with another gallery.")
        rows = torch.from_numpy(keep).to(now.directions.device)
        self._gallery = now._replace(
            directions=now.directions[rows], classes=now.classes[rows.cpu()], identifiers=now.identifiers[keep]
        )
        self._certify()
        return self

    def learn(self, queries: Any, labels: Any, asked: Literal["random", "answered"]) -> Self:
        """Learn from queries with labels, and compute the limits again.

        Args:
            queries: Inputs as of :meth:`fit`.
            labels: Their labels.
            asked: How the queries were chosen. ``"random"``: at random among all queries, answered or not; they become
                held-out queries. ``"answered"``: because they were answered. The queries that the present limit answers
                are kept: now and later they can only lower the limit. As held-out queries they would hide errors among
                queries that are not answered yet.

        Returns:
            The object itself.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: As of :meth:`fit`.
            InputError: As of :meth:`fit`, or ``asked`` has another value.
        """
        rule = self._rule
        validate.choice("asked", asked, ("random", "answered"))
        more, truth = self._embedded("queries", queries, labels)
        if asked == "random":
            both = Embedded.cat([self._held, more]), torch.cat([self._truth, truth])
            self._held, self._truth = _without_repetitions("queries", *both)
            self._certify()
            return self
        columns, _, novelty = self._search(more)
        kept = np.flatnonzero(rule.decision(columns, novelty) == "answer")
        if not len(kept):
            return self
        more, truth = more[kept], truth[kept]
        if self._feedback is not None:
            more, truth = Embedded.cat([self._feedback[0], more]), torch.cat([self._feedback[1], truth])
        self._feedback = more, truth
        self._certify(min(self._ceiling, rule.limit))
        return self

    def because(
        self, queries: Any, x: Any, y: Any = None, *, k: int = 3
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Find the training items without which the answers to queries would weaken most.

        The margin of an answer is the cosine to the match minus the cosine to the nearest point of another class.
        :func:`contrastive_curvature.influence` predicts the change of the margin if an item had been left out of the
        training of the posterior's weights but were still searched. A posterior with the loss and the prior of the
        training and the structure ``"full"`` predicts best; the default posterior predicts less well
        (``docs/influence.md``).

        Args:
            queries: Inputs as of :meth:`fit`, Q of them.
            x: The training inputs as passed to ``fit``, which does not keep them; they must be the gallery. For a
                fitted posterior whose loss compares within batches, a loader of these batches.
            y: Their labels.
            k: Number of items, at most N.

        Returns:
            Identifiers of the items, int64, shape (Q, k), and the predicted changes, float64, shape (Q, k), the most
            negative first.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: As of :meth:`fit`.
            InputError: As of :meth:`fit`; ``x`` and ``y`` are not the gallery, or the gallery has one class or fewer
                than ``k`` points.
            UnsupportedError: There is no posterior, or :func:`contrastive_curvature.influence` does not take it.
        """
        points, la, known = self._gallery, self.la, self._codes
        if la is None:
            raise UnsupportedError("because: embeddings have no posterior. Give an encoder, or head=True.")
        if validate.count("k", k) > len(points.identifiers):
            raise InputError("k", f"at most {len(points.identifiers)}, the points of the gallery", k)
        asked, inputs_of = batches(la.model, queries, _ASKED, "queries")
        x = in_memory(x, "x")
        items, classes = self._embedded("x", x, y)
        names, self._codes = list(self._codes), known
        same = items.directions.shape == points.directions.shape and torch.equal(classes, points.classes)
        if not same or not torch.allclose(items.directions, points.directions, atol=1e-3):
            hint = "Items that were added or removed, or a gallery of its own, taught the posterior nothing."
            raise InputError("x, y", "the points of the gallery, in its order", f"{len(items)} other ones", hint)
        loader, labels = (_batched(la, x, classes), classes) if _in_memory(x) else (x, torch.tensor(names)[classes])
        weakest = []
        for batch in map(inputs_of, asked):
            match = self._search(embedded(la, [batch], "queries"))[1]
            change = influence(la, loader, [(batch, labels[torch.from_numpy(match)])])
            weakest.append(change.double().cpu().topk(k, largest=False))
        if not weakest:
            raise InputError("queries", "at least one input", "none")
        changes, rows = (torch.cat(part).numpy() for part in zip(*weakest, strict=True))
        return points.identifiers[rows], changes

    def evaluate(self, test: Any, unknown: Any = None) -> dict[str, Rate]:
        """Compare the asked rates with the observed rates of test queries.

        Args:
            test: ``(inputs, labels)``, or a loader, as ``held_out`` of :meth:`fit`.
            unknown: Inputs of an unknown kind, without labels.

        Returns:
            Rates by name: ``answered`` among all test queries, ``wrong_answers`` among the answered, ``false_matches``
            among the test queries with their class taken out of the gallery, and ``false_alarms``; with ``unknown``,
            also the shares of unknown inputs that are answered and that are called unknown, ``unknown_answered`` and
            ``unknown_found``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: As of :meth:`fit`.
            InputError: As of :meth:`fit`.
        """
        rule = self._rule
        # Labels of test queries alone are not kept.
        known = self._codes
        asked, truth = self._embedded("test", *_pair("test", test))
        self._codes = known
        seen, absent = self._labelled(asked, truth)
        decision = rule.decision(seen.evidence, seen.novelty)
        found = {
            "answered": Rate.of(None, decision == "answer"),
            "wrong_answers": Rate.of(self.rates.wrong_answers, ~seen.right[decision == "answer"]),
            "false_matches": Rate.of(self.rates.false_matches, rule.decision(absent, seen.novelty) == "answer"),
            "false_alarms": Rate.of(self.rates.false_alarms, decision == "unknown"),
        }
        if unknown is not None:
            decision = self(unknown).decision
            found["unknown_answered"] = Rate.of(None, decision == "answer")
            found["unknown_found"] = Rate.of(None, decision == "unknown")
        return found

    def __repr__(self) -> str:
        """Say what is promised, and what is not."""
        rates = self.rates
        if "_rule" not in vars(self):
            return f"Retriever, not fitted: {', '.join(f'{name}={value}' for name, value in rates._asdict().items())}"
        of = f"from {len(self._held):,} held-out queries"
        if self._feedback is not None:
            of += f" and {len(self._feedback[0]):,} answered ones"
        said = [f"answers {percent(self.answered)} of queries"]
        if rates.wrong_answers is None:
            said[0] += f" ({of})"
        else:
            sure = f"({percent(rates.confidence_level)} confidence, {of})"
            said.append(f"at most {percent(rates.wrong_answers)} of the answers are wrong {sure}")
            if 0 < self.answered * len(self._held) < _EDGE * rates.threshold().first(len(self._held)):
                said[-1] += (
                    ", which are hardly enough: most fits of so few answer nothing, and of those that answer, more "
                    "exceed this rate than the confidence says"
                )
        if rates.false_matches is not None:
            lacking = "such queries are answered where the gallery lacks their class, on average"
            said.append(f"at most {percent(rates.false_matches)} of {lacking}")
        if rates.false_alarms is not None:
            said.append(f"at most {percent(rates.false_alarms)} of them are called unknown, on average")
        shares = sorted(self._rule.kept_back.items(), key=lambda item: -item[1])
        if back := [f"{percent(share)} by {name}" for name, share in shares if share]:
            said.append(f"kept back: {', '.join(back)}")
        said += [f"{name}: {reason}" for name, reason in self.reasons.items()]
        return "; ".join(said + ([self._not_covered()] if self.uncovered else []))

    def save(self, folder: Path | str, *, overwrite: bool = False, example: Any = None) -> Path:
        """Write the retriever to a folder: the posterior, the gallery, the held-out queries as embeddings, the limits.

        Args:
            folder: The folder; missing parents are made.
            overwrite: Whether an existing saved retriever may be replaced.
            example: As of ``la.save_pretrained``.

        Returns:
            The folder, with all links followed.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputError: The folder has other content, or holds a retriever and ``overwrite`` is false.
            UnsupportedError: Labels are neither numbers nor strings, or the posterior cannot be saved.
            OSError: The folder cannot be written.
        """
        from contrastive_curvature.retriever.saved import save

        return save(self, folder, overwrite=overwrite, example=example)

    @classmethod
    def load(cls, folder: Path | str, encoder: nn.Module | None, *, index: Index | None = None, **options: Any) -> Self:
        """Load a folder of :meth:`save`. Nothing in the files is executed.

        Args:
            folder: The folder.
            encoder: The encoder of the fit, with its weights; another encoder is refused. The file contains the head.
            index: As of the class.
            **options: Of :func:`contrastive_curvature.load_pretrained`: ``loss``, ``relation``, ``backend``.

        Raises:
            InputError: A file is missing, damaged, foreign or of another version, or the encoder is another one.
        """
        from contrastive_curvature.retriever.saved import load

        return load(cls, folder, encoder, index, **options)

    def _posterior(self, x: Any, y: Any, progress_bar: bool | None) -> tuple[ContrastiveLaplace, tuple[Any, Any]]:
        """Fit a posterior of the last layer; return the features of the training inputs and their labels as well."""
        encoder: Any = self.encoder
        if self.head:
            raw, names = _read("x", x, y, partial(outputs, encoder, argument="x", progress_bar=progress_bar))
            self._head = encoder = with_head(encoder, raw, self._coded(names), progress_bar)
            with torch.no_grad():
                inputs = feature_inputs(encoder.head[:-1](raw).cpu(), "head.2")
        la: ContrastiveLaplace = ContrastiveLaplace(encoder)
        if not self.head:
            inputs, names = _encoded(la, "x", x, y, progress_bar)
        # Whole numbers stay, for ``la.update``.
        whole = all(type(name) is int for name in names)
        classes = torch.tensor(names) if whole else self._coded(names)
        la.fit(_batched(la, inputs, classes), progress_bar=progress_bar)
        la.optimize_prior_precision()
        return la, (inputs, names)

    def _embedded(
        self, argument: str, inputs: Any, labels: Any, progress_bar: bool | None = None
    ) -> tuple[Embedded, Tensor]:
        """Return embeddings, and the numbers of their labels."""
        read = partial(embedded, self.la, argument=argument, progress_bar=progress_bar)
        points, names = _read(argument, inputs, labels, read)
        return points, self._coded(names)

    def _coded(self, names: Sequence[Hashable]) -> Tensor:
        """Return numbers of labels, int64, shape (N,); new labels get new ones."""
        known = dict(self._codes)
        codes = torch.tensor([known.setdefault(name, len(known)) for name in names], dtype=torch.int64)
        self._codes = known
        return codes

    def _labelled(self, queries: Embedded, truth: Tensor) -> tuple[Labelled, NDArray[np.float64]]:
        """Return the evidence of queries in the gallery, and in the gallery without their class."""
        columns, match, novelty = self._search(queries)
        right = (self._gallery.classes[match] == truth).numpy()
        return Labelled(columns, right, novelty), self._search(queries, truth)[0]

    def _search(
        self, queries: Embedded, without: Tensor | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Return evidence and matches, as :func:`.evidence`, and novelties (N,)."""
        points, index = self._gallery, self.index
        search = None if index is None else partial(nearest, index, points.directions, points.identifiers)
        columns, match = evidence(queries, points.directions, points.classes, without, search)
        return columns, match, np.exp(columns[:, 1]) if self.la is None else queries.novelty

    def _certify(self, ceiling: float = math.inf) -> Labelled:
        """Compute the limits for the present gallery and held-out queries, and return the evidence of these queries.

        ``ceiling`` is a limit of the present score.
        """
        feedback = None if self._feedback is None else self._labelled(*self._feedback)[0]
        held, absent = self._labelled(self._held, self._truth)
        self._take(certified(self.rates, held, absent, feedback, ceiling), ceiling)
        for name, reason in self.reasons.items():
            warnings.warn(f"{name}: {reason}", UserWarning, stacklevel=3)
        return held

    def _take(self, rule: Rule, ceiling: float) -> None:
        self._rule, self._ceiling, self.answered, self.reasons = rule, ceiling, rule.answered, rule.reasons
        covered, names = set(self._truth.tolist()), list(self._codes)
        self.uncovered = [names[code] for code in self._gallery.classes.unique().tolist() if code not in covered]

    def _not_covered(self) -> str:
        names = self.uncovered
        shown = ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
        codes = torch.tensor([self._codes[name] for name in names])
        share = float(torch.isin(self._gallery.classes, codes).double().mean())
        return (
            f"no rate covers queries of the classes {shown} ({len(names):,} classes, {percent(share)} of the gallery), "
            "which no held-out query has: call learn(queries, labels, 'random')"
        )


def _without_repetitions(argument: str, queries: Embedded, truth: Tensor) -> tuple[Embedded, Tensor]:
    rows = queries.distinct(truth)
    if more := len(queries) - len(rows):
        got = f"{more:,} of {len(queries):,} held-out queries are repetitions of others"
        warnings.warn(f"{argument}: {got}, and count once", UserWarning, stacklevel=3)
    return queries[rows], truth[rows]


def _batched(la: ContrastiveLaplace, x: Any, classes: Tensor) -> list[tuple[Any, Tensor]]:
    """Return inputs in memory as batches with the numbers of their labels."""
    items, inputs_of = batches(la.model, x, AT_ONCE, "x")
    return [(inputs_of(rows), classes[rows]) for rows in items]


def embedded(la: ContrastiveLaplace | None, inputs: Any, argument: str, progress_bar: bool | None = None) -> Embedded:
    """Return embeddings, uncertainties and novelties of inputs; arguments as of :func:`.predictions`."""
    if la is None:
        directions = normalize(outputs(None, inputs, argument, progress_bar))[0]
        # A number that is the same for all says nothing.
        return Embedded(directions, np.zeros(len(directions)), np.zeros(len(directions)))
    inputs, places = by_length(inputs, argument)
    parts = []
    with torch.no_grad():
        for batch in results(la, la.model, inputs, argument, AT_ONCE, progress_bar, "[predict]"):
            numbers = (value.double().cpu().numpy() for value in (batch.uncertainty, batch.novelty))
            parts.append(Embedded(normalize(batch.mu.float())[0], *numbers))
    return Embedded.cat(parts)[places]


def _encoded(
    la: ContrastiveLaplace | None, argument: str, inputs: Any, labels: Any, progress_bar: bool | None
) -> tuple[Any, Any]:
    """Return features and labels if the posterior takes features, so the encoder runs once; else both unchanged."""
    if la is None or not la.on_last_layer:
        return inputs, labels
    read = partial(last_layer_features, la, argument=argument, progress_bar=progress_bar)
    features, names = _read(argument, inputs, labels, read)
    return feature_inputs(features, la.model.last_layer_name), names


def _read(argument: str, inputs: Any, labels: Any, read: Callable[[Any], _T]) -> tuple[_T, list[Hashable]]:
    """Return the result of ``read`` for inputs without labels, and the labels."""
    inputs = in_memory(inputs, argument)
    if labels is not None or _in_memory(inputs):
        names = _checked_labels(argument, inputs, labels)
        return read(inputs), names
    check_loader(inputs, argument, once=True)
    names = []

    def alone() -> Iterator[Any]:
        # Both in one pass, for a loader may have another order in the next.
        for batch in in_fixed_order(inputs, argument):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2 or is_texts(batch):
                raise InputTypeError(argument, "batches (inputs, labels)", f"a {type(batch).__name__}")
            names.extend(_labels(argument, batch[1], len(names)))
            yield batch[0]

    result = read(alone())
    if len(names) != len(result):
        raise InputError(argument, f"{len(result)} labels, one an input", f"{len(names)}")
    return result, names


def _in_memory(inputs: Any) -> bool:
    """Return whether these are inputs without labels, and not a loader."""
    return isinstance(inputs, (str, Tensor, np.ndarray, Mapping)) or is_texts(inputs)


def _pair(argument: str, given: Any) -> tuple[Any, Any]:
    """Return inputs and labels; a loader has no labels beside it."""
    if isinstance(given, tuple) and len(given) == 2 and not is_texts(given):
        return in_memory(given[0], argument), given[1]
    if _in_memory(given) or isinstance(given, tuple):
        got = f"a {type(given).__name__}"
        raise InputTypeError(argument, "(inputs, labels), or a loader of such batches", got)
    return given, None


def _labels(argument: str, labels: Any, before: int = 0) -> list[Hashable]:
    """Return labels as a list of hashable values; ``before`` counts the labels of earlier batches."""
    listed = labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) or hasattr(labels, "tolist") else labels
    if not isinstance(listed, (list, tuple)):
        hint = "Pass a tensor, an array or a list."
        raise InputTypeError(f"{argument}: labels", "one label an input", f"a {type(labels).__name__}", hint)
    plain = [value.item() if isinstance(value, (np.generic, Tensor)) else value for value in listed]
    for place, value in enumerate(plain, before):
        # NaN is not equal to itself, and whether pd.NA is, is pd.NA.
        if not isinstance(value, Hashable) or value is None or (value == value) is not True:
            hint = "One label an input, a number or a string. Leave out inputs without a label."
            got = f"{value!r} at position {place}, counted from 0"
            raise InputError(f"{argument}: labels", "shape (N,), hashable values", got, hint)
    return plain


def _checked_labels(argument: str, inputs: Any, labels: Any) -> list[Hashable]:
    """Return the labels of inputs in memory, one for each."""
    if not _in_memory(inputs):
        hint = "Its batches (inputs, labels) have them: leave them out."
        raise InputError(f"{argument}: labels", "none beside a loader", f"a {type(labels).__name__}", hint)
    names = _labels(argument, labels)
    first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
    if len(names) != len(first):
        raise InputError(f"{argument}: labels", f"{len(first)}, one an input", f"{len(names)}")
    return names


def _as_array(labels: Sequence[Hashable]) -> NDArray[Any]:
    """Return labels as an array: of numbers or strings of one type, else of objects."""
    if len(kinds := {type(label) for label in labels}) == 1 and kinds <= {str, int, float, bool}:
        return np.array(labels)
    return np.fromiter(labels, dtype=object, count=len(labels))
