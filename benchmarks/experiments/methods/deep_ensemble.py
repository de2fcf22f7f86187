"""Deep ensembles (Lakshminarayanan et al. 2017; paper, G.4): encoders that differ in their seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods.base import Method, Prediction, Setting
from benchmarks.experiments.methods.checks import check_choice, check_count, check_fit, fitted
from benchmarks.experiments.methods.deterministic import Deterministic
from benchmarks.experiments.methods.on_base import check_member
from benchmarks.experiments.methods.spread import SphereSpread
from contrastive_curvature.errors import InputError, expected


class DeepEnsemble(Method):
    """Mean direction and spread of the members' embeddings.

    The contrastive loss does not change when all embeddings are rotated together, so every member has a frame of its
    own, and the mean of embeddings in different frames says little. The paper's rows are such means
    (``alignment="none"``), and retrieve worse than a single encoder.

    Args:
        setting: Of each member.
        members: Number of encoders, at least 2; the paper's by default.
        alignment: ``"none"``, or ``"procrustes"``: each member is rotated onto the first one, so that their embeddings
            of the training images lie as close as they can.
        trained: From a seed, a fitted deterministic method with that seed and this setting, which then is not trained
            again; or ``None`` if there is none.

    Raises:
        InputError: An option is unknown or out of range.
    """

    name = "deep_ensemble"
    title = "Deep ensemble"

    def __init__(
        self,
        setting: Setting,
        members: int = 5,
        alignment: str = "none",
        trained: Callable[[int], Deterministic | None] | None = None,
    ) -> None:
        super().__init__(setting)
        self.members = check_count("members", members, 2)
        self.alignment = check_choice("alignment", alignment, ("none", "procrustes"))
        self.trained = trained
        self._members: list[Deterministic] | None = None
        self._rotations: list[Tensor] = []

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; member k has seed ``seed + k``, and its checkpoints in a folder of its own."""
        check_fit(seed, folder)
        check_fit(seed + self.members - 1, folder)
        found = [self._member(data, seed + k, folder / f"seed{seed + k}") for k in range(self.members)]
        self._members = found
        self._rotations = []
        if self.alignment == "procrustes":
            plain = data.plain
            reference = found[0].predict(plain).mean
            self._rotations = [torch.eye(self.setting.dim)]
            self._rotations += [rotation_onto(member.predict(plain).mean, reference) for member in found[1:]]

    def predict(self, split: Split) -> Prediction:
        """Mean direction, ``1 / kappa`` and ``"sum_std"`` of the members."""
        spread = SphereSpread()
        for u in self._embeddings(split):
            spread.add(u)
        return spread.prediction()

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Each member is one sample, and there are no others: at most ``members``, whatever the seed."""
        check_count("n_samples", n_samples)
        return islice(self._embeddings(split), n_samples)

    def _embeddings(self, split: Split) -> Iterator[Tensor]:
        found = fitted(self._members, self.name)
        for k, member in enumerate(found):
            u = member.predict(split).mean
            yield u @ self._rotations[k] if self._rotations else u

    def _member(self, data: RetrievalData, seed: int, folder: Path) -> Deterministic:
        member = None if self.trained is None else self.trained(seed)
        if member is not None:
            check_member(member, self.setting, f"trained({seed})")
            return member
        member = Deterministic(self.setting)
        folder.mkdir(exist_ok=True)
        member.fit(data, seed, folder)
        return member

    def state_dict(self) -> dict[str, Any]:
        """All members, and their rotations."""
        found = fitted(self._members, self.name)
        return {
            "members": [member.state_dict() for member in found],
            "rotations": self._rotations,
            "alignment": self.alignment,
        }

    def load_state_dict(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`Method.load_state_dict`.

        Raises:
            InputError: It was fitted with another number of members or another alignment.
        """
        for name, was, now in (
            ("members", len(state["members"]), self.members),
            ("alignment", state["alignment"], self.alignment),
        ):
            if was != now:
                raise InputError(expected(name, f"{was!r}, as in the fit", now))
        found = [Deterministic(self.setting) for _ in state["members"]]
        for member, one in zip(found, state["members"], strict=True):
            member.load_state_dict(one, data)
        self._members, self._rotations = found, [rotation.cpu() for rotation in state["rotations"]]


def rotation_onto(moving: Tensor, reference: Tensor) -> Tensor:
    """The orthogonal matrix R that brings ``moving @ R`` closest to ``reference`` (Schönemann 1966), by an SVD.

    Args:
        moving: Shape (N, D).
        reference: Of the same points, shape (N, D).

    Returns:
        Shape (D, D), float32; it may reflect.
    """
    rotation, _ = orthogonal_procrustes(moving.double().numpy(), reference.double().numpy())
    return torch.from_numpy(rotation).float()
