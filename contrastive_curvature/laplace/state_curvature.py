"""Checks of the curvature in a saved posterior, structure by structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.laplace.state_values import (
    check_inputs,
    check_symmetric,
    check_tensor,
    is_semidefinite,
    kind_of,
    refuse,
    rounding_of,
)
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.sketch import sketch_matrix

__all__ = [
    "check_dense",
    "check_diagonal",
    "check_eigenbasis",
    "check_eigenpairs",
    "check_factors",
    "check_kernel",
    "check_sketch",
]

_PARTS = ("inputs", "factor", "coupled", "values", "vectors")

_SAME_KERNEL = 1e-2
"""Relative, for encoders in float32 on another device than the one that saved the state."""

_ORTHONORMAL = 1e-2
"""Wide enough for eigenvectors in float32, and far below what another matrix would show."""


def check_diagonal(state: Mapping[str, Any], like: Tensor, size: int) -> None:
    """Check ``H`` (P,) and ``H_raw`` (P,), of which it is the non-negative part.

    Raises:
        InputError: Something is malformed, or the two do not go together.
    """
    clamped = check_tensor("H", state["H"], like, (size,))
    raw = check_tensor("H_raw", state["H_raw"], like, (size,))
    if bool((clamped < 0).any()):
        refuse("H", "curvatures that are not negative", f"a smallest one of {float(clamped.min()):.3g}")
    if not torch.equal(clamped, raw.clamp(min=0)):
        refuse("H", "the non-negative part of H_raw", "other numbers")


def check_dense(state: Mapping[str, Any], like: Tensor, size: int) -> None:
    """Check ``H`` (P, P), the positive semidefinite part of the symmetric ``H_raw`` (P, P).

    Raises:
        InputError: Something is malformed, or the two do not go together.
    """
    raw = check_tensor("H_raw", state["H_raw"], like, (size, size))
    clamped = check_tensor("H", state["H"], like, (size, size))
    check_symmetric("H_raw", raw, semidefinite=False)
    check_symmetric("H", clamped, semidefinite=True)
    largest = max(float(raw.abs().max()), float(clamped.abs().max()))
    if largest == 0:
        return
    # What was taken away has no negative eigenvalue, and nothing in common with what is left: cheaper than to decompose
    # the matrix once more.
    left, gone = clamped / largest, (clamped - (raw + raw.T) / 2) / largest
    if not is_semidefinite(gone, 1.0) or _mix(left, gone) > rounding_of(raw):
        refuse("H", "the positive semidefinite part of H_raw", "another matrix")


def check_factors(state: Mapping[str, Any], like: Tensor, parameters: Sequence[Tensor]) -> None:
    """Check the Kronecker factors of every parameter: ``[G, A]``, or one ``[block]``, as of a vector.

    Raises:
        InputError: Something is malformed, or ``H`` and ``H_raw`` differ.
    """
    for key in ("H", "H_raw"):
        groups = state[key]
        if not isinstance(groups, (list, tuple)) or len(groups) != len(parameters):
            refuse(key, f"a list of factors for {len(parameters)} parameters", kind_of(groups))
        for number, (group, p) in enumerate(zip(groups, parameters, strict=True)):
            if not isinstance(group, (list, tuple)) or len(group) not in ((1,) if p.ndim <= 1 else (1, 2)):
                wanted = "one factor" if p.ndim <= 1 else "one or two factors"
                refuse(key, f"{wanted} for parameter {number}", kind_of(group))
            sizes = _factor_sizes(p, group)
            for place, (factor, size) in enumerate(zip(group, sizes, strict=True)):
                checked = check_tensor(key, factor, like, (size, size))
                # The curvature's factor may be indefinite until it is clamped; the inputs' is a mean of squares.
                check_symmetric(key, checked, semidefinite=place == 1)
    pairs = [(a, b) for f, g in zip(state["H"], state["H_raw"], strict=True) for a, b in zip(f, g, strict=True)]
    if not all(torch.equal(a, b) for a, b in pairs):
        refuse("H", "the factors in H_raw", "other numbers")


def check_sketch(state: Mapping[str, Any], like: Tensor, parameters: Sequence[Tensor], size: int) -> None:
    """Check ``H`` and ``H_raw`` of Kronecker factors with a sketched input factor.

    Args:
        state: What the user passed.
        like: A parameter of the encoder, for dtype and device.
        parameters: Weight (D, F) and maybe bias of the layer.
        size: Number of columns of the sketch.

    Raises:
        InputError: Something is malformed, or ``H`` and ``H_raw`` differ.
    """
    dim, width = parameters[0].shape
    both: list[list[tuple[int, ...]]] = [[(dim, dim), (width, size), (1,)], [(dim, dim)]]
    shapes = both[: len(parameters)]
    for key in ("H", "H_raw"):
        groups = state[key]
        if not isinstance(groups, (list, tuple)) or len(groups) != len(shapes):
            refuse(key, f"a list of factors for {len(shapes)} parameters", kind_of(groups))
        for number, wanted in enumerate(shapes):
            group = groups[number]
            if not isinstance(group, (list, tuple)) or len(group) != len(wanted):
                refuse(key, f"{len(wanted)} factors for parameter {number}", kind_of(group))
            for part, shape in zip(group, wanted, strict=True):
                check_tensor(key, part, like, shape)
            # The curvature's factor may be indefinite until it is clamped.
            check_symmetric(key, group[0], semidefinite=False)
        _, sketch, trace = groups[0]
        core = sketch if size == width else sketch_matrix(width, size, sketch.dtype, sketch.device).T @ sketch
        # The inputs' factor is a mean of squares, and so is what the test matrix sees of it.
        check_symmetric(key, core, semidefinite=True)
        if bool(trace < 0):
            refuse(key, "a trace that is not negative", float(trace))
        if size == width and bool((sketch.diagonal().sum() - trace).abs() > rounding_of(sketch) * trace):
            refuse(key, "the trace of the input factor", float(trace))
    pairs = [(a, b) for f, g in zip(state["H"], state["H_raw"], strict=True) for a, b in zip(f, g, strict=True)]
    if not all(torch.equal(a, b) for a, b in pairs):
        refuse("H", "the factors in H_raw", "other numbers")


def _factor_sizes(p: Tensor, group: Sequence[object]) -> tuple[int, ...]:
    """Rows of the factors of a parameter: those of a layer, or any two whose product is its number of entries."""
    if len(group) == 1:
        return (p.numel(),)
    first = group[0]
    rows = len(first) if isinstance(first, Tensor) and first.ndim == 2 else 0
    return (rows, p.numel() // rows) if rows and p.numel() % rows == 0 else (len(p), p[0].numel())


def check_eigenpairs(state: Mapping[str, Any], like: Tensor, size: int) -> None:
    """Check the low-rank ``H``: orthonormal vectors (P, R) and positive values (R,).

    Raises:
        InputError: Something is malformed.
    """
    check_nothing(state)
    pair = state["H"]
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        refuse("H", "eigenvectors and eigenvalues", kind_of(pair))
    vectors = check_tensor("H", pair[0], like, (size, None))
    values = check_tensor("H", pair[1], like, (vectors.shape[1],))
    if not values.numel() or bool((values <= 0).any()):
        refuse("H", "positive eigenvalues", "none" if not values.numel() else f"one of {float(values.min()):.3g}")
    _check_orthonormal(vectors)


def check_kernel(state: Mapping[str, Any], like: Tensor, size: int) -> None:
    """Check ``H`` of a posterior in function space over ``size`` points.

    Raises:
        InputError: Something is malformed, or the parts do not go together.
    """
    check_nothing(state)
    parts = state["H"]
    if type(parts) is not dict or set(parts) != set(_PARTS):
        shown = f"the keys {sorted(parts, key=str)}" if isinstance(parts, dict) else kind_of(parts)
        refuse("H", f"a dictionary with {', '.join(_PARTS)}", shown)
    inputs = check_inputs("H", parts["inputs"])
    if input_length(inputs) != size:
        refuse("H", f"inputs of n_subset = {size} points", f"{input_length(inputs)} points")
    if type(parts["coupled"]) is not bool:
        refuse("H", "coupled to be True or False", kind_of(parts["coupled"]))
    dim = state["n_outputs"]
    shape = (size, dim, None) if parts["coupled"] else (size, dim, dim)
    factor = check_tensor("H", parts["factor"], like, shape, torch.float64)
    columns = factor.shape[2] if parts["coupled"] else size * dim
    values = check_tensor("H", parts["values"], like, (columns,), torch.float64)
    if bool((values < 0).any()):
        refuse("H", "eigenvalues that are not negative", f"one of {float(values.min()):.3g}")
    _check_orthonormal(check_tensor("H", parts["vectors"], like, (columns, columns), torch.float64))


def check_eigenbasis(parts: Mapping[str, Any], product: Callable[[Tensor], Tensor]) -> None:
    """Refuse eigenpairs that are not those of the kernel matrix of the inputs and the factor.

    Args:
        parts: The curvature in function space.
        product: Product of that matrix with a vector (R,).

    Raises:
        InputError: The product with a random vector is another one.
    """
    values, vectors = parts["values"], parts["vectors"]
    c = _random(len(values)).to(values)
    wanted = vectors @ (values * c)
    off = (product(vectors @ c) - wanted).norm()
    # Written so that NaN is refused too.
    if not bool(off <= _SAME_KERNEL * values.max() * c.norm()):
        refuse("H", "eigenvalues and eigenvectors of the kernel of its inputs", "those of another one")


def check_nothing(state: Mapping[str, Any]) -> None:
    """Refuse an unclamped curvature where the structure has none.

    Raises:
        InputError: ``H_raw`` is not ``None``.
    """
    if state["H_raw"] is not None:
        refuse("H_raw", "None: this structure keeps nothing unclamped", kind_of(state["H_raw"]))


def _mix(a: Tensor, b: Tensor) -> float:
    """Norm of ``a b w`` for a random ``w``, relative to the norms of the matrices."""
    w = _random(a.shape[0]).to(a)
    return float((a @ (b @ w)).norm() / (w.norm() * (a.norm() + b.norm())))


def _random(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _check_orthonormal(vectors: Tensor) -> None:
    """Lengths of all columns, and one random combination of them: no product of matrices."""
    lengths = vectors.norm(dim=0)
    w = _random(vectors.shape[1]).to(vectors)
    off = (vectors.T @ (vectors @ w) - w).norm() / w.norm()
    if not bool(((lengths - 1).abs() < _ORTHONORMAL).all()) or not bool(off < _ORTHONORMAL):
        refuse("H", "orthonormal eigenvectors", "others")
