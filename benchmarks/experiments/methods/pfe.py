"""Probabilistic face embeddings (Shi and Jain 2019; paper, G.4): a head learns how far embeddings scatter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.experiments.data.split import RetrievalData, Split
from benchmarks.experiments.methods import embed
from benchmarks.experiments.methods.base import Prediction, Setting
from benchmarks.experiments.methods.checks import check_count, check_positive, check_training, fitted
from benchmarks.experiments.methods.on_base import OnBase
from benchmarks.experiments.methods.pfe_head import MutualLikelihoodStep, VarianceHead
from benchmarks.experiments.methods.training import run_training, seed_everything, training_loader


class PFE(OnBase):
    """Gaussian embeddings: the frozen encoder's mean, and variances by a head on the features before its last layer.

    Args:
        setting: Its batches are the head's too.
        epochs: Passes over the training images for the head; ``None`` for the setting's.
        lr: Learning rate of the first epoch.
        augment: Whether the head sees augmented images where training has them. Without, the features of an image are
            always the same, and are computed once if they fit in memory.

    Raises:
        InputError: An option is out of range.
    """

    name = "pfe"
    title = "PFE"

    def __init__(self, setting: Setting, epochs: int | None = None, lr: float = 1e-3, augment: bool = False) -> None:
        super().__init__(setting)
        self.epochs = check_count("epochs", setting.epochs if epochs is None else epochs)
        self.lr, self.augment = check_positive("lr", lr), augment
        self._head: VarianceHead | None = None

    def check_data(self, data: RetrievalData) -> None:
        """See :meth:`OnBase.check_data`."""
        check_training(self.setting, data.train)

    def fit_on_base(self, data: RetrievalData, seed: int, folder: Path) -> None:
        """Train the head."""
        seed_everything(seed)
        self._head = self._make_head()
        augmented = self.augment and data.train_plain is not None
        train = data.train if augmented else data.plain
        width = self._head.features + self.setting.dim
        rows: Split | _Rows = train
        encode: Callable[[Tensor], tuple[Tensor, Tensor]] = self._encode
        if not augmented and len(train) * width * 4 <= embed.CACHE_BYTES:
            z, phi = self.base.features(train)
            rows, encode = _Rows(torch.cat([embed.unit(z), phi], 1), train.targets), self._parts
        step = MutualLikelihoodStep(self._head, encode, self.setting.relation)
        batches = training_loader(self.setting, rows, seed)
        run_training(self.setting, step, batches, self.epochs, self.lr, folder / "head.pt")
        self._head.eval()

    def predict(self, split: Split) -> Prediction:
        """The encoder's unit embeddings; the variance, averaged over dimensions.

        Returns:
            Variants: ``"sum_std"``, the sum of the standard deviations (the code released with the paper), and
            ``"harmonic"``, the harmonic mean of the variances (Shi and Jain 2019, section 4.2).
        """
        u, variance = self._gaussians(split)
        variants = {"sum_std": variance.sqrt().sum(1), "harmonic": 1 / (1 / variance).mean(1)}
        return Prediction(u, variance.mean(1), variants)

    def samples(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        """Draws from each image's own Gaussian, put on the sphere."""
        check_count("n_samples", n_samples)
        fitted(self._head, self.name)
        return self._draw(split, n_samples, seed)

    def _draw(self, split: Split, n_samples: int, seed: int) -> Iterator[Tensor]:
        u, variance = self._gaussians(split)
        std = variance.sqrt()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_samples):
            yield embed.unit(u + std * torch.randn(u.shape, generator=generator))

    def own_state(self) -> dict[str, Any]:
        """The head."""
        return dict(fitted(self._head, self.name).state_dict())

    def load_own_state(self, state: dict[str, Any], data: RetrievalData) -> None:
        """See :meth:`OnBase.load_own_state`."""
        head = self._make_head()
        head.load_state_dict(state)
        self._head = head.eval()

    def _make_head(self) -> VarianceHead:
        """A new head on the device."""
        layer: Any = self.base.encoder.get_submodule("head")
        return VarianceHead(layer.in_features, self.setting.dim).to(self.setting.device)

    def _gaussians(self, split: Split) -> tuple[Tensor, Tensor]:
        """Unit means and variances, each (N, D)."""
        head = fitted(self._head, self.name)

        def encode(x: Tensor) -> Tensor:
            u, phi = self._encode(x)
            return torch.cat([u, head(phi)], 1)

        both = embed.map_batches(encode, split, self.setting, "PFE")
        return both[:, : self.setting.dim], both[:, self.setting.dim :]

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unit means and features of images."""
        z, phi = self.base.encode_features(x)
        return embed.unit(z), phi

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The same of rows that hold both."""
        return row[:, : self.setting.dim], row[:, self.setting.dim :]


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """What the frozen encoder gave for each image, (N, D + F), with the images' targets."""

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, wanted: list[int]) -> tuple[Tensor, Tensor]:
        return self.rows[wanted], self.targets[wanted]
