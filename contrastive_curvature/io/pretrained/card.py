"""The model card: ``README.md`` with metadata as the Hugging Face hub reads it. Needs no other package."""

from __future__ import annotations

from typing import Any

from contrastive_curvature.io.pretrained.about import REPOSITORY
from contrastive_curvature.io.pretrained.info import PosteriorInfo, PretrainedInfo
from contrastive_curvature.io.pretrained.layout import LIBRARY
from contrastive_curvature.io.pretrained.yaml_text import yaml_text

__all__ = ["card_text"]

_TASK = "feature-extraction"
_TAGS = (LIBRARY, "laplace", "uncertainty", "embeddings", "metric-learning")

_LIMITS = """\
- The posterior belongs to one encoder. Another one is refused when it is loaded, also one that was trained further.
- The uncertainty is that of the embedding under the training loss. It says how far to trust a comparison of embeddings
  of inputs like those of training; it is not the probability that a label is right.
- A p-value holds for inputs that are exchangeable with those of calibration. After a change of the data, calibrate
  again with `la.calibrate(loader)`.
- Nothing in these files is executed when they are loaded: numbers are in safetensors, the rest in JSON. Checksums
  detect damage, not an author who means harm."""


def card_text(info: PretrainedInfo, name: str, repo_id: str | None = None) -> str:
    """The card of a saved posterior.

    Args:
        info: What is in it.
        name: What to call it.
        repo_id: The repository of the hub that it goes to, or None for a folder.

    Returns:
        Markdown with YAML in front.
    """
    parts = [
        f"---\n{yaml_text(_metadata(info, name))}---",
        f"# {_inline(name)}",
        _what(info),
        _how_to_load(info, repo_id or "path/to/this/folder"),
        "## The encoder\n\n" + _encoder(info),
        "## What it was fitted on\n\n" + _fit(info),
        *(_table(one, len(info.posteriors)) for one in info.posteriors),
        _metrics(info),
        f"## Limits\n\n{_LIMITS}{_inputs_inside(info)}",
        f"## Notes\n\n{info.about['notes']}" if "notes" in info.about else "",
        f"Written by contrastive_curvature {info.versions['contrastive_curvature']} with torch "
        f"{info.versions['torch']}; format version {info.format_version}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(info: PretrainedInfo, name: str) -> dict[str, Any]:
    about = info.about
    task = about.get("pipeline_tag", _TASK)
    out: dict[str, Any] = {"library_name": LIBRARY, "pipeline_tag": task}
    if "license" in about:
        out["license"] = about["license"]
    out["tags"] = list(dict.fromkeys([*_TAGS, *about.get("tags", ())]))
    if REPOSITORY.fullmatch(about.get("encoder_source", "")):
        out["base_model"] = about["encoder_source"]
    if info.metrics:
        data = about.get("evaluated_on", "not named")
        found = [{"type": metric, "value": value, "name": metric} for metric, value in info.metrics.items()]
        result = {"task": {"type": task}, "dataset": {"type": "custom", "name": data}, "metrics": found}
        out["model-index"] = [{"name": name, "results": [result]}]
    return out


def _what(info: PretrainedInfo) -> str:
    of = "two towers (two encoders into one space)" if info.towers else "an encoder"
    return (
        f"A Laplace posterior of {of}, for [contrastive_curvature](https://pypi.org/project/{LIBRARY}/): every "
        "embedding comes with a direction, a concentration and an uncertainty. The encoder itself is not in this "
        "repository."
    )


def _how_to_load(info: PretrainedInfo, source: str) -> str:
    first = info.posteriors[0]
    given = "".join(
        f", {name}=..." for name, needed in (("loss", first.needs_loss), ("relation", first.relation)) if needed
    )
    encoder = "cc.TwoTowers(encoder_a, encoder_b)" if info.towers else "encoder"
    p_value = ".p_value" if first.calibrated else ".uncertainty"
    use = "la.a(x)" if info.towers else "la(x)"
    match = (
        f'match = cc.pretrained.load_match("{source}")  # P(two embeddings are of one class)\n' if info.match else ""
    )
    return f"""## How to load

```
pip install '.[hub]'  # in a copy of the repository of {LIBRARY}
```

```python
import contrastive_curvature as cc

la = cc.load_pretrained("{source}", encoder={encoder}{given})
mu, kappa = {use}  # unit direction and concentration
{use}{p_value}
{match}```"""


def _encoder(info: PretrainedInfo) -> str:
    about, lines = info.about, []
    if "encoder_source" in about:
        lines.append(f"Source: {about['encoder_source']}")
    else:
        lines.append("Its author has not said where it comes from.")
    for one in info.posteriors:
        tower = f" of tower {one.name}" if len(info.posteriors) > 1 else ""
        lines.append(
            f"- checksum{tower}: `{one.encoder}` of {one.n_encoder_tensors} parameters and buffers in `{one.dtype}`, "
            f"{one.n_outputs} outputs; it is compared on loading"
        )
    return "\n\n".join([lines[0], "\n".join(lines[1:])])


def _fit(info: PretrainedInfo) -> str:
    return str(info.about.get("fitted_on", "Its author has not said."))


def _table(one: PosteriorInfo, count: int) -> str:
    n, least, most = one.prior_precisions
    prior = f"{one.prior_precision:.6g}" if one.prior_precision is not None else f"{n} from {least:.4g} to {most:.4g}"
    options = ", ".join(f"{name}={value!r}" for name, value in one.options.items())
    rows = {
        "weights": one.subset_of_weights,
        "structure": one.hessian_structure,
        "points": f"{one.n_data:,}",
        "posterior parameters": f"{one.n_params:,}",
        "loss": f"`{one.loss}`" + (" (pass `loss=`: its code is not here)" if one.needs_loss else ""),
        "options": f"`{options}`",
        "relation": f"`{one.relation}` (pass `relation=`: its code is not here)" if one.relation else "class labels",
        "prior precision": prior,
        "temperature": f"{one.temperature:.6g}",
        "calibrated": f"with {one.n_calibration:,} inputs" if one.n_calibration else "no",
        "class centres": f"{one.n_classes:,}" if one.n_classes else "none",
    }
    title = f"## The posterior of tower {one.name}" if count > 1 else "## The posterior"
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join([title, "", "| | |", "|---|---|", *lines])


def _metrics(info: PretrainedInfo) -> str:
    if not info.metrics:
        return "## Evaluation\n\nNot evaluated, or its author has not said."
    lines = [f"| {_cell(name)} | {value:.4g} |" for name, value in info.metrics.items()]
    on = f" On: {info.about['evaluated_on']}" if "evaluated_on" in info.about else ""
    return "\n".join([f"## Evaluation\n\nMeasured by its author.{on}", "", "| metric | value |", "|---|---|", *lines])


def _inputs_inside(info: PretrainedInfo) -> str:
    kinds = {one.hessian_structure for one in info.posteriors}
    if "gp" in kinds:
        return "\n- A posterior of structure `gp` holds some of its training inputs."
    if "last_layer" in {one.subset_of_weights for one in info.posteriors}:
        return "\n- Up to two inputs are in the file: made up, unless its author gave an `example`."
    return ""


def _inline(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")
