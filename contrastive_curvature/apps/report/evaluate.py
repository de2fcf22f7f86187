"""Measure a posterior on data that it was not fitted on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from contrastive_curvature import validate
from contrastive_curvature.apps.report.cards import groups_of
from contrastive_curvature.apps.report.data import Data
from contrastive_curvature.apps.report.evaluation import Evaluation
from contrastive_curvature.apps.report.known import detection_of, thresholds_of
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.posterior import describe
from contrastive_curvature.apps.report.reliability import reliability_of
from contrastive_curvature.apps.report.retrieval import errors_of, retrieval_of, search
from contrastive_curvature.apps.report.scored import Scored, score
from contrastive_curvature.embedding.known import check_alpha
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.laplace.advice import LabelWarning
from contrastive_curvature.progress import Progress

__all__ = ["evaluate"]


def evaluate(
    la: Any,
    test: Iterable[Any] | Data,
    *,
    unknown: Iterable[Any] | Data | None = None,
    gallery: Iterable[Any] | Data | None = None,
    ks: Sequence[int] = (1, 5, 10),
    alphas: Sequence[float] = (0.01, 0.02, 0.05, 0.1),
    n_samples: int = 30,
    n_shown: int = 12,
    seed: int = 0,
    class_names: Mapping[int, str] | Sequence[str] | None = None,
    progress_bar: bool | None = None,
) -> Evaluation:
    """Compute every metric of the library, and what its page shows.

    Each data set is run over once. What there is no data for is a :class:`Missing` with its reason: labels for
    retrieval, ``unknown`` for the detection of unknown inputs, a calibration for thresholds.

    Args:
        la: A fitted posterior of one encoder, best calibrated with other inputs than ``test``.
        test: Known inputs that the posterior was neither fitted nor calibrated on: batches ``(x, labels)``, mappings,
            or ``x`` alone; or a :class:`Data`, which adds texts, pictures and names for the page.
        unknown: Inputs of kinds that the encoder does not know, in the same form; labels are not used.
        gallery: What the test inputs are searched in, with labels. ``None`` searches among the other test inputs.
        ks: Ranks of recall@k and mAP@k.
        alphas: Thresholds of the p-value whose flagged shares are reported, each in (0, 1).
        n_samples: Networks that vote, for the reliability; 0 leaves it out.
        n_shown: Inputs of each group on the page; 0 for none.
        seed: Of the sampled networks.
        class_names: Names of the labels, for the page.
        progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

    Returns:
        The evaluation.

    Raises:
        NotFittedError: Before ``fit``.
        InputTypeError: An argument or a batch has another type.
        InputError: An argument is out of range, a data set is empty, or an input has no finite output.
        UnsupportedError: ``la`` is a posterior of two towers.

    Warns:
        UserWarning: Most test inputs are in the gallery, too.
        LabelWarning: Test inputs are of classes that the fit did not have.
        OptimisticPValueWarning: The posterior is not calibrated.
    """
    _check_posterior(la)
    ranks = _counts("ks", ks)
    thresholds = _alphas(alphas)
    for name, value in (("n_samples", n_samples), ("n_shown", n_shown), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(expected(name, "a whole number >= 0", value))
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, (Mapping, Sequence))):
        wanted = "names by label, as a list or a dict"
        raise InputTypeError(expected("class_names", wanted, f"a {type(class_names).__name__}"))
    if progress_bar is not None:
        validate.flag("progress_bar", progress_bar)
    sources = {"test": test, "unknown": unknown, "gallery": gallery}
    data = {name: None if value is None else Data.of(name, value) for name, value in sources.items()}

    progress = Progress(progress_bar)
    voting, no_votes = _voting(la, n_samples)
    scored: dict[str, Scored] = {}
    for name, part in data.items():
        if part is not None:
            scored[name] = score(
                la,
                name,
                part,
                n_samples=0 if name == "unknown" else voting,
                n_shown=0 if name == "gallery" else n_shown,
                seed=seed,
                progress=progress,
                judged=name != "gallery",
            )
    known, other, searched = scored["test"], scored.get("unknown"), scored.get("gallery")
    _advise_on_classes(la, known)
    found = search(known, searched, max(ranks))
    return Evaluation(
        counts={
            "test": len(known),
            "unknown": 0 if other is None else len(other),
            "gallery": 0 if searched is None else len(searched),
            "classes": 0 if known.labels is None else len(known.labels.unique()),
        },
        retrieval=found if isinstance(found, Missing) else retrieval_of(found, ranks),
        errors=found if isinstance(found, Missing) else errors_of(found, known.uncertainty),
        reliability=no_votes or (found if isinstance(found, Missing) else reliability_of(known, searched)),
        detection=detection_of(known, other),
        thresholds=thresholds_of(la, known, other, thresholds),
        groups=groups_of(known, other, searched, found, class_names),
        posterior=describe(la),
    )


def _advise_on_classes(la: Any, known: Scored) -> None:
    """Warn of classes without a centre, which ``uncertainty`` compares inputs with."""
    if la.class_centres is None or known.labels is None:
        return
    classes = known.labels.unique()
    new = int((~torch.isin(classes, la.class_centres.labels.to(classes))).sum())
    if new:
        msg = (
            f"evaluate: {new} of the {len(classes)} classes of test were not in the fit, whose classes uncertainty "
            "compares inputs with. la.measure_classes(loader) takes those of other data, and la.class_centres = None "
            "leaves them out. Or are the classes numbered in another way?"
        )
        warnings.warn(msg, LabelWarning, stacklevel=3)


def _check_posterior(la: Any) -> None:
    from contrastive_curvature.laplace.base import ContrastiveLaplace
    from contrastive_curvature.laplace.towers import TwoTowerLaplace

    if isinstance(la, TwoTowerLaplace):
        msg = "evaluate: a posterior of two towers has two encoders. Evaluate la.a and la.b, each with its own inputs."
        raise UnsupportedError(msg)
    if not isinstance(la, ContrastiveLaplace):
        wanted = 'a posterior, Laplace(encoder, likelihood="contrastive") after fit'
        raise InputTypeError(expected("la", wanted, f"a {type(la).__name__}"))
    la.check_fitted()


def _voting(la: Any, n_samples: int) -> tuple[int, Missing | None]:
    """Number of networks to sample, and why there are none."""
    from contrastive_curvature.laplace.functional import ContrastiveFunctionalLaplace, ContrastiveFunctionalLLLaplace

    if not n_samples:
        return 0, Missing("No networks were sampled (n_samples=0).")
    if isinstance(la, (ContrastiveFunctionalLaplace, ContrastiveFunctionalLLLaplace)):
        return 0, Missing("A posterior of functions (structure 'gp') cannot sample one network for several batches.")
    return n_samples, None


def _counts(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputTypeError(expected(name, "positive whole numbers, as a list", repr(values)))
    return tuple(sorted({validate.count(name, value) for value in values}))


def _alphas(values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputTypeError(expected("alphas", "numbers in (0, 1), as a list", repr(values)))
    return tuple(sorted({check_alpha(value) for value in values}))
