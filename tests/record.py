"""Numbers of the public API on tiny problems, to compare before and after a change that must not move any of them.

Not a test, and the numbers are not kept in the repository: they hold for one machine and one torch. Across a change:

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/record.py --write before.json    # on the code before
    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/record.py --compare before.json  # on the code after

The second prints each result that differs, and exits with 1 if any does.

``--only TEXT`` runs the groups whose name contains TEXT ("laplace", "ggn InfoNCE"), and compares their results alone.
Everything is float64 and seeded. A result is reduced to its sum, its norm and a fixed projection; they agree within
1e-10 of the norm. An error counts as a result, too, by its type: a refusal has to stay a refusal.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import hedged, metrics, triplet, vmf
from contrastive_curvature.testing import NETWORKS, build_network, make_inputs

TOLERANCE = 1e-10

FIXES = ("fixed", "positive", "full", "psd", "ggn", "ggn_fixed", "psd_parts")
COMBINATIONS = [
    *(("last_layer", structure) for structure in ("kron_lowrank", "diag", "kron", "full")),
    *(("all", structure) for structure in ("diag", "kron", "full")),
    *(("subnetwork", structure) for structure in ("diag", "full")),
]
INDICES = torch.tensor([0, 3, 17, 30, 49, 60, 71])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = torch.arange(40) % 4
X = normal(40, 6) + 1.5 * torch.eye(6, dtype=torch.float64)[LABELS]
VALIDATION = normal(60, 6, seed=1) + 1.5 * torch.eye(6, dtype=torch.float64)[torch.arange(60) % 4]
NEW = normal(9, 6, seed=2) + 1.5 * torch.eye(6, dtype=torch.float64)[torch.arange(9) % 4]
BATCHES = [(X[rows], LABELS[rows]) for rows in torch.arange(40).split(12)]
VIEWS = [(X[k : k + 10], X[k : k + 10] + 0.1 * normal(10, 6, seed=3)) for k in range(0, 40, 10)]
TRIPLETS = (torch.tensor([0, 1, 5, 9]), torch.tensor([4, 5, 13, 1]), torch.tensor([2, 3, 8, 11]))

LOSSES: dict[str, Callable[..., Any]] = {
    "Contrastive": cc.ContrastiveLoss,
    "Logistic": partial(cc.LogisticLoss, 4.0, -2.0),
    "SoftContrastive": partial(cc.SoftContrastiveLoss, 3.0, 2.0),
    "InfoNCE": partial(cc.InfoNCELoss, 0.3),
    "SupCon": partial(cc.SupConLoss, 0.3),
    "SigLIP": partial(cc.SigLIPLoss, 4.0, -2.0),
    "MultiSimilarity": partial(cc.MultiSimilarityLoss, 2.0, 10.0, 0.5),
    "Triplet": partial(cc.TripletLoss, 0.2),
    "Proxy": partial(cc.ProxyLoss, normal(4, 3, seed=4), 6.0),
    "CosFace": partial(cc.ProxyLoss, normal(4, 3, seed=4), 6.0, 0.2, "cosface"),
    "ArcFace": partial(cc.ProxyLoss, normal(4, 3, seed=4), 6.0, 0.2, "arcface"),
}


def make_encoder(end: nn.Module | None = None, width: int = 6, seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3), *([] if end is None else [end])).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=100 * seed + number))
    return model.eval()


def fitted(
    data: Any = BATCHES, model: nn.Module | None = None, weights: str = "last_layer", structure: str = "kron_lowrank",
    backend: Any = None, prior: bool = True, **options: Any
) -> Any:  # fmt: skip
    more: dict[str, Any] = {} if backend is None else {"backend": backend}
    more |= {"subnetwork_indices": INDICES} if weights == "subnetwork" else {}
    more |= {"backend_kwargs": options} if options else {}
    model = make_encoder() if model is None else model
    la = Laplace(model, "contrastive", subset_of_weights=weights, hessian_structure=structure, **more)
    la.fit(data)
    if prior:
        la.optimize_prior_precision()
    return la


def summary(la: Any) -> dict[str, Any]:
    """What a fitted posterior is worth: its scalars, and the covariance of what it predicts."""
    scalars = [la.loss, la.cost, la.typical_norm, la.prior_precision.sum(), la.temperature]
    embedding = la(NEW)
    found = {"scalars": torch.tensor([float(value) for value in scalars], dtype=torch.float64)}
    return found | {"covariance": embedding.covariance, "uncertainty": embedding.uncertainty}


# The groups: each function returns one result or several by name; lists of cases follow the functions.


def loss_value(loss: str) -> dict[str, Any]:
    z = make_encoder()(X).detach().requires_grad_()
    value = LOSSES[loss]()(z, LABELS)
    return {"value": value, "gradient": torch.autograd.grad(value, z)[0]}


def between(loss: str) -> Any:
    a, b = make_encoder()(X).detach().chunk(2)
    return LOSSES[loss]().between(a, b)


def output_hessian(loss: str, fix: str, distance: str = "arccos") -> dict[str, Any]:
    z = make_encoder()(X).detach()
    hessian = cc.output_hessian(z, LABELS, loss=LOSSES[loss](pd_fix=fix, distance=distance))
    return {
        "blocks": hessian.point_blocks(),
        "product": hessian.matvec(normal(*z.shape, seed=5)),
        "psd": hessian.is_psd(),
    }


def output_hessian_matrix(fix: str) -> dict[str, Any]:
    hessian = cc.output_hessian(make_encoder()(X[:8]).detach(), LABELS[:8], pd_fix=fix)
    found = {"dense": hessian.dense(), "diagonal": hessian.diagonal()}
    if fix == "psd":
        factor = hessian.factor()
        found["square of factor"] = factor @ factor.mT
    return found


def ggn(loss: str, fix: str | None, structure: str, weights: str, distance: str = "arccos", **more: Any) -> Any:
    chosen = LOSSES[loss](distance=distance, **({} if fix is None else {"pd_fix": fix}))
    subset = INDICES if weights == "subnetwork" else weights
    given = {"loss": chosen, "structure": structure, "subset_of_weights": subset, **more}
    return cc.ggn(make_encoder(), X, LABELS, **given)


def ggn_of_network(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = build_network(kind, 3), make_inputs(kind, 12, torch.Generator().manual_seed(0))
    found = {fix: cc.ggn(model, x, LABELS[:12], pd_fix=fix, clamp=False) for fix in ("fixed", "full")}
    return found | {"kron": cc.ggn(model, x, LABELS[:12], structure="kron")}


def ggn_of_pairs() -> dict[str, Any]:
    same = LABELS[:, None] == LABELS[None, :]
    given: dict[str, Any] = {
        "triplets": TRIPLETS,
        "tuples": (*TRIPLETS[:2], *TRIPLETS[1:]),
        "masks": (same & ~torch.eye(40, dtype=torch.bool), ~same),
    }
    found = {name: cc.ggn(make_encoder(), X, pairs=pairs, normalization="sum") for name, pairs in given.items()}
    found["function"] = cc.ggn(make_encoder(), X, LABELS, pairs=lambda a, b: (a[:, None] == b, a[:, None] != b))
    found["normalised"] = cc.ggn(make_encoder(cc.L2Norm()), X, LABELS, pd_fix="full")
    found["raw sums"] = cc.ggn(make_encoder(), X, LABELS, clamp=False)
    generator = torch.Generator().manual_seed(0)
    found["sampled"] = cc.ggn(make_encoder(), X, LABELS, mc_samples=2, generator=generator)
    return found


def laplace(weights: str, structure: str, fix: str) -> dict[str, Any]:
    la = fitted(weights=weights, structure=structure, pd_fix=fix)
    return summary(la) | {"evidence": la.log_marginal_likelihood()}


def laplace_of_loss(loss: str, structure: str) -> dict[str, Any]:
    weights = "last_layer" if structure == "kron_lowrank" else "all"
    return summary(fitted(weights=weights, structure=structure, loss=LOSSES[loss]()))


def laplace_with(**options: Any) -> dict[str, Any]:
    return summary(fitted(**options))


def default_fit() -> dict[str, Any]:
    la = Laplace(make_encoder(), "contrastive")
    la.fit(BATCHES)
    found: dict[str, Any] = {"before prior": la(NEW).covariance}
    la.optimize_prior_precision()
    embedding, uncalibrated = la(NEW), la.class_centres
    found |= summary(la) | {name: getattr(embedding, name) for name in ("mu", "kappa", "raw_mean", "variance")}
    found |= {"tangential variance": embedding.tangential_variance, "optimistic p-value": embedding.p_value}
    found |= {"class sums": uncalibrated.sums, "typical ratio": uncalibrated.typical, "rank": la.rank}
    la.calibrate([VALIDATION[:40], VALIDATION[40:]])
    embedding = la(NEW)
    found |= {"novelty": embedding.novelty, "p-value": embedding.p_value, "known": embedding.is_known(0.1)}
    found |= {"rows": embedding[2:5].uncertainty, "novelty of joined": embedding.cat([la(NEW[:4]), la(NEW)]).novelty}
    joint = la(NEW, joint=True)
    found |= {"joint": joint.joint_covariance, "diagonal": la(NEW, diagonal_output=True).variance}
    la.measure_classes([(VALIDATION, torch.arange(60) % 4)])
    found["with other classes"] = la(NEW).uncertainty
    la.class_centres = None
    found["without classes"] = la(NEW).uncertainty
    la.prior_precision, la.temperature = 3.0, 0.5
    return found | {"prior and temperature by hand": la(NEW).covariance, "evidence": la.log_marginal_likelihood()}


def prior_choices() -> dict[str, Any]:
    la, found = fitted(prior=False, weights="all", structure="diag"), {}
    for method in ("average_information", "unit_information", "marglik"):
        for structure in ("scalar", "layerwise", "diag"):
            la.optimize_prior_precision(method=method, prior_structure=structure, n_steps=10)
            found[f"{method} {structure}"] = torch.cat([la.prior_precision, torch.tensor([la.temperature]).double()])
    torch.manual_seed(0)
    grid = {"grid_size": 4, "n_samples": 5, "val_loader": BATCHES}
    la.optimize_prior_precision(method="gridsearch", **grid)
    return found | {"gridsearch": la.prior_precision}


def second_fit() -> dict[str, Any]:
    la = fitted(prior=False)
    la.fit([(VALIDATION, torch.arange(60) % 4)], override=False)
    la.optimize_prior_precision()
    return summary(la)


def samples(weights: str, structure: str) -> dict[str, Any]:
    la, found = fitted(weights=weights, structure=structure, pd_fix="psd"), {}

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    found["weights"] = la.sample(5, generator=generator())
    for joint in (False, True):
        draw = {"n_samples": 5, "joint": joint, "generator": generator()}
        found[f"outputs, joint={joint}"] = la.functional_samples(NEW, **draw)
    found["directions"] = la.predictive_samples(NEW, n_samples=5, joint=True, generator=generator())
    by_networks = la(NEW, pred_type="nn", n_samples=20, generator=generator())
    return found | {"networks": by_networks.kappa, "from an embedding": la(NEW).sample(4, generator())}


def embedding_alone() -> dict[str, Any]:
    mean, root = normal(7, 4), normal(7, 4, 4, seed=1)
    covariance = root @ root.mT / 20
    found: dict[str, Any] = {}
    for name, spread in {"variance": covariance.diagonal(dim1=1, dim2=2), "covariance": covariance}.items():
        e = cc.EmbeddingDistribution(mean, **{name: spread}, typical_norm=1.3)
        found |= {f"{name}: kappa": e.kappa, f"{name}: uncertainty": e.uncertainty}
    drawn = cc.EmbeddingDistribution.from_samples(mean + 0.1 * normal(20, 7, 4, seed=2))
    return found | {"samples: mu": drawn.mu, "samples: kappa": drawn.kappa, "samples: uncertainty": drawn.uncertainty}


def search() -> dict[str, Any]:
    la = fitted()
    la.calibrate([VALIDATION])
    gallery, new = la(X), la(NEW)
    cosine = cc.similarity(new, gallery, pairwise=True)
    found = {"cosine": cosine.mean, "variance of cosine": cosine.variance, "probability": cosine.probability(0.8)}
    found["row by row"] = cc.similarity(new, gallery[:9]).std
    found["fixed gallery"] = cc.similarity(new, gallery.raw_mean, pairwise=True).variance
    return found


def two_towers(loss: str, structure: str, shared: bool = False, **options: Any) -> dict[str, Any]:
    a = make_encoder()
    b = a if shared else make_encoder(width=5, seed=1)
    second = X.flip(1) if shared else X[:, :5] + 0.2 * normal(40, 5, seed=6)
    pairs = [(X[k : k + 20], second[k : k + 20]) for k in (0, 20)]
    options["loss"] = LOSSES[loss](**({"pd_fix": options.pop("fix")} if "fix" in options else {}))
    la = Laplace(cc.TwoTowers(a, b), "contrastive", hessian_structure=structure, backend_kwargs=options)
    la.fit(pairs)
    la.optimize_prior_precision()
    image, text = la.a(NEW), la.b(second[:9])
    found = {"loss": la.loss, "temperature": la.a.temperature, "a": image.uncertainty, "b": text.covariance}
    if structure == "diag":
        product = la.curvature_product(pairs, normal(*la.a.mean.shape), None if shared else 0 * la.b.mean)
        found |= {f"product {number}": value for number, value in enumerate(product)}
    if structure == "kron_lowrank" and not shared:
        la.calibrate(pairs)
        found |= {"p-value": la.b(second[:9]).p_value, "cosine": cc.similarity(image, text).variance}
    return found


def backends(name: str, weights: str, structure: str) -> dict[str, Any]:
    options = {"weights": weights, "structure": structure, "backend": getattr(cc, name)}
    return {fix: summary(fitted(pd_fix=fix, **options))["covariance"] for fix in ("psd", "full")}


def backend_batches(name: str) -> dict[str, Any]:
    backend = getattr(cc, name)(make_encoder(), "contrastive", pd_fix="psd")
    found = {kind: getattr(backend, kind)(X, LABELS, N=80)[1] for kind in ("diag", "full")}
    return found | {"kron": backend.kron(X, LABELS, N=80)[1].kfacs, "jacobians": backend.jacobians(X)[0]}


def backpack_extensions() -> dict[str, Any]:
    from backpack import backpack, extend
    from backpack.extensions import KFLR, DiagGGNExact

    from contrastive_curvature.hosts.backpack import DiagCurvature

    found: dict[str, Any] = {}
    for loss in ("Contrastive", "SupCon"):
        model = extend(make_encoder(cc.L2Norm()))
        value = extend(LOSSES[loss](pd_fix="psd", distance="euclidean"))
        with backpack(DiagGGNExact(), KFLR()):
            value(model(X), LABELS).backward()
        found |= {f"{loss} diag": [p.diag_ggn_exact for p in model.parameters()]}
        found |= {f"{loss} kflr": [p.kflr for p in model.parameters()]}
        model, value = extend(make_encoder()), extend(LOSSES[loss](pd_fix="full"))
        with backpack(DiagCurvature()):
            value(model(X), LABELS).backward()
        found |= {f"{loss} curvature": [p.diag_curvature for p in model.parameters()]}
    return found


def curvlinops() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fix in ("psd", "full"):
        for loss in ("Contrastive", "SupCon"):
            operator = cc.ContrastiveGGNLinearOperator(make_encoder(), LOSSES[loss](pd_fix=fix), None, BATCHES)
            found[f"{loss} {fix}"] = operator @ normal(operator.shape[1])
    return found


def stochman() -> dict[str, Any]:
    from contrastive_curvature.hosts.stochman import ArccosHessianCalculator, ContrastiveHessianCalculator, to_nnj

    found: dict[str, Any] = {"jacobian": to_nnj(make_encoder())(X, jacobian=True)[1]}
    for calculator in (ArccosHessianCalculator, ContrastiveHessianCalculator):
        for method in ("fix", "pos", "full", "psd"):
            for wrt, shape in (("weight", "diagonal"), ("weight", "block"), ("input", "block")):
                made = calculator(wrt=wrt, shape=shape, method=method)
                name = f"{calculator.__name__} {method} {wrt} {shape}"
                found[name] = made.compute_hessian(X, make_encoder(cc.L2Norm()), TRIPLETS)
        found[f"{calculator.__name__} loss"] = made.compute_loss(X, make_encoder(cc.L2Norm()), TRIPLETS)
        found[f"{calculator.__name__} gradient"] = made.compute_gradient(X, make_encoder(cc.L2Norm()), TRIPLETS)
    return found


def parts(**options: Any) -> dict[str, Any]:
    from contrastive_curvature.fit.part_state import State

    structure = options.pop("structure", "kron_lowrank")

    def new() -> Any:
        return Laplace(make_encoder(), "contrastive", hessian_structure=structure, backend_kwargs=options or None)

    def share(k: int) -> list[Any]:
        return [(X[k::2][rows], LABELS[k::2][rows]) for rows in torch.arange(20).split(8)]

    first = State.merged([new().part_statistics(share(k), part=(k, 2)) for k in range(2)])
    second = State.merged([new().part_curvature(share(k), part=(k, 2), statistics=first) for k in range(2)])
    la = new()
    la.fit_parts(first, second)
    la.optimize_prior_precision()
    return summary(la)


def files() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        la = fitted(structure="kron")
        la.calibrate([VALIDATION])
        la.save_pretrained(Path(place) / "posterior")
        again = cc.load_pretrained(Path(place) / "posterior", encoder=make_encoder())
        found = {"loaded uncertainty": again(NEW).uncertainty, "loaded p-value": again(NEW).p_value}
        found["loaded evidence"] = again.log_marginal_likelihood()
        other = Laplace(make_encoder(), "contrastive", hessian_structure="kron")
        other.load_state_dict(la.state_dict())
        return found | {"state: covariance": other(NEW).covariance, "state: p-value": other(NEW).p_value}


def served() -> dict[str, Any]:
    la = fitted()
    la.calibrate([VALIDATION])
    with tempfile.TemporaryDirectory() as place:
        names = la.export(Path(place) / "encoder.pt2", NEW)
        outputs = torch.export.load(Path(place) / "encoder.pt2").module()(NEW)
    return {f"graph {key}": value for key, value in zip(names, outputs, strict=True)}


def online(structure: str, sampling_temperature: float | None = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    encoder = make_encoder()
    learner = cc.OnlineLaplace(
        encoder, probe=X[:8], n_data=40, hessian_structure=structure, memory_factor=0.01,
        sampling_temperature=sampling_temperature, backend_kwargs=options or None,
    )  # fmt: skip
    optimizer = torch.optim.SGD(learner.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for x, labels in BATCHES:
            loss = learner(x, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    la = learner.laplace()
    return {"losses": losses, "weights": list(encoder.parameters()), "covariance": la(NEW).covariance}


def vmf_functions() -> dict[str, Any]:
    mu, kappa = vmf.from_embedding(4 * normal(6, 5))
    proxy, proxy_kappa = vmf.from_embedding(4 * normal(4, 5, seed=1))
    axes, two = 1 + normal(4, 5, seed=2).square(), (mu, kappa, proxy, proxy_kappa)
    found: dict[str, Any] = {
        name: getattr(vmf, name)(torch.logspace(-3, 4, 15, dtype=torch.float64), 5)
        for name in ("log_normalizer", "log_density_at_mode", "mean_resultant_length")
    }
    for name in ("squared_euclidean", "bhattacharyya", "expected_likelihood", "kl"):
        found[name] = getattr(vmf, f"{name}_distance")(*two)
    draws = {"n_samples": 8, "generator": torch.Generator().manual_seed(0)}
    found |= {"log_prob": vmf.log_prob(proxy[:1], mu, kappa), "nivmf": vmf.nivmf_distance(mu, proxy, axes)}
    found |= {
        "el_nivmf": vmf.el_nivmf_distance(mu, kappa, proxy, axes, **draws),
        "cosine": vmf.cosine_distance(mu, proxy),
    }
    found |= {"sample": vmf.sample(mu, kappa, **draws), "fit": vmf.fit(normal(9, 6, 5, seed=3))}
    return found | {"divergence": vmf.kl_divergence(mu[:4], kappa[:4], proxy, proxy_kappa)}


def hedged_functions() -> dict[str, Any]:
    mean, variance = normal(2, 6, 2, 3), normal(2, 6, 2, 3, seed=1).square() + 0.1
    first, second = (mean[0], variance[0]), (mean[1], variance[1])
    a, b = torch.tensor(1.5).double(), torch.tensor(0.5).double()
    drawn = [
        hedged.stratified_samples(*of, n_samples=4, generator=torch.Generator().manual_seed(0))
        for of in (first, second)
    ]
    torch.manual_seed(0)
    objective = hedged.vib_objective(first, second, torch.arange(6) % 2 == 0, a, b, kl_weight=1e-2)
    found = {"probability": hedged.match_probability(*drawn, a, b), "bound": hedged.kl_bound(*first)}
    return found | {"mismatch": hedged.self_mismatch(*first, a, b), "objective": objective}


def triplet_functions() -> dict[str, Any]:
    three = list(zip(normal(3, 6, 5), normal(3, 6, 5, seed=1).square() + 0.1, strict=True))
    directed = [(mean, 1 / variance[:, 0]) for mean, variance in three]
    found: dict[str, Any] = {"moments": triplet.tau_moments(*three), "vmf": triplet.tau_moments_vmf(*directed)}
    found |= {
        "probability": triplet.log_probability(*three, margin=0.1),
        "tail": triplet.log_normal_cdf(-5 * normal(9)),
    }
    found |= {"loss": triplet.bayesian_triplet_loss(*three, margin=0.1), "normal": triplet.kl_to_normal(*three[0])}
    return found | {"uniform": triplet.kl_to_uniform(torch.tensor([0.0, 3.0, 100.0]).double(), dim=5)}


def metric_functions() -> dict[str, Any]:
    z, uncertain = make_encoder()(X).detach(), normal(40).abs()
    neighbours = metrics.nearest_neighbors(z, k=5)
    ranking, drawn = metrics.rank_by_labels(neighbours, LABELS), z + 0.3 * normal(10, 40, 3, seed=1)
    right = ranking.relevant[:, 0].double()
    found: dict[str, Any] = {"neighbours": neighbours, "recall": metrics.recall_at_k(ranking, 3)}
    found |= {"map": metrics.map_at_k(ranking, 5), "ausc": metrics.ausc(uncertain, right)}
    found |= {"auroc": metrics.auroc(uncertain, uncertain + 0.3), "auprc": metrics.auprc(uncertain, uncertain + 0.3)}
    return found | {"ece": metrics.retrieval_ece(drawn, LABELS), "brier": metrics.retrieval_brier(drawn, LABELS)}


def groups() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names, and what computes their results."""
    for loss in LOSSES:
        yield f"loss {loss}", partial(loss_value, loss)
        for fix in FIXES:
            yield f"hessian {loss} {fix}", partial(output_hessian, loss, fix)
        for structure, weights in (("diag", "all"), ("kron", "all"), ("full", "last_layer")):
            for fix in (None, "psd", "full"):
                yield f"ggn {loss} {fix} {structure} {weights}", partial(ggn, loss, fix, structure, weights)
        for structure in ("kron_lowrank", "diag"):
            yield f"laplace {loss} {structure}", partial(laplace_of_loss, loss, structure)
    for loss in ("InfoNCE", "SupCon", "SigLIP"):
        yield f"loss between towers {loss}", partial(between, loss)
    for fix in ("fixed", "positive", "full", "psd"):
        yield f"hessian matrix {fix}", partial(output_hessian_matrix, fix)
        yield f"hessian euclidean {fix}", partial(output_hessian, "Contrastive", fix, "euclidean")
        for structure in ("diag", "full"):
            for weights in ("all", "last_layer", "subnetwork"):
                name = f"ggn Contrastive {fix} {structure} {weights} euclidean"
                yield name, partial(ggn, "Contrastive", fix, structure, weights, "euclidean")
    yield "ggn of pairs", ggn_of_pairs
    for kind in NETWORKS:
        yield f"ggn of network {kind}", partial(ggn_of_network, kind)
    for weights, structure in COMBINATIONS:
        for fix in ("psd", "fixed", "full"):
            yield f"laplace {weights} {structure} {fix}", partial(laplace, weights, structure, fix)
    infonce = {"loss": cc.InfoNCELoss(0.3)}
    options: dict[str, dict[str, Any]] = {
        "margin None": {"margin": None},
        "normalization type": {"normalization": "type", "negative_weight": 0.3},
        "normalization sum": {"normalization": "sum"},
        "euclidean": {"distance": "euclidean", "pd_fix": "positive"},
        "pairs batch": {"pairs": "batch"},
        "relation": {"relation": lambda a, b: ((a[:, None] - b) == 0, (a[:, None] - b).abs() == 1)},
        "rank 2": {"rank": 2},
        "mc samples": {"mc_samples": 2, "weights": "all", "structure": "diag"},
        "negative samples": {"negative_samples": 15},
        "negative samples, margin None": {"negative_samples": 15, "margin": None},
        "views": {"data": VIEWS, **infonce},
        "labels of views": {"data": [(pair, LABELS[:10]) for pair in VIEWS], "positives": "labels", **infonce},
        "L2Norm": {"model": make_encoder(cc.L2Norm())},
    }
    for name, given in options.items():
        yield f"laplace with {name}", partial(laplace_with, **given)
    yield from [("default", default_fit), ("evidence and prior", prior_choices), ("second fit", second_fit)]
    for weights, structure in (
        ("last_layer", "kron_lowrank"),
        ("last_layer", "full"),
        ("all", "diag"),
        ("all", "kron"),
    ):
        yield f"samples {weights} {structure}", partial(samples, weights, structure)
    yield from [("embedding alone", embedding_alone), ("search", search), ("files", files)]
    for loss, structure in (("InfoNCE", "kron_lowrank"), ("SigLIP", "kron"), ("SupCon", "full")):
        yield f"towers {loss} {structure}", partial(two_towers, loss, structure)
    yield "towers InfoNCE ggn", partial(two_towers, "InfoNCE", "diag", fix="ggn")
    yield "towers shared", partial(two_towers, "InfoNCE", "diag", shared=True)
    for name in ("ContrastiveGGN", "BackPackContrastiveGGN", "StochManContrastiveGGN"):
        yield f"backend {name}", partial(backend_batches, name)
        for weights, structure in (("last_layer", "kron"), ("all", "diag"), ("all", "kron"), ("all", "full")):
            yield f"backend {name} {weights} {structure}", partial(backends, name, weights, structure)
    yield from [("host BackPACK", backpack_extensions), ("host curvlinops", curvlinops), ("host StochMan", stochman)]
    for name, given in {"default": {}, "sampled": {"negative_samples": 15}, "full": {"structure": "full"}}.items():
        yield f"parts {name}", partial(parts, **given)
    yield "served kron_lowrank", served
    for structure in ("diag", "kron", "full", "kron_lowrank"):
        yield f"online {structure}", partial(online, structure, 0.0)
    yield "online sampled", partial(online, "diag")
    yield "online InfoNCE", partial(online, "diag", 0.0, loss=cc.InfoNCELoss(0.3))
    yield from [("vmf", vmf_functions), ("hedged", hedged_functions)]
    yield from [("triplet", triplet_functions), ("metrics", metric_functions)]


