"""The encoder and the scores of its posterior as one ``nn.Module``, a snapshot of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from contrastive_curvature.embedding.distribution import turning_angle
from contrastive_curvature.embedding.known import NOVELTY
from contrastive_curvature.embedding.spread import Axes, Diagonal
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.fit.class_centres import between_classes, nearest_ratio
from contrastive_curvature.io.serving.numpy_scorer import TAIL
from contrastive_curvature.io.serving.parts import Parts, parts_of
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.vmf.estimation import concentration_of_variance

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
        metadata: What exported files say of themselves: ``format``, ``version``, ``structure``, ``outputs``,
            ``score``, what p-values are of, and ``calibration_inputs``, their number n; the smallest p-value is
            ``1 / (n + 1)``.

    Raises:
        InputTypeError: ``la`` is no contrastive posterior.
        UnsupportedError: It is one of other weights or of another structure, or the encoder cannot be copied.
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
            "score": parts.score if "p_value" in parts.outputs else None,
            "calibration_inputs": len(parts.arrays.get("statistics", ())),
        }
        with refusing(
            "export: the encoder cannot be copied ({}). Remove what cannot, such as open files and locks, from its "
            "modules."
        ):
            # Its hooks are what finds the inputs of the last layer, also where a normalisation follows.
            self.encoder = copy.deepcopy(la.model)
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
        z, phi = self.encoder.forward_with_features(x)
        device = z.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.head(z, phi)
        return self.head(z, phi)


class ScoreHead(nn.Module):
    """The scores of B inputs from what the last layer takes in and gives out.

    The same numbers as those of :class:`.EmbeddingDistribution`, in operations that every graph format has, and without
    a look at values: NaN stands where ``la(x)`` raises an error. Sorted arrays cannot be searched in ONNX, so the known
    statistics lie in rows of about ``sqrt(n)``: the last of each says which row to search; by class, in a row a class.

    Attributes:
        float32_arctan: Whether the arc tangent is computed in float32, as ONNX's runtime has no other.
    """

    typical_norm: Tensor | None
    centres: Tensor | None
    typical_ratio: Tensor
    variance: Tensor
    bias_variance: Tensor | None
    axes: Tensor
    basis: Tensor
    along: Tensor
    across: Tensor | None
    common: Tensor | None
    covariance: Tensor
    trace: Tensor
    location: Tensor
    scale: Tensor
    known_centre: Tensor | None
    known_axes: Tensor
    known_inside: Tensor
    known_outside: Tensor
    known_basis: Tensor | None
    known_weights: Tensor
    known_slopes: Tensor
    known_offsets: Tensor
    rows: Tensor
    counts: Tensor | None
    tiny: Tensor
    largest: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        arrays = dict(parts.arrays)
        weight = arrays["weight"]
        self.form = parts.form
        self.float32_arctan = False
        if "centres" in arrays:
            arrays["typical_ratio"] = arrays["typical_ratio"].to(weight)
        for name in {"axes", "common", "covariance", "location", "scale", "statistics"} & arrays.keys():
            arrays[name] = arrays[name].double()
        if self.form == "dense":
            arrays["trace"] = _traces(arrays["covariance"], *weight.shape)
        self.n = len(arrays.get("statistics", ()))
        self.score = parts.score
        if self.n and "counts" in arrays:
            of_class = arrays["statistics"].split(arrays["counts"].tolist())
            arrays["rows"] = pad_sequence(list(of_class), batch_first=True, padding_value=torch.inf)
        elif self.n:
            # The last place of the last row is infinite, so that there is always a row to search.
            width = math.isqrt(self.n) + 1
            rows = arrays["statistics"].new_full(((self.n // width + 1) * width,), torch.inf)
            rows[: self.n] = arrays["statistics"]
            arrays["rows"] = rows.view(-1, width)
        self.tolerance = float(arrays.get("rounding", 0.0))
        # As tensors, because ONNX would round plain numbers to float32 first.
        limits = torch.finfo(torch.float64)
        arrays["tiny"] = torch.tensor(limits.tiny, dtype=torch.float64, device=weight.device)
        arrays["largest"] = torch.tensor(limits.max, dtype=torch.float64, device=weight.device)
        for name in ScoreHead.__annotations__:
            self.register_buffer(name, arrays.get(name))

    def forward(self, z: Tensor, phi: Tensor) -> tuple[Tensor, ...]:
        """Score raw outputs (B, D) of features (B, F)."""
        wide = z.double()
        size = torch.maximum(wide.abs().amax(1), self.tiny)
        scaled = wide / size.unsqueeze(1)
        length = scaled.square().sum(1).sqrt()
        total, radial = self._spread(phi, scaled / torch.maximum(length, self.tiny).unsqueeze(1))
        # A zero output has no direction.
        divisor = torch.where(length > 0, length, torch.nan)
        mu, norm = (scaled / divisor.unsqueeze(1)).to(z.dtype), divisor * size
        # Divided twice, because the square of a tiny or huge norm underflows or overflows.
        tangential = (total - radial).clamp(min=0) / norm / norm
        between = None
        if self.centres is not None:
            between = between_classes(nearest_ratio(mu, self.centres), self.typical_ratio)
        angle = turning_angle(tangential, norm, self.typical_norm, between, self._arctan).to(z.dtype)
        out = (mu, concentration_of_variance(tangential.to(z.dtype), z.shape[1]), angle)
        if not self.n:
            return out
        rounding = z.shape[1] * torch.finfo(z.dtype).eps
        spread = torch.maximum(total - radial, rounding * total)
        log_norm = torch.maximum(self._log(length) + size.log(), self.tiny.log())
        # What is not finite is no known input.
        known = size + spread <= self.largest
        classes = None
        if self.counts is not None and self.centres is not None:
            classes = (mu @ self.centres.T).argmax(1)
        score = self._novelty(self._log(spread), log_norm, phi, wide) if self.score == NOVELTY else angle.double()
        if classes is not None or self.score != NOVELTY:
            known = known & (length > 0)
        return (*out, torch.where(known, self._p_value(score, classes), torch.nan))

    def _spread(self, phi: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return trace, and variance along unit vectors (B, D), of the outputs at features; float64, shape (B,)."""
        if self.form == "diagonal":
            values = phi.square() @ self.variance.to(phi.dtype).T
            if self.bias_variance is not None:
                values = values + self.bias_variance.to(phi.dtype)
            return Diagonal(values).across(u)
        if self.form == "axes":
            phi = phi.to(self.basis.dtype)
            coordinates = phi @ self.basis
            values = coordinates.square() @ self.along.T
            if self.across is not None:
                left = (phi - coordinates @ self.basis.T).square().sum(1, keepdim=True)
                values = values + left * self.across
            return Axes(self.axes, values, self.common, values.dtype).across(u)
        wide = phi.double()
        weights = (u.unsqueeze(2) * wide.unsqueeze(1)).flatten(1)
        if len(self.trace) > wide.shape[1]:
            weights = torch.cat([weights, u], dim=1)
            wide = torch.cat([wide, torch.ones_like(wide[:, :1])], dim=1)
        return ((wide @ self.trace) * wide).sum(1), ((weights @ self.covariance) * weights).sum(1)

    def _novelty(self, spread: Tensor, length: Tensor, phi: Tensor, z: Tensor) -> Tensor:
        """Return the novelty of the logarithms of spread and norm; see :mod:`.known`."""
        wide = phi.double()
        norms = torch.maximum(wide.square().sum(1).sqrt(), self.tiny)
        features = self._log(norms)
        components = [spread - features, spread - 2 * features, -length]
        if self.known_centre is not None:
            apart = z - self.known_centre
            squared = (apart @ self.known_axes).square() @ self.known_inside
            components.append(self._log(squared + self.known_outside * apart.square().sum(1)))
        if self.known_basis is not None:
            u = wide / norms.unsqueeze(1)
            nearest = (u @ self.known_slopes.T + self.known_offsets).amin(1)
            components.append((u @ self.known_basis).square() @ self.known_weights + nearest)
        return _combine((torch.stack(components, dim=1) - self.location) / self.scale)

    def _p_value(self, score: Tensor, classes: Tensor | None) -> Tensor:
        """Return the conformal p-values of scores (B,)."""
        least = score.unsqueeze(1) - self.tolerance
        if classes is not None and self.counts is not None:
            n = self.counts[classes]
            return (1 + n - (self.rows[classes] < least).sum(1)).double() / (n + 1)
        row = (self.rows[:, -1] < least).sum(1)
        below = row * self.rows.shape[1] + (self.rows[row] < least).sum(1)
        return (1 + self.n - below).double() / (self.n + 1)

    def _log(self, value: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(value, self.tiny), self.largest).log()

    def _arctan(self, angle: Tensor) -> Tensor:
        return angle.float().arctan().to(angle.dtype) if self.float32_arctan else angle.arctan()


