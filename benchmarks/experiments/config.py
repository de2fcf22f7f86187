"""What one run is asked to do, and the checks before anything is computed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.data import RetrievalData, load_data
from benchmarks.experiments.data.ood import check_ood
from benchmarks.experiments.defaults import TABLE_DATA
from benchmarks.experiments.methods import Setting
from benchmarks.experiments.methods.scores import NEIGHBORS
from benchmarks.experiments.methods.training import check_training
from benchmarks.experiments.networks import NETWORKS
from benchmarks.experiments.plan import DEMO, MEMBERS, Table
from contrastive_curvature import output_hessian
from contrastive_curvature.errors import InputError, UnsupportedError

_LEAST = {"dim": 2, "epochs": 1, "batch_size": 2, "per_class": 2, "train_size": 20, "test_size": 20, "n_samples": 2}
_LEAST |= {"ece_samples": 2, "dropout_passes": 2, "baseline_features": NEIGHBORS, "workers": 0, "threads": 1}
_HELD_OUT = 5
"""One in so many training images is held out for the demonstration's threshold."""
_MOST_HELD_OUT = 2_000

# Not part of what a run folder must agree on: they change no figure, threads no more than its last digits. Workers are
# part of it, since random augmentations draw other numbers in them.
_FREE = ("data_root", "download", "out", "seeds", "methods", "threads", "progress")
_OWN = ("relation", "own_order", "eval_batch")
"""Of the setting, without an option: they follow from table and data, or change no figure."""


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """One run: how encoders are made and trained, and what is done with them.

    Args:
        table: Which one.
        data: Name of the data set.
        ood: What stands for the unknown; ``None`` for the data set's own.
        train_size: Training images, ``None`` for all; so ``test_size``, in and out of distribution each.
        test_size: See ``train_size``.
        image_size: Side in pixels, ``None`` for the data set's own.
        ece_samples: Sampled networks or embeddings that vote.
        data_root: Folder of the data sets.
        download: Whether missing files may be fetched.
        out: Run folder.
        seeds: One run of every row each.
        methods: Rows, ``None`` for the default ones.
        threads: Of torch, ``None`` for its own choice.
    """

    table: Table
    data: str
    ood: str | None
    train_size: int | None
    test_size: int | None
    image_size: int | None
    ece_samples: int
    data_root: Path
    download: bool
    out: Path
    seeds: tuple[int, ...]
    methods: tuple[str, ...] | None
    threads: int | None

    def identity(self) -> dict[str, Any]:
        """What a run folder must agree on to be resumed, as JSON has it."""
        given = {k: v for k, v in dataclasses.asdict(self).items() if k not in (*_FREE, *_OWN)}
        # A run of before there was a choice is one in float32.
        return {k: v for k, v in given.items() if (k, v) != ("precision", "float32")}


