"""What each backend can do, measured: exact, an approximation, or refused, for every structure, fix and kind of layer.
The same of each extension of BackPACK, for every kind of loss.

    python tests/backend_tables.py docs/backends.md

runs every combination on small cases in float64, compares it with the oracle, and writes the tables between the marks
of the pages that are named. A test fails when a page is out of date.
"""

import copy
import functools
import itertools
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from backpack import backpack, extend
from backpack import extensions as host
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.hbp.hbp_options import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.backpack import CurvatureFactor, DiagCurvature
from contrastive_curvature.laplace.backends import ContrastiveBackend
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.structures.dense import clamped_matrix
from contrastive_curvature.testing.cases import FIXES, close
from contrastive_curvature.testing.losses import make_backend
from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_ggn, dense_jacobian

__all__ = ["BACKENDS", "extension_table", "layer_table", "rewrite", "structure_table"]

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
    tables = {"structures": structure_table, "layers": layer_table, "extensions": extension_table}

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


_GGN = "`J^T H J`, with the output Hessian `H` of `distance` and `pd_fix`"
_MEAN = "; `MC`: on average"
_FACTORS = "Kronecker factors of `J^T H J` by their formulas; `KFAC`: on average"
_HESSIAN = "Hessian of the loss in the parameters"
_UNEQUAL = torch.tensor([0, 0, 0, 1, 1, 2])
"""Classes of other sizes: with equal ones, the euclidean blocks of a loss of pairs are zero."""
_POSITIVE = "positive-curvature Hessian, of convex losses"
_GRADIENTS = "gradient through each point while the others rest, and its norm, sum of squares or variance"

_ONE_PCH = (
    *(Curvature.PCH_CLIP, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE),
    ExpectationApproximation.BOTEV_MARTENS,
)
EXTENSIONS: dict[str, tuple[Any, str, str]] = {
    "DiagGGNExact": (host.DiagGGNExact(), _GGN + _MEAN, "diagonal"),
    "DiagGGNMC": (host.DiagGGNMC(2), _GGN + _MEAN, "diagonal"),
    "BatchDiagGGNExact": (host.BatchDiagGGNExact(), _GGN + _MEAN, "diagonals"),
    "BatchDiagGGNMC": (host.BatchDiagGGNMC(2), _GGN + _MEAN, "diagonals"),
    "SqrtGGNExact": (host.SqrtGGNExact(), _GGN + _MEAN, "root"),
    "SqrtGGNMC": (host.SqrtGGNMC(2), _GGN + _MEAN, "root"),
    "KFAC": (host.KFAC(2), _FACTORS, "kflr"),
    "KFLR": (host.KFLR(), _FACTORS, "kflr"),
    "KFRA": (host.KFRA(), _FACTORS, "kfra"),
    "GGNMP": (host.GGNMP(), _GGN, "products"),
    "DiagCurvature": (DiagCurvature(), _GGN, "diagonal"),
    "CurvatureFactor": (CurvatureFactor(), _GGN, "root"),
    "HMP": (host.HMP(), _HESSIAN, "products"),
    "DiagHessian": (host.DiagHessian(), _HESSIAN, "diagonal"),
    "BatchDiagHessian": (host.BatchDiagHessian(), _HESSIAN, "diagonals"),
    "PCHMP": (host.PCHMP(), _POSITIVE, ""),
    "HBP": (host.HBP(*_ONE_PCH), _POSITIVE, ""),
    "BatchGrad": (host.BatchGrad(), _GRADIENTS, "gradients"),
    "BatchL2Grad": (host.BatchL2Grad(), _GRADIENTS, "norms"),
    "SumGradSquared": (host.SumGradSquared(), _GRADIENTS, "squares"),
    "Variance": (host.Variance(), _GRADIENTS, "variance"),
}
"""BackPACK's and ours: what a page defines, and the form in which it is stored; ``KFAC`` and others are kinds of
``HBP``."""


def extension_table() -> str:
    """Return Markdown: what every extension gives for a loss of each kind; extensions with one answer share a row."""
    proxies = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = (cc.ContrastiveLoss(None), cc.InfoNCELoss(0.5), cc.ProxyLoss(proxies, scale=4.0))
    rows: dict[str, list[str]] = {name: [gives] for name, (_, gives, _) in EXTENSIONS.items()}
    for loss in losses:
        surveys: dict[str, dict[str, list[tuple[PDFix, Distance]]]] = {name: {} for name in EXTENSIONS}
        for fix, distance in itertools.product(_FIXES, Distance):
            truth = _Truth(loss.replaced(pd_fix=fix, distance=distance))
            for name, survey in surveys.items():
                survey.setdefault(_classify_extension(name, truth), []).append((fix, distance))
        for name, survey in surveys.items():
            rows[name].append(_describe(survey))
    lines = _header(["extensions", "give", *(f"loss of {loss.compares}" for loss in losses)])
    return "\n".join(
        [*lines, *(_row([", ".join(f"`{name}`" for name in names), *cells]) for cells, names in _alike(rows).items())]
    )


def _describe(survey: dict[str, list[tuple[PDFix, Distance]]]) -> str:
    if len(survey) == 1:
        return next(iter(survey))
    parts = []
    for status in (EXACT, APPROXIMATE):
        fixes = []
        for fix in _FIXES:
            distances = [d for f, d in survey.get(status, []) if f is fix]
            if distances:
                fixes.append(f"`{fix}`" if len(distances) == len(Distance) else f"{distances[0]} `{fix}`")
        if fixes:
            parts.append(f"{status} for {', '.join(fixes)}")
    return "; ".join([*parts, *([f"else {REFUSED}"] if REFUSED in survey else [])])


