"""What one run of the demo is asked to do, checked before anything is computed."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.options import CurvatureOptions, Distance, PDFix

__all__ = ["DATASETS", "DatasetDefaults", "DemoConfig", "check_config", "check_plotting"]

NEIGHBORS = 10
"""Neighbours of mAP@10 and of the nearest-neighbour baselines; no data set may be smaller."""


@dataclass(frozen=True)
class DatasetDefaults:
    """What is right for one data set when the user says nothing.

    Args:
        epochs: Passes over the training images.
        batch_size: Images a training step, all of whose pairs count.
        train_available: Training images.
        test_available: Test images in distribution.
    """

    epochs: int
    batch_size: int
    train_available: int
    test_available: int


DATASETS = {
    "digits": DatasetDefaults(epochs=15, batch_size=64, train_available=1197, test_available=600),
    # Three passes over all 60,000 images reach mAP@1 of about 0.82, the paper's twenty with its pair sampling 0.78.
    "fashionmnist": DatasetDefaults(epochs=3, batch_size=64, train_available=60_000, test_available=10_000),
}


@dataclass(frozen=True)
class DemoConfig:
    """One run of the demo.

    Args:
        dataset: ``"digits"`` or ``"fashionmnist"``.
        data_root: Folder that holds ``FashionMNIST/raw`` and ``MNIST/raw``.
        dim: Latent dimension D.
        seeds: One training, fit and evaluation each.
        epochs: Passes over the training images.
        train_size: Training images, ``None`` for all.
        test_size: Test images of each set, ``None`` for all.
        batch_size: Images a training step.
        lr: Learning rate of RMSprop at the first epoch.
        margin: Of the loss, in training and in the curvature; ``None`` lets every negative count.
        distance: Of the curvature; ``None`` for the library's default, as for the two that follow.
        pd_fix: Of the curvature.
        negative_weight: Of the curvature (Eq. 10). Training always balances attraction and repulsion.
        n_samples: Sampled networks, for the ECE and the sampled uncertainty.
        baseline_features: Training images that the nearest-neighbour baseline in feature space searches.
        device: Where torch computes.
        out: Run folder, or ``None`` for a new one under ``runs/``.
    """

    dataset: str = "digits"
    data_root: Path = Path("data")
    dim: int = 3
    seeds: tuple[int, ...] = (0,)
    epochs: int = DATASETS["digits"].epochs
    train_size: int | None = None
    test_size: int | None = None
    batch_size: int = DATASETS["digits"].batch_size
    lr: float = 1e-3
    margin: float | None = 0.7
    distance: str | None = None
    pd_fix: str | None = None
    negative_weight: float | None = None
    n_samples: int = 100
    baseline_features: int = 10_000
    device: str = "cpu"
    out: Path | None = None

    @property
    def curvature(self) -> dict[str, object]:
        """What goes into ``backend_kwargs``: the options that were given, the library's defaults for the others."""
        given = {"distance": self.distance, "pd_fix": self.pd_fix, "negative_weight": self.negative_weight}
        return {"margin": self.margin} | {name: value for name, value in given.items() if value is not None}


def check_config(config: DemoConfig) -> None:
    """Refuse now what would fail after the training.

    Args:
        config: What was asked for.

    Raises:
        InputError: A value is unknown or out of range, or the device is not there.
        UnsupportedError: The curvature of these options is zero everywhere.
    """
    if config.dataset not in DATASETS:
        raise InputError(expected("--dataset", f"one of {sorted(DATASETS)}", config.dataset))
    available = DATASETS[config.dataset]
    _at_least("--dim", config.dim, 2)
    _at_least("--epochs", config.epochs, 1)
    _at_least("--batch-size", config.batch_size, 2)
    _at_least("--n-samples", config.n_samples, 2)
    _at_least("--baseline-features", config.baseline_features, NEIGHBORS)
    # Fewer would leave some class without the pairs that the loss and the ranking are made of.
    _at_least("--train-size", config.train_size, 100, available.train_available)
    _at_least("--test-size", config.test_size, 100, available.test_available)
    if not config.seeds or len(set(config.seeds)) != len(config.seeds) or not all(0 <= s < 2**32 for s in config.seeds):
        raise InputError(expected("--seeds", "different whole numbers in [0, 2^32)", str(list(config.seeds))))
    if not (math.isfinite(config.lr) and config.lr > 0):
        raise InputError(expected("--lr", "a positive number", config.lr))
    _check_curvature(config)
    _check_device(config.device)


def check_plotting() -> None:
    """Refuse to start without matplotlib, rather than to fail when everything is computed.

    Raises:
        UnsupportedError: It is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        msg = 'The demo draws plots with matplotlib, which is not installed: pip install "contrastive-curvature[demo]"'
        raise UnsupportedError(msg)


def _at_least(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is None or (value >= least and (most is None or value <= most)):
        return
    raise InputError(expected(name, f"at least {least}" + ("" if most is None else f" and at most {most}"), value))


def _check_curvature(config: DemoConfig) -> None:
    options = CurvatureOptions(**config.curvature)  # type: ignore[arg-type]
    weight = options.negative_weight
    if weight == 1:
        hint = "1 leaves out the attraction, the only part of the curvature that is positive."
        raise InputError(expected("--negative-weight", "a number in [0, 1)", weight, hint))
    everything = options.margin is None and options.pd_fix is not PDFix.POSITIVE
    if everything and options.distance is Distance.EUCLIDEAN and weight >= 0.5:
        # Every point's attraction 1 - w_n and repulsion w_n then cancel, or worse.
        msg = (
            "--margin none with --distance euclidean has zero curvature from --negative-weight 0.5 upwards: the "
            "repulsion of all negatives outweighs the attraction. Use a margin, --pd-fix positive, or a smaller weight."
        )
        raise UnsupportedError(msg)


def _check_device(name: str) -> None:
    wanted = "a device of this machine, as 'cpu' or 'cuda'"
    try:
        torch.empty(1, device=torch.device(name)).add(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(expected("--device", wanted, name, f"torch says: {reason}")) from None
