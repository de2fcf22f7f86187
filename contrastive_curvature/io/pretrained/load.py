"""Reading a saved posterior: nothing is executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.artifact import folder_path, read_header, read_tensors
from contrastive_curvature.codec import unpacked
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.io.pretrained.save import (
    FILE,
    KNOWN_LOSSES,
    PosteriorInfo,
    PretrainedInfo,
    Saved,
    encoder_of,
    encoder_records,
    name_of,
    raw_outputs,
)
from contrastive_curvature.laplace import ContrastiveLaplace, TwoTowerLaplace
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.digest import encoder_digest, state_tensors
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.posterior.predict import moved_inputs

_SAME_OUTPUTS = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Relative difference of the outputs of one encoder on two devices, at most; half precision has 0.1."""


def load_pretrained(
    source: Path | str,
    encoder: nn.Module,
    *,
    loss: CosineLoss | None = None,
    relation: RelationFunction | None = None,
    backend: type[ContrastiveBackend] | None = None,
) -> Any:
    """Load a posterior that ``la.save_pretrained`` wrote. Nothing in the files is executed.

    Args:
        source: The folder.
        encoder: The encoder with its weights, on its final device and in its final precision; a
            :class:`~contrastive_curvature.TwoTowers` for a posterior of two towers.
        loss: The loss of the fit, if it is a loss of your own, whose code is not in the folder.
        relation: The relation of the fit, if it had one.
        backend: A backend for further fits; None for the default.

    Returns:
        The posterior; ``la(x)`` predicts the same as before saving.

    Raises:
        InputError: There is no such folder; its file is missing, damaged, foreign, or of another version;
            the encoder is another one; or the loss, the relation or the backend is missing or wrong.
        InputTypeError: An argument has the wrong type.
        UnsupportedError: There is no posterior for this kind of encoder.
    """
    return from_header(*read_tensors(_folder(source) / FILE, Saved), encoder, loss, relation, backend)


def from_header(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    encoder: nn.Module,
    loss: CosineLoss | None = None,
    relation: RelationFunction | None = None,
    backend: type[ContrastiveBackend] | None = None,
) -> Any:
    """Return the posterior of a header, and of the tensors beside it; other arguments as :func:`load_pretrained`."""
    if not isinstance(encoder, nn.Module):
        hint = "The folder holds the posterior; build the encoder and load its weights first."
        raise InputTypeError("encoder", "a torch.nn.Module with its weights", repr(encoder), hint)
    contents = saved.contents
    if contents.towers is not isinstance(encoder, TwoTowers):
        wanted = "a TwoTowers" if contents.towers else "one encoder"
        hint = "Pass contrastive_curvature.TwoTowers(encoder_a, encoder_b)." if contents.towers else ""
        raise InputError("encoder", wanted, f"a {type(encoder).__name__}", hint)
    if isinstance(encoder, TwoTowers) and encoder.shared is not contents.shared:
        kinds = ("two modules", "one module for both towers")
        raise InputError("encoder", kinds[contents.shared], kinds[encoder.shared])
    of_each = [
        _arguments(info, unpacked(tree, tensors), encoder, loss, relation, backend)
        for info, tree in zip(contents.posteriors, saved.trees, strict=True)
    ]
    arguments = of_each[0]
    if isinstance(encoder, TwoTowers):
        if "last_layer_name" in arguments:
            arguments["last_layer_name"] = [of_each[k]["last_layer_name"] for k in (0, -1)]
        la: Any = TwoTowerLaplace(encoder, **arguments)
        each = {f"encoder_{info.name}": getattr(la, info.name) for info in contents.posteriors}
    else:
        la = ContrastiveLaplace(encoder, **arguments)
        each = {"encoder": la}
    for (argument, one), info, plain in zip(each.items(), contents.posteriors, saved.trees, strict=True):
        device = next(one.model.parameters()).device
        tree = unpacked(plain, {name: tensor.to(device) for name, tensor in tensors.items()})
        _check_encoder(encoder_of(one), info.encoder, tree["encoder"], argument)
        one.load_state_dict(tree["state"])
        if tree["outputs"] is not None:
            _check_outputs(one, moved_inputs(one.model, tree["state"]["data"], device), tree["outputs"], argument)
    return la


def read_info(source: Path | str) -> PretrainedInfo:
    """Read the description of a saved posterior; needs no encoder.

    Args:
        source: The folder.

    Raises:
        InputError: There is no such folder, or its file is missing, damaged, foreign, or of another version.
    """
    folder = _folder(source)
    saved = read_header(folder / FILE, Saved)
    return PretrainedInfo(folder=folder, size=(folder / FILE).stat().st_size, **dict(saved.contents))


def _folder(source: object) -> Path:
    """Return the folder of a saved posterior; refuse one that does not exist."""
    folder = folder_path("source", source)
    if not folder.is_dir():
        hint = (
            "Name the folder that la.save_pretrained(folder) wrote. Download one from the Hugging Face hub first: "
            "docs/keep_and_serve.md#the-hugging-face-hub."
        )
        raise InputError("source", "a folder that exists", str(source), hint)
    return folder


