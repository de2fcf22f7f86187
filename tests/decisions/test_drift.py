"""``cc.DriftMonitor``: false alarms over many streams, products by hand, streams in parts and from files, refusals."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from laplace import Laplace
from scipy.stats import binom, kstest
from tables import each, refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.decisions.drift import EXPONENTS, grow, sequential_p_values

STREAMS = 600
NOTHING = np.full(len(EXPONENTS), -np.inf)


def evidence(scores: Any, known: Any, rng: np.random.Generator) -> Any:
    """Log evidence of a stream, and its p-values."""
    p_values = sequential_p_values(np.sort(known).tolist(), scores, 1 - rng.random(len(scores)))
    return grow(NOTHING, 0, p_values)[1], p_values


@each("digits, known", [(9, 30), (0, 3)])  # rounded to whole numbers, most scores are ties
def test_false_alarms_are_as_rare_as_promised_and_ranks_are_uniform(digits: int, known: int) -> None:
    rng = np.random.default_rng(0)
    alarms, ranks = {0.01: 0, 0.1: 0}, []
    for scores in rng.standard_normal((STREAMS, known + 200)).round(digits):
        found, p_values = evidence(scores[known:], scores[:known], rng)
        ranks.append(p_values)
        for delta in alarms:
            alarms[delta] += bool(found.max() >= -math.log(delta))
    for delta, count in alarms.items():
        assert binom.sf(count - 1, STREAMS, delta) > 1e-4, (delta, count)
    each_input = np.array(ranks).T
    assert min(kstest(each_input[t], "uniform").pvalue for t in (0, 1, 50, 199)) > 1e-3
    # Independent: one below its median says nothing of the next one.
    assert abs(np.corrcoef(each_input[:-1].ravel() < 0.5, each_input[1:].ravel() < 0.5)[0, 1]) < 0.01


@each("before, shift, delay", [(0, 0.7, 60), (2000, 0.7, 140), (2000, 4.0, 12)])
def test_a_shift_is_found(before: int, shift: float, delay: int) -> None:
    rng = np.random.default_rng(1)
    delays = []
    for _ in range(15):
        scores = rng.standard_normal(before + 400)
        scores[before:] += shift
        found, _ = evidence(scores, rng.standard_normal(500), rng)
        delays.append((found >= math.log(100)).argmax() + 1 - before)
    assert 0 < np.median(delays) < delay


def test_evidence_and_ranks_by_hand() -> None:
    rng = np.random.default_rng(2)
    pool, scores, u = [0.0, 1.0, 1.0, 2.0], np.array([1.0, 3.0, 0.0, 1.0, 1.0]), 1 - rng.random(5)
    before, p_values = list(pool), sequential_p_values(pool, scores, u)
    for t, score in enumerate(scores):
        higher, ties = sum(s > score for s in before), before.count(score)
        assert p_values[t] == pytest.approx((higher + u[t] * (ties + 1)) / (len(before) + 1), rel=1e-15)
        before.append(score)
    assert pool == sorted(before)

    p_values = 1 - rng.random(40) ** 0.5
    exponents = (np.arange(20) + 0.5) / 20
    waiting = 1 / np.log2(np.arange(41) + 2)
    truth = []
    for t in range(1, 41):
        bets = (exponents * p_values[:t, None] ** (exponents - 1))[::-1].cumprod(0)[::-1].mean(1)
        truth.append(waiting[t] + ((waiting[:-1] - waiting[1:])[:t] * bets).sum())
    capital, first = grow(NOTHING, 0, p_values[:17])
    found = np.concatenate([first, grow(capital, 17, p_values[17:])[1]])
    np.testing.assert_allclose(np.exp(found), truth, rtol=1e-12)


def inputs(n: int, seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)) + shift


def calibrated() -> Any:
    torch.manual_seed(0)
    la = Laplace(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), "contrastive", hessian_structure="full")
    la.fit([(inputs(60, 0), torch.arange(60) % 3)])
    la.calibrate([inputs(200, 1)])
    return la


def test_a_stream_in_parts_through_files(tmp_path: Any) -> None:
    la = calibrated()
    stream = torch.cat([inputs(60, 2), 10 * inputs(100, 3)])
    usual = cc.DriftMonitor(la)
    assert (usual.evidence, usual.drifted) == (1.0, False)
    assert "no drift in 0 inputs" in repr(usual)
    whole = cc.DriftMonitor(la, delta=1e-3, seed=5)
    assert not whole.update(la(stream[:60]))
    assert whole.update(la(stream[60:]))
    assert 60 < whole.drifted_at < 130
    assert whole.log10_evidence[whole.drifted_at - 1] >= 3 > whole.log10_evidence[: whole.drifted_at - 1].max()
    assert whole.evidence == pytest.approx(10 ** whole.log10_evidence[-1])
    assert f"drift, found at input {whole.drifted_at} in 160 inputs" in repr(whole)

    la.save_pretrained(tmp_path / "la")
    la = cc.load_pretrained(tmp_path / "la", calibrated().model)
    parts = cc.DriftMonitor(la, delta=1e-3, seed=5)
    for batch in stream[:70].split(9):
        parts.update(la(batch))
    torch.save(parts.state_dict(), tmp_path / "monitor.pt")
    again = cc.DriftMonitor(la)
    again.load_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
    for row in stream[70:]:
        again.update(la(row[None]))
    np.testing.assert_allclose(again.log10_evidence, whole.log10_evidence, atol=1e-9)
    assert (again.drifted_at, again.delta) == (whole.drifted_at, whole.delta)
    again.update(la(stream[:0]))
    assert len(again.log10_evidence) == 160


def test_the_score_is_that_of_the_calibration() -> None:
    la, stream = calibrated(), inputs(30, 2)
    la.calibrate([inputs(200, 1)], score="uncertainty", by_class=True)
    monitor = cc.DriftMonitor(la)
    monitor.update(la(stream))
    known, new = (la(x).uncertainty.double() for x in (inputs(200, 1), stream))
    assert monitor.state_dict()["scores"].tolist() == new.tolist()
    p_values = sequential_p_values(sorted(known.tolist()), new.numpy(), 1 - np.random.default_rng(0).random(30))
    _, evidence = grow(np.full(20, -np.inf), 0, p_values)
    np.testing.assert_allclose(monitor.log10_evidence, evidence / np.log(10), atol=1e-3)


def test_repeated_inputs_are_ties_whatever_their_batch() -> None:
    la = calibrated()
    one = inputs(1, 7)
    la.calibrate([one.expand(256, 4), inputs(30, 8)])
    monitor = cc.DriftMonitor(la)
    for _ in range(300):
        monitor.update(la(one))
    assert monitor.log10_evidence.max() < 1
    assert monitor.evidence < 1


def test_what_is_refused() -> None:
    la, other = calibrated(), calibrated()
    other.calibrate([inputs(200, 5)])
    monitor, x = cc.DriftMonitor(la), inputs(5, 3)
    state, early = monitor.state_dict(), la(x)
    bare = Laplace(nn.Linear(4, 3), "contrastive")
    bare.fit([(inputs(60, 0), torch.arange(60) % 3)])
    holes = la(torch.cat([x, torch.full((1, 4), torch.nan)]), on_invalid="nan")
    cases = [
        (lambda: cc.DriftMonitor(la.model), cc.InputTypeError, "la"),
        (lambda: cc.DriftMonitor(la, 1), cc.InputError, "delta"),
        (lambda: cc.DriftMonitor(la, seed=-1), cc.InputError, "seed"),
        (lambda: cc.DriftMonitor(bare), cc.NotFittedError, "la.calibrate"),
        (lambda: monitor.update(la(x).mu), cc.InputTypeError, "embedding"),
        (lambda: monitor.update(other(x)), cc.InputError, "the posterior and the calibration that the monitor began"),
        (lambda: monitor.update(holes), cc.InputError, "1 rows of NaN"),
        (lambda: monitor.load_state_dict({**state, "delta": 0.5}), cc.InputError, "checksum.*damaged"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    la.calibrate([inputs(200, 9)])
    refused(lambda: monitor.update(la(x)), "the calibration that the monitor began with")
    refused(lambda: cc.DriftMonitor(la).load_state_dict(state), "state_dict")
    la.prior_precision = 7.0
    refused(lambda: monitor.update(la(x)), "Call la", kind=cc.NotFittedError)
    assert not len(monitor.log10_evidence)
    # A prediction from before the changes is still one of the monitor's posterior.
    monitor.update(early)
    assert len(monitor.log10_evidence) == 5
