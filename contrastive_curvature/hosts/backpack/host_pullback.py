"""The pullback by BackPACK: its extensions for diagonals, Kronecker factors and Jacobian products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks, SignedFactor
from contrastive_curvature.hosts.backpack.backward_passes import HostedEncoder, Pass
from contrastive_curvature.hosts.backpack.extensions import CurvatureFactor, DiagCurvature, SignedExtension
from contrastive_curvature.hosts.backpack.layers import ADVICE
from contrastive_curvature.network import pullback
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.structures.finite import check_finite

_T = TypeVar("_T")

_POINTS = 8
"""Points of the first batch that are compared with autograd."""


class BackPackPullback(LayerwisePullback):
    """All trainable parameters of an encoder, by BackPACK.

    :class:`DiagCurvature` gives diagonals; :class:`CurvatureFactor` gives products with Jacobians, and so matrices too.
    Both use BackPACK's derivatives of the layers. The code for any network gives Kronecker factors, and the diagonal of
    cross terms of coupled fixes. (``KFLR`` sums the positions of a convolution before it squares, which is another
    approximation.)

    Args:
        encoder: The analysed encoder.

    Raises:
        UnsupportedError: BackPACK does not know a layer or one of its settings, or a parameter is used twice; the
            message names the layer.
    """

    def __init__(self, encoder: Encoder) -> None:
        if encoder.normalizes_inside:
            raise UnsupportedError(
                f"backend BackPACK: the encoder ends in a function (F.normalize), which the host cannot see. {ADVICE}"
            )
        super().__init__(encoder)
        self.hosted = HostedEncoder(encoder)
        self._agrees = False
        self._width = 1

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return max(super().width, self._width)

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself."""
        z, context = super().forward(x)
        with torch.no_grad():
            self._compare(x, z)
        return z, context

    @override
    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        n, many = cotangents.shape[:2]
        out = cotangents.new_zeros(n, many, self.n_params)
        if n and many:
            factor = SignedFactor(cotangents.transpose(0, 1), cotangents.new_ones(many, n))
            (products,) = self._propagate(self._pass(context), factor, CurvatureFactor())
            for piece, factors in zip(self._pieces(out), products, strict=True):
                if factors is not None:
                    piece.copy_(factors.columns.reshape(many, n, -1).transpose(0, 1))
        return out

    def diag(self, context: Any, blocks: Blocks) -> Tensor:
        """See :meth:`Pullback.diag`; no Jacobian of a point is formed."""
        out = blocks.u.new_zeros(self.n_params)
        pieces = self._pieces(out)
        # A layer that is not linear stores a gradient for every point and column, so the points are split into chunks.
        owners = [m for m in self.hosted.layers if not isinstance(m, nn.Linear)]
        gradients = [p.numel() for m in owners for p in m.parameters(recurse=False) if p.requires_grad]
        n, dim = blocks.u.shape
        step = max(1, pullback.JACOBIAN_ELEMENTS // max(1, dim * max(self._width, 1, *gradients)))
        for rows in (slice(start, min(start + step, n)) for start in range(0, n, step)):
            run = self._pass(self.slice_context(context, rows))
            (diagonals,) = self._propagate(run, blocks[rows].signed_factor(), DiagCurvature())
            for piece, diagonal in zip(pieces, diagonals, strict=True):
                if diagonal is not None:
                    piece.add_(diagonal.flatten())
        return out

    def _pass(self, x: Any) -> Pass:
        if not self._agrees:
            with torch.no_grad():
                self._compare(x, self.encoder(x))
        run = _attempt("the network", lambda: Pass(self.hosted, x))
        self._width = max(self._width, run.width)
        return run

    def _propagate(self, run: Pass, factor: SignedFactor, extension: SignedExtension) -> list[list[Any]]:
        return _attempt(type(extension).__name__, lambda: run.pull(factor, extension))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Return views of the last axis, one for each parameter."""
        return list(flat.split([p.numel() for p in self.hosted.params], dim=-1))

    def _compare(self, x: Inputs, z: Tensor) -> None:
        """Compare outputs and products with autograd on the first batch.

        BackPACK sees only layers. If a hook changes an output, every Jacobian would belong to another function.
        """
        if isinstance(x, Mapping):
            raise UnsupportedError(
                f"backend BackPACK: a batch that is a mapping; the host's layers take one tensor. {ADVICE}"
            )
        # The caller refuses outputs that are not finite.
        if self._agrees or not z.numel() or not bool(z.isfinite().all()):
            return
        few = x[:_POINTS]
        # The same vector each time, without using the user's generator.
        v = torch.randn(z[:_POINTS].shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype, device="cpu").to(
            z.device
        )
        run = _attempt("the network", lambda: Pass(self.hosted, few))
        self._width = run.width
        # A tighter tolerance than for products: these are the same operations in the same order, while BackPACK
        # computes some products in another way.
        if run.z.shape != z[:_POINTS].shape or not _close(run.z.detach(), z[:_POINTS], 0.1):
            raise UnsupportedError(
                "backend BackPACK: a copy of the encoder gives other outputs than itself (something that works in "
                f"place, or that a copy does not share?). {ADVICE}"
            )
        with torch.inference_mode(False):
            # Without the hooks of a model that the user extended, which would overwrite or delete stored results.
            autograd = ModulePullback(self._running)
            wanted = _attempt("autograd", lambda: autograd.vjp_sum(few.clone(), v.clone()))
        check_finite(wanted, self, "the first batch")
        factor = SignedFactor(v.unsqueeze(0), v.new_ones(1, len(v)))
        products, diagonals = _attempt("a backward pass", lambda: run.pull(factor, CurvatureFactor(), DiagCurvature()))
        sums, squares, diagonal = (torch.zeros_like(wanted) for _ in range(3))
        for part, square, entry, product, squared in zip(
            self._pieces(sums), self._pieces(squares), self._pieces(diagonal), products, diagonals, strict=True
        ):
            if product is not None and squared is not None:
                part.copy_(product.columns.sum(0).flatten())
                square.copy_(product.columns.square().sum(0).flatten())
                entry.copy_(squared.flatten())
        # Diagonals use other rules.
        if not (_close(sums, wanted, 1.0) and _close(diagonal, squares, 1.0)):
            raise UnsupportedError(
                "backend BackPACK: the host's rules give other gradients than autograd through the encoder (a hook "
                f"that changes an output?). {ADVICE}"
            )
        self._agrees = True


def _attempt(what: str, compute: Callable[[], _T]) -> _T:
    """Run a computation; convert the host's errors, except a lack of memory, into a refusal that names it."""
    try:
        return compute()
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(f"backend BackPACK: {what} fails ({reason}). {ADVICE}") from error


def _close(computed: Tensor, wanted: Tensor, factor: float) -> bool:
    """Return whether two tensors agree up to a fraction of the largest entry; false if there is a NaN."""
    if not wanted.numel():
        return True
    # On a GPU, convolutions and products may be rounded to the ten bits of TF32.
    tolerance = 1e-8 if wanted.dtype == torch.float64 else factor * (1e-2 if wanted.is_cuda else 1e-3)
    return float((computed - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
