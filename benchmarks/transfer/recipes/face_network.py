"""MobileFaceNet in ncnn's format, run by the package ``ncnn``: the features before its last layer, and that layer."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.data.files import require
from contrastive_curvature.errors import InputError, UnsupportedError, expected

SIDE = 112
"""Side in pixels of the images that the network takes."""
_FILES = ("encoders/mobilefacenet.param", "encoders/mobilefacenet.bin")
_FEATURES, _OUTPUTS = "conv_6dw7_7_batchnorm", "fc1"
"""Names of the blobs: the 512 pooled features, and the 128 outputs, which are linear in them."""
_HOW = "Get both from commit 4363116 of https://github.com/liguiyuan/mobilefacenet-ncnn (no licence: for experiments)."
_LINEAR_TO = 1e-4
"""Largest deviation of an output from a linear layer, in units of the largest output."""


class FaceNetwork:
    """The network, ready to run on one thread, in float32 throughout.

    Args:
        data_root: Folder that has ``encoders/mobilefacenet.param`` and ``.bin``.

    Raises:
        UnsupportedError: The package ``ncnn`` is not installed.
        InputError: The files are missing or damaged.
    """

    def __init__(self, data_root: Path) -> None:
        require(data_root, list(_FILES), _HOW)
        self._ncnn: Any = _ncnn()
        self._net = self._ncnn.Net()
        self._net.opt.num_threads = 1
        # ncnn rounds to half precision where the processor can; features should not depend on the processor.
        for option in ("packed", "storage", "arithmetic"):
            setattr(self._net.opt, f"use_fp16_{option}", False)
        for read, name in zip((self._net.load_param, self._net.load_model), _FILES, strict=True):
            if read(str(data_root / name)) != 0:
                raise InputError(expected(str(data_root / name), "a network of ncnn", "one that ncnn refuses", _HOW))

    def __call__(self, images: Iterable[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run the network on faces.

        Args:
            images: At least one, uint8, shape (112, 112, 3), RGB.

        Returns:
            Features (N, 512) and outputs (N, 128), which are not normalised.
        """
        features, outputs = zip(*map(self._run, images), strict=True)
        return np.stack(features), np.stack(outputs)

    def _run(self, image: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        pixels = np.ascontiguousarray(image)
        mat = self._ncnn.Mat.from_pixels(pixels, self._ncnn.Mat.PixelType.PIXEL_RGB, SIDE, SIDE)
        extractor = self._net.create_extractor()
        extractor.input("data", mat)
        # Copies: ncnn's own memory is gone with the extractor.
        values = [np.array(extractor.extract(blob)[1], dtype=np.float32).reshape(-1) for blob in (_FEATURES, _OUTPUTS)]
        return values[0], values[1]


def _ncnn() -> ModuleType:
    try:
        return importlib.import_module("ncnn")
    except ImportError as error:
        msg = f"the recipe of the faces runs its network with the package ncnn ({error}). Run: pip install ncnn"
        raise UnsupportedError(msg) from None


@dataclass(frozen=True)
class LastLayer:
    """A linear layer that was found from its inputs and outputs.

    Args:
        weight: float32, shape (D, F).
        bias: float32, shape (D,).
        error: Largest deviation of an output, in units of the largest output.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    error: float


def linear_layer(features: NDArray[np.float32], outputs: NDArray[np.float32]) -> LastLayer:
    """Find the linear layer between two blobs by least squares, in float64.

    The layer and the batch normalisation behind it are one linear layer, which ncnn's file has in parts.

    Args:
        features: Shape (N, F), N above F.
        outputs: Shape (N, D).

    Returns:
        The layer, float32.

    Raises:
        InputError: There are too few rows, or the outputs are not linear in the features.
    """
    rows, width = features.shape
    wanted = f"more images than the {width} features and a bias have unknowns"
    if rows <= width:
        raise InputError(expected("features", wanted, rows))
    design = np.hstack([features.astype(np.float64), np.ones((rows, 1))])
    solution, _, rank, _ = np.linalg.lstsq(design, outputs.astype(np.float64), rcond=None)
    if rank <= width:
        raise InputError(expected("features", wanted, f"{rows} of rank {rank}"))
    error = float(np.abs(design @ solution - outputs).max() / np.abs(outputs).max())
    # written so that NaN fails too
    if not error <= _LINEAR_TO:
        raise InputError(expected("outputs", "a linear layer's", f"a relative deviation of {error:.1g}"))
    return LastLayer(solution[:-1].T.astype(np.float32), solution[-1].astype(np.float32), error)
