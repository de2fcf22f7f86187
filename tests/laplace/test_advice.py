"""Warnings of labels of one class, of a label of -1, and of a prior that nobody chose: once each, and only then."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc

pytestmark = [
    # The configuration of pytest leaves these out, for all other tests.
    pytest.mark.filterwarnings("error::contrastive_curvature.DefaultPriorWarning"),
    pytest.mark.filterwarnings("error::contrastive_curvature.LabelWarning"),
]

N, F = 12, 4


def inputs(device: str) -> Tensor:
    return torch.randn(N, F, generator=torch.Generator().manual_seed(0)).to(device)


def encoder(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(F, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def fitted(device: str, labels: Tensor | None = None, weights: str = "last_layer", **options: Any) -> Any:
    la: Any = Laplace(encoder(device), "contrastive", weights, "diag", **options)
    y = torch.arange(N) % 3 if labels is None else labels
    la.fit([(inputs(device)[:6], y[:6].to(device)), (inputs(device)[6:], y[6:].to(device))])
    return la


ASKS: list[Callable[[Any, Tensor], Any]] = [
    lambda la, x: la(x, on_invalid="nan"),
    lambda la, x: la.functional_samples(x, n_samples=2),
    lambda la, x: la.predictive_samples(x, n_samples=2),
]


@covering(
    1,
    ask=ASKS,
    weights__structure=[("last_layer", "diag"), ("all", "diag")],
)
def test_a_prior_that_nobody_chose_is_said_once(weights: str, structure: str, ask: Any, device: str) -> None:
    x = inputs(device)
    la: Any = Laplace(encoder(device), "contrastive", weights, structure, backend_kwargs={"pd_fix": "psd"})
    la.fit([(x, (torch.arange(N) % 3).to(device))])
    with pytest.warns(cc.DefaultPriorWarning, match=r"optimize_prior_precision\(\)") as caught:
        ask(la, x)
    assert [Path(one.filename) for one in caught] == [Path(__file__)]
    la(x)
    la.fit([(x, (torch.arange(N) % 2).to(device))])
    la(x, pred_type="nn", n_samples=2)


CHOSEN: list[Callable[[Any], Any]] = [
    lambda la: la.optimize_prior_precision(),
    lambda la: la.optimize_prior_precision(method="marglik", n_steps=1),
    lambda la: setattr(la, "prior_precision", 1.0),
]


@each("choose", CHOSEN)
def test_a_chosen_prior_is_quiet(choose: Callable[[Any], Any], device: str) -> None:
    la, again, given = fitted(device), fitted(device), fitted(device, prior_precision=1.0)
    choose(la)
    again.load_state_dict(la.state_dict())
    for one in (la, again, given):
        one(inputs(device))
        one.predictive_samples(inputs(device), n_samples=2)


def test_a_saved_posterior_says_whether_its_prior_was_chosen(device: str, tmp_path: Path) -> None:
    la, x = fitted(device), inputs(device)
    la.save_pretrained(tmp_path / "folder")
    # The prior of the state counts, not that of the object.
    again = fitted(device, prior_precision=2.0)
    again.load_state_dict(la.state_dict())
    for loaded in (again, cc.load_pretrained(tmp_path / "folder", encoder=encoder(device))):
        with pytest.warns(cc.DefaultPriorWarning):
            loaded(x)
        loaded(x)


def test_towers_say_it_too(device: str) -> None:
    x, towers = inputs(device), cc.TwoTowers(encoder(device), encoder(device))
    la: Any = Laplace(towers, "contrastive", backend_kwargs={"loss": cc.InfoNCELoss(0.1)})
    la.fit([(x, x)])
    with pytest.warns(cc.DefaultPriorWarning):
        la.a(x)
    la.optimize_prior_precision()
    la.b(x)


@pytest.mark.parametrize(
    "options",
    [{}, {"pairs": "batch"}, {"loss": cc.SupConLoss(0.1)}],
    ids=str,
)
def test_labels_of_one_class_and_of_minus_one(options: dict[str, Any], device: str) -> None:
    for labels, words in (
        (torch.full((N,), 7), "all labels are 7.*two views"),
        (torch.arange(N) % 3 - 1, "some labels are -1.*Leave such points out"),
        (torch.full((N,), -1), "all labels are -1"),
    ):
        with pytest.warns(cc.LabelWarning, match=words) as caught:
            fitted(device, labels, backend_kwargs=options)
        assert [Path(one.filename) for one in caught] == [Path(__file__)]


@pytest.mark.filterwarnings("ignore:override=False. this posterior was loaded")
def test_a_fit_that_adds_to_another_may_be_of_one_class(device: str) -> None:
    x, ones = inputs(device), torch.ones(N).long().to(device)
    la = fitted(device)
    la.fit([(x, ones)], override=False)
    # What has been told of an earlier set is not told of a later one.
    with pytest.warns(cc.LabelWarning, match="some labels are -1"):
        la.fit([(x, -ones)], override=False)
    la.fit([(x, ones)], override=False)
    with pytest.warns(cc.LabelWarning, match="all labels are 1"):
        la.fit([(x, ones)])
    # Nobody knows what classes the fit of a loaded posterior had.
    again = fitted(device)
    again.load_state_dict(la.state_dict())
    again.fit([(x, ones)], override=False)
    with pytest.warns(cc.LabelWarning, match="all labels are 1"):
        Laplace(encoder(device), "contrastive", hessian_structure="diag").fit([(x, ones)], override=False)


def test_labels_that_are_no_reason_to_warn(device: str) -> None:
    """Batches of one class each; classes with other negative numbers; labels that a relation reads; a clean refit."""
    x = inputs(device)
    fitted(device, torch.tensor([0] * 6 + [5] * 6))
    fitted(device, torch.arange(N) % 4 - 3)

    def near(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        apart = (a[:, None] - b[None]).abs()
        return apart <= 1, apart > 3

    fitted(device, torch.arange(N) - 1, backend_kwargs={"relation": near})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cc.LabelWarning)
        la = fitted(device, torch.zeros(N).long())
    la.fit([(x, (torch.arange(N) % 2).to(device))])
    views: Any = Laplace(encoder(device), "contrastive", backend_kwargs={"loss": cc.InfoNCELoss(0.1)})
    views.fit([(x, x + 0.1)])
