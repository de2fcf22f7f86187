"""Command line of the demo."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from contrastive_curvature.demo.config import DATASETS, DemoConfig, check_config, check_plotting
from contrastive_curvature.errors import ContrastiveCurvatureError
from contrastive_curvature.options import Distance, PDFix

__all__ = ["main", "parse"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0, or 2 when something was refused, which happens before any training.
    """
    started = time.perf_counter()
    config = parse(argv)
    try:
        check_plotting()
        check_config(config)
        # Only now: these imports take seconds, and a refusal should not.
        from contrastive_curvature.demo.data import load_data
        from contrastive_curvature.demo.report import make_run_folder

        data = load_data(config)
        folder = make_run_folder(config)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from contrastive_curvature.demo.evaluate import Evaluation, evaluate
    from contrastive_curvature.demo.plots import draw_all
    from contrastive_curvature.demo.report import collect, write_report
    from contrastive_curvature.demo.train import train_encoder

    sizes = (
        f"{len(data.train_x):,} training, {len(data.test_x):,} test images; out of distribution: {len(data.ood_x):,}"
    )
    print(f"{config.dataset}: {sizes} ({data.ood_name}). Run folder: {folder}")
    runs: dict[int, tuple[float, Evaluation]] = {}
    for seed in config.seeds:
        print(f"seed {seed}")
        encoder, seconds = train_encoder(config, data.train_x, data.train_y, seed)
        # Kept before anything else can fail: the training is the longest step.
        torch.save(encoder.state_dict(), folder / f"encoder_seed{seed}.pt")
        runs[seed] = (seconds, evaluate(config, data, encoder, seed))
        # After every seed, so that an interrupted run leaves what it has.
        text = write_report(folder, collect(config, runs))
        if seed == config.seeds[0]:
            draw_all(folder, data, runs[seed][1], seed)
    print(
        f"\n{text}\n{time.perf_counter() - started:.0f} seconds in all; figures and seed {config.seeds[0]}'s plots in"
    )
    print(folder)
    return 0


def parse(argv: Sequence[str] | None = None) -> DemoConfig:
    """Turn arguments into a configuration, with the defaults of the data set.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        The configuration, unchecked but for types and names.
    """
    given = _parser().parse_args(argv)
    defaults = DATASETS[given.dataset]
    return DemoConfig(
        dataset=given.dataset,
        data_root=given.data_root,
        dim=given.dim,
        seeds=tuple(given.seeds),
        epochs=defaults.epochs if given.epochs is None else given.epochs,
        train_size=given.train_size,
        test_size=given.test_size,
        batch_size=defaults.batch_size if given.batch_size is None else given.batch_size,
        lr=given.lr,
        margin=given.margin,
        distance=given.distance,
        pd_fix=given.pd_fix,
        negative_weight=given.negative_weight,
        n_samples=given.n_samples,
        baseline_features=given.baseline_features,
        device=given.device,
        out=given.out,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m contrastive_curvature.demo",
        description="Train a contrastive encoder, fit the post-hoc Laplace, and see what its uncertainty knows.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--dataset", choices=sorted(DATASETS), default="digits", help="default: %(default)s")
    add(
        "--data-root",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="holds FashionMNIST/raw and MNIST/raw; downloaded there if missing (default: %(default)s)",
    )
    add("--dim", type=int, default=3, metavar="D", help="latent dimension (default: %(default)s)")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        metavar="SEED",
        help="several give mean ± standard deviation (default: 0)",
    )
    epochs = ", ".join(f"{name} {d.epochs}" for name, d in DATASETS.items())
    add("--epochs", type=int, metavar="N", help=f"passes over the training images (default: {epochs})")
    add("--train-size", type=int, metavar="N", help="training images (default: all)")
    add("--test-size", type=int, metavar="N", help="test images, in and out of distribution each (default: all)")
    add("--batch-size", type=int, metavar="N", help="images a training step, all pairs of which count (default: 64)")
    add("--lr", type=float, default=1e-3, help="learning rate of RMSprop (default: %(default)s)")
    add(
        "--margin",
        type=_margin,
        default=0.7,
        help="distance in (0, 2] below which a negative counts, in training and curvature; 'none': always "
        "(default: %(default)s)",
    )
    add("--distance", choices=[str(d) for d in Distance], help="of the curvature (default: the library's)")
    add(
        "--pd-fix",
        choices=[str(f) for f in PDFix],
        help="of the curvature (default: the library's); full is quadratic in the training images",
    )
    add("--negative-weight", type=float, metavar="W", help="of the curvature, in [0, 1) (default: the library's)")
    add(
        "--n-samples",
        type=int,
        default=100,
        metavar="N",
        help="sampled networks, for ECE and sampled uncertainty (default: %(default)s)",
    )
    add(
        "--baseline-features",
        type=int,
        default=10_000,
        metavar="N",
        help="training images that the 10-NN baseline in feature space searches: for fashionmnist, 37 kB of memory and "
        "4 ms of two cores each (default: %(default)s)",
    )
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="run folder, new or empty (default: runs/DATASET-dD-TIME)")
    return parser


def _margin(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)
