"""The leading eigenpairs of the parameter curvature, matrix-free.

A product with the curvature is one pass over the data for ``J v``, the node-form product with the output Hessian, and
one reverse pass for ``J^T``; Lanczos (SciPy's ``eigsh``) does the rest. This works for every fix, also for coupled
ones, because the output Hessian couples only N x D numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.anchors import WholeHessian, collect_anchors
from contrastive_curvature.fit.dataset import collected
from contrastive_curvature.fit.loop import Fit
from contrastive_curvature.fit.passes import Passes, check_same_outputs
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.progress import Progress
from contrastive_curvature.structures.finite import check_finite

DENSE_PARAMETERS = 256
"""Up to so many parameters the matrix is formed, which cannot fail to converge."""


def whole_hessian(f: Fit, passes: Passes) -> WholeHessian:
    """Return the Hessian at the outputs of a whole data set, in the order of its reader."""
    if f.options.loss.compares != "pairs":
        return collect_anchors(f, passes)
    pairs = collected(f, passes)
    assert pairs.points is not None
    z, targets, hessian = pairs.points.columns["outputs"], pairs.points.columns["targets"], pairs.hessian
    if pairs.sampled is None:
        whole = f.options.loss.hessian_at(z, make_relation(pairs.n, z.device, targets, f.options.relation))
    else:
        whole = hessian.loss.hessian_of(z, hessian)
    return WholeHessian(z, [whole], pairs.centres)


def curvature_product(
    pullback: Pullback,
    hessian: OutputHessian | WholeHessian,
    inputs: Callable[[], Iterable[Inputs]],
    v: Tensor,
    argument: str = "train_loader",
) -> Tensor:
    """Return ``J^T H J v`` over the whole data set."""
    single = v.ndim == 1
    columns = v.unsqueeze(1) if single else v
    moved, start = [], 0
    for x in inputs():
        products = [pullback.jvp(x, column) for column in columns.T]
        z = products[0][0]
        stop = start + z.shape[0]
        hint = "Every product is a pass over the data: build the loader with shuffle=False and without augmentation."
        check_same_outputs(z, hessian.z[start:stop], argument, hint)
        moved.append(torch.stack([tangent for _, tangent in products], dim=2))
        if bool(v.isfinite().all()) and not bool(moved[-1].isfinite().all()):
            # The Jacobian overflows; its rows show in which layer.
            axes = torch.ones_like(z).unsqueeze(1)
            check_finite(pullback.vjp(pullback.forward(x)[1], axes).abs().sum((0, 1)), pullback, _batch(len(moved)))
        start = stop
    if start != len(hessian.z):
        hint = "Some of the data are missing in this pass: turn drop_last off, and pass no iterator."
        raise InputError(argument, f"{len(hessian.z)} points in every pass", str(start), hint)
    curved = hessian.matvec(torch.cat(moved))
    out, start = torch.zeros_like(columns), 0
    for number, x in enumerate(inputs()):
        stop = start + moved.pop(0).shape[0]
        for k in range(columns.shape[1]):
            out[:, k] += pullback.vjp_sum(x, curved[start:stop, :, k])
        check_finite(out, pullback, _batch(number + 1))
        start = stop
    return out[:, 0] if single else out


def _batch(count: int) -> str:
    return f"batch {count - 1} (counted from 0)"


def leading_eigenpairs(
    pullback: Pullback,
    hessian: WholeHessian,
    inputs: Callable[[], Iterable[Inputs]],
    rank: int,
    progress: Progress,
) -> tuple[Tensor, Tensor]:
    """Return the largest positive eigenvalues of the curvature and their eigenvectors."""
    total, z = pullback.n_params, hessian.z
    with progress.bar("[eigenpairs]") as bar:

        def product(v: np.ndarray) -> np.ndarray:
            bar.update()
            vector = torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=z.dtype, device=z.device)
            return curvature_product(pullback, hessian, inputs, vector).double().cpu().numpy()

        if rank >= total - 1 or total <= DENSE_PARAMETERS:
            # Lanczos cannot give all eigenpairs, and a matrix of few parameters is cheap.
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
                    # With few positive eigenvalues, Lanczos may not converge on the zero ones.
                    values, vectors = error.eigenvalues, error.eigenvectors
                    warnings.warn(
                        f"{len(values)} of {rank} eigenpairs converged; the others are left out. Use a smaller rank.",
                        stacklevel=2,
                    )
    threshold = max(float(values.max(initial=0.0)), 0.0) * total * float(torch.finfo(z.dtype).eps)
    keep = np.flatnonzero(values > threshold)[::-1][:rank].copy()
    vectors, values = vectors[:, keep], values[keep]
    if not (np.isfinite(vectors).all() and np.isfinite(values).all()):
        raise InputError("curvature", "finite eigenpairs", "NaN or infinity")
    eigenvectors = torch.as_tensor(vectors, dtype=z.dtype, device=z.device)
    eigenvalues = torch.as_tensor(values, dtype=z.dtype, device=z.device)
    return eigenvectors, eigenvalues
