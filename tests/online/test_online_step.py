"""A step of the online Laplace against Eq. 79-80 by hand; sketches, and what norms and priors a posterior has."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import DISTANCES, FIXES, NORMALIZATIONS, build_network, close, make_inputs, relate_by_remainder
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import contrastive_curvature as cc
from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.online import OnlineLaplace
from contrastive_curvature.online.discount import DiscountedCurvature
from contrastive_curvature.structures import Diagonal
from contrastive_curvature.structures.finite import clamped_matrix

N_DATA = 40


def random_parameters(encoder: nn.Module, subset: str) -> list[nn.Parameter]:
    if subset == "last_layer":
        return list([m for m in encoder.modules() if isinstance(m, nn.Linear)][-1].parameters())
    return [p for p in encoder.parameters() if p.requires_grad]


def moved(encoder: nn.Module, subset: str, shift: Tensor | None) -> nn.Module:
    other = copy.deepcopy(encoder)
    if shift is not None:
        chosen = random_parameters(other, subset)
        vector_to_parameters(parameters_to_vector(chosen).detach() + shift, chosen)
    return other


def default_loss(z: Tensor, labels: Tensor, margin: float | None, relation: Any = None) -> Tensor:
    """Half the mean over positives and half that over the negatives inside the margin, pair by pair."""
    u = z / z.norm(dim=1, keepdim=True)
    positive, negative = (
        (labels[:, None] == labels, labels[:, None] != labels) if relation is None else relation(labels, labels)
    )
    attract, repel = [], []
    for i in range(len(z)):
        for j in range(i):
            squared = (u[i] - u[j]).square().sum()
            if positive[i, j]:
                attract.append(squared / 2)
            if negative[i, j] and (margin is None or squared < margin**2):
                repel.append(((0 if margin is None else margin**2) - squared) / 2)
    return sum((torch.stack(part).mean() / 2 for part in (attract, repel) if part), z.sum() * 0)


def data_scale(normalization: str, batch: int) -> float:
    """What a batch's curvature is multiplied with, to be its share of that of ``N_DATA`` points."""
    return {"sum": (N_DATA - 1) / max(batch - 1, 1), "type": batch / 2, "anchor": 1.0}[normalization]


def curvature(encoder: nn.Module, x: Tensor, pairs: dict[str, Any], how: dict[str, Any]) -> list[Tensor]:
    """Clamped, at the scale of the data set; input factors of Kronecker pairs summed over the points."""
    found = cc.ggn(encoder, x, clamp=False, **pairs, **how)
    scale = data_scale(how["normalization"], len(x))
    if isinstance(found, Tensor):
        return [scale * found.clamp(min=0) if found.ndim == 1 else clamped_matrix(scale * found)]
    factors = [f for g, *a in found for f in (clamped_matrix(scale * g), *(len(x) * part for part in a))]
    return [*factors, torch.tensor(float(len(x)), dtype=torch.float64)]


def remembered(online: OnlineLaplace) -> list[Tensor]:
    return [b.clone() for name, b in online.discounted.named_buffers() if name.startswith("curvature_")]


def at_mean_loss(la: Any) -> None:
    """Set the temperature to the mean loss of a point, with the prior still over it; a given one stays."""
    if not la.prior.keeps_temperature and la.cost > 0:
        prior = la.prior_precision * la.temperature
        la.temperature = float(la.cost) / la.n_data
        la.prior_precision = prior / la.temperature


def posterior_noise(online: OnlineLaplace, how: dict[str, Any]) -> list[Tensor | None]:
    """The draw of the next step, as the generator stands."""
    terms, n = remembered(online), online.n_samples
    # Of Kronecker factors the first layer's may be clamped to zero, and the others not.
    if not bool(online.discounted.positive):
        if online._posterior.prior_precision is None:
            return [None]
        size = sum(p.numel() for p in random_parameters(online.encoder, how["subset_of_weights"]))
        return list(terms[0].new_empty(n, size).normal_() / online._posterior.prior_precision**0.5)
    if how["structure"] != "diag":
        la = online.laplace()
        if online._posterior.prior_precision is None:
            la.optimize_prior_precision(strength=1.0)
            at_mean_loss(la)
        return list(la.sample(n) - la.mean)
    h = N_DATA / online.discounted.points * terms[0]
    t = online._posterior.temperature or N_DATA / online.discounted.points * online.discounted.cost / N_DATA
    prior = online._posterior.prior_precision or (h / t).mean()
    return list(torch.randn(n, len(h), dtype=h.dtype, device=h.device) / (h / t + prior).sqrt())


