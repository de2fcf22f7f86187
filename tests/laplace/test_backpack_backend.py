"""The pullback and the backend by BackPACK's derivatives, against the dense curvature."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from backpack import extend
from backpack_networks import NETWORKS, Drawn, backpack_cases, build, truth_and_size
from devices import DEVICES
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import INPUTS, close
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.ggn.batches import batch_curvature
from contrastive_curvature.hosts.backpack import BackPackPullback
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.network import pullback
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.options import CurvatureOptions, Structure
from contrastive_curvature.testing import dense_ggn, dense_jacobian

pytestmark = pytest.mark.parametrize("device", DEVICES)


def curvature(drawn: Drawn, device: str, structure: str, kind: type = BackPackPullback) -> Any:
    """Unclamped, through the same code that every backend's batch fit takes."""
    model, x, case = drawn
    moved = case.to(device)
    with torch.no_grad():
        x = x.to(device)
        made = kind(Encoder(model.to(device), x))
        z, context = made.forward(x)
        hessian = cc.output_hessian(z, **moved.all)
        points = pullback.Points(context, hessian.u, hessian.n)
        if structure == "kron":
            return made.kron_factors(points, hessian.blocks, len(x))
        from contrastive_curvature.ggn.accumulate import points_curvature

        return points_curvature(made, points, hessian.weights, hessian.options, Structure(structure))


@given(drawn=backpack_cases())
def test_diag_and_full_are_exact(drawn: Drawn, device: str) -> None:
    truth, size = truth_and_size(drawn)
    assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)
    assert close(curvature(drawn, device, "full").cpu(), truth, size)


@given(drawn=backpack_cases(), elements=st.sampled_from((1, 7, 60)))
def test_bounded_chunks_change_nothing(drawn: Drawn, elements: int, device: str) -> None:
    truth, size = truth_and_size(drawn)
    grouped = any(getattr(m, "groups", 1) > 1 for m in drawn[0].modules())
    has_factors = not cc.PDFix(drawn[2].options["pd_fix"]).coupled and not grouped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pullback, "JACOBIAN_ELEMENTS", elements)
        assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)
        chunked = curvature(drawn, device, "kron") if has_factors else []
    whole = curvature(drawn, device, "kron") if has_factors else []
    for a, b in zip(chunked, whole, strict=True):
        assert all(close(p, q, size) for p, q in zip(a, b, strict=True))


@given(drawn=backpack_cases(), freeze=st.integers(1, 3))
def test_frozen_parameters_are_left_out(drawn: Drawn, freeze: int, device: str) -> None:
    parameters = list(drawn[0].parameters())
    for p in parameters[: min(freeze, len(parameters) - 1)]:
        p.requires_grad_(False)
    truth, size = truth_and_size(drawn)
    assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)


@given(drawn=backpack_cases(tuple(k for k in NETWORKS if k != "strided")))
def test_kron_factors_are_those_of_autograd(drawn: Drawn, device: str) -> None:
    if cc.PDFix(drawn[2].options["pd_fix"]).coupled:
        drawn[2].options["pd_fix"] = "fixed"
    _, size = truth_and_size(drawn)
    found, wanted = (curvature(drawn, device, "kron", kind) for kind in (BackPackPullback, ModulePullback))
    for a, b in zip(found, wanted, strict=True):
        assert len(a) == len(b)
        assert all(close(p, q, size) for p, q in zip(a, b, strict=True))


def test_kron_refuses_what_has_no_factors(device: str) -> None:
    drawn = build("strided", 2), torch.randn(3, INPUTS, dtype=torch.float64), None
    encoder = Encoder(drawn[0], drawn[1])
    with pytest.raises(cc.UnsupportedError, match=r"Conv2d\.weight"):
        BackPackPullback(encoder).kron_factors(None, None, 3)


@given(drawn=backpack_cases(), seed=st.integers(0, 99))
def test_products_with_the_jacobian(drawn: Drawn, seed: int, device: str) -> None:
    model, x, case = drawn
    jacobian = dense_jacobian(model, x).view(*case.z.shape, -1)
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(len(x), 2, case.z.shape[1], generator=generator, dtype=torch.float64)
    made = BackPackPullback(Encoder(model.to(device), x.to(device)))
    wanted = torch.einsum("imd,idp->imp", v, jacobian)
    assert close(made.vjp(x.to(device), v.to(device)).cpu(), wanted, float(jacobian.abs().max()))
    summed = made.vjp_sum(x.to(device), v[:, 0].to(device)).cpu()
    assert close(summed, wanted[:, 0].sum(0), float(jacobian.abs().max()))


