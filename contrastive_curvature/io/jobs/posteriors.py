"""The posterior of a job: given as it is, or by a function that every process calls once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.laplace.fitting import FittedPosterior
from contrastive_curvature.network.digest import encoder_digest
from contrastive_curvature.network.inputs import slice_inputs

__all__ = ["Posterior", "identity_of", "made", "posterior_digest"]

Posterior = FittedPosterior | Callable[[], Any]

_PROBE = 8


def made(posterior: Any, argument: str = "posterior") -> Any:
    """The posterior, or what a function without arguments makes.

    Raises:
        InputTypeError: It is neither.
    """
    # A posterior is callable, too.
    if not isinstance(posterior, FittedPosterior) and not callable(posterior):
        wanted = "a posterior of likelihood='contrastive', or a function that makes one"
        raise InputTypeError(expected(argument, wanted, f"a {type(posterior).__name__}"))
    la = posterior if isinstance(posterior, FittedPosterior) else posterior()
    if not isinstance(la, FittedPosterior):
        hint = "laplace.Laplace(encoder, likelihood='contrastive', ...) makes one."
        wanted = "a function that returns a posterior of likelihood='contrastive'"
        raise InputTypeError(expected(argument, wanted, f"one that returns a {type(la).__name__}", hint))
    return la


def identity_of(la: Any, loader: Any, count: int) -> Mapping[str, str]:
    """What the statistics of all parts of a fit have in common, from a few points of one part.

    Args:
        la: The posterior.
        loader: Batches of a part.
        count: Number of parts.

    Raises:
        InputError: The first batch is malformed, or there is none.
        UnsupportedError: The posterior has no fit in parts.
    """
    for batch in loader:
        some = batch
        # Of other batches it takes the whole first one, or says what is wrong with it.
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], (Tensor, Mapping)):
            x, y = batch
            some = (slice_inputs(x, slice(0, _PROBE)), y[:_PROBE] if isinstance(y, Tensor) and y.ndim else y)
        return dict(la.part_statistics([some], (0, count), progress_bar=False).identity)
    raise InputError(expected("source", "at least one batch in part 0", "none"))


def posterior_digest(la: Any) -> str:
    """A short text that changes with anything that predictions of a fitted posterior depend on."""
    digest = hashlib.sha256(encoder_digest(la.model).encode())
    _update(digest, la.state_dict())
    return digest.hexdigest()[:32]


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        part = value.detach().cpu().contiguous()
        content: Any = part.flatten().view(torch.uint8).numpy()
        # A saved and loaded number may come back as a tensor of one number.
        digest.update(f"{part.dtype} {part.numel()}".encode())
        digest.update(memoryview(content))
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(str(name).encode())
            _update(digest, value[name])
    elif isinstance(value, (list, tuple)):
        for part in value:
            _update(digest, part)
    else:
        digest.update(repr(value).encode())
