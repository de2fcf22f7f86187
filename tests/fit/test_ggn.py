"""The parameter curvature against the dense autograd one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, close, network_cases
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network import last_layer, layerwise, pullback
from contrastive_curvature.testing import dense_ggn
from contrastive_curvature.testing.cases import truth_and_size
from contrastive_curvature.testing.losses import parts_of

Drawn = tuple[nn.Module, Tensor, Case]


def ggn(drawn: Drawn, device: str, **kwargs: Any) -> Any:
    model, x, case = drawn
    moved = case.to(device)
    return cc.ggn(model.to(device), x.to(device), clamp=False, **moved.all, **kwargs)


@settings(max_examples=40)
@given(drawn=network_cases(), freeze=st.integers(0, 3), elements=st.sampled_from((2**25, 1, 7, 60)), data=st.data())
def test_diag_and_full_are_exact(drawn: Drawn, freeze: int, elements: int, data: st.DataObject, device: str) -> None:
    """All parameters, the last layer, and a subnetwork.

    Jacobians in chunks of points and of output axes, cross terms in tiles, down to one point at a time.
    """
    for p in [p for p in drawn[0].parameters() if p.requires_grad][:-1][:freeze]:
        p.requires_grad_(False)
    truth, size = truth_and_size(*drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pullback, "JACOBIAN_ELEMENTS", elements)
        patch.setattr(last_layer, "JACOBIAN_ELEMENTS", elements)
        if elements < 2**25:
            patch.setattr(last_layer.LastLayerPullback, "tile_diag", lambda *_: max(1, elements // 3))
        for weights, part in parts_of(drawn[0], truth, data):
            subset, want = weights if isinstance(weights, str) else weights.to(device), truth[part][:, part]
            assert close(ggn(drawn, device, subset_of_weights=subset).cpu(), want.diagonal(), size)
            assert close(ggn(drawn, device, subset_of_weights=subset, structure="full").cpu(), want, size)
            drawn[0].cpu()


@given(drawn=network_cases(), overhead=st.sampled_from((-(10**6), 10**6)), chunk=st.sampled_from((2**19, 20)))
def test_both_routes_of_the_coupled_last_layer_agree(drawn: Drawn, overhead: int, chunk: int, device: str) -> None:
    """By points and by pairs, all at once and a few at a time: the choice is one of speed."""
    drawn[0].requires_grad_()  # a last layer is taken whole, frozen or not
    drawn[2].options["pd_fix"] = "full"
    truth, size = truth_and_size(*drawn)
    count = sum(p.numel() for p in [m for m in drawn[0].modules() if isinstance(m, nn.Linear)][-1].parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_layer, "_PAIR_OVERHEAD", overhead)
        patch.setattr(last_layer, "_chunk_elements", lambda _: chunk)
        found = ggn(drawn, device, subset_of_weights="last_layer").cpu()
    assert close(found, truth.diagonal()[-count:], size)


@given(drawn=network_cases(networks=("linear", "tanh", "gelu")))
def test_factors_of_the_last_layer(drawn: Drawn, device: str) -> None:
    """The sum of the blocks of the output Hessian, for the bias too, and the mean of the squared features."""
    model, x, case = drawn
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    _, size = truth_and_size(*drawn)
    features: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, given: features.append(given[0].detach()))
    model(x)
    handle.remove()
    blocks = cc.output_hessian(case.z, **case.all).point_blocks().sum(0)
    (g, a), (bias,) = ggn(drawn, device, structure="kron")[-2:]
    assert close(g.cpu(), blocks, size)
    assert close(bias.cpu(), blocks, size)
    assert close(a.cpu(), features[0].T @ features[0] / len(x))


class AddedTable(nn.Module):
    """Two parameters of images: a convolution with several positions, and a table that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.out = nn.Parameter(torch.randn(3, 4)), nn.Conv2d(1, 2, 2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        images = torch.tanh(x.view(-1, 1, 3, 4) + self.table)
        return self.out(torch.tanh(self.conv(images).flatten(1)))


def test_input_factors_are_means_over_points_and_positions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of a convolution are its patches; those of a large parameter outside layers are unit vectors."""
    monkeypatch.setattr(layerwise, "BLOCK_ENTRIES", 11)
    torch.manual_seed(0)
    model, x, y = AddedTable().double().to(device), torch.randn(5, 12).double().to(device), torch.arange(5) % 2
    (g, units), (_, second), *_ = cc.ggn(model, x, y.to(device), structure="kron", clamp=False)
    block = cc.ggn(model, x, y.to(device), structure="full", clamp=False)[:12, :12].view(3, 4, 3, 4)
    assert close(g, torch.einsum("atbt->ab", block))
    assert close(units, torch.eye(4, dtype=torch.float64, device=device) / 4)
    images = torch.tanh(x.view(-1, 1, 3, 4) + model.table.detach())
    patches = nn.functional.unfold(images, 2).mT.flatten(0, 1)
    assert close(second, patches.T @ patches / len(patches))


@given(drawn=network_cases())
def test_clamp_is_applied_once_to_entries_or_eigenvalues(drawn: Drawn, device: str) -> None:
    model, x, case = drawn
    truth, size = truth_and_size(*drawn)
    moved = case.to(device)
    model, x = model.to(device), x.to(device)
    assert close(cc.ggn(model, x, **moved.all).cpu(), truth.diagonal().clamp(min=0), size)
    full = cc.ggn(model, x, structure="full", **moved.all).cpu()
    values, vectors = torch.linalg.eigh(truth)
    assert close(full, vectors @ torch.diag(values.clamp(min=0)) @ vectors.T, size)
    assert float(torch.linalg.eigvalsh(full).min()) >= -1e-12 * max(size, float(full.abs().max()))


def test_names_of_the_authors_code(device: str) -> None:
    torch.manual_seed(0)
    model, x, labels = nn.Linear(3, 2).to(device), torch.randn(6, 3, device=device), torch.tensor([0, 0, 1, 1, 2, 2])
    for alias, name in (("pos", "positive"), ("fix", "fixed")):
        assert torch.equal(cc.ggn(model, x, labels, pd_fix=alias), cc.ggn(model, x, labels, pd_fix=name))


def test_mapping_inputs_and_modules_that_cannot_be_vectorised(device: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(2, 3, batch_first=True)
            self.head = nn.Linear(3, 2)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.head(self.rnn(batch["sequence"])[0][:, -1] * batch["scale"])

    torch.manual_seed(0)
    model = Recurrent().double().to(device)
    batch = {"sequence": torch.randn(5, 4, 2, dtype=torch.float64, device=device), "scale": torch.tensor(2.0)}
    labels = torch.tensor([0, 0, 1, 1, 1], device=device)
    truth = dense_ggn(model, batch, labels)
    with pytest.warns(UserWarning, match="point by point"):
        found = cc.ggn(model, batch, labels, structure="full", clamp=False)
    assert not found.requires_grad
    assert close(found, truth)


def test_half_precision_models_work_in_float32(device: str) -> None:
    torch.manual_seed(0)
    model, x, labels = nn.Linear(3, 2).to(device), torch.randn(6, 3, device=device), torch.arange(6, device=device) % 2
    low = cc.ggn(model.bfloat16(), x.bfloat16(), labels)
    assert low.dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16
    assert torch.equal(low, cc.ggn(model.float(), x.bfloat16().float(), labels))


def test_normalisation_in_place_is_looked_through(device: str) -> None:
    class InPlace(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z.div_(z.norm(dim=1, keepdim=True))

    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double().to(device)
    x, labels = torch.randn(8, 4, dtype=torch.float64, device=device), torch.arange(8, device=device) % 2
    for subset in ("all", "last_layer"):
        found = cc.ggn(nn.Sequential(body, InPlace()), x, labels, subset_of_weights=subset)
        assert torch.equal(found, cc.ggn(body, x, labels, subset_of_weights=subset))


class Flagged(nn.Module):
    """A network that normalises its outputs where a flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.normalize = nn.Linear(4, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        z = self.out(torch.tanh(self.body(x)))
        return nn.functional.normalize(z, dim=1) if self.normalize else z


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), cc.L2Norm())


