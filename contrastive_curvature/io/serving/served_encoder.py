"""An encoder and its fitted last layer as one ``nn.Module``, without laplace-torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from contrastive_curvature.embedding.distribution import turning_angle
from contrastive_curvature.embedding.known import NOVELTY, TrainingGaussians, unit_features
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError, UnsupportedError
from contrastive_curvature.fit.class_centres import between_classes, nearest_ratio
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import full_precision
from contrastive_curvature.posterior.p_values import example, present_calibration
from contrastive_curvature.posterior.value import spread_at
from contrastive_curvature.structures.at_features import DenseAtFeatures
from contrastive_curvature.vmf.estimation import concentration_of_variance

FORMAT, VERSION = "contrastive_curvature.served", 1

_TAIL = (
    *(-1.2655121234847422, 1.000000000085138, 0.3749999876202876, 0.08333404321731487, -0.08595887819528081),
    *(-0.14335982785093354, -0.09648985845800909, 0.06878120462341214, -0.10218119421100404, 1.1515735586724292),
    *(-3.333543467853752, 7.446609161359192, -12.275184316640647, 10.743464342300873, 1.6832199676406254),
    *(-16.696460796364075, 21.6613980688489, -15.345296269036949, 6.555878025039342, -1.5971863447915142),
    0.17191471747949272,
)
"""Coefficients of the polynomial in ``t = 1 / (1 + x / 2)`` that interpolates ``log(erfc(x) exp(x^2) / t)`` at the 21
Chebyshev nodes of 0 <= t <= 1: its error is 2e-13. Graphs for ONNX have no logarithm of a normal tail."""


def _check_exportable(la: Any) -> None:
    """Refuse an object without a fitted last-layer posterior in closed form."""
    if not isinstance(la, ContrastiveLaplace):
        hint = "Of OnlineLaplace take online.laplace(), of two towers la.a and la.b."
        raise InputTypeError("la", "a contrastive last-layer posterior", f"a {type(la).__name__}", hint)
    if not la.on_last_layer:
        weights, structure = la.subset_of_weights, la.hessian_structure
        raise UnsupportedError(
            f"export: subset_of_weights={weights!r}, hessian_structure={structure!r} needs Jacobians for every "
            "prediction, which no exported graph has. Fit subset_of_weights='last_layer' with "
            "hessian_structure='kron_lowrank' (the default), 'diag', 'kron' or 'full'."
        )
    la.check_fitted()


def _copied(arrays: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return copies, which later changes do not affect, without missing arrays."""
    contiguous = torch.contiguous_format
    return {name: a.detach().clone(memory_format=contiguous) for name, a in arrays.items() if a is not None}


