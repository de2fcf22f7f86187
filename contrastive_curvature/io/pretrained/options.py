"""Options of ``save_pretrained`` and ``push_to_hub``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FiniteFloat, StrictBool, StringConstraints, ValidationError

from contrastive_curvature.embedding.match_probability import MatchProbability
from contrastive_curvature.errors import InputError, InputTypeError

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class About(BaseModel):
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

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    fitted_on: _Text | None = None
    encoder_source: _Text | None = None
    license: _Text | None = None
    metrics: dict[_Text, FiniteFloat] | None = None
    evaluated_on: _Text | None = None
    pipeline_tag: _Text | None = None
    tags: list[_Text] | None = None
    notes: _Text | None = None


class _SharedOptions(About):
    """What ``save_pretrained`` and ``push_to_hub`` both take."""

    match: MatchProbability | None = None
    example: Any = None


class SaveOptions(_SharedOptions):
    """Options of ``save_pretrained``, besides those of :class:`About`.

    Attributes:
        match: A fitted :class:`~contrastive_curvature.MatchProbability` for the same encoder, saved with the posterior;
            :func:`contrastive_curvature.io.pretrained.load_match` reads it back.
        example: One or two inputs to save in the place of the made-up ones that a last layer's state keeps, where the
            encoder does not take those; for two towers a pair of them. They are in the folder.
        repo_id: A repository of the Hugging Face hub, ``"user/name"``, that the folder will go to: the model card says
            how to load it from there. Nothing is uploaded.
    """

    repo_id: str | None = None


class PushOptions(_SharedOptions):
    """Options of ``push_to_hub``, besides those of :class:`About`, ``match`` and ``example`` (:class:`SaveOptions`).

    Attributes:
        private: Whether a new repository is private; None for the default of the account.
        token: Of the hub; None takes the one of ``hf auth login``.
        revision: Branch to upload to; None for the main one.
        create_pr: Whether to open a pull request instead.
        commit_message: Of the upload.
    """

    private: StrictBool | None = None
    token: str | StrictBool | None = None
    revision: str | None = None
    create_pr: StrictBool = False
    commit_message: str | None = None


Options = TypeVar("Options", bound=About)


def parsed(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Return options as an object.

    Raises:
        InputTypeError: One is unknown.
        InputError: One has another type, is empty or not finite.
    """
    try:
        return kind(**options)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "extra_forbidden":
            raise InputTypeError(name, f"an option among {', '.join(kind.model_fields)}", name) from None
        raise InputError(name, wrong["msg"].removeprefix("Input should be "), wrong["input"]) from None


def is_repository(name: Any) -> bool:
    """Return whether a name is that of a repository on the hub, ``"user/name"``."""
    # Imported when used: the hub's package is not needed for a posterior in a folder.
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str) and "/" in name


def check_repository(name: object) -> None:
    """Refuse what is no name of a repository."""
    if not is_repository(name):
        hint = "Letters, digits, '_', '-' and '.' stand in it, and neither '--' nor '..'."
        raise InputError("repo_id", "the name of a repository, 'user/name'", name, hint)
