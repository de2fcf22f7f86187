"""The pullback and the backend by BackPACK's extensions, against the dense curvature."""

from typing import Any

import pytest
import torch
from backpack_networks import HOSTED, Drawn, hosted_cases, truth_and_size
from hypothesis import given
from strategies import INPUTS, close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.structures import STRUCTURES
from contrastive_curvature.testing import dense_ggn


def curvature(drawn: Drawn, device: str, structure: str, kind: type = BackPackPullback) -> Any:
    """Unclamped, through the same code that every backend's batch fit takes."""
    model, x, case = drawn
    moved = case.to(device)
    with torch.no_grad():
        x = x.to(device)
        made = kind(Encoder(model.to(device), x))
        z, context = made.forward(x)
        hessian = cc.output_hessian(z, **moved.all)
        return STRUCTURES[structure].coupled_term(made, context, hessian).plain()


@given(drawn=hosted_cases(HOSTED))
def test_diag_and_full_are_exact_and_kron_has_the_factors_of_the_shared_code(drawn: Drawn, device: str) -> None:
    """Of indefinite blocks too."""
    truth, size = truth_and_size(drawn)
    assert close(curvature(drawn, device, "diag").cpu(), truth.diagonal(), size)
    assert close(curvature(drawn, device, "full").cpu(), truth, size)
    if not cc.PDFix(drawn[2].options["pd_fix"]).coupled:
        pair = (curvature(drawn, device, "kron", kind) for kind in (BackPackPullback, LayerwisePullback))
        for a, b in zip(*pair, strict=True):
            assert all(close(p, q, size) for p, q in zip(a, b, strict=True))


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


def test_refuses_mappings_and_layers_inside_modules(device: str) -> None:
    x = torch.rand(3, INPUTS, device=device)
    of_mapping = Encoder(Forward(lambda layer, batch: layer(batch["x"])).to(device), {"x": x})
    with pytest.raises(cc.UnsupportedError, match="mapping"):
        BackPackPullback(of_mapping).forward({"x": x})
    attention = Forward(lambda layer, x: attend(*[layer(x)] * 3)[0])
    attention.attend = attend = nn.MultiheadAttention(INPUTS, 1, batch_first=True)
    inside = nn.Sequential(nn.Unflatten(1, (1, INPUTS)), attention, nn.Flatten()).to(device)
    with pytest.raises(cc.UnsupportedError, match=r"layer '1\.attend', a MultiheadAttention"):
        BackPackPullback(Encoder(inside, x))
