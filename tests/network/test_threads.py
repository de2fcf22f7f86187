"""Several threads on one encoder and one posterior: each gets what it would get alone, and the user's threads too.

Threads take turns at random, so a test cannot force a collision; with a switch every few instructions, all of these
failed in every run before the repairs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.stochman import StochManContrastiveGGN
from contrastive_curvature.network.encoder import Encoder, evaluation_mode
from contrastive_curvature.testing import dense_ggn

THREADS, F = 3, 4
LABELS = torch.arange(6) % 3


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def build(*tail: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    body = (nn.Linear(F, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(*body, *tail).double().eval()


def inputs(seed: int, n: int = 6) -> Tensor:
    return torch.randn(n, F, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at_once(*calls: Callable[[], Any], rounds: int = 15) -> list[list[Any]]:
    """Run every call some times, all in threads of their own; an exception in one is one here."""
    results: list[list[Any]] = [[] for _ in calls]
    errors: list[BaseException] = []
    ready = threading.Barrier(len(calls))

    def work(k: int) -> None:
        ready.wait()
        try:
            for _ in range(rounds):
                results[k].append(calls[k]())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))


def check(calls: list[Callable[[], Any]], *others: Callable[[], Any], rounds: int = 15) -> None:
    """What calls give at once is what they give one after another."""
    every = [*calls, *others]
    alone = [call() for call in every]
    for wanted, found in zip(alone, at_once(*every, rounds=rounds), strict=True):
        assert len(found) == rounds
        assert all(same(out, wanted) for out in found)


POSTERIORS: dict[str, dict[str, Any]] = {
    "last layer": {"subset_of_weights": "last_layer", "hessian_structure": "diag"},
    "all, BackPACK": {"subset_of_weights": "all", "hessian_structure": "diag", "backend": BackPackContrastiveGGN},
    "all, torch.func": {"subset_of_weights": "all", "hessian_structure": "diag", "backend": cc.ContrastiveGGN},
    "all, StochMan": {"subset_of_weights": "all", "hessian_structure": "diag", "backend": StochManContrastiveGGN},
    "all, kron": {"subset_of_weights": "all", "hessian_structure": "kron"},
}


@pytest.mark.parametrize("kind", POSTERIORS)
def test_predictions_of_one_posterior(kind: str) -> None:
    """Three threads ask one posterior for different inputs and samples; a fourth runs the model itself."""
    model = build(cc.L2Norm())
    la = Laplace(model, "contrastive", **POSTERIORS[kind])
    la.fit([(inputs(0), LABELS)])

    def predict(seed: int) -> Callable[[], Any]:
        def call() -> Any:
            out, generator = la(inputs(seed)), torch.Generator().manual_seed(seed)
            drawn = la.predictive_samples(inputs(seed), "nn", n_samples=2, generator=generator)
            return out.raw_mean, out.variance if out.variance is not None else out.covariance, drawn

        return call

    check([predict(seed) for seed in range(THREADS)], lambda: model(inputs(9)).detach())


@pytest.mark.parametrize("kind", ["all, BackPACK", "all, torch.func", "all, StochMan", "all, kron"])
def test_fits_of_one_encoder(kind: str) -> None:
    """Two threads fit posteriors of one encoder; others run that encoder, and another model."""
    model, other = build(cc.L2Norm()), nn.Sequential(nn.Linear(F, 3), nn.ReLU(), nn.Linear(3, 2)).double()

    def fit(seed: int) -> Callable[[], Any]:
        def call() -> Any:
            la = Laplace(model, "contrastive", **POSTERIORS[kind])
            la.fit([(inputs(seed), LABELS), (inputs(seed + 50), LABELS)])
            return la(inputs(7)).covariance

        return call

    plain = [lambda: model(inputs(9)).detach(), lambda: other(inputs(8)).detach()]
    check([fit(1), fit(2)], *plain, rounds=6)


class Outside(nn.Module):
    """Runs a layer of its own that it finds in a place where a copy does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(F, 5), nn.Linear(5, 3)
        layer = self.a
        self.find = lambda x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.find(x)))
        return out


def test_layers_that_a_copy_does_not_reach_are_exact() -> None:
    model = Outside().double().eval()
    truth = dense_ggn(model, inputs(0), LABELS, pd_fix="psd")
    found = cc.ggn(model, inputs(0), LABELS, pd_fix="psd", structure="full", subset_of_weights="all", clamp=False)
    assert same(found, truth)


def test_the_mode_is_that_before_the_first() -> None:
    """One thread enters, another enters, the first leaves, the second still computes in evaluation mode."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(F, 3)).train()
    model[1].eval()
    first = evaluation_mode(model)
    first.__enter__()
    with evaluation_mode(model):
        first.__exit__(None, None, None)
        assert not any(m.training for m in model.modules())
        with evaluation_mode(model[0]):
            assert not model[0].training
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == [True, True, False]


def test_features_are_those_of_ones_own_inputs() -> None:
    """Another thread passes the same layers between our hooks, and must not be mistaken for us."""
    other = threading.Thread

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is threading.main_thread() and len(encoders) == 1:
                thread = other(target=lambda: model(inputs(5)))
                thread.start()
                thread.join()
            return x

    model = build(cc.L2Norm())
    model.insert(0, Interrupted())
    encoders: list[Encoder] = []
    encoders.append(Encoder(model, inputs(0)))
    plain = build()
    z, phi = encoders[0].forward_with_features(inputs(1))
    assert same((z, phi), (plain(inputs(1)), plain[:4](inputs(1))))
    assert same(encoders[0](inputs(1)), plain(inputs(1)))


def test_a_layer_that_runs_in_another_thread_is_refused() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.moved = build(), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.moved:
                return self.inner(x)
            out: list[Tensor] = []
            thread = threading.Thread(target=lambda: out.append(self.inner(x)))
            thread.start()
            thread.join()
            return out[0]

    model = Elsewhere()
    encoder = Encoder(model, inputs(0))
    model.moved = True
    with pytest.raises(cc.UnsupportedError, match="another thread"):
        encoder.forward_with_features(inputs(0))
