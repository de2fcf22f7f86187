"""Fitting through laplace-torch: every class against the curvature of the whole data set in one batch."""

import itertools
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace.utils import LargestVarianceDiagLaplaceSubnetMask
from strategies import close
from tables import covering, each
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.testing import dense_jacobian

LAST = [("last_layer", "diag"), ("last_layer", "kron"), ("last_layer", "kron_lowrank"), ("last_layer", "full")]
ALL = [("all", "diag"), ("all", "kron"), ("all", "full")]
SUBNET = [("subnetwork", "diag"), ("subnetwork", "full")]
COMBINATIONS = LAST + ALL + SUBNET
INPUTS, HIDDEN, DIM, POINTS = 4, 6, 3, 20
INDICES = torch.tensor([2, 5, 11, 29, 30, 35, 47, 50])
"""Of the 30 + 21 parameters of :func:`body`: both weights and both biases."""
OPTIONS = {"margin": 1.2, "negative_weight": 0.3}
"""A margin that some pairs cross, and a curvature with eigenvalues of both signs."""

for_every_combination = pytest.mark.parametrize(("weights", "structure"), COMBINATIONS)


def body(*tail: nn.Module, device: str = "cpu", bias: bool = True, dim: int = DIM) -> nn.Sequential:
    """The same small encoder at every call, in float64."""
    torch.manual_seed(1)
    layers = [nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, dim, bias=bias)]
    return nn.Sequential(*layers, *tail).double().to(device)


