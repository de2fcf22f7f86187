"""The leading eigenpairs of the parameter curvature, matrix-free.

A product with the curvature is one pass over the data for ``J v``, the node-form product with the output Hessian, and
one reverse pass for ``J^T``; Lanczos (SciPy's ``eigsh``) does the rest. Works for every fix, coupled ones too, because
the output Hessian couples N x D numbers only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor
from tqdm import tqdm

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.ggn.dataset import BatchReader, DatasetPairs
from contrastive_curvature.ggn.pullback import Pullback
from contrastive_curvature.output_hessian import OutputHessian

DENSE_PARAMETERS = 256
"""Up to so many parameters the matrix is formed, which cannot fail to converge."""

__all__ = ["DENSE_PARAMETERS", "curvature_product", "leading_eigenpairs"]


def curvature_product(
    pullback: Pullback, hessian: OutputHessian, loader: Iterable[Any], read: BatchReader, v: Tensor
) -> Tensor:
    """``J^T H J v`` over the whole data set.

    Args:
        pullback: All trainable parameters.
        hessian: Output Hessian of all N points, in the order of the loader.
        loader: The same data in the same order.
        read: Takes a batch apart.
        v: Shape (P,), or (P, K) for K vectors in one pass; N D K numbers are held.

    Returns:
        The product, of the shape of ``v``.

    Raises:
        InputError: The loader gives other points than before, or in another order.
    """
    single = v.ndim == 1
    columns = v.unsqueeze(1) if single else v
    moved, start = [], 0
    for batch in loader:
        x, _ = read(batch)
        products = [pullback.jvp(x, column) for column in columns.T]
        z = products[0][0]
        stop = start + z.shape[0]
        known = hessian.z[start:stop]
        if known.shape != z.shape or not torch.allclose(z, known, rtol=1e-3, atol=1e-5 * float(known.abs().max())):
            hint = (
                "Every product is a pass over the data: build the loader with shuffle=False and without augmentation."
            )
            raise InputError(
                expected("train_loader", "the same points in the same order in every pass", "others", hint)
            )
        moved.append(torch.stack([tangent for _, tangent in products], dim=2))
        start = stop
    if start != len(hessian.z):
        hint = "Some of the data are missing in this pass: turn drop_last off, and pass no iterator."
        raise InputError(expected("train_loader", f"{len(hessian.z)} points in every pass", str(start), hint))
    curved = hessian.matvec(torch.cat(moved))
    out, start = torch.zeros_like(columns), 0
    for batch in loader:
        x, _ = read(batch)
        stop = start + moved.pop(0).shape[0]
        for k in range(columns.shape[1]):
            out[:, k] += pullback.vjp_sum(x, curved[start:stop, :, k])
        start = stop
    return out[:, 0] if single else out


def leading_eigenpairs(
    pullback: Pullback,
    pairs: DatasetPairs,
    loader: Iterable[Any],
    read: BatchReader,
    rank: int,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """Largest positive eigenvalues of the curvature and their eigenvectors.

    Args:
        pullback: All trainable parameters.
        pairs: What the first pass over the data left.
        loader: The same data in the same order.
        read: Takes a batch apart.
        rank: How many to look for; fewer are returned when fewer are positive.
        progress: Whether to show a progress bar, one step a product.

    Returns:
        Eigenvectors (P, R) and eigenvalues (R,), all positive: the clamp of negative eigenvalues is built in.

    Raises:
        InputError: The loader shuffles, or the rank is out of range.
    """
    if rank < 1:
        raise InputError(expected("rank", "a positive whole number", rank))
    total = pullback.n_params
    z = pairs.z
    hessian = OutputHessian(z, pairs.weights, pairs.options)
    with tqdm(desc="[eigenpairs]", disable=not progress) as bar:

        def product(v: np.ndarray) -> np.ndarray:
            bar.update()
            vector = torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=z.dtype, device=z.device)
            return curvature_product(pullback, hessian, loader, read, vector).double().cpu().numpy()

        if rank >= total - 1 or total <= DENSE_PARAMETERS:
            # Lanczos cannot give all of them, and a matrix of few parameters is no burden.
            matrix = np.stack([product(column) for column in np.eye(total)], axis=1)
            values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        else:
            start = np.random.default_rng(0).standard_normal(total)
            if not product(start).any():
                # Lanczos refuses a zero matrix.
                values, vectors = np.zeros(0), np.zeros((total, 0))
            else:
                operator = LinearOperator((total, total), matvec=product, dtype=np.float64)
                try:
                    values, vectors = eigsh(operator, k=rank, which="LA", v0=start)
                except ArpackNoConvergence as error:
                    # Where few eigenvalues are positive, Lanczos may not settle among those that are zero.
                    values, vectors = error.eigenvalues, error.eigenvectors
                    warnings.warn(
                        f"{len(values)} of {rank} eigenpairs converged; the others are left out. Use a smaller rank.",
                        stacklevel=2,
                    )
    threshold = max(float(values.max(initial=0.0)), 0.0) * total * float(torch.finfo(z.dtype).eps)
    keep = np.flatnonzero(values > threshold)[::-1][:rank].copy()
    found = (torch.as_tensor(array, dtype=z.dtype, device=z.device) for array in (vectors[:, keep], values[keep]))
    return next(found), next(found)
