"""An encoder trained with the triplet loss, without uncertainty: what the Bayesian triplet loss is compared with."""

from __future__ import annotations

from pathlib import Path

from benchmarks.experiments.data.split import RetrievalData
from benchmarks.experiments.methods.base import Method, Setting
from benchmarks.experiments.methods.checks import check_classes, check_count, check_fit, check_positive
from benchmarks.experiments.methods.deterministic import Deterministic
from benchmarks.experiments.methods.training import train
from benchmarks.experiments.methods.triplet_options import MINED
from benchmarks.experiments.methods.triplet_steps import TripletStep

__all__ = ["TripletDeterministic"]


class TripletDeterministic(Deterministic):
    """Unit embeddings, trained with ``max(0, |a - p|^2 - |a - n|^2 + margin)``, averaged where it is above 0.

    Args:
        setting: How the encoder is made and trained; its margin is that of pairs, and not used.
        margin: On differences of squared distances, in (0, 4]: those of unit vectors are at most 4.
        negatives: Of the negatives that violate the margin, so many are drawn for each ordered positive pair of a batch
            at most; ``None`` for all.

    Raises:
        InputError: An option is out of range.
    """

    name = "triplet"
    title = "Triplet loss"

    def __init__(self, setting: Setting, margin: float = MINED, negatives: int | None = 8) -> None:
        super().__init__(setting)
        self.margin = check_positive("margin", margin, 4)
        self.negatives = None if negatives is None else check_count("negatives", negatives)

    def fit(self, data: RetrievalData, seed: int, folder: Path, base: Method | None = None) -> None:
        """See :meth:`Method.fit`; without ``base``.

        Raises:
            InputError: There is one class, or no class with two images.
        """
        check_fit(seed, folder)
        check_classes(self.setting, data.train, positives=True)
        step = train(
            self.setting,
            data,
            seed,
            folder / "training.pt",
            make_step=lambda encoder, _: TripletStep(encoder, self.margin, self.negatives, self.setting.relation),
        )
        self._take(step.get_submodule("encoder"))
