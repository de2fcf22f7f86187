"""The pullback by BackPACK: its extensions for diagonals, Kronecker factors and Jacobian products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hosts.backpack.agreement import (
    POINTS,
    attempt,
    autograd_product,
    check_outputs,
    check_product,
    random_cotangents,
)
from contrastive_curvature.hosts.backpack.given import diag_ggn, host_knows, kflr, signed_columns, sqrt_ggn
from contrastive_curvature.hosts.backpack.layers import ADVICE
from contrastive_curvature.hosts.backpack.passes import HostedEncoder, Pass
from contrastive_curvature.network import pullback
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.kron import zero_factors
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import KronFactors
from contrastive_curvature.options import Structure

__all__ = ["BackPackPullback"]


class BackPackPullback(LayerwisePullback):
    """All trainable parameters of an encoder, by BackPACK.

    ``DiagGGNExact`` makes diagonals, ``SqrtGGNExact`` Jacobian products and with them matrices, ``KFLR`` the Kronecker
    factors of linear layers. The host squares what it is given, so an indefinite Hessian goes through it as a positive
    and a negative part. What the host cannot do is left to the shared code: the diagonal of the cross terms of coupled
    fixes, and factors of convolutions, whose positions the host sums before it squares (another approximation).

    Args:
        encoder: The analysed encoder.
        hosted: What an earlier pullback to the same encoder made (its attribute of that name); ``None`` makes it anew.

    Raises:
        UnsupportedError: BackPACK does not know a layer or a setting of it, or a parameter is used twice (the message
            names the layer), or the parameters are in half precision.
    """

    def __init__(self, encoder: Encoder, hosted: HostedEncoder | None = None) -> None:
        low = {p.dtype for p in encoder.parameters()} & {torch.float16, torch.bfloat16}
        if low:
            msg = (
                f"backend BackPACK: parameters in {low.pop()}, while the output Hessian is computed in float32. Call "
                "model.float() first."
            )
            raise UnsupportedError(msg)
        if encoder.normalizes_inside:
            msg = f"backend BackPACK: the encoder ends in a function (F.normalize), which the host cannot see. {ADVICE}"
            raise UnsupportedError(msg)
        super().__init__(encoder)
        self.hosted = HostedEncoder(encoder) if hosted is None else hosted

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return max(super().width, self.hosted.width)

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself.

        Raises:
            UnsupportedError: A mapping, a function in the forward of a module, or the host gives other outputs or
                gradients than autograd.
        """
        if isinstance(x, Mapping):
            msg = f"backend BackPACK: a batch that is a mapping; the host's layers take one tensor. {ADVICE}"
            raise UnsupportedError(msg)
        z, context = super().forward(x)
        with torch.no_grad():
            self._compare(x, z)
        return z, context

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        n, many = cotangents.shape[:2]
        out = cotangents.new_zeros(n, many, self.n_params)
        if n and many:
            (products,) = self._propagate(self._pass(context), cotangents.transpose(0, 1), sqrt_ggn())
            for piece, found in zip(self._pieces(out), products, strict=True):
                if found is not None:
                    piece.copy_(found.transpose(0, 1).flatten(2))
        return out

    def block_term(self, context: Any, blocks: Blocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`; the diagonal without a Jacobian of any point."""
        if structure is not Structure.DIAG:
            return super().block_term(context, blocks, structure)
        out = blocks.u.new_zeros(self.n_params)
        pieces = self._pieces(out)
        for rows in self._host_chunks(*blocks.u.shape):
            run = self._pass(self.slice_context(context, rows))
            for sign, columns in signed_columns(blocks[rows].signed_factor()):
                (diagonals,) = self._propagate(run, columns, diag_ggn())
                for piece, found in zip(pieces, diagonals, strict=True):
                    if found is not None:
                        piece.add_(found.flatten(), alpha=sign)
        return out

    def kron_factors(self, context: Any, blocks: Blocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`; the host's where they are those of the shared code."""
        if not self._has_factors(self._pass(self.slice_context(context, slice(0, 1)))):
            return super().kron_factors(context, blocks, n_data)
        factors = [zero_factors(p) for p in self.hosted.params]
        for rows in self._host_chunks(*blocks.u.shape):
            run = self._pass(self.slice_context(context, rows))
            factor = blocks[rows].signed_factor()
            # Inputs count where nothing is curved, too.
            for k, (sign, columns) in enumerate(list(signed_columns(factor)) or [(1.0, factor.columns)]):
                (found,) = self._propagate(run, columns, kflr())
                for group, host in zip(factors, found, strict=True):
                    if host is not None:
                        group[0].add_(host[0].detach(), alpha=sign)
                    if host is not None and len(host) == 2 and not k:
                        group[1].add_(host[1].detach(), alpha=(rows.stop - rows.start) / n_data)
        return factors

    def _has_factors(self, run: Pass) -> bool:
        """Whether the host has the factors: of linear layers on vectors."""
        host = kflr()
        if not all(host_knows(type(layer), host) for layer in self.hosted.layers):
            return False
        owners = [m for m in self.hosted.layers if any(p.requires_grad for p in m.parameters(recurse=False))]
        return all(type(m) is nn.Linear for m in owners) and not run.positions

    def _pass(self, x: Any) -> Pass:
        if not self.hosted.agrees:
            with torch.no_grad():
                self._compare(x, self.encoder(x))
        made = attempt("the network", lambda: Pass(self.hosted, x))
        self.hosted.width = max(self.hosted.width, made.width)
        return made

    def _propagate(self, run: Pass, columns: Tensor, extension: Any) -> list[list[Any]]:
        return attempt(type(extension).__name__, lambda: run.pull(columns, extension))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of the last axis, one a parameter."""
        return list(flat.split([p.numel() for p in self.hosted.params], dim=-1))

    def _host_chunks(self, n: int, dim: int) -> list[slice]:
        """Points such that the columns at a layer stay within bounds."""
        # Other layers than linear ones make a gradient of every point and column.
        owners = [m for m in self.hosted.layers if not isinstance(m, nn.Linear)]
        gradients = [p.numel() for m in owners for p in m.parameters(recurse=False) if p.requires_grad]
        size = max(1, pullback.JACOBIAN_ELEMENTS // max(1, dim * max(self.hosted.width, 1, *gradients)))
        return [slice(k, min(k + size, n)) for k in range(0, n, size)]

    def _compare(self, x: Tensor, z: Tensor) -> None:
        """Once, on the first batch: what the host does not see would make every Jacobian that of another function.

        Raises:
            UnsupportedError: Outputs or a product are not the encoder's, or the host fails.
            InputError: Autograd's own product is not finite.
        """
        # Nothing to compare; who takes the outputs refuses what is not finite.
        if self.hosted.agrees or not z.numel() or not bool(z.isfinite().all()):
            return
        few, v = x[:POINTS], random_cotangents(z[:POINTS])
        run = attempt("the network", lambda: Pass(self.hosted, few))
        self.hosted.width = run.width
        check_outputs(run.z.detach(), z[:POINTS])
        wanted = attempt("autograd", lambda: autograd_product(self.encoder, self.hosted.params, few, v))
        check_finite(wanted, self, "the first batch")
        products, diagonals = attempt("a backward pass", lambda: run.pull(v.unsqueeze(0), sqrt_ggn(), diag_ggn()))
        sums, squares, diagonal = (torch.zeros_like(wanted) for _ in range(3))
        for part, square, entry, product, found in zip(
            self._pieces(sums), self._pieces(squares), self._pieces(diagonal), products, diagonals, strict=True
        ):
            if product is not None and found is not None:
                part.copy_(product.sum((0, 1)).flatten())
                square.copy_(product.square().sum((0, 1)).flatten())
                entry.copy_(found.flatten())
        check_product(sums, wanted)
        # Diagonals go by other rules of the host.
        check_product(diagonal, squares)
        self.hosted.agrees = True
