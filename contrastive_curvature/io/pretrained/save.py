"""``la.save_pretrained``: a posterior as a folder to keep or to share, with a model card."""

from __future__ import annotations

from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import contrastive_curvature
from contrastive_curvature import validate
from contrastive_curvature.codec import TensorTable, packed
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.io.pretrained.folder import (
    PretrainedInfo,
    Saved,
    SavedPosterior,
    check_target,
    numbers_file,
    place_of,
    write,
)
from contrastive_curvature.io.pretrained.options import (
    About,
    SaveOptions,
    check_repository,
    is_repository,
    parsed,
)
from contrastive_curvature.io.pretrained.posterior import saved_posterior
from contrastive_curvature.laplace import ContrastiveLaplace, TwoTowerLaplace

LIBRARY = "contrastive-curvature"
"""Name of this library on the Hugging Face hub."""

_TAGS = (LIBRARY, "laplace", "uncertainty", "embeddings", "metric-learning")


def save_pretrained(la: Any, folder: Path | str, *, overwrite: bool = False, **options: Any) -> Path:
    """Write a posterior, or that of two towers, to a folder.

    Args:
        la: The posterior.
        folder: The folder; missing parents are made.
        overwrite: Whether a saved posterior that is there may be replaced.
        **options: See :class:`~contrastive_curvature.io.pretrained.SaveOptions`.

    Returns:
        The folder, with all links followed.

    Raises:
        NotFittedError: Before ``fit``.
        InputError: An option is malformed, or the folder holds something already.
        UnsupportedError: The posterior is of a class of the user's own, or has options that are no plain values.
        OSError: The folder cannot be written.
    """
    from safetensors.torch import save

    validate.flag("overwrite", overwrite)
    given = parsed(SaveOptions, options)
    if given.repo_id is not None:
        check_repository(given.repo_id)
    place = place_of(folder)
    check_target(place, overwrite=overwrite)
    table = TensorTable()
    posteriors = _posteriors(la, table, given.example)
    if given.match is not None and given.match._fitted is None:
        hint = "Call match.fit_pairs(a, b, same) first."
        raise InputError("match", "a fitted MatchProbability", "one that is not fitted", hint)
    match = packed(None if given.match is None else given.match.state_dict(), table, "match")
    numbers = save(table.tensors)
    saved = Saved(
        versions={
            "contrastive_curvature": contrastive_curvature.__version__,
            "torch": str(torch.__version__),
            # laplace-torch has no attribute of it.
            "laplace-torch": metadata.version("laplace-torch"),
        },
        towers=isinstance(la, TwoTowerLaplace),
        shared=isinstance(la, TwoTowerLaplace) and la.shared,
        posteriors=posteriors,
        match=match,
        about=About(**{name: getattr(given, name) for name in About.model_fields}),
        numbers=numbers_file(numbers),
    )
    card = _card(saved.info(place.path), given.repo_id)
    write(place, saved, numbers, card, overwrite=overwrite)
    return place.path


def _posteriors(la: Any, table: TensorTable, example: Any) -> list[SavedPosterior]:
    if isinstance(la, ContrastiveLaplace):
        return [saved_posterior(la, "encoder", table, "", example)]
    if not isinstance(la, TwoTowerLaplace):
        raise InputTypeError("la", "a posterior of likelihood='contrastive'", f"a {type(la).__name__}")
    if example is not None and not (isinstance(example, (tuple, list)) and len(example) == 2):
        raise InputTypeError("example", "inputs of both towers, (a, b)", f"a {type(example).__name__}")
    of_a, of_b = example or (None, None)
    saved = [saved_posterior(la.a, "a", table, "a.", of_a)]
    return saved if la.shared else [*saved, saved_posterior(la.b, "b", table, "b.", of_b)]


def _card(info: PretrainedInfo, repo_id: str | None) -> str:
    """Return the model card: Markdown, with metadata for the hub in front."""
    import jinja2
    from huggingface_hub import EvalResult, ModelCardData

    about, name = info.about, repo_id or info.folder.name
    task = about.get("pipeline_tag", "feature-extraction")
    source = about.get("encoder_source")
    results = [
        EvalResult(
            task_type=task,
            dataset_type="custom",
            dataset_name=about.get("evaluated_on", "not named"),
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
        )
        for metric, value in info.metrics.items()
    ]
    data = ModelCardData(
        library_name=LIBRARY,
        pipeline_tag=task,
        license=about.get("license"),
        tags=list(dict.fromkeys([*_TAGS, *about.get("tags", ())])),
        base_model=source if is_repository(source) else None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|")
    template = environment.from_string(files(__package__).joinpath("card.md.jinja").read_text(encoding="utf-8"))
    return template.render(
        metadata=data.to_yaml(), info=info, name=name, source=repo_id or "path/to/this/folder", library=LIBRARY
    )
