"""The pullback and the backend by BackPACK's extensions, against the dense curvature."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from backpack import extend
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.relu import ReLUDerivatives
from backpack_networks import HOSTED, Drawn, backpack_cases, build, truth_and_size
from devices import DEVICES
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import INPUTS, close
from tables import each
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.network import pullback
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.options import Structure
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
        if structure == "kron":
            return made.kron_factors(context, hessian.blocks, len(x))
        return made.curvature(context, hessian, Structure(structure))


def hosted(kinds: tuple[str, ...] = HOSTED, max_points: int = 5) -> Any:
    return backpack_cases(kinds, max_points)


@given(drawn=hosted())
def test_diag_and_full_are_exact(drawn: Drawn, device: str) -> None:
    truth, size = truth_and_size(drawn)
    assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)
    assert close(curvature(drawn, device, "full").cpu(), truth, size)


@given(drawn=hosted(), elements=st.sampled_from((1, 7, 60)))
def test_bounded_chunks_change_nothing(drawn: Drawn, elements: int, device: str) -> None:
    truth, size = truth_and_size(drawn)
    has_factors = not cc.PDFix(drawn[2].options["pd_fix"]).coupled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pullback, "JACOBIAN_ELEMENTS", elements)
        assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)
        chunked = curvature(drawn, device, "kron") if has_factors else []
    whole = curvature(drawn, device, "kron") if has_factors else []
    for a, b in zip(chunked, whole, strict=True):
        assert all(close(p, q, size) for p, q in zip(a, b, strict=True))


@given(drawn=hosted(), freeze=st.integers(1, 3))
def test_frozen_parameters_are_left_out(drawn: Drawn, freeze: int, device: str) -> None:
    parameters = list(drawn[0].parameters())
    for p in parameters[: min(freeze, len(parameters) - 1)]:
        p.requires_grad_(False)
    truth, size = truth_and_size(drawn)
    assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)


@given(drawn=hosted())
def test_kron_factors_are_those_of_the_shared_code(drawn: Drawn, device: str) -> None:
    """Of indefinite blocks too."""
    if cc.PDFix(drawn[2].options["pd_fix"]).coupled:
        drawn[2].options["pd_fix"] = "fixed"
    _, size = truth_and_size(drawn)
    found, wanted = (curvature(drawn, device, "kron", kind) for kind in (BackPackPullback, LayerwisePullback))
    for a, b in zip(found, wanted, strict=True):
        assert len(a) == len(b)
        assert all(close(p, q, size) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("fix", ["psd", "fixed", "full"])
def test_the_host_does_it(structure: str, fix: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BackPACK's derivatives there would be nothing."""
    torch.manual_seed(0)
    model, x = build("relu", 3).to(device), torch.randn(5, INPUTS, dtype=torch.float64, device=device)
    made, calls = BackPackPullback(Encoder(model, x)), set()
    z, context = made.forward(x)
    hessian = cc.output_hessian(z, torch.arange(5, device=device) % 2, pd_fix=fix)
    for kind in (LinearDerivatives, ReLUDerivatives):
        original = kind.jac_t_mat_prod
        monkeypatch.setattr(kind, "jac_t_mat_prod", lambda *a, k=kind, f=original, **o: (calls.add(k), f(*a, **o))[1])
    made.block_term(context, hessian.blocks, Structure(structure))
    assert calls == {LinearDerivatives, ReLUDerivatives}


@given(drawn=hosted(), seed=st.integers(0, 99))
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


def test_what_the_host_itself_does_in_single_precision_only(device: str) -> None:
    """Its embedding and its average pooling make tensors of the default type; ours take any."""
    torch.manual_seed(0)
    table = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 3))
    pool = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(2, 3))
    labels = torch.tensor([0, 0, 1, 1, 1])
    for model, x in ((table, torch.randint(0, 5, (5, 3))), (pool, torch.randn(5, 3))):
        double = x.double() if x.is_floating_point() else x
        truth = dense_ggn(model.double(), double, labels).diagonal()
        model, x, double, y = model.to(device), x.to(device), double.to(device), labels.to(device)
        assert close(BackPackContrastiveGGN(model).diag(double, y)[1].cpu(), truth)
        assert close(BackPackContrastiveGGN(model.float()).diag(x, y)[1].double().cpu(), truth, tolerance=1e-4)


