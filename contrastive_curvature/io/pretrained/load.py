"""Reading a saved posterior: nothing is executed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from contrastive_curvature.codec import unpacked
from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, InputTypeError
from contrastive_curvature.io.pretrained.folder import CONFIG, PretrainedInfo, Saved, place_of, read
from contrastive_curvature.io.pretrained.hub import local_folder
from contrastive_curvature.io.pretrained.posterior import constructor, fill
from contrastive_curvature.laplace import TwoTowerLaplace
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.pairs import RelationFunction


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
            ``"user/name"``.
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
        InputError: There is no such folder or repository; a file is missing, damaged, foreign, or of another version;
            the encoder is another one; or the loss, the relation or the backend is missing or another one.
        InputTypeError: An argument has another type.
        UnsupportedError: The encoder is of a kind without a posterior.
    """
    if not isinstance(encoder, nn.Module):
        hint = "The folder holds the posterior; build the encoder and load its weights first."
        raise InputTypeError("encoder", "a torch.nn.Module with its weights", repr(encoder), hint)
    folder = local_folder(source, revision, token, cache_dir, local_files_only)
    saved, tensors = read(folder)
    if saved.towers is not isinstance(encoder, TwoTowers):
        wanted = "a TwoTowers" if saved.towers else "one encoder"
        hint = "Pass contrastive_curvature.TwoTowers(encoder_a, encoder_b)." if saved.towers else ""
        raise InputError("encoder", wanted, f"a {type(encoder).__name__}", hint)
    given = {"loss": loss, "relation": relation, "backend": backend}
    with _well_formed(folder):
        if isinstance(encoder, TwoTowers):
            return _towers(saved, tensors, encoder, given)
        (only,) = saved.posteriors
        kind, arguments = constructor(only, tensors, encoder, **given)
        la = kind(encoder, **arguments)
        fill(la, only, tensors)
    return la


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
    saved, tensors = read(folder)
    if saved.match is None:
        hint = "Save one with la.save_pretrained(folder, match=...)."
        raise InputError(str(folder), "a posterior with a MatchProbability", "one without", hint)
    with _well_formed(folder):
        state = unpacked(saved.match, tensors)
        match = MatchProbability(use_uncertainty=state["use_uncertainty"], curve=state["curve"])
        match.load_state_dict(state)
    return match


def read_info(
    source: Path | str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
    local_files_only: bool = False,
) -> PretrainedInfo:
    """Read what is in a saved posterior; needs no encoder.

    Args:
        source: The folder, or a repository of the Hugging Face hub, as ``"user/name"``.
        revision: Branch, tag or commit of the repository.
        token: Of the hub.
        cache_dir: Where the hub's files are kept.
        local_files_only: Whether only files that were downloaded before are used.

    Raises:
        InputError: There is no such folder or repository, or its ``config.json`` is missing, damaged, foreign, or of
            another version.
    """
    folder = local_folder(source, revision, token, cache_dir, local_files_only)
    return place_of(folder).read().info(folder)


@contextlib.contextmanager
def _well_formed(folder: Path) -> Iterator[None]:
    """Refuse a header whose checksum is right, and whose content no posterior can be made of."""
    try:
        yield
    except ContrastiveCurvatureError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        received = f"a malformed one ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        Saved.refuse(str(folder / CONFIG), received, Saved.repaired_by)


def _towers(saved: Saved, tensors: dict[str, Tensor], encoder: TwoTowers, given: dict[str, Any]) -> TwoTowerLaplace:
    if encoder.shared is not saved.shared:
        kinds = ("two modules", "one module for both towers")
        raise InputError("encoder", kinds[saved.shared], kinds[encoder.shared])
    first, last = saved.posteriors[0], saved.posteriors[-1]
    _, arguments = constructor(first, tensors, encoder, **given)
    if "last_layer_name" in arguments:
        arguments["last_layer_name"] = [one.arguments["last_layer_name"] for one in (first, last)]
    la = TwoTowerLaplace(encoder, **arguments)
    for one in saved.posteriors:
        fill(getattr(la, one.info.name), one, tensors, f"encoder_{one.info.name}")
    return la
