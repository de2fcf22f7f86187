"""The Hessian calculators of the paper's released code, in node form and corrected.

Their interface is the same (``wrt``, ``shape``, ``speed``, ``method``; ``tuple_indices`` of a miner);
``docs/migration.md`` explains the differences. One pair counts once: ``1/2 |u_i - u_j|^2`` for a positive pair, and
minus this for a negative pair. In terms of this library: ``normalization="sum"`` times 2, because
``negative_weight=0.5`` halves both kinds.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from stochman import nnj
from torch import Tensor, nn

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import L2Norm, check_outputs
from contrastive_curvature.hosts.stochman.convert import to_nnj
from contrastive_curvature.hosts.stochman.rules import RefusedError
from contrastive_curvature.hosts.stochman.sweep import StochManPullback, Sweep, feature_maps, owners
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.options import Distance, PDFix

_NO_OPS = (nnj.Identity, nnj.Flatten, nnj.Reshape)


class HessianCalculator:
    """Base class of both calculators.

    Args:
        wrt: ``"weight"``: the trainable parameters. ``"input"``: the inputs of every point.
        shape: ``"diagonal"``, ``"block"`` (by layer, or by point) or ``"full"``.
        speed: ``"slow"``: exact, by the library's code for any network. ``"half"``: exact; a diagonal of the weights
            uses one backward sweep of the matrix between layers with StochMan's rules, if these are exact for every
            layer and the matrix is small (``docs/migration.md``); all other results as with ``"slow"``. ``"fast"``: an
            approximation that passes only the diagonal of this matrix from layer to layer, with StochMan's rules alone.
        method: ``"fix"`` (or ``"fixed"``), ``"pos"`` (``"positive"``), ``"full"``, or ``"psd"``; see
            :class:`~contrastive_curvature.options.PDFix`.
        margin: Distance of unit embeddings below which a negative pair counts; ``None``: every pair counts, as in the
            released code.
        negative_weight: ``w_n`` of Eq. 10; positives weigh ``2 (1 - w_n)``, negatives ``2 w_n``.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: ``"fast"`` for the ``"full"`` shape, or for the weights with a method that couples points.

    Attributes:
        loss: The pair loss that the curvature belongs to, up to the factor 2.
    """

    distance: ClassVar[Distance]

    def __init__(
        self,
        wrt: str = "weight",
        shape: str = "diagonal",
        speed: str = "half",
        method: str = "fix",
        *,
        margin: float | None = None,
        negative_weight: float = 0.5,
    ) -> None:
        validate.choice("wrt", wrt, ("weight", "input"))
        validate.choice("shape", shape, ("diagonal", "block", "full"))
        validate.choice("speed", speed, ("slow", "half", "fast"))
        try:
            self.loss = ContrastiveLoss(margin, negative_weight, "sum", distance=self.distance, pd_fix=method)
        except InputError as error:
            raise type(error)(str(error).replace("pd_fix:", "method:", 1)) from None
        if speed == "fast" and shape == "full":
            raise UnsupportedError(
                "speed='fast', shape='full': diagonals between layers have no cross-layer blocks. Use speed='half'."
            )
        if speed == "fast" and wrt == "weight" and self.loss.pd_fix.coupled:
            raise UnsupportedError(
                f"speed='fast', method={method!r}: the approximation of cross terms needs a backward sweep for every "
                "pair. Use speed='half', which is exact and needs one for every point."
            )
        self.wrt = wrt
        self.shape = shape
        self.speed = speed
        self.method = method

    def compute_loss(self, x: Tensor, nnj_module: nn.Module, tuple_indices: tuple[Tensor, ...]) -> Tensor:
        """Sum the losses of the listed pairs.

        Args:
            x: N points (N, *input).
            nnj_module: The network, of torch's or StochMan's layers; see
                :func:`~contrastive_curvature.hosts.stochman.to_nnj`.
            tuple_indices: ``(a, p, n)`` or ``(a1, p, a2, n)``, each (K,); a point's pair with itself is left out.

        Returns:
            A differentiable scalar. The method ``"pos"`` leaves the negatives out.

        Raises:
            InputError: Indices or outputs are malformed.
            UnsupportedError: StochMan has no such layer.
        """
        return self._loss(self._raw(nnj_module, x)(x), tuple_indices)

    def compute_gradient(self, x: Tensor, nnj_module: nn.Module, tuple_indices: tuple[Tensor, ...]) -> Tensor:
        """Return the gradient of :meth:`compute_loss`.

        Returns:
            Shape (P,) in the order of the trainable parameters, or (N, *input). Arguments and errors as in
            :meth:`compute_loss`.
        """
        network = self._raw(nnj_module, x)
        with torch.enable_grad():
            x = x.detach().requires_grad_(self.wrt == "input")
            loss = self._loss(network(x), tuple_indices)
            variables = [x] if self.wrt == "input" else [p for p in network.parameters() if p.requires_grad]
            if not loss.requires_grad or not variables:
                gradients: list[Tensor | None] = [None for _ in variables]
            else:
                gradients = list(torch.autograd.grad(loss, variables, allow_unused=True))
        filled = [torch.zeros_like(v) if g is None else g for v, g in zip(variables, gradients, strict=True)]
        return filled[0] if self.wrt == "input" else torch.cat([x.new_zeros(0), *(g.flatten() for g in filled)])

    @torch.no_grad()
    def compute_hessian(
        self, x: Tensor, nnj_module: nn.Module, tuple_indices: tuple[Tensor, ...]
    ) -> Tensor | list[Tensor]:
        """Return the unclamped Gauss-Newton of the listed pairs; arguments and errors as in :meth:`compute_loss`.

        Returns:
            ``wrt="weight"``, for P trainable parameters: ``"diagonal"`` (P,), ``"block"`` a list with (P_l, P_l) for
            every layer that has trainable parameters, weight and bias together, ``"full"`` (P, P).
            ``wrt="input"``, for N points of I numbers: ``"diagonal"`` (N, *input), ``"block"`` (N, I, I), ``"full"``
            (N I, N I), whose blocks off the diagonal are zero unless the method couples points.
        """
        network = self._raw(nnj_module, x)
        hessian = self.loss.output_hessian(check_outputs(network(x), "nnj_module(x)"), pairs=tuple_indices)
        curvature = (_input_hessian if self.wrt == "input" else _weight_hessian)(
            network, x, hessian, self.shape, self.speed
        )
        return [2 * block for block in curvature] if isinstance(curvature, list) else 2 * curvature

    def _raw(self, nnj_module: nn.Module, x: Tensor) -> nnj.Sequential:
        """Return the network without the normalisation at its end, which the output Hessian accounts for."""
        network = to_nnj(nnj_module)
        end = _normalized_from(network, x)
        if end is not None:
            return network[:end]
        if self.distance is Distance.EUCLIDEAN:
            raise UnsupportedError(
                "ContrastiveHessianCalculator: the network does not end in L2Norm, and this library knows only the "
                "curvature of embeddings on the unit sphere. Append contrastive_curvature.L2Norm(), or use "
                "ArccosHessianCalculator, which normalises inside the loss."
            )
        return network

    def _loss(self, z: Tensor, tuple_indices: tuple[Tensor, ...]) -> Tensor:
        loss, factor = self.loss, 2.0
        if loss.pd_fix is PDFix.POSITIVE:
            factor = 2 * (1 - loss.negative_weight)
            loss = ContrastiveLoss(loss.margin, 0.0, loss.normalization)
        return factor * loss(z, pairs=tuple_indices)


class ContrastiveHessianCalculator(HessianCalculator):
    """Contrastive loss of a network that ends in :class:`~contrastive_curvature.L2Norm`, which is linearised too.

    See :class:`HessianCalculator`; the distance is ``"euclidean"`` (paper, appendix F.1).
    """

    distance = Distance.EUCLIDEAN


class ArccosHessianCalculator(HessianCalculator):
    """Contrastive loss with the normalisation inside the loss; a final ``L2Norm`` counts as part of the loss.

    See :class:`HessianCalculator`; the distance is ``"arccos"`` (paper, appendix F.2).
    """

    distance = Distance.ARCCOS


def _normalized_from(network: nnj.Sequential, x: Tensor) -> int | None:
    """Return the index from which all layers only normalise or do nothing; ``None`` without such layers."""
    with torch.no_grad():
        shapes = [value.shape for value in feature_maps(list(network), x[:1])]
    first = None
    for k in reversed(range(len(network))):
        # Reshaping to the same shape does nothing either.
        if shapes[k] != shapes[k + 1] or not isinstance(network[k], (L2Norm, *_NO_OPS)):
            break
        if isinstance(network[k], L2Norm):
            first = k
    return first


def _weight_hessian(
    network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, speed: str
) -> Tensor | list[Tensor]:
    """Return ``J^T H J`` for the trainable parameters; see :meth:`HessianCalculator.compute_hessian`."""
    wanted = [k for k, layer in enumerate(network) if any(p.requires_grad for p in layer.parameters())]
    if (shape == "block" or speed == "fast") and not set(wanted) <= set(owners(network)):
        raise UnsupportedError(
            f"speed={speed!r}, shape={shape!r}: a parameter is shared between layers, and belongs to "
            "the block of none. Use speed='half' with shape='diagonal' or 'full'."
        )
    if not len(x) or not wanted:
        total = sum(p.numel() for p in network.parameters() if p.requires_grad)
        sizes = [sum(p.numel() for p in network[k].parameters() if p.requires_grad) for k in wanted]
        if shape == "block":
            return [x.new_zeros(size, size) for size in sizes]
        return x.new_zeros(total) if shape == "diagonal" else x.new_zeros(total, total)
    if speed != "fast" and shape != "block":
        kind = LayerwisePullback if speed == "slow" else StochManPullback
        pullback = kind(Encoder(network, x[:8]))
        # Run the network, because the pullback needs its widths to choose the size of tiles.
        context = pullback.forward(x)[1]
        coupled = pullback.coupled_diag if shape == "diagonal" else pullback.coupled_full
        return coupled(context, hessian)
    if speed == "fast":
        by_layer = _sweep(network, x, hessian, shape, wanted)
        parts = [by_layer[k] for k in wanted]
    else:
        parts = [_block(network, k, x, hessian) for k in wanted]
    return torch.cat(parts) if shape == "diagonal" else parts


def _block(network: nn.Sequential, k: int, x: Tensor, hessian: OutputHessian) -> Tensor:
    """Return the matrix of the trainable parameters of one layer, by the code for any network."""
    encoder, own = Encoder(network, x[:8]), {id(p) for p in network[k].parameters()}
    names = {name for name, p in encoder.named_parameters() if id(p) in own and p.requires_grad}
    return ModulePullback(encoder, only=names).coupled_full(x, hessian)


def _input_hessian(network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, speed: str) -> Tensor:
    """Return ``J^T H J`` for the inputs of every point.

    Cross terms of coupled points lie off the diagonal blocks, so only ``"full"`` contains them.
    """
    if shape == "full":
        j = _input_jacobian(network, x)
        n, dim, size = j.shape
        curved = torch.einsum("iajb,jbl->iajl", hessian.dense().view(n, dim, n, dim), j)
        return torch.einsum("iak,iajl->ikjl", j, curved).reshape(n * size, n * size)
    if speed == "fast" and len(x) and len(network):
        blocks = _sweep(network, x, hessian, shape, [-1])[-1]
        return blocks.view_as(x) if shape == "diagonal" else blocks
    j = _input_jacobian(network, x)
    curved = hessian.blocks.matmul(j)
    return (j * curved).sum(1).view_as(x) if shape == "diagonal" else j.mT @ curved


def _sweep(
    network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, wanted: list[int]
) -> dict[int, Tensor]:
    """Return the results of StochMan's rules with diagonals between layers (:meth:`Sweep.run`)."""
    blocks = hessian.blocks
    # For this distance the released code normalises in the network, so its sweep has already dropped off-diagonals
    # there.
    diagonal = hessian.distance is Distance.EUCLIDEAN
    try:
        sweep = Sweep(list(network), x, wanted, shape=shape, approximate=True, diagonal=diagonal)
    except RefusedError as error:
        raise UnsupportedError(f"speed='fast': {error}. Use speed='half', which takes any layer.") from None
    return sweep.run(x, lambda rows: blocks[rows].diagonal() if diagonal else blocks[rows].dense())


def _input_jacobian(network: nn.Sequential, x: Tensor) -> Tensor:
    """Return the Jacobian by autograd, shape (N, D, I)."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        z = network(x)
        if not z.requires_grad:
            return x.new_zeros(*z.shape, x.shape[1:].numel())
        rows = [torch.autograd.grad(z[:, k].sum(), x, retain_graph=True)[0] for k in range(z.shape[1])]
    return torch.stack(rows, dim=1).flatten(2)
