"""A fit that hangs on one point says so, and says which."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from tables import covering
from tiny import in_batches
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.fit import dominance

N, WIDTH, D = 40, 6, 3
STRUCTURES = [
    ("last_layer", "diag", {}),
    ("last_layer", "kron", {}),
    ("last_layer", "full", {}),
    ("all", "diag", {}),
    ("all", "kron", {}),
    ("all", "full", {}),
    ("all", "lowrank", {}),
    ("subnetwork", "diag", {"subnetwork_indices": torch.arange(0, 100, 3)}),
]
BACKENDS = [cc.ContrastiveGGN, cc.BackPackContrastiveGGN, cc.CurvlinopsContrastiveGGN, cc.StochManContrastiveGGN]


def encoder(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, D)).to(device)


def data(device: str) -> tuple[Tensor, Tensor]:
    # Far from zero, where outputs are not short by chance.
    x = 3 * torch.eye(WIDTH)[torch.arange(N) % 4] + 0.3 * torch.randn(N, WIDTH)
    return x.to(device), (torch.arange(N) % 4).to(device)


def short_output(model: nn.Sequential, x: Tensor, row: int) -> Tensor:
    """Inputs of which one has a nearly zero output, whose Hessian grows with the inverse of its squared norm."""
    moved = x.clone().double()
    twin = encoder(x.device.type).double()
    twin.load_state_dict(model.state_dict())
    point = moved[row : row + 1].clone().requires_grad_()
    for _ in range(20):
        z = twin(point).detach()
        if float(z.norm()) < 1e-4:
            break
        jacobian = torch.autograd.functional.jacobian(twin, point).view(D, WIDTH)
        point = (point - (torch.linalg.pinv(jacobian) @ z[0] * 0.98)[None]).detach().requires_grad_()
    moved[row] = point.detach()[0]
    return moved.to(x.dtype)


@covering(2, size=[7, N], at_once=[0, 2**24], weights__structure__more=STRUCTURES)
def test_a_point_next_to_zero(
    weights: str,
    structure: str,
    more: dict[str, Any],
    size: int,
    at_once: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether every batch is searched at once, or all after the pass."""
    monkeypatch.setattr(dominance, "_NUMBERS", at_once)
    model = encoder(device)
    x, labels = data(device)
    x = short_output(model, x, 23)
    la = Laplace(model, "contrastive", weights, structure, **more)
    with pytest.warns(UserWarning, match=r"One point contributes \d+ % of the curvature.*point \d+ of") as caught:
        la.fit(in_batches(x, labels, size))
    assert "point 23 of" in str(caught[0].message)
    assert la.n_data == N, "a warning, not an error"


@covering(1, size=[7, N], backend=[None, *BACKENDS])
def test_several_huge_inputs(backend: Any, size: int, device: str) -> None:
    """Neither of the points dominates alone."""
    x, labels = data(device)
    x[[4, 9, 30], 2] = torch.tensor([1e15, 1.1e15, 1.05e15], device=device)
    la = Laplace(encoder(device), "contrastive", "all", "kron", backend=backend)
    where = rf"points 9 \(row {9 % size} of batch {9 // size}\), 30 .*, 4 .* of the pass over the data"
    with pytest.warns(
        UserWarning, match=rf"3 points contribute 100 % of the curvature \(input factor of layer .*{where}"
    ):
        la.fit(in_batches(x, labels, size))


@covering(1, kind=["dataset", "batch"], pd_fix=["fixed", "positive", "full", "psd"], structure=["diag", "full"])
def test_every_fix_and_both_kinds_of_fit(structure: str, pd_fix: str, kind: str, device: str) -> None:
    model = encoder(device)
    x, labels = data(device)
    options = {"pd_fix": pd_fix, "pairs": kind}
    make = lambda: Laplace(model, "contrastive", "last_layer", structure, backend_kwargs=options)  # noqa: E731
    with pytest.warns(UserWarning, match="point 5 of"):
        make().fit(in_batches(short_output(model, x, 5), labels, 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().fit(in_batches(x, labels, 20))


@settings(max_examples=15)
@given(
    row=st.integers(0, N - 1),
    kind__size=st.tuples(st.just("dataset"), st.integers(1, N)) | st.tuples(st.just("batch"), st.integers(20, N)),
    weights=st.sampled_from(["last_layer", "all"]),
    shuffle=st.booleans(),
)
def test_the_point_is_found_wherever_it_is(row, kind__size, weights, shuffle, device) -> None:
    """The output Hessian shrinks as the input grows, but the factors of inputs know nothing of it."""
    torch.manual_seed(0)
    (x, labels), (kind, size) = data(device), kind__size
    x[row, 2] = 1e15
    if shuffle:
        order = torch.randperm(N)
        x, labels, row = x[order], labels[order], int((order == row).nonzero())
    la = Laplace(encoder(device), "contrastive", weights, "kron", backend_kwargs={"pairs": kind})
    layer = "2" if weights == "last_layer" else r"[02]"
    where = rf"point {row} \(row {row % size} of batch {row // size}\) of the pass over the data"
    with pytest.warns(UserWarning, match=rf"100 % of the curvature \(input factor of layer '{layer}'\): {where}"):
        la.fit(in_batches(x, labels, size))


def test_few_points_are_not_spoken_of() -> None:
    model = encoder("cpu")
    x, labels = data("cpu")
    Laplace(model, "contrastive", "last_layer", "diag").fit([(short_output(model, x, 3)[:12], labels[:12])])
