"""What each backend can do, measured: exact, an approximation, or refused, for every structure, fix and kind of layer.

    python tests/backend_tables.py docs/backends.md

runs every combination on small cases in float64, compares it with the oracle, and writes the tables between the marks
of the pages that are named. A test fails when a page is out of date.
"""

import functools
import itertools
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.laplace.backends import ContrastiveBackend
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.structures.dense import clamped_matrix
from contrastive_curvature.testing.cases import FIXES, close
from contrastive_curvature.testing.losses import make_backend
from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_ggn, dense_jacobian

__all__ = ["BACKENDS", "layer_table", "rewrite", "structure_table"]

BACKENDS = ("ContrastiveGGN", "BackPackContrastiveGGN", "StochManContrastiveGGN")
ROWS = (
    ("last_layer", ("kron_lowrank", "diag", "full", "kron")),
    ("all", ("diag", "full", "kron")),
    ("subnetwork", ("diag", "full")),
)
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
INDICES = torch.tensor([0, 3, 7, 11])
EXACT, APPROXIMATE, REFUSED = "exact", "K-FAC", "refused"
"""Kronecker factors are the only approximation that a backend may give."""
_RANK = 2
"""Of ``kron_lowrank``, smaller than the number of features of every case."""


def structure_table(backends: Iterable[str] = BACKENDS) -> str:
    """Return Markdown: what every backend gives for each structure; structures with one answer share a row."""
    lines = _header(["weights", "structures", "in every backend"])
    for weights, structures in ROWS:
        rows = {
            structure: [_survey(getattr(cc, name), weights, structure) for name in backends] for structure in structures
        }
        for answers, alike in _alike(rows).items():
            lines.append(_row([f"`{weights}`", ", ".join(f"`{name}`" for name in alike), _together(answers, backends)]))
    return "\n".join(lines)


def _alike(rows: dict[str, list[str]]) -> dict[tuple[str, ...], list[str]]:
    """Group the names of rows with the same cells."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        groups.setdefault(tuple(cells), []).append(name)
    return groups


def _together(answers: Iterable[str], backends: Iterable[str]) -> str:
    """Join the answers of all backends; where they differ, each names its backends."""
    groups = _alike({name: [answer] for name, answer in zip(backends, answers, strict=True)})
    if len(groups) == 1:
        return next(iter(groups))[0]
    return "; ".join(f"{', '.join(f'`{name}`' for name in names)}: {answer}" for (answer,), names in groups.items())


_FIXES = tuple(map(PDFix, FIXES))
"""Those of the contrastive loss; the others are about second derivatives in the cosines, which it does not have."""


def layer_table(backends: Iterable[str] = BACKENDS) -> str:
    """Return Markdown: whether ``diag``, ``full`` and ``kron`` of all weights are exact; equal networks share a row."""
    names = list(backends)
    lines = _header(["encoder with", *(f"`{name}`" for name in names)])
    rows = {
        description: [_describe_layer(getattr(cc, name), kind) for name in names]
        for kind, description in NETWORKS.items()
    }
    for cells, alike in _alike(rows).items():
        lines.append(_row(["; ".join(alike), *cells]))
    return "\n".join(lines)


def rewrite(page: str) -> str:
    """Return a page with the tables between its marks made anew."""
    tables = {"structures": structure_table, "layers": layer_table}

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{tables[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- backends: (\w+)[^>]*-->).*?(<!-- end of backends -->)", fresh, page, flags=re.DOTALL)


def _survey(backend: type[ContrastiveBackend], weights: str, structure: str) -> str:
    """Return the status, the same for all fixes and distances."""
    cases = itertools.product(_FIXES, Distance)
    (status,) = {_classify(backend, "conv2d", weights, structure, fix, distance) for fix, distance in cases}
    return status


def _describe_layer(backend: type[ContrastiveBackend], kind: str) -> str:
    diag, full, kron = (
        _classify(backend, kind, "all", structure, PDFix.FIXED, Distance.ARCCOS)
        for structure in ("diag", "full", "kron")
    )
    if diag == full == EXACT and kron == REFUSED:
        return f"{EXACT}, no `kron`"
    return diag if diag == full else f"`diag` {diag}, `full` {full}"


def _classify(
    backend: type[ContrastiveBackend], kind: str, weights: str, structure: str, fix: PDFix, distance: Distance
) -> str:
    options = {"pd_fix": str(fix), "distance": str(distance)}
    status = APPROXIMATE if structure in ("kron", "kron_lowrank") else EXACT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, truth = _found_and_truth(backend, kind, weights, structure, options)
        except UnsupportedError:
            return REFUSED
    if not close(found, truth):
        msg = f"{backend.__name__}: {structure} of {weights} with {options} is neither {status} nor refused"
        raise AssertionError(msg)
    return status


def _found_and_truth(
    backend: type[ContrastiveBackend], kind: str, weights: str, structure: str, options: dict[str, str]
) -> tuple[Tensor, Tensor]:
    model, x = _case(kind)
    truth = _truth(kind, weights, **options)
    chosen = INDICES if weights == "subnetwork" else weights

    def made(of: type[ContrastiveBackend] = backend) -> Any:
        return make_backend(of, model, x, chosen, **options)

    if structure in ("diag", "full"):
        found = getattr(made(), structure)(x, LABELS, N=len(x))[1]
        return found, truth.diagonal() if structure == "diag" else truth
    # No oracle has an approximation: those of the reference backend, which tests/fit/test_ggn.py takes apart.
    factors = made(cc.ContrastiveGGN).kron(x, LABELS, N=len(x))[1]
    if structure == "kron":
        return made().kron(x, LABELS, N=len(x))[1].to_matrix(), factors.to_matrix()
    (g, a), (of_bias,) = factors.kfacs
    values, vectors = torch.linalg.eigh(a)
    values[:-_RANK] = values[:-_RANK].mean()
    inputs = (vectors * values) @ vectors.T
    curvature = torch.block_diag(torch.kron(clamped_matrix(g), inputs), clamped_matrix(of_bias)).view_as(truth)
    # Of the posterior: the joint covariance (N D, N D).
    kwargs = {**options, "rank": _RANK}
    la: Any = Laplace(model, "contrastive", weights, structure, backend=backend, backend_kwargs=kwargs)
    la.fit([(x, LABELS)])
    jacobian = dense_jacobian(model, x)[:, -len(curvature) :]
    precision = torch.eye(len(curvature), dtype=curvature.dtype) + curvature
    return la(x, joint=True).joint_covariance, jacobian @ torch.linalg.solve(precision, jacobian.T)


def _case(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return build_network(kind, 2), make_inputs(kind, len(LABELS))


@functools.cache
def _truth(kind: str, weights: str, **options: Any) -> Tensor:
    if weights == "all":
        return dense_ggn(*_case(kind), LABELS, **options)
    truth = _truth(kind, "all", **options)
    if weights == "subnetwork":
        return truth[INDICES][:, INDICES]
    count = sum(p.numel() for p in list(_case(kind)[0].modules())[-1].parameters())
    return truth[-count:, -count:]


def _header(names: list[str]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(pages: list[str]) -> None:
    """Rewrite the tables of some pages."""
    for page in map(Path, pages):
        page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
