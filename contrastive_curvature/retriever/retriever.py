"""``cc.Retriever``: a search that answers, is unsure, or does not know, each at a stated rate of errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from contrastive_curvature import validate
from contrastive_curvature.decisions.fitted import one_of_each, percent
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError
from contrastive_curvature.laplace.influence import influence
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.in_batches import batches
from contrastive_curvature.network.inputs import in_memory
from contrastive_curvature.retriever.answers import Answers, Rate
from contrastive_curvature.retriever.encoding import (
    batched,
    calibrated,
    check_novelty,
    embedded,
    features,
    fitted_posterior,
    frozen,
    headed,
)
from contrastive_curvature.retriever.evidence import Embedded
from contrastive_curvature.retriever.folds import part_of, ranks
from contrastive_curvature.retriever.index import Index
from contrastive_curvature.retriever.reading import are_inputs, check, labels_of, pair, read
from contrastive_curvature.retriever.rule import Rates
from contrastive_curvature.retriever.state import NAMED, RetrieverState, coded

_EDGE = 1.25
"""Times as many answered held-out queries as the first test of a limit takes: below, few fits answer anything."""

_ASKED = 64
"""Queries that are explained at once, with N D numbers each."""


class Retriever:
    """Answer a query with its nearest gallery point, or say that it is unsure or unknown, at stated rates of errors.

    P(right) is a logistic regression on six numbers of the search and the posterior (:mod:`.evidence`); a second
    regression finds queries whose class the gallery lacks. Held-out queries with labels set the limits of both. Each
    rate holds for queries drawn like the held-out queries, and ``None`` limits nothing:

    - ``wrong_answers``: at most this share of the answers is wrong, with probability ``confidence_level`` over the
      held-out queries. An answer is also wrong if the gallery lacks the query's class.
    - ``false_matches``: at most this share of such queries is answered if their class is taken out of the gallery, on
      average. For classes that nobody knows it holds with a head, or with ``new_classes`` or ``train`` of
      :meth:`fit`, on average over classes; :attr:`statement` says how far.
    - ``false_alarms``: at most this share of such queries is called unknown, on average.

    The first two are tested with scores from other held-out queries, and hold in simulations (``docs/statistics.md``);
    the third is a conformal p-value. If no limit keeps a rate, nothing is answered: :attr:`reasons` and a warning say
    why. The limits are computed again whenever the gallery or the held-out queries change; the level holds for
    each computation alone.

    Threads may share a retriever. A call answers from the gallery, the labels and the limits of one moment. ``fit``,
    ``add``, ``remove`` and ``learn`` wait for each other, also for a whole ``fit``, and replace all at their end: an
    error, an interrupt, or a warning that a filter turns into an error, changes nothing.

    Args:
        encoder: A trained encoder, to which ``fit`` fits a posterior; or a fitted posterior of
            ``likelihood="contrastive"``, of which ``fit`` keeps a copy; or ``None`` if the inputs are embeddings
            (N, D). Without a posterior as many queries are answered (``docs/statistics.md``), there is no uncertainty,
            and an input is unknown if it is far from its ten nearest gallery points of any class.
        wrong_answers: In (0, 1), or ``None``.
        false_matches: In (0, 1), or ``None``.
        false_alarms: In (0, 1), or ``None``.
        confidence_level: In (0, 1).
        head: Whether ``fit`` trains a head of two layers on the outputs of the encoder, or on the embeddings, and fits
            a posterior to the head: for an encoder that was not trained on ``x`` and ``y``. It takes seconds, and the
            same inputs give the same head. ``false_matches`` then limits what the outputs below the head say, where
            no class was trained, and a query is answered only if its nearest point there has the class of the match.
            These outputs are kept and searched one by one. If more held-out queries have a right match without the
            head, it is not used, and a warning says so.
        by_class: Whether ``false_matches`` limits the mean over classes by risk control over classes, which takes
            ``1 / false_matches - 1`` classes with queries that are held out, and answers fewer queries.
        index: Index that is searched in place of the gallery, see :class:`.Index`. It holds the embeddings of the
            gallery, with the identifiers of :class:`Answers`. Add and remove points in both, first in the index. The
            embeddings are ``la(x).mu``, or the normalised inputs without a posterior.

    Raises:
        InputTypeError: The encoder is not an encoder, or a rate is not a number.
        InputError: A rate is not in (0, 1), or ``head`` is true for a fitted posterior.

    Source: Angelopoulos et al. (2021), arXiv 2110.01052, for the limits, and (2022), arXiv 2208.02814, for
    ``by_class``; Lowe (2004) for the gap to another class.
    """

    def __init__(
        self,
        encoder: nn.Module | ContrastiveLaplace | None,
        wrong_answers: float | None = 0.02,
        false_matches: float | None = 0.05,
        false_alarms: float | None = 0.01,
        confidence_level: float = 0.9,
        *,
        head: bool = False,
        by_class: bool = False,
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
        given: dict[str, Any] = {
            name: None if rate is None else validate.fraction(name, rate) for name, rate in asked.items()
        }
        for name, value in (("head", head), ("by_class", by_class)):
            validate.flag(name, value)
        self.encoder, self.head, self.index = encoder, head, index
        level = validate.fraction("confidence_level", confidence_level)
        self.rates = Rates(**given, confidence_level=level, by_class=by_class)
        self._state: RetrieverState | None = None
        self._writing = Lock()

    @property
    def _now(self) -> RetrieverState:
        """The present state, which each method reads once: another thread may replace it."""
        if self._state is None:
            raise NotFittedError("Retriever: expected a fit before it is used. Call fit(...).")
        return self._state

    @property
    def la(self) -> ContrastiveLaplace | None:
        """A copy of the posterior, whose changes change no answer; ``None`` if inputs are embeddings without a head."""
        return copy.copy(self._now.posterior)

    @property
    def answered(self) -> float:
        """Share of the held-out queries that are answered."""
        return self._now.rule.answered

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons why nothing is answered, or nothing is called unknown, by the name of the rate."""
        return self._now.rule.reasons

    @property
    def statement(self) -> str | None:
        """What ``false_matches`` holds for, one of three; ``None`` if it is ``None``.

        - ``"certified over classes"``: new classes that are exchangeable with those whose queries set the limit.
        - ``"on average over classes"``: the same, but the mean over new classes may exceed the rate by about 1 / C.
        - ``"classes taken out of the gallery"``: no class that the encoder was not trained on, unless it was trained
          on none of them.

        One particular class can exceed the rate in each case.
        """
        said = self._now.rule.statement
        return None if said is None else said.holds

    @property
    def uncovered(self) -> list[Hashable]:
        """Labels of the gallery without a held-out query; no rate covers them."""
        return self._now.uncovered

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        held_out: Any,
        gallery: Any = None,
        groups: Any = None,
        new_classes: Any = None,
        train: Callable[[Any, Any], nn.Module] | None = None,
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
                trained the encoder nor are in the gallery. The retriever's copy of a posterior that is not calibrated
                is calibrated with them; they may be the inputs of ``la.calibrate`` too, as long as the posterior has
                its training inputs, from which it then measures novelty.
            gallery: The points that are searched, as ``held_out``; ``None`` for ``x`` and ``y``.
            groups: Groups of the held-out queries, N numbers or strings, where queries depend on each other: pictures
                of one person, paraphrases of one question. One query of each group, drawn at random, is held out.
            new_classes: ``(inputs, labels)``, or a loader: queries of classes that neither the encoder nor the gallery
                has. The limit of ``false_matches`` then keeps the rate for them too.
            train: A function of inputs and labels that trains an encoder as yours was trained, and returns it. It is
                called four times, without a quarter of the classes each, whose held-out queries then set a second limit
                of ``false_matches``. All data must be in memory. Later changes of the gallery keep the share of the
                known queries that this limit answers.
            progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

        Returns:
            The object itself.

        Raises:
            InputTypeError: Inputs or labels have another type, or ``train`` returns no encoder.
            InputError: Numbers of inputs and labels differ, there are too few, a label is missing (``None``, NaN or
                ``pandas.NA``), or the encoder does not take them; a label of ``new_classes`` is one of ``x`` or the
                gallery; ``train`` is passed with ``new_classes``, or with another encoder than a module without a head.
            UnsupportedError: The library has no posterior for this encoder.
            NotFittedError: The encoder is a posterior that is neither calibrated nor has a sample of its training
                inputs, because it was loaded or is not of the last layer; or it changed after its calibration.

        Warns:
            UserWarning: Nothing is answered, a head is not used, most held-out queries are in the gallery, or some are
                repetitions of others, which count once: independent draws alone tell how sure the rates are.
            OptimisticPValueWarning: Held-out queries are among the training inputs.
        """
        x, queries = in_memory(x, "x"), pair("held_out", held_out)
        searched = (x, y) if gallery is None else pair("gallery", gallery)
        fits = not isinstance(self.encoder, ContrastiveLaplace) and (self.encoder is not None or self.head)
        given = {"held_out": queries, "x" if gallery is None else "gallery": searched}
        if new_classes is not None:
            given["new_classes"] = new_classes = pair("new_classes", new_classes)
        for argument, value in (("new_classes", new_classes), ("train", train)):
            if value is not None and self.rates.false_matches is None:
                raise InputError(argument, "None, as false_matches is None", f"a {type(value).__name__}")
        if train is not None and (new_classes is not None or self.head or not isinstance(self.encoder, nn.Module)):
            wanted = "None beside new_classes, and for another encoder than a torch.nn.Module without a head"
            raise InputError("train", wanted, f"a {type(train).__name__}")
        # Before a fit that may be long.
        for argument, (inputs, labels) in ({"x": (x, y), **given} if fits else given).items():
            check(argument, inputs, labels)
        with self._writing:
            posterior: Any = self.encoder
            said: list[str] = []
            unseen: Any = None
            asked = queries
            if self.head:
                x, y = frozen(posterior, "x", x, y, progress_bar)
                queries = frozen(posterior, "held_out", *queries, progress_bar)
                searched = (x, y) if gallery is None else frozen(posterior, "gallery", *searched, progress_bar)
                posterior, shares = headed(posterior, (x, y), queries, searched, progress_bar)
                if len(posterior.head) == 1:
                    said.append(_without_head(*shares))
                x = posterior.inputs(x)
                queries, searched = ((posterior.inputs(raw), names) for raw, names in (queries, searched))
            if fits:
                posterior, trained = fitted_posterior(posterior, x, y, progress_bar=progress_bar)
                searched = trained if gallery is None else searched
            if posterior is not None:
                check_novelty(posterior)
            queries = features(posterior, "held_out", *queries, progress_bar)
            held, held_names = _embedded(posterior, "held_out", *queries, progress_bar)
            if groups is not None:
                if len(named := labels_of("groups", groups)) != len(held):
                    raise InputError("groups", f"{len(held)}, one a held-out query", f"{len(named)}")
                rows = one_of_each(named)
                held, held_names = held[rows], [held_names[row] for row in rows]
                asked = asked if train is None else part_of(asked, rows)
            if train is not None:
                unseen = ranks(train, (x, y), asked, None if gallery is None else searched, progress_bar)
            points, names = _embedded(posterior, "x" if gallery is None else "gallery", *searched, progress_bar)
            if new_classes is not None:
                new_inputs, new_labels = new_classes
                unseen = _embedded(posterior, "new_classes", new_inputs, new_labels, progress_bar)
                if both := {*unseen[1]} & {*names, *(trained[1] if fits else ())}:
                    wanted = "labels that neither x nor the gallery has"
                    raise InputError("new_classes", wanted, f"{sorted(map(repr, both))[:NAMED]}")
            new = RetrieverState.fitted(self.rates, posterior, points, names, held, held_names, self.index, unseen)
            if posterior is not None:
                new = replace(new, posterior=calibrated(posterior, queries[0], progress_bar))
            self._become(new, *said, *_repeated("held_out", len(held), new), *_searched_too(new))
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
        state = self._now
        return state.answers(embedded(state.posterior, queries, "queries"), self.index)

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
        with self._writing:
            state = self._now
            new = state.added(*_embedded(state.posterior, "items", items, labels), self.index)
            more = [f"add: {_not_covered(new)}"] if len(new.uncovered) > len(state.uncovered) else []
            self._become(new, *more)
        return np.arange(state.gallery.next_identifier, new.gallery.next_identifier)

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
        with self._writing:
            self._become(self._now.removed(identifiers, self.index))
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
        with self._writing:
            state = self._now
            more, names = _embedded(state.posterior, "queries", queries, labels)
            new = state.learned(more, names, asked, self.index)
            count = len(state.held) + len(more)
            self._become(new, *(_repeated("queries", count, new) if asked == "random" else ()))
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
        state = self._now
        points, la = state.gallery, state.posterior
        if la is None:
            raise UnsupportedError("because: embeddings have no posterior. Give an encoder, or head=True.")
        if validate.count("k", k) > len(points.identifiers):
            raise InputError("k", f"at most {len(points.identifiers)}, the points of the gallery", k)
        asked, inputs_of = batches(la.model, queries, _ASKED, "queries")
        x = in_memory(x, "x")
        items, names = _embedded(la, "x", x, y)
        classes = coded(state.labels, names)[1]
        same = items.directions.shape == points.directions.shape and torch.equal(classes, points.classes)
        if not same or not torch.allclose(items.directions, points.directions, atol=1e-3):
            hint = "Items that were added or removed, or a gallery of its own, taught the posterior nothing."
            raise InputError("x, y", "the points of the gallery, in its order", f"{len(items)} other ones", hint)
        loader, labels = (batched(la, x, classes), classes) if are_inputs(x) else (x, torch.tensor(names, device="cpu"))
        weakest = []
        for batch in map(inputs_of, asked):
            match = state.searched(embedded(la, [batch], "queries"), self.index)[1]
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
        state = self._now
        rates, rule = state.rates, state.rule
        asked, names = _embedded(state.posterior, "test", *pair("test", test))
        seen, absent = state.compared(asked, coded(state.labels, names)[1], self.index)
        decision = rule.decision(seen)
        found = {
            "answered": Rate.of(None, decision == "answer"),
            "wrong_answers": Rate.of(rates.wrong_answers, ~seen.right[decision == "answer"]),
            "false_matches": Rate.of(rates.false_matches, rule.decision(absent) == "answer"),
            "false_alarms": Rate.of(rates.false_alarms, decision == "unknown"),
        }
        if unknown is not None:
            decision = state.answers(embedded(state.posterior, unknown, "unknown"), self.index).decision
            found["unknown_answered"] = Rate.of(None, decision == "answer")
            found["unknown_found"] = Rate.of(None, decision == "unknown")
        return found

    def __repr__(self) -> str:
        """Say what is promised, and what is not."""
        state = self._state
        if state is None:
            return (
                f"Retriever, not fitted: {', '.join(f'{name}={value}' for name, value in self.rates._asdict().items())}"
            )
        rates, rule = state.rates, state.rule
        of = f"from {len(state.held):,} held-out queries"
        if state.feedback is not None:
            of += f" and {len(state.feedback[0]):,} answered ones"
        said = [f"answers {percent(rule.answered)} of queries"]
        if rates.wrong_answers is None:
            said[0] += f" ({of})"
        else:
            sure = f"({percent(rates.confidence_level)} confidence, {of})"
            said.append(f"at most {percent(rates.wrong_answers)} of the answers are wrong {sure}")
            if 0 < rule.answered * len(state.held) < _EDGE * rates.threshold().first(len(state.held)):
                said[-1] += (
                    ", which are hardly enough: most fits of so few answer nothing, and of those that answer, more "
                    "exceed this rate than the confidence says"
                )
        if rates.false_matches is not None:
            lacking = "such queries are answered where the gallery lacks their class, on average"
            said.append(f"at most {percent(rates.false_matches)} of {lacking}{' over classes' * rates.by_class}")
        if rates.false_matches is not None and rule.statement is not None:
            said.append(rule.statement.said(rates.false_matches))
        if rates.false_alarms is not None:
            said.append(f"at most {percent(rates.false_alarms)} of them are called unknown, on average")
        shares = sorted(rule.kept_back.items(), key=lambda item: -item[1])
        if back := [f"{percent(share)} by {name}{rule.price(name)}" for name, share in shares if share]:
            said.append(f"kept back: {', '.join(back)}")
        said += [f"{name}: {reason}" for name, reason in rule.reasons.items()]
        return "; ".join(said + ([_not_covered(state)] if state.uncovered else []))

    def save(self, folder: Path | str, *, overwrite: bool = False, example: Any = None) -> Path:
        """Write the retriever to a folder: the posterior, the gallery, the held-out queries as embeddings, the limits.

        They are one file, which is replaced as a whole: a save that is interrupted leaves the earlier one.

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

        return save(self._now, folder, overwrite=overwrite, example=example)

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

        state = load(folder, encoder, **options)
        retriever = cls(state.posterior, **state.rates._asdict(), index=index)
        retriever._state = state
        return retriever

    def _become(self, new: RetrieverState, *more: str) -> None:
        """Warn, and then replace the state: a warning that a filter turns into an error leaves the earlier one."""
        reasons = new.rule.reasons.items() if new is not self._state else ()
        for message in (*more, *(f"{name}: {reason}" for name, reason in reasons)):
            warnings.warn(message, UserWarning, stacklevel=3)
        self._state = new

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock out: it cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_writing"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Give a copy a lock of its own."""
        vars(self).update(values, _writing=Lock())


