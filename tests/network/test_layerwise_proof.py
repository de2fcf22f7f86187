"""Networks that use parameters, or order points, in another way in a later batch or at a later point."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from devices import DEVICES
from lambda_networks import Lambda, parameter
from strategies import FIXES, close
from tables import covering, each
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode

import contrastive_curvature as cc
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.testing import dense_ggn, dense_jacobian

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop",
        "ignore:Jacobians are taken point by point",
        "ignore:.*nested tensors",
        "ignore:Initializing zero",
    ),
]

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


class Product(torch.autograd.Function):
    """A function that no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] * w, (gradients[0] * x).sum(0)


def sorted_points(m: Any, x: Tensor) -> Tensor:
    """The first point stays in front, as the longest sequence of a sorted batch may."""
    order = torch.cat([torch.zeros(1, dtype=torch.long, device=x.device), 1 + x[1:, 0].argsort()])
    return m.c(torch.tanh(m.a(x[order])))[order.argsort()]


def sorted_by_matrix(m: Any, x: Tensor) -> Tensor:
    order = torch.eye(len(x)).to(x)[x[:, 0].argsort()]
    return m.c(order.mT @ torch.tanh(m.a(order @ x)))


def without_padding(m: Any, x: Tensor) -> Tensor:
    """The first five points have no padding; that of the others leaves a multiple of eight tokens."""
    kept = x[..., 0] < 50
    out = x.new_zeros(*x.shape[:2], 4)
    out[kept] = torch.tanh(m.a(x[kept]))
    return m.c(out.sum(1))


def hidden_branch(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * m.p
    far = (x > 50).any(1, keepdim=True)
    if bool(far.any()):
        h = h + torch.where(far, Product.apply(h, m.p), torch.zeros_like(h))
    return m.c(torch.tanh(h))


def assigned_branch(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x) + m.p).unsqueeze(1).repeat(1, 2, 1)
    far = (x > 50).any(1)
    if bool(far.any()):
        h[far, 0] = m.p
    return m.c(h.mean(1))


