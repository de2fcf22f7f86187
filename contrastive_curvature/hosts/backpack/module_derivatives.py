"""Second derivatives of a pair loss and of the l2-normalisation, in BackPACK's form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import norms
from contrastive_curvature.options import Distance, PDFix


def hessian_of(module: Any) -> OutputHessian:
    """Return the output Hessian of an extended loss at its last call, without a graph."""
    # BackPACK stores only positional inputs, of the last call that it saw. Labels of another call would give a wrong
    # Hessian.
    labels, pairs = module.given_with(module.input0) or (getattr(module, "input1", None), None)
    if labels is None and pairs is None:
        raise UnsupportedError(
            f"{type(module).__name__}: it was called again before backward(), and BackPACK does not store labels or "
            "pairs that were given by keyword. Call backward() first, or give labels by position."
        )
    with torch.no_grad():
        return module.output_hessian(module.input0.detach(), labels, pairs=pairs)


def check_unit_inputs(module: Any) -> None:
    """Refuse a loss with ``distance="arccos"`` behind a normalisation layer, for a generalised Gauss-Newton.

    A loss behind a normalisation layer gets unit vectors, and a generalised Gauss-Newton multiplies its blocks with the
    Jacobian ``P / n`` of that layer. It keeps an ``euclidean`` block ``d P / n^2`` whole. From an ``arccos`` block it
    keeps ``a P / n^2`` and loses ``(u t^T + t u^T) / n^2``, the second derivative of the layer.
    """
    z, distance = module.input0.detach(), module.distance
    lengths = z.norm(dim=-1)
    if z.ndim != 2 or z.shape[1] < 2 or not len(z) or bool(((lengths - 1).abs() > 64 * torch.finfo(z.dtype).eps).any()):
        return
    if distance is Distance.ARCCOS:
        raise UnsupportedError(
            "distance='arccos' with a network that ends in a normalisation: this BackPACK extension drops the second "
            "derivative of that layer, which the distance includes. Use distance='euclidean', or give the loss raw "
            "outputs."
        )


def require_hessian(module: Any, extension: Any, by_point: bool = False) -> OutputHessian:
    """Return the Hessian of the loss itself; refuse options that change it.

    ``by_point`` says whether the extension squares point by point, so that it has no cross terms.
    """
    hessian, name = hessian_of(module), type(extension).__name__
    given = f"{name} with distance={str(hessian.distance)!r} and pd_fix={str(hessian.pd_fix)!r}"
    curvature = "the curvature with these options is that of DiagCurvature() of contrastive_curvature.hosts.backpack."
    if by_point and hessian.derivatives.couples:
        raise UnsupportedError(
            f"{given}: the Hessian of {type(module).__name__} couples the points of a batch, and {name} squares point "
            "by point. HMP() multiplies with the Hessian, for distance='arccos' and pd_fix='full'; " + curvature
        )
    # Where nothing couples the points, fixed leaves nothing out.
    whole = (PDFix.FULL,) if hessian.derivatives.couples else (PDFix.FULL, PDFix.FIXED)
    if hessian.distance is not Distance.ARCCOS or hessian.pd_fix not in whole:
        raise UnsupportedError(
            f"{given}: {name} is about the Hessian of the loss, which these options change. Use distance='arccos' and "
            "pd_fix='full'; " + curvature
        )
    return hessian


def products(hessian: OutputHessian, mat: Tensor) -> Tensor:
    """Multiply a Hessian with vectors in BackPACK's form, shape (V, N, D)."""
    return hessian.matvec(mat.permute(1, 2, 0).to(hessian.z.dtype)).permute(2, 0, 1).to(mat.dtype)


