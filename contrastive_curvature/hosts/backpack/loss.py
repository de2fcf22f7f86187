"""A pair loss as BackPACK sees a loss: square roots, products and sums of its output Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from backpack.core.derivatives.basederivatives import BaseLossDerivatives
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.options import Distance

__all__ = ["PairLossDerivatives", "check_unit_inputs", "hessian_of"]


def hessian_of(module: Any) -> OutputHessian:
    """The output Hessian of an extended loss, at its last call.

    Args:
        module: The loss, with BackPACK's stored inputs.

    Returns:
        The Hessian, without a graph.

    Raises:
        UnsupportedError: Labels or pairs of this call are not known any more.
    """
    # BackPACK stores positional inputs only, and of the last call that it saw. Labels of another call than the
    # embeddings' would be worse than none.
    labels, pairs = module.given_with(module.input0) or (getattr(module, "input1", None), None)
    if labels is None and pairs is None:
        msg = (
            f"{type(module).__name__}: it was called again before backward(), and BackPACK does not store labels or "
            "pairs that were given by keyword. Call backward() first, or give labels by position."
        )
        raise UnsupportedError(msg)
    with torch.no_grad():
        return module.output_hessian(module.input0.detach(), labels, pairs=pairs)


def check_unit_inputs(module: Any, keeps_residual: bool) -> None:
    """Refuse a normalised network whose loss would give another split than its ``distance`` says.

    A loss fed by a normalisation layer gets unit vectors. Through the Jacobian ``P / n`` of that layer a generalised
    Gauss-Newton keeps ``a P / n^2`` of an ``arccos`` block and loses ``(u t^T + t u^T) / n^2``, so there only
    ``euclidean``, whose blocks ``d P / n^2`` come out whole, is what it is documented to be. A Hessian adds the second
    derivative of the layer, which completes ``arccos`` and is what ``euclidean`` leaves out.

    Args:
        module: The extended loss.
        keeps_residual: Whether the extension adds the second derivatives of layers.

    Raises:
        UnsupportedError: The inputs are unit vectors and the distance is the other one.
    """
    z, distance = module.input0.detach(), module.distance
    norms = z.norm(dim=-1)
    if z.ndim != 2 or z.shape[1] < 2 or not len(z) or bool(((norms - 1).abs() > 64 * torch.finfo(z.dtype).eps).any()):
        return
    if distance is (Distance.EUCLIDEAN if keeps_residual else Distance.ARCCOS):
        other = "arccos" if keeps_residual else "euclidean"
        msg = (
            f"distance={str(distance)!r} with a network that ends in a normalisation: this BackPACK extension "
            f"{'adds' if keeps_residual else 'drops'} the second derivative of that layer, which the distance "
            f"{'leaves out' if keeps_residual else 'includes'}. Use distance={other!r}, or give the loss raw outputs."
        )
        raise UnsupportedError(msg)


class PairLossDerivatives(BaseLossDerivatives):
    """Second derivatives of a :class:`~contrastive_curvature.losses.PairLoss` at raw outputs (N, D).

    BackPACK squares factors point by point, so square roots exist for ``pd_fix`` ``"psd"``, and for ``"fixed"`` where
    the blocks happen to be positive semidefinite; products exist for every fix.
    """

    def hessian_is_psd(self) -> bool:
        """Not for every option; the module extensions ask :meth:`require_psd` about the loss at hand."""
        return False

    def hessian_is_zero(self, module: nn.Module) -> bool:
        """No."""
        return False

    def require_uncoupled(self, module: Any) -> OutputHessian:
        """The Hessian of a fix without cross terms.

        Raises:
            UnsupportedError: The fix couples the points.
        """
        hessian = hessian_of(module)
        if hessian.coupled:
            msg = (
                f"pd_fix={str(hessian.pd_fix)!r} couples the points of a batch, and this BackPACK extension "
                "squares point by point. Use contrastive_curvature.hosts.backpack.DiagCurvature() or "
                "CurvatureFactor(), which sum over the batch first, GGNMP, or pd_fix='psd'."
            )
            raise UnsupportedError(msg)
        return hessian

    def require_psd(self, module: Any) -> OutputHessian:
        """The Hessian of a fix without cross terms, positive semidefinite.

        Raises:
            UnsupportedError: The fix couples the points, or a block has a negative eigenvalue.
        """
        hessian = self.require_uncoupled(module)
        if not hessian.is_psd():
            msg = (
                f"distance={str(hessian.distance)!r} with pd_fix={str(hessian.pd_fix)!r}: the output Hessian of these "
                "pairs is indefinite, so it has no real square root. Use "
                "contrastive_curvature.hosts.backpack.DiagCurvature() or CurvatureFactor(), which carry signs, or "
                "pd_fix='psd'."
            )
            raise UnsupportedError(msg)
        return hessian

    def _sqrt_hessian(self, module: Any, g_inp: Any, g_out: Any, subsampling: list[int] | None = None) -> Tensor:
        # The root is symmetric, so its rows may stand as BackPACK's columns.
        root = self.require_psd(module).blocks.factor()
        return _active(root, subsampling).transpose(0, 1).to(module.input0.dtype)

    def _sqrt_hessian_sampled(
        self, module: Any, g_inp: Any, g_out: Any, mc_samples: int = 1, subsampling: list[int] | None = None
    ) -> Tensor:
        root = _active(self.require_psd(module).blocks.factor(), subsampling)
        # Random signs are the noise of unit covariance with the smallest fourth moment.
        noise = torch.randint(0, 2, (mc_samples, *root.shape[:2]), device=root.device).to(root.dtype) * 2 - 1
        return torch.einsum("nde,mne->mnd", root, noise / mc_samples**0.5).to(module.input0.dtype)

    def _make_hessian_mat_prod(self, module: Any, g_inp: Any, g_out: Any) -> Callable[[Tensor], Tensor]:
        hessian = hessian_of(module)

        def product(mat: Tensor) -> Tensor:
            return hessian.matvec(mat.permute(1, 2, 0).to(hessian.z.dtype)).permute(2, 0, 1).to(mat.dtype)

        return product

    def _sum_hessian(self, module: Any, g_inp: Any, g_out: Any) -> Tensor:
        return self.require_uncoupled(module).blocks.total().to(module.input0.dtype)


def _active(root: Tensor, subsampling: list[int] | None) -> Tensor:
    return root if subsampling is None else root[subsampling]
