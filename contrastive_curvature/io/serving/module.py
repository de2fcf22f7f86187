"""The encoder and the scores of its posterior as one ``nn.Module``, a snapshot of both."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.io.serving.head import ScoreHead
from contrastive_curvature.io.serving.parts import parts_of
from contrastive_curvature.network.inputs import Inputs

__all__ = ["ServedEncoder"]

FORMAT, VERSION = "contrastive_curvature.served", 1


class ServedEncoder(nn.Module):
    """``mu, kappa, uncertainty, p_value = module(x)``: a copy of the encoder with the arrays of its posterior.

    It computes what ``la(x)`` does, in evaluation mode and without gradients of its weights, and follows neither later
    changes of the posterior nor of the encoder. Where ``la(x)`` raises an error about the values of an input, its row
    holds NaN: all four for an input without finite outputs, all but ``p_value`` for an output of zeros.

    Args:
        la: A fitted posterior of a last layer (``diag``, ``kron``, ``full`` or ``kron_lowrank``).
        p_value: Whether to return p-values; ``None``: where ``la`` is calibrated.

    Attributes:
        outputs: Names of what a call returns, in order.
        metadata: What exported files say of themselves: ``format``, ``version``, ``structure``, ``outputs`` and
            ``calibration_inputs``, their number n; the smallest p-value is ``1 / (n + 1)``.

    Raises:
        InputTypeError: ``la`` is no contrastive posterior.
        UnsupportedError: It is one of other weights or of another structure.
        NotFittedError: Before ``fit``; before ``la.calibrate``, where ``p_value``; or the calibration is of another
            prior precision, temperature or encoder.
    """

    def __init__(self, la: Any, p_value: bool | None = None) -> None:
        super().__init__()
        parts = parts_of(la, p_value)
        self.outputs = parts.outputs
        self.metadata = {
            "format": FORMAT,
            "version": VERSION,
            "structure": parts.structure,
            "outputs": list(parts.outputs),
            "calibration_inputs": len(parts.arrays.get("statistics", ())),
        }
        # Its hooks are what finds the inputs of the last layer, also where a normalisation follows.
        self.encoder = copy.deepcopy(la.model.encoder)
        self.head = ScoreHead(parts)
        self.eval().requires_grad_(False)

    def forward(self, x: Inputs) -> tuple[Tensor, ...]:
        """Score B inputs.

        Args:
            x: As for ``la(x)``.

        Returns:
            ``mu`` (B, D), ``kappa`` (B,), ``uncertainty`` (B,) and, if the posterior was calibrated, ``p_value`` (B,),
            float64.
        """
        z, phi = self.encoder.features(x)
        device = z.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.head(z, phi)
        return self.head(z, phi)
