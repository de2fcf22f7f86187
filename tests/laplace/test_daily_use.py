"""``la.predict``, ``la.update`` and ``embedding.to_pandas``, against ``la(x)`` and ``la.fit``."""

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from laplace import Laplace
from tables import each
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(40) % 4
WORDS = ["red", "blue", "green", "grey"]
TEXTS = [WORDS[int(y)] for y in Y]


class Named(nn.Module):
    """An encoder of texts, mappings and tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        return {"x": torch.eye(4, dtype=torch.float64)[[WORDS.index(text) for text in texts]]}

    def forward(self, x: Any) -> Tensor:
        return self.layers(x if isinstance(x, Tensor) else x["x"])


def posterior(structure: str = "kron", *data: tuple[Tensor, Tensor]) -> Any:
    la = Laplace(Named().eval(), "contrastive", "last_layer", structure)
    la.fit(list(data) or [(X, Y)])
    la.optimize_prior_precision()
    return la


ONE_HOT = torch.eye(4, dtype=torch.float64)[Y]
DATA = [
    (X, X),
    (X.numpy(), X),
    (X.numpy().astype(np.float32), X.float().double()),
    ({"x": X}, X),
    ([(X[:9], Y[:9]), (X[9:], Y[9:])], X),
    (DataLoader(TensorDataset(X, Y), batch_size=7), X),
    (iter(X.split(11)), X),
    (TEXTS, ONE_HOT),
    (np.array(TEXTS), ONE_HOT),
    (DataLoader(list(zip(TEXTS, Y.tolist(), strict=True)), batch_size=6), ONE_HOT),
]


def test_a_data_set_of_any_kind_is_predicted_as_its_inputs_at_once() -> None:
    la = posterior()
    la.calibrate([X + 0.1])
    for data, x in DATA:
        found, wanted = la.predict(data, batch_size=7), la(x)
        for name in ("mu", "kappa", "uncertainty", "novelty", "p_value"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), msg=f"{name} of {data}")
    broken = X.clone()
    broken[8] = torch.nan
    with pytest.raises(cc.InputError, match=r"data: batch 1 \(counted from 0\).*rows \[1\]"):
        la.predict(broken, batch_size=7)
    assert la.predict(broken, batch_size=7, on_invalid="nan").mu.isnan().any(1).nonzero().tolist() == [[8]]


def test_a_table_has_the_columns_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    la = posterior()
    assert list(la(X).to_pandas()) == ["uncertainty", "kappa", "novelty"]
    la.calibrate([X + 0.1])
    found = la(X)
    table = found.to_pandas(mu=True)
    assert list(table) == ["uncertainty", "kappa", "novelty", "p_value", "mu_0", "mu_1", "mu_2"]
    columns = [found.uncertainty, found.kappa, found.novelty, found.p_value, *found.mu.T]
    np.testing.assert_array_equal(table.to_numpy(), torch.stack(columns, 1).numpy())
    assert list(la(X, diagonal_output=True).to_pandas()) == ["uncertainty", "kappa"]
    assert list(found.to(torch.bfloat16).to_pandas()) == ["uncertainty", "kappa", "novelty", "p_value"]
    la.prior_precision = 3.0
    # Not left out: the column was there yesterday.
    with pytest.raises(cc.NotFittedError, match="calibrated for another"):
        la(X).to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(cc.UnsupportedError, match="pip install pandas"):
        found.to_pandas()


@each("structure", ["kron", "diag", "full"])
def test_an_update_is_a_fit_that_adds_and_says_once_what_is_to_be_done(structure: str) -> None:
    first, second = (X[:24], Y[:24]), (X[24:], Y[24:])
    la, wanted = posterior(structure, first), posterior(structure, first)
    la.calibrate([X + 0.1])
    la.update([second])
    wanted.fit([second], override=False)
    assert la.n_data == 40
    torch.testing.assert_close(*(one.posterior.fitted.clamped.diagonal() for one in (la, wanted)), rtol=0, atol=0)
    with pytest.warns(cc.DefaultPriorWarning, match="last fit or update") as caught:
        la.predict(X)
    assert caught[0].filename == __file__
    assert la.posterior.calibration is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la(X)
        la.update([second])
        la.optimize_prior_precision()
        la.calibrate([X + 0.1])
        la(X).p_value  # noqa: B018
    with pytest.raises(cc.NotFittedError):
        Laplace(Named(), "contrastive").update([second])
