"""What the library raises, and how a message is built.

Every message names the argument, what came, what was expected and, where there is one, what to do instead.
"""

from __future__ import annotations

__all__ = [
    "ContrastiveCurvatureError",
    "DivergenceError",
    "InputError",
    "InputTypeError",
    "NotFittedError",
    "UnsupportedError",
    "expected",
]


class ContrastiveCurvatureError(Exception):
    """Base class of everything that this library raises on purpose."""


class InputError(ContrastiveCurvatureError, ValueError):
    """An argument has a wrong value or shape."""


class InputTypeError(InputError, TypeError):
    """An argument has a wrong type."""


class UnsupportedError(ContrastiveCurvatureError, ValueError, NotImplementedError):
    """A valid request that this combination of options cannot answer correctly, and therefore refuses."""


class NotFittedError(ContrastiveCurvatureError, AttributeError, ValueError):
    """Something was asked of a posterior that only ``fit`` gives; ``AttributeError`` is what laplace-torch raises."""


class DivergenceError(ContrastiveCurvatureError, ArithmeticError):
    """Training has left the finite numbers.

    Args:
        reason: What is no number any more, and what to do, as a sentence.
        step: Number of the training step, counted from one.
    """

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(f"training step {step}: {reason}")
        self.reason, self.step = reason, step


def expected(argument: str, wanted: str, came: object, instead: str = "") -> str:
    """Build an error message of the library's one form.

    Args:
        argument: Name of the argument as the caller typed it.
        wanted: What is allowed.
        came: What was given; shown with ``repr``, or as it is when it is a string.
        instead: What to do about it, a sentence; may be empty.

    Returns:
        ``"<argument>: expected <wanted>, got <came>. <instead>"``.
    """
    shown = came if isinstance(came, str) else repr(came)
    return f"{argument}: expected {wanted}, got {shown}.{' ' + instead if instead else ''}"
