"""What is in the folder of a saved posterior, and what writing and reading it share.

``posterior.safetensors`` is everything that is read back: numbers, and all else in its header. ``README.md`` is a model
card. So each save replaces the posterior in one step.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from contrastive_curvature import losses
from contrastive_curvature.artifact import VERSION, Header, read_header
from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.laplace import ContrastiveLaplace, FunctionSpaceLaplace
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.digest import state_tensors, tensor_bytes
from contrastive_curvature.network.encoder import Encoder, evaluation_mode

FILE, CARD = "posterior.safetensors", "README.md"

KNOWN_LOSSES: dict[str, type[CosineLoss]] = {
    name: kind
    for name, kind in vars(losses).items()
    if name in losses.__all__ and issubclass(kind, CosineLoss) and not inspect.isabstract(kind)
}
"""The losses of this library, by name."""

CLASSES: dict[str, type[ContrastiveLaplace]] = {
    kind.__name__: kind for kind in (ContrastiveLaplace, FunctionSpaceLaplace)
}
"""All classes that can be saved, by name."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PosteriorInfo(_Model):
    """One posterior in a folder.

    Attributes:
        name: ``"encoder"``; of two towers ``"a"`` or ``"b"``.
        kind: Name of its class.
        subset_of_weights: ``"last_layer"``, ``"all"`` or ``"subnetwork"``.
        hessian_structure: ``"diag"``, ``"kron"``, ``"kron_lowrank"``, ``"full"``, ``"lowrank"`` or ``"gp"``.
        dtype: Precision of the encoder, as ``"torch.float32"``.
        n_outputs: Number D of dimensions of an embedding.
        n_params: Number P of weights that the posterior is about.
        n_data: Number of points that it was fitted on.
        loss: The loss with its options.
        needs_loss: Whether ``loss`` has to be given for loading, because its code is not in the folder.
        relation: Name of the relation that has to be given for loading, or None.
        options: Options of the curvature.
        prior_precision: The prior precision, where it is one number; else None.
        prior_precisions: How many there are, the smallest and the largest.
        temperature: Temperature.
        typical_norm: Mean norm of the raw outputs in training, or None.
        n_classes: Number of class centres, or None.
        calibrated: Whether p-values are calibrated.
        n_calibration: With how many inputs, or None.
        score: What p-values are of: ``"novelty"``, ``"uncertainty"`` or the name of a function, perhaps ``by class``.
        curvature_error: Relative standard error of a sampled curvature, or None.
        encoder: Checksum of the weights and buffers of the encoder.
        n_encoder_tensors: Number of these.
    """

    name: str
    kind: str
    subset_of_weights: str
    hessian_structure: str
    dtype: str
    n_outputs: int
    n_params: int
    n_data: int
    loss: str
    needs_loss: bool
    relation: str | None
    options: dict[str, Any]
    prior_precision: float | None
    prior_precisions: tuple[int, float, float]
    temperature: float
    typical_norm: float | None
    n_classes: int | None
    calibrated: bool
    n_calibration: int | None
    score: str = NOVELTY
    curvature_error: float | None
    encoder: str
    n_encoder_tensors: int


class Contents(_Model):
    """What is said of a saved posterior, see :class:`PretrainedInfo`."""

    versions: dict[str, str]
    towers: bool
    shared: bool
    posteriors: tuple[PosteriorInfo, ...]
    match: bool
    metrics: dict[str, float]
    about: dict[str, Any]


class PretrainedInfo(Contents):
    """What is in a saved posterior.

    Attributes:
        folder: Where it is.
        format_version: Version of the format.
        versions: Versions of the libraries that wrote it: ``contrastive_curvature``, ``torch``, ``laplace-torch``.
        towers: Whether it is for two towers.
        shared: Whether both towers are one module.
        posteriors: One; of two towers with two modules, two.
        match: Whether a :class:`~contrastive_curvature.MatchProbability` is in it.
        metrics: What was measured, by name.
        about: What else its author said: ``fitted_on``, ``encoder_source``, ``license``, ``evaluated_on``, ...
        size: Bytes of its file.
    """

    folder: Path
    format_version: int = VERSION
    size: int

    def to_plain(self) -> dict[str, Any]:
        """Return the same as strings, numbers, lists and dictionaries, for JSON."""
        return self.model_dump(mode="json")


class Saved(Header):
    """What stands in the file of a saved posterior besides tensors.

    Args:
        contents: What is said of it.
        trees: What each posterior is made from, as :func:`.packed` gives it.
        match: The state of a :class:`~contrastive_curvature.MatchProbability`, packed too; ``None`` without.
    """

    kind: ClassVar[str] = "pretrained"
    described: ClassVar[str] = "a saved posterior"
    made_by: ClassVar[str] = (
        "Name a folder that la.save_pretrained(folder) wrote. One of version 0.2 is not read: fit again."
    )
    repaired_by: ClassVar[str] = (
        "Copy or download the folder again, or replace it with la.save_pretrained(folder, overwrite=True)."
    )

    contents: Contents
    trees: list[Any]
    match: Any


def state_checksum(folder: Path) -> str:
    """Return a text that tells the posterior in a folder from every other one."""
    return str(read_header(folder / FILE, Saved).trees[0]["state"]["checksum"])


def encoder_of(la: Any) -> nn.Module:
    """Return the encoder inside a posterior."""
    model: nn.Module = la.model.model if isinstance(la.model, Encoder) else la.model
    return model


def encoder_records(model: nn.Module) -> Iterator[list[Any]]:
    """Yield name, type, shape and checksum of every parameter and buffer."""
    for name, tensor in state_tensors(model):
        digest = hashlib.sha256()
        for part in tensor_bytes(tensor):
            digest.update(part)
        yield [name, str(tensor.dtype), list(tensor.shape), digest.hexdigest()[:16]]


def raw_outputs(la: Any, x: Any) -> Tensor:
    """Return raw outputs (B, D) of a last-layer posterior's encoder for inputs on its device."""
    with evaluation_mode(la.model), torch.no_grad():
        z: Tensor = la.model(x)
    return z.detach()


def name_of(value: object) -> str:
    """Return the name of a function, or of the class of an object."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))
