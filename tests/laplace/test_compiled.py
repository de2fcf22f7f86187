"""Encoders that went through ``torch.compile``, and compiled predictions: as without, or refused with what to type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc

pytestmark = [
    # Dynamo's, at its first use: of parts of torch, and of numbers that it computes outside the graph.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

N, F, D = 60, 6, 4
NAMES = ("mu", "kappa", "uncertainty", "p_value")
Wrap = Callable[[nn.Module], nn.Module]


def encoder(device: str, wrap_body: Wrap = lambda body: body, *tail: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(F, 8), nn.Tanh()), nn.Linear(8, D)
    return nn.Sequential(wrap_body(body), head, *tail).to(device)


def inputs(device: str) -> Tensor:
    return torch.randn(N, F, generator=torch.Generator().manual_seed(0)).to(device)


def fitted(model: nn.Module, device: str) -> Any:
    la: Any = Laplace(model, "contrastive")
    la.fit([(inputs(device)[:40], (torch.arange(40) % 3).to(device))])
    la.optimize_prior_precision()
    la.calibrate([inputs(device)[40:]])
    return la


def compiled(thing: Any) -> Any:
    """Traced and run as it is: what a graph does does not depend on the code that is made of it."""
    return torch.compile(thing, backend="eager")


def close(found: Any, truth: Any) -> None:
    for name in NAMES:
        value = found[NAMES.index(name)] if isinstance(found, (tuple, list)) else getattr(found, name)
        torch.testing.assert_close(value, getattr(truth, name), rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_compiled_encoder_is_fitted(device: str) -> None:
    truth = fitted(encoder(device, lambda body: body, cc.L2Norm()), device)(inputs(device))
    la = fitted(compiled(encoder(device, lambda body: body, cc.L2Norm())), device)
    close(la(inputs(device)), truth)
    again = fitted(encoder(device, lambda body: body, cc.L2Norm()), device)
    again.load_state_dict(la.state_dict())
    close(again(inputs(device)), truth)


def test_a_compiled_prediction(device: str) -> None:
    la = fitted(encoder(device), device)
    close(compiled(la)(inputs(device)), la(inputs(device)))


def test_what_is_exported_compiles_to_one_graph_for_any_number_of_inputs(device: str, tmp_path: Path) -> None:
    la = fitted(encoder(device), device)
    la.export(tmp_path / "served.pt2", inputs(device)[:3])
    served = torch.export.load(tmp_path / "served.pt2").module()
    one_graph = torch.compile(served, backend="eager", fullgraph=True, dynamic=True)
    for n in (5, 9):
        close(one_graph(inputs(device)[:n]), la(inputs(device)[:n]))


def test_no_hook_of_the_analysis_stays_in_compiled_code(device: str) -> None:
    """Compiled code keeps the hooks that a module had when it was made: batches of its shape would fill dead lists."""
    rows: set[int] = set()

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            rows.update(len(value) for value in args if isinstance(value, Tensor) and value.shape[1:] == (F,))
            return graph(*args)

        return run

    body = torch.compile(nn.Sequential(nn.Linear(F, 8), nn.Tanh()).to(device), backend=backend)
    la: Any = Laplace(nn.Sequential(body, nn.Linear(8, D)).to(device), "contrastive", prior_precision=1.0)
    la.fit([(inputs(device)[:9], (torch.arange(9) % 2).to(device))])
    assert 9 in rows
    # The analysis, which looks at one input alone too, has left no compiled code.
    assert 1 not in rows


def test_compiled_parts_that_hide_something_are_refused(device: str) -> None:
    model = encoder(device)
    model[1] = compiled(model[1])
    in_place = encoder(device)
    in_place.compile(backend="eager")
    with pytest.raises(cc.UnsupportedError, match=r"layer '1'.*torch\.compile\(body\)"):
        fitted(model, device)
    # Copied for the posterior of a last layer, it is as it was before.
    close(fitted(in_place, device)(inputs(device)), fitted(encoder(device), device)(inputs(device)))
    for bad, which in ((encoder(device, compiled), "layer '0'"), (in_place, "the encoder")):
        with pytest.raises(cc.UnsupportedError, match=which + r" is compiled.*torch\.compile\(encoder\)"):
            Laplace(bad, "contrastive", "all", "diag")
