"""Watch a stream of embeddings for a shift: a martingale of conformal p-values, with a stated rate of false alarms."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from contrastive_curvature import validate
from contrastive_curvature.codec import check_seal, sealed
from contrastive_curvature.decisions.fitted import percent
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, NotFittedError
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.posterior.p_values import present_calibration

_Numbers = NDArray[np.float64]

EXPONENTS = (np.arange(20) + 0.5) / 20
"""Exponents ``e`` of the bets ``e p^(e - 1)``: small ones win most from very small p-values, large ones risk little."""


def sequential_p_values(pool: list[float], scores: _Numbers, uniform: _Numbers) -> _Numbers:
    """Return the p-value of each new score (B,) among all earlier scores, and insert it into the sorted ``pool``.

    The p-value is ``(#{s > s_t} + U (#{s = s_t} + 1)) / (t + 1)``, with ``U`` uniform on (0, 1], shape (B,), which
    breaks ties at random. The p-values are independent and uniform on (0, 1] while the scores are exchangeable (Vovk,
    Nouretdinov and Gammerman, 2003).
    """
    p_values = np.empty(len(scores))
    for t, (score, u) in enumerate(zip(scores.tolist(), uniform.tolist(), strict=True)):
        upto = bisect.bisect_right(pool, score)
        ties = upto - bisect.bisect_left(pool, score)
        p_values[t] = (len(pool) - upto + u * (ties + 1)) / (len(pool) + 1)
        pool.insert(upto, score)
    return p_values


def grow(capital: _Numbers, n_before: int, p_values: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return log capital after new p-values (T,), and the log evidence after each, shape (T,).

    At time t, a share ``1 / log2(t + 2)`` of the capital 1 still waits. At each time a part of it starts to bet, in
    equal parts on each exponent e, and each p-value from then on multiplies this part by ``e p^(e - 1)``. So the bet is
    a mixture over e and over the start of the shift. Without the mixture over starts, a shift after 10,000 unchanged
    inputs would be detected about six times later.

    Args:
        capital: Log of the capital that bets on each exponent, shape (E,).
        n_before: Number of earlier p-values.
        p_values: New p-values in (0, 1], shape (T,).
    """
    waiting = -np.log(np.log2(np.arange(n_before, n_before + len(p_values) + 1) + 2))
    starts = waiting[:-1] + np.log(-np.expm1(waiting[1:] - waiting[:-1])) - math.log(len(EXPONENTS))
    gains = np.log(EXPONENTS) + (EXPONENTS - 1) * np.log(p_values)[:, None]
    total = gains.cumsum(0)
    # Capital that starts at t has the gains from t on, so earlier gains are subtracted from the sum.
    entered = np.logaddexp.accumulate(np.concatenate([capital[None], starts[:, None] - total + gains]))[1:]
    every = np.logaddexp(np.logaddexp.reduce(entered + total, axis=1), waiting[1:])
    return (entered + total)[-1], every


class DriftMonitor:
    """Detect when a stream of inputs starts to differ from the calibration inputs, with few false alarms.

    Each input is ranked by the score of the calibration among the calibration inputs and all earlier inputs. While
    calibration inputs and stream are exchangeable (nothing changes), these ranks are uniform and independent, and a bet
    on small p-values wins nothing on average. :attr:`evidence` is the capital of a mixture of such bets that starts
    with 1: it reaches ``1 / delta`` with a probability of at most ``delta``, for a stream of any length (Ville, 1939).

    Sources: Vovk, Nouretdinov and Gammerman (2003), "Testing exchangeability on-line"; Vovk, Gammerman and Shafer
    (2005), chapter 7; Fedorova, Gammerman, Nouretdinov and Vovk (2012), arXiv 1204.3251.

    Args:
        la: A posterior after ``la.calibrate(loader)``, with inputs that the encoder was not trained on.
        delta: Largest probability of a false alarm over the whole stream, in (0, 1).
        seed: Seed of the random numbers that break ties.

    Attributes:
        drifted_at: Number of inputs after which the evidence first reached ``1 / delta``; ``None`` before.

    Raises:
        InputTypeError: ``la`` is not a posterior, or ``delta`` is not a number.
        InputError: ``delta`` is not in (0, 1), or the seed is negative.
        NotFittedError: The posterior is not calibrated, or has changed since its calibration.
    """

    def __init__(self, la: ContrastiveLaplace, delta: float = 0.01, seed: int = 0) -> None:
        if not isinstance(la, ContrastiveLaplace):
            raise InputTypeError("la", "a posterior of Laplace(..., 'contrastive')", f"a {type(la).__name__}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InputError("seed", "a whole number >= 0", repr(seed))
        self.delta, self.seed = validate.fraction("delta", delta), seed
        calibration = present_calibration(la.posterior, la.read)
        if calibration is None:
            call = "Call la.calibrate(loader) with known inputs that the encoder was not trained on"
            raise NotFittedError(f"DriftMonitor: la is not calibrated. {call}.")
        self._known = calibration.reference
        self._begin()

    def update(self, embedding: EmbeddingDistribution) -> bool:
        """Add the next inputs of the stream, in order.

        Args:
            embedding: A prediction ``la(x)`` of the monitor's posterior, for one or more inputs. The division of the
                stream into batches does not matter.

        Returns:
            :attr:`drifted`.

        Raises:
            InputTypeError: ``embedding`` is not a prediction.
            InputError: The prediction is of another posterior or another calibration than the monitor's, or has rows of
                NaN.
            NotFittedError: When it made the prediction, the posterior had changed since its calibration.
            UnsupportedError: ``embedding`` is not a plain prediction ``la(x)``.
        """
        if not isinstance(embedding, EmbeddingDistribution):
            raise InputTypeError("embedding", "a prediction la(x)", f"a {type(embedding).__name__}")
        compared = embedding._asked("p_value")
        known = compared.known
        if known.refusal is None and (known.reference is None or not known.reference.equals(self._known)):
            hint = "Make a new DriftMonitor(la): evidence against other calibration inputs is no longer evidence."
            wanted = "a prediction of the posterior and the calibration that the monitor began with"
            raise InputError("embedding", wanted, "one of another", hint)
        if missing := int(embedding.raw_mean.isnan().any(1).sum()):
            hint = "Leave them out: monitor.update(embedding[~embedding.uncertainty.isnan()])."
            raise InputError("embedding", "embeddings of valid inputs", f"{missing} rows of NaN", hint)
        scores = compared.scored(embedding).scores
        assert scores is not None
        self._take(scores.cpu().numpy())
        return self.drifted

    @property
    def log10_evidence(self) -> NDArray[np.float64]:
        """Evidence after each input, shape (T,), for a plot over time with a line at ``log10(1 / delta)``."""
        return np.array(self._log10_evidence)

    @property
    def evidence(self) -> float:
        """Capital of the bets against "nothing has changed" after the last input: 1 at the start, at most 1e308."""
        return _power(self._log10_evidence[-1:])

    @property
    def drifted(self) -> bool:
        """Whether the evidence has ever reached ``1 / delta``. If so, calibrate again and make a new monitor."""
        return self.drifted_at is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the monitor: numbers and tensors, for ``torch.save``."""
        state = {"delta": self.delta, "seed": self.seed, "known": self._known.statistics.cpu()}
        return sealed({**state, "scores": torch.tensor(self._scores, dtype=torch.float64, device="cpu")})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state of the monitor by a state of :meth:`state_dict`.

        Args:
            state: State of a monitor of the same calibrated posterior; the posterior may have been saved and loaded.

        Raises:
            InputError: The state is of another calibration, or damaged. Then the monitor does not change.
        """
        check_seal(state)
        if not torch.equal(state["known"], self._known.statistics.cpu()):
            hint = "Make a new DriftMonitor(la)."
            raise InputError("state_dict", "the state of a monitor of this calibration", "another", hint)
        self.delta, self.seed = state["delta"], state["seed"]
        self._begin()
        self._take(state["scores"].numpy())

    def __repr__(self) -> str:
        """Return the verdict, the number of inputs and the largest evidence."""
        at = self.drifted_at
        verdict = "no drift" if at is None else f"drift, found at input {at:,}"
        known = (
            f"at most {percent(self.delta)} of streams without one would give an alarm, at evidence {1 / self.delta:g}"
        )
        seen, most = f"{len(self._scores):,} inputs", f"{_power(self._log10_evidence):.3g}"
        return f"{verdict} in {seen} (largest evidence {most}); {known}"

    def _begin(self) -> None:
        reference = self._known
        # Scores that are equal up to rounding count as equal; otherwise rounding, not chance, would rank repeated
        # inputs.
        self._grid = reference.rounding
        self._pool = np.sort(self._on_grid(reference.statistics.cpu().numpy())).tolist()
        self._scores: list[float] = []
        self._log10_evidence: list[float] = []
        self.drifted_at: int | None = None
        self._capital = np.full(len(EXPONENTS), -np.inf)

    def _on_grid(self, scores: _Numbers) -> _Numbers:
        return np.rint(scores / self._grid) if self._grid else scores

    def _take(self, scores: _Numbers) -> None:
        if not len(scores):
            return
        n = len(self._scores)
        # Each input uses one number of the generator, for any division into batches.
        uniform = 1 - np.random.Generator(np.random.PCG64(self.seed).advance(n)).random(len(scores))
        p_values = sequential_p_values(self._pool, self._on_grid(scores), uniform)
        self._capital, evidence = grow(self._capital, n, p_values)
        passed = evidence >= -math.log(self.delta)
        if self.drifted_at is None and passed.any():
            self.drifted_at = n + 1 + int(passed.argmax())
        self._scores += scores.tolist()
        self._log10_evidence += (evidence / math.log(10)).tolist()


def _power(exponents: list[float]) -> float:
    """Return 10 to the largest exponent, within the range of a float; 1 without exponents."""
    return float(10 ** min(max(exponents, default=0.0), 308.0))