def _embedded(
    posterior: ContrastiveLaplace | None, argument: str, inputs: Any, labels: Any, progress_bar: bool | None = None
) -> tuple[Embedded, list[Hashable]]:
    """Return embeddings and labels."""
    run = partial(embedded, posterior, argument=argument, progress_bar=progress_bar)
    return read(argument, inputs, labels, run)


def _repeated(argument: str, count: int, new: RetrieverState) -> Iterator[str]:
    """Say how many of so many held-out queries are repetitions."""
    if more := count - len(new.held):
        yield f"{argument}: {more:,} of {count:,} held-out queries are repetitions of others, and count once"


def _searched_too(state: RetrieverState) -> Iterator[str]:
    """Say how many held-out queries are points of the gallery, if most are."""
    if state.rule.in_gallery > 0.5:
        share = percent(state.rule.in_gallery)
        yield (
            f"held_out: {share} of the queries are in the gallery. No rate holds for new queries: hold out others than "
            "those that are searched."
        )


def _without_head(headed: float, bare: float) -> str:
    """Say that the encoder is better without the head that was trained."""
    return (
        f"head: {percent(headed)} of the held-out queries have a right match with a head, {percent(bare)} without: the "
        "outputs of the encoder are searched as they are"
    )


def _not_covered(state: RetrieverState) -> str:
    """Say which classes no rate covers."""
    names = state.uncovered
    shown = ", ".join(map(repr, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
    share = float(torch.isin(state.gallery.classes, coded(state.labels, names)[1]).double().mean())
    return (
        f"no rate covers queries of the classes {shown} ({len(names):,} classes, {percent(share)} of the gallery), "
        "which no held-out query has: call learn(queries, labels, 'random')"
    )
