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
        return kind(Encoder(network, x[:8])).curvature(x, hessian, structure)
    found: dict[int, Tensor] = {}
    # Cross terms need the Jacobians of all points, which have the blocks for nothing.
    if speed == "fast" or (speed == "half" and not hessian.coupled):
        found = _by_layers(network, x, hessian, shape, speed, wanted)
    parts = [found[k] if k in found else _block(network, k, x, hessian) for k in wanted]
    return torch.cat(parts) if shape == "diagonal" else parts


def _by_layers(
    network: nn.Sequential, x: Tensor, hessian: OutputHessian, shape: str, speed: str, wanted: list[int]
) -> dict[int, Tensor]:
    """What StochMan's rules give for the trainable parameters of the layers, by their numbers."""
    approximate, diagonal = speed == "fast", _starts_with_diagonal(hessian, speed)
    sweep = Sweep(list(network), x, wanted, shape=shape, approximate=approximate, diagonal=diagonal)
    if approximate and sweep.reasons:
        _refuse_fast(sweep)
    found = sweep.run(x, lambda rows: _matrix(hessian, rows, diagonal))[0]
    for k, value in found.items():
        flags = [torch.full((p.numel(),), p.requires_grad, device=p.device) for p in network[k].parameters()]
        chosen = torch.cat(flags).nonzero().squeeze(1)
        found[k] = value[chosen] if shape == "diagonal" else value[chosen][:, chosen]
    return found


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
        approximate, diagonal = speed == "fast", _starts_with_diagonal(hessian, speed)
        sweep = Sweep(list(network), x, (-1,), shape=shape, approximate=approximate, diagonal=diagonal)
        if not sweep.reasons:
            found = sweep.run(x, lambda rows: _matrix(hessian, rows, diagonal))[1]
            return torch.as_tensor(found).view_as(x) if shape == "diagonal" else torch.as_tensor(found)
        if approximate:
            _refuse_fast(sweep)
    j = _input_jacobian(network, x)
    curved = hessian.blocks.matmul(j)
    return (j * curved).sum(1).view_as(x) if shape == "diagonal" else j.mT @ curved


def _refuse_fast(sweep: Sweep) -> None:
    msg = f"speed='fast': {next(iter(sweep.reasons.values()))}. Use speed='half', which takes any layer."
    raise UnsupportedError(msg)


def _starts_with_diagonal(hessian: OutputHessian, speed: str) -> bool:
    """Whether the sweep begins with a diagonal ``M`` at the raw outputs.

    The released code normalises in the network for this distance: its sweep has cut off-diagonals there already.
    """
    return speed == "fast" and hessian.distance is Distance.EUCLIDEAN


def _matrix(hessian: OutputHessian, rows: slice, diagonal: bool) -> Tensor:
    return hessian.blocks[rows].diagonal() if diagonal else hessian.blocks[rows].dense()


def _input_jacobian(network: nn.Sequential, x: Tensor) -> Tensor:
    """By autograd, shape (N, D, I)."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        z = network(x)
        if not z.requires_grad:
            return x.new_zeros(*z.shape, x.shape[1:].numel())
        rows = [torch.autograd.grad(z[:, k].sum(), x, retain_graph=True)[0] for k in range(z.shape[1])]
    return torch.stack(rows, dim=1).flatten(2)
