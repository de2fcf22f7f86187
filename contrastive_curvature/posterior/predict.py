"""Predictions: the Gaussian over raw outputs of the linearised encoder, and encoders with sampled weights.

The linearised encoder has the covariance ``J_i Sigma J_i^T`` at input i, with the Jacobian ``J_i`` (D, P) of its raw
outputs. All Jacobians of a batch may be far larger than the encoder, so only a chunk of them exists at a time; a
diagonal ``Sigma`` may need no Jacobian (:meth:`~contrastive_curvature.network.pullback.Pullback.output_covariance`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_curvature.embedding.distribution import EmbeddingDistribution, InvalidRowsError, with_invalid_rows
from contrastive_curvature.embedding.known import Comparison, TrainingSample
from contrastive_curvature.embedding.spread import DenseSpread, Deviations, DiagonalSpread, Joint, Spread
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.network.digest import Watch, same_encoder
from contrastive_curvature.network.encoder import (
    Features,
    at_least_float32,
    evaluation_mode,
    flatten_parameters,
)
from contrastive_curvature.network.inputs import (
    Inputs,
    as_tensor,
    in_memory,
    input_length,
    move_inputs,
    slice_inputs,
    tokenized,
)
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS, Pullback
from contrastive_curvature.pairs.relation import chunks
from contrastive_curvature.posterior.value import Fitted, Posterior, spread_at

JOINT_ELEMENTS = 2**32
"""Numbers that ``joint=True`` may hold: the Jacobians of all inputs and their covariance; 16 GiB in float32."""

_POINTS_AT_ONCE = 16
"""Fewest inputs of one call of ``output_covariance``, which forms no Jacobian of all of them."""

_CHANGED = (
    "la(x): the weights of la.model have changed since the fit. The prediction joins the outputs of the new ones with "
    "the curvature at the old ones. Call la.fit again."
)

OfJacobians = Callable[[Tensor], Tensor]
"""Covariances (C, A, A) of outputs, from Jacobians (C, A, P)."""


@dataclass(frozen=True, eq=False)
class LinearizedEncoder:
    """An encoder and the weights that have a posterior: it runs batches, and knows its Jacobians.

    Attributes:
        model: The encoder; of a last-layer posterior an :class:`.Encoder`.
        backend: The curvature backend, which finds the raw outputs and their Jacobians.
        last_layer: Whether the weights are those of the last linear layer, which has closed forms.
        subnetwork: Places of the weights that have a posterior among all trainable ones, shape (K,); ``None`` for all.
        keeps_graph: Whether predictions keep a graph.
        watch: Fingerprint of the encoder.
    """

    model: Any
    backend: Any
    last_layer: bool
    subnetwork: Tensor | None
    keeps_graph: bool
    watch: Watch

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def fingerprint(self) -> Tensor:
        """Fingerprint of the weights, shape (4,)."""
        return self.watch(self.model)

    @property
    def parameters(self) -> list[Tensor]:
        """Tensors of the posterior, in order; the chosen entries of a subnetwork are one tensor."""
        every = parameters_of(self.model, self.last_layer)
        return every if self.subnetwork is None else [flatten_parameters(every)[self.subnetwork]]

    def fitted(self, result: DatasetCurvature) -> Fitted:
        """Return a curvature at the present weights with all that a posterior needs of the fit."""
        mean, norm = flatten_parameters(parameters_of(self.model, self.last_layer)), result.typical_norm
        known = norm is not None and math.isfinite(norm) and float(norm) > 0
        return Fitted(
            curvature=result.curvature,
            mean=mean if self.keeps_graph else mean.detach(),
            sizes=[p.numel() for p in self.parameters],
            rank=self.backend.options.rank,
            subnetwork=self.subnetwork,
            dim=self.backend.encoder({}).dim,
            n=result.n,
            loss=result.loss.detach(),
            cost=float(result.cost),
            typical_norm=float(norm) if known else None,  # type: ignore[arg-type]
            encoder=self.fingerprint,
            classes=result.classes,
            training_sample=self._sample(result),
            slopes=result.slopes,
        )

    def _sample(self, result: DatasetCurvature) -> TrainingSample | None:
        """Return the sample of training inputs; ``None`` without a sample over all the data."""
        # A fit of all weights draws features too if the encoder is one linear layer, but its statistic does not use
        # features.
        rows = result.features
        if rows is None or not len(rows) or not self.last_layer:
            return None
        layer = self.model.last_layer
        with torch.no_grad():
            outputs = nn.functional.linear(rows.columns["features"].to(layer.weight), layer.weight, layer.bias)
        return TrainingSample(replace(rows, columns={**rows.columns, "outputs": outputs}))

    def features(self, x: Any) -> Features:
        """Return raw outputs (B, D) and the inputs of the last layer (B, F)."""
        if isinstance(x, Features):
            return x
        x = moved_inputs(self.model, x, self.device)
        with evaluation_mode(self.model), torch.set_grad_enabled(self.keeps_graph):
            out: Features = self.model.forward_with_features(x)
        check_outputs(x, out.outputs, self.model.last_layer.out_features)
        return out

    def sampling_context(self, x: Inputs) -> Any:
        """Return the context of a batch on the encoder's device for :meth:`outputs_at`, once for all samples."""
        return self.features(x)[1] if self.last_layer else x

    def moved(self, x: Inputs, moves: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Return raw outputs (B, D) and how far moves of the weights, parts (s, P), move the linearised encoder's."""
        with evaluation_mode(self.model), torch.set_grad_enabled(self.keeps_graph):
            return ModulePullback(self.backend.encoder(x)).jvps(x, moves)

    def outputs_at(self, context: Any, theta: Tensor) -> Tensor:
        """Return raw outputs (S, B, D) of the encoder at weights (S, P)."""
        if self.last_layer:
            layer = self.model.last_layer
            weight = theta[:, : layer.weight.numel()].view(-1, *layer.weight.shape)
            out = torch.einsum("bf,sdf->sbd", context, weight)
            return out if layer.bias is None else out + theta[:, None, layer.weight.numel() :]
        with evaluation_mode(self.model), torch.set_grad_enabled(self.keeps_graph):
            pullback = ModulePullback(self.backend.encoder(context))
            return torch.stack([pullback.outputs_at(context, sample) for sample in theta])


def parameters_of(model: Any, last_layer: bool) -> list[Tensor]:
    """Return the tensors that samples of a posterior move: of the last layer, or all trainable ones."""
    if last_layer:
        return [at_least_float32(p) for p in model.last_layer.parameters()]
    return [p for p in model.parameters() if p.requires_grad]


def embedding(
    posterior: Posterior,
    read: LinearizedEncoder,
    x: Any,
    *,
    networks: int | None = None,
    n_samples: int | None = None,
    joint: bool = False,
    diagonal: bool = False,
    generator: torch.Generator | None = None,
    on_invalid: str = "error",
) -> EmbeddingDistribution:
    """Return the distribution of the embeddings of a batch.

    ``networks`` encoders with sampled weights, or ``n_samples`` samples of the linearised encoder, replace the closed
    form. For the other arguments see :meth:`.ContrastiveLaplace.__call__`.
    """
    fitted, encoder = posterior.fitted, read.fingerprint
    if not same_encoder(fitted.encoder, encoder):
        warnings.warn(_CHANGED, UserWarning, stacklevel=3)

    def finished(out: EmbeddingDistribution, features: Tensor | None) -> EmbeddingDistribution:
        if networks is None and n_samples is None and not joint and not diagonal:
            known = posterior.known(encoder)
            # A copy, because features may be the inputs themselves, which the user may change.
            kept = None if features is None or known.empty else features.detach().clone()
            out._compared = Comparison(known, kept)
        return out.relative_to(fitted.typical_norm, fitted.class_centres)

    def predict(rows: Any) -> EmbeddingDistribution:
        if networks is not None:
            samples = joint_samples(posterior, read, rows, networks, generator)
            return finished(EmbeddingDistribution.from_samples(samples), None)
        if n_samples is not None:
            return finished(_sampled_gaussian(posterior, read, rows, n_samples, generator), None)
        if joint or diagonal:
            return finished(gaussian(posterior, read, rows, joint=joint, diagonal=diagonal), None)
        return finished(*observe(posterior, read, rows))

    def of_no_rows() -> EmbeddingDistribution:
        mean = torch.empty(0, fitted.dim, dtype=fitted.mean.dtype, device=read.device)
        if networks is not None:
            return finished(EmbeddingDistribution.from_samples(mean.expand(networks, -1, -1)), None)
        if joint:
            return finished(_joint_distribution(mean, mean.new_empty(0, 0)), None)
        spread = DiagonalSpread(mean) if diagonal else DenseSpread(mean.new_empty(0, fitted.dim, fitted.dim))
        features = mean.new_empty(0, read.model.last_layer.in_features) if read.last_layer else None
        return finished(EmbeddingDistribution.trusted(mean, spread), features)

    if on_invalid == "error":
        return predict(x)
    return _with_nan_rows(predict, read_inputs(read.model, x), generator, of_no_rows)


def observe(posterior: Posterior, read: LinearizedEncoder, x: Any) -> tuple[EmbeddingDistribution, Tensor | None]:
    """Return the distribution of B embeddings, and their features (B, F) of a last layer."""
    if not read.last_layer:
        return gaussian(posterior, read, x), None
    outputs_and_features = read.features(x)
    return gaussian(posterior, read, outputs_and_features), outputs_and_features.features


def gaussian(
    posterior: Posterior, read: LinearizedEncoder, x: Any, *, joint: bool = False, diagonal: bool = False
) -> EmbeddingDistribution:
    """Return the Gaussian over raw outputs of the linearised encoder."""
    dim, width = posterior.fitted.dim, sum(posterior.fitted.sizes)

    def covariance_of_all(jacobians: Tensor) -> Tensor:
        return posterior.covariance(jacobians.flatten(0, 1))

    if read.last_layer:
        z, phi = read.features(x)
        if not joint:
            return _distribution(z, spread_at(posterior.at_features, phi), diagonal)
        _check_joint_size(len(z), z.shape[1], width)
        jacobians = read.backend.pullback({}).jacobians(phi, z)
        return _joint_distribution(z, covariance_of_all(jacobians))
    x = moved_inputs(read.model, x, read.device)
    if joint:
        _check_joint_size(input_length(x), dim, width)
    if read.keeps_graph:
        # The graph contains every Jacobian, so all of them must be kept.
        jacobians, z = read.backend.jacobians(x, enable_backprop=True)
        check_outputs(x, z, dim)
        if joint:
            return _joint_distribution(z, covariance_of_all(jacobians))
        return _distribution(z, DenseSpread(posterior.covariance(jacobians)), diagonal)
    with evaluation_mode(read.model):
        with torch.no_grad():
            pullback = read.backend.pullback(x)
            z, context = pullback.forward(x)
        check_outputs(x, z, dim)
        if joint:
            return _joint_distribution(z, covariance_of_all(_jacobians_of_all(pullback, context, z)))
        clamped = posterior.fitted.clamped
        of_weights = clamped.variances(*posterior.scales) if clamped.independent else None
        if of_weights is not None and of_weights.requires_grad:
            of_weights = None
        spread = _marginal_spread(pullback, context, z, posterior.covariance, of_weights, diagonal)
    return EmbeddingDistribution.trusted(z, DiagonalSpread(spread) if diagonal else DenseSpread(spread))


def _sampled_gaussian(
    posterior: Posterior, read: LinearizedEncoder, x: Any, count: int, generator: torch.Generator | None
) -> EmbeddingDistribution:
    """Return :func:`gaussian` with covariances from samples: no Jacobian is formed."""
    x = moved_inputs(read.model, x, read.device)
    # One network of ten million weights at a time, which keeps below what training holds of gradients and moments.
    steps = _steps(count, posterior.fitted.mean.numel(), 2**24)
    z, moved = read.moved(x, posterior.moves(steps, generator))
    check_outputs(x, z, posterior.fitted.dim)
    return EmbeddingDistribution.trusted(z, Deviations(moved.transpose(0, 1)))


def _steps(count: int, width: int, numbers: int = 2**26) -> list[int]:
    """Return how many of ``count`` samples of ``width`` weights to draw at a time."""
    step = max(1, numbers // width)
    return [min(step, count - start) for start in range(0, count, step)]


def joint_samples(
    posterior: Posterior,
    read: LinearizedEncoder,
    x: Any,
    count: int,
    generator: torch.Generator | None,
    *,
    linearized: bool = False,
) -> Tensor:
    """Return raw outputs (S, B, D) of S encoders with sampled weights."""
    x = moved_inputs(read.model, x, read.device)
    samples = samples_at(posterior, read, [read.sampling_context(x)], count, generator, linearized=linearized)
    check_outputs(x, samples, posterior.fitted.dim, sampled=True)
    return samples


def samples_at(
    posterior: Posterior,
    read: LinearizedEncoder,
    contexts: Sequence[Any],
    count: int,
    generator: torch.Generator | None,
    *,
    linearized: bool,
) -> Tensor:
    """Return raw outputs (S, N, D) of S encoders with sampled weights, at the contexts of one or more batches."""
    chunked = []
    for moves in posterior.moves(_steps(count, posterior.fitted.mean.numel()), generator):
        if linearized and not read.last_layer:  # a linear layer is its own linearisation
            outputs = [torch.add(*read.moved(context, [moves])) for context in contexts]
        else:
            theta = posterior.fitted.mean + moves
            outputs = [read.outputs_at(context, theta) for context in contexts]
        chunked.append(torch.cat(outputs, dim=1))
    return torch.cat(chunked)


def on_sphere(samples: Tensor) -> Tensor:
    """Return raw outputs (S, B, D) divided by their norms."""
    return normalize(samples.flatten(0, 1))[0].view_as(samples)


def read_inputs(model: Any, x: Any) -> Any:
    """Return a batch of inputs of all kinds of :func:`.in_memory`: a tensor, a mapping or a list of texts."""
    x = in_memory(x)
    return as_tensor(x, model) if isinstance(x, np.ndarray) else x


def moved_inputs(model: Any, x: Any, device: torch.device) -> Inputs:
    """Return inputs of all kinds of :func:`.in_memory` on a device; texts are tokenised first."""
    x = tokenized(model, read_inputs(model, x))
    if isinstance(x, (Tensor, Mapping)):
        return move_inputs(x, device)
    hint = "Pass the inputs of one batch, as in [la(x) for x, _ in loader]; la.predict(loader) takes all of them."
    raise InputTypeError("x", "a tensor, an array, a mapping of tensors or texts", f"a {type(x).__name__}", hint)


def check_outputs(x: Inputs, z: Tensor, dim: int, *, sampled: bool = False) -> None:
    """Refuse inputs without finite raw outputs (B, D), or (S, B, D) for samples; linear layers accept all shapes."""
    tensors = {"": x} if isinstance(x, Tensor) else {k: v for k, v in x.items() if isinstance(v, Tensor)}
    if z.ndim != 2 + sampled or z.shape[-1] != dim:
        shapes = ", ".join(f"{key} {tuple(t.shape)}".strip() for key, t in tensors.items())
        wanted = f"inputs like those of the fit, with outputs of shape (B, {dim})"
        got = f"shape {shapes}, with outputs of shape {tuple(z.shape[sampled:])}"
        hint = "One axis, the first, is that of the batch: x[None] of one point."
        raise InputError("x", wanted, got, hint)
    # The sum of huge finite numbers overflows, so then each number is checked.
    if math.isfinite(z.sum().item()) or bool((good := z.detach().isfinite()).all()):
        return
    bad = (~good.all(dim=-1)).reshape(-1, z.shape[-2]).any(0)
    finite = all(bool(t.isfinite().all()) for t in tensors.values())
    hint = "The inputs themselves are finite." if finite else "The inputs hold NaN or infinity themselves."
    hint += " Leave them out, or call la(x, on_invalid='nan'), which gives NaN for these rows alone."
    got = f"NaN or infinity in rows {bad.nonzero().flatten()[:5].tolist()}"
    raise InvalidRowsError(bad, "x", "inputs with finite outputs", got, hint)


def _distribution(z: Tensor, spread: Spread, diagonal: bool) -> EmbeddingDistribution:
    """Return the distribution with means (B, D) and a spread, or its variances alone."""
    return EmbeddingDistribution.trusted(z, DiagonalSpread(spread.variance) if diagonal else spread)


def _joint_distribution(z: Tensor, covariance: Tensor) -> EmbeddingDistribution:
    """Return the distribution with means (B, D) and a covariance (B D, B D) of all outputs together."""
    return EmbeddingDistribution.trusted(z, Joint(covariance.view(*z.shape, *z.shape)))


def _with_nan_rows(
    predict: Callable[[Any], EmbeddingDistribution],
    x: Any,
    generator: torch.Generator | None,
    nothing: Callable[[], EmbeddingDistribution],
) -> EmbeddingDistribution:
    """Return the prediction of a batch, with NaN for inputs without an embedding; other rows do not depend on them.

    ``nothing`` returns the prediction of an empty batch.
    """
    valid: Tensor | None = None
    while valid is None or bool(valid.any()):
        # Saved, so that the next attempt draws the same networks.
        source = generator or torch.default_generator
        before = source.get_state()
        try:
            prediction = predict(x if valid is None else _rows(x, valid.nonzero().flatten()))
            _refuse_zeros(prediction.raw_mean)
        except InvalidRowsError as error:
            source.set_state(before)
            bad = error.rows.cpu()
            valid = torch.ones_like(bad) if valid is None else valid
            valid[valid.nonzero().flatten()[bad]] = False
        else:
            return prediction if valid is None else with_invalid_rows(prediction, valid)
    return with_invalid_rows(nothing(), valid)


def _refuse_zeros(mean: Tensor) -> None:
    zero = (mean.detach() == 0).all(1)
    if bool(zero.any()):
        raise InvalidRowsError(zero, "outputs of zeros have no direction")


def _rows(x: Any, rows: Tensor) -> Any:
    """Return some points of a batch; for an encoder with a tokenizer the points may be texts."""
    return [x[row] for row in rows.tolist()] if isinstance(x, (list, tuple)) else slice_inputs(x, rows)


def _check_joint_size(n: int, dim: int, n_weights: int) -> None:
    """Refuse Jacobians (B, D, P) and a covariance between inputs of more than :data:`JOINT_ELEMENTS` numbers."""
    needed = n * dim * n_weights + (n * dim) ** 2
    if needed > JOINT_ELEMENTS:
        wanted = f"inputs whose Jacobians and covariance are at most {JOINT_ELEMENTS:,} numbers"
        shown = f"{n} inputs, {needed:,} numbers ({needed * 4 / 2**30:.0f} GiB in float32)"
        hint = "Use fewer inputs, or functional_samples(x, joint=True), which forms no Jacobian."
        raise InputError("joint=True", wanted, shown, hint)


def _marginal_spread(
    pullback: Pullback, context: Any, z: Tensor, of_jacobians: OfJacobians, of_weights: Tensor | None, diagonal: bool
) -> Tensor:
    """Return covariances (B, D, D) or variances (B, D) of the outputs; ``of_weights`` are weight variances (P,)."""
    axes, parts = _axes(z), []
    # The Jacobian rows of a single point may already fill a chunk.
    pieces = axes.split(max(1, JACOBIAN_ELEMENTS // max(1, pullback.width))) if diagonal else (axes,)
    for rows in _point_chunks(pullback, len(z), z.shape[1], 1 if of_weights is None else _POINTS_AT_ONCE):
        if of_weights is None:
            spreads = [of_jacobians(_jacobians(pullback, context, rows, piece)) for piece in pieces]
        else:
            with torch.no_grad():
                spreads = [pullback.output_covariance(pullback.slice_context(context, rows), of_weights)]
        parts.append(torch.cat([part.diagonal(dim1=1, dim2=2) for part in spreads], dim=1) if diagonal else spreads[0])
    return torch.cat(parts)


def _jacobians_of_all(pullback: Pullback, context: Any, z: Tensor) -> Tensor:
    """Return the Jacobians (B, D, P) of all points."""
    out, eye = z.new_empty(*z.shape, pullback.n_params), _axes(z)
    for rows in _point_chunks(pullback, *z.shape):
        out[rows] = _jacobians(pullback, context, rows, eye)
    return out


def _jacobians(pullback: Pullback, context: Any, rows: slice, axes: Tensor) -> Tensor:
    """Return rows of the Jacobians (C, A, P) of some points, for output axes (A, D)."""
    with torch.no_grad():
        return pullback.vjp(pullback.slice_context(context, rows), axes.expand(rows.stop - rows.start, -1, -1))


def _axes(z: Tensor) -> Tensor:
    return torch.eye(z.shape[1], dtype=z.dtype, device=z.device)


def _point_chunks(pullback: Pullback, n: int, dim: int, least: int = 1) -> list[slice]:
    """Return slices of n points whose Jacobians fit into one chunk; one empty slice if n = 0."""
    step = max(least, JACOBIAN_ELEMENTS // max(1, dim * pullback.width))
    return list(chunks(n, step)) or [slice(0, 0)]
