"""Long computations show bars, and say before very many pairs what would be faster."""

import io
import itertools
import re
import sys
import warnings

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import progress
from contrastive_curvature.losses import pair_derivatives
from contrastive_curvature.progress import LongRunWarning


def batches(n: int = 40) -> list[tuple[Tensor, Tensor]]:
    # Away from zero, where no output is short by chance.
    x, labels = 3 * torch.eye(5)[torch.arange(n) % 4] + 0.1 * torch.randn(n, 5), torch.arange(n) % 4
    return list(zip(x.split(8), labels.split(8), strict=True))


def test_many_pairs_are_told_of_before_any_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_derivatives, "_MANY_PRODUCTS", 1000)
    z, labels = torch.randn(40, 3), torch.arange(40) % 4

    def related(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        same = (a.unsqueeze(1) - b).abs() < 2
        return same, ~same

    words = r"the 780 pairs of 40 points takes a time of order N\^2.*margin=None"
    for call in (
        lambda: cc.output_hessian(z, labels),
        lambda: cc.output_hessian(z, labels, loss=cc.LogisticLoss()),
        lambda: cc.output_hessian(z, labels, pairs=related, margin=None),
        lambda: cc.ggn(nn.Linear(5, 3), torch.randn(40, 5), labels, subset_of_weights="last_layer"),
        lambda: Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag").fit(batches()),
    ):
        with pytest.warns(LongRunWarning, match=words):
            call()
    # Sums over classes are few.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cc.output_hessian(z, labels, margin=None)
        cc.output_hessian(z, labels, negative_weight=0.0)
        cc.output_hessian(z[:10], labels[:10])


def test_fit_shows_bars_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Notebook(io.StringIO):
        __module__ = "ipykernel.iostream"

    for asked, stream in itertools.product((True, None, False), (Terminal, Notebook)):
        monkeypatch.setattr(sys, "stderr", stream())
        Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag").fit(batches(), progress_bar=asked)
        assert ("[curvature]: 100%" in sys.stderr.getvalue()) is (asked is True)
    with pytest.raises(cc.InputTypeError, match="progress_bar"):
        Laplace(nn.Linear(5, 3), "contrastive").fit(batches(), progress_bar="yes")


def test_a_log_gets_one_line_of_a_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, a fit of two passes leaves one line: if asked, or if it is slow."""
    for options, slow, asked in itertools.product(({}, {"pairs": "batch"}), (True, False), (True, None, False)):
        monkeypatch.setattr(progress, "_SHOW_AFTER", 0.0 if slow else 1000.0)
        la = Laplace(nn.Linear(5, 3), "contrastive", hessian_structure="diag", backend_kwargs=options)
        la.fit(batches(), progress_bar=asked)
        line = asked or (asked is None and slow)
        assert re.fullmatch(r"\[curvature\] done after \d s\n" if line else "", capsys.readouterr().err)
