"""Outputs of a frozen encoder, without a posterior, and a head that is trained on them in seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.losses.supcon import SupConLoss
from contrastive_curvature.network.call import ModelCall
from contrastive_curvature.network.given_features import feature_inputs
from contrastive_curvature.network.in_batches import by_length, results
from contrastive_curvature.network.inputs import move_inputs, tokenized
from contrastive_curvature.network.threads import evaluation_mode
from contrastive_curvature.progress import Progress

BELOW = "contrastive_curvature.below"
"""Key of the outputs (B, F) of the encoder below a head, in a batch of features."""

AT_ONCE = 256
"""Inputs in a batch of data in memory."""

_HIDDEN, _DIM = 256, 64
_BATCH, _PASSES, _LEAST, _RATE, _TEMPERATURE = 500, 10, 60, 2e-3, 0.1


class Headed(nn.Module):
    """A frozen encoder, and a head on its outputs: two layers, or one that changes nothing.

    Args:
        encoder: Its outputs are (N, F).
        features: F.
        layers: Two, or one, whose weights are the identity.
    """

    def __init__(self, encoder: nn.Module, features: int, layers: int = 2) -> None:
        super().__init__()
        self.encoder, self.call = encoder, ModelCall()
        like: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        if layers == 1:
            same = nn.Linear(features, features, bias=False, **like)
            nn.init.eye_(same.weight)
            self.head = nn.Sequential(same)
        else:
            self.head = nn.Sequential(nn.Linear(features, _HIDDEN, **like), nn.ReLU(), nn.Linear(_HIDDEN, _DIM, **like))

    def forward(self, x: Any) -> Tensor:
        """Return raw outputs, shape (N, 64), or (N, F) of a head that changes nothing."""
        raw: Tensor = self.head(self.call(self.encoder, x).detach().float())
        return raw

    def inputs(self, outputs: Tensor) -> dict[str, Any]:
        """Return the outputs (N, F) of the encoder as inputs of the head's last layer, with the outputs themselves."""
        with torch.no_grad():
            features = self.head[:-1](outputs.to(next(self.head.parameters()).device))
        return {**feature_inputs(features.cpu(), f"head.{len(self.head) - 1}"), BELOW: outputs}


def outputs(encoder: nn.Module | None, inputs: Any, argument: str, progress_bar: bool | None = None) -> Tensor:
    """Return the outputs (N, F) of an encoder, in float32; for ``None``, inputs are embeddings already.

    Raises:
        InputError: An output is not finite, is zero or is not a vector, or there are no inputs.
    """
    weight, call = None if encoder is None else next(encoder.parameters(), None), ModelCall()

    def run(x: Any) -> Tensor:
        if encoder is not None:
            x = tokenized(encoder, x)
            x = call(encoder, x if weight is None else move_inputs(x, weight.device))
        if not isinstance(x, Tensor) or x.ndim != 2:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InputError("outputs", "embeddings (N, F)", got)
        if x.is_complex():
            raise InputTypeError("outputs", "embeddings of real numbers", f"{x.dtype}")
        # After the cast, which may lose what is too large or too small.
        x = x.float()
        if not bool((x.isfinite().all(1) & (x != 0).any(1)).all()):
            raise InputError("outputs", "finite embeddings with a direction, in float32", "NaN, infinity or zeros")
        return x

    inputs, places = by_length(inputs, argument)
    with torch.no_grad(), evaluation_mode(encoder or nn.Identity()):
        parts = list(results(run, encoder, inputs, argument, AT_ONCE, progress_bar, "[encode]"))
    return torch.cat(parts)[places]


def with_head(encoder: nn.Module | None, features: Tensor, classes: Tensor, progress_bar: bool | None = None) -> Headed:
    """Train a head on the outputs (N, F) of an encoder by SupCon; the same inputs give the same head.

    Adam takes ten passes in batches of 500, and at least 60 steps; 400 steps were worse in a trial on CLINC150.

    Args:
        encoder: The encoder below the head; ``None`` if the inputs are embeddings.
        features: Shape (N, F).
        classes: int64, shape (N,).
        progress_bar: As of :meth:`.Retriever.fit`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Headed(nn.Identity() if encoder is None else encoder, features.shape[1])
        order = torch.Generator().manual_seed(0)
    model.head.to(features.device)
    optimizer, loss = torch.optim.Adam(model.head.parameters(), _RATE), SupConLoss(_TEMPERATURE)
    steps = max(_LEAST, _PASSES * len(features) // _BATCH)
    for _ in Progress(progress_bar).over(range(steps), "[head]"):
        rows = torch.randperm(len(features), generator=order, device="cpu")[:_BATCH]
        optimizer.zero_grad()
        with torch.enable_grad():
            loss(model.head(features[rows]), classes[rows].to(features.device)).backward()
        optimizer.step()
    return model.eval()
