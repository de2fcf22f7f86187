"""``cc.ContrastiveEmbedder``: what scikit-learn asks of an estimator, and the numbers of the posterior inside it."""

import copy
import warnings

import numpy as np
import torch
from laplace import Laplace
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator
from tables import refused
from torch import nn

import contrastive_curvature as cc

X = np.random.default_rng(0).normal(size=(60, 5)) + 3 * np.eye(5)[np.arange(60) % 3]
Y = np.array(["ant", "bee", "cat"])[np.arange(60) % 3]


def test_it_is_an_estimator_of_scikit_learn() -> None:
    with warnings.catch_warnings():
        # Checks on random classes of few rows: the library says what is odd about them, scikit-learn which it skips.
        warnings.simplefilter("ignore")
        check_estimator(cc.ContrastiveEmbedder(epochs=2))


def test_a_trained_encoder_is_copied_and_has_the_posterior_of_the_library() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    before, state = copy.deepcopy(encoder.state_dict()), torch.random.get_rng_state()
    embedder = clone(cc.ContrastiveEmbedder(encoder, cc.TripletLoss(0.3), batch_size=60)).fit(X, Y)
    embedder.calibrate(X + 0.1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    x, labels = torch.from_numpy(X).float(), torch.arange(60) % 3
    la = Laplace(encoder.eval(), "contrastive", backend_kwargs={"loss": cc.TripletLoss(0.3)})
    la.fit([(x, labels)])
    la.optimize_prior_precision()
    la.calibrate([x + 0.1])
    found, wanted = embedder.predict_dist(X), la(x)
    torch.testing.assert_close(found.uncertainty, wanted.uncertainty, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.p_value, wanted.p_value, rtol=0, atol=0.05)
    np.testing.assert_array_equal(embedder.transform(X), found.mu.numpy())
    assert embedder.classes_.tolist() == ["ant", "bee", "cat"]


def test_a_network_is_trained_and_the_same_one_for_the_same_seed() -> None:
    def between(embedder: cc.ContrastiveEmbedder) -> float:
        mu = embedder.fit(X, Y).transform(X)
        same = Y[:, None] == Y
        return float((mu @ mu.T)[same].mean() - (mu @ mu.T)[~same].mean())

    assert between(cc.ContrastiveEmbedder(epochs=100)) > between(cc.ContrastiveEmbedder(epochs=1)) + 0.2
    refused(lambda: cc.ContrastiveEmbedder(epochs=-1).fit(X, Y), "epochs: expected a positive whole number")
    refused(lambda: cc.ContrastiveEmbedder(encoder=[]).fit(X, Y), "a torch.nn.Module", kind=cc.InputTypeError)
    one, other, third = (cc.ContrastiveEmbedder(random_state=seed).fit(X, Y).transform(X) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, other)
    assert not np.allclose(one, third)
