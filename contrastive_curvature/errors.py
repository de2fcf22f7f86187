"""The exceptions of the library, and the one form of their messages.

Every message names the argument, what was expected, what was received and, where it helps, what to do instead.
"""

from __future__ import annotations


class ContrastiveCurvatureError(Exception):
    """Base class of all exceptions of this library.

    The message is ``"<argument>: expected <wanted>, got <got>. <hint>"``.

    Args:
        argument: Name of the argument; or alone, the whole message.
        wanted: What was expected.
        got: What was received: shown as it is if it is a string, anything else with ``repr``.
        hint: What to do instead, as a sentence.
    """

    def __init__(self, argument: str, wanted: str | None = None, got: object = None, hint: str = "") -> None:
        shown = got if isinstance(got, str) else repr(got)
        message = f"{argument}: expected {wanted}, got {shown}.{' ' + hint if hint else ''}"
        super().__init__(argument if wanted is None else message)


class InputError(ContrastiveCurvatureError, ValueError):
    """An argument has a wrong value or shape."""


class InputTypeError(InputError, TypeError):
    """An argument has a wrong type."""


class UnsupportedError(ContrastiveCurvatureError, ValueError, NotImplementedError):
    """The request is valid, but this combination of options has no correct answer to it."""


class NotFittedError(ContrastiveCurvatureError, AttributeError, ValueError):
    """A posterior was used before ``fit``. It is an ``AttributeError`` too, which laplace-torch raises here."""


class ProcessError(ContrastiveCurvatureError, RuntimeError):
    """Another process of one fit has failed or gone, so that this one cannot go on."""


class DivergenceError(ContrastiveCurvatureError, ArithmeticError):
    """Training has diverged: a loss, an output or a curvature is NaN or infinite, or a precision is not positive.

    Args:
        reason: What is not finite or not positive, and what to do about it, as a sentence.
        step: Number of the training step, counted from one.
    """

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(f"training step {step}: {reason}")
        self.reason, self.step = reason, step

    def __reduce__(self) -> tuple[type[DivergenceError], tuple[str, int]]:
        return type(self), (self.reason, self.step)


def to_install(extra: str) -> str:
    """Say what to type for the packages of an extra of this library, whose own name no package index has."""
    return f"In a copy of the repository: pip install '.[{extra}]'."
