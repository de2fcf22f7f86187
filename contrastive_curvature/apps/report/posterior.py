"""What a posterior is, in words and numbers."""

from __future__ import annotations

from typing import Any

from contrastive_curvature.apps.report.known import known_inputs

__all__ = ["describe"]


def describe(la: Any) -> dict[str, str | int | float | bool | None]:
    """The parts of a fitted posterior that a reader needs to judge an evaluation.

    Args:
        la: A fitted posterior.

    Returns:
        Plain values by name: class, structure, numbers of weights and of training points, prior, temperature, options.
    """
    precision = la.prior_precision.detach().flatten().double().cpu()
    n_compared, calibrated = known_inputs(la)
    out: dict[str, str | int | float | bool | None] = {
        "class": type(la).__name__,
        "structure": str(getattr(la.structure, "value", la.structure)),
        "embedding dimension": int(la.n_outputs),
        "weights with a posterior": int(la.mean.numel()),
        "training points": int(la.n_data),
        "prior precision": float(precision[0]) if len(precision) == 1 else f"{len(precision)} values",
        "temperature": float(la.temperature),
        "compared with for p-values": None if n_compared is None else int(n_compared),
        "calibrated": calibrated,
    }
    error = la.curvature_error
    if error is not None:
        out["relative standard error of the curvature"] = float(error)
    return out | {f"option: {name}": _plain(value) for name, value in la.plain_options().items()}


def _plain(value: Any) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
