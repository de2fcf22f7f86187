"""What a backend checks before it computes: its own options."""

from __future__ import annotations

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.losses.base import PairLoss
from contrastive_curvature.losses.cosine import CosineLoss

__all__ = ["check_backend_options", "check_candidates", "check_negative_samples", "points_together"]


def check_backend_options(pairs: object, relation: object, rank: object) -> None:
    """Check what the curvature itself does not know of.

    Raises:
        InputError: A value is out of range.
        InputTypeError: A value has the wrong type.
    """
    if not isinstance(pairs, str) or pairs not in ("dataset", "batch"):
        hint = "Class labels come from the loader; for another relation pass relation=callable."
        raise InputError(expected("pairs", "'dataset' or 'batch'", pairs, hint))
    if relation is not None and not callable(relation):
        wanted = "a callable (targets_a, targets_b) -> (positives, negatives)"
        raise InputTypeError(expected("relation", wanted, f"a {type(relation).__name__}"))
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise InputError(expected("rank", "a positive whole number", rank))


def check_candidates(
    loss: CosineLoss,
    pairs: str,
    candidates: str | None,
    negatives_per_anchor: int | None,
    positives: str | None,
    relation: object = None,
) -> None:
    """Check the options of data sets against the loss: of pairs, or of anchors and their candidates.

    Raises:
        InputError: A value is unknown, or belongs to the other kind of loss.
        UnsupportedError: The loss has no such version for a data set.
    """
    name = type(loss).__name__
    if isinstance(loss, PairLoss):
        for option, value in (
            ("candidates", candidates),
            ("negatives_per_anchor", negatives_per_anchor),
            ("positives", positives),
        ):
            if value is not None:
                hint = f"{name} is a sum over pairs. Use pairs='dataset' or 'batch', or leave it out."
                raise InputError(expected(option, "nothing with a loss of pairs", value, hint))
        return
    if pairs != "dataset":
        hint = f"{name} compares an anchor with candidates: use candidates='batch' or 'dataset', or leave it out."
        raise InputError(expected("pairs", "nothing with a loss of anchors", pairs, hint))
    if relation is not None and (loss.graded or loss.needs_labels or positives == "views"):
        reason = "with positives='views'" if positives == "views" else f"with {name}, which has no relation of points"
        raise InputError(expected("relation", f"nothing {reason}", "a callable", "Leave one of them out."))
    if loss.graded and positives is not None:
        raise InputError(expected("positives", f"nothing with {name}, whose pairs have grades", positives))
    if candidates is not None:
        validate.choice("candidates", candidates, ("batch", "dataset"))
    if positives is not None:
        validate.choice("positives", positives, ("labels", "views"))
    if negatives_per_anchor is not None:
        validate.count("negatives_per_anchor", negatives_per_anchor)
        if candidates != "dataset":
            hint = "In a batch an anchor has the negatives of the batch. Use candidates='dataset', or leave it out."
            raise InputError(
                expected("negatives_per_anchor", "nothing with candidates='batch'", negatives_per_anchor, hint)
            )
    if candidates == "dataset":
        loss.check_dataset(negatives_per_anchor)


def check_negative_samples(
    loss: CosineLoss,
    given: object,
    pairs: str,
    candidates: str | None,
    relation: object = None,
) -> None:
    """Check the number of points that stand for all negatives.

    Args:
        loss: The loss.
        given: The number.
        pairs: See the backend.
        candidates: See the backend.
        relation: See the backend.

    Raises:
        InputError: It is no such number, or there are no negatives of all the data.
        UnsupportedError: The loss and its fix have no version with a sample.
    """
    if given is None or (isinstance(given, str) and given == "auto"):
        return
    if isinstance(given, bool) or not isinstance(given, int) or given < 2:
        raise InputError(expected("negative_samples", "None, 'auto' or a whole number from 2 on", given))
    together = points_together(loss, pairs, candidates)
    if together != "dataset":
        option = "pairs" if isinstance(loss, PairLoss) else "candidates"
        hint = f"A batch has few negatives. Use {option}='dataset', or leave it out."
        raise InputError(expected("negative_samples", f"nothing with {option}='batch'", given, hint))
    if relation is not None:
        hint = "Which points are positives shows only when all pairs are looked at. Use class labels, or leave it out."
        raise InputError(expected("negative_samples", "nothing with relation", given, hint))


def points_together(loss: CosineLoss, pairs: str, candidates: str | None) -> str:
    """Whether points that are compared are in memory together: ``"batch"``, or not: ``"dataset"``."""
    return pairs if isinstance(loss, PairLoss) else candidates or "batch"
