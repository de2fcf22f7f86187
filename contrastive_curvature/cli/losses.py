"""``--loss``: the losses that a name and numbers describe."""

from __future__ import annotations

import inspect
from typing import Any

import contrastive_curvature as cc
from contrastive_curvature.cli.errors import BadInputError
from contrastive_curvature.errors import expected

__all__ = ["LOSSES", "make_loss"]

LOSSES: dict[str, type[Any]] = {
    "contrastive": cc.ContrastiveLoss,
    "logistic": cc.LogisticLoss,
    "soft-contrastive": cc.SoftContrastiveLoss,
    "infonce": cc.InfoNCELoss,
    "supcon": cc.SupConLoss,
    "siglip": cc.SigLIPLoss,
    "multi-similarity": cc.MultiSimilarityLoss,
    "triplet": cc.TripletLoss,
}
"""Names of losses that need labels only. Those of class proxies and of graded pairs need more than a source has."""


def make_loss(name: str, options: dict[str, Any]) -> Any:
    """The loss of a name.

    Args:
        name: Key of :data:`LOSSES`.
        options: Arguments by name.

    Raises:
        BadInputError: The loss has no such argument.
        InputError: A value is out of range.
    """
    kind = LOSSES[name]
    known = list(inspect.signature(kind.__init__).parameters)[1:]
    strange = [option for option in options if option not in known]
    if strange:
        raise BadInputError(expected(f"--loss {name}", f"options among {', '.join(known)}", strange[0]))
    return kind(**options)