class _Truth:
    """A network of two layers with a loss, and what the extensions should give, by autograd.

    The output Hessian is the library's; tests/losses compares it with autograd.
    """

    def __init__(self, loss: CosineLoss) -> None:
        torch.manual_seed(3)
        self.loss = loss
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        self.x = torch.randn(len(_UNEQUAL), 3, dtype=torch.float64)
        self.z = self.model(self.x).detach()
        self.sizes = [p.numel() for p in self.model.parameters()]
        self.jacobian = dense_jacobian(self.model, self.x).view(*self.z.shape, -1)
        self.hessian = loss.output_hessian(self.z, _UNEQUAL).dense().view(*self.z.shape, *self.z.shape)
        self.own = torch.stack([self.hessian[n, :, n] for n in range(len(self.z))])

    def in_form(self, gives: str, form: str) -> Tensor:
        """Return a quantity as :func:`_stored` returns what an extension gives."""
        if gives == _GRADIENTS:
            z = self.z.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.loss(z, _UNEQUAL), z)
            each = torch.einsum("nd,ndp->np", slope, self.jacobian)
            norms = torch.stack([part.square().sum(1) for part in each.split(self.sizes, dim=1)])
            squares, variance = each.square().sum(0), each.var(0, unbiased=False)
            return {"gradients": each, "norms": norms, "squares": squares, "variance": variance}[form]
        if gives == _HESSIAN:
            whole, of_points = self.of_parameters(slice(None)), []
            if self.loss.compares == "proxies":  # a mean over the points
                of_points = [self.of_parameters(slice(n, n + 1)) / len(self.x) for n in range(len(self.x))]
        else:
            whole = torch.einsum("ndp,ndme,meq->pq", self.jacobian, self.hessian, self.jacobian)
            of_points = list(torch.einsum("ndp,nde,neq->npq", self.jacobian, self.own, self.jacobian))
        if form in ("kflr", "kfra"):
            return self.factors(whole, averaged=form == "kfra")
        diagonals = torch.stack([matrix.diagonal() for matrix in (of_points or [whole])])
        blocks = whole * torch.block_diag(*(torch.ones(size, size) for size in self.sizes))
        return {"diagonal": whole.diagonal(), "diagonals": diagonals, "root": whole, "products": blocks}[form]

    def of_parameters(self, rows: slice) -> Tensor:
        """Return the Hessian of the loss of some points in the parameters (P, P)."""
        named = {name: p.detach() for name, p in self.model.named_parameters()}

        def value(flat: Tensor) -> Tensor:
            parts = zip(named.items(), flat.split(self.sizes), strict=True)
            weights = {name: part.view_as(p) for (name, p), part in parts}
            return self.loss(torch.func.functional_call(self.model, weights, (self.x[rows],)), _UNEQUAL[rows])

        point = torch.cat([p.flatten() for p in named.values()])
        return torch.as_tensor(torch.autograd.functional.hessian(value, point))

    def factors(self, whole: Tensor, averaged: bool) -> Tensor:
        """Return Kronecker factors: of a layer's outputs, as its bias has them, times the mean of its inputs.

        ``averaged``: The Hessians are summed before they go through the layers, whose Jacobians are averaged.
        """
        first, last = whole[9:12, 9:12], whole[-2:, -2:]
        if averaged:
            later = torch.stack([torch.func.jacrev(self.model[1:])(row) for row in self.model[0](self.x).detach()])
            first = torch.einsum("ndi,de,nej->ij", later, self.own.sum(0), later) / len(self.x)
        parts = []
        for outputs, inputs in ((first, self.x), (last, self.model[:2](self.x).detach())):
            parts += [torch.kron(outputs.contiguous(), inputs.T @ inputs / len(inputs)), outputs]
        return torch.block_diag(*parts)


def _classify_extension(name: str, truth: _Truth) -> str:
    made, gives, form = EXTENSIONS[name]
    model, loss = extend(copy.deepcopy(truth.model)), extend(copy.deepcopy(truth.loss))
    # Every vector of signs once, so that the samples are their own mean.
    signs = torch.tensor([[1, 1], [0, 1]]).unsqueeze(1)
    try:
        with backpack(made), mock.patch("torch.randint", lambda *shape, **_: signs.expand(shape[2])):
            loss(model(truth.x), _UNEQUAL).backward()
    except UnsupportedError:
        return REFUSED
    found = _stored([getattr(p, made.savefield) for p in model.parameters()], form, model)
    if not close(found.detach(), truth.in_form(gives, form).detach()):
        raise AssertionError(f"{name} of {truth.loss} is neither what its page defines nor refused")
    return EXACT


def _stored(found: list[Any], form: str, model: nn.Module) -> Tensor:
    """Return what an extension stored for every parameter as one tensor."""
    if form == "products":
        eyes = [torch.eye(p.numel(), dtype=p.dtype).view(-1, *p.shape) for p in model.parameters()]
        return torch.block_diag(*(product(eye).flatten(1) for product, eye in zip(found, eyes, strict=True)))
    if form == "root":
        signs = getattr(found[0], "signs", 1.0)
        columns = [f.columns.flatten(1) if hasattr(f, "signs") else f.flatten(2).flatten(0, 1) for f in found]
        return (torch.cat(columns, dim=1).T * signs) @ torch.cat(columns, dim=1)
    if form in ("kflr", "kfra"):
        return torch.block_diag(*(functools.reduce(torch.kron, map(Tensor.contiguous, f)) for f in found))
    if form == "norms":
        return torch.stack(found)
    return torch.cat([f.flatten(1 if form in ("diagonals", "gradients") else 0) for f in found], dim=-1)


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
