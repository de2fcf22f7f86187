"""The folder of a saved retriever: the posterior in one of its own, and a file of arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header, folder_path, read_tensors, target_folder, write_tensors
from contrastive_curvature.codec import TensorTable, from_tree, packed, to_tree, unpacked
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.io.pretrained import load_pretrained
from contrastive_curvature.io.pretrained.save import state_checksum
from contrastive_curvature.retriever.evidence import Embedded
from contrastive_curvature.retriever.head import Headed
from contrastive_curvature.retriever.rule import Rates, Regression, Rule

if TYPE_CHECKING:
    from contrastive_curvature.retriever.retriever import Retriever

ARRAYS, POSTERIOR = "retriever.safetensors", "posterior"
"""Names of what is in the folder."""

_R = TypeVar("_R", bound="Retriever")


class RetrieverHeader(Header):
    """What stands in the file of a retriever besides arrays.

    Args:
        posterior: Checksum of the posterior beside it; empty without one.
        rates: What is asked for.
        labels: Of the classes 0, 1 and so on.
        answered: Share of the held-out queries that are answered.
        reasons: See :class:`.Rule`.
        tree: All else, as :func:`.packed` gives it.
    """

    kind: ClassVar[str] = "retriever"
    described: ClassVar[str] = "a saved retriever"
    made_by: ClassVar[str] = "retriever.save(folder) writes one."
    repaired_by: ClassVar[str] = "Copy the folder again, or save it again with overwrite=True."

    posterior: str
    rates: Rates
    labels: list[bool | int | float | str]
    answered: float
    reasons: dict[str, str]
    tree: Any


def save(retriever: Retriever, folder: Path | str, *, overwrite: bool, example: Any) -> Path:
    """Do what :meth:`.Retriever.save` says."""
    validate.flag("overwrite", overwrite)
    place = target_folder("folder", folder, ARRAYS, RetrieverHeader.described, overwrite=overwrite)
    la, labels = retriever.la, list[Any](retriever._codes)
    if odd := [name for name in labels if not isinstance(name, (bool, int, float, str))]:
        raise UnsupportedError(
            f"labels: a {type(odd[0]).__name__} cannot be saved, only numbers and strings. Give the fit texts instead."
        )
    tree = {
        "gallery": retriever._gallery,
        "rule": retriever._rule,
        "ceiling": retriever._ceiling,
        "held": retriever._held,
        "truth": retriever._truth,
        "feedback": retriever._feedback,
        "head": None if retriever._head is None else dict(retriever._head.head.state_dict()),
    }
    table = TensorTable()
    place.mkdir(parents=True, exist_ok=True)
    if la is not None:
        la.save_pretrained(place / POSTERIOR, overwrite=overwrite, example=example)
    header = RetrieverHeader(
        posterior="" if la is None else state_checksum(place / POSTERIOR),
        rates=retriever.rates,
        labels=labels,
        answered=retriever.answered,
        reasons=retriever.reasons,
        tree=packed(to_tree(tree), table, "retriever"),
    )
    write_tensors(place / ARRAYS, header, table.tensors, follow=False)
    return place


def load(kind: type[_R], folder: Path | str, encoder: Any, index: Any, **options: Any) -> _R:
    """Do what :meth:`.Retriever.load` says."""
    from contrastive_curvature.retriever.retriever import Points

    place = folder_path("folder", folder)
    header, tensors = read_tensors(place / ARRAYS, RetrieverHeader)
    classes = (Points, Rule, Regression, Embedded)
    tree = from_tree(str(place / ARRAYS), unpacked(header.tree, tensors), classes)
    la, device, head = None, torch.device("cpu"), tree["head"]
    if header.posterior:
        if state_checksum(place / POSTERIOR) != header.posterior:
            RetrieverHeader.refuse(str(place), "one with the posterior of another", RetrieverHeader.repaired_by)
        if head is not None:
            encoder = Headed(torch.nn.Identity() if encoder is None else encoder, head["0.weight"].shape[1])
            encoder.head.load_state_dict(head)
            encoder.eval()
        la = load_pretrained(place / POSTERIOR, encoder, **options)
        device = la._device
    elif encoder is not None:
        raise InputError("encoder", "None, as this retriever is of embeddings", f"a {type(encoder).__name__}")

    def moved(queries: Embedded) -> Embedded:
        return replace(queries, directions=queries.directions.to(device))

    retriever = kind(la, **header.rates._asdict(), index=index)
    retriever.la, retriever._held, retriever._truth = la, moved(tree["held"]), tree["truth"]
    retriever.head, retriever._head = head is not None, None if head is None else encoder
    retriever._codes = {name: code for code, name in enumerate(header.labels)}
    retriever._gallery = tree["gallery"]._replace(directions=tree["gallery"].directions.to(device))
    if tree["feedback"] is not None:
        queries, truth = tree["feedback"]
        retriever._feedback = moved(queries), truth
    retriever._take(tree["rule"], tree["ceiling"])
    return retriever