@given(drawn=backpack_cases(max_points=6), batch=st.integers(1, 6))
def test_backend_fits_a_data_set(drawn: Drawn, batch: int, device: str) -> None:
    """All parameters, a subnetwork and the last layer, over batches, as the backend by ``torch.func`` does."""
    model, x, case = drawn
    assume(len(x) > 1)
    labels = (torch.arange(len(x)) > 1).long()
    loader = DataLoader(TensorDataset(x.to(device), labels.to(device)), batch_size=batch)
    truth = dense_ggn(model, x, labels, **case.options) * (len(x) / 2 if case.options["normalization"] == "type" else 1)
    case.labels, case.pairs = labels, None
    size = len(x) * truth_and_size(drawn)[1]
    model = model.to(device)
    indices = torch.tensor([0, truth.shape[0] - 1])
    found = BackPackContrastiveGGN(model, **case.options).fit(loader, Structure.DIAG).curvature.cpu()
    assert close(found, truth.diagonal(), size)
    chosen = BackPackContrastiveGGN(model, subnetwork_indices=indices.to(device), **case.options)
    assert close(chosen.fit(loader, Structure.FULL).curvature.cpu(), truth[indices][:, indices], size)


def test_embeddings_of_tokens(device: str) -> None:
    torch.manual_seed(0)
    for padding in (None, 0):
        table = nn.Embedding(5, 2, padding_idx=padding)
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 3)).double().to(device)
        x, labels = torch.randint(0, 5, (5, 3), device=device), torch.tensor([0, 0, 1, 1, 1], device=device)
        truth = dense_ggn(model, x, labels).diagonal()
        pulled = BackPackPullback(Encoder(model, x))
        found = batch_curvature(pulled, x, labels, CurvatureOptions(), Structure.DIAG, 5).curvature
        assert close(found, truth)


def test_looks_through_a_normalisation(device: str) -> None:
    torch.manual_seed(0)
    body = build("relu", 3).to(device)
    x, labels = torch.randn(6, INPUTS, dtype=torch.float64, device=device), torch.arange(6, device=device) % 2
    truth = dense_ggn(body, x, labels).diagonal()
    for end in ([cc.L2Norm()], [nn.Dropout(), cc.L2Norm(), nn.Identity(), cc.L2Norm()]):
        pulled = BackPackPullback(Encoder(nn.Sequential(body, *end).eval(), x))
        assert close(batch_curvature(pulled, x, labels, CurvatureOptions(), Structure.DIAG, 6).curvature, truth)