class PairLossDerivatives(BaseLossDerivatives):
    """Second derivatives of a :class:`~contrastive_curvature.losses.PairLoss` at raw outputs (N, D).

    BackPACK squares factors point by point, so square roots exist for ``pd_fix="psd"``, and for ``"fixed"`` if the
    blocks happen to be positive semidefinite; products exist for every fix.
    """

    def hessian_is_psd(self) -> bool:
        """Return false, because no loss of cosines is convex in the outputs; ``require_psd`` checks the fix."""
        return False

    def hessian_is_zero(self, module: nn.Module) -> bool:
        """Return false."""
        return False

    def require_uncoupled(self, module: Any) -> OutputHessian:
        """Return the Hessian; refuse a fix that couples the points."""
        hessian = hessian_of(module)
        if hessian.coupled:
            raise UnsupportedError(
                f"pd_fix={str(hessian.pd_fix)!r} couples the points of a batch, and this BackPACK extension "
                "squares point by point. Use contrastive_curvature.hosts.backpack.DiagCurvature() or "
                "CurvatureFactor(), which sum over the batch first, GGNMP, or pd_fix='psd'."
            )
        return hessian

    def require_psd(self, module: Any) -> OutputHessian:
        """Return the Hessian; refuse it if a point has no square root."""
        hessian = self.require_uncoupled(module)
        if not hessian.is_psd():
            raise UnsupportedError(
                f"distance={str(hessian.distance)!r} with pd_fix={str(hessian.pd_fix)!r}: the output Hessian of these "
                "pairs is indefinite, so it has no real square root. Use "
                "contrastive_curvature.hosts.backpack.DiagCurvature() or CurvatureFactor(), which carry signs, or "
                "pd_fix='psd'."
            )
        return hessian

    def _sqrt_hessian(self, module: Any, g_inp: Any, g_out: Any, subsampling: list[int] | None = None) -> Tensor:
        # The root is symmetric, so its rows can be BackPACK's columns.
        root = self.require_psd(module).blocks.factor()
        active = root if subsampling is None else root[subsampling]
        return active.transpose(0, 1).to(module.input0.dtype)

    def _sqrt_hessian_sampled(
        self, module: Any, g_inp: Any, g_out: Any, mc_samples: int = 1, subsampling: list[int] | None = None
    ) -> Tensor:
        root = self.require_psd(module).blocks.factor()
        root = root if subsampling is None else root[subsampling]
        # Random signs are the noise of unit covariance with the smallest fourth moment.
        noise = torch.randint(0, 2, (mc_samples, *root.shape[:2]), device=root.device).to(root.dtype) * 2 - 1
        return torch.einsum("nde,mne->mnd", root, noise / mc_samples**0.5).to(module.input0.dtype)

    def _make_hessian_mat_prod(self, module: Any, g_inp: Any, g_out: Any) -> Callable[[Tensor], Tensor]:
        return partial(products, hessian_of(module))

    def _sum_hessian(self, module: Any, g_inp: Any, g_out: Any) -> Tensor:
        return self.require_uncoupled(module).blocks.total().to(module.input0.dtype)


class L2NormDerivatives(BaseDerivatives):
    """First and second derivative of :class:`~contrastive_curvature.L2Norm` on inputs (N, ..., D).

    With ``u = z / n`` the Jacobian is ``P / n``, and a gradient ``g`` at the output contributes the residual
    ``-((g . u) P + P g u^T + u (P g)^T) / n^2``.
    """

    def hessian_is_zero(self, module: nn.Module) -> bool:
        """Return false."""
        return False

    def hessian_is_diagonal(self, module: nn.Module) -> bool:
        """Return false: the outputs of a point depend on all its inputs."""
        return False

    def residual_blocks(self, module: nn.Module, g_out: tuple[Tensor, ...]) -> NodeBlocks:
        """Return ``sum_k g_k d^2 u_k / dz^2`` of every point with inputs (N, D)."""
        u, n = _direction(module)
        g, n = g_out[0].detach(), n.squeeze(-1)
        # An arccos block is the same second derivative, with the neighbour sum -g.
        return NodeBlocks.from_sums(u, n, torch.zeros_like(n), -g, Distance.ARCCOS)

    def ea_jac_t_mat_jac_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        """Return ``1/N sum_i J_i^T mat J_i`` (D, D), for KFRA."""
        u, n = _direction(module)
        eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        jacobian = (eye - u.unsqueeze(-1) * u.unsqueeze(-2)) / n.unsqueeze(-1)
        return torch.einsum("nki,kl,nlj->ij", jacobian, mat, jacobian) / u.shape[0]

    def _jac_mat_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)

    def _jac_t_mat_prod(
        self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None
    ) -> Tensor:
        u, n = _direction(module)
        if subsampling is not None:
            u, n = u[subsampling], n[subsampling]
        return (mat - u * (u * mat).sum(-1, keepdim=True)) / n

    def _residual_mat_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        u, n = _direction(module)
        g = g_out[0].detach()
        radial = (u * g).sum(-1, keepdim=True)
        tangent = g - u * radial
        along = (u * mat).sum(-1, keepdim=True)
        moved = radial * (mat - u * along) + tangent * along + u * (tangent * mat).sum(-1, keepdim=True)
        return -moved / n / n


def _direction(module: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and norms (..., 1); a row of zeros, which the module does not change, gets norm one."""
    z = module.input0.detach()
    n = norms(z).unsqueeze(-1)
    return module.forward(z), torch.where(n > 0, n, torch.ones_like(n))
