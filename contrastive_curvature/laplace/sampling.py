"""Outputs of an encoder, or of its linearisation, at weights that are sampled from a posterior."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.laplace.checks import check_finite_outputs, check_output_shape
from contrastive_curvature.laplace.prediction import FASTER, to_device
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.progress import Progress

__all__ = ["joint_samples", "outputs_at", "sampled_weights"]

_PIECES = 20
"""Parts that samples are computed in, so that the speed is known after the first of them."""


def joint_samples(la: Any, x: Inputs, n_samples: int, generator: torch.Generator | None, linearized: bool) -> Tensor:
    """Raw outputs (S, B, D) of S encoders with sampled weights.

    Raises:
        InputError: An input has no finite output.
    """
    moved = to_device(la, x)
    context = la._sampling_context(moved)
    progress, started, parts, done = Progress(False, FASTER), time.monotonic(), [], 0
    for theta in sampled_weights(la, n_samples, generator):
        for piece in theta.split(max(1, n_samples // _PIECES)):
            parts.append(la._outputs_at(context, piece, linearized))
            done += len(piece)
            progress.extrapolate(started, done, n_samples, f"Outputs of {n_samples} sampled networks")
    samples = torch.cat(parts)
    check_output_shape(moved, samples[0], la.n_outputs)
    check_finite_outputs(moved, samples)
    return samples


def sampled_weights(la: Any, n_samples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Sampled weights in chunks of bounded size, each (S, P)."""
    step = max(1, 2**26 // la.mean.numel())
    for start in range(0, n_samples, step):
        yield la.sample(min(step, n_samples - start), generator)


def outputs_at(la: Any, x: Inputs, theta: Tensor, linearized: bool) -> Tensor:
    """Raw outputs (S, B, D) at given weights (S, P), of the encoder or of its linearisation."""
    with evaluation_mode(la.model), torch.set_grad_enabled(la.enable_backprop):
        pullback = ModulePullback(la.backend.encoder(x))
        if linearized:
            moved = [pullback.jvp(x, sample - la.mean) for sample in theta]
            return torch.stack([z + shift for z, shift in moved])
        return torch.stack([pullback.outputs_at(x, sample) for sample in theta])
