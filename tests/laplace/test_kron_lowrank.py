"""``hessian_structure="kron_lowrank"``: against the dense posterior that it stands for, in NumPy and float64."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from laplace import Laplace
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.embedding.spread import Axes
from contrastive_curvature.network.last_layer import sketch_moment, sketch_size
from contrastive_curvature.structures.nystrom import LowRankMoment, choose_rank, low_rank_moment

Array = np.ndarray[Any, Any]


def features(n: int, width: int, seed: int = 0, decay: float = 1.0) -> Tensor:
    """Non-negative and correlated, with a spectrum that decays by a power."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n, width, generator=generator, dtype=torch.float64)
    mixed = mixed * torch.arange(1, width + 1, dtype=torch.float64).pow(-decay)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    return (mixed @ turn).abs()


def encoder(width: int, dim: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    generator = torch.Generator().manual_seed(2)
    layer = nn.Linear(width, dim, bias=bias).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / width**0.5)
    return nn.Sequential(nn.Identity(), layer).to(dtype)


def labels(n: int) -> Tensor:
    return torch.arange(n) % max(1, min(4, n // 2))


def fitted(x: Tensor, model: nn.Module, structure: str = "kron_lowrank", size: int = 7, **options: Any) -> Any:
    prior, temperature = options.pop("prior", 0.7), options.pop("temperature", 0.3)
    chosen = {"pd_fix": "psd", "margin": None, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hessian_structure=|One point contributes|.* points contribute|The clamped")
        la: Any = Laplace(
            model,
            "contrastive",
            hessian_structure=structure,
            prior_precision=prior,
            temperature=temperature,
            backend_kwargs=chosen,
        )
        la.fit(list(zip(x.split(size), labels(len(x)).split(size), strict=True)))
    return la


def dense_precision(la: Any, x: Tensor, rank: int, options: dict[str, Any]) -> Array:
    """``kron(G, A_lr) / T + prior`` from the features and the dense curvature factor, by NumPy alone."""
    dim, width = la.model.last_layer.weight.shape
    model = encoder(width, dim, la.model.last_layer.bias is not None)
    kwargs = {"pd_fix": "psd", "margin": None, **options}
    kwargs.pop("rank", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        factors = cc.ggn(model, x, labels(len(x)), structure="kron", subset_of_weights="last_layer", **kwargs)
    g = factors[0][0].numpy()
    phi = x.numpy()
    values, vectors = np.linalg.eigh(phi.T @ phi / len(phi))
    values, vectors = values[::-1].copy(), vectors[:, ::-1]
    if rank < width:
        values[rank:] = values[rank:].sum() / (width - rank)
    a = (vectors * values) @ vectors.T
    out = np.zeros((la.n_params, la.n_params))
    out[: dim * width, : dim * width] = np.kron(g, a)
    if len(factors) > 1:
        out[dim * width :, dim * width :] = g
    prior = la.prior_precision.expand(2) if len(la.prior_precision) == 1 else la.prior_precision
    sizes = la.posterior.fitted.sizes
    diagonal = np.concatenate([np.full(size, float(p)) for size, p in zip(sizes, prior[: len(sizes)], strict=True)])
    return out / la.temperature + np.diag(diagonal)


def jacobian(phi: Tensor, dim: int, bias: bool) -> Array:
    """Shape (B, D, P)."""
    rows = [np.kron(np.eye(dim), row[None]) for row in phi.numpy()]
    return np.stack([np.concatenate([row, np.eye(dim)], axis=1) if bias else row for row in rows])


def near(a: Any, b: Array, tolerance: float = 1e-10) -> bool:
    got = a.detach().double().numpy() if isinstance(a, Tensor) else np.asarray(a)
    return got.shape == b.shape and float(np.abs(got - b).max(initial=0)) <= tolerance * float(np.abs(b).max(initial=0))


@given(data=st.data())
def test_everything_is_that_of_the_dense_posterior(data: st.DataObject) -> None:
    n, width, dim = (
        data.draw(st.integers(*bounds), label) for bounds, label in (((4, 12), "N"), ((1, 9), "F"), ((2, 4), "D"))
    )
    bias = data.draw(st.booleans(), "bias")
    rank = data.draw(st.one_of(st.none(), st.integers(1, width + 2)), "rank")
    options: dict[str, Any] = {
        "pd_fix": data.draw(st.sampled_from(["psd", "fixed", "positive", "full"]), "pd_fix"),
        "distance": data.draw(st.sampled_from(["arccos", "euclidean"]), "distance"),
        "negative_weight": 0.2,
    }
    if rank is not None:
        options["rank"] = rank
    prior: Any = data.draw(st.sampled_from([0.7, [0.7], [0.3, 2.0]] if bias else [0.7]), "prior")
    x = features(n, width, seed=data.draw(st.integers(0, 99), "seed"), decay=data.draw(st.sampled_from([0.0, 1.5])))
    given_prior = prior if isinstance(prior, float) else torch.tensor(prior, dtype=torch.float64)
    la = fitted(x, encoder(width, dim, bias), prior=given_prior, size=data.draw(st.integers(2, n), "batch"), **options)
    assume(bool(la.posterior.fitted.clamped.diagonal().any()))
    assert la.hessian_structure == "kron_lowrank"
    assert la.rank == (min(rank, width) if rank is not None else la.rank)
    precision = dense_precision(la, x, la.rank, options)
    covariance = np.linalg.inv(precision)
    new = features(3, width, seed=5)
    j = jacobian(new, dim, bias)
    truth = j @ covariance @ j.transpose(0, 2, 1)
    out = la(new)
    assert near(out.raw_mean, encoder(width, dim, bias)(new).detach().numpy())
    assert near(out.covariance, truth)
    assert near(la(new, diagonal_output=True).variance, np.diagonal(truth, axis1=1, axis2=2))
    flat = j.reshape(3 * dim, -1)
    assert near(la(new, joint=True).joint_covariance, flat @ covariance @ flat.T)
    logdet = np.linalg.slogdet(precision)[1]
    assert float(la.log_det_posterior_precision) == pytest.approx(logdet, rel=1e-9, abs=1e-9)
    assert float(la.log_det_ratio) == pytest.approx(logdet - float(la.log_det_prior_precision), rel=1e-8, abs=1e-8)
    prior_diagonal = la.prior_precision_diag.numpy()
    average = np.diag(precision - np.diag(prior_diagonal)).mean() * la.temperature
    la.optimize_prior_precision(strength=1.0)
    # The trace of the truncated factor is that of the features themselves.
    assert float(la.prior_precision) == pytest.approx(average / 0.3, rel=1e-9)


@given(
    width=st.integers(1, 40),
    n=st.integers(1, 12),
    rank=st.one_of(st.none(), st.integers(1, 45)),
    scale=st.sampled_from([0.0, 1e-12, 1.0, 1e12]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_sketch_gives_orthonormal_vectors_and_the_trace(
    width: int, n: int, rank: int | None, scale: float, dtype: torch.dtype
) -> None:
    phi = (scale * features(n, width)).to(dtype)
    sketch, trace = sketch_moment(phi, sketch_size(width, rank))
    found = low_rank_moment(sketch, trace, rank)
    tolerance = 2e-5 if dtype is torch.float32 else 1e-10
    r = found.vectors.shape[1]
    assert 1 <= r <= width
    assert rank is None or r == min(rank, width)
    assert found.vectors.dtype == dtype
    # Rounding turns vectors of values that are zero next to the largest one.
    vectors = found.vectors[:, found.values > 1e-6 * found.values[0]].double()
    assert near(vectors.T @ vectors, np.eye(vectors.shape[1]), tolerance)
    assert bool((found.values >= 0).all())
    assert bool((found.values.diff() <= 0).all())
    assert float(found.rest) >= 0
    total = float(found.values.sum() + (width - r) * found.rest)
    assert total == pytest.approx(float(phi.double().square().sum()), rel=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sketch_is_near_the_exact_truncation(dtype: torch.dtype) -> None:
    width, rank, size = 400, 20, 48
    assert sketch_size(width, rank) == size
    phi = features(300, width, decay=0.7).to(dtype)
    sketch, trace = sketch_moment(phi, size)
    found = low_rank_moment(sketch, trace, rank)
    exact = low_rank_moment(*sketch_moment(phi.double(), width), rank)
    truth = phi.double().T @ phi.double()
    left = float(trace) - float(torch.einsum("fr,fg,gr->", found.vectors.double(), truth, found.vectors.double()))
    best = float(trace) - float(exact.values.sum())
    # Expected (Tropp et al. 2017, theorem 4.1): at most 1 + R / (S - R - 1) times the best, 1.74 here.
    assert best <= left * (1 + 1e-5) < 1.4 * best
    assert found.values[:3].tolist() == pytest.approx(exact.values[:3].tolist(), rel=0.15)


def test_the_rank_leaves_one_percent_of_what_the_first_eigenvector_leaves() -> None:
    values = torch.tensor([90.0, 8.0, 1.92, 0.08])
    assert choose_rank(values, torch.tensor(100.0)) == 3
    assert choose_rank(values + torch.tensor([1e5, 0, 0, 0]), torch.tensor(100100.0)) == 3
    assert choose_rank(values, torch.tensor(1e6)) == 4
    assert choose_rank(torch.zeros(3), torch.tensor(0.0)) == 1
    assert choose_rank(torch.ones(200), torch.tensor(200.0)) == 64
    assert [sketch_size(width, None) for width in (2048, 2049)] == [2048, 136]


def test_what_is_left_is_not_lost_to_rounding_in_float32() -> None:
    """Outside the leading directions lies 1e-7 of a squared norm: a difference of norms would be all rounding."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.cat([torch.ones(12), torch.full((88,), 1e-4)]).double()
    x = (torch.randn(320, 100, generator=generator, dtype=torch.float64) * scales).flip(1)
    wide = fitted(x[:300], encoder(100, 3), rank=12).posterior.fitted.clamped
    (q, values, rest), new = wide.inputs, x[300:]
    narrow = LowRankMoment(q.float(), values, rest)
    single = replace(wide, axes=wide.axes.float(), inputs=narrow, bias=wide.bias.float())
    prior = torch.tensor([1e-9], dtype=torch.float64)
    truth, found = (
        Axes(*part.at_features(3, prior, 1.0)(phi)).variance for part, phi in ((wide, new), (single, new.float()))
    )
    assert near(found, truth.numpy(), 1e-4)
    # The part in question is not negligible.
    along = torch.outer(wide.of_g, values) + prior
    without = (new @ q).square() @ along.reciprocal().T @ wide.axes.square().T
    assert float((1 - without / truth).min()) > 0.1


@each("structure", ["kron_lowrank", "kron", "full", "diag"])
def test_autocast_touches_the_encoder_alone(structure: str) -> None:
    """The encoder is one layer without rounding in bfloat16, so all differences would be of the algebra."""
    extra = {"rank": {"kron_lowrank": 4, "kron": "full"}[structure]} if structure.startswith("kron") else {}
    x, new = (features(n, 40, seed=n, decay=2.0).bfloat16().float() for n in (60, 9))
    weights = nn.Linear(40, 3)

    class InFloat32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = weights

        def forward(self, at: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                out: Tensor = self.layer(at)
                return out

    plain = fitted(x, InFloat32(), structure, **extra)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        la = fitted(x, InFloat32(), structure, **extra)
        inside = la(new).covariance
    for found in (inside, la(new).covariance):
        assert found.dtype == torch.float32
        assert near(found, plain(new).covariance.double().numpy(), 1e-4)
    if structure == "kron_lowrank":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            joint = la(new, joint=True).joint_covariance
        assert near(joint, plain(new, joint=True).joint_covariance.double().numpy(), 1e-4)


def test_the_marginal_likelihood_can_be_differentiated() -> None:
    la = fitted(features(12, 6), encoder(6, 2), rank=2)
    prior = torch.tensor([0.4, 1.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: la.log_marginal_likelihood(p), (prior,))


def test_refusals_say_what_to_do() -> None:
    model = encoder(4, 2)

    def made(*args: str, **options: Any) -> Any:
        return Laplace(model, "contrastive", *args, backend_kwargs=options)

    with pytest.raises(cc.InputError, match=r"one of 'diag'.*'kron_lowrank' is for subset_of_weights='last_layer'\."):
        made("all", "kron_lowrank")
    with pytest.raises(cc.InputError, match=r"model: expected embeddings of D >= 2 dimensions, got D = 1"):
        fitted(features(8, 4), encoder(4, 1))
    with pytest.raises(cc.UnsupportedError, match="mc_samples"):
        made(mc_samples=2).fit([(features(8, 4), labels(8))])
    for arguments, bad in ((("all", "lowrank"), None), (("all", "kron"), 3), ((), 0), ((), "3")):
        with pytest.raises(cc.InputError, match="rank"):
            made(*arguments, rank=bad)
    with pytest.raises(cc.NotFittedError):
        _ = made().rank
    with pytest.raises(cc.InputError, match="rank"):
        made(pd_fix="psd", margin=None).load_state_dict(fitted(features(8, 4), model, rank=2).state_dict())
    with pytest.warns(UserWarning, match="'kron_lowrank' with pd_fix='positive'"):
        made(pd_fix="positive")


def test_a_fit_forms_no_large_matrix() -> None:
    width = 30_000
    x = features(40, 30).float().repeat(1, width // 30)
    la: Any = Laplace(nn.Linear(width, 2), "contrastive", backend_kwargs={"rank": 4, "pd_fix": "psd"})
    la.fit([(x[:20], labels(20)), (x[20:], labels(20))])
    # A matrix of (F, F) would have 900 million numbers.
    assert la.H_raw[0][1].shape == (width, 16)
    assert bool(la(x[:3]).kappa.isfinite().all())


def test_laplace_torch_reads_factors_and_no_matrix_of_all_weights() -> None:
    width, dim = 500, 3
    x = features(40, 20).float().repeat(1, width // 20)
    la: Any = Laplace(nn.Linear(width, dim), "contrastive", backend_kwargs={"rank": 4, "pd_fix": "psd"})
    la.fit([(x[:20], labels(20)), (x[20:], labels(20))])
    precision = la.posterior_precision
    assert [[len(q) for q in group] for group in precision.eigenvectors] == [[dim, width], [dim]]
    assert float(precision.logdet()) == pytest.approx(float(la.log_det_posterior_precision), rel=1e-5)
    value = torch.linspace(-1, 1, la.n_params)
    norm = float(la.square_norm(la.mean + value))
    assert float(value @ precision.bmm(value, exponent=1)) == pytest.approx(norm, rel=1e-4)