def _arguments(
    info: PosteriorInfo, tree: Mapping[str, Any], encoder: nn.Module, loss: object, relation: object, backend: Any
) -> dict[str, Any]:
    """Return the constructor's arguments of a saved posterior.

    Args:
        info: Description of the posterior.
        tree: Constructor arguments and state of the posterior, with tensors on the CPU.
        encoder: The encoder.
        loss: A loss of the user's own, which cannot be rebuilt.
        relation: The relation, which cannot be rebuilt.
        backend: A backend, or None for the default.

    Raises:
        InputError: A required argument is missing or differs from the saved one.
    """
    got = None if relation is None else name_of(relation)
    if got != info.relation:
        wanted, hint = "None", "The posterior was fitted with class labels; leave it out."
        if info.relation is not None:
            wanted = f"the function {info.relation} that the posterior was fitted with"
            hint = "Its code is not in the folder. Pass relation=... as in backend_kwargs of the fit, under that name."
        raise InputError("relation", wanted, got, hint)
    arguments, options = dict(tree["arguments"]), dict(tree["options"])
    if relation is not None:
        options["relation"] = relation
    # The user may have passed a contrastive loss only by its options, such as margin=0.5.
    as_object = "loss" in tree["state"]["contrastive"]
    if as_object or loss is not None:
        same = _loss(info, tree["loss"], loss)
        if as_object:
            # The class refuses an encoder without parameters.
            device = next((p.device for p in encoder.parameters()), "cpu")
            options["loss"] = same if same is loss else same.to(device)
    if backend is not None:
        arguments["backend"] = backend
    return {**arguments, "hessian_structure": info.hessian_structure, "backend_kwargs": options}


def _loss(info: PosteriorInfo, saved: tuple[str, Any], loss: object) -> CosineLoss:
    """Return the loss of a saved posterior: the user's loss, if it is the same, or the rebuilt loss."""
    name, options = saved
    if isinstance(loss, CosineLoss) and (type(loss).__qualname__, loss.description) == (name, info.loss):
        return loss
    if loss is None and not info.needs_loss:
        return KNOWN_LOSSES[name].from_config(options)
    got = loss.description if isinstance(loss, CosineLoss) else "None" if loss is None else name_of(loss)
    hint = "Leave it out."
    if info.needs_loss:
        hint = (
            f"Its code is not in the folder. Pass loss={name}(...) to load_pretrained, with its options: {info.loss}."
        )
    raise InputError("loss", f"the {name} that the posterior was fitted with, {info.loss}", got, hint)


def _check_encoder(model: nn.Module, digest: str, saved: Sequence[Sequence[Any]], argument: str) -> None:
    """Refuse another encoder, and name some parameters or buffers that differ.

    Args:
        model: Encoder from the user.
        digest: Digest of the saved encoder.
        saved: :func:`.encoder_records` of the saved encoder.
        argument: Name of the encoder in the message.
    """
    if any(tensor.is_meta for _, tensor in state_tensors(model)):
        hint = "Load its weights: encoder.to_empty(device=...), then encoder.load_state_dict(...)."
        raise InputError(argument, "an encoder with its weights", "one on the device meta", hint)
    if encoder_digest(model) == digest:
        return
    was, now = _by_name(saved), _by_name(encoder_records(model))
    both = [name for name in was if name in now]
    kinds, shapes, values = ([name for name in both if was[name][i] != now[name][i]] for i in range(3))
    missing, new = [name for name in was if name not in now], [name for name in now if name not in was]
    hint = "Build the same architecture, and load its weights."
    if missing or new:
        got = f"one without {_some(missing)}" if missing else f"one with {_some(new)} too"
    elif shapes:
        got = f"another shape of {_some(shapes)}: {tuple(now[shapes[0]][1])} instead of {tuple(was[shapes[0]][1])}"
    elif kinds:
        got = f"{now[kinds[0]][0]} instead of {was[kinds[0]][0]} in {_some(kinds)}"
        hint = f"Load its weights in that precision: a conversion, as encoder.to({was[kinds[0]][0]}), rounds them."
    elif values:
        got = f"other numbers in {len(values)} of {len(was)} parameters and buffers: {_some(values)}"
        hint = "Load the encoder's weights first, as encoder.load_state_dict(...); or fit the posterior again."
    else:
        got = "its parameters in another order"
    raise InputError(argument, "the encoder that the posterior was saved from", got, hint)


def _check_outputs(la: Any, x: Any, saved: Tensor, argument: str) -> None:
    """Refuse an encoder that has the saved weights but other outputs.

    Args:
        la: A loaded posterior of a last layer.
        x: Saved inputs.
        saved: Saved raw outputs for these inputs, shape (B, D).
        argument: Name of the encoder in the message.
    """
    off = float((raw_outputs(la, x).double() - saved.double()).norm())
    # Outputs of zero inputs may be zero.
    size = max(float(saved.double().norm()), torch.finfo(torch.float32).tiny)
    # This form of the comparison also refuses NaN.
    if not off <= _SAME_OUTPUTS.get(saved.dtype, 0.1) * size:
        hint = "It has the same weights but other layers between them, as another activation or pooling."
        wanted = "the encoder's outputs for the example inputs in the folder"
        raise InputError(argument, wanted, f"others, {off / size:.2g} of their norm apart", hint)


def _by_name(records: Iterable[Sequence[Any]]) -> dict[str, tuple[str, list[int], str]]:
    # torch.compile and DistributedDataParallel add these prefixes to the names.
    return {
        name.removeprefix("_orig_mod.").removeprefix("module."): (kind, shape, checksum)
        for name, kind, shape, checksum in records
    }


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
