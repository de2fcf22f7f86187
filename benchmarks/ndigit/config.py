"""Options of a run, and the data that they ask for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.experiments.config import check_device
from benchmarks.experiments.data.fashionmnist import load_mnist
from benchmarks.experiments.data.ndigit import NDigitData, compose_ndigit
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import RetrievalData, Split, TensorSplit
from benchmarks.experiments.methods.base import Setting
from benchmarks.ndigit.rows import rows_of
from contrastive_curvature.errors import InputError, expected

__all__ = ["EPOCHS", "Config", "check_config", "read_data", "retrieval_data", "setting_of"]

EPOCHS = 40
"""Parts of a training. After each, the learning rate is multiplied by exp(-0.1), so it ends at 2 % of the first."""
_HELD_OUT = 10_000
"""Digits of MNIST's training part, its last ones, that stand in for the test digits with ``--validate``."""
_FREE = ("data_root", "out", "seeds", "methods", "threads", "progress")
"""Options that may differ when a run is gone on with."""


@dataclass(frozen=True)
class Config:
    """What was asked for; see ``--help``."""

    data_root: Path
    out: Path
    n: int
    dim: int
    network: Literal["hidden", "document"]
    iterations: int
    batch_size: int
    lr: float
    kl_weight: float
    precision: Literal["float32", "bfloat16"]
    train_size: int
    test_size: int
    pairs: int
    validate: bool
    seeds: tuple[int, ...]
    methods: tuple[str, ...] | None
    device: str
    threads: int | None
    progress: bool

    def identity(self) -> dict[str, Any]:
        """What a run folder must agree on to be gone on with, as JSON has it."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if name not in _FREE}
        # A run of before there was a choice is one on the CPU.
        return {name: value for name, value in given.items() if (name, value) != ("device", "cpu")}


def check_config(config: Config) -> None:
    """Refuse now what would fail later.

    Raises:
        InputError: A value is out of range, or a row is unknown.
    """
    for name, value, least in (("--dim", config.dim, 2), ("--threads", config.threads, 1)):
        if value is not None and value < least:
            raise InputError(expected(name, f"a whole number, at least {least}", value))
    if config.iterations < EPOCHS or config.iterations % EPOCHS:
        raise InputError(expected("--iterations", f"a multiple of {EPOCHS}, at least {EPOCHS}", config.iterations))
    if config.batch_size < 4 or config.batch_size % 4:
        raise InputError(expected("--batch-size", "a multiple of 4: half of the pairs match", config.batch_size))
    if config.pairs < 40 or config.pairs % 2:
        raise InputError(expected("--pairs", "an even number, at least 40: two for each bin", config.pairs))
    # Written so that NaN fails too.
    if not 0 < config.lr < math.inf:
        raise InputError(expected("--lr", "a positive number", config.lr))
    if not 0 <= config.kl_weight < math.inf:
        raise InputError(expected("--kl-weight", "a number, at least 0", config.kl_weight))
    seeds = config.seeds
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**32:
        raise InputError(expected("--seeds", "different whole numbers in [0, 2^32)", " ".join(map(str, seeds))))
    rows_of(config.methods)
    check_device(config.device)


def read_data(config: Config) -> NDigitData:
    """Put the images together.

    Raises:
        InputError: MNIST's files are missing, or a size is too small for the number of classes.
    """
    mnist = load_mnist(config.data_root, LoadOptions())
    train, test = mnist.train, mnist.test
    if config.validate:
        kept, held = torch.arange(len(train)).tensor_split([len(train) - _HELD_OUT])
        train, test = train.take(kept), train.take(held)
    size = config.test_size
    return compose_ndigit(train, test, config.n, train_size=config.train_size, seen_size=size, novel_size=size)


def retrieval_data(data: NDigitData, n: int) -> RetrievalData:
    """What methods are trained on, as pixels: putting digits together takes as long as a training step."""
    rows = torch.arange(len(data.train)).split(5_000)
    pixels = torch.cat([data.train.pixels(part.tolist()) for part in rows])
    train: Split = TensorSplit(pixels, data.train.targets)
    return RetrievalData(f"ndigit{n}", f"{n}-digit MNIST", "novel classes", train, data.seen_clean, data.novel_clean)


def setting_of(config: Config) -> Setting:
    """How encoders are made and trained."""
    return Setting(
        network=f"ndigit{config.n}" + ("_hidden" if config.network == "hidden" else ""),
        dim=config.dim,
        epochs=EPOCHS,
        batch_size=config.batch_size,
        lr=config.lr,
        margin=None,
        n_samples=0,
        precision=config.precision,
        device=config.device,
        progress=config.progress,
        checkpoint_every=500,
    )
