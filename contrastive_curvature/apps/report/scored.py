"""Everything that an evaluation needs of the inputs of one data set, from one pass over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.apps.report.data import Data, take_apart
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.shortlist import Shortlist
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, NotFittedError, expected
from contrastive_curvature.network.call import naming_the_input
from contrastive_curvature.progress import Progress

__all__ = ["Scored", "score"]

MOST_SAMPLED = 2**28
"""Numbers in the sampled embeddings of one data set: 1 GiB."""


@dataclass(frozen=True)
class Scored:
    """Scores of N inputs, on the CPU.

    Attributes:
        data: Where they came from.
        mu: Directions, shape (N, D).
        labels: Shape (N,); ``None`` where there are none.
        uncertainty: In radians, float64, shape (N,).
        novelty: Float64, shape (N,), or why there is none.
        p_value: Float64, shape (N,), or why there is none.
        samples: Embeddings by S networks, the same ones for all data sets, shape (S, N, D); ``None`` where not wanted.
        shortlists: By name, the inputs to show.
    """

    data: Data
    mu: Tensor
    labels: Tensor | None
    uncertainty: Tensor
    novelty: Tensor | Missing
    p_value: Tensor | Missing
    samples: Tensor | None = None
    shortlists: dict[str, Shortlist] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of inputs."""
        return len(self.mu)


def score(
    la: Any, argument: str, data: Data, *, n_samples: int, n_shown: int, seed: int, progress: Progress, judged: bool
) -> Scored:
    """Run over a data set once.

    Args:
        la: A fitted posterior.
        argument: Name of the data, for error messages.
        data: The data.
        n_samples: Number S of sampled networks; 0 for none.
        n_shown: Size of each shortlist.
        seed: Of the sampled networks: the same seed gives the same networks.
        progress: Of the evaluation.
        judged: Whether novelty and p-values are wanted.

    Raises:
        InputTypeError: A batch or its labels have another type.
        InputError: No input, labels for some batches only, inputs that the encoder does not take, or outputs that are
            not finite.
    """
    parts: dict[str, list[Any]] = {
        name: [] for name in ("mu", "labels", "uncertainty", "novelty", "p_value", "samples")
    }
    lists = {name: Shortlist(n_shown) for name in ("certain", "uncertain", "unusual", "usual")}
    missing: Missing | None = None if judged else Missing("They were not asked for.")
    rows = sampled = 0
    for number, batch in enumerate(progress.over(data.batches, f"[evaluation: {argument}]")):
        x, labels = take_apart(argument, number, batch, getattr(la, "dict_key_y", "labels"))
        with torch.no_grad():
            embedding = _predict(la, argument, number, x)
            mu, uncertainty = embedding.mu.cpu(), embedding.uncertainty.double().cpu()
            if labels is not None and len(labels) != len(mu):
                wanted = f"{len(mu)} labels, one for each input"
                raise InputError(expected(f"{argument}: batch {number} (counted from 0)", wanted, len(labels)))
            if missing is None:
                try:
                    novelty, p_value = embedding.novelty.cpu(), embedding.p_value.cpu()
                except NotFittedError as error:
                    missing = Missing(str(error))
                else:
                    parts["novelty"].append(novelty)
                    parts["p_value"].append(p_value)
                    lists["unusual"].offer(novelty, rows, x)
                    lists["usual"].offer(-novelty, rows, x)
            sampled += n_samples * mu.numel()
            if sampled > MOST_SAMPLED:
                parts["samples"].clear()
            elif n_samples:
                generator = torch.Generator(la._device).manual_seed(seed)
                samples = la.predictive_samples(x, n_samples=n_samples, joint=True, generator=generator)
                parts["samples"].append(samples.cpu())
        for name, value in (("mu", mu), ("labels", labels), ("uncertainty", uncertainty)):
            parts[name].append(value)
        lists["uncertain"].offer(uncertainty, rows, x)
        lists["certain"].offer(-uncertainty, rows, x)
        rows += len(mu)
    if not rows:
        raise InputError(expected(argument, "at least one input", "none"))
    data.check_length(argument, rows)
    with_labels = [labels for labels in parts["labels"] if labels is not None]
    if with_labels and len(with_labels) != len(parts["labels"]):
        raise InputError(expected(argument, "labels in every batch, or in none", "labels in some batches"))
    whole = n_samples and sampled <= MOST_SAMPLED
    return Scored(
        data,
        torch.cat(parts["mu"]),
        torch.cat(with_labels) if with_labels else None,
        torch.cat(parts["uncertainty"]),
        missing or torch.cat(parts["novelty"]),
        missing or torch.cat(parts["p_value"]),
        torch.cat(parts["samples"], 1) if whole else None,
        lists,
    )


def _predict(la: Any, argument: str, number: int, x: Any) -> EmbeddingDistribution:
    """The prediction for a batch; an error of its inputs names the batch."""
    try:
        with naming_the_input(x):
            return la(x)
    except InputError as error:
        msg = f"{argument}: batch {number} (counted from 0): {error}"
        raise InputError(msg) from error
