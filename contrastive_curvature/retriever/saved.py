"""The folder of a saved retriever: the posterior in one of its own, and a file of arrays."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header, folder_path, read_tensors, write_tensors
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.io.pretrained import load_pretrained
from contrastive_curvature.io.pretrained.folder import place_of
from contrastive_curvature.retriever.evidence import Embedded
from contrastive_curvature.retriever.head import Headed
from contrastive_curvature.retriever.rule import ROUNDING, Rates, Regression, Rule

if TYPE_CHECKING:
    from contrastive_curvature.retriever.retriever import Retriever

ARRAYS, POSTERIOR = "retriever.safetensors", "posterior"
"""Names of what is in the folder."""

_R = TypeVar("_R", bound="Retriever")


class RetrieverHeader(Header):
    """What stands in the file of a retriever besides arrays.

    Args:
        posterior: Name of the file of numbers of the posterior beside it; empty without one.
        rates: What is asked for.
        labels: Of the classes 0, 1 and so on.
        answered: Share of the held-out queries that are answered.
        kept_back: See :class:`.Rule`.
        reasons: See there, too.
    """

    kind: ClassVar[str] = "retriever"
    described: ClassVar[str] = "a saved retriever"
    made_by: ClassVar[str] = "retriever.save(folder) writes one."
    repaired_by: ClassVar[str] = "Copy the folder again, or save it again with overwrite=True."

    posterior: str
    rates: Rates
    labels: list[bool | int | float | str | None]
    answered: float
    kept_back: dict[str, float]
    reasons: dict[str, str]


def export(retriever: Retriever, path: Path | str, format: Any) -> None:
    """Do what :meth:`.Retriever.export` says."""
    from contrastive_curvature.io.serving.export import format_of, write_scorer
    from contrastive_curvature.io.serving.parts import Parts, parts_of

    rule, points, labels = retriever._rule, retriever._gallery, _plain_labels(retriever)
    kind = format_of(path, format)
    validate.choice("format", kind, ("npz", "safetensors"))
    parts = Parts("none", "none", "novelty", {}) if retriever.la is None else parts_of(retriever.la, True)
    if parts.score != "novelty":
        raise UnsupportedError(
            f"export: the posterior is calibrated for {parts.score!r}, and answers look at the novelty. Call "
            "la.calibrate(loader) and fit the retriever again."
        )
    alarms = -1.0 if rule.false_alarms is None else rule.false_alarms
    arrays = {
        "gallery": points.directions,
        "classes": points.classes,
        "identifiers": torch.from_numpy(points.identifiers),
        "novelties": torch.from_numpy(rule.novelties),
        "limits": torch.tensor([rule.limit, rule.present_limit, alarms], dtype=torch.float64),
        "rounding": torch.tensor(ROUNDING, dtype=torch.float64),
        **_regressions(rule),
    }
    if retriever._head is not None:
        hidden = retriever._head.head.state_dict()
        arrays |= {"hidden_weight": hidden["0.weight"], "hidden_bias": hidden["0.bias"]}
    parts.arrays.update({f"retriever.{name}": value for name, value in arrays.items()})
    write_scorer(path, kind, parts, labels=labels)


def save(retriever: Retriever, folder: Path | str, *, overwrite: bool, **options: Any) -> Path:
    """Do what :meth:`.Retriever.save` says."""
    la, place = retriever.la, folder_path("folder", folder)
    validate.flag("overwrite", overwrite)
    labels = _plain_labels(retriever)
    there = sorted(path.name for path in place.iterdir()) if place.exists() else []
    if there and (ARRAYS not in there or not overwrite):
        hint = "Name another folder." if ARRAYS not in there else "Pass overwrite=True to replace it."
        raise InputError("folder", "a new or an empty folder", f"{place}, with {there[0]!r} in it", hint)
    rule, points = retriever._rule, retriever._gallery
    tensors = {
        "gallery": points.directions,
        "classes": points.classes,
        "identifiers": torch.from_numpy(points.identifiers),
        "novelties": torch.from_numpy(rule.novelties),
        "limits": torch.tensor([rule.limit, rule.present_limit, retriever._ceiling], dtype=torch.float64),
        **_regressions(rule),
        **_plain("held_out", retriever._held, retriever._truth),
    }
    if retriever._feedback is not None:
        tensors |= _plain("feedback", *retriever._feedback)
    if retriever._head is not None:
        tensors |= {f"head.{name}": value for name, value in retriever._head.head.state_dict().items()}
    if la is None:
        place.mkdir(parents=True, exist_ok=True)
    else:
        la.save_pretrained(place / POSTERIOR, overwrite=overwrite, **options)
    header = RetrieverHeader(
        posterior="" if la is None else place_of(place / POSTERIOR).read().numbers.name,
        rates=retriever.rates,
        labels=labels,
        answered=rule.answered,
        kept_back=rule.kept_back,
        reasons=rule.reasons,
    )
    write_tensors(place / ARRAYS, header, tensors)
    return place


def load(kind: type[_R], folder: Path | str, encoder: Any, index: Any, **options: Any) -> _R:
    """Do what :meth:`.Retriever.load` says."""
    from contrastive_curvature.retriever.retriever import Points

    place = folder_path("folder", folder)
    header, tensors = read_tensors(place / ARRAYS, RetrieverHeader)
    head = {name[5:]: value for name, value in tensors.items() if name.startswith("head.")}
    if not header.posterior:
        if encoder is not None:
            raise InputError("encoder", "None, as this retriever is of embeddings", f"a {type(encoder).__name__}")
        la, device = None, torch.device("cpu")
    else:
        if place_of(place / POSTERIOR).read().numbers.name != header.posterior:
            RetrieverHeader.refuse(str(place), "one with the posterior of another", RetrieverHeader.repaired_by)
        if head:
            encoder = Headed(torch.nn.Identity() if encoder is None else encoder, head["0.weight"].shape[1])
            encoder.head.load_state_dict(head)
            encoder.eval()
        la = load_pretrained(place / POSTERIOR, encoder, **options)
        device = la._device
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    held, truth = _restored("held_out", tensors, device)
    retriever = kind(la, **header.rates._asdict(), index=index)
    retriever.la, retriever._held, retriever._truth = la, held, truth
    retriever.head, retriever._head = bool(head), encoder if head else None
    retriever._codes = {name: code for code, name in enumerate(header.labels)}
    retriever._gallery = Points(tensors["gallery"].to(device), tensors["classes"], arrays["identifiers"])
    retriever._feedback = _restored("feedback", tensors, device) if "feedback.truth" in tensors else None
    right, present = (
        Regression(**{field.name: arrays[f"{name}.{field.name}"] for field in fields(Regression)})
        for name in ("right", "present")
    )
    limit, present_limit, ceiling = arrays["limits"].tolist()
    said = arrays["novelties"], header.rates.false_alarms, header.answered, header.kept_back, header.reasons
    retriever._take(Rule(right, limit, present, present_limit, *said), ceiling)
    return retriever


def _plain_labels(retriever: Retriever) -> list[Any]:
    labels = list(retriever._codes)
    if odd := [name for name in labels if not isinstance(name, (bool, int, float, str, type(None)))]:
        raise UnsupportedError(
            f"labels: a {type(odd[0]).__name__} cannot be saved, only numbers and strings. Give the fit texts instead."
        )
    return labels


def _regressions(rule: Rule) -> dict[str, Tensor]:
    return {
        f"{name}.{field.name}": torch.from_numpy(getattr(regression, field.name))
        for name, regression in (("right", rule.right), ("present", rule.present))
        for field in fields(Regression)
    }


def _plain(name: str, queries: Embedded, truth: Tensor) -> dict[str, Tensor]:
    numbers = {field.name: torch.as_tensor(getattr(queries, field.name)) for field in fields(Embedded)}
    return {f"{name}.{key}": value for key, value in {**numbers, "truth": truth}.items()}


def _restored(name: str, tensors: dict[str, Tensor], device: torch.device) -> tuple[Embedded, Tensor]:
    directions, uncertainty, novelty = (tensors[f"{name}.{field.name}"] for field in fields(Embedded))
    return Embedded(directions.to(device), uncertainty.numpy(), novelty.numpy()), tensors[f"{name}.truth"]