def flat(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)):
        return torch.cat([flat(item) for item in value])
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    return torch.as_tensor(value, dtype=torch.float64).detach().flatten()


def reduced(value: Any) -> list[float]:
    """Sum, norm and a projection that no permutation, sign or rotation leaves alone."""
    numbers = flat(value)
    direction = torch.cos(0.7 * torch.arange(len(numbers), dtype=torch.float64) + 0.3)
    return [float(numbers.sum()), float(numbers.norm()), float(direction @ numbers)]


def run(only: str) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    for group, compute in groups():
        if only not in group:
            continue
        torch.manual_seed(0)
        try:
            results = compute()
            results = results if isinstance(results, Mapping) else {"": results}
            found |= {f"{group}: {name}".rstrip(": "): reduced(value) for name, value in results.items()}
        except Exception as error:
            found[group] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return found


def agree(a: list[float] | str, b: list[float] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a.split(":")[0] == b.split(":")[0]
    # Sums cancel, so an error is relative to the norm; the rest is rounding of what should be zero.
    return bool(np.allclose(a, b, rtol=0, atol=TOLERANCE * b[1] + 1e-14, equal_nan=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--write", metavar="FILE", type=Path)
    way.add_argument("--compare", metavar="FILE", type=Path)
    parser.add_argument("--only", metavar="TEXT", default="")
    asked = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if Path(cc.__file__).resolve().parent.parent != root:
        parser.error(f"this would record {cc.__file__}: set PYTHONPATH={root}")
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(asked.only)
    errors = {name: value for name, value in found.items() if isinstance(value, str)}
    print(
        f"{len(found)} results, {len(errors)} of them errors, {time.process_time() - started:.0f} s of processor time"
    )
    if asked.compare is None:
        print(*(f"{name}: {value}" for name, value in errors.items()), sep="\n")
        if asked.write is not None:
            asked.write.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return 0
    before = json.loads(asked.compare.read_text(encoding="utf-8"))
    before = {name: value for name, value in before.items() if asked.only in name.split(": ")[0]}
    differing = 0
    for name in sorted(before.keys() | found.keys()):
        a, b = before.get(name, "missing"), found.get(name, "missing")
        if not agree(b, a):
            differing += 1
            print(f"{name}\n  before {a}\n  now    {b}")
    print(f"{differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