class Forward(nn.Module):
    """A linear layer with something in ``forward``."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, INPUTS)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


shared = nn.Linear(INPUTS, INPUTS)
tied = nn.Linear(INPUTS, INPUTS)
tied.weight = shared.weight
replaced = nn.Tanh()
replaced.forward = torch.sin
REFUSED = {
    "GELU": nn.Sequential(nn.Linear(INPUTS, 3), nn.GELU(), nn.Linear(3, 2)),
    "SiLU": nn.Sequential(nn.Linear(INPUTS, 3), nn.SiLU(), nn.Linear(3, 2)),
    "Softplus": nn.Sequential(nn.Linear(INPUTS, 3), nn.Softplus(), nn.Linear(3, 2)),
    "LayerNorm": nn.Sequential(nn.Linear(INPUTS, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
    "reshapes the batch axis": nn.Sequential(nn.Linear(INPUTS, 4), nn.Unflatten(0, (-1, 1)), nn.Flatten(0, 1)),
    "affine": nn.Sequential(nn.Linear(INPUTS, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)),
    "circular": nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), nn.Flatten()
    ),
    "numbers as padding": nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding="same"), nn.Flatten()),
    "has no derivatives": nn.Sequential(
        nn.Unflatten(1, (1, INPUTS)), nn.ConvTranspose1d(1, 1, 3, 2, 0, 1), nn.Flatten()
    ),
    "weight or spectral norm": nn.Sequential(nn.utils.spectral_norm(nn.Linear(INPUTS, 2))),
    "_WeightNorm|ParametrizationList|ParametrizedLinear": nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, 2))
    ),
    "was replaced": nn.Sequential(nn.Linear(INPUTS, 2), replaced),
    "runs twice": nn.Sequential(shared, nn.Tanh(), shared),
    "used twice": nn.Sequential(shared, nn.Tanh(), tied),
    "the end of the network": Forward(lambda layer, x: layer(x) * 2.0),
    "takes what no layer put out": nn.Sequential(Forward(lambda layer, x: torch.tanh(layer(x))), nn.Linear(INPUTS, 2)),
    "layer '1' takes what": nn.Sequential(Forward(lambda layer, x: x + layer(x)), nn.Linear(INPUTS, 2)),
    "layer '1' takes": nn.Sequential(Forward(lambda layer, x: layer(x).view(-1, 2, 2).mT), nn.Flatten()),
}


@each("why", REFUSED)
def test_refuses_by_name_and_says_what_to_do(why: str, device: str) -> None:
    model = REFUSED[why].to(device).float().eval()
    x = torch.rand(2, INPUTS, device=device)
    with pytest.raises(cc.UnsupportedError, match=why) as caught:
        BackPackPullback(Encoder(model, x)).forward(x)
    assert "ContrastiveGGN" in str(caught.value)


def test_refuses_what_it_cannot_see_in_a_later_batch(device: str) -> None:
    """A branch that the first batch does not take."""
    model = Forward(lambda layer, x: layer(x) if x.sum() > 0 else -layer(x)).to(device)
    x = torch.rand(3, INPUTS, device=device)
    made = BackPackPullback(Encoder(model, x))
    made.forward(x)
    with pytest.raises(cc.UnsupportedError, match="end of the network"):
        made.vjp(-x, torch.ones(3, 1, INPUTS, device=device))


def test_names_layers_inside_a_module(device: str) -> None:
    x = torch.rand(3, INPUTS, device=device)
    attention = Forward(lambda layer, x: attend(*[layer(x)] * 3)[0])
    attention.attend = attend = nn.MultiheadAttention(INPUTS, 1, batch_first=True).to(device)
    encoder = Encoder(nn.Sequential(nn.Unflatten(1, (1, INPUTS)), attention, nn.Flatten()).to(device), x)
    with pytest.raises(cc.UnsupportedError, match=r"layer '1\.attend', a MultiheadAttention"):
        BackPackPullback(encoder)


def test_refuses_mappings_and_gradients_that_are_not_the_encoders(device: str) -> None:
    model = nn.Sequential(nn.Linear(INPUTS, 3), nn.Linear(3, 2)).to(device)
    x = torch.rand(3, INPUTS, device=device)
    with pytest.raises(cc.UnsupportedError, match="mapping"):
        BackPackPullback(Encoder(Forward(lambda layer, batch: layer(batch["x"])), {"x": x.cpu()})).forward(
            {"x": x.cpu()}
        )
    handle = model[0].register_forward_hook(lambda _, __, out: 3 * out)
    with pytest.raises(cc.UnsupportedError, match="other gradients"):
        BackPackPullback(Encoder(model, x)).forward(x)
    handle.remove()


@pytest.mark.usefixtures("few_objects")
@given(drawn=hosted())
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
