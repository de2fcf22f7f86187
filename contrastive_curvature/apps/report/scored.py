"""The data of an evaluation, and the scores of one data set, from one pass over its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.apps.report.evaluation import Missing
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError
from contrastive_curvature.metrics._checks import check_labels
from contrastive_curvature.network.call import naming_the_input
from contrastive_curvature.network.inputs import is_texts
from contrastive_curvature.network.loader import check_loader
from contrastive_curvature.posterior.p_values import RIVALS, rivals
from contrastive_curvature.progress import Progress

MOST_SAMPLED = 2**28
"""Numbers in the sampled embeddings of one data set: 1 GiB."""

_HIGHEST = torch.finfo(torch.float32).max


GROUPS = {
    "Most certain": ("test", "uncertainty", -1, "The smallest uncertainty: few errors should be here."),
    "Least certain": ("test", "uncertainty", 1, "The largest uncertainty: errors should gather here."),
    "Known, but unusual": (
        "test",
        "novelty",
        1,
        "Known test inputs with the largest novelty: a threshold flags them first, by mistake.",
    ),
    "Unknown, but usual": (
        "unknown",
        "novelty",
        -1,
        "Unknown inputs with the smallest novelty: a threshold misses them first.",
    ),
}
"""What the page shows, by title: inputs of a data set with the largest values of a score, or with -1 the smallest."""


class Data:
    """Batches of inputs, with names and pictures of them for the page.

    Args:
        batches: ``(x, labels)``, mappings that hold the labels too, or ``x`` alone; run over once.
        items: What to show of each input, in the order of the batches: a text (``str``), an image (PIL, an array or
            tensor of shape (H, W), (H, W, C) or (C, H, W)), or a :class:`~pathlib.Path` of an image file. ``None``
            shows the inputs if they are image tensors (C, H, W) or texts, and otherwise the names.
        ids: Name of each input. ``None`` counts them from 0.

    Raises:
        InputTypeError: ``batches`` cannot be iterated, or ``items`` or ``ids`` is not a sequence.
    """

    def __init__(
        self, batches: Iterable[Any], *, items: Sequence[Any] | None = None, ids: Sequence[Any] | None = None
    ) -> None:
        check_loader(batches, "batches", once=True, shares=True)
        for name, value in (("items", items), ("ids", ids)):
            known_length = hasattr(value, "__getitem__") and hasattr(value, "__len__")
            if value is not None and (not known_length or isinstance(value, (str, bytes, Mapping))):
                raise InputTypeError(name, "one entry for each input, as a list", f"a {type(value).__name__}")
        self.batches, self.items, self.ids = batches, items, ids

    def check_length(self, argument: str, n: int) -> None:
        """Refuse items or ids if their number is not the number of inputs."""
        for name, value in (("items", self.items), ("ids", self.ids)):
            if value is not None and len(value) != n:
                raise InputError(f"{argument}: {name}", f"{n}, one for each input", len(value))

    def name(self, row: int) -> str:
        """Return the name of an input."""
        name = row if self.ids is None else self.ids[row]
        return str(name.item() if isinstance(name, Tensor) and name.numel() == 1 else name)


class Extreme(NamedTuple):
    """An input with one of the largest scores: its score, its row in the data, and its text or image if known."""

    score: float
    row: int
    item: Any


@dataclass(frozen=True)
class Scored:
    """Scores of N inputs, on the CPU.

    Attributes:
        data: The data set.
        mu: Directions, shape (N, D).
        labels: Labels, shape (N,); ``None`` without labels.
        scores: Scores by name, float64, shape (N,) each: ``"uncertainty"`` in radians; if there are p-values, also
            ``"novelty"`` and alternative scores for unknown inputs.
        p_value: P-values, float64, shape (N,), or :class:`Missing` with the reason.
        samples: Embeddings by S networks (the same for all data sets), shape (S, N, D); ``None`` if not requested.
        extremes: The inputs to show, by title of their group.
    """

    data: Data
    mu: Tensor
    labels: Tensor | None
    scores: dict[str, Tensor]
    p_value: Tensor | Missing
    samples: Tensor | None
    extremes: dict[str, list[Extreme]]

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(self.mu)


def score(la: Any, argument: str, data: Data, n_samples: int, n_shown: int, seed: int, progress: Progress) -> Scored:
    """Run over a data set once, with the mean network and ``n_samples`` networks drawn with ``seed``."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    extremes: dict[str, list[Extreme]] = defaultdict(list)
    missing = Missing("They were not asked for.") if argument == "gallery" else None
    rows = sampled = 0
    for number, batch in enumerate(progress.over(data.batches, f"[evaluation: {argument}]")):
        where = f"{argument}: batch {number} (counted from 0)"
        x, labels = _split(where, batch, getattr(la, "dict_key_y", "labels"))
        with torch.no_grad():
            try:
                with naming_the_input(x):
                    embedding = la(x)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            columns = {"mu": embedding.mu.cpu(), "uncertainty": embedding.uncertainty.double().cpu()}
            if missing is None:
                try:
                    columns |= {
                        # No metric accepts infinities; the order does not change.
                        "novelty": embedding.novelty.cpu().nan_to_num(posinf=_HIGHEST, neginf=-_HIGHEST),
                        "p_value": embedding.p_value.cpu(),
                        **{
                            name: values.double().cpu()
                            for name, values in rivals(la.posterior, la.read, embedding).items()
                        },
                    }
                except NotFittedError as error:
                    missing = Missing(str(error))
            sampled += n_samples * columns["mu"].numel()
            if n_samples and sampled <= MOST_SAMPLED:
                generator = torch.Generator(la._device).manual_seed(seed)
                samples = la.predictive_samples(x, n_samples=n_samples, joint=True, generator=generator)
                columns["samples"] = samples.cpu()
            else:
                parts.pop("samples", None)
        if labels is not None:
            columns["labels"] = check_labels(f"{where}: labels", labels, len(embedding.mu)).cpu()
        for name, values in columns.items():
            parts[name].append(values)
        for title, (source, name, sign, _) in GROUPS.items():
            if source == argument and name in columns:
                extremes[title] = _largest(extremes[title], sign * columns[name], rows, x, n_shown)
        rows += len(embedding.mu)
    if not rows:
        raise InputError(argument, "at least one input", "none")
    data.check_length(argument, rows)
    if len(parts["labels"]) not in (0, len(parts["mu"])):
        raise InputError(argument, "labels in every batch, or in none", "labels in some batches")
    joined = {name: torch.cat(values, 1 if name == "samples" else 0) for name, values in parts.items() if values}
    return Scored(
        data,
        joined["mu"],
        joined.get("labels"),
        {name: joined[name] for name in ("uncertainty", "novelty", *RIVALS) if name in joined},
        missing or joined["p_value"],
        joined.get("samples"),
        extremes,
    )


def _split(where: str, batch: Any, label_key: str) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch, ``None`` without labels."""
    if isinstance(batch, Mapping):
        return batch, batch.get(label_key)
    if isinstance(batch, Tensor) or is_texts(batch):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise InputTypeError(where, "batches (x, labels), or of inputs alone", f"a {type(batch).__name__}{length}")


def _preview(x: Any, row: int) -> Any:
    """Return the text or image tensor of an input of a batch; ``None`` if it is neither."""
    if is_texts(x):
        return x[row]
    if isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3):
        # A copy, because a view would keep the whole batch in memory.
        return x[row].detach().to("cpu", torch.float32, copy=True)
    return None


def _largest(earlier: list[Extreme], scores: Tensor, first_row: int, x: Any, n: int) -> list[Extreme]:
    """Return the ``n`` inputs with the largest scores among earlier batches and this batch."""
    best = scores.argsort(descending=True, stable=True)[:n].tolist()
    new = [Extreme(float(scores[i]), first_row + i, _preview(x, i)) for i in best]
    # Sorted by score and then by row, so that the choice does not depend on the batch size.
    return sorted([*earlier, *new], key=lambda extreme: (-extreme.score, extreme.row))[:n]
