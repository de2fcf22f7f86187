"""``la.save_pretrained``: write a posterior to a folder, to keep or to share.

``posterior.safetensors`` holds all of it: numbers, and the rest in its header. So each save replaces the posterior in
one step.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

import contrastive_curvature
from contrastive_curvature import losses, validate
from contrastive_curvature.artifact import VERSION, Header, target_folder, write_tensors
from contrastive_curvature.codec import TensorTable, packed, to_tree
from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.laplace import ContrastiveLaplace, TwoTowerLaplace
from contrastive_curvature.laplace.arguments import known_options
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.digest import encoder_digest, state_tensors, tensor_bytes
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, asks_for_example, check_inputs, slice_inputs, tokenized
from contrastive_curvature.posterior.predict import moved_inputs

FILE = "posterior.safetensors"

KNOWN_LOSSES: dict[str, type[CosineLoss]] = {
    name: kind
    for name, kind in vars(losses).items()
    if name in losses.__all__ and issubclass(kind, CosineLoss) and not inspect.isabstract(kind)
}
"""The losses of this library, by name."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PosteriorInfo(_Model):
    """One posterior in a folder.

    Attributes:
        name: ``"encoder"``; for two towers ``"a"`` or ``"b"``.
        subset_of_weights: ``"last_layer"``, ``"all"`` or ``"subnetwork"``.
        hessian_structure: ``"diag"``, ``"kron"``, ``"kron_lowrank"`` or ``"full"``.
        dtype: Precision of the encoder, such as ``"torch.float32"``.
        n_outputs: Number D of dimensions of an embedding.
        n_params: Number P of weights in the posterior.
        n_data: Number of points of the fit.
        loss: The loss with its options.
        needs_loss: Whether loading needs the argument ``loss``, because the loss's code is not in the folder.
        relation: Name of the relation that loading needs as an argument, or None.
        options: Options of the curvature.
        prior_precision: The prior precision, if it is one number; else None.
        prior_precisions: Number of prior precisions, the smallest and the largest.
        temperature: Temperature.
        typical_norm: Mean norm of the raw outputs in training, or None.
        n_classes: Number of class centres, or None.
        calibrated: Whether p-values are calibrated.
        n_calibration: Number of calibration inputs, or None.
        score: Score of the p-values: ``"novelty"``, ``"uncertainty"`` or the name of a function, perhaps ``by class``.
        encoder: Checksum of the weights and buffers of the encoder.
        n_encoder_tensors: Number of these weights and buffers.
    """

    name: str
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
    encoder: str
    n_encoder_tensors: int


class Contents(_Model):
    """Description of a saved posterior, see :class:`PretrainedInfo`."""

    versions: dict[str, str]
    towers: bool
    shared: bool
    posteriors: tuple[PosteriorInfo, ...]


class PretrainedInfo(Contents):
    """Description of a saved posterior and its file.

    Attributes:
        folder: Folder of the posterior.
        format_version: Version of the format.
        versions: Versions of the libraries that wrote it: ``contrastive_curvature``, ``torch``, ``laplace-torch``.
        towers: Whether it is for two towers.
        shared: Whether both towers are one module.
        posteriors: One posterior; for two towers with two modules, two.
        size: Size of the file in bytes.
    """

    folder: Path
    format_version: int = VERSION
    size: int


class Saved(Header):
    """Header of a saved posterior's file.

    Args:
        contents: Description of the posterior.
        trees: Constructor arguments and state of each posterior, from :func:`.packed`.
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
    """Compute raw outputs (B, D) of a last-layer posterior's encoder for inputs on its device."""
    with evaluation_mode(la.model), torch.no_grad():
        z: Tensor = la.model(x)
    return z.detach()


