"""curvlinops' own K-FAC and EK-FAC of a pair loss, for output Hessians that are a sum over points.

The host knows only three losses. With ``H_ii = S_i S_i^T``, the squared loss of ``x_i -> S_i^T f(x_i) / sqrt(2)`` has
the curvature ``J_i^T H_ii J_i``, so the host's factors for the squared loss are the factors of the pair loss.
Indefinite blocks have no real ``S_i``, and coupled Hessians have no ``S_i`` for each point.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from curvlinops import EKFACLinearOperator, FisherType, KFACLinearOperator, KFACType
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.api import check_encoder, check_trainable
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.losses.choice import choose_loss
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import KronFactors
from contrastive_curvature.network.threads import private_copy, users_hooks, watched
from contrastive_curvature.options import PDFix
from contrastive_curvature.pairs import Pairs


def contrastive_kfac(
    model: nn.Module, x: Inputs, labels: Tensor | None = None, *, pairs: Pairs | None = None, **options: Any
) -> KFACLinearOperator:
    """Return curvlinops' K-FAC of a pair loss over all pairs of a batch.

    Args:
        model: Any module that maps ``x`` to (N, D) with parameters only in ``nn.Linear`` and ``nn.Conv2d``; a copy of
            it runs in evaluation mode.
        x: A batch of N points.
        labels: Integer class labels, shape (N,).
        pairs: Pairs instead of labels, see :func:`contrastive_curvature.ggn`.
        **options: ``loss``, ``distance``, ``pd_fix``, ``margin``, ``negative_weight`` and ``normalization``, see
            :func:`contrastive_curvature.ggn`; without a loss, the default of ``pd_fix`` is ``"psd"``.

    Returns:
        The host's operator (K-FAC-expand, separate factors for weights and biases), on the trainable parameters in
        order.

    Raises:
        InputError: An argument is malformed.
        UnsupportedError: Blocks are indefinite, the fix couples points, or the host does not know a layer.
    """
    return _build(KFACLinearOperator, model, x, labels, pairs, options)


def contrastive_ekfac(
    model: nn.Module, x: Inputs, labels: Tensor | None = None, *, pairs: Pairs | None = None, **options: Any
) -> EKFACLinearOperator:
    """Return curvlinops' EK-FAC of a pair loss: K-FAC with the curvatures along its eigenvectors as eigenvalues.

    Args:
        model: See :func:`contrastive_kfac`.
        x: See :func:`contrastive_kfac`.
        labels: See :func:`contrastive_kfac`.
        pairs: See :func:`contrastive_kfac`.
        **options: See :func:`contrastive_kfac`.

    Returns:
        The host's operator.

    Raises:
        InputError: An argument is malformed.
        UnsupportedError: See :func:`contrastive_kfac`.
    """
    return _build(EKFACLinearOperator, model, x, labels, pairs, options)


class CurvlinopsPullback(LayerwisePullback):
    """All trainable parameters; Kronecker factors by curvlinops.

    Its operators give a diagonal or a matrix only column by column, so the shared code computes these.
    """

    def kron(self, context: Any, blocks: Blocks) -> KronFactors:
        """See :meth:`Pullback.kron`; the host computes it if its squared loss can represent the blocks."""
        if blocks.is_psd():
            few = self.slice_context(context, slice(0, 1))
            positions = _layer_positions(self.encoder, few)
            if _why_unknown(self.encoder, positions) is None:
                with torch.enable_grad():
                    z = self._running(few)
                    gradients = torch.autograd.grad(z.sum(), self.trainable, allow_unused=True)
                # The host's backward pass fails for an unused layer, which has no gradient.
                used = all(gradient is not None for gradient in gradients)
                own = _own_copy(self.encoder, few) if used else None
                if own is not None:
                    return _host_factors(own, context, blocks, positions)
        return super().kron(context, blocks)


def _layer_positions(encoder: Encoder, x: Inputs) -> dict[str, list[int]]:
    """Return a point's number of positions in each run of every linear or convolutional layer, by layer name."""
    named = {m: name for name, m in encoder.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    positions: dict[str, list[int]] = {name: [] for name in named.values()}

    def note(module: Any, _: tuple[Any, ...], out: Tensor) -> None:
        positions[named[module]].append(out[0].numel() // len(module.weight))

    with torch.no_grad(), watched(named, after=note):
        encoder(slice_inputs(x, slice(0, 1)))
    return positions


def _why_unknown(encoder: Encoder, positions: dict[str, list[int]]) -> str | None:
    """Return the reason why the host has no factors for an encoder, or ``None``."""
    for name, module in encoder.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        plain = type(module) is nn.Linear or (
            type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
        )
        shown = f"layer {name.removeprefix('model.')!r} ({type(module).__name__})"
        if own and (not plain or users_hooks(module, before_only=True)):
            return f"{shown} is unknown to curvlinops' K-FAC"
        if own and len(positions[name]) != 1:
            return f"{shown} runs {len(positions[name])} times, and curvlinops' K-FAC expects one run"
    return None


def _host_factors(encoder: Encoder, x: Inputs, blocks: Blocks, positions: dict[str, list[int]]) -> KronFactors:
    """Return the host's K-FAC in the format of :meth:`Pullback.kron`."""
    params = [p for p in encoder.parameters() if p.requires_grad]
    network = _Factored(encoder, blocks)
    weights = _operator(KFACLinearOperator, network, params, x)
    with torch.enable_grad():
        weights.compute_kronecker_factors()
    factors: list[list[Tensor]] = [[] for _ in params]
    for name, places in weights._mapping.items():
        if "weight" in places:
            a = weights._input_covariances[name] * input_length(x)
            factors[places["weight"]] = [weights._gradient_covariances[name], a]
        if "bias" in places and positions[name.removeprefix("encoder.")] == [1]:
            factors[places["bias"]] = [weights._gradient_covariances[name].clone()]
    vectors = [k for k, p in enumerate(params) if p.ndim == 1 and not factors[k]]
    if vectors:
        # A bias is the same at all positions of a convolution, so its block, summed over positions, is exact.
        biases = _operator(KFACLinearOperator, network, [params[k] for k in vectors], x, KFACType.REDUCE)
        with torch.enable_grad():
            biases.compute_kronecker_factors()
        for name, places in biases._mapping.items():
            factors[vectors[places["bias"]]] = [biases._gradient_covariances[name]]
    return [[f.detach() for f in group] for group in factors]


def _own_copy(encoder: Encoder, x: Inputs) -> Encoder | None:
    """Return a copy for the host's hooks; on the original they would see the forward passes of all threads.

    ``None`` if the encoder cannot be copied, or if the copy does not run the same layers.
    """
    try:
        copied = private_copy(encoder)
    except Exception:
        return None
    own = {module for module in copied.modules() if any(p.requires_grad for p in module.parameters(recurse=False))}
    ran: set[nn.Module] = set()
    with torch.no_grad(), watched(own, before=lambda module, *_: ran.add(module)):
        copied(x)
    return copied if ran == own else None


class _Factored(nn.Module):
    """``S_i^T f(x_i) / sqrt(2)`` for one fixed batch."""

    def __init__(self, encoder: Encoder, blocks: Blocks) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("factor", blocks.factor() / math.sqrt(2))

    def forward(self, x: Inputs) -> Tensor:
        return torch.einsum("ndk,nd->nk", self.factor, self.encoder(x))


def _build(
    kind: Any, model: nn.Module, x: Inputs, labels: Tensor | None, pairs: Pairs | None, options: dict[str, Any]
) -> Any:
    default = {} if options.get("loss") is not None else {"pd_fix": PDFix.PSD}
    loss = choose_loss(**{**default, **options})
    if loss.coupled:
        raise UnsupportedError(
            f"pd_fix={str(loss.pd_fix)!r}: it couples points, and curvlinops' K-FAC is one of sums over points. Use "
            "pd_fix='psd', or contrastive_curvature.ggn(..., structure='diag' or 'full'), which are exact."
        )
    with evaluation_mode(model), torch.no_grad():
        encoder = Encoder(model, slice_inputs(x, slice(0, 8)))
        check_encoder(encoder, loss)
        check_trainable(encoder)
        reason = _why_unknown(encoder, _layer_positions(encoder, x))
        if reason is not None:
            raise UnsupportedError(
                f"model: {reason}. Freeze the layer, or use contrastive_curvature.ggn(..., structure='kron')."
            )
        z = encoder(x)
        blocks = loss.output_hessian(z, labels, pairs=pairs).blocks
        network = _Factored(copy.deepcopy(encoder), blocks).eval()
    params = [p for p in network.parameters() if p.requires_grad]
    return _operator(kind, network, params, x)


def _operator(kind: Any, network: _Factored, params: list[nn.Parameter], x: Inputs, approx: Any = None) -> Any:
    like = params[0]
    target = torch.zeros(input_length(x), network.encoder.dim, dtype=like.dtype, device=like.device)
    return kind(
        network,
        nn.MSELoss(reduction="sum"),
        params,
        [(x, target)],
        check_deterministic=False,
        fisher_type=FisherType.TYPE2,
        kfac_approx=KFACType.EXPAND if approx is None else approx,
        separate_weight_and_bias=True,
        num_data=input_length(x),
        num_per_example_loss_terms=1,
        batch_size_fn=input_length,
    )
