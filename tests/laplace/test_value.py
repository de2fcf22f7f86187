"""A posterior is a value: what interrupts a step leaves the posterior that was there, and no later step changes it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature.posterior.value import Fitted, Posterior, Prior

PACKAGE = str(Path(cc.__file__).parent)
WEIGHTS = {"last_layer": "kron_lowrank", "all": "diag"}


def data(n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [(x, torch.arange(n) % 3)]


def fitted(weights: str) -> Any:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    la = Laplace(encoder, "contrastive", weights, WEIGHTS[weights])
    la.fit(data(18, 0))
    la.optimize_prior_precision()
    la.calibrate(data(12, 1))
    return la


STEPS: dict[str, Callable[[Any], object]] = {
    "fit": lambda la: la.fit(data(15, 2)),
    "fit more": lambda la: la.fit(data(15, 2), override=False),
    "update": lambda la: la.update(data(15, 2)),
    "calibrate": lambda la: la.calibrate(data(12, 3), score="uncertainty"),
    "measure_classes": lambda la: la.measure_classes(data(12, 3)),
    "marglik": lambda la: la.optimize_prior_precision(method="marglik", n_steps=3),
    "gridsearch": lambda la: la.optimize_prior_precision(method="gridsearch", val_loader=data(9, 4), grid_size=3),
    "average": lambda la: la.optimize_prior_precision(strength=2.0),
    "load": lambda la: la.load_state_dict({**la.state_dict()}),
}


class Interruption(BaseException):
    pass


def interrupt() -> None:
    raise Interruption


def places(
    step: Callable[[], object], stop: tuple[str, int] | None = None, there: Callable[[], object] = interrupt
) -> set[tuple[str, int]]:
    """Run a step, and return the lines of the package that it runs; call ``there`` at the first run of ``stop``."""
    seen: set[tuple[str, int]] = set()

    def trace(frame: Any, event: str, _: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if not place[0].startswith(PACKAGE):
            return None
        if event == "line":
            seen.add(place)
            if place == stop:
                sys.settrace(None)
                there()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("folders", [("laplace", "posterior"), pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_at_any_line_leaves_the_old_posterior_or_the_new_one(
    name: str, weights: str, folders: tuple[str, ...]
) -> None:
    la, step = fitted(weights), STEPS[name]
    old, state = la.posterior, la.state_dict()["checksum"]
    step(la)
    new = la.state_dict()["checksum"]
    la.posterior = old
    every = {place for place in places(lambda: step(la)) if not folders or Path(place[0]).parent.name in folders}
    assert len(every) > 20
    for place in sorted(every):
        la.posterior = old
        with pytest.raises(Interruption):
            places(lambda: step(la), place)
        assert la.posterior is old or la.state_dict()["checksum"] == new, place
    la.posterior = old
    assert la.state_dict()["checksum"] == state


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_is_handed_out_changes_no_posterior(weights: str) -> None:
    la = fitted(weights)
    state, x = la.state_dict()["checksum"], data(3, 5)[0][0]
    before = la(x)
    la.prior_precision.mul_(2)
    la.prior_mean.add_(1)
    given = torch.full((1,), 3.0, dtype=torch.float64)
    assert la.state_dict()["checksum"] == state
    la.prior_precision = given
    given.mul_(10)
    assert float(la.prior_precision) == 3
    # The earlier prediction belongs to the earlier posterior.
    assert torch.isfinite(before.p_value).all()
    with pytest.raises(cc.NotFittedError, match="calibrated for another posterior"):
        _ = la(x).p_value


def test_a_value_is_frozen() -> None:
    posterior = fitted("last_layer").posterior
    for part, kind, name in (
        (posterior, Posterior, "prior"),
        (posterior.fitted, Fitted, "n"),
        (posterior.prior, Prior, "mean"),
    ):
        assert type(part) is kind
        with pytest.raises(AttributeError):
            setattr(part, name, None)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.filterwarnings("error::contrastive_curvature.LabelWarning")
def test_a_warning_that_is_an_error_changes_nothing(weights: str) -> None:
    la = fitted(weights)
    before, [(x, y)] = la.posterior, data(15, 2)
    with pytest.raises(cc.LabelWarning):
        la.fit([(x, y - 1)])
    assert la.posterior is before


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_change_at_any_line_of_a_prediction_gives_the_old_one_or_the_new_one(weights: str) -> None:
    la, x = fitted(weights), data(3, 5)[0][0]
    old = la.posterior
    la.prior_precision, la.temperature = 7.0, 2.0
    la.calibrate(data(12, 1))
    new = la.posterior

    def numbers() -> torch.Tensor:
        out = la(x)
        return torch.stack([out.uncertainty, out.novelty, out.p_value])

    def change() -> None:
        la.posterior = new

    truths = []
    for la.posterior in (old, new):
        truths.append(numbers())
    assert not torch.equal(*truths)
    la.posterior = old
    every = places(numbers)
    assert len(every) > 100
    for place in sorted(every):
        la.posterior, found = old, []
        places(lambda found=found: found.append(numbers()), place, change)
        assert any(torch.equal(found[0], truth) for truth in truths), place