@st.composite
def setups(draw: st.DrawFn) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], dict[str, Any], dict[str, Any]]:
    structure = draw(st.sampled_from(("diag", "diag", "full", "kron")))
    subset = draw(st.sampled_from(("last_layer", "all")))
    kinds = ["tanh", "no bias", "conv2d"] if structure == "kron" else ["tanh", "no bias", "conv2d", "embedding"]
    if subset == "all" and structure != "kron":
        kinds += ["shared", "frozen"]
    kind = draw(st.sampled_from(kinds))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    encoder = build_network(kind, draw(st.integers(2, 3)))
    batches = []
    for _ in range(2):
        n = draw(st.integers(4, 7))
        batches.append((make_inputs(kind, n), torch.arange(n) % draw(st.integers(1, 3))))
    how: dict[str, Any] = {
        "distance": draw(st.sampled_from(DISTANCES)),
        "pd_fix": draw(st.sampled_from(FIXES)),
        "normalization": draw(st.sampled_from(NORMALIZATIONS)),
        "margin": draw(st.sampled_from((None, 0.7, 1.3))),
        "negative_weight": draw(st.sampled_from((0.2, 0.5, 1.0))),
        "structure": structure,
        "subset_of_weights": subset,
    }
    settings = {
        "memory_factor": draw(st.sampled_from((0.0, 1e-4, 0.3))),
        "n_samples": draw(st.integers(1, 3)),
        "prior_precision": draw(st.sampled_from((None, 50.0))),
        "temperature": draw(st.sampled_from((None, 0.1))),
    }
    return encoder, batches, how, settings


def make_online(encoder: nn.Module, probe: Tensor, how: dict[str, Any], **settings: Any) -> OnlineLaplace:
    options = {k: v for k, v in how.items() if k not in ("structure", "subset_of_weights")}
    settings |= {"subset_of_weights": how["subset_of_weights"], "hessian_structure": how["structure"]}
    options |= settings.pop("backend_kwargs", {})
    return OnlineLaplace(encoder, probe=probe, n_data=N_DATA, backend_kwargs=options, **settings)


