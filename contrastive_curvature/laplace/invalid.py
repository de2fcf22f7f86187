"""``la(x, on_invalid="nan")``: inputs without a finite output get rows of NaN instead of failing the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution, InvalidRowsError, with_invalid_rows
from contrastive_curvature.laplace.calibration import judged
from contrastive_curvature.network.inputs import Inputs, input_length

__all__ = ["no_rows", "with_nan_rows"]


def with_nan_rows(
    la: Any,
    predict: Callable[[Inputs], EmbeddingDistribution],
    x: Inputs,
    generator: torch.Generator | None,
    nothing: Callable[[], EmbeddingDistribution],
) -> EmbeddingDistribution:
    """The prediction of a batch, with NaN for inputs that have no embedding.

    Args:
        la: A fitted posterior.
        predict: Its prediction, which refuses such inputs.
        x: A batch of B inputs.
        generator: Source of randomness of ``predict``; None for torch's own.
        nothing: What it gives for a batch without inputs.

    Returns:
        For all other inputs exactly what ``predict`` gives without these.
    """
    valid: Tensor | None = None
    while valid is None or bool(valid.any()):
        try:
            with _again_on_error(la, generator):
                found = predict(x if valid is None else _taken(x, valid.nonzero().flatten()))
                _refuse_zeros(found)
        except InvalidRowsError as error:
            bad = error.rows.cpu()
            valid = torch.ones_like(bad) if valid is None else valid
            valid[valid.nonzero().flatten()[bad]] = False
        else:
            return found if valid is None else with_invalid_rows(found, valid)
    return with_invalid_rows(nothing().relative_to(la.typical_norm, la.class_centres), valid)


def no_rows(la: Any, n_samples: int | None, joint: bool, diagonal: bool) -> EmbeddingDistribution:
    """The prediction of no input, which answers and refuses what that of some inputs does.

    Args:
        la: A fitted posterior.
        n_samples: Number of sampled networks; None of a prediction in closed form.
        joint: Whether it has the covariance between inputs.
        diagonal: Whether it has the variances alone.
    """
    mean = torch.empty(0, la.n_outputs, dtype=la.mean.dtype, device=la._device)
    if n_samples is not None:
        return EmbeddingDistribution.from_samples(mean.expand(n_samples, -1, -1))
    if joint:
        return EmbeddingDistribution.trusted(mean, joint_covariance=mean.new_empty(0, 0))
    if diagonal:
        return EmbeddingDistribution.trusted(mean, variance=mean)
    out = EmbeddingDistribution.trusted(mean, covariance=mean.new_empty(0, la.n_outputs, la.n_outputs))
    return judged(la, out, mean.new_empty(0, dtype=torch.float64) if la.keeps_features else None)


def _refuse_zeros(found: EmbeddingDistribution) -> None:
    zero = (found.raw_mean.detach() == 0).all(1)
    if bool(zero.any()):
        msg = "outputs of zeros have no direction"
        raise InvalidRowsError(msg, zero)


def _taken(x: Any, rows: Tensor) -> Any:
    """Some points of a batch; entries of a mapping without a batch axis stay whole."""
    if isinstance(x, Tensor):
        return x[rows.to(x.device)]
    if not isinstance(x, Mapping):
        # Texts, which an encoder with a tokenizer takes.
        return [x[row] for row in rows.tolist()]
    n = input_length(x)
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
