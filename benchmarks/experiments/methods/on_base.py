"""What methods that build on a trained encoder have in common: they embed as it does, and keep it in their file."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from benchmarks.experiments.data.split import RetrievalData
from benchmarks.experiments.methods.base import Method, Setting
from benchmarks.experiments.methods.checks import check_fit, fitted
from benchmarks.experiments.methods.deterministic import Deterministic
from contrastive_curvature.errors import InputError, InputTypeError, expected


class OnBase(Method):
    """A score on top of a deterministic encoder, which it leaves as it is.

    Args:
        setting: That of the encoder.
    """

    needs_base = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._base: Deterministic | None = None

    @property
    def base(self) -> Deterministic:
        """The deterministic method.

        Raises:
            InputError: There was no fit.
        """
        return fitted(self._base, self.name)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`.

        Raises:
            InputTypeError: ``base`` is no deterministic method.
            InputError: It is not fitted, or has another network than the setting's.
        """
        check_fit(seed, folder)
        if not isinstance(base, Deterministic):
            hint = "Fit one with the same seed first."
            raise InputTypeError(expected("base", "a fitted Deterministic", f"a {type(base).__name__}", hint))
        check_member(base, self.setting, "base")
        self.check_data(data)
        self._base = base
        self.fit_on_base(data, seed, folder)

    def check_data(self, data: RetrievalData) -> None:
        """Refuse data that the score cannot be fitted on."""

    @abstractmethod
    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Fit what the score needs beyond the encoder."""

    def own_state(self) -> dict[str, Any]:
        """What :meth:`fit_on_base` fitted."""
        return {}

    @abstractmethod
    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """Take over what :meth:`own_state` gave; :attr:`base` is there already."""

    def state_dict(self) -> dict[str, Any]:
        """Encoder and score."""
        return {"base": self.base.state_dict(), "own": self.own_state()}

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`."""
        base = Deterministic(self.setting)
        base.load_state_dict(state["base"], data)
        self._base = base
        self.load_own_state(state["own"], data)


def check_member(method: Deterministic, setting: Setting, name: str) -> None:
    """Whether an encoder that was trained before is the one that a setting describes.

    Raises:
        InputError: It is not fitted, or has another network or latent dimension.
    """
    fitted(method._encoder, name)
    wanted, came = ((s.network, s.dim) for s in (setting, method.setting))
    if wanted != came:
        raise InputError(expected(name, f"network and dimension {wanted}", f"{came}"))
