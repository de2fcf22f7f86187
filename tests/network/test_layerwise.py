"""The layerwise pullback against the dense oracle: networks of every kind, all fixes, and what falls back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from lambda_networks import Lambda, parameter
from strategies import DISTANCES, FIXES, close, network_cases
from tables import covering
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.network import layer_parts, layerwise
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.testing import dense_jacobian
from contrastive_curvature.testing.cases import truth_and_size

pytestmark = pytest.mark.parametrize("device", DEVICES)

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])


def transformer(m: Any, x: Tensor) -> Tensor:
    y = m.patch(x).flatten(2).transpose(1, 2)
    y = torch.cat([m.token.expand(len(y), -1, -1), y], dim=1) + m.position[:, : y.shape[1] + 1]
    h = m.first(y)
    y = y + m.scale * m.attention(h, h, h, need_weights=False)[0]
    q, k, v = m.qkv(y).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return m.head(m.last(y)[:, 0])


def windows(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x)).unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2)
    y = y.flatten(1, 2) + m.bias
    return m.head(m.inner(y).unflatten(0, (len(x), -1)).mean((1, 2)))


def functions(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(F.linear(x, m.a.weight, m.a.bias)) * m.scale
    y = F.conv1d(y.unsqueeze(1).expand(-1, 4, -1), m.kernel, None, 1, "same", 1, 4).sum(1)
    return m.c(m.b(y).mul_(0.5).add_(m.shift).relu_())


def tokens(m: Any, x: Tensor) -> Tensor:
    y = 2 * (m.words(x) + m.places(torch.arange(x.shape[1], device=x.device)))
    return m.head(m.encoder(y).mean(1))


def networks() -> dict[str, tuple[nn.Module, Any]]:
    """Everything here goes layer by layer."""
    torch.manual_seed(0)
    tied, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = tied.weight
    made: dict[str, tuple[nn.Module, Any]] = {
        "transformer": (
            Lambda(
                transformer,
                patch=nn.Conv2d(1, 4, 2, stride=2),
                token=parameter(1, 1, 4),
                position=parameter(1, 6, 4),
                first=nn.LayerNorm(4),
                attention=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
                scale=parameter(4),
                qkv=nn.Linear(4, 12),
                last=nn.LayerNorm(4),
                head=nn.Linear(4, 3),
            ),
            torch.randn(6, 1, 4, 4),
        ),
        "positions first": (
            Lambda(
                lambda m, x: m.head(m.body(m.stem(x.transpose(0, 1))).sum(0)),
                stem=nn.Linear(2, 4),
                body=nn.TransformerEncoderLayer(4, 2, 5, norm_first=True),
                head=nn.Linear(4, 3),
            ),
            torch.randn(6, 6, 2),
        ),
        "tokens": (
            Lambda(
                tokens,
                words=nn.Embedding(7, 4, padding_idx=0),
                places=nn.Embedding(5, 4),
                encoder=nn.TransformerEncoderLayer(4, 2, 5, batch_first=True),
                head=nn.Linear(4, 3),
            ),
            torch.randint(0, 7, (6, 5)),
        ),
        "windows": (
            Lambda(
                windows,
                conv=nn.Conv2d(1, 4, 1),
                norm=nn.GroupNorm(2, 4),
                bias=parameter(4, 4),
                inner=nn.Linear(4, 4),
                head=nn.Linear(4, 3),
            ),
            torch.randn(6, 1, 4, 4),
        ),
        "functions": (
            Lambda(
                functions,
                a=nn.Linear(4, 5),
                scale=parameter(5),
                kernel=parameter(4, 1, 3),
                b=nn.Linear(5, 4),
                shift=parameter(4),
                c=nn.Linear(4, 3),
            ),
            torch.randn(6, 4),
        ),
        "tied": (nn.Sequential(tied, nn.Tanh(), other, nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 4)),
        "mapping": (
            Lambda(
                lambda m, x: m.c(torch.tanh(m.e(x["ids"]).mean(1) + m.a(input=x["x"]) * x["mask"].unsqueeze(1))),
                e=nn.Embedding(5, 3),
                a=nn.Linear(4, 3),
                c=nn.Linear(3, 3),
            ),
            {"ids": torch.randint(0, 5, (6, 4)), "x": torch.randn(6, 4), "mask": torch.rand(6), "note": "text"},
        ),
        "convolutions": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", groups=2),
                nn.BatchNorm2d(4),
                nn.ReLU(inplace=True),
                nn.Conv2d(4, 4, 3, padding="same", groups=4, dilation=2),
                nn.InstanceNorm2d(4, affine=True),
                nn.GroupNorm(2, 4),
                nn.Conv2d(4, 3, 2, stride=2, padding=(1, 0)),
                nn.AvgPool2d(2),
                nn.Flatten(),
                nn.RMSNorm(3),
                nn.Linear(3, 3),
            ),
            torch.randn(6, 2, 4, 4),
        ),
    }
    return {name: (model.double().eval(), _double(x)) for name, (model, x) in made.items()}


def lacking() -> dict[str, tuple[nn.Module, Any, set[str]]]:
    """Some of the parameters do not."""
    torch.manual_seed(0)
    made: dict[str, tuple[nn.Module, Any, set[str]]] = {
        "penalty": (
            Lambda(
                lambda m, x: m.c(torch.tanh(m.a(x))) * (1 + m.a.weight.square().mean()),
                a=nn.Linear(4, 4),
                c=nn.Linear(4, 3),
            ),
            torch.randn(6, 4),
            {"a.weight"},
        ),
        "dead penalty": (
            # A use without any gradient on these points is noticed too.
            Lambda(lambda m, x: m.c(x) + F.relu(m.c.weight - 100).sum(), c=nn.Linear(4, 3)),
            torch.randn(6, 4),
            {"c.weight"},
        ),
        "weight norm": (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3)),
            torch.randn(6, 4),
            {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
        ),
        "without points": (
            Lambda(
                lambda m, x: m.c(torch.tanh(x + m.table(torch.ones(2, dtype=x.dtype, device=x.device)))),
                table=nn.Linear(2, 4),
                c=nn.Linear(4, 3),
            ),
            torch.randn(6, 4),
            {"table.weight", "table.bias"},
        ),
        "recurrent": (
            Lambda(lambda m, x: m.c(m.body(x)[0][:, -1]), body=nn.GRU(2, 3, batch_first=True), c=nn.Linear(3, 3)),
            torch.randn(6, 3, 2),
            {"body.weight_ih_l0", "body.weight_hh_l0", "body.bias_ih_l0", "body.bias_hh_l0"},
        ),
    }
    return {name: (model.double().eval(), _double(x), names) for name, (model, x, names) in made.items()}


def _double(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _double(v) for k, v in x.items()}
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def moved(x: Any, device: str) -> Any:
    return (
        {k: moved(v, device) for k, v in x.items()}
        if isinstance(x, dict)
        else x.to(device)
        if isinstance(x, Tensor)
        else x
    )


def check(model: nn.Module, x: Any, device: str, **options: Any) -> LayerwisePullback:
    """Compare the diagonal and the covariances of the outputs with the oracle's Jacobian."""
    jacobian = dense_jacobian(model, x)
    z = model(x).detach()
    model, on_device = model.to(device), moved(x, device)
    hessian = cc.output_hessian(z.to(device), LABELS.to(device), **options)
    flat = jacobian.T @ hessian.dense().cpu().reshape(z.numel(), z.numel()) @ jacobian
    pullback = LayerwisePullback(Encoder(model, on_device))
    # Callers compute without gradients.
    with torch.no_grad():
        outputs, context = pullback.forward(on_device)
        found = pullback.coupled_diag(context, hessian)
        variance = torch.linspace(0.1, 2, jacobian.shape[1], dtype=z.dtype)
        covariance = pullback.output_covariance(context, variance.to(device))
    assert not found.requires_grad
    assert close(outputs.cpu(), z, tolerance=1e-12)
    assert close(found.cpu(), flat.diagonal(), float(flat.abs().max()), 1e-9)
    each = jacobian.view(*z.shape, -1)
    assert close(covariance.cpu(), (each * variance) @ each.mT, tolerance=1e-9)
    return pullback


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*point by point")
        yield


