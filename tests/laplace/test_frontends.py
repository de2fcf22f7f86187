"""Tools that wrap laplace-torch for users, with their own classes around our encoder: ``make test-frontends``."""

import copy
import importlib
from typing import Any

import pytest
import torch
from laplace import Laplace
from test_laplace import batches, body, data
from torch import Tensor

import contrastive_curvature as cc

KINDS = [("last_layer", "kron"), ("last_layer", "diag"), ("all", "full")]
PREDICTIONS = [("glm", "probit"), ("glm", "mc"), ("glm", "bridge"), ("glm", "bridge_norm"), ("nn", "mc")]


def direct(weights: str, structure: str) -> Any:
    """What a user of laplace-torch writes without a tool."""
    la = Laplace(body(), likelihood="contrastive", subset_of_weights=weights, hessian_structure=structure)
    la.fit(train_loader=batches(*data()))
    return la


def equal(found: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def uq() -> Any:
    pytest.importorskip("lightning_uq_box")
    return importlib.import_module("lightning_uq_box.uq_methods.laplace_model")


def embedding_model(uq: Any, la: Any, **options: Any) -> Any:
    """LaplaceRegression, whose constructor alone insists on laplace-torch's own likelihood, around our posterior."""

    class LaplaceEmbedding(uq.LaplaceRegression):  # type: ignore[misc]
        def __init__(self, laplace_model: Any, **options: Any) -> None:
            uq.LaplaceBase.__init__(self, laplace_model, **options)

    model = LaplaceEmbedding(la, **options)
    model.laplace_model.fit(batches(*data()))
    model.laplace_fitted = True
    return model


def test_laplace_approx_of_torch_uncertainty() -> None:
    """It fits, chooses the prior and predicts, and hands on the distribution; ``approx(x).mu`` is the tensor."""
    pytest.importorskip("torch_uncertainty")
    from torch_uncertainty.post_processing import LaplaceApprox

    x, _ = data()
    for weights, structure in KINDS:
        la = direct(weights, structure)
        la.optimize_prior_precision(method="marglik")
        for kind, link in PREDICTIONS:
            approx = LaplaceApprox("contrastive", body(), weights, structure, pred_type=kind, link_approx=link)
            approx.fit(batches(*data()))
            torch.manual_seed(1)
            found = approx(x)
            torch.manual_seed(1)
            assert isinstance(found, cc.EmbeddingDistribution)
            # The number that it passes; in closed form on the last layer, of sampled networks on all weights.
            assert equal(found, la(x, pred_type=kind, n_samples=100))
            assert torch.equal(found.mu, la(x).mu) is (kind == "glm")


def test_lightning_uq_box_builds_the_object_again_and_predicts(uq: Any) -> None:
    x, _ = data()
    for weights, structure in KINDS:
        la = direct(weights, structure)
        fresh = Laplace(body(), "contrastive", weights, structure)
        model = embedding_model(uq, fresh, pred_type="nn", link_approx="mc")
        assert model.laplace_model is not fresh
        torch.manual_seed(1)
        found = model.predict_step(x)
        torch.manual_seed(1)
        mean, variance = la(x, pred_type="nn", link_approx="mc")
        assert torch.equal(found["pred"], mean)
        assert torch.equal(found["epistemic_uct"], variance.sqrt())
        # What it reads as an observation noise is 1.
        assert torch.equal(found["pred_uct"], (variance.sqrt() ** 2 + 1).sqrt())
        by_samples = embedding_model(uq, fresh, num_samples=7)
        torch.manual_seed(1)
        samples: Tensor = by_samples.predict_step(x)["samples"]
        torch.manual_seed(1)
        assert torch.equal(samples, la.predictive_samples(x, n_samples=7).permute(1, 2, 0))
        closed = embedding_model(uq, fresh).predict_step(x)
        mean, covariance = la(x)
        assert torch.equal(closed["pred"], mean)
        # Its root of every entry is a deviation on the diagonal alone, as for each regression of several outputs.
        assert torch.equal(closed["epistemic_uct"].diagonal(dim1=1, dim2=2), covariance.diagonal(dim1=1, dim2=2).sqrt())


def test_lightning_uq_box_chooses_the_prior_by_the_marginal_likelihood(uq: Any) -> None:
    la = direct("last_layer", "diag")
    la.prior_precision = torch.e
    before = float(la.log_marginal_likelihood())
    uq.tune_prior_precision_and_sigma(la, 0.1, 20, tune_prior_precision=True, tune_sigma_noise=False)
    assert float(la.log_marginal_likelihood()) > before
    with pytest.raises(cc.UnsupportedError, match="sigma_noise"):
        uq.tune_prior_precision_and_sigma(la, 0.1, 2, tune_prior_precision=True, tune_sigma_noise=True)


def test_what_their_own_code_refuses(uq: Any) -> None:
    la = direct("last_layer", "diag")
    for kind in (uq.LaplaceRegression, uq.LaplaceClassification):
        with pytest.raises((AssertionError, ValueError, AttributeError)):
            kind(copy.copy(la))
