"""One posterior as JSON and tensors, and back around an encoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from contrastive_curvature import losses
from contrastive_curvature.codec import TensorTable, packed, to_tree, unpacked
from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.io.pretrained.encoders import (
    check_encoder,
    check_outputs,
    encoder_of,
    encoder_tensors,
    raw_outputs,
)
from contrastive_curvature.io.pretrained.folder import PosteriorInfo, SavedPosterior
from contrastive_curvature.laplace import ContrastiveLaplace, FunctionSpaceLaplace
from contrastive_curvature.laplace.options import known_options
from contrastive_curvature.laplace.prediction import moved_inputs
from contrastive_curvature.laplace.state import KNOWN_BACKENDS
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.network.inputs import Inputs, asks_for_example, check_inputs, slice_inputs, tokenized

KNOWN_LOSSES: dict[str, type[CosineLoss]] = {
    name: kind
    for name, kind in vars(losses).items()
    if name in losses.__all__ and issubclass(kind, CosineLoss) and not inspect.isabstract(kind)
}
"""The losses of this library, by name."""

_ARGUMENTS = (
    *("subset_of_weights", "hessian_structure", "enable_backprop", "dict_key_x", "dict_key_y"),
    *("n_subset", "seed"),
)


_CLASSES: dict[str, type[ContrastiveLaplace]] = {
    kind.__name__: kind for kind in (ContrastiveLaplace, FunctionSpaceLaplace)
}
"""All classes that can be saved, by name."""


def saved_posterior(la: Any, name: str, table: TensorTable, prefix: str, example: Inputs | None) -> SavedPosterior:
    """Return what is to be saved of a fitted posterior.

    Args:
        la: The posterior.
        name: What to call it.
        table: Takes its tensors.
        prefix: Of the names of its tensors.
        example: Inputs to keep with a posterior of a last layer; None keeps the made-up ones of its state.

    Raises:
        UnsupportedError: The class, the loss or an option cannot be saved.
        NotFittedError: Before ``fit``.
        InputError: The encoder does not take the example.
    """
    if type(la) is not _CLASSES.get(type(la).__name__):
        raise UnsupportedError(
            f"save_pretrained: {type(la).__name__} is a class of your own, which load_pretrained cannot construct. Use "
            "torch.save(la.state_dict(), path)."
        )
    state = la.state_dict()
    outputs = None
    if "data" in state:
        state["data"], outputs = _example(la, example)
    elif example is not None:
        hint = "Only a posterior of a last layer keeps inputs; leave it out."
        raise InputError("example", "None for this posterior", "inputs", hint)
    loss = la.backend.loss
    loss_options = _loss_config(loss)
    relation = la.curvature_options.relation
    prior = la.prior_precision.detach().double().cpu()
    calibration, classes = state["calibration"], state["class_centres"]
    encoder = encoder_tensors(encoder_of(la))
    info = PosteriorInfo(
        name=name,
        kind=type(la).__name__,
        subset_of_weights=la.subset_of_weights,
        hessian_structure=la.hessian_structure,
        dtype=str(la._dtype),
        n_outputs=la.n_outputs,
        n_params=la.n_params,
        n_data=la.n_data,
        loss=loss.description,
        needs_loss=loss_options is None,
        relation=None if relation is None else _name_of(relation),
        options={key: value for key, value in state["contrastive"].items() if key != "loss"},
        prior_precision=float(prior) if prior.numel() == 1 else None,
        prior_precisions=(prior.numel(), float(prior.min()), float(prior.max())),
        temperature=la.temperature,
        typical_norm=la.typical_norm,
        n_classes=None if classes is None else len(classes["labels"]),
        calibrated=calibration is not None,
        n_calibration=None if calibration is None else len(calibration["calibration"]["reference"]["statistics"]),
        score=NOVELTY if la.known.calibration is None else str(la.known.calibration.score),
        curvature_error=la.curvature_error,
        encoder=encoder_digest(encoder_of(la)),
        n_encoder_tensors=len(encoder),
    )
    return SavedPosterior(
        info=info,
        arguments=packed(_arguments(la), table, f"{prefix}arguments"),
        options=packed(_given_options(la), table, f"{prefix}options"),
        loss_name=type(loss).__qualname__,
        loss_options=packed(loss_options, table, f"{prefix}loss"),
        backend=None if la.chooses_backend else type(la.backend).__name__,
        encoder=encoder,
        example_outputs=packed(outputs, table, f"{prefix}example_outputs"),
        state=packed(state, table, f"{prefix}state"),
    )


def constructor(
    saved: SavedPosterior,
    tensors: dict[str, Tensor],
    encoder: nn.Module,
    *,
    loss: object = None,
    relation: object = None,
    backend: Any = None,
) -> tuple[Callable[..., ContrastiveLaplace], dict[str, Any]]:
    """Return class and arguments of a saved posterior.

    Args:
        saved: From :func:`saved_posterior`.
        tensors: By name, on the CPU.
        encoder: The encoder.
        loss: A loss of the user's own, which cannot be rebuilt.
        relation: The relation, which cannot be rebuilt.
        backend: A backend, or None for the default.

    Raises:
        InputError: Something that has to be given is missing or another one.
    """
    if saved.info.kind not in _CLASSES:
        raise InputError("folder", f"a posterior of {' or '.join(_CLASSES)}", saved.info.kind)
    arguments: dict[str, Any] = unpacked(saved.arguments, tensors)
    options = unpacked(saved.options, tensors)
    _check_relation(saved.info.relation, relation)
    if relation is not None:
        options["relation"] = relation
    # A contrastive loss may have been given by its options alone, as margin=0.5.
    as_object = "loss" in saved.state["contrastive"]
    if as_object or loss is not None:
        found = _loss(saved, loss, tensors)
        if as_object:
            # The class refuses an encoder without parameters.
            device = next((p.device for p in encoder.parameters()), "cpu")
            options["loss"] = found if found is loss else found.to(device)
    if backend is not None:
        arguments["backend"] = backend
    elif saved.backend is not None and saved.backend not in KNOWN_BACKENDS:
        hint = "Its code is not in the folder. Pass backend=... as in the fit."
        raise InputError("backend", f"the {saved.backend} of the fit", "None", hint)
    return _CLASSES[saved.info.kind], {**arguments, "backend_kwargs": options}


def fill(la: Any, saved: SavedPosterior, tensors: dict[str, Tensor], argument: str = "encoder") -> None:
    """Load the numbers of a saved posterior into one that was constructed anew.

    Args:
        la: From :func:`constructor`.
        saved: From :func:`saved_posterior`.
        tensors: By name, on the CPU.
        argument: Name of the encoder in messages.

    Raises:
        InputError: The encoder is another one.
    """
    check_encoder(encoder_of(la), saved.info.encoder, saved.encoder, argument)
    device = next(la.model.parameters()).device
    here = {name: tensor.to(device) for name, tensor in tensors.items()}
    state = unpacked(saved.state, here)
    la.load_state_dict(state)
    outputs = unpacked(saved.example_outputs, here)
    if outputs is not None:
        check_outputs(la, moved_inputs(la.model, state["data"], la._device), outputs, argument)


def _example(la: Any, example: Any) -> tuple[Inputs, Tensor]:
    """Return at most two inputs to save, those of the user or the made-up ones of the state, and their raw outputs.

    Raises:
        InputTypeError: Texts, and the encoder has no tokenizer; or no batch.
        InputError: The encoder does not take them, or its outputs are not finite.
    """
    given = la.data if example is None else tokenized(encoder_of(la), example, "example")
    few = slice_inputs(check_inputs(given, "example"), slice(0, 2))
    with asks_for_example(example):
        try:
            outputs = raw_outputs(la, moved_inputs(la.model, few, la._device))
        except Exception as error:  # what an encoder raises at inputs of another kind has no common base
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError("example", "inputs that the encoder takes", reason) from error
        if outputs.shape[1:] != (la.n_outputs,) or not bool(outputs.isfinite().all()):
            wanted = f"inputs with finite outputs of shape (N, {la.n_outputs})"
            raise InputError("example", wanted, f"outputs of shape {tuple(outputs.shape)}")
    return to_tree(few), outputs


def _arguments(la: Any) -> dict[str, Any]:
    """Return arguments of the constructor, besides the options of the curvature, that are not in the state."""
    arguments = {name: getattr(la, name) for name in _ARGUMENTS if hasattr(la, name)}
    if isinstance(la, FunctionSpaceLaplace):
        del arguments["hessian_structure"]
    if la.subset_of_weights == "subnetwork":
        arguments["subnetwork_indices"] = la.backend.subnetwork_indices.cpu()
    if la.on_last_layer:
        arguments["last_layer_name"] = la._last_layer_name
    return arguments


def _given_options(la: Any) -> dict[str, Any]:
    """Return the options of the curvature that are not the defaults, besides the loss and the relation."""
    known, options = known_options(la._backend_cls), la.curvature_options
    left_out = ("loss", "relation", *(("distance", "pd_fix") if options.given_loss else ()))
    given = {**options.named(), **la._own_options}
    named = {name: value for name, value in given.items() if name not in left_out}
    return {name: v for name, v in named.items() if v != known.get(name) or type(v) is not type(known.get(name))}


def _loss_config(loss: CosineLoss) -> dict[str, Any] | None:
    """Return the options that make this loss; None where it takes code of the user's own, or was changed by hand."""
    if type(loss) is KNOWN_LOSSES.get(type(loss).__name__):
        with suppress(InputError):
            return type(loss).from_config(loss.config()).config()
    return None