def positions_of_points(m: Any, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    if len(x) > 5:
        positions = positions.expand(len(x), -1)
    return m.c(torch.tanh(m.a(x) + m.table(positions)).mean(1))


def networks() -> dict[str, tuple[nn.Module, Tensor, set[str]]]:
    """Inputs of eight points, and what has to be taken point by point."""
    torch.manual_seed(0)
    x, sequences = torch.randn(8, 4), torch.randn(8, 4, 4)
    far = x.clone()
    far[6, 1] = 60
    padded = sequences.clone()
    padded[5, :, 0] = padded[6, :, 0] = 60

    def layers() -> dict[str, nn.Module]:
        return {"a": nn.Linear(4, 4), "c": nn.Linear(4, 3)}

    every = {"a.weight", "a.bias", "c.weight", "c.bias"}
    return {
        "sorted": (Lambda(sorted_points, **layers()), x, every),
        "without padding": (Lambda(without_padding, **layers()), padded, {"a.weight", "a.bias"}),
        "hidden branch": (Lambda(hidden_branch, p=parameter(4), **layers()), far, {"p"}),
        "assigned branch": (Lambda(assigned_branch, p=parameter(4), **layers()), far, {"p"}),
        "positions of every point": (
            Lambda(positions_of_points, table=nn.Embedding(4, 4), **layers()),
            sequences,
            {"table.weight"},
        ),
    }


def found_names(caught: list[warnings.WarningMessage]) -> set[str]:
    text = " ".join(str(w.message) for w in caught if "exact and slow" in str(w.message))
    return set(text.split("'")[1::2])


def check(model: nn.Module, x: Any, device: str, pd_fix: str = "fixed") -> None:
    """Compare the diagonal of all weights with the dense oracle."""
    truth = dense_ggn(model, x, LABELS.to(device), pd_fix=pd_fix, margin=None)
    found = cc.ggn(model, x, LABELS.to(device), pd_fix=pd_fix, margin=None, clamp=False)
    assert close(found, truth.diagonal(), float(truth.abs().max()), 1e-9)


@covering(1, pd_fix=FIXES, kind=list(networks()))
def test_what_a_later_point_does_is_noticed_and_exact(kind: str, pd_fix: str, device: str) -> None:
    model, x, names = networks()[kind]
    model, x = model.double().to(device), x.double().to(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(model, x, device, pd_fix)
    assert found_names(caught) == names
    # Covariances, and a network that was analysed with two of its points.
    pullback = LayerwisePullback(Encoder(model, x[:2]))
    variance = torch.linspace(0.1, 2, pullback.n_params, dtype=x.dtype, device=device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (slice(0, 2), slice(0, 8)):
            found = pullback.output_covariance(pullback.forward(x[rows])[1], variance)
            jacobian = dense_jacobian(model, x[rows]).view(len(x[rows]), 3, -1)
            assert close(found, (jacobian * variance) @ jacobian.mT, tolerance=1e-9)


@each("sorted_batches", [4, 20])
def test_another_order_in_most_batches_gives_no_wrong_sum(sorted_batches: int, device: str) -> None:
    """The first batches are in order already, so that nothing shows there; a later one shows it."""
    torch.manual_seed(0)
    model = Lambda(sorted_by_matrix, a=nn.Linear(4, 4), c=nn.Linear(4, 3)).double().to(device)
    x = torch.randn(8, 4, dtype=torch.float64, device=device)
    ordered = x[x[:, 0].argsort()]
    batches = [ordered] * sorted_batches + [x] * 3 * sorted_batches
    hessian = cc.output_hessian(model(x).detach(), LABELS.to(device), margin=None)

    pullback = LayerwisePullback(Encoder(model, ordered))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"'a.bias'.*exact and slow"):
        found = sum(pullback.diag(batch, hessian.blocks) for batch in batches)
    truth = torch.zeros_like(found)
    for batch in batches:
        jacobian = dense_jacobian(model, batch).view(8, 3, -1)
        truth += (jacobian * hessian.blocks.matmul(jacobian)).sum((0, 1))
    assert close(found, truth, tolerance=1e-9)


def turned(x: Tensor) -> Tensor:
    """More points than the analysis has, turned around; in the midst of a network, and back, they give its outputs."""
    return x.flip(0) if len(x) > 5 else x


def by_hooks(m: Any) -> None:
    for layer in (m[2], m[4]):
        layer.register_forward_pre_hook(lambda _, args: (turned(args[0]),))


def by_a_script(m: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m[2] = torch.jit.script(m[2])


def by_own_forward(m: Any) -> None:
    for layer in (m[2], m[4]):
        layer.forward = lambda x, layer=layer: F.linear(turned(x), layer.weight, layer.bias)


CHANGES = [
    (by_hooks, {"2.weight"}),
    (by_a_script, {"2.weight", "2.bias"}),
    (by_own_forward, {"2.weight"}),
    (lambda _: None, set()),
]


@each("change, names", CHANGES)
def test_layers_in_a_row_are_trusted_unless_somebody_changed_one(change: Any, names: set[str], device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model, x = model.double().to(device), torch.randn(8, 4, dtype=torch.float64, device=device)
    change(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for pd_fix in ("fixed", "full"):
            check(model, x, device, pd_fix)
    assert names <= found_names(caught)
    assert bool(names) == bool(found_names(caught))


def test_ordinary_networks_keep_their_speed(device: str) -> None:
    """Every row is its point's own: no warning, whatever the number of points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)).to(device)
    for n in (2, 17, 300):
        x, y = torch.randn(n, 4, device=device), torch.arange(n, device=device) % 2
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*point by point")
            for fix in FIXES:
                cc.ggn(model, x, y, pd_fix=fix)


@each("pd_fix", FIXES)
def test_scalars_and_empty_parameters(pd_fix: str, device: str) -> None:
    torch.manual_seed(0)
    model = Lambda(
        lambda m, x: m.c(torch.tanh(torch.cat([m.a(x) * m.scale, m.nothing(x)], 1))) * m.temperature.exp(),
        a=nn.Linear(4, 4),
        nothing=nn.Linear(4, 0),
        scale=parameter(),
        temperature=parameter(),
        c=nn.Linear(4, 3),
    )
    model, x = model.double().to(device), torch.randn(8, 4, dtype=torch.float64, device=device)
    with pytest.warns(UserWarning, match=r"1 parameters \('temperature'\)"):
        check(model, x, device, pd_fix)


def padded_transformer(masked: bool) -> nn.Module:
    torch.manual_seed(0)

    def forward(m: Any, x: dict[str, Tensor]) -> Tensor:
        kept = (~x["padding"]).to(x["x"]).unsqueeze(2) if masked else torch.ones_like(x["x"][..., :1])
        return m.c((m.body(x["x"], src_key_padding_mask=x["padding"]) * kept).sum(1))

    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), 2)
    return Lambda(forward, body=body, c=nn.Linear(4, 3)).double().eval()


def test_transformers_with_padding(device: str) -> None:
    """torch takes another path without gradients, which puts zeros in padded positions."""
    if device != "cpu":
        pytest.skip("the path is that of the CPU here")
    padding = torch.zeros(8, 4, dtype=torch.bool)
    padding[6, 2:] = padding[2, 3:] = True
    x = {"x": torch.randn(8, 4, 4, dtype=torch.float64), "padding": padding}
    model = padded_transformer(masked=True)
    check(model, x, device)
    with pytest.raises(cc.UnsupportedError, match="enable_nested_tensor=False"):
        cc.ggn(padded_transformer(masked=False), x, LABELS)


def test_gradients_that_are_no_derivatives_are_refused(device: str) -> None:
    ids = torch.randint(0, 5, (8, 3), device=device)
    embedding = nn.Embedding(5, 4, scale_grad_by_freq=True)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 3)).to(device)
    with pytest.raises(cc.UnsupportedError, match="'0' has scale_grad_by_freq"):
        cc.ggn(model, ids, LABELS.to(device))
    embedding.weight.requires_grad_(False)
    model = Lambda(
        lambda m, x: m.c(torch.view_as_real(x * m.w).flatten(1)),
        w=nn.Parameter(torch.randn(4, dtype=torch.cfloat)),
        c=nn.Linear(8, 3),
    ).to(device)
    with pytest.raises(cc.UnsupportedError, match="'w' is complex"):
        cc.ggn(model, torch.randn(8, 4, device=device), LABELS.to(device))


def test_factors_of_another_kind_are_not_added_up(device: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.c(torch.tanh(h @ m.a.weight if bool((x > 50).any()) else h))

    torch.manual_seed(0)
    model = Lambda(forward, a=nn.Linear(4, 4), c=nn.Linear(4, 3)).double().to(device)
    x = torch.randn(8, 4, dtype=torch.float64, device=device)
    pullback = LayerwisePullback(Encoder(model, x))
    hessian = cc.output_hessian(model(x).detach(), LABELS.to(device), margin=None)
    with torch.no_grad():
        pullback.kron(x, hessian.blocks)
        with (
            pytest.warns(UserWarning, match="'a.weight'"),
            pytest.raises(cc.UnsupportedError, match=r"'a\.weight' in another way"),
        ):
            pullback.kron(x + 60, hessian.blocks)


def test_an_error_in_any_call_leaves_nothing_behind(device: str) -> None:
    left = -1

    def forward(m: Any, x: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            msg = "out of order"
            raise ValueError(msg)
        return m.c(torch.tanh(m.a(x)))

    model = Lambda(forward, a=nn.Linear(4, 4), c=nn.Linear(4, 3)).to(device).train()
    x, labels = torch.randn(8, 4, device=device), LABELS.to(device)
    for left in range(1, 6):  # noqa: B007  forward counts it down
        with pytest.raises(ValueError, match="out of order"):
            cc.ggn(model, x, labels)
        assert _get_current_function_mode() is None
        assert torch.is_grad_enabled()
        assert all(module.training for module in model.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
