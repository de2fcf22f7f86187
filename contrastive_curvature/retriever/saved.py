"""The folder of a saved retriever: one file with the state, and in it the posterior; each save replaces the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from contrastive_curvature import validate
from contrastive_curvature.artifact import Header, folder_path, read_tensors, target_folder, write_tensors
from contrastive_curvature.codec import TensorTable, from_tree, packed, to_tree, unpacked
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.io.pretrained.load import from_header
from contrastive_curvature.io.pretrained.save import Saved, encoder_of, posterior_header
from contrastive_curvature.retriever.evidence import Embedded
from contrastive_curvature.retriever.head import Headed
from contrastive_curvature.retriever.rule import Ranks, Rates, Regression, Rule, Statement
from contrastive_curvature.retriever.state import Gallery, RetrieverState

FILE = "retriever.safetensors"


class RetrieverHeader(Header):
    """All of a saved retriever except arrays.

    Args:
        posterior: Header of the posterior; ``None`` without one.
        head: Weights of the head, as :func:`.packed` gives them; ``None`` without one.
        state: The state without its posterior, as :func:`.packed` gives it.
    """

    kind: ClassVar[str] = "retriever"
    described: ClassVar[str] = "a saved retriever"
    made_by: ClassVar[str] = "retriever.save(folder) writes one."
    repaired_by: ClassVar[str] = "Copy the folder again, or save it again with overwrite=True."

    posterior: Saved | None
    head: Any
    state: Any


def save(state: RetrieverState, folder: Path | str, *, overwrite: bool, example: Any) -> Path:
    """Do what :meth:`.Retriever.save` says."""
    validate.flag("overwrite", overwrite)
    place = target_folder("folder", folder, FILE, RetrieverHeader.described, overwrite=overwrite)
    if odd := [name for name in state.labels if not isinstance(name, (bool, int, float, str))]:
        raise UnsupportedError(
            f"labels: a {type(odd[0]).__name__} cannot be saved, only numbers and strings. Give the fit texts instead."
        )
    table, la = TensorTable(), state.posterior
    encoder = None if la is None else encoder_of(la)
    head = dict(encoder.head.state_dict()) if isinstance(encoder, Headed) else None
    header = RetrieverHeader(
        posterior=None if la is None else posterior_header(la, table, example),
        head=packed(to_tree(head), table, "head"),
        state=packed(to_tree(state), table, "state"),
    )
    place.mkdir(parents=True, exist_ok=True)
    write_tensors(place / FILE, header, table.tensors, follow=False)
    return place


def load(folder: Path | str, encoder: Any, **options: Any) -> RetrieverState:
    """Do what :meth:`.Retriever.load` says."""
    path = folder_path("folder", folder) / FILE
    header, tensors = read_tensors(path, RetrieverHeader)
    classes = (RetrieverState, Gallery, Embedded, Rates, Rule, Regression, Ranks, Statement)
    state: RetrieverState = from_tree(str(path), unpacked(header.state, tensors), classes)
    if header.posterior is None:
        if encoder is not None:
            raise InputError("encoder", "None, as this retriever is of embeddings", f"a {type(encoder).__name__}")
        return state
    if (head := unpacked(header.head, tensors)) is not None:
        layers = sum(name.endswith("weight") for name in head)
        encoder = Headed(torch.nn.Identity() if encoder is None else encoder, head["0.weight"].shape[1], layers)
        encoder.head.load_state_dict(head)
        encoder.to(next(encoder.parameters()).device).eval()
    la = from_header(header.posterior, tensors, encoder, **options)
    return replace(state.to(la._device), posterior=la)