@covering(2, distance=DISTANCES, pd_fix=FIXES, kind=list(networks()))
def test_layer_by_layer_and_exact(kind: str, pd_fix: str, distance: str, device: str) -> None:
    model, x = networks()[kind]
    with no_warning():
        pullback = check(model, x, device, pd_fix=pd_fix, distance=distance, margin=None)
    assert not pullback.by_func


@covering(1, pd_fix=["fixed", "full"], kind=list(lacking()))
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Jacobians are taken point by point")
def test_what_is_not_known_falls_back_by_name_and_stays_exact(kind: str, pd_fix: str, device: str) -> None:
    model, x, names = lacking()[kind]
    with pytest.warns(UserWarning, match="which is exact and slow") as caught:
        pullback = check(model, x, device, pd_fix=pd_fix, margin=None)
    assert {pullback.names[k].removeprefix("model.") for k in pullback.by_func} == names
    ours = [w for w in caught if "exact and slow" in str(w.message)]
    assert len(ours) == 1
    assert repr(min(names)) in str(ours[0].message)


@given(drawn=network_cases())
def test_drawn_networks(drawn: Any, device: str) -> None:
    model, x, case = drawn
    truth, size = truth_and_size(model, x, case)
    case = case.to(device)
    x = x.to(device)
    pullback = LayerwisePullback(Encoder(model.to(device), x))
    with no_warning():
        _, context = pullback.forward(x)
        found = pullback.coupled_diag(context, cc.output_hessian(case.z, **case.all))
    assert close(found.cpu(), truth.diagonal(), size)