@torch.no_grad()
def _score_arrays(la: Any, p_value: bool | None) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the p-values' score, and the arrays that scores need besides the spread of the outputs.

    With ``p_value=None``, the arrays of p-values are there if ``la`` is calibrated.
    """
    like = at_least_float32(la.model.last_layer.weight)
    arrays: dict[str, Tensor | None] = {}
    if la.typical_norm is not None:
        arrays["typical_norm"] = torch.tensor(la.typical_norm, dtype=torch.float64, device=like.device)
    if la.class_centres is not None:
        arrays["centres"] = la.class_centres.centres.to(like)
        arrays["typical_ratio"] = torch.tensor(la.class_centres.typical, dtype=torch.float64, device=like.device)
    if p_value and la.posterior.calibration is None:
        raise NotFittedError(
            "p_value=True: la is not calibrated. Call la.calibrate(loader) with known inputs first, or leave p_value "
            "out to export mu, kappa and uncertainty alone."
        )
    calibration, score = None if p_value is False else present_calibration(la.posterior, la.read), NOVELTY
    if calibration is not None:
        if calibration.score.probe is not None:
            raise UnsupportedError(
                f"p_value: la is calibrated for the function {calibration.score.name!r}, which no file holds. Export "
                "with p_value=False, or calibrate for 'novelty' or 'uncertainty'."
            )
        calibration.score.check(example(la.posterior.fitted))
        reference, score = calibration.reference, calibration.score.name
        arrays |= {name: getattr(reference, name) for name in ("location", "scale", "statistics", "counts")}
        arrays["rounding"] = reference.statistics.new_tensor(reference.rounding)
        if calibration.gaussians is not None and score == NOVELTY:
            arrays |= {f"known_{name}": value for name, value in vars(calibration.gaussians).items()}
    return score, _copied(arrays)


class ServedEncoder(nn.Module):
    """``mu, kappa, uncertainty, p_value = module(x)``: a copy of the encoder with the arrays of its posterior.

    The module computes the same as ``la(x)``, in evaluation mode and without gradients of its weights. Later changes of
    the posterior or the encoder do not affect it. Where ``la(x)`` would raise an error about an input's values, the
    input's row is NaN: in all four results if its outputs are not finite, in all except ``p_value`` if its outputs are
    zero.

    Args:
        la: A fitted posterior of a last layer (``diag``, ``kron``, ``full`` or ``kron_lowrank``).
        p_value: Whether to return p-values; by default, if ``la`` is calibrated.

    Attributes:
        outputs: Names of the results of a call, in order.
        metadata: Metadata of exported files: ``format``, ``version``, ``structure``, ``outputs``, ``score`` (the score
            of the p-values) and ``calibration_inputs``, the number n of these inputs; the smallest p-value is
            ``1 / (n + 1)``.

    Raises:
        InputTypeError: ``la`` is not a contrastive posterior.
        UnsupportedError: The posterior has other weights or another structure, or the encoder cannot be copied.
        NotFittedError: Before ``fit``; before ``la.calibrate`` if ``p_value`` is true; or the calibration belongs to
            another prior precision, temperature or encoder.
    """

    def __init__(self, la: Any, p_value: bool | None = None) -> None:
        super().__init__()
        _check_exportable(la)
        score, arrays = _score_arrays(la, p_value)
        self.outputs = ("mu", "kappa", "uncertainty") + (("p_value",) if "statistics" in arrays else ())
        self.metadata = {
            "format": FORMAT,
            "version": VERSION,
            "structure": la.hessian_structure,
            "outputs": list(self.outputs),
            "score": score if "p_value" in self.outputs else None,
            "calibration_inputs": len(arrays.get("statistics", ())),
        }
        with refusing(
            "export: the encoder cannot be copied ({}). Remove what cannot, such as open files and locks, from its "
            "modules."
        ):
            # The copied encoder's hooks find the inputs of the last layer, also before a normalisation.
            self.encoder = copy.deepcopy(la.model)
        self.head = ScoreHead(la.posterior.at_features, score, arrays)
        self.eval().requires_grad_(False)

    def forward(self, x: Inputs) -> tuple[Tensor, ...]:
        """Score B inputs.

        Args:
            x: Inputs as for ``la(x)``.

        Returns:
            ``mu`` (B, D), ``kappa`` (B,), ``uncertainty`` (B,) and, if the posterior was calibrated, ``p_value`` (B,),
            float64.
        """
        return self.head(*self.encoder.forward_with_features(x))


class ScoreHead(nn.Module):
    """The scores of B inputs, from the inputs and outputs of the last layer.

    The scores equal :class:`.EmbeddingDistribution`, but use only operations of every graph format and no control flow
    on values: where ``la(x)`` raises an error, the result is NaN. ONNX cannot search sorted arrays, so the known
    statistics are stored in rows of about ``sqrt(n)`` numbers, and the last numbers of the rows determine the row to
    search. For p-values by class, each class has one row.

    Attributes:
        float32_arctan: Whether the arc tangent is computed in float32, the only precision in ONNX's runtime.
    """

    def __init__(self, spread: Any, score: str, arrays: dict[str, Tensor]) -> None:
        super().__init__()
        self.score, self.float32_arctan = score, False
        own = _copied({name: value for name, value in vars(spread).items() if isinstance(value, Tensor)})
        self._spread_of, self._plain = type(spread), {name: v for name, v in vars(spread).items() if name not in own}
        like = next(iter(own.values()))
        for name in {"location", "scale", "statistics"} & arrays.keys():
            arrays[name] = arrays[name].double()
        self.n = len(arrays.get("statistics", ()))
        if self.n and "counts" in arrays:
            of_class = arrays["statistics"].split(arrays["counts"].tolist())
            arrays["rows"] = pad_sequence(list(of_class), batch_first=True, padding_value=torch.inf)
        elif self.n:
            # The last entry of the last row is infinite, so that there is always a row to search.
            width = math.isqrt(self.n) + 1
            rows = arrays["statistics"].new_full(((self.n // width + 1) * width,), torch.inf)
            rows[: self.n] = arrays["statistics"]
            arrays["rows"] = rows.view(-1, width)
        self.tolerance = float(arrays.get("rounding", 0.0))
        # Stored as tensors, because ONNX would first round plain numbers to float32.
        limits = torch.finfo(torch.float64)
        arrays["tiny"] = like.new_tensor(limits.tiny, dtype=torch.float64)
        arrays["largest"] = like.new_tensor(limits.max, dtype=torch.float64)
        for name in arrays.keys() - {"statistics"}:
            self.register_buffer(name, arrays[name])
        for name, value in own.items():
            self.register_buffer(f"spread_{name}", value)

    @property
    def _arrays(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())

    def _under(self, start: str) -> dict[str, Tensor]:
        """Return the arrays whose names begin with ``start``, by the rest of their names."""
        return {name.removeprefix(start): a for name, a in self._arrays.items() if name.startswith(start)}

    @full_precision
    def forward(self, z: Tensor, phi: Tensor) -> tuple[Tensor, ...]:
        """Score raw outputs (B, D) of features (B, F)."""
        a = self._arrays
        wide = z.double()
        size = torch.maximum(wide.abs().amax(1), a["tiny"])
        scaled = wide / size.unsqueeze(1)
        length = scaled.square().sum(1).sqrt()
        total, radial = self._across(phi, scaled / torch.maximum(length, a["tiny"]).unsqueeze(1))
        # A zero output has no direction.
        divisor = torch.where(length > 0, length, torch.nan)
        mu, norm = (scaled / divisor.unsqueeze(1)).to(z.dtype), divisor * size
        # Divided twice, because the square of a tiny or huge norm underflows or overflows.
        tangential = (total - radial).clamp(min=0) / norm / norm
        between = None
        if "centres" in a:
            between = between_classes(nearest_ratio(mu, a["centres"]), a["typical_ratio"].to(mu.dtype))
        angle = turning_angle(tangential, norm, a.get("typical_norm"), between, self._arctan).to(z.dtype)
        out = (mu, concentration_of_variance(tangential.to(z.dtype), z.shape[1]), angle)
        if not self.n:
            return out
        rounding = z.shape[1] * torch.finfo(z.dtype).eps
        spread = torch.maximum(total - radial, rounding * total)
        log_norm = torch.maximum(self._log(length) + size.log(), a["tiny"].log())
        # A row that is not finite is not a known input.
        known = size + spread <= a["largest"]
        classes = None
        if "counts" in a:
            classes = (mu @ a["centres"].T).argmax(1)
        score = self._novelty(self._log(spread), log_norm, phi, wide) if self.score == NOVELTY else angle.double()
        if classes is not None or self.score != NOVELTY:
            known = known & (length > 0)
        return (*out, torch.where(known, self._p_value(score, classes), torch.nan))

    def _across(self, phi: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output covariances' trace, and their variance along unit vectors (B, D); float64, (B,)."""
        own = self._under("spread_")
        if self._spread_of is not DenseAtFeatures:
            return spread_at(self._spread_of(**own, **self._plain), phi).across(u)
        # torch.export takes the batch of the library's einsum for a constant.
        covariance, wide, dim, width = own["covariance"], phi.double(), u.shape[1], phi.shape[1]
        weights, n = (u.unsqueeze(2) * wide.unsqueeze(1)).flatten(1), dim * width
        of_inputs = covariance[:n, :n].view(dim, width, dim, width).diagonal(dim1=0, dim2=2).sum(2)
        total = ((wide @ of_inputs) * wide).sum(1)
        if len(covariance) > n:
            weights = torch.cat([weights, u], dim=1)
            mixed = covariance[:n, n:].view(dim, width, dim).diagonal(dim1=0, dim2=2).sum(1)
            total = total + 2 * (wide @ mixed) + covariance[n:, n:].diagonal().sum()
        return total, ((weights @ covariance) * weights).sum(1)

    def _novelty(self, spread: Tensor, length: Tensor, phi: Tensor, z: Tensor) -> Tensor:
        """Return the novelty from the logarithms of spread and norm; see :mod:`.known`."""
        units, norm = unit_features(phi)
        features = self._log(norm)
        components = torch.stack([spread - features, spread - 2 * features, -length], dim=1)
        if known := self._under("known_"):
            components = torch.cat([components, TrainingGaussians(**known)(units, z)], dim=1)
        return _combine((components - self._arrays["location"]) / self._arrays["scale"])

    def _p_value(self, score: Tensor, classes: Tensor | None) -> Tensor:
        """Return the conformal p-values of scores (B,)."""
        a = self._arrays
        least = score.unsqueeze(1) - self.tolerance
        if classes is not None:
            n = a["counts"][classes]
            return (1 + n - (a["rows"][classes] < least).sum(1)).double() / (n + 1)
        row = (a["rows"][:, -1] < least).sum(1)
        below = row * a["rows"].shape[1] + (a["rows"][row] < least).sum(1)
        return (1 + self.n - below).double() / (self.n + 1)

    def _log(self, value: Tensor) -> Tensor:
        a = self._arrays
        return torch.minimum(torch.maximum(value, a["tiny"]), a["largest"]).log()

    def _arctan(self, angle: Tensor) -> Tensor:
        return angle.float().arctan().to(angle.dtype) if self.float32_arctan else angle.arctan()


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Refuse an encoder for an error inside the context, named at ``{}`` in the message."""
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
    """Return :func:`.known.combine` of components (B, K), with operations of ONNX."""
    tails = torch.cat([standardised, -standardised[:, :1]], dim=1)
    z = tails.abs()
    t = 1 / (1 + z / 8**0.5)
    series = torch.zeros_like(t)
    for coefficient in reversed(_TAIL):
        series = series * t + coefficient
    # Logarithm of the tail probability beyond |z|.
    log_p = t.log() + series - z.square() / 2 - math.log(2)
    both = torch.where(tails > 0, -log_p, -torch.log1p(-log_p.exp()))
    return (2 * both.sum(1)).sqrt()