class Forward(nn.Module):
    """A linear layer with something in ``forward``."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, INPUTS)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


shared = nn.Linear(INPUTS, INPUTS)
replaced = nn.Tanh()
replaced.forward = torch.sin
REFUSED = {
    "GELU": nn.Sequential(nn.Linear(INPUTS, 3), nn.GELU(), nn.Linear(3, 2)),
    "SiLU": nn.Sequential(nn.Linear(INPUTS, 3), nn.SiLU(), nn.Linear(3, 2)),
    "Softplus": nn.Sequential(nn.Linear(INPUTS, 3), nn.Softplus(), nn.Linear(3, 2)),
    "LayerNorm": nn.Sequential(nn.Linear(INPUTS, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
    "affine": nn.Sequential(nn.Linear(INPUTS, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)),
    "circular": nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), nn.Flatten()
    ),
    "evenly": nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 2, padding="same"), nn.Flatten()),
    "weight or spectral norm": nn.Sequential(nn.utils.spectral_norm(nn.Linear(INPUTS, 2))),
    "ParametrizedLinear": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, 2))),
    "was replaced": nn.Sequential(nn.Linear(INPUTS, 2), replaced),
    "used twice": nn.Sequential(shared, nn.Tanh(), shared),
    "'mul'": Forward(lambda layer, x: layer(x) * 2.0),
    "'softmax'": Forward(lambda layer, x: torch.softmax(layer(x), 1)),
    "cannot be traced": Forward(lambda layer, x: layer(x) if x.sum() > 0 else layer(-x)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("why", REFUSED)
def test_refuses_by_name_and_says_what_to_do(why: str, device: str) -> None:
    model = REFUSED[why].to(device).float().eval()
    encoder = Encoder(model, torch.rand(2, INPUTS, device=device))
    with pytest.raises(cc.UnsupportedError, match=why) as caught:
        BackPackPullback(encoder)
    assert "ContrastiveGGN" in str(caught.value)


def test_refuses_half_precision_and_names_layers(device: str) -> None:
    x = torch.rand(3, INPUTS, device=device)
    encoder = Encoder(nn.Linear(INPUTS, 2).to(device), x)
    with pytest.raises(cc.UnsupportedError, match=r"bfloat16.*model\.float\(\)"):
        BackPackPullback(encoder.bfloat16())
    attention = Forward(lambda layer, x: attend(*[layer(x)] * 3)[0])
    attention.attend = attend = nn.MultiheadAttention(INPUTS, 1, batch_first=True).to(device)
    encoder = Encoder(nn.Sequential(nn.Unflatten(1, (1, INPUTS)), attention, nn.Flatten()).to(device), x)
    with pytest.raises(cc.UnsupportedError, match=r"layer '1\.attend', a MultiheadAttention"):
        BackPackPullback(encoder)


def test_refuses_mappings_and_outputs_that_are_not_the_encoders(device: str) -> None:
    model = nn.Sequential(nn.Linear(INPUTS, 3), nn.Linear(3, 2)).to(device)
    x = torch.rand(3, INPUTS, device=device)
    with pytest.raises(cc.UnsupportedError, match="mapping"):
        BackPackPullback(Encoder(model, x)).forward({"x": x})
    handle = model[0].register_forward_hook(lambda _, __, out: 3 * out)
    with pytest.raises(cc.UnsupportedError, match="other outputs"):
        BackPackPullback(Encoder(model, x)).forward(x)
    handle.remove()
    broadcast = Forward(lambda layer, x: layer(x) + x[:, :1]).to(device)
    with pytest.raises(cc.UnsupportedError, match="getitem"):
        BackPackPullback(Encoder(broadcast, x))
    narrow = nn.Linear(INPUTS, 1).to(device)
    widened = Forward(lambda layer, x: layer(x) + narrow(x))
    widened.narrow = narrow
    with pytest.raises(cc.UnsupportedError, match="different shapes"):
        BackPackPullback(Encoder(widened.to(device), x)).forward(x)


@given(drawn=backpack_cases())
def test_the_users_model_is_untouched(drawn: Drawn, device: str) -> None:
    """Hooks, attributes, gradients, modes and values; also of one that its user extended, after a backward pass."""
    model, x, case = drawn
    model, x = model.to(device).train(), x.to(device)
    assume(len(x) > 1)
    extend(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    hooks = {name: len(m._forward_hooks) + len(m._backward_hooks) for name, m in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    loader = DataLoader(TensorDataset(x, (torch.arange(len(x), device=device) > 1).long()), batch_size=3)
    BackPackContrastiveGGN(model, **case.options).fit(loader, Structure.DIAG)
    gc.collect()
    for name, m in model.named_modules():
        assert vars(m).keys() == before[name].keys()
        assert m.training
        assert len(m._forward_hooks) + len(m._backward_hooks) == hooks[name]
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    for p in model.parameters():
        assert not vars(p)
        assert torch.equal(p.grad, torch.ones_like(p))


def test_present_values_count(device: str) -> None:
    torch.manual_seed(0)
    model = build("relu", 2).to(device)
    x, labels = torch.randn(6, INPUTS, dtype=torch.float64, device=device), torch.arange(6, device=device) % 2
    ours, theirs = BackPackContrastiveGGN(model), ContrastiveGGN(model)
    for _ in range(2):
        assert close(ours.diag(x, labels)[1], theirs.diag(x, labels)[1])
        assert not ours.diag(x, labels)[1].requires_grad
        with torch.no_grad():
            model[0].weight.mul_(1.5)
    jacobians, z = ours.jacobians(x)
    assert close(jacobians.flatten(0, 1), dense_jacobian(model, x))
    assert torch.equal(z, model(x))


def test_nothing_to_train(device: str) -> None:
    model = build("smooth", 3).to(device).requires_grad_(False)
    x, labels = torch.randn(5, INPUTS, dtype=torch.float64, device=device), torch.arange(5, device=device) % 2
    with pytest.raises(cc.InputError, match="at least one parameter that requires a gradient"):
        BackPackContrastiveGGN(model).diag(x, labels)
