"""N-digit MNIST: N digits side by side, some of them partly blacked out ("Hedged instance embedding", appendix A)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.experiments.data.fashionmnist import load_mnist
from benchmarks.experiments.data.ndigit_split import SIDE, NDigitSplit
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import Split, TensorSplit
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["NDigitData", "compose_ndigit", "load_ndigit", "occlude"]

_KINDS = 10
_OCCLUDED = 0.2
"""Share of the digits of training images that get a patch."""
_LEAST = 2
"""Images of a class: the fewest that make a pair."""


@dataclass(frozen=True)
class NDigitData:
    """The parts of N-digit MNIST. A clean part and its corrupt twin have the same digit images in the same order.

    Args:
        train: Images of the seen classes; each digit is occluded with a chance of 20 %.
        seen_clean: Test images of the seen classes, without occlusion.
        seen_corrupt: Their twins, with a patch on every digit.
        novel_clean: Test images of the classes that training leaves out.
        novel_corrupt: Their twins.
        seen: The classes of training, sorted, int64: 70 or 700.
        novel: The others, 30 or 300.
    """

    train: NDigitSplit
    seen_clean: NDigitSplit
    seen_corrupt: NDigitSplit
    novel_clean: NDigitSplit
    novel_corrupt: NDigitSplit
    seen: Tensor
    novel: Tensor


def load_ndigit(
    root: Path,
    n: int = 2,
    *,
    train_size: int = 100_000,
    seen_size: int = 10_000,
    novel_size: int = 10_000,
    seed: int = 0,
) -> NDigitData:
    """Put N-digit MNIST together from ``ROOT/MNIST/raw``; see :func:`compose_ndigit`."""
    mnist = load_mnist(root, LoadOptions())
    sizes = {"train_size": train_size, "seen_size": seen_size, "novel_size": novel_size}
    return compose_ndigit(mnist.train, mnist.test, n, **sizes, seed=seed)


def compose_ndigit(
    train: Split, test: Split, n: int, *, train_size: int, seen_size: int, novel_size: int, seed: int = 0
) -> NDigitData:
    """Put images of N digits together.

    A class is a number of N decimal digits; 70 % of them, drawn with the seed, are seen in training. Every class of a
    part has as many images as the others, or one more. Each digit image is drawn, with replacement, from those that
    show its digit. An occlusion is a black square of whole pixels: its side is uniform on 0, 1, ..., 28, its top row
    and left column uniform on all places inside the digit. (So one digit in 29 of a corrupt image stays as it is.)
    The patches of training are fixed with the images. Each part has a random stream of its own: the size of one does
    not change another.

    Args:
        train: MNIST's training images; training images are made of these alone.
        test: MNIST's test images; the four other parts are made of these alone.
        n: Digits side by side, 2 or 3.
        train_size: Training images, at least two of each seen class.
        seen_size: Test images of seen classes, at least two of each.
        novel_size: Test images of the other classes, at least two of each.
        seed: Of classes, digits and patches, a whole number, 0 or more.

    Returns:
        Five parts, which need about 100 bytes an image beside MNIST itself.

    Raises:
        InputTypeError: The images are not in memory.
        InputError: ``n``, a size or the seed is out of range, or the images are not MNIST's in kind.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n not in (2, 3):
        raise InputError(expected("n", "2 or 3 digits", n))
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(expected("seed", "a whole number, at least 0", seed))
    total = _KINDS**n
    seen_count = total * 7 // 10
    _check_size("train_size", train_size, seen_count)
    _check_size("seen_size", seen_size, seen_count)
    _check_size("novel_size", novel_size, total - seen_count)
    order = torch.from_numpy(np.random.default_rng([seed, 0]).permutation(total))
    seen, novel = order[:seen_count].sort().values, order[seen_count:].sort().values
    train_digits, test_digits = _by_digit("train", train), _by_digit("test", test)

    def part(digits: tuple[Tensor, list[np.ndarray]], classes: Tensor, size: int, number: int) -> NDigitSplit:
        images, by_digit = digits
        rng = np.random.default_rng([seed, number])
        # resize repeats the classes; which of them come once more is a matter of their first order
        targets = rng.permutation(np.resize(rng.permutation(classes.numpy()), size))
        shown = targets[:, None] // _KINDS ** np.arange(n - 1, -1, -1) % _KINDS
        rows = np.empty_like(shown)
        for digit, available in enumerate(by_digit):
            here = shown == digit
            rows[here] = rng.choice(available, int(here.sum()))
        none = torch.zeros(size, n, 3, dtype=torch.long)
        return NDigitSplit(images, torch.from_numpy(rows), none, torch.from_numpy(targets))

    def corrupt(clean: NDigitSplit, share: float, number: int) -> NDigitSplit:
        return occlude(clean, share, np.random.default_rng([seed, number]))

    seen_clean, novel_clean = part(test_digits, seen, seen_size, 3), part(test_digits, novel, novel_size, 5)
    return NDigitData(
        train=corrupt(part(train_digits, seen, train_size, 1), _OCCLUDED, 2),
        seen_clean=seen_clean,
        seen_corrupt=corrupt(seen_clean, 1.0, 4),
        novel_clean=novel_clean,
        novel_corrupt=corrupt(novel_clean, 1.0, 6),
        seen=seen,
        novel=novel,
    )


def occlude(images: NDigitSplit, share: float, rng: np.random.Generator) -> NDigitSplit:
    """The same images with other patches.

    Args:
        images: Of which the patches do not count.
        share: How likely each digit gets a patch, in [0, 1]; see :func:`compose_ndigit`.
        rng: Of the patches.
    """
    patches = _patches((len(images), images.rows.shape[1]), share, rng)
    return NDigitSplit(images.digits, images.rows, patches, images.targets)


def _check_size(argument: str, size: object, classes: int) -> None:
    least = _LEAST * classes
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        wanted = f"a whole number, at least {least} ({_LEAST} of each of the {classes} classes)"
        raise InputError(expected(argument, wanted, size))


def _by_digit(name: str, split: Split) -> tuple[Tensor, list[np.ndarray]]:
    """The images (M, 28, 28), and for each digit the rows that show it."""
    if not isinstance(split, TensorSplit):
        raise InputTypeError(expected(name, "a TensorSplit, images in memory", f"a {type(split).__name__}"))
    pixels, labels = split.pixels, split.targets
    if pixels.dtype != torch.uint8 or pixels.shape != (len(labels), 1, SIDE, SIDE) or split.white != 255:
        came = f"{pixels.dtype} {tuple(pixels.shape)} with white {split.white}"
        raise InputError(expected(name, f"uint8 images (M, 1, {SIDE}, {SIDE}) with white 255", came))
    rows = [np.flatnonzero(labels.numpy() == digit) for digit in range(_KINDS)]
    missing = [digit for digit, found in enumerate(rows) if not len(found)]
    if missing or sum(map(len, rows)) != len(labels):
        came = f"no image of {', '.join(map(str, missing))}" if missing else f"labels up to {int(labels.max())}"
        raise InputError(expected(name, "images of the digits 0 to 9, of each at least one", came))
    return pixels[:, 0], rows


def _patches(shape: tuple[int, int], share: float, rng: np.random.Generator) -> Tensor:
    """Side, top and left of squares, int64 (n, N, 3); side 0 where there is none."""
    side = rng.integers(0, SIDE, shape, endpoint=True)
    corner = rng.integers(0, SIDE - side[..., None], (*shape, 2), endpoint=True)
    there = rng.random(shape) < share
    return torch.from_numpy(np.concatenate([side[..., None], corner], 2) * there[..., None])