@pytest.mark.parametrize("make", [layers, Flagged, AddedTable])
@pytest.mark.parametrize(
    "options",
    [
        {"structure": "full"},
        {"structure": "kron"},
        {"pd_fix": "positive"},
        {"subset_of_weights": "last_layer"},
        {"subset_of_weights": torch.tensor([0, 3, 11])},
    ],
    ids=str,
)
def test_a_kept_encoder_is_analysed_once(make: Any, options: dict[str, Any], device: str) -> None:
    """Its weights, which of them are trainable, and the number of inputs change; the model runs as often as it must."""
    torch.manual_seed(0)
    model = make().double().to(device)
    x = torch.randn(9, 12 if make is AddedTable else 4, dtype=torch.float64, device=device)
    y = torch.arange(9, device=device) % 3
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    encoder = cc.Encoder(model, x[:4])
    first = next(model.parameters())
    for n, trainable in ((9, True), (5, True), (9, False)):
        first.requires_grad_(trainable)
        for p in model.parameters():
            p.data.mul_(1.1)
        runs.clear()
        found, often = cc.ggn(encoder, x[:n], y[:n], **options), len(runs)
        runs.clear()
        truth = cc.ggn(model, x[:n], y[:n], **options)
        assert often < len(runs)
        assert often == 1 or "last_layer" not in options.values()
        for a, b in zip(parts(found), parts(truth), strict=True):
            assert torch.equal(a, b)