def name_of(value: object) -> str:
    """Return the name of a function, or of the class of an object."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


_ARGUMENTS = ("subset_of_weights", "enable_backprop", "dict_key_x", "dict_key_y")

_DESCRIBED = (
    *("subset_of_weights", "hessian_structure", "n_outputs", "n_params", "n_data"),
    "typical_norm",
)
"""Attributes of a posterior that its description repeats."""


def save_pretrained(la: Any, folder: Path | str, *, overwrite: bool = False, example: Any = None) -> Path:
    """See :meth:`.ContrastiveLaplace.save_pretrained`."""
    validate.flag("overwrite", overwrite)
    place = target_folder("folder", folder, FILE, Saved.described, overwrite=overwrite)
    table = TensorTable()
    saved = posterior_header(la, table, example)
    place.mkdir(parents=True, exist_ok=True)
    write_tensors(place / FILE, saved, table.tensors, follow=False)
    return place


def posterior_header(la: Any, table: TensorTable, example: Any) -> Saved:
    """Return all of a posterior except its arrays, which ``table`` receives; for a file that holds more as well.

    Arguments and errors as of :func:`save_pretrained`; :func:`.from_header` is the way back.
    """
    posteriors, trees = zip(*_posteriors(la, table, example), strict=True)
    contents = Contents(
        versions={
            "contrastive_curvature": contrastive_curvature.__version__,
            "torch": str(torch.__version__),
            # laplace-torch has no attribute with its version.
            "laplace-torch": metadata.version("laplace-torch"),
        },
        towers=isinstance(la, TwoTowerLaplace),
        shared=isinstance(la, TwoTowerLaplace) and la.shared,
        posteriors=posteriors,
    )
    return Saved(contents=contents, trees=list(trees))


def _posteriors(la: Any, table: TensorTable, example: Any) -> list[tuple[PosteriorInfo, Any]]:
    if isinstance(la, ContrastiveLaplace):
        return [_posterior(la, "encoder", table, example)]
    if not isinstance(la, TwoTowerLaplace):
        raise InputTypeError("la", "a posterior of likelihood='contrastive'", f"a {type(la).__name__}")
    if example is not None and not (isinstance(example, (tuple, list)) and len(example) == 2):
        raise InputTypeError("example", "inputs of both towers, (a, b)", f"a {type(example).__name__}")
    of_a, of_b = example or (None, None)
    saved = [_posterior(la.a, "a", table, of_a)]
    return saved if la.shared else [*saved, _posterior(la.b, "b", table, of_b)]


def _posterior(la: Any, name: str, table: TensorTable, example: Inputs | None) -> tuple[PosteriorInfo, Any]:
    """Return description and packed contents of a fitted posterior; ``table`` receives the tensors."""
    if type(la) is not ContrastiveLaplace:
        raise UnsupportedError(
            f"save_pretrained: {type(la).__name__} is a class of your own, which load_pretrained cannot construct. Use "
            "torch.save(la.state_dict(), path)."
        )
    state, outputs = la.state_dict(), None
    if "data" in state:
        state["data"], outputs = _example(la, example)
    elif example is not None:
        hint = "Only a posterior of a last layer keeps inputs; leave it out."
        raise InputError("example", "None for this posterior", "inputs", hint)
    loss, relation, encoder = la.backend.loss, la.curvature_options.relation, encoder_of(la)
    loss_options = _loss_config(loss)
    prior = la.prior_precision.detach().double().cpu()
    calibration, classes = la.posterior.calibration, la.class_centres
    records = list(encoder_records(encoder))
    tree = {
        "arguments": _arguments(la),
        "options": _given_options(la),
        "loss": (type(loss).__qualname__, loss_options),
        "encoder": records,
        "outputs": outputs,
        "state": state,
    }
    info = PosteriorInfo(
        name=name,
        **{key: getattr(la, key) for key in _DESCRIBED},
        temperature=state["temperature"],
        dtype=str(la._dtype),
        loss=loss.description,
        needs_loss=loss_options is None,
        relation=None if relation is None else name_of(relation),
        options={key: value for key, value in state["contrastive"].items() if key != "loss"},
        prior_precision=float(prior) if prior.numel() == 1 else None,
        prior_precisions=(prior.numel(), float(prior.min()), float(prior.max())),
        n_classes=None if classes is None else len(classes.labels),
        calibrated=calibration is not None,
        n_calibration=None if calibration is None else len(calibration.reference.statistics),
        score=NOVELTY if calibration is None else str(calibration.score),
        encoder=encoder_digest(encoder),
        n_encoder_tensors=len(records),
    )
    return info, packed(to_tree(tree), table, name)


def _example(la: Any, example: Any) -> tuple[Inputs, Tensor]:
    """Return at most two inputs to save, from the user or made up by the state, and their raw outputs.

    Raises:
        InputTypeError: The example is texts and the encoder has no tokenizer, or it is not a batch.
        InputError: The encoder refuses the inputs, or its outputs are not finite.
    """
    given = la.data if example is None else tokenized(encoder_of(la), example, "example")
    few = slice_inputs(check_inputs(given, "example"), slice(0, 2))
    with asks_for_example(example):
        try:
            outputs = raw_outputs(la, moved_inputs(la.model, few, la._device))
        except Exception as error:  # encoders' errors on wrong inputs have no common base class
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError("example", "inputs that the encoder takes", reason) from error
        if outputs.shape[1:] != (la.n_outputs,) or not bool(outputs.isfinite().all()):
            wanted = f"inputs with finite outputs of shape (N, {la.n_outputs})"
            raise InputError("example", wanted, f"outputs of shape {tuple(outputs.shape)}")
    return to_tree(few), outputs


def _arguments(la: Any) -> dict[str, Any]:
    """Return the constructor's arguments that are neither in the state nor options of the curvature."""
    arguments = {name: getattr(la, name) for name in _ARGUMENTS}
    if la.subset_of_weights == "subnetwork":
        arguments["subnetwork_indices"] = la.backend.subnetwork_indices.cpu()
    if la.on_last_layer:
        arguments["last_layer_name"] = la.last_layer_name
    return arguments


def _given_options(la: Any) -> dict[str, Any]:
    """Return the curvature's options that differ from the defaults, without loss and relation."""
    known, options = known_options(la._backend_cls), la.curvature_options
    left_out = ("loss", "relation", *(("distance", "pd_fix") if options.given_loss else ()))
    given = {**options.named(), **la._own_options}
    named = {name: value for name, value in given.items() if name not in left_out}
    return {name: v for name, v in named.items() if v != known.get(name) or type(v) is not type(known.get(name))}


def _loss_config(loss: CosineLoss) -> dict[str, Any] | None:
    """Return the options that make this loss; None if it needs the user's code or was changed by hand."""
    if type(loss) is KNOWN_LOSSES.get(type(loss).__name__):
        with suppress(InputError):
            return type(loss).from_config(loss.config()).config()
    return None