def _loss(saved: SavedPosterior, given: object, tensors: dict[str, Tensor]) -> CosineLoss:
    """Return the loss of a saved posterior: the given one, if it is the same, or the rebuilt one."""
    name, text = saved.loss_name, saved.info.loss
    if isinstance(given, CosineLoss) and (type(given).__qualname__, given.description) == (name, text):
        return given
    if given is None and name in KNOWN_LOSSES and not saved.info.needs_loss:
        return KNOWN_LOSSES[name].from_config(unpacked(saved.loss_options, tensors))
    received = given.description if isinstance(given, CosineLoss) else "None" if given is None else _name_of(given)
    hint = f"Its code is not in the folder. Pass loss={name}(...) to load_pretrained, with its options: {text}."
    if not saved.info.needs_loss:
        hint = "Leave it out."
    raise InputError("loss", f"the {name} that the posterior was fitted with, {text}", received, hint)


def _check_relation(name: str | None, relation: object) -> None:
    received = None if relation is None else _name_of(relation)
    if received == name:
        return
    if name is None:
        hint = "The posterior was fitted with class labels; leave it out."
        raise InputError("relation", "None", received, hint)
    hint = "Its code is not in the folder. Pass relation=... as in backend_kwargs of the fit, under that name."
    wanted = f"the function {name} that the posterior was fitted with"
    raise InputError("relation", wanted, received, hint)


def _name_of(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))