@settings(max_examples=8)
@given(
    kind=st.sampled_from(["tokens", "convolutions", "mapping"]),
    fix=st.sampled_from(FIXES),
    chunk=st.sampled_from((30, 700)),
    tile=st.integers(1, 4),
)
def test_chunks_and_tiles_change_nothing(kind: str, fix: str, chunk: int, tile: int, device: str) -> None:
    model, x = networks()[kind]
    with pytest.MonkeyPatch.context() as patch:
        for module, names in (
            (layerwise, ("_CHUNK_ELEMENTS", "_COLUMN_ELEMENTS")),
            (layer_parts, ("_CACHE_ELEMENTS", "_CHUNK_ELEMENTS")),
        ):
            for name in names:
                patch.setattr(module, name, chunk)
        patch.setattr(layerwise, "_TILE_POINTS", tile)
        check(model, x, device, pd_fix=fix, margin=None)


def test_second_derivatives_of_the_loss_in_the_cosines(device: str) -> None:
    # Their cross terms are no sum over the axes of the outputs, and take another way.
    for kind in ("transformer", "tokens", "convolutions", "functions"):
        model, x = networks()[kind]
        jacobian, z = dense_jacobian(model, x), model(x).detach()
        hessian = cc.output_hessian(z.to(device), LABELS.to(device), pd_fix="full", margin=None)
        cross = hessian.cross(slice(0, 6), slice(0, 6))
        c = torch.linspace(-1, 1, 36, dtype=z.dtype, device=device).view(6, 6)
        cross = type(cross)(
            *(getattr(cross, k) for k in ("u_rows", "n_rows", "u_columns", "n_columns", "y")), c + c.T, True
        )
        model, x = model.to(device), moved(x, device)
        pullback = LayerwisePullback(Encoder(model, x))
        found = pullback.cross_diag(x, x, cross)
        columns = jacobian.view(*z.shape, -1).to(device)
        truth = (columns * cross.matmul(columns)).sum((0, 1))
        assert close(found, truth, tolerance=1e-9)


@pytest.mark.parametrize("second_derivatives", [False, True])
def test_tiles_of_one_position_and_of_several(second_derivatives: bool, device: str) -> None:
    torch.manual_seed(0)
    model = Lambda(lambda m, x: m.c(torch.tanh(m.a(x)).sum(1)), a=nn.Linear(4, 5), c=nn.Linear(5, 3))
    model = model.double().to(device)
    tiles = [torch.randn(3, positions, 4, dtype=torch.float64, device=device) for positions in (1, 3)]
    z = torch.cat([model(tile).detach() for tile in tiles])
    whole = cc.output_hessian(z, LABELS.to(device), pd_fix="full", margin=None)
    for left, right in ((0, 1), (1, 0)):
        sides = [slice(3 * side, 3 * side + 3) for side in (left, right)]
        cross = whole.cross(*sides)
        if second_derivatives:
            cross = replace(cross, c=torch.linspace(-1, 1, 9, dtype=z.dtype, device=device).view(3, 3))
        jacobians = [dense_jacobian(model, tiles[side]).view(3, 3, -1) for side in (left, right)]
        truth = (jacobians[0] * cross.matmul(jacobians[1])).sum((0, 1))
        pullback = LayerwisePullback(Encoder(model, tiles[1]))
        assert close(pullback.cross_diag(tiles[left], tiles[right], cross), truth, tolerance=1e-9)


def test_one_point_no_point_one_output_and_frozen_parameters(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 1)).double().eval()
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    model, x = model.to(device), torch.randn(3, 1, 4, dtype=torch.float64, device=device)
    pullback = LayerwisePullback(Encoder(model, x))
    hessian = cc.output_hessian(model(x).detach(), torch.tensor([0, 0, 1], device=device), margin=None)
    jacobian = dense_jacobian(model, x)
    for rows in (slice(0, 0), slice(1, 2), slice(0, 3)):
        found = pullback.diag(x[rows], hessian.blocks[rows])
        part = jacobian[rows]
        assert close(found, (part * hessian.blocks[rows].dense().flatten(1) * part).sum(0), 1e-12)
    assert pullback.output_covariance(x[:0], torch.ones(pullback.n_params, device=device).double()).shape == (0, 1, 1)


@pytest.mark.parametrize("shape", [(2, 3), (1, 70, 80)])
def test_unused_parameters_add_nothing(shape: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).to(device), torch.randn(6, 4, device=device)
    hessian = cc.output_hessian(model(x).detach(), LABELS.to(device), margin=None)
    found = []
    for network in (model, Lambda(lambda m, x: m.used(x), used=model, unused=parameter(*shape).to(device))):
        pullback = LayerwisePullback(Encoder(network, x))
        with no_warning(), torch.no_grad():
            found.append(
                {name: f for (name, _), f in zip(pullback.named_sizes(), pullback.kron(x, hessian.blocks), strict=True)}
            )
    g, _ = found[1].pop("unused")
    assert not g.any()
    torch.testing.assert_close(found[0]["weight"], found[1]["used.weight"])
