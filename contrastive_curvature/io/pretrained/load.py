"""Reading a saved posterior: everything is checked before there is an object, and nothing is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.errors import (
    ContrastiveCurvatureError,
    InputError,
    InputTypeError,
    NotFittedError,
    UnsupportedError,
    expected,
)
from contrastive_curvature.io.pretrained.config import damaged, read_config
from contrastive_curvature.io.pretrained.hub import local_folder
from contrastive_curvature.io.pretrained.layout import CONFIG
from contrastive_curvature.io.pretrained.numbers import read_numbers
from contrastive_curvature.io.pretrained.records import constructor, fill
from contrastive_curvature.io.pretrained.tree import restored_tree
from contrastive_curvature.laplace import ContrastiveLaplace, TwoTowerLaplace
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.pairs import RelationFunction

__all__ = ["load_match", "load_pretrained"]

_TRIES = 3
"""How often a folder is read that somebody else replaces meanwhile."""


def load_pretrained(
    source: Path | str,
    encoder: nn.Module,
    *,
    loss: CosineLoss | None = None,
    relation: RelationFunction | None = None,
    backend: type[ContrastiveBackend] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
) -> Any:
    """Load what ``la.save_pretrained`` wrote. Nothing in the files is executed.

    Args:
        source: The folder; or, where there is none of that name, a repository of the Hugging Face hub, as
            ``"user/name"`` (``pip install 'contrastive-curvature[hub]'``).
        encoder: The encoder with its weights, on the device and in the precision that it will be used in;
            a :class:`~contrastive_curvature.TwoTowers` for a posterior of two towers.
        loss: The loss of the fit, where it is one of your own, whose code is not in the folder.
        relation: The relation of the fit, where there was one.
        backend: A backend for further fits; None for the default.
        revision: Branch, tag or commit of a repository of the hub.
        token: Of the hub, see ``huggingface_hub.snapshot_download``.
        cache_dir: Where the hub's files are kept.
        local_files_only: Whether only files that were downloaded before are used.

    Returns:
        The posterior; ``la(x)`` predicts what it did when it was saved.

    Raises:
        InputError: There is no such folder or repository; a file is missing, damaged, foreign, or of a later version;
            the encoder is another one; or the loss, the relation or the backend is missing or another one.
        InputTypeError: An argument has another type.
        UnsupportedError: ``huggingface_hub`` is not installed, or the encoder is of a kind without a posterior.
    """
    if not isinstance(encoder, nn.Module):
        came = f"the class {encoder.__name__}" if isinstance(encoder, type) else f"a {type(encoder).__name__}"
        hint = "The folder holds the posterior; build the encoder and load its weights first."
        raise InputTypeError(expected("encoder", "a torch.nn.Module with its weights", came, hint))
    folder = local_folder(source, revision, token, cache_dir, local_files_only)
    config, tensors = _read(folder)
    given: dict[str, Any] = {"loss": loss, "relation": relation, "backend": backend}
    try:
        if not config["towers"]:
            return _single(config["posteriors"]["encoder"], tensors, encoder, given)
        return _towers(config, tensors, encoder, given)
    except (InputError, NotFittedError, UnsupportedError) as error:
        msg = f"{folder}: {error}"
        raise type(error)(msg) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ContrastiveCurvatureError):
            raise
        raise damaged(folder / CONFIG, f"what no posterior can be made of ({error})") from error


def load_match(
    source: Path | str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
) -> MatchProbability:
    """Load the :class:`~contrastive_curvature.MatchProbability` that was saved with a posterior; needs no encoder.

    Args:
        source: As of :func:`load_pretrained`.
        revision: As there.
        token: As there.
        cache_dir: As there.
        local_files_only: As there.

    Raises:
        InputError: See :func:`load_pretrained`; or none was saved with it.
    """
    folder = local_folder(source, revision, token, cache_dir, local_files_only)
    config, tensors = _read(folder)
    if config.get("match", {}) is None:
        hint = "Save one with la.save_pretrained(folder, match=...)."
        raise InputError(expected(str(folder), "a posterior with a MatchProbability", "one without", hint))
    try:
        state = restored_tree(config["match"], tensors)
        match = MatchProbability(use_uncertainty=state["use_uncertainty"], curve=state["curve"])
        match.load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged(folder / CONFIG, f"what no MatchProbability can be made of ({error})") from error
    return match


def _single(plain: Any, tensors: dict[str, Tensor], encoder: nn.Module, given: dict[str, Any]) -> ContrastiveLaplace:
    if isinstance(encoder, TwoTowers):
        hint = "Pass the one encoder that it was fitted for."
        raise InputError(expected("encoder", "one encoder", "a TwoTowers", hint))
    kind, arguments = constructor(plain, tensors, encoder, **given)
    la = kind(encoder, **arguments)
    fill(la, plain, tensors)
    return la


def _towers(config: Any, tensors: dict[str, Tensor], encoder: nn.Module, given: dict[str, Any]) -> TwoTowerLaplace:
    if not isinstance(encoder, TwoTowers):
        hint = "Pass contrastive_curvature.TwoTowers(encoder_a, encoder_b)."
        raise InputError(expected("encoder", "a TwoTowers", f"a {type(encoder).__name__}", hint))
    if encoder.shared is not config["shared"]:
        kinds = ("two modules", "one module for both towers")
        raise InputError(expected("encoder", kinds[config["shared"]], kinds[encoder.shared]))
    plain = config["posteriors"]
    _, arguments = constructor(plain["a"], tensors, encoder, **given)
    if "last_layer_name" in arguments:
        both = (plain["a"], plain.get("b", plain["a"]))
        arguments["last_layer_name"] = [one["arguments"]["last_layer_name"] for one in both]
    weights, structure = plain["a"]["subset_of_weights"], plain["a"]["structure"]
    la = TwoTowerLaplace(encoder, subset_of_weights=weights, hessian_structure=structure, **arguments)
    for name in plain:
        fill(getattr(la, name), plain[name], tensors, f"encoder_{name}")
    return la


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors that belong together."""
    for _ in range(_TRIES):
        config = read_config(folder)
        try:
            return config, read_numbers(folder, config["tensors"])
        except FileNotFoundError:
            # Somebody may have replaced the posterior between the two files.
            continue
    raise damaged(folder / config["tensors"]["file"], "no such file")
