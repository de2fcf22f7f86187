"""Measure a posterior on data that it was not fitted on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from contrastive_curvature import validate
from contrastive_curvature.apps.report import measure
from contrastive_curvature.apps.report.evaluation import Evaluation
from contrastive_curvature.apps.report.parts import Missing
from contrastive_curvature.apps.report.scored import Data, Scored, score
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.laplace.advice import LabelWarning
from contrastive_curvature.network.loader import check_loader
from contrastive_curvature.progress import Progress


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
        seed: Of the sampled networks, and of the pairs where there are more than 100,000 of a kind.
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
    ranks, thresholds = _sorted("ks", ks, validate.count), _sorted("alphas", alphas, validate.fraction)
    if not ranks:
        raise InputTypeError("ks", "positive whole numbers, as a list", repr(ks))
    for name, value in (("n_samples", n_samples), ("n_shown", n_shown), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(name, "a whole number >= 0", value)
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, (Mapping, Sequence))):
        wanted = "names by label, as a list or a dict"
        raise InputTypeError("class_names", wanted, f"a {type(class_names).__name__}")
    data = {}
    for name, source in (("test", test), ("unknown", unknown), ("gallery", gallery)):
        if source is not None:
            check_loader(source.batches if isinstance(source, Data) else source, name, once=True)
            data[name] = source if isinstance(source, Data) else Data(source)

    no_votes = _why_no_votes(la, n_samples)
    progress = Progress(progress_bar)
    scored = {
        name: score(
            la,
            name,
            part,
            n_samples=0 if no_votes or name == "unknown" else n_samples,
            n_shown=0 if name == "gallery" else n_shown,
            seed=seed,
            progress=progress,
            judge=name != "gallery",
        )
        for name, part in data.items()
    }
    known, other, searched = scored["test"], scored.get("unknown"), scored.get("gallery")
    _advise_on_classes(la, known)
    found = measure.search(known, searched, max(ranks))
    judged = None if other is None else other.judged
    return Evaluation(
        counts={
            **{name: len(scored.get(name, ())) for name in ("test", "unknown", "gallery")},
            "classes": 0 if known.labels is None else len(known.labels.unique()),
        },
        retrieval=found if isinstance(found, Missing) else measure.retrieval(found, ranks),
        errors=found if isinstance(found, Missing) else measure.errors(found, known.uncertainty),
        reliability=no_votes or (found if isinstance(found, Missing) else measure.reliability(found, known, searched)),
        pairs=measure.pairs(known, seed),
        detection=measure.detection(known.judged, judged),
        thresholds=measure.thresholds(la, known.judged, judged, thresholds),
        compared=measure.compared(known, other, searched, found),
        groups=measure.groups(known, other, found, class_names),
        posterior=_description(la),
    )


def _check_posterior(la: Any) -> None:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace
    from contrastive_curvature.laplace.towers import TwoTowerLaplace

    if isinstance(la, TwoTowerLaplace):
        raise UnsupportedError(
            "evaluate: a posterior of two towers has two encoders. Evaluate la.a and la.b, each with its own inputs."
        )
    if not isinstance(la, ContrastiveLaplace):
        wanted = 'a posterior, Laplace(encoder, likelihood="contrastive") after fit'
        raise InputTypeError("la", wanted, f"a {type(la).__name__}")
    la.check_fitted()


def _sorted(name: str, values: Any, check: Callable[[str, object], Any]) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputTypeError(name, "numbers, as a list", repr(values))
    return sorted({check(name, value) for value in values})


def _why_no_votes(la: Any, n_samples: int) -> Missing | None:
    from contrastive_curvature.laplace import FunctionSpaceLaplace

    if not n_samples:
        return Missing("No networks were sampled (n_samples=0).")
    if isinstance(la, FunctionSpaceLaplace):
        return Missing("A posterior of functions (structure 'gp') cannot sample one network for several batches.")
    return None


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


def _description(la: Any) -> dict[str, str | int | float | bool | None]:
    """Return what a reader needs to know of a posterior to judge its evaluation, as plain values."""
    precision = la.prior_precision.detach().flatten().double().cpu()
    n_compared, calibrated = measure.known_inputs(la)
    out: dict[str, Any] = {
        "class": type(la).__name__,
        "structure": str(getattr(la.structure, "value", la.structure)),
        "embedding dimension": int(la.n_outputs),
        "weights with a posterior": int(la.mean.numel()),
        "training points": int(la.n_data),
        "prior precision": float(precision[0]) if len(precision) == 1 else f"{len(precision)} values",
        "temperature": float(la.temperature),
        "compared with for p-values": n_compared,
        "calibrated": calibrated,
    }
    if la.curvature_error is not None:
        out["relative standard error of the curvature"] = float(la.curvature_error)
    for name, value in la.plain_options().items():
        plain = value is None or isinstance(value, (str, int, float, bool))
        out[f"option: {name}"] = value if plain else str(value)
    return out
