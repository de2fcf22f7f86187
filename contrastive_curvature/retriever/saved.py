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
from contrastive_curvature.io.pretrained.save import encoder_of, state_checksum
from contrastive_curvature.retriever.evidence import Embedded
from contrastive_curvature.retriever.head import Headed
from contrastive_curvature.retriever.rule import Rates, Regression, Rule
from contrastive_curvature.retriever.state import Gallery, State

if TYPE_CHECKING:
    from contrastive_curvature.retriever.retriever import Retriever

ARRAYS, POSTERIOR = "retriever.safetensors", "posterior"
"""Names of what is in the folder."""

_R = TypeVar("_R", bound="Retriever")


class RetrieverHeader(Header):
    """What stands in the file of a retriever besides arrays.

    Args:
        posterior: Checksum of the posterior beside it; empty without one.
        tree: The state without its posterior, and the weights of the head, as :func:`.packed` gives them.
    """

    kind: ClassVar[str] = "retriever"
    described: ClassVar[str] = "a saved retriever"
    made_by: ClassVar[str] = "retriever.save(folder) writes one."
    repaired_by: ClassVar[str] = "Copy the folder again, or save it again with overwrite=True."

    posterior: str
    tree: Any


def save(retriever: Retriever, folder: Path | str, *, overwrite: bool, example: Any) -> Path:
    """Do what :meth:`.Retriever.save` says."""
    validate.flag("overwrite", overwrite)
    place = target_folder("folder", folder, ARRAYS, RetrieverHeader.described, overwrite=overwrite)
    state = retriever._now
    la = state.posterior
    if odd := [name for name in state.labels if not isinstance(name, (bool, int, float, str))]:
        raise UnsupportedError(
            f"labels: a {type(odd[0]).__name__} cannot be saved, only numbers and strings. Give the fit texts instead."
        )
    table = TensorTable()
    place.mkdir(parents=True, exist_ok=True)
    if la is not None:
        la.save_pretrained(place / POSTERIOR, overwrite=overwrite, example=example)
    encoder = None if la is None else encoder_of(la)
    tree = {"state": state, "head": dict(encoder.head.state_dict()) if isinstance(encoder, Headed) else None}
    header = RetrieverHeader(
        posterior="" if la is None else state_checksum(place / POSTERIOR),
        tree=packed(to_tree(tree), table, "retriever"),
    )
    write_tensors(place / ARRAYS, header, table.tensors, follow=False)
    return place


def load(kind: type[_R], folder: Path | str, encoder: Any, index: Any, **options: Any) -> _R:
    """Do what :meth:`.Retriever.load` says."""
    place = folder_path("folder", folder)
    header, tensors = read_tensors(place / ARRAYS, RetrieverHeader)
    classes = (State, Gallery, Embedded, Rates, Rule, Regression)
    tree = from_tree(str(place / ARRAYS), unpacked(header.tree, tensors), classes)
    state, head, la, device = tree["state"], tree["head"], None, torch.device("cpu")
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
    retriever = kind(la, **state.rates._asdict(), index=index)
    retriever.head = head is not None
    retriever._state = replace(state.to(device), posterior=la)
    return retriever
