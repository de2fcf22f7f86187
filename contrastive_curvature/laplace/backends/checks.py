"""What a backend checks before it computes: its own options."""

from __future__ import annotations

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_backend_options"]


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
