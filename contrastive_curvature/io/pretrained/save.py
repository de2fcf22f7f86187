"""``la.save_pretrained``: a posterior as a folder to keep or to share."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import contrastive_curvature
from contrastive_curvature import validate
from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.pretrained.about import checked_about, checked_repository
from contrastive_curvature.io.pretrained.card import card_text
from contrastive_curvature.io.pretrained.config import config_bytes
from contrastive_curvature.io.pretrained.folder import write_folder
from contrastive_curvature.io.pretrained.info import info_of
from contrastive_curvature.io.pretrained.layout import VERSION
from contrastive_curvature.io.pretrained.numbers import numbers_bytes
from contrastive_curvature.io.pretrained.records import plain_posterior
from contrastive_curvature.io.pretrained.target import check_target, checked_path
from contrastive_curvature.io.pretrained.tree import TensorTable, plain_tree
from contrastive_curvature.network.inputs import Inputs

__all__ = ["save_pretrained"]


def save_pretrained(
    la: Any,
    folder: Path | str,
    *,
    overwrite: bool = False,
    match: MatchProbability | None = None,
    example: Inputs | tuple[Inputs, Inputs] | None = None,
    repo_id: str | None = None,
    **about: Any,
) -> Path:
    """Write a posterior, or that of two towers, to a folder.

    Args:
        la: The posterior.
        folder: The folder; missing parents are made.
        overwrite: Whether a saved posterior that is there may be replaced.
        match: A fitted :class:`~contrastive_curvature.MatchProbability` for the same encoder, saved with it.
        example: One or two inputs to save in the place of the made-up ones that a last layer's state keeps, where the
            encoder does not take those; for two towers a pair of them.
        repo_id: Name of a repository of the hub, ``"user/name"``, which the card tells how to load from; nothing is
            uploaded.
        **about: For the model card, see :class:`~contrastive_curvature.io.pretrained.about.About`.

    Returns:
        The folder, with all links followed.

    Raises:
        NotFittedError: Before ``fit``.
        InputError: An option is malformed, the folder holds something already, or it cannot be written.
        UnsupportedError: The posterior is of a class of the user's own, or has options that are no plain values.
    """
    validate.flag("overwrite", overwrite)
    plain_about = checked_about(about)
    if repo_id is not None:
        checked_repository(repo_id)
    target = checked_path(folder)
    check_target(target, overwrite=overwrite)
    table = TensorTable()
    posteriors, shared = _posteriors(la, table, example)
    config = {
        "versions": versions(),
        "towers": shared is not None,
        "shared": bool(shared),
        "posteriors": posteriors,
        "match": _plain_match(match, table),
        "about": plain_about,
    }
    content, config["tensors"] = numbers_bytes(table.tensors)
    config["format_version"] = VERSION
    name = repo_id or target.name.encode("utf-8", "replace").decode()
    card = card_text(info_of(config, target), name, repo_id)
    write_folder(target, (config["tensors"]["file"], content), config_bytes(config), card.encode(), overwrite=overwrite)
    return target


def versions() -> dict[str, str]:
    """Versions of this library and of those that the numbers of a posterior come from."""
    # Of laplace-torch only the distribution knows it.
    return {
        "contrastive_curvature": contrastive_curvature.__version__,
        "torch": str(torch.__version__),
        "laplace-torch": metadata.version("laplace-torch"),
    }


def _posteriors(la: Any, table: TensorTable, example: Any) -> tuple[dict[str, Any], bool | None]:
    """Every posterior by name, and whether two towers share one; None for one encoder."""
    from contrastive_curvature.laplace import ContrastiveLaplace, TwoTowerLaplace

    if isinstance(la, TwoTowerLaplace):
        pair = example if isinstance(example, (tuple, list)) and len(example) == 2 else (None, None)
        if example is not None and pair[0] is None:
            raise InputTypeError(expected("example", "inputs of both towers, (a, b)", f"a {type(example).__name__}"))
        made = {"a": plain_posterior(la.a, table, "a.", pair[0])}
        if not la.shared:
            made["b"] = plain_posterior(la.b, table, "b.", pair[1])
        return made, la.shared
    if not isinstance(la, ContrastiveLaplace):
        wanted = "a posterior of likelihood='contrastive'"
        raise InputTypeError(expected("la", wanted, f"a {type(la).__name__}"))
    return {"encoder": plain_posterior(la, table, "", example)}, None


def _plain_match(match: object, table: TensorTable) -> Any:
    if match is None:
        return None
    if not isinstance(match, MatchProbability):
        raise InputTypeError(expected("match", "a MatchProbability, or None", f"a {type(match).__name__}"))
    state = match.state_dict()
    if set(state) == {"version", "use_uncertainty", "curve"}:
        hint = "Call match.fit_pairs(...) or match.fit_retrieval(...) first."
        raise InputError(expected("match", "a fitted MatchProbability", "one that is not fitted", hint))
    return plain_tree(state, table, "match")
