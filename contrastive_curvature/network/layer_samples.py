"""Random columns whose mean square is the diagonal blocks of an output Hessian.

With the signed factor ``H_ii = sum_c sign_ci v_ci v_ci^T`` and random signs ``e_c``, the vector ``sum_c e_c v_ci`` over the
columns of one sign has ``sum_c v_ci v_ci^T`` as its second moment. So K vectors of the positive part and K of the negative
part, where there is one, estimate ``J_i^T H_ii J_i`` without a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.hessian.signed import SignedFactor
from contrastive_curvature.options import Structure

__all__ = ["check_samples", "sample_columns"]


def check_samples(mc_samples: object, dim: int, structure: Structure) -> int:
    """Refuse a number of samples that makes no sense.

    Args:
        mc_samples: The number K.
        dim: Number D of outputs.
        structure: What is estimated.

    Returns:
        K.

    Raises:
        InputError: It is no whole number from 1, or the exact curvature takes fewer passes.
        UnsupportedError: The structure is ``full``.
    """
    if isinstance(mc_samples, bool) or not isinstance(mc_samples, int):
        raise InputTypeError(expected("mc_samples", "a whole number", mc_samples))
    if structure is Structure.FULL:
        msg = "mc_samples with structure 'full': it estimates 'diag' and 'kron'. Leave it out, or choose one of them."
        raise UnsupportedError(msg)
    if not 1 <= mc_samples < dim:
        hint = f"The exact curvature takes {dim} backward passes, one for each output. Leave mc_samples out."
        raise InputError(expected("mc_samples", f"from 1 to {dim - 1}", mc_samples, hint))
    return mc_samples


def sample_columns(factor: SignedFactor, mc_samples: int, generator: torch.Generator | None) -> SignedFactor:
    """Draw columns.

    Args:
        factor: Signed factor of the blocks of N points: columns (C, N, D), signs (C, N).
        mc_samples: K.
        generator: Source of the random signs, on the CPU; torch's own by default.

    Returns:
        Columns (K, N, D) or (2 K, N, D), and as their signs ``1 / K`` and ``-1 / K``.
    """
    count, n, _ = factor.columns.shape
    drawn = torch.randint(0, 2, (mc_samples, count, n), generator=generator).to(factor.columns)
    random = 2 * drawn - 1
    columns: list[Tensor] = []
    signs: list[Tensor] = []
    for sign in (1, -1):
        part = (factor.signs == sign).to(factor.columns)
        if bool(part.any()):
            columns.append(torch.einsum("kcn,cnd->knd", random * part, factor.columns))
            signs.append(torch.full_like(factor.columns[:1, :, 0], sign / mc_samples).expand(mc_samples, n))
    if not columns:
        return SignedFactor(factor.columns[:1], torch.zeros_like(factor.signs[:1]))
    return SignedFactor(torch.cat(columns), torch.cat(signs))
