"""Public functions with arguments that are right, for the fuzz tests to replace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import laplace
import torch
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import hedged, metrics, triplet, vmf

__all__ = ["CALLS", "POSTERIORS", "Call", "data", "encoder", "posterior"]

Call = tuple[Callable[..., Any], dict[str, Any]]
"""A function, and arguments under which it works."""

N, WIDTH, D = 12, 4, 3

POSTERIORS: list[tuple[str, str, dict[str, Any]]] = [
    ("last_layer", "diag", {}),
    ("last_layer", "kron", {}),
    ("last_layer", "full", {}),
    ("last_layer", "gp", {"n_subset": 6, "backend_kwargs": {"pd_fix": "psd"}}),
    ("all", "diag", {}),
    ("all", "kron", {}),
    ("all", "full", {}),
    ("all", "lowrank", {"backend_kwargs": {"rank": 3}}),
    ("subnetwork", "diag", {"subnetwork_indices": torch.tensor([0, 3, 30])}),
]


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, D))


def data() -> tuple[Tensor, Tensor]:
    labels = torch.arange(N) % 3
    return torch.eye(WIDTH)[labels] + 0.2 * torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0)), labels


def posterior(weights: str = "last_layer", structure: str = "diag", more: dict[str, Any] | None = None) -> Any:
    la = laplace.Laplace(encoder(), "contrastive", weights, structure, **(more or {}))
    x, labels = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit([(x[:7], labels[:7]), (x[7:], labels[7:])])
    return la


def _proxy_calls(mean: Tensor, kappa: Tensor) -> dict[str, Call]:
    """Distances between embeddings and proxies."""
    proxies, axes = torch.randn(4, D), 0.1 + torch.rand(4, D)
    rows = {"mu": mean, "kappa": kappa.expand(len(mean)), "proxy_mu": proxies}
    pairs = {**rows, "proxy_kappa": torch.rand(4)}
    expected = {**rows, "proxy_kappa": axes, "n_samples": 3, "generator": None, "normalized": True}
    with_temperature = {**expected, "temperature": torch.tensor(1.0)}
    density = {"x": mean, "mu": mean, "kappa": 0.1 + torch.rand(len(mean), D), "normalized": True}
    calls: dict[str, Call] = {
        f"vmf.{name}": (getattr(vmf, name), pairs)
        for name in (
            "squared_euclidean_distance",
            "bhattacharyya_distance",
            "expected_likelihood_distance",
            "kl_distance",
            "kl_distance_printed",
        )
    }
    return calls | {
        "vmf.cosine_distance": (vmf.cosine_distance, {"mu": mean, "proxy_mu": proxies}),
        "vmf.from_embedding": (vmf.from_embedding, {"z": mean}),
        "vmf.nivmf_log_prob": (vmf.nivmf_log_prob, density),
        "vmf.nivmf_distance": (
            vmf.nivmf_distance,
            {"mu": mean, "proxy_mu": proxies, "proxy_kappa": axes, "normalized": True},
        ),
        "vmf.el_nivmf_distance": (vmf.el_nivmf_distance, expected),
        "vmf.el_nivmf_logits": (vmf.el_nivmf_logits, with_temperature),
        "vmf.rsample": (vmf.rsample, {"mu": mean, "kappa": kappa, "n_samples": 3, "generator": None}),
        "vmf.log_normalizer_quadratic": (vmf.log_normalizer_quadratic, {"kappa": kappa, "dim": 128}),
    }


def _triplet_calls() -> dict[str, Call]:
    """The Bayesian triplet loss and its parts."""
    three = {name: (torch.randn(5, D), 0.1 + torch.rand(5, D)) for name in ("anchor", "positive", "negative")}
    options = {"distribution": "gaussian", "prior_variance": 1.0, "kl_weight": 0.1, "reduction": "mean"}
    normal = {"mean": torch.randn(5, D), "variance": 0.1 + torch.rand(5, D), "prior_variance": 1.0}
    return {
        "triplet.tau_moments": (triplet.tau_moments, three),
        "triplet.tau_moments_vmf": (triplet.tau_moments_vmf, {name: (m, v[:, 0]) for name, (m, v) in three.items()}),
        "triplet.log_normal_cdf": (triplet.log_normal_cdf, {"z": torch.randn(5)}),
        "triplet.log_probability": (triplet.log_probability, {**three, "margin": 0.1}),
        "triplet.kl_to_normal": (triplet.kl_to_normal, normal),
        "triplet.kl_to_uniform": (triplet.kl_to_uniform, {"kappa": torch.rand(5), "dim": D}),
        "triplet.bayesian_triplet_loss": (triplet.bayesian_triplet_loss, {**three, "margin": 0.1, **options}),
    }


def _hedged_calls() -> dict[str, Call]:
    """Hedged instance embeddings: mixtures of two Gaussians."""
    mean, variance, so = torch.randn(5, 2, D), 0.1 + torch.rand(5, 2, D), torch.arange(5) % 2 == 0
    samples, numbers = torch.randn(5, 4, D), {"a": 1.0, "b": 0.5}
    points = {"z1": torch.randn(5, D), "z2": torch.randn(5, D)}
    both = {"samples1": samples, "samples2": samples.flip(0), **numbers}
    options = {"kl_weight": 0.1, "n_samples": 4, "average": "log", "divergence": "bound", "reduction": "mean"}
    pairs = {"first": (mean, variance), "second": (mean.flip(0), variance), "matches": so}
    one = {"mean": mean, "variance": variance}
    return {
        "hedged.MatchParameters": (hedged.MatchParameters, {"a": 1.0, "b": 0.0}),
        "hedged.match_logits": (hedged.match_logits, {**points, **numbers}),
        "hedged.soft_contrastive_loss": (hedged.soft_contrastive_loss, {**points, "matches": so, **numbers}),
        "hedged.hard_contrastive_loss": (hedged.hard_contrastive_loss, {**points, "matches": so, "margin": 1.0}),
        "hedged.stratified_samples": (hedged.stratified_samples, {**one, "n_samples": 4, "generator": None}),
        "hedged.match_probability": (hedged.match_probability, both),
        "hedged.self_mismatch": (hedged.self_mismatch, {**one, **numbers, "n_samples": 4, "generator": None}),
        "hedged.match_loss": (hedged.match_loss, {**both, "matches": so, "average": "log", "reduction": "mean"}),
        "hedged.kl_bound": (hedged.kl_bound, one),
        "hedged.kl_estimate": (hedged.kl_estimate, {"samples": samples, **one}),
        "hedged.vib_objective": (hedged.vib_objective, {**pairs, **numbers, **options, "generator": None}),
    }


def _options() -> dict[str, Any]:
    return {
        "distance": "arccos",
        "pd_fix": "fixed",
        "margin": 0.7,
        "negative_weight": 0.5,
        "normalization": "anchor",
    }


def _hessian(v: Any = None, **given: Any) -> Any:
    hessian = cc.output_hessian(**given)
    product = hessian.matvec(torch.ones_like(hessian.z) if v is None else v)
    return product, hessian.diagonal(), hessian.point_blocks(), hessian.dense(), hessian.is_psd()


def _loss(z: Any, labels: Any, pairs: Any, **options: Any) -> Any:
    return cc.ContrastiveLoss(**options)(z, labels, pairs=pairs)


def _distribution(**given: Any) -> Any:
    return _described(cc.EmbeddingDistribution(**given))


def _described(found: cc.EmbeddingDistribution) -> Any:
    spread = (found.variance, found.covariance, found.tangential_variance)
    return found.mu, found.kappa, found.uncertainty, spread, found.sample(3)


def _laplace(loader: Any, weights: Any, structure: Any, override: Any, progress_bar: Any, **given: Any) -> Any:
    la = laplace.Laplace(encoder(), "contrastive", weights, structure, **given)
    la.fit(loader, override, progress_bar)
    return _described(la(data()[0]))


def _tuned(**given: Any) -> Any:
    la = posterior()
    la.optimize_prior_precision(**given)
    return la.prior_precision, la.temperature, _described(la(data()[0]))


def _calibrated(x: Any, alpha: Any, **given: Any) -> Any:
    la = posterior()
    la.calibrate(**given)
    return la(x).p_value, la(x).is_known(alpha)


def _updated(**given: Any) -> Any:
    la = posterior()
    la.update(**given)
    return _described(la(data()[0]))


def _embedded(X: Any, y: Any, **given: Any) -> Any:
    return torch.from_numpy(cc.ContrastiveEmbedder(**given).fit(X, y).transform(data()[0]))


def _table(**given: Any) -> Any:
    return torch.from_numpy(posterior()(data()[0]).to_pandas(**given).to_numpy())


def _online(x: Any, labels: Any, **given: Any) -> Any:
    online = cc.OnlineLaplace(encoder(), **given)
    losses = [online(x, labels) for _ in range(2)]
    return losses, _described(online.laplace()(data()[0]))


def _gallery(embeddings: Any, novelty: Any, **given: Any) -> Any:
    return cc.RetrievalUncertainty(**given)(embeddings, novelty)


def _operator(**given: Any) -> Any:
    model = encoder()
    operator = cc.ContrastiveGGNLinearOperator(model, params=list(model.parameters()), **given)
    return operator @ torch.ones(operator.shape[1])


def _answered(risk: Any, among: Any, confidence: Any, asked: Any, **given: Any) -> Any:
    return cc.RetrievalThreshold(risk, among, confidence).fit(**given).accept(asked)


def _decided(asked: Any, x: Any, y: Any, held: Any, held_labels: Any, more: Any, how: Any, **rates: Any) -> Any:
    retriever = cc.Retriever(posterior(), **rates).fit(x, y, held_out=(held, held_labels))
    retriever.learn(more, held_labels, how)
    answers = retriever(asked)
    return answers.confidence, answers.p_value


def _same(rate: Any, asked: Any, **given: Any) -> Any:
    fitted = cc.MatchThreshold(rate).fit(**given)
    return fitted.same(asked), fitted.false_match_interval, fitted.false_non_match_interval


def _drift(delta: Any, seed: Any, embedding: Any) -> Any:
    la = posterior()
    la.calibrate([data()[0] + 1])
    monitor = cc.DriftMonitor(la, delta, seed)
    monitor.update(la(data()[0]) if embedding is None else embedding)
    return monitor.log10_evidence


def _votes(**given: Any) -> Any:
    return metrics.calibration_bins(**given).expected_calibration_error


def _ranked(k: Any, **given: Any) -> Any:
    ranking = metrics.rank_by_labels(**given)
    return metrics.recall_at_k(ranking, k), metrics.map_at_k(ranking, k)


def _sampled(method: str, **given: Any) -> Any:
    return getattr(posterior(), method)(**given)


def _evidence(**given: Any) -> Any:
    return posterior().log_marginal_likelihood(**given)


def _calls() -> dict[str, Call]:
    x, labels = data()
    z = encoder()(x).detach()
    loader = [(x[:7], labels[:7]), (x[7:], labels[7:])]
    samples = z + 0.1 * torch.randn(5, N, D, generator=torch.Generator().manual_seed(1))
    scores = torch.rand(N, generator=torch.Generator().manual_seed(2)) + 0.1
    votes = torch.arange(N).repeat(4, 1) % 3
    persons = torch.stack([torch.arange(N), torch.arange(N) + 1], dim=1)
    mean = torch.nn.functional.normalize(z, dim=1)
    kappa = scores * 10
    drawn = {"x": x, "pred_type": "glm", "n_samples": 3, "diagonal_output": False, "generator": None, "joint": False}
    asked = {"x": x, "pred_type": "glm", "joint": False, "n_samples": 3, "diagonal_output": False, "generator": None}
    weights = {"structure": "diag", "subset_of_weights": "all", "clamp": True}
    retrieval = {"samples": samples, "labels": labels, "gallery": None, "gallery_labels": None}
    return {
        "output_hessian": (_hessian, {"z": z, "labels": labels, "pairs": None, "v": None, **_options()}),
        "ContrastiveLoss": (_loss, {"z": z, "labels": labels, "pairs": None, **_options()}),
        "ContrastiveLoss.mine": (cc.ContrastiveLoss().mine, {"z": z, "targets": labels, "relation": None}),
        "ggn": (cc.ggn, {"model": encoder(), "x": x, "labels": labels, "pairs": None, **_options(), **weights}),
        "ggn of the last layer": (
            cc.ggn,
            {"model": encoder(), "x": x, "labels": labels, "pairs": None, **_options(), **weights}
            | {"subset_of_weights": "last_layer", "structure": "full", "pd_fix": "full"},
        ),
        "Laplace": (
            _laplace,
            {"loader": loader, "weights": "last_layer", "structure": "diag", "override": True, "progress_bar": None}
            | {"prior_precision": 1.0, "prior_mean": 0.0, "temperature": 1.0, "backend": None, "backend_kwargs": None}
            | {"enable_backprop": False, "last_layer_name": None},
        ),
        "Laplace, options of the backend": (
            lambda **given: _laplace(loader, "last_layer", "diag", True, None, backend_kwargs=given),
            {**_options(), "pairs": "dataset", "relation": None},
        ),
        "la(x)": (lambda **given: _described(posterior()(**given)), asked),
        "predictive_samples": (lambda **given: _sampled("predictive_samples", **given), drawn),
        "functional_samples": (lambda **given: _sampled("functional_samples", **given), drawn),
        "sample": (lambda **given: _sampled("sample", **given), {"n_samples": 3, "generator": None}),
        "log_marginal_likelihood": (_evidence, {"prior_precision": None}),
        "optimize_prior_precision": (
            _tuned,
            {"pred_type": "glm", "method": "average_information", "prior_structure": "scalar", "strength": 0.1}
            | {"verbose": False, "progress_bar": False},
        ),
        "optimize_prior_precision, gridsearch": (
            _tuned,
            {"method": "gridsearch", "val_loader": loader, "loss": None, "log_prior_prec_min": -1}
            | {"log_prior_prec_max": 1, "grid_size": 2, "n_samples": 2, "log_prior_prec_base": 10.0},
        ),
        "optimize_prior_precision, marglik": (
            _tuned,
            {"method": "marglik", "n_steps": 2, "lr": 0.1} | {"init_prior_prec": 1.0},
        ),
        "predict": (
            lambda **given: _described(posterior().predict(**given)),
            {"data": x, "batch_size": 5, "on_invalid": "error", "progress_bar": False},
        ),
        "update": (_updated, {"loader": loader, "progress_bar": False}),
        "ContrastiveEmbedder": (
            _embedded,
            {"X": x, "y": labels, "encoder": None, "loss": None, "dim": 3, "hidden": 4, "epochs": 2}
            | {"learning_rate": 0.01, "batch_size": 8, "random_state": 0},
        ),
        "calibrate": (
            _calibrated,
            {"x": x, "loader": [x + 1], "alpha": 0.1, "progress_bar": False, "score": "uncertainty", "by_class": False},
        ),
        "select_unknown": (cc.select_unknown, {"p_values": (torch.arange(N) + 1) / 100, "fdr": 0.3}),
        "OnlineLaplace": (
            _online,
            {"x": x, "labels": labels, "probe": x, "n_data": N, "loss": None, "miner": None, "curvature_miner": None}
            | {"memory_factor": 1e-4, "n_samples": 1, "subset_of_weights": "last_layer", "hessian_structure": "diag"}
            | {"prior_precision": None, "temperature": None, "sampling_temperature": None, "backend_kwargs": None},
        ),
        "EmbeddingDistribution": (
            _distribution,
            {"raw_mean": z, "variance": None, "covariance": torch.eye(D).expand(N, D, D), "joint_covariance": None},
        ),
        "EmbeddingDistribution, variance": (_distribution, {"raw_mean": z, "variance": z.square()}),
        "EmbeddingDistribution.to_pandas": (_table, {"mu": True}),
        "EmbeddingDistribution.from_samples": (
            lambda **given: _described(cc.EmbeddingDistribution.from_samples(**given)),
            {"samples": samples},
        ),
        "EmbeddingDistribution.sample": (
            cc.EmbeddingDistribution(z, variance=z.square()).sample,
            {"n_samples": 3, "generator": None},
        ),
        "RetrievalUncertainty": (
            _gallery,
            {
                "gallery": z,
                "calibration": scores,
                "k": 3,
                "share": 0.1,
                "labels": labels,
                "embeddings": z,
                "novelty": scores,
            },
        ),
        "RetrievalThreshold": (
            _answered,
            {
                "risk": 0.3,
                "among": "answered",
                "confidence": 0.9,
                "asked": scores,
                "score": scores,
                "right": scores > 0,
            },
        ),
        "Retriever": (
            _decided,
            {
                **{"wrong_answers": 0.8, "false_matches": 0.4, "false_alarms": 0.2, "confidence": 0.9},
                **{"asked": x, "x": x, "y": labels, "held": x + 0.1, "held_labels": labels, "more": x + 0.2},
                "how": "random",
            },
        ),
        "MatchThreshold": (
            _same,
            {"rate": 0.3, "asked": scores, "scores": scores, "same": labels == 0, "groups": persons},
        ),
        "DriftMonitor": (_drift, {"delta": 0.1, "seed": 0, "embedding": None}),
        "det_curve": (metrics.det_curve, {"scores": scores, "same": labels == 0}),
        "equal_error_rate": (metrics.equal_error_rate, {"scores": scores, "same": labels == 0}),
        "ContrastiveGGNLinearOperator": (
            _operator,
            {"loss": cc.ContrastiveLoss(), "data": loader, "pairs": None, "dict_key_y": "labels"},
        ),
        "nearest_neighbors": (
            metrics.nearest_neighbors,
            {"queries": z, "gallery": z, "k": 3, "backend": "auto", "metric": "cosine"},
        ),
        "rank_by_labels": (
            _ranked,
            {"neighbors": metrics.nearest_neighbors(z, k=4), "labels": labels, "gallery_labels": None, "k": 2},
        ),
        "auroc": (metrics.auroc, {"uncertainty_id": scores, "uncertainty_ood": scores + 1}),
        "auprc": (metrics.auprc, {"uncertainty_id": scores, "uncertainty_ood": scores + 1}),
        "ausc": (metrics.ausc, {"uncertainty": scores, "performance": scores}),
        "retrieval_votes": (metrics.retrieval_votes, {**retrieval, "backend": "auto", "metric": "cosine"}),
        "retrieval_ece": (metrics.retrieval_ece, {**retrieval, "n_bins": 10}),
        "retrieval_brier": (metrics.retrieval_brier, retrieval),
        "calibration_bins": (_votes, {"votes": votes, "labels": labels, "n_bins": 5}),
        "brier_score": (metrics.brier_score, {"votes": votes, "labels": labels}),
        "vmf.fit": (vmf.fit, {"samples": samples}),
        "vmf.mean_direction": (vmf.mean_direction, {"samples": samples}),
        "vmf.concentration": (vmf.concentration, {"rbar": torch.rand(N), "dim": D}),
        "vmf.tangential_variance": (vmf.tangential_variance, {"mean": z, "variance": z.square(), "covariance": None}),
        "vmf.concentration_from_gaussian": (
            vmf.concentration_from_gaussian,
            {"mean": z, "variance": None, "covariance": torch.eye(D).expand(N, D, D)},
        ),
        "vmf.log_normalizer": (vmf.log_normalizer, {"kappa": kappa, "dim": D}),
        "vmf.log_density_at_mode": (vmf.log_density_at_mode, {"kappa": kappa, "dim": D}),
        "vmf.mean_resultant_length": (vmf.mean_resultant_length, {"kappa": kappa, "dim": D}),
        "vmf.log_prob": (vmf.log_prob, {"z": mean, "mu": mean, "kappa": kappa}),
        "vmf.kl_divergence": (
            vmf.kl_divergence,
            {"mu": mean, "kappa": kappa, "other_mu": mean.flip(0), "other_kappa": kappa},
        ),
        "vmf.sample": (vmf.sample, {"mu": mean, "kappa": kappa, "n_samples": 3, "generator": None}),
        **_proxy_calls(mean, kappa),
        **_triplet_calls(),
        **_hedged_calls(),
    }


CALLS = _calls()
