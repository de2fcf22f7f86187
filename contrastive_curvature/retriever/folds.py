"""Queries of classes that an encoder was not trained on, from trainings of the user's own without these classes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.network.inputs import slice_inputs
from contrastive_curvature.retriever.encoding import embedded, fitted_posterior
from contrastive_curvature.retriever.reading import are_inputs, labels_of, read
from contrastive_curvature.retriever.rule import PRESENT, Ranks, Rates, Regression
from contrastive_curvature.retriever.state import RetrieverState, coded

Pair = tuple[Any, Any]

_FOLDS = 4


def ranks(
    train: Callable[[Any, Any], nn.Module], x: Pair, held: Pair, gallery: Pair | None, progress_bar: bool | None
) -> Ranks:
    """Train once without each quarter of the classes, and rank their held-out queries among those of the other classes.

    Their scores come from a regression on the other three trainings. A limit is then a share of the known queries,
    which means the same for every encoder; a limit of scores does not.

    Args:
        train: As of :meth:`.Retriever.fit`.
        x: Training inputs and their labels, in memory.
        held: The same of the held-out queries.
        gallery: The same of the gallery; ``None`` for the training inputs.
        progress_bar: As of :meth:`.Retriever.fit`.
    """
    for argument, (inputs, _) in {"x": x, "held_out": held, "gallery": gallery or x}.items():
        if not are_inputs(inputs):
            raise InputTypeError(argument, "inputs in memory for train", f"a {type(inputs).__name__}")
    labels = coded((), labels_of("held_out", held[1]))[0]
    if len(labels) < _FOLDS:
        raise InputError("train", f"held-out queries of at least {_FOLDS} classes", len(labels))
    fold = np.random.default_rng(0).permutation(len(labels)) % _FOLDS
    found, classes = [], []
    for k in range(_FOLDS):
        left = {name for name, of in zip(labels, fold, strict=True) if of == k}
        inside = partial(_part, left=left, inside=True)
        others = partial(_part, left=left, inside=False)
        encoder = train(*others(x))
        if not isinstance(encoder, nn.Module):
            raise InputTypeError("train", "a function that returns a torch.nn.Module", f"a {type(encoder).__name__}")
        posterior, trained = fitted_posterior(encoder, *others(x), progress_bar=progress_bar)

        def run(argument: str, inputs: Any, labels: Any, posterior: Any = posterior) -> Any:
            return read(argument, inputs, labels, partial(embedded, posterior, argument=argument))

        points, points_of = run("gallery", *(trained if gallery is None else others(gallery)))
        rates = Rates(None, 0.5, None, 0.9)
        queries, of = run("held_out", *others(held))
        state = RetrieverState.fitted(rates, posterior, points, points_of, queries, of, None)
        known = state.compared(state.held, state.truth, None)[0]
        queries, of = run("held_out", *inside(held))
        found.append((known.evidence, known.right, state.searched(queries, None)[0].evidence))
        classes.append(coded(labels, of)[1].numpy())

    def fitted(folds: list[Any]) -> Regression:
        held_out, right, unseen = (np.concatenate(part) for part in zip(*folds, strict=True))
        return Regression.fitted(held_out, right, unseen, *PRESENT)

    shares = []
    for k, (held_out, _, unseen) in enumerate(found):
        present = fitted(found[:k] + found[k + 1 :])
        shares.append(np.searchsorted(np.sort(present(held_out)), present(unseen), side="right") / len(held_out))
    return Ranks(np.concatenate(shares), np.concatenate(classes), fitted(found))


def _part(pair: Pair, left: set[Hashable], inside: bool) -> Pair:
    """Return the inputs and labels whose class is in a set, or is not."""
    return part_of(pair, np.flatnonzero([(name in left) == inside for name in labels_of("labels", pair[1])]))


def part_of(pair: Pair, rows: NDArray[np.int64]) -> Pair:
    """Return some rows of inputs and labels in memory."""

    def at(values: Any) -> Any:
        if isinstance(values, (Tensor, Mapping)):
            return slice_inputs(values, torch.from_numpy(rows))
        return values[rows] if isinstance(values, np.ndarray) else [values[k] for k in rows]

    return at(pair[0]), at(pair[1])