def check_config(config: Config) -> None:
    """Refuse now what would fail later.

    Args:
        config: What was asked for.

    Raises:
        InputError: A value is unknown or out of range, or the device is not there.
        UnsupportedError: The curvature of these options is zero everywhere.
    """
    known = TABLE_DATA[config.table]
    if config.data not in known:
        raise InputError("--data", f"for table {config.table} one of {', '.join(known)}", config.data)
    check_ood(config.data, config.ood)
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')}", f"a whole number, at least {least}", value)
    # Written so that NaN fails too.
    if not 0 < config.lr < math.inf:
        raise InputError("--lr", "a positive number", config.lr)
    if not 0 <= config.memory_factor < 1:
        raise InputError("--memory-factor", "a number in [0, 1)", config.memory_factor)
    if config.margin is not None and not 0 < config.margin <= 2:
        raise InputError("--margin", "a distance of unit vectors, above 0 and up to 2", config.margin)
    _check_curvature(config)
    most = 2**32 - MEMBERS
    if len(set(config.seeds)) < len(config.seeds) or not all(0 <= seed < most for seed in config.seeds):
        raise InputError("--seeds", f"different whole numbers in [0, {most})", " ".join(map(str, config.seeds)))
    try:
        torch.empty(1, device=torch.device(config.device)).add(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = f"torch says: {str(error).splitlines()[0]}"
        raise InputError("--device", "a device of this machine, as cpu or cuda", config.device, reason) from None


def read_data(config: Config) -> RetrievalData:
    """Load the data sets, and hold them against the configuration.

    Args:
        config: Checked.

    Returns:
        The data.

    Raises:
        InputError: Files are missing, a size is larger than what there is, or the network takes other images.
        UnsupportedError: The data set does not follow an option.
    """
    data = load_data(
        config.data,
        config.data_root,
        ood=config.ood,
        train_size=config.train_size,
        test_size=config.test_size,
        download=config.download,
        image_size=config.image_size,
    )
    if config.table == DEMO:
        data = hold_out(data)
    check_data(config, data)
    return data


def hold_out(data: RetrievalData) -> RetrievalData:
    """Take a part of the training images, the same in every run, to calibrate with; the demonstration does so.

    Args:
        data: Without such a part.

    Returns:
        The data with a fifth of its training images held out, at most 2,000.
    """
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(2))
    held = min(_MOST_HELD_OUT, len(order) // _HELD_OUT)
    kept, taken = order[held:].sort().values, order[:held]
    return dataclasses.replace(
        data,
        train=data.train.take(kept),
        train_plain=None if data.train_plain is None else data.train_plain.take(kept),
        calibration=data.plain.take(taken),
    )


def check_data(config: Config, data: RetrievalData) -> None:
    """Refuse data that the network or the training cannot take.

    Args:
        config: Network and batches.
        data: What was loaded.

    Raises:
        InputError: The network takes other images, or the batches do not suit the classes.
    """
    wanted, shape = NETWORKS[config.network], tuple(data.test.images([0]).shape[1:])
    any_size = config.network.startswith("resnet")
    if not (shape[0] == wanted[0] and min(shape[1:]) >= 32 if any_size else shape == wanted):
        hint = "Choose another --network or --image-size."
        raise InputError(f"--network {config.network}", f"images {wanted}", f"{shape}", hint)
    for name, split in (("test images", data.test), ("gallery images", data.gallery)):
        if split is not None and len(split) <= NEIGHBORS:
            raise InputError(name, f"more than {NEIGHBORS}", len(split))
    check_training(settings(config, data), data.train)


def settings(config: Config, data: RetrievalData) -> Setting:
    """How all methods of the run are trained."""
    given = {name: value for name, value in vars(config).items() if name in Setting.__dataclass_fields__}
    return Setting(**given | {"relation": data.relation, "own_order": config.table == DEMO})


def _check_curvature(config: Config) -> None:
    names = ("distance", "pd_fix", "negative_weight")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    if config.table == 1 and given.keys() & {"distance", "pd_fix"}:
        came = ", ".join(f"{value}" for value in given.values())
        hint = "The rows of table 1 are all of them: choose rows with --methods, as posthoc_euclidean_positive."
        raise InputError("--distance and --pd-fix", "none for table 1", came, hint)
    # The library itself refuses what is out of range, here on two pairs of points.
    output_hessian(torch.eye(4), torch.tensor([0, 0, 1, 1]), margin=config.margin, **given)
    weight = given.get("negative_weight", 0.5)
    if weight == 1:
        hint = "1 leaves out the attraction, the only part of the curvature that is positive."
        raise InputError("--negative-weight", "a number in [0, 1)", weight, hint)
    everything = config.margin is None and config.pd_fix != "positive"
    if everything and config.distance == "euclidean" and weight >= 0.5:
        # Every point's attraction 1 - w_n and repulsion w_n then cancel, or worse.
        raise UnsupportedError(
            "--margin none with --distance euclidean has zero curvature from --negative-weight 0.5 upwards: the "
            "repulsion of all negatives outweighs the attraction. Use a margin, --pd-fix positive, or a smaller weight."
        )
