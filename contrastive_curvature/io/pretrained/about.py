"""What a user can say about a posterior that is saved: for the model card, and for those who load it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["REPOSITORY", "About", "PushOptions", "SaveOptions", "checked_about", "checked_repository"]

REPOSITORY = re.compile(
    r"(?!.*(?:--|\.\.|\.git\Z))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?",
    re.ASCII,
)
"""Names of repositories on the Hugging Face hub, by the rules of ``huggingface_hub.utils.validate_repo_id``."""

_TEXTS = ("fitted_on", "encoder_source", "license", "evaluated_on", "pipeline_tag", "notes")


class About(TypedDict, total=False):
    """What the model card says beyond the posterior itself.

    Attributes:
        fitted_on: What data the posterior was fitted on.
        encoder_source: Where the encoder comes from: a repository of the hub, as ``"user/name"``, or a sentence.
        license: Licence of what is shared, as the hub names it: ``"mit"``, ``"apache-2.0"``, ``"cc-by-nc-4.0"``.
        metrics: Names and values of what was measured, as ``{"auroc": 0.97}``.
        evaluated_on: What data that was measured on.
        pipeline_tag: The hub's name of the task; ``"feature-extraction"``, unless it is given.
        tags: Further tags.
        notes: Anything else, Markdown.
    """

    fitted_on: str | None
    encoder_source: str | None
    license: str | None
    metrics: Mapping[str, float] | None
    evaluated_on: str | None
    pipeline_tag: str | None
    tags: Sequence[str] | None
    notes: str | None


class _SharedOptions(About, total=False):
    """What ``save_pretrained`` and ``push_to_hub`` both take."""

    match: MatchProbability | None
    example: Any


class SaveOptions(_SharedOptions, total=False):
    """Options of ``save_pretrained``, besides those of :class:`About`.

    Attributes:
        match: A fitted :class:`~contrastive_curvature.MatchProbability` for the same encoder, saved with the posterior;
            :func:`contrastive_curvature.io.pretrained.load_match` reads it back.
        example: One or two inputs to save in the place of the made-up ones that a last layer's state keeps, where the
            encoder does not take those; for two towers a pair of them. They are in the folder.
        repo_id: A repository of the Hugging Face hub, ``"user/name"``, that the folder will go to: the model card says
            how to load it from there. Nothing is uploaded.
    """

    repo_id: str | None


class PushOptions(_SharedOptions, total=False):
    """Options of ``push_to_hub``, besides those of :class:`About`, ``match`` and ``example`` (:class:`SaveOptions`).

    Attributes:
        private: Whether a new repository is private; None for the default of the account.
        token: Of the hub; None takes the one of ``hf auth login``.
        revision: Branch to upload to; None for the main one.
        create_pr: Whether to open a pull request instead.
        commit_message: Of the upload.
    """

    private: bool | None
    token: str | bool | None
    revision: str | None
    create_pr: bool
    commit_message: str | None


def checked_repository(repo_id: object) -> str:
    """The name of a repository of the hub.

    Raises:
        InputTypeError: It is no text.
        InputError: It is not of the form ``"user/name"``.
    """
    wanted = "the name of a repository, 'user/name'"
    if not isinstance(repo_id, str):
        raise InputTypeError(expected("repo_id", wanted, f"a {type(repo_id).__name__}"))
    if not REPOSITORY.fullmatch(repo_id):
        hint = "Letters, digits, '_', '-' and '.' stand in it, and neither '--' nor '..'."
        raise InputError(expected("repo_id", wanted, repr(repo_id), hint))
    return repo_id


def checked_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """The options as JSON writes them, without those that were left out.

    Raises:
        InputTypeError: An option is unknown, or has another type.
        InputError: A text is empty, or a metric is not finite.
    """
    unknown = sorted(set(about) - set(About.__annotations__))
    if unknown:
        wanted = f"options among {', '.join(sorted(About.__annotations__))}"
        raise InputTypeError(expected("save_pretrained", wanted, ", ".join(unknown)))
    given = {name: value for name, value in about.items() if value is not None}
    plain: dict[str, Any] = {name: _text(name, given[name]) for name in _TEXTS if name in given}
    if "tags" in given:
        tags = given["tags"]
        if isinstance(tags, str) or not isinstance(tags, Sequence):
            raise InputTypeError(expected("tags", "a list of strings", f"a {type(tags).__name__}"))
        plain["tags"] = [_text("tags", tag) for tag in tags]
    if "metrics" in given:
        metrics = given["metrics"]
        if not isinstance(metrics, Mapping):
            hint = "For example metrics={'auroc': 0.97}."
            raise InputTypeError(expected("metrics", "names and numbers", f"a {type(metrics).__name__}", hint))
        plain["metrics"] = {_text("metrics", name): _number(name, value) for name, value in metrics.items()}
    return plain


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputTypeError(expected(name, "a text", f"a {type(value).__name__}"))
    if not value.strip():
        raise InputError(expected(name, "a text", "an empty one", "Leave it out."))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(
            expected(name, "a text", "one that has no UTF-8", "It has half of a surrogate pair.")
        ) from None
    return str(value)


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(expected(f"metrics[{name!r}]", "a finite number", value))
    return number
