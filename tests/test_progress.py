"""Long computations say in advance how long they take, and what would be faster."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature import progress as progress_file
from contrastive_curvature.fit import cross_sums
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses import effort
from contrastive_curvature.losses.derivatives import PairDerivatives
from contrastive_curvature.pairs import make_relation
from contrastive_curvature.progress import LongRunWarning, Progress


class Clock:
    """A clock that moves by ``step`` seconds whenever it is read."""

    def __init__(self, step: float) -> None:
        self.ticks = itertools.count(0, step)

    def monotonic(self) -> float:
        return next(self.ticks)

    perf_counter = monotonic


def slow(monkeypatch: pytest.MonkeyPatch, *modules: Any, step: float = 100.0) -> None:
    clock = Clock(step)
    for module in modules:
        monkeypatch.setattr(module, "time", clock)


def batches(n: int = 40) -> list[tuple[Tensor, Tensor]]:
    # Away from zero, where no output is short by chance.
    x, labels = 3 * torch.eye(5)[torch.arange(n) % 4] + 0.1 * torch.randn(n, 5), torch.arange(n) % 4
    return list(zip(x.split(4), labels.split(4), strict=True))


def test_short_runs_say_nothing() -> None:
    # `make test` turns warnings into errors.
    Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag").fit(batches())
    Progress(faster="Do less.").expect(59, "This")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(60, "1 minutes"), (3000, "50 minutes"), (4000, "67 minutes"), (8000, "2 hours"), (86400 * 4, "4 days")],
)
def test_the_warning_says_how_long_and_what_is_faster(seconds: float, words: str) -> None:
    progress = Progress(faster="Do less.")
    with pytest.warns(LongRunWarning, match=rf"^This will take about {words}\. Do less\.$"):
        progress.expect(seconds, "This")
    # Once is enough.
    progress.expect(seconds, "That")


def test_a_slow_loader_is_told_of_after_its_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, progress_file)
    la = Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag")
    with pytest.warns(
        LongRunWarning, match=r"\[embedding\] will take about .*encoder.*not the pairs.*GPU.*features"
    ) as found:
        la.fit(batches(), progress_bar=False)
    assert "margin=None" not in str(found[0].message)
    assert la.n_data == 40


def test_pairs_are_told_of_before_any_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "FEWEST_POINTS", 10)
    slow(monkeypatch, effort)

    def formed(*_: Any, **__: Any) -> None:
        msg = "a pair was formed"
        raise AssertionError(msg)

    z, labels = torch.randn(40, 3), torch.arange(40) % 4
    monkeypatch.setattr(PairDerivatives, "__init__", formed)
    for call in (
        lambda: cc.output_hessian(z, labels),
        lambda: cc.ggn(nn.Linear(5, 3), torch.randn(40, 5), labels, subset_of_weights="last_layer"),
        lambda: Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag").fit(batches()),
    ):
        with (
            pytest.warns(LongRunWarning, match=r"the 780 pairs of 40 points will take about .*margin=None"),
            pytest.raises(AssertionError, match="a pair was formed"),
        ):
            call()
    with pytest.raises(AssertionError, match="a pair was formed"):  # and without a margin there is nothing to say
        cc.output_hessian(z, labels, margin=None)


def test_a_fit_tells_of_its_pairs_at_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the rest of the first pass, which may take long itself."""
    monkeypatch.setattr(effort, "FEWEST_POINTS", 10)
    # A tile is of full size here, whatever the data.
    slow(monkeypatch, effort, step=1e6)
    seen = []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    data = Counted(*(torch.cat(parts) for parts in zip(*batches(), strict=True)))
    la = Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag", backend_kwargs={"negative_samples": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LongRunWarning, match="780 pairs of 40 points will take about"):
            la.fit(DataLoader(data, batch_size=4))
    # Two first batches: of the Laplace object, and of the pass.
    assert len(seen) == 8


def test_the_estimate_grows_with_the_pairs() -> None:
    """Of class labels with a margin; without one, and for listed pairs, nothing of that size is formed."""
    labels = torch.arange(60_000) % 10
    u = normalize(torch.randn(60_000, 4))[0]
    loss = cc.ContrastiveLoss()

    def seconds(n: int, loss: cc.ContrastiveLoss = loss, pairs: Any = None) -> float:
        relation = make_relation(n, torch.device("cpu"), labels[:n] if pairs is None else None, pairs)
        return loss._pair_seconds(relation, u[:n])

    assert seconds(20_000) == 0
    # Four times the pairs; a factor two is left to the noise of the clock.
    assert 2 < min(seconds(60_000) for _ in range(5)) / min(seconds(30_000) for _ in range(5)) < 8
    assert seconds(60_000, cc.ContrastiveLoss(margin=None)) == 0
    assert seconds(60_000, cc.ContrastiveLoss(negative_weight=0.0)) == 0
    index = torch.arange(100)
    assert seconds(60_000, pairs=(index, index + 1, index + 2)) == 0


def test_a_relation_without_classes_is_estimated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "FEWEST_POINTS", 10)
    u = normalize(torch.randn(64, 3))[0]

    def near(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        same = (a.unsqueeze(1) - b).abs() < 2
        return same, ~same

    assert cc.ContrastiveLoss(margin=None)._pair_seconds(make_relation(64, u.device, pairs=near), u) > 0


def test_cross_terms_are_told_of_while_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, cross_sums)
    options = {"pd_fix": "full", "margin": 0.9}
    la = Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag", backend_kwargs=options)
    with pytest.warns(LongRunWarning, match="The cross terms between all points will take about"):
        la.fit(batches())


def test_eigenpairs_are_told_of_after_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from contrastive_curvature.fit import lowrank

    slow(monkeypatch, lowrank)
    monkeypatch.setattr(lowrank, "DENSE_PARAMETERS", 4)
    la = Laplace(nn.Linear(5, 3), "contrastive", "all", "lowrank", backend_kwargs={"rank": 3})
    with pytest.warns(LongRunWarning, match="Finding 3 eigenpairs will take about 12 minutes"):
        la.fit(batches())


def test_bars_come_after_ten_seconds_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(show: bool | None, elapsed: float) -> str:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if elapsed:
                slow(patch, progress_file, step=elapsed)
            for _ in Progress(show).over(range(1000), "[work]"):
                pass
        return capsys.readouterr().err

    assert "[work]" in shown(True, 0)
    assert "[work]" not in shown(False, 100)
    assert "[work]" not in shown(None, 0)
    # The clock of the computation says that ten seconds have passed before this loop begins.
    assert "[work]" in shown(None, 100)


def test_fit_shows_bars_by_request(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (True, None, False):
        Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag").fit(batches(), progress_bar=asked)
        assert ("[curvature]" in capsys.readouterr().err) is (asked is True)
    with pytest.raises(cc.InputTypeError, match="progress_bar"):
        Laplace(nn.Linear(5, 3), "contrastive").fit(batches(), progress_bar="yes")