def parts(curvature: Any) -> list[Tensor]:
    """Return a tensor, or all Kronecker factors."""
    return [curvature] if isinstance(curvature, Tensor) else [factor for group in curvature for factor in group]


def test_a_kept_encoder_gives_the_dense_curvature_of_new_weights(device: str) -> None:
    torch.manual_seed(0)
    model, x, y = Flagged().double().to(device), torch.randn(9, 4).double().to(device), torch.arange(9) % 3
    encoder = cc.Encoder(model, x)
    for p in model.parameters():
        p.data += 0.3
    truth = dense_ggn(model, x, y.to(device), distance="arccos", pd_fix="full", margin=None).diagonal()
    assert close(cc.ggn(encoder, x, y.to(device), pd_fix="full", margin=None, clamp=False), truth)


def test_the_layers_of_a_kept_encoder_are_analysed_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = layers().to(device), torch.randn(6, 4).to(device), torch.arange(6, device=device) % 3
    encoder, analysed = cc.Encoder(model, x), []
    analyse = layerwise.analyse_layers
    monkeypatch.setattr(layerwise, "analyse_layers", lambda *given: analysed.append(1) or analyse(*given))
    for _ in range(2):
        cc.ggn(encoder, x, y)
    assert len(analysed) == 1
    model[0].bias.requires_grad_(False)
    cc.ggn(encoder, x, y)
    assert len(analysed) == 2


CHANGES = {
    "a module more": lambda model: model.add_module("scale", nn.Linear(3, 3)),
    "another module": lambda model: model.__setattr__("out", nn.Linear(5, 3)),
    "a hook": lambda model: model.body.register_forward_hook(lambda *given: given[-1] * 2),
    "a hook before": lambda model: model.out.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    "an option": lambda model: model.__setattr__("normalize", True),
    "another forward": lambda model: model.__setattr__("forward", lambda x: model.body(x)),
    "a parametrisation": lambda model: nn.utils.parametrizations.weight_norm(model.out),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_kept_encoder_whose_model_changed_is_refused(change: str, weights: str) -> None:
    model, x, y = Flagged(), torch.randn(6, 4), torch.arange(6) % 3
    encoder = cc.Encoder(model, x)
    cc.ggn(encoder, x, y, subset_of_weights=weights)
    CHANGES[change](model)
    with pytest.raises(cc.InputError, match=r"as it was when it was analysed.*Make a new one"):
        cc.ggn(encoder, x, y, subset_of_weights=weights)


def test_an_encoder_that_is_not_analysed_yet_is_by_its_first_batch() -> None:
    model, x, y = layers(), torch.randn(6, 4), torch.arange(6) % 3
    encoder = cc.Encoder(model)
    assert torch.equal(cc.ggn(encoder, x, y), cc.ggn(model, x, y))
    model.append(nn.Linear(3, 3))
    with pytest.raises(cc.InputError, match="module"):
        cc.ggn(encoder, x, y)
