"""The parameter curvature of one batch, for researchers who want it without laplace-torch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.mc_samples import check_mc_samples, make_sampler, term_of
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.losses.choice import DISTANCE, MARGIN, NEGATIVE_WEIGHT, NORMALIZATION, PD_FIX, choose_loss
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, check_inputs, input_length, tokenized
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.loader import check_one_encoder
from contrastive_curvature.network.module import SubnetworkPullback
from contrastive_curvature.network.pullback import KronFactors, Pullback
from contrastive_curvature.options import Distance, Normalization, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.structures import structure_of
from contrastive_curvature.structures.finite import check_finite


def ggn(
    model: nn.Module,
    x: Inputs,
    labels: Tensor | None = None,
    *,
    pairs: Pairs | None = None,
    loss: CosineLoss | None = None,
    distance: Distance | str = DISTANCE,
    pd_fix: PDFix | str = PD_FIX,
    margin: float | None = MARGIN,
    negative_weight: float = NEGATIVE_WEIGHT,
    normalization: Normalization | str = NORMALIZATION,
    structure: str = "diag",
    subset_of_weights: str | Tensor = "all",
    clamp: bool = True,
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | KronFactors:
    r"""Generalised Gauss-Newton of a loss of cosines, ``J^T H J``, over all pairs of a batch.

    ``J`` is the Jacobian of the raw outputs (before any l2-normalisation) and ``H`` the output Hessian
    (:func:`~contrastive_curvature.output_hessian`). ``diag`` and ``full`` are exact for every distance and fix;
    ``kron`` is the K-FAC approximation, which treats each point separately and leaves cross terms out. The model runs
    in evaluation mode and does not change; a model in half precision is computed in float32.

    Args:
        model: Any module that maps ``x`` to (N, D); an l2-normalisation module at its end is skipped. Each call
            analyses it first, a fifth of the time for a small network: for many calls, pass one
            :class:`contrastive_curvature.Encoder` of it. Its weights may change between the calls; if anything else
            did, it is refused.
        x: A batch of N points, a tensor or a mapping of tensors.
        labels: Integer class labels, shape (N,).
        pairs: Instead of labels: index tuples ``(a, p, n)`` or ``(a1, p, a2, n)``, boolean masks
            ``(positive, negative)``, or a callable on targets that are passed as ``labels``; or any other form that the
            loss accepts.
        loss: A loss (:mod:`contrastive_curvature.losses`); ``None``: the contrastive loss with ``margin``,
            ``negative_weight`` and ``normalization``.
        distance: ``"arccos"`` (normalisation in the loss) or ``"euclidean"`` (in the network, linearised).
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.
        margin: Distance of unit embeddings below which a negative counts, in (0, 2], or ``None`` for all.
        negative_weight: ``w_n`` of the paper's Eq. 10, in [0, 1].
        normalization: See :class:`~contrastive_curvature.options.Normalization`.
        structure: ``"diag"``, ``"full"`` or ``"kron"``.
        subset_of_weights: ``"all"`` trainable parameters, ``"last_layer"``, or an integer tensor of indices into the
            flattened trainable parameters (a subnetwork).
        clamp: Whether to clamp the sum at zero: the entries of the diagonal, or the eigenvalues of a matrix or factor.
            ``False`` returns the raw sum.
        mc_samples: ``None``: exact, with a backward pass for every output. K: an unbiased estimate of ``diag`` or
            ``kron`` from K backward passes with random cotangents (2 K if the Hessian is indefinite), for networks with
            many outputs. Refused for coupled fixes and for the last layer, whose closed form is cheaper.
        generator: Source of randomness of ``mc_samples``; ``None`` takes the seed 0.

    Returns:
        ``diag``: shape (P,), in the order of ``model.parameters()``. ``full``: (P, P). ``kron``: a list of ``[G, A]``
        for every matrix and ``[block]`` for every vector, in the same order. Frozen parameters are left out, except
        with ``"last_layer"``, which always uses the whole layer.

    Raises:
        InputError: An argument is malformed, or the curvature is not finite; the message names argument or layer.
        UnsupportedError: The encoder normalises inside ``forward``, has no last linear layer, or the structure has no
            factors for the fix.
    """
    chosen = choose_loss(
        loss,
        margin=margin,
        negative_weight=negative_weight,
        normalization=normalization,
        distance=distance,
        pd_fix=pd_fix,
    )
    validate.flag("clamp", clamp)
    kind = structure_of(structure, known=("diag", "full", "kron"))
    validate.generator(generator, torch.device("cpu"))
    check_mc_samples(mc_samples, chosen.coupled, kind)
    sampler = make_sampler(mc_samples, generator)
    if not isinstance(model, nn.Module):
        raise InputTypeError("model", "a torch.nn.Module", f"a {type(model).__name__}")
    check_one_encoder(model)
    if isinstance(model, Encoder):
        model.require_unchanged()
    x = check_inputs(tokenized(model, x))
    model, x = _lift_half(model, x)
    with evaluation_mode(model), torch.no_grad():
        encoder = model if isinstance(model, Encoder) else Encoder(model)
        encoder.analyse(x)
        check_encoder(encoder, chosen)
        pullback = make_pullback(encoder, subset_of_weights)
        # Checked before the batch runs, because errors in labels or pairs do not depend on the outputs.
        like = next(encoder.parameters())
        relation = chosen.relate(like.new_zeros(input_length(x), encoder.dim), labels, pairs)
        z, context = pullback.forward(x)
        hessian = chosen.hessian_at(check_outputs(z, "model(x)"), relation)
        curvature = term_of(kind, pullback, context, hessian, sampler)
        check_finite(curvature.plain(), pullback, "this batch")
        plain: Tensor | KronFactors = (curvature.positive() if clamp else curvature).plain()
    return plain


def check_encoder(encoder: Encoder, loss: CosineLoss) -> None:
    """Refuse a loss that an analysed encoder cannot support."""
    if encoder.normalized and loss.distance is Distance.ARCCOS:
        raise UnsupportedError(
            "distance='arccos': the outputs of the encoder are already normalised, and the module that does it is "
            "more than a rescaling of its input, so the raw outputs cannot be reached. End the encoder in a plain "
            "contrastive_curvature.L2Norm(), or use distance='euclidean', which linearises the normalisation."
        )


def check_trainable(encoder: Encoder) -> None:
    """Refuse an encoder without trainable parameters."""
    if not any(p.requires_grad for p in encoder.parameters()):
        raise InputError("model", "at least one parameter that requires a gradient", "none")


def make_pullback(encoder: Encoder, subset_of_weights: str | Tensor) -> Pullback:
    """Return the pullback to the chosen parameters."""
    wanted = "'all', 'last_layer' or an integer tensor of indices into the flattened trainable parameters"
    if isinstance(subset_of_weights, Tensor):
        total = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
        indices = check_indices(subset_of_weights, total, "subset_of_weights")
        return SubnetworkPullback.of_touched(encoder, indices)
    if not isinstance(subset_of_weights, str):
        raise InputTypeError("subset_of_weights", wanted, f"a {type(subset_of_weights).__name__}")
    if subset_of_weights == "last_layer":
        return LastLayerPullback(encoder)
    if subset_of_weights == "all":
        check_trainable(encoder)
        return LastLayerPullback(encoder) if _is_last_layer_alone(encoder) else LayerwisePullback(encoder)
    raise InputError("subset_of_weights", wanted, subset_of_weights)


def check_indices(indices: object, total: int, argument: str) -> Tensor:
    """Return the indices; refuse all but distinct entries of the ``total`` flattened trainable parameters."""
    if not isinstance(indices, Tensor):
        raise InputTypeError(argument, "an integer tensor of indices", f"a {type(indices).__name__}")
    whole = indices.dtype != torch.bool and not (indices.is_floating_point() or indices.is_complex())
    if not whole or indices.layout != torch.strided or indices.ndim != 1 or not indices.numel():
        got = f"dtype {indices.dtype}, shape {tuple(indices.shape)}"
        raise InputError(argument, "an integer tensor of indices, shape (K,), not empty", got)
    if int(indices.min()) < 0 or int(indices.max()) >= total or indices.unique().numel() != indices.numel():
        got = f"{int(indices.min())}..{int(indices.max())}, {indices.unique().numel()} distinct of {indices.numel()}"
        raise InputError(argument, f"distinct indices in 0..{total - 1}", got)
    return indices


def _is_last_layer_alone(encoder: Encoder) -> bool:
    """Return whether only the last layer is trainable, which has closed forms."""
    try:
        layer = encoder.require_last_layer()
    except UnsupportedError:
        return False
    own = list(layer.parameters())
    trainable = [p for p in encoder.parameters() if p.requires_grad]
    return len(own) == len(trainable) and all(a is b for a, b in zip(own, trainable, strict=True))


def _lift_half(model: nn.Module, x: Inputs) -> tuple[nn.Module, Inputs]:
    halves = (torch.float16, torch.bfloat16)
    if any(p.dtype in halves for p in model.parameters()):
        model = copy.deepcopy(model).float()
    if isinstance(x, Tensor):
        return model, x.float() if x.dtype in halves else x
    return model, {k: v.float() if isinstance(v, Tensor) and v.dtype in halves else v for k, v in x.items()}