@pytest.mark.filterwarnings("ignore:.*K-FAC leaves", "ignore:.*no gradient reaches")
@given(setup=setups(), source=st.sampled_from(("labels", "relation", "miner")))
def test_a_step_is_equations_79_and_80(setup: Any, source: str, device: str) -> None:
    encoder, batches, how, settings = setup
    encoder = encoder.to(device)
    relation = relate_by_remainder if source == "relation" else None

    def miner(_: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(len(labels))
        return tuple(torch.randint(0, len(labels), (3, 6), generator=generator).to(labels.device))

    given = {"backend_kwargs": {} if relation is None else {"relation": relation}, **settings}
    given["curvature_miner"] = miner if source == "miner" else None
    online = make_online(encoder, batches[0][0].to(device), how, **given)
    for x, labels in batches:
        x, labels = x.to(device), labels.to(device)
        before = remembered(online)
        assume(not 0 < float(before[0].abs().max()) < 1e-9)  # what is left of a cancellation has no precision
        # Points with a positive in the batch stand for those without one: see the next test.
        assume(how["normalization"] != "anchor" or source == "miner" or int(labels.bincount().min()) > 1)
        torch.manual_seed(len(x))
        noise = posterior_noise(online, how)
        encoder.zero_grad()
        torch.manual_seed(len(x))
        loss = online(x, labels)
        loss.backward()
        networks = [moved(encoder, how["subset_of_weights"], shift) for shift in noise]
        losses = [default_loss(network(x), labels, how["margin"], relation) for network in networks]
        for term in losses:
            term.backward()
        assert torch.allclose(loss, torch.stack(losses).mean(), rtol=1e-9)
        for p, *others in zip(encoder.parameters(), *(network.parameters() for network in networks), strict=True):
            grads = [torch.zeros_like(p) if other.grad is None else other.grad for other in others]
            found = torch.zeros_like(p) if p.grad is None else p.grad
            if p.requires_grad:
                assert torch.allclose(found, torch.stack(grads).mean(0), rtol=1e-7, atol=1e-10)
        pairs = {"labels": {"labels": labels}, "miner": {"pairs": miner(x, labels)}}.get(
            source, {"labels": labels, "pairs": relation}
        )
        terms = [curvature(network, x, pairs, how) for network in networks]
        for old, new, *parts in zip(before, remembered(online), *terms, strict=True):
            truth = (1 - settings["memory_factor"]) * old + torch.stack(parts).mean(0)
            assert close(new, truth, 1e-3, 1e-8)


def test_points_with_a_positive_in_the_batch_stand_for_those_without(device: str) -> None:
    torch.manual_seed(0)
    encoder, x = build_network("tanh", 3).to(device), make_inputs("tanh", 4).to(device)
    labels = torch.tensor([0, 1, 2, 0], device=device)
    how = {"normalization": "anchor", "pd_fix": "positive", "structure": "diag", "subset_of_weights": "last_layer"}
    online = make_online(encoder, x, how, memory_factor=0.0, n_samples=1)
    online(x, labels)
    (term,) = curvature(encoder, x, {"labels": labels}, how)
    assert close(remembered(online)[0], 2 * term)  # two of four


def test_losses_and_miners_of_metric_learning(device: str) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    miners = pytest.importorskip("pytorch_metric_learning.miners")
    torch.manual_seed(0)
    encoder = build_network("tanh", 3).to(device)
    x, labels = make_inputs("tanh", 9).to(device), torch.arange(9, device=device) % 3
    triplets, pairs = miners.TripletMarginMiner(margin=0.5), miners.PairMarginMiner(0.1, 1.2)
    loss = losses.TripletMarginLoss(margin=0.5)
    how = {"normalization": "anchor", "structure": "diag", "subset_of_weights": "last_layer"}
    online = make_online(encoder, x, how, loss=loss, miner=triplets, curvature_miner=pairs)
    found = online(x, labels)
    z = encoder(x)
    u = nn.functional.normalize(z.detach())
    assert torch.allclose(found, loss(z, labels, triplets(u, labels)))
    truth = cc.ggn(encoder, x, pairs=pairs(u, labels), subset_of_weights="last_layer")
    assert close(remembered(online)[0], truth)
    only_mined = make_online(encoder, x, how, miner=triplets)
    expected = cc.ContrastiveLoss(0.7, normalization="type")(z, pairs=triplets(u, labels))
    assert torch.allclose(only_mined(x, labels), expected)
    only_loss = make_online(encoder, x, how, loss=loss)
    assert torch.allclose(only_loss(x, labels), loss(z, labels))


def term(norm: float, n: int) -> DatasetCurvature:
    one = torch.tensor(1.0, dtype=torch.float64)
    return DatasetCurvature(Diagonal(torch.ones(3, dtype=torch.float64)), one, one, n, typical_norm=norm * one)


@pytest.mark.parametrize("memory_factor", [0.0, 1e-4, 0.2])
def test_it_follows_the_outputs(memory_factor: float) -> None:
    sums = DiscountedCurvature(Diagonal(torch.zeros(3, dtype=torch.float64)), memory_factor)
    for _ in range(50):
        sums.add([term(1.0, 10)])
    assert float(sums.at_scale(100).typical_norm) == pytest.approx(1.0)
    for _ in range(500):
        sums.add([term(2.0, 10), term(4.0, 10)])
    # 500 steps that forget 1 % each leave 0.0066 of the first 50.
    assert float(sums.at_scale(100).typical_norm) == pytest.approx(3.0, rel=0.005)


def test_steps_count_by_their_points() -> None:
    sums = DiscountedCurvature(Diagonal(torch.zeros(3, dtype=torch.float64)), 0.0)
    sums.add([term(1.0, 30)])
    sums.add([term(5.0, 10)])
    assert float(sums.at_scale(100).typical_norm) == pytest.approx((0.99 * 30 + 50) / (0.99 * 30 + 10))
