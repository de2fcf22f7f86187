"""``select_unknown``: the procedure by its definition, and its guarantee over simulated calibration sets."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import refuses

import contrastive_curvature as cc


@given(m=st.integers(1, 12), n=st.integers(1, 60), fdr=st.sampled_from([0.05, 0.1, 0.3, 0.5]), draw=st.data())
def test_the_largest_set_that_the_definition_allows(m: int, n: int, fdr: float, draw: st.DataObject) -> None:
    """With whole numbers, so that ties and equalities are exact."""
    ranks = draw.draw(st.lists(st.integers(1, n + 1), min_size=m, max_size=m))
    counts = [k for k in range(1, m + 1) if 1000 * m * sorted(ranks)[k - 1] <= round(1000 * fdr) * k * (n + 1)]
    limit = sorted(ranks)[max(counts) - 1] if counts else 0
    p = np.array(ranks) / (n + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, of_tensor = cc.select_unknown(p, fdr), cc.select_unknown(torch.tensor(p), fdr)
    assert found.tolist() == [rank <= limit for rank in ranks]
    assert isinstance(of_tensor, torch.Tensor)
    assert of_tensor.tolist() == found.tolist()


def test_false_discoveries_stay_below_the_share_over_splits() -> None:
    """One input in ten is unknown; every split has its own calibration inputs, which all its p-values share."""
    splits, n, m, fdr, generator = 600, 2000, 200, 0.1, np.random.default_rng(0)
    shares, power, of_threshold = np.zeros(splits), np.zeros(splits), np.zeros(splits)
    unknown = np.arange(m) < m // 10
    for split in range(splits):
        known = np.sort(generator.normal(size=n))
        p = (1 + n - np.searchsorted(known, generator.normal(size=m) + 3 * unknown)) / (n + 1)
        selected, flagged = cc.select_unknown(p, fdr), p <= fdr
        shares[split] = (selected & ~unknown).sum() / max(1, selected.sum())
        of_threshold[split] = (flagged & ~unknown).sum() / max(1, flagged.sum())
        power[split] = selected[unknown].mean()
    bound = fdr * (~unknown).mean()
    assert abs(shares.mean() - bound) < 4 * shares.std() / splits**0.5  # continuous scores: the bound is attained
    assert power.mean() > 0.6
    assert of_threshold.mean() > 0.4


def test_too_few_calibration_inputs_are_said_with_the_number() -> None:
    p = np.array([1, 1, 40, 77, 100] + [60] * 15) / 100
    with pytest.warns(UserWarning, match=r"that of 99 calibration inputs; to select one of 20.*fdr=0\.05 takes 399"):
        assert not cc.select_unknown(p, 0.05).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Further out than all 399 is enough; an input that is not so far out would not be selected with more.
        assert cc.select_unknown(np.array([1, *[200] * 19]) / 400, 0.05).sum() == 1
        assert not cc.select_unknown(np.array([3, 7, *[50] * 18]) / 100, 0.05).any()
        assert cc.select_unknown(torch.empty(0)).shape == (0,)


test_what_is_refused = refuses(
    cc.InputError,
    (lambda: cc.select_unknown(np.array([1, 1]), 0.1), "int64"),
    (lambda: cc.select_unknown(np.array([[0.1]]), 0.1), r"shape \(1, 1\)"),
    (lambda: cc.select_unknown(np.array([0.5, np.nan]), 0.1), "NaN.*leave it out"),
    (lambda: cc.select_unknown(np.array([0.0, 0.5]), 0.1), r"\(0, 1\]"),
    (lambda: cc.select_unknown(np.array([0.5]), 1.0), "fdr"),
)
