"""``la(x, on_invalid="nan")``: inputs without a finite output get rows of NaN instead of failing the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.embedding import EmbeddingDistribution
from contrastive_curvature.embedding_checks import InvalidRowsError
from contrastive_curvature.embedding_invalid import WithInvalidRows
from contrastive_curvature.network.inputs import Inputs, check_inputs, input_length

__all__ = ["with_nan_rows"]


def with_nan_rows(
    la: Any, predict: Callable[[Inputs], EmbeddingDistribution], x: Inputs, generator: torch.Generator | None
) -> EmbeddingDistribution:
    """The prediction of a batch, with NaN for inputs that have no embedding.

    Args:
        la: A fitted posterior.
        predict: Its prediction, which refuses such inputs.
        x: A batch of B inputs.
        generator: Source of randomness of ``predict``; None for torch's own.

    Returns:
        For all other inputs exactly what ``predict`` gives without these.
    """
    n = input_length(check_inputs(x))
    valid = torch.ones(n, dtype=torch.bool)
    while bool(valid.any()):
        rows = valid.nonzero().flatten()
        try:
            with _again_on_error(la, generator):
                found = predict(x if len(rows) == n else _taken(x, rows))
                _refuse_zeros(found)
        except InvalidRowsError as error:
            valid[rows[error.rows.cpu()]] = False
        else:
            return found if len(rows) == n else WithInvalidRows(found, valid)
    nothing = torch.empty(0, la.n_outputs, dtype=la.mean.dtype, device=la._device)
    empty = EmbeddingDistribution.trusted(nothing, variance=nothing).relative_to(la.typical_norm, la.class_centres)
    return WithInvalidRows(empty, valid)


def _refuse_zeros(found: EmbeddingDistribution) -> None:
    zero = (found.raw_mean.detach() == 0).all(1)
    if bool(zero.any()):
        msg = "outputs of zeros have no direction"
        raise InvalidRowsError(msg, zero)


def _taken(x: Inputs, rows: Tensor) -> Inputs:
    """Some points of a batch; entries of a mapping without a batch axis stay whole."""
    n = input_length(x)
    if not isinstance(x, Mapping):
        return x[rows.to(x.device)]
    return {
        k: v[rows.to(v.device)] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in x.items()
    }


@contextmanager
def _again_on_error(la: Any, generator: torch.Generator | None) -> Iterator[None]:
    """Take back the random numbers of an attempt that fails, so that the next one draws the same networks."""
    cuda = generator is None and la._device.type == "cuda"
    given = None if generator is None else generator.get_state()
    plain, device = torch.get_rng_state(), torch.cuda.get_rng_state(la._device) if cuda else None
    try:
        yield
    except InvalidRowsError:
        if generator is not None and given is not None:
            generator.set_state(given)
        torch.set_rng_state(plain)
        if device is not None:
            torch.cuda.set_rng_state(device, la._device)
        raise