def data(device: str = "cpu", n: int = POINTS) -> tuple[Tensor, Tensor]:
    """Unbalanced classes, so that the normalisations differ."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, INPUTS, generator=generator, dtype=torch.float64)
    return x.to(device), (torch.arange(n) % 7).clamp(max=3).to(device)


def batches(x: Any, y: Tensor, size: int = 6, shuffle: bool = True) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=shuffle)


def make(model: nn.Module, weights: str, structure: str, host: dict[str, Any] | None = None, **options: Any) -> Any:
    extra = dict(host or {})
    if weights == "subnetwork":
        extra["subnetwork_indices"] = INDICES
    kwargs = {**OPTIONS, **options}
    if (weights, structure) == ("last_layer", "kron"):
        kwargs["rank"] = "full"
    return Laplace(
        model,
        likelihood="contrastive",
        subset_of_weights=weights,
        hessian_structure=structure,
        backend_kwargs=kwargs,
        **extra,
    )


def fitted(model: nn.Module, weights: str, structure: str, x: Tensor, y: Tensor, **kwargs: Any) -> Any:
    la = make(model, weights, structure, **kwargs)
    la.fit(batches(x, y))
    return la


def curvature(model: nn.Module, x: Any, y: Tensor, weights: str, structure: str, clamp: bool, **options: Any) -> Any:
    """What the library says of the whole set at once."""
    subset: Any = INDICES.to(y.device) if weights == "subnetwork" else weights
    kind = "kron" if structure == "kron_lowrank" else structure
    kwargs = {**OPTIONS, **options}
    found: Any = cc.ggn(model, x, y, subset_of_weights=subset, structure=kind, clamp=clamp, **kwargs)
    if structure == "kron_lowrank":
        found[0].append(found[0][1].trace().reshape(1))
    return found


def dense_factors(factors: list[list[Tensor]]) -> Tensor:
    return torch.block_diag(*[torch.kron(*f) if len(f) == 2 else f[0] for f in factors])


def leading(a: Tensor) -> Tensor:
    """An input factor as ``kron_lowrank`` keeps it: 99 % of its trace, and the rest isotropic."""
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(a))
    rank = next(r for r in range(1, len(values) + 1) if values[r:].sum() <= 0.01 * values.sum())
    rest = torch.zeros_like(values)
    rest[rank:] = values[rank:].mean()
    return (vectors * torch.where(rest > 0, rest, values)) @ vectors.T


def dense_h(la: Any, structure: str) -> Tensor:
    """The clamped curvature that the posterior of a fitted object is made from."""
    if structure.startswith("kron"):
        return la.H.to_matrix(exponent=1)
    return la.H.diag() if structure == "diag" else la.H


def dense_truth(model: nn.Module, x: Any, y: Tensor, weights: str, structure: str, **options: Any) -> Tensor:
    truth = curvature(model, x, y, weights, structure, clamp=True, **options)
    if structure == "kron_lowrank":
        truth[0] = [truth[0][0], leading(truth[0][1])]
    if structure.startswith("kron"):
        return dense_factors(truth)
    return truth.diag() if structure == "diag" else truth


def same_raw(la: Any, truth: Any) -> bool:
    if isinstance(truth, Tensor):
        return close(la.H_raw, truth)
    pairs = [(a, b) for f, g in zip(la.H_raw, truth, strict=True) for a, b in zip(f, g, strict=True)]
    return all(close(a, b) for a, b in pairs)


@for_every_combination
def test_fit_is_the_curvature_of_the_whole_set(weights: str, structure: str, device: str) -> None:
    x, y = data(device)
    la = fitted(body(cc.L2Norm(), device=device), weights, structure, x, y)
    raw = body(device=device)  # the truth never meets a normalisation
    assert same_raw(la, curvature(raw, x, y, weights, structure, clamp=False))
    assert close(dense_h(la, structure), dense_truth(raw, x, y, weights, structure))
    assert (la.n_data, la.n_outputs) == (POINTS, DIM)
    vector = torch.nn.utils.parameters_to_vector((raw[2] if weights == "last_layer" else raw).parameters())
    assert torch.equal(la.mean, vector.detach())


@pytest.mark.filterwarnings("ignore:hessian_structure='kron.* with pd_fix")
@covering(
    1,
    pd_fix=["positive", "fixed", "full", "psd"],
    normalization=["sum", "type", "anchor"],
    distance__margin=[("arccos", None), ("euclidean", 1.2)],
)
def test_every_option_reaches_the_curvature(
    distance: str, margin: float | None, normalization: str, pd_fix: str
) -> None:
    x, y = data()
    options = {"distance": distance, "margin": margin, "normalization": normalization, "pd_fix": pd_fix}
    options["negative_weight"] = 0.1
    # Documented: the mean over pairs is multiplied by N / 2, so that it grows with the data.
    scale = POINTS / 2 if normalization == "type" else 1.0
    for weights, structure in [*LAST, *ALL, *SUBNET]:
        la = make(body(), weights, structure, **options)
        la.fit(batches(x, y))
        truth = curvature(body(), x, y, weights, structure, clamp=False, **options)
        truth = [[scale * f[0], *f[1:]] for f in truth] if structure.startswith("kron") else scale * truth
        assert same_raw(la, truth), (weights, structure)


def test_kron_of_coupled_fixes_warns() -> None:
    with pytest.warns(UserWarning, match=r"overstates.*'diag' or 'full' is exact"):
        make(body(), "all", "kron", pd_fix="full")


@pytest.mark.parametrize("normalization", ["sum", "type", "anchor"])
@pytest.mark.parametrize("pd_fix", ["fixed", "full"])
def test_pairs_inside_batches_stand_for_all_pairs_of_their_type(normalization: str, pd_fix: str) -> None:
    """Pair by pair: the weight that it has in the data set, over the part of the pairs of its type inside a batch."""
    x, y = data()
    off = ~torch.eye(POINTS, dtype=torch.bool)
    inside = torch.block_diag(*(torch.ones(n, n) for n in (8, 8, POINTS - 16))).bool()
    options = {**OPTIONS, "normalization": "sum", "pd_fix": pd_fix}
    truth = torch.zeros(51, dtype=torch.float64)
    for mask, negative in (((y[:, None] == y) & off, False), (y[:, None] != y, True)):
        per_point, total = mask.sum(1).double(), float(mask.sum()) / 2
        share = {"sum": torch.ones(POINTS), "type": torch.ones(POINTS).double() * POINTS / 2 / total}
        share["anchor"] = torch.where(per_point > 0, 1 / per_point, 0.0)
        here = (mask & inside).triu()
        weight = OPTIONS["negative_weight"] if negative else 1 - OPTIONS["negative_weight"]
        for i, j in here.nonzero().tolist():
            pair, empty = torch.tensor([[0], [1]]), torch.empty(2, 0, dtype=torch.int64)
            listed = (*empty, *pair) if negative else (*pair, *empty)
            one = cc.ggn(
                body(), x[[i, j]], pairs=listed, clamp=False, **{**options, "negative_weight": float(negative)}
            )
            mean_share = float(share[normalization][i] + share[normalization][j]) / 2
            truth += weight * mean_share * total / float(here.sum()) * one
    for relation in (None, lambda a, b: (a[:, None] == b, a[:, None] != b)):
        chosen = {"normalization": normalization, "pairs": "batch", "pd_fix": pd_fix, "relation": relation}
        la = make(body(), "all", "diag", **chosen)
        la.fit(batches(x, y, size=8, shuffle=False))
        assert close(la.H_raw, truth), chosen


@for_every_combination
def test_what_laplace_torch_reads_of_a_posterior(weights: str, structure: str, device: str) -> None:
    x, y = data(device)
    la = fitted(body(device=device), weights, structure, x, y, host={"prior_precision": 2.0, "temperature": 0.4})
    h = dense_truth(body(device=device), x, y, weights, structure)
    precision = h / 0.4 + 2 * torch.eye(len(h)).to(h)
    covariance = torch.linalg.inv(precision)
    assert close(la.posterior_variance, covariance.diagonal())
    stated = la.posterior_precision
    if structure.startswith("kron"):
        assert close(stated.to_matrix(exponent=1), precision)
        factors = curvature(body(device=device), x, y, weights, structure, clamp=False)
        if structure == "kron_lowrank":
            factors[0] = [factors[0][0], leading(factors[0][1])]
        assert close(la.H_facs.to_matrix(), dense_factors(factors))
        with pytest.raises(cc.UnsupportedError, match=r"posterior_scale: 'kron.*has no triangular factor"):
            _ = la.posterior_scale
        return
    with pytest.raises(cc.UnsupportedError, match=r"H_facs: hessian_structure=.* has no factors"):
        _ = la.H_facs
    scale = la.posterior_scale
    if structure == "diag":
        assert close(stated.diag(), precision)
        assert close(scale.square().diag(), covariance)
    else:
        assert close(stated, precision)
        assert close(scale, torch.linalg.cholesky(covariance))


def test_the_mask_of_the_largest_variances_takes_a_contrastive_posterior() -> None:
    x, y = data()
    mask = LargestVarianceDiagLaplaceSubnetMask(body(), 7, make(body(), "all", "diag"))
    chosen = mask.select(batches(x, y))
    diagonal = dense_truth(body(), x, y, "all", "diag").diagonal()
    assert torch.equal(chosen.sort().values, diagonal.argsort()[:7].sort().values)
    la = Laplace(body(), "contrastive", "subnetwork", "full", subnetwork_indices=chosen)
    la.fit(batches(x, y))
    assert la(x).mu.shape == (POINTS, DIM)


def test_mappings_with_a_key_of_their_own_for_the_labels() -> None:
    class FromDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = body()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(batch["image"])

    x, y = data()
    loader = [{"image": x[k : k + 6], "place": y[k : k + 6], "camera": "front"} for k in range(0, POINTS, 6)]
    la = make(FromDict(), "last_layer", "diag", host={"dict_key_y": "place"})
    la.fit(loader)
    assert close(la.H.diag(), dense_truth(body(), x, y, "last_layer", "diag"))
    assert la({"image": x}).mu.shape == (POINTS, DIM)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_a_last_layer_without_bias(structure: str) -> None:
    x, y = data()
    la = fitted(body(bias=False), "last_layer", structure, x, y, host={"prior_precision": 2.0})
    h = dense_truth(body(bias=False), x, y, "last_layer", structure)
    assert close(dense_h(la, structure), h)
    j = dense_jacobian(body(bias=False), x)[:, -len(h) :].view(POINTS, DIM, -1)
    assert close(la(x).covariance, j @ torch.linalg.inv(h + 2 * torch.eye(len(h))) @ j.mT)


def test_kron_gives_a_layer_that_never_runs_no_curvature() -> None:
    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = body()
            self.head = nn.Linear(INPUTS, 2).double()
            self.scale = nn.ParameterDict({"temperature": torch.ones((), dtype=torch.float64)})

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.warns(UserWarning, match=r"no gradient reaches 10 of the posterior's 62 weights, all of 'head': "):
        la = fitted(WithHead(), "all", "kron", *data())
    used = dense_truth(body(), *data(), "all", "kron")
    dense = la.H.to_matrix(exponent=1)
    assert close(dense[: len(used), : len(used)], used)
    assert not dense[len(used) :].any()


@pytest.mark.parametrize(("weights", "structure"), [*LAST, *ALL, *SUBNET])
def test_a_continued_fit_adds_a_further_data_set(weights: str, structure: str, device: str) -> None:
    x, y = data(device)
    first, second = slice(0, 12), slice(12, POINTS)
    la = make(body(device=device), weights, structure)
    la.fit(batches(x[first], y[first]))
    la.fit(batches(x[second], y[second]), override=False)
    model = body(device=device)
    a = curvature(model, x[first], y[first], weights, structure, clamp=False)
    b = curvature(model, x[second], y[second], weights, structure, clamp=False)
    if structure.startswith("kron"):
        shares = (12 / POINTS, 8 / POINTS)
        # Curvature factors add up; input factors are means over the data.
        truth: Any = [
            [f[0] + g[0], *(shares[0] * p + shares[1] * q for p, q in zip(f[1:], g[1:], strict=True))]
            for f, g in zip(a, b, strict=True)
        ]
    else:
        truth = a + b
    assert same_raw(la, truth)
    assert la.n_data == POINTS
    loss = cc.ContrastiveLoss(**OPTIONS)
    parts = [loss(model(x[part]), y[part]).item() for part in (first, second)]
    assert float(la.loss) == pytest.approx(sum(parts), rel=1e-10)
    cost = la.cost
    la.fit(batches(x[second], y[second]))
    of_second = la.cost
    la.fit(batches(x[first], y[first]))
    assert same_raw(la, a)
    assert la.n_data == 12
    assert 0 < la.cost < cost
    assert cost == pytest.approx(la.cost + of_second, rel=1e-12)


@pytest.mark.filterwarnings("ignore:The clamped curvature is zero")
@pytest.mark.parametrize(
    ("labels", "positive", "negative"),
    [([0, 0, 0, 1, 1, 1], (1.0, 1.0), (0.9, 0.9)), ([0, 0, 0, 0, 1, 1], (0.7, 1.05), (1.0, 1.0))],
)
def test_what_stays_of_the_bias_over_all_batches_of_a_small_set(
    labels: list[int], positive: tuple[float, float], negative: tuple[float, float]
) -> None:
    """The mean over all ten ways to divide six points into two batches, as docs/theory.md has it."""
    y, n = torch.tensor(labels), len(labels)
    x = torch.randn(n, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ways = [[0, *pair] for pair in itertools.combinations(range(1, n), 2)]
    for normalization in ("sum", "type", "anchor"):
        for w, (low, high) in ((0.0, positive), (1.0, negative)):
            options = {"normalization": normalization, "negative_weight": w, "margin": None}
            whole = make(body(), "last_layer", "diag", **options)
            whole.fit([(x, y)])
            mean = 0.0
            for first in ways:
                la = make(body(), "last_layer", "diag", pairs="batch", **options)
                la.fit([(x[rows], y[rows]) for rows in (first, [k for k in range(n) if k not in first])])
                mean += float(la.loss) / len(ways)
            # The loss is a sum over pairs, all of one sign.
            assert low - 1e-9 <= mean / float(whole.loss) <= high + 1e-9, (normalization, w)


@covering(1, pd_fix=["positive", "fixed", "full", "psd"], margin=[None, 0.9])
def test_loss_is_that_of_the_loss_module_whatever_the_fix(margin: float | None, pd_fix: str, device: str) -> None:
    x, y = data(device)
    z = body(device=device)(x).detach()
    la = fitted(body(device=device), "all", "diag", x, y, pd_fix=pd_fix, margin=margin)
    loss = cc.ContrastiveLoss(margin, OPTIONS["negative_weight"])(z, y)
    assert float(la.loss) == pytest.approx(float(loss), rel=1e-10)
    # Without a margin a repelling pair is counted from the largest distance, 2: the loss of the margin 2.
    cost = cc.ContrastiveLoss(margin or 2.0, OPTIONS["negative_weight"])(z, y)
    assert float(la.cost) == pytest.approx(float(cost), rel=1e-10)


@each("dtype", [torch.bool, torch.uint8, torch.int32])
def test_labels_of_every_integer_type(dtype: torch.dtype) -> None:
    x, y = data()
    assert close(cc.ggn(body(), x, (y % 2).to(dtype)), cc.ggn(body(), x, y % 2))
    la, again = (fitted(body(), "last_layer", "diag", x, labels) for labels in ((y % 2).to(dtype), y % 2))
    assert close(la.H_raw, again.H_raw)
