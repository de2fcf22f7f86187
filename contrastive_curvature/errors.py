"""The exceptions of the library, and the one form of their messages.

Every message names the argument, the expected value, the received value and, if it helps, what to do instead.
"""

from __future__ import annotations


class ContrastiveCurvatureError(Exception):
    """Base class of all exceptions of this library.

    The message is ``"<argument>: expected <wanted>, got <got>. <hint>"``.

    Args:
        argument: Name of the argument; without other arguments, the whole message.
        wanted: The expected value.
        got: The received value; a string is shown unchanged, any other object with ``repr``.
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
    """The request is valid, but there is no correct result for this combination of options."""


class NotFittedError(ContrastiveCurvatureError, AttributeError, ValueError):
    """A posterior was used before ``fit``. It is also an ``AttributeError``, like laplace-torch's error."""


class ProcessError(ContrastiveCurvatureError, RuntimeError):
    """The processes of a Ray job that compute one part of the data have died too often."""


class DivergenceError(ContrastiveCurvatureError, ArithmeticError):
    """Training has diverged: a loss, an output or a curvature is NaN or infinite, or a precision is not positive.

    Args:
        reason: Sentence that says which number is not finite or not positive, and what to do about it.
        step: Number of the training step, counted from one.
    """

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(f"training step {step}: {reason}")
        self.reason, self.step = reason, step

    def __reduce__(self) -> tuple[type[DivergenceError], tuple[str, int]]:
        return type(self), (self.reason, self.step)


def to_install(extra: str) -> str:
    """Return the install command for an extra of this library, which is not on any package index."""
    return f"In a copy of the repository: pip install '.[{extra}]'."