def _traces(covariance: Tensor, dim: int, width: int) -> Tensor:
    """Return the covariances of the inputs' weights, summed over the outputs; a bias is the last input."""
    rows = torch.arange(dim * width, device=covariance.device).view(dim, width)
    if len(covariance) > dim * width:
        bias = torch.arange(dim * width, len(covariance), device=covariance.device)
        rows = torch.cat([rows, bias.unsqueeze(1)], dim=1)
    return covariance[rows.unsqueeze(2), rows.unsqueeze(1)].sum(0)


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Refuse an encoder for the error inside, which a message names at ``{}``; such errors have no common base."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, InputError) and cause.__cause__ is not None:
            cause = cause.__cause__
        first_line = str(cause).strip().partition("\n")[0].rstrip(".")
        reason = f"{type(cause).__name__}: {first_line}" if first_line else type(cause).__name__
        raise UnsupportedError(message.format(reason)) from error


def _combine(standardised: Tensor) -> Tensor:
    """Return :func:`.known.combine` of components (B, K), by operations that ONNX has."""
    tails = torch.cat([standardised, -standardised[:, :1]], dim=1)
    z = tails.abs()
    t = 1 / (1 + z / 8**0.5)
    series = torch.zeros_like(t)
    for coefficient in reversed(TAIL):
        series = series * t + coefficient
    # Of the tail beyond |z|.
    log_p = t.log() + series - z.square() / 2 - math.log(2)
    both = torch.where(tails > 0, -log_p, -torch.log1p(-log_p.exp()))
    return (2 * both.sum(1)).sqrt()
