"""What the Hessian calculators compute at the outputs' Hessian: with respect to weights, or to inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hosts.stochman.pullback import StochManPullback, owners
from contrastive_curvature.hosts.stochman.sweep import Sweep
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.options import Distance, Structure

__all__ = ["input_hessian", "weight_hessian"]


def weight_hessian(
    network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, speed: str
) -> Tensor | list[Tensor]:
    """``J^T H J`` for the trainable parameters; see :meth:`HessianCalculator.compute_hessian`."""
    wanted = [k for k, layer in enumerate(network) if any(p.requires_grad for p in layer.parameters())]
    if (shape == "block" or speed == "fast") and not set(wanted) <= set(owners(network)):
        msg = (
            f"speed={speed!r}, shape={shape!r}: a parameter is shared between layers, and belongs to "
            "the block of none. Use speed='half' with shape='diagonal' or 'full'."
        )
        raise UnsupportedError(msg)
    if not len(x) or not wanted:
        total = sum(p.numel() for p in network.parameters() if p.requires_grad)
        sizes = [sum(p.numel() for p in network[k].parameters() if p.requires_grad) for k in wanted]
        if shape == "block":
            return [x.new_zeros(size, size) for size in sizes]
        return x.new_zeros(total) if shape == "diagonal" else x.new_zeros(total, total)
    if speed != "fast" and shape != "block":
        kind = LayerwisePullback if speed == "slow" else StochManPullback
        structure = Structure.DIAG if shape == "diagonal" else Structure.FULL
        pullback = kind(Encoder(network, x[:8]))
        # The run tells how many points a tile of cross terms may have.
        return pullback.curvature(pullback.forward(x)[1], hessian, structure)
    # Cross terms need the Jacobians of all points, which have the blocks for nothing.
    sweeps = speed == "fast" or (speed == "half" and not hessian.coupled)
    found = _sweep(network, x, hessian, shape, speed, wanted)[0] if sweeps else {}
    for k, value in found.items():
        flags = [torch.full((p.numel(),), p.requires_grad, device=p.device) for p in network[k].parameters()]
        chosen = torch.cat(flags)
        found[k] = value[chosen] if shape == "diagonal" else value[chosen][:, chosen]
    parts = [found[k] if k in found else _block(network, k, x, hessian) for k in wanted]
    return torch.cat(parts) if shape == "diagonal" else parts


def _block(network: nn.Sequential, k: int, x: Tensor, hessian: OutputHessian) -> Tensor:
    """The matrix of the trainable parameters of one layer, by the code for any network."""
    encoder, mine = Encoder(network, x[:8]), {id(p) for p in network[k].parameters()}
    names = {name for name, p in encoder.named_parameters() if id(p) in mine and p.requires_grad}
    return ModulePullback(encoder, only=names).curvature(x, hessian, Structure.FULL)


def input_hessian(network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, speed: str) -> Tensor:
    """``J^T H J`` for the inputs of every point.

    Points that a fix couples meet off the diagonal blocks alone, so only ``"full"`` has their terms.
    """
    if shape == "full":
        j = _input_jacobian(network, x)
        n, dim, size = j.shape
        curved = torch.einsum("iajb,jbl->iajl", hessian.dense().view(n, dim, n, dim), j)
        return torch.einsum("iak,iajl->ikjl", j, curved).reshape(n * size, n * size)
    if speed != "slow" and len(x) and len(network):
        found = _sweep(network, x, hessian, shape, speed, [-1])[1]
        if found is not None:
            return found.view_as(x) if shape == "diagonal" else found
    j = _input_jacobian(network, x)
    curved = hessian.blocks.matmul(j)
    return (j * curved).sum(1).view_as(x) if shape == "diagonal" else j.mT @ curved


def _sweep(
    network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, speed: str, wanted: list[int]
) -> tuple[dict[int, Tensor], Tensor | None]:
    """What StochMan's rules give; see :meth:`Sweep.run`.

    Raises:
        UnsupportedError: ``"fast"``, and StochMan has no rule for a layer.
    """
    fast, blocks = speed == "fast", hessian.blocks
    # For this distance the released code normalises in the network: its sweep has cut off-diagonals there already.
    diagonal = fast and hessian.distance is Distance.EUCLIDEAN
    sweep = Sweep(list(network), x, wanted, shape=shape, approximate=fast, diagonal=diagonal)
    if fast and sweep.reasons:
        msg = f"speed='fast': {next(iter(sweep.reasons.values()))}. Use speed='half', which takes any layer."
        raise UnsupportedError(msg)
    return sweep.run(x, lambda rows: blocks[rows].diagonal() if diagonal else blocks[rows].dense())


def _input_jacobian(network: nn.Sequential, x: Tensor) -> Tensor:
    """By autograd, shape (N, D, I)."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        z = network(x)
        if not z.requires_grad:
            return x.new_zeros(*z.shape, x.shape[1:].numel())
        rows = [torch.autograd.grad(z[:, k].sum(), x, retain_graph=True)[0] for k in range(z.shape[1])]
    return torch.stack(rows, dim=1).flatten(2)
