"""A fit warns of a point whose output is so short that it outweighs all others, and names it."""

import re
import warnings
from typing import Any

import torch
from laplace import Laplace
from tables import covering, each
from tiny import in_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.fit.part_state import State

N, WIDTH, D, ROW = 40, 6, 3, 23
SHORT = r"The output of point {} \(counted from 0.* has the norm [\d.e-]+; the typical norm is [\d.]+\. "
STRUCTURES = [
    *(("last_layer", name, {}) for name in ("kron_lowrank", "diag", "kron", "full")),
    *(("all", name, {}) for name in ("diag", "kron", "full")),
    ("subnetwork", "diag", {"subnetwork_indices": torch.arange(0, 100, 3)}),
]


def encoder(device: str) -> nn.Sequential:
    """Without biases and with ReLU, so that outputs are as many times shorter as inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.ReLU(), nn.Linear(16, D, bias=False)).double().to(device)


def data(device: str, times: float = 1e-3, n: int = N) -> tuple[Tensor, Tensor]:
    """Points of four classes, far from zero but for one."""
    x = 3 * torch.eye(WIDTH)[torch.arange(n) % 4] + 0.3 * torch.randn(n, WIDTH)
    x[ROW] *= times
    return x.double().to(device), (torch.arange(n) % 4).to(device)


def warned(call: Any) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if "norm^2" in str(warning.message)]


@covering(2, size=[7, N], weights__structure__more=STRUCTURES)
def test_every_structure(weights: str, structure: str, more: dict[str, Any], size: int, device: str) -> None:
    for times in (1e-3, 1.0):
        x, labels = data(device, times)
        la = Laplace(encoder(device), "contrastive", weights, structure, **more)
        found = warned(lambda la=la, x=x, labels=labels: la.fit(in_batches(x, labels, size)))
        assert len(found) == (times < 1), found
        assert all(re.match(SHORT.format(ROW), text) for text in found), found
        assert la.n_data == N, "a warning, not an error"


@each(
    "options, form, point",
    [
        ({"pd_fix": "full"}, "labels", "23"),
        ({"pairs": "batch", "pd_fix": "positive"}, "labels", "23"),
        ({"relation": lambda a, b: (a[:, None] == b, a[:, None] != b)}, "labels", "23"),
        ({"negative_samples": 10}, "labels", "23"),
        ({"loss": cc.LogisticLoss()}, "shuffled", "23"),
        ({"loss": cc.SupConLoss()}, "labels", "23"),
        ({"loss": cc.ProxyLoss(torch.eye(4, D) + 0.1, 4.0)}, "labels", "23"),
        # The third batch of ten inputs has their first views as points 40 to 49, then their second views.
        ({"loss": cc.InfoNCELoss()}, "views", "53"),
        ({"loss": cc.InfoNCELoss()}, "towers", "23 of tower b"),
        ({}, "parts", "3 of part 1"),
        ({"loss": cc.TripletLoss()}, "parts", "3 of part 1"),
    ],
)
def test_every_source_and_loader(options: dict[str, Any], form: str, point: str, device: str) -> None:
    (x, labels), model = data(device), encoder(device)
    batches: Any = in_batches(x, labels, 20)
    if form == "shuffled":
        batches = DataLoader(TensorDataset(x.cpu(), labels.cpu()), batch_size=7, shuffle=True)
    if form == "views":
        batches = [(a + 1, a) for a, _ in in_batches(x, labels, 10)]
    if form == "towers":
        model = cc.TwoTowers(model, encoder(device))
        batches = [(a + 1, a) for a, _ in batches]
    la = Laplace(model, "contrastive", "last_layer", "diag", backend_kwargs=options)

    def fit() -> None:
        if form != "parts":
            la.fit(batches)
            return
        first = State.merged([la.part_statistics([batch], (k, 2)) for k, batch in enumerate(batches)])
        second = [la.part_curvature([batch], (k, 2), first) for k, batch in enumerate(batches)]
        la.fit_parts(first, State.merged(second[::-1]))

    found = warned(fit)
    assert len(found) == 1, found
    assert re.match(SHORT.format(point), found[0]), found


@each(
    "n, ratio, warns",
    [(31, 1e-4, False), (40, 0.04, False), (40, 0.03, True), (4000, 0.004, False), (4000, 0.0025, True)],
)
def test_the_more_points_the_shorter_it_has_to_be(n: int, ratio: float, warns: bool, device: str) -> None:
    """It weighs as much as 1 / ratio^2 points: with a warning, far more than all others."""
    (x, labels), model = data(device, 1.0, n), encoder(device)
    norms = model(x).detach().norm(dim=1)
    x[ROW] *= ratio * norms.mean() / norms[ROW]
    la = Laplace(model, "contrastive", "last_layer", "diag", backend_kwargs={"margin": None})
    assert len(warned(lambda: la.fit([(x, labels)]))) == warns
    if warns:
        hessian = cc.output_hessian(model(x).detach(), labels, margin=None)
        traces = hessian.point_blocks().diagonal(dim1=1, dim2=2).sum(1)
        assert float(traces[ROW] / traces.sum()) > 0.8
