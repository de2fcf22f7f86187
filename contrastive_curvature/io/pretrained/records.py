"""One posterior as JSON and tensors, and back around an encoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature import laplace as classes
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.io.pretrained.encoders import (
    check_encoder,
    check_outputs_at,
    encoder_of,
    plain_encoder,
    raw_outputs,
)
from contrastive_curvature.io.pretrained.example import checked_example
from contrastive_curvature.io.pretrained.losses import plain_loss, restored_loss
from contrastive_curvature.io.pretrained.tree import TensorTable, plain_tree, restored_tree
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.laplace.functional import ContrastiveFunctionalLaplace, ContrastiveFunctionalLLLaplace
from contrastive_curvature.laplace.options import known_options
from contrastive_curvature.laplace.prediction import moved_inputs
from contrastive_curvature.laplace.state import KNOWN_BACKENDS, owned
from contrastive_curvature.network.inputs import Inputs

__all__ = ["constructor", "fill", "plain_posterior", "posterior_classes"]

_ARGUMENTS = ("enable_backprop", "dict_key_x", "dict_key_y", "damping", "n_subset", "seed", "subnetwork_indices")


def posterior_classes() -> dict[str, type[ContrastiveLaplace]]:
    """All classes that can be saved, by name."""
    named = [getattr(classes, name) for name in classes.__all__ if isinstance(getattr(classes, name), type)]
    kinds = [kind for kind in named if issubclass(kind, ContrastiveLaplace) and "_key" in vars(kind)]
    return {kind.__name__: kind for kind in (*kinds, ContrastiveFunctionalLaplace, ContrastiveFunctionalLLLaplace)}


def plain_posterior(la: Any, table: TensorTable, name: str, example: Inputs | None) -> dict[str, Any]:
    """A fitted posterior as JSON writes it.

    Args:
        la: The posterior.
        table: Takes its tensors.
        name: For the names of tensors; empty, or one that ends in a dot.
        example: Inputs to keep with a posterior of a last layer; None keeps the made-up ones of its state.

    Raises:
        UnsupportedError: The class, the loss or an option cannot be saved.
        NotFittedError: Before ``fit``.
        InputError: The encoder does not take the example.
    """
    if type(la) is not posterior_classes().get(type(la).__name__):
        msg = (
            f"save_pretrained: {type(la).__name__} is a class of your own, which load_pretrained cannot construct. Use "
            "torch.save(la.state_dict(), path)."
        )
        raise UnsupportedError(msg)
    state = la.state_dict()
    probe = None
    if "data" in state:
        state["data"] = owned(checked_example(la, example))
        probe = raw_outputs(la, moved_inputs(la.model, state["data"], la._device))
    elif example is not None:
        hint = "Only a posterior of a last layer keeps inputs; leave it out."
        raise InputError(expected("example", "None for this posterior", "inputs", hint))
    weights, structure = la._key[:2]
    prior = la.prior_precision.detach().double().cpu()
    relation = la.curvature_options.relation
    loss = la.backend.loss
    return {
        "class": type(la).__name__,
        "subset_of_weights": weights,
        "structure": structure,
        "dtype": str(la._dtype),
        "arguments": plain_tree(_arguments(la), table, f"{name}arguments"),
        "loss": plain_loss(loss, table, f"{name}loss"),
        "options": plain_tree(_given_options(la), table, f"{name}options"),
        "relation": None if relation is None else _name_of(relation),
        "backend": None if la.chooses_backend else type(la.backend).__name__,
        "encoder": plain_encoder(encoder_of(la)),
        "example_outputs": plain_tree(probe, table, f"{name}example_outputs"),
        "state": plain_tree(state, table, f"{name}state"),
        "summary": {
            "n_params": int(la.n_params),
            "prior_precision": float(prior) if prior.numel() == 1 else None,
            "prior_precisions": [int(prior.numel()), float(prior.min()), float(prior.max())],
            "calibration_inputs": None if state["calibration"] is None else len(state["calibration"]["statistics"]),
            "classes": None if state["class_centres"] is None else len(state["class_centres"]["labels"]),
        },
    }


def constructor(
    plain: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    encoder: nn.Module,
    *,
    loss: object = None,
    relation: object = None,
    backend: Any = None,
) -> tuple[type[ContrastiveLaplace], dict[str, Any]]:
    """Class and arguments of a saved posterior.

    Args:
        plain: From :func:`plain_posterior`.
        tensors: By name, on the CPU.
        encoder: The encoder.
        loss: A loss of the user's own, which cannot be rebuilt.
        relation: The relation, which cannot be rebuilt.
        backend: A backend, or None for the default.

    Raises:
        InputError: Something that has to be given is missing or another one.
        ValueError, KeyError, TypeError: Something in it is malformed.
    """
    kinds = posterior_classes()
    if plain["class"] not in kinds:
        hint = "A later version of contrastive_curvature may have it: pip install -U contrastive-curvature"
        raise InputError(expected("class", f"one of {', '.join(kinds)}", str(plain["class"]), hint))
    arguments: dict[str, Any] = restored_tree(plain["arguments"], tensors)
    options = restored_tree(plain["options"], tensors)
    _check_relation(plain["relation"], relation)
    if relation is not None:
        options["relation"] = relation
    # A contrastive loss may have been given by its options alone, as margin=0.5.
    as_object = "loss" in plain["state"]["contrastive"]
    if as_object or loss is not None:
        first = next(encoder.parameters(), None)
        # An encoder without parameters is refused by the class, which says so.
        device = torch.device("cpu") if first is None else first.device
        here = {name: tensor.to(device) for name, tensor in tensors.items() if "loss" in name}
        made = restored_loss(plain["loss"], loss, here)
        if as_object:
            options["loss"] = made
    if backend is not None:
        arguments["backend"] = backend
    elif plain["backend"] is not None and plain["backend"] not in KNOWN_BACKENDS:
        hint = "Its code is not in the folder. Pass backend=... as in the fit."
        raise InputError(expected("backend", f"the {plain['backend']} of the fit", "None", hint))
    return kinds[plain["class"]], {**arguments, "backend_kwargs": options}


def fill(
    la: ContrastiveLaplace, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], argument: str = "encoder"
) -> None:
    """Load the numbers of a saved posterior into one that was constructed anew.

    Args:
        la: From :func:`constructor`.
        plain: From :func:`plain_posterior`.
        tensors: By name, on the CPU.
        argument: Name of the encoder in messages.

    Raises:
        InputError: Another encoder, or numbers that cannot be right.
        ValueError, KeyError, TypeError: Something is malformed.
    """
    check_encoder(encoder_of(la), plain["encoder"], argument)
    device = next(la.model.parameters()).device
    here = {name: tensor.to(device) for name, tensor in tensors.items()}
    state = restored_tree(plain["state"], here)
    la.load_state_dict(state)
    outputs = restored_tree(plain["example_outputs"], here)
    if outputs is not None:
        check_outputs_at(la, moved_inputs(la.model, state["data"], la._device), outputs, argument)


def _arguments(la: Any) -> dict[str, Any]:
    """Arguments of the constructor, besides the options of the curvature, that are not in the state."""
    arguments = {name: getattr(la, name) for name in _ARGUMENTS if hasattr(la, name) and name != "subnetwork_indices"}
    if la._key[0] == "subnetwork":
        arguments["subnetwork_indices"] = la.backend.subnetwork_indices.cpu()
    if hasattr(la, "_last_layer_name"):
        arguments["last_layer_name"] = la._last_layer_name
    host: Any = next(kind for kind in type(la).__mro__ if kind.__module__.startswith("laplace."))
    own: Any = type(la)
    known = {name for kind in (host, own) for name in inspect.signature(kind.__init__).parameters}
    return {name: value for name, value in arguments.items() if name in known}


def _given_options(la: Any) -> dict[str, Any]:
    """Return the options of the curvature that are not the defaults, besides the loss and the relation."""
    known, options = known_options(la._backend_cls), la.curvature_options
    left_out = ("loss", "relation", *(("distance", "pd_fix") if options.given_loss else ()))
    given = {**options.named(), **la._own_options}
    named = {name: value for name, value in given.items() if name not in left_out}
    return {name: v for name, v in named.items() if v != known.get(name) or type(v) is not type(known.get(name))}


def _check_relation(name: str | None, relation: object) -> None:
    if name is None and relation is not None:
        hint = "The posterior was fitted with class labels; leave it out."
        raise InputError(expected("relation", "None", _name_of(relation), hint))
    if name is not None and relation is None:
        hint = "Its code is not in the folder. Pass relation=... as in backend_kwargs of the fit."
        raise InputError(expected("relation", f"the function {name} that the posterior was fitted with", "None", hint))
    if relation is not None and not callable(relation):
        raise InputTypeError(expected("relation", f"the function {name}", f"a {type(relation).__name__}"))
    if name is not None and _name_of(relation) != name:
        hint = "Pass the one that the posterior was fitted with, under that name."
        raise InputError(expected("relation", f"the function {name}", _name_of(relation), hint))


def _name_of(relation: object) -> str:
    return str(getattr(relation, "__qualname__", type(relation).__qualname__))
