"""The parameter curvature against the dense autograd one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from strategies import NETWORKS, Case, close, network_cases
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.fit import finite
from contrastive_curvature.fit.finite import clamp_curvature
from contrastive_curvature.network import kron, last_layer, pullback
from contrastive_curvature.testing import dense_ggn, dense_jacobian, dense_output_hessian

pytestmark = pytest.mark.parametrize("device", DEVICES)

Drawn = tuple[nn.Module, Tensor, Case]


def truth_and_size(drawn: Drawn) -> tuple[Tensor, float]:
    """The dense curvature, and the size of the terms that may cancel in it."""
    model, x, case = drawn
    truth = dense_ggn(model, x, **case.all)
    jacobian = dense_jacobian(model, x)
    weights = cc.output_hessian(case.z, **case.all).derivatives.dense()[0].abs().sum()
    return truth, 1e-3 * float(weights / case.z.norm(dim=1).min() ** 2 * jacobian.square().sum())


def ggn(drawn: Drawn, device: str, **kwargs: Any) -> Any:
    model, x, case = drawn
    moved = case.to(device)
    return cc.ggn(model.to(device), x.to(device), clamp=False, **moved.all, **kwargs)


def unfreeze(drawn: Drawn) -> None:
    """A last layer is taken whole, frozen or not; the oracle takes what is trainable."""
    drawn[0].requires_grad_()


@given(drawn=network_cases())
def test_diag_and_full_are_exact_for_all_parameters(drawn: Drawn, device: str) -> None:
    truth, size = truth_and_size(drawn)
    assert close(ggn(drawn, device).cpu(), truth.diagonal(), size)
    assert close(ggn(drawn, device, structure="full").cpu(), truth, size)


@given(drawn=network_cases())
def test_last_layer_in_closed_form_is_exact(drawn: Drawn, device: str) -> None:
    unfreeze(drawn)
    truth, size = truth_and_size(drawn)
    count = sum(p.numel() for p in [m for m in drawn[0].modules() if isinstance(m, nn.Linear)][-1].parameters())
    truth = truth[-count:, -count:]
    assert close(ggn(drawn, device, subset_of_weights="last_layer").cpu(), truth.diagonal(), size)
    assert close(ggn(drawn, device, subset_of_weights="last_layer", structure="full").cpu(), truth, size)


@given(drawn=network_cases(), seed=st.integers(0, 99))
def test_subnetwork_is_exact(drawn: Drawn, seed: int, device: str) -> None:
    truth, size = truth_and_size(drawn)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(truth.shape[0], generator=generator)[: 1 + seed % truth.shape[0]]
    chosen = indices.to(device)
    assert close(ggn(drawn, device, subset_of_weights=chosen).cpu(), truth.diagonal()[indices], size)
    part = truth[indices][:, indices]
    assert close(ggn(drawn, device, subset_of_weights=chosen, structure="full").cpu(), part, size)


@given(drawn=network_cases(), freeze=st.integers(0, 3))
def test_frozen_parameters_are_left_out(drawn: Drawn, freeze: int, device: str) -> None:
    model = drawn[0]
    for p in [p for p in model.parameters() if p.requires_grad][:-1][:freeze]:
        p.requires_grad_(False)
    truth, size = truth_and_size(drawn)
    assert close(ggn(drawn, device).cpu(), truth.diagonal(), size)


@given(drawn=network_cases(), elements=st.sampled_from((1, 7, 60)))
def test_bounded_chunks_change_nothing(drawn: Drawn, elements: int, device: str) -> None:
    """Jacobians in chunks of points and of output axes, cross terms in tiles, down to one point at a time."""
    unfreeze(drawn)
    truth, size = truth_and_size(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pullback, "JACOBIAN_ELEMENTS", elements)
        patch.setattr(last_layer, "JACOBIAN_ELEMENTS", elements)
        patch.setattr(last_layer.LastLayerPullback, "tile_size", lambda *_: max(1, elements // 3))
        assert close(ggn(drawn, device).cpu(), truth.diagonal(), size)
        assert close(ggn(drawn, device, structure="full").cpu(), truth, size)
        count = sum(p.numel() for p in [m for m in drawn[0].modules() if isinstance(m, nn.Linear)][-1].parameters())
        last = truth.diagonal()[-count:]
        assert close(ggn(drawn, device, subset_of_weights="last_layer").cpu(), last, size)


@given(drawn=network_cases(), overhead=st.sampled_from((-(10**6), 10**6)))
def test_both_routes_of_the_coupled_last_layer_agree(drawn: Drawn, overhead: int, device: str) -> None:
    """By points and by pairs: the choice is one of speed."""
    unfreeze(drawn)
    drawn[2].options["pd_fix"] = "full"
    truth, size = truth_and_size(drawn)
    count = sum(p.numel() for p in [m for m in drawn[0].modules() if isinstance(m, nn.Linear)][-1].parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_layer, "_PAIR_OVERHEAD", overhead)
        found = ggn(drawn, device, subset_of_weights="last_layer").cpu()
    assert close(found, truth.diagonal()[-count:], size)


def parameter_blocks(model: nn.Module, matrix: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters, and the diagonal block of a matrix (P, P) that belongs to each."""
    params = [p for p in model.parameters() if p.requires_grad]
    ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
    return params, [matrix[end - p.numel() : end, end - p.numel() : end] for p, end in zip(params, ends, strict=True)]


WITHOUT_FACTORS = ("attention", "embedding", "shared")


@given(drawn=network_cases(networks=WITHOUT_FACTORS))
def test_parameters_outside_layers_have_factors_too(drawn: Drawn, device: str) -> None:
    """One factor is the exact block; two are of sizes that multiply to the number of entries."""
    model, _, case = drawn
    coupled = case.options["pd_fix"] in ("positive", "full")
    truth, size = truth_and_size(drawn)
    factors = [[f.cpu() for f in group] for group in ggn(drawn, device, structure="kron")]
    for p, block, group in zip(*parameter_blocks(model, truth), factors, strict=True):
        if len(group) == 1 and not coupled:
            assert close(group[0], block, size)
        if len(group) == 2:
            assert len(group[0]) * len(group[1]) == p.numel()
            assert torch.linalg.eigvalsh(group[1])[0] >= -1e-12 * float(group[1].abs().max())


@given(drawn=network_cases(networks=tuple(kind for kind in NETWORKS if kind not in WITHOUT_FACTORS)))
def test_kron_factors(drawn: Drawn, device: str) -> None:
    """``G (x) A`` of linear layers, exact for one point; vectors exact; coupled fixes: from the diagonal blocks."""
    model, x, case = drawn
    coupled = case.options["pd_fix"] in ("positive", "full")
    truth, size = truth_and_size(drawn)
    factors = [[f.cpu() for f in group] for group in ggn(drawn, device, structure="kron")]
    for p, block, group in zip(*parameter_blocks(model, truth), factors, strict=True):
        if p.ndim == 1 and (not coupled or len(x) == 1):
            assert close(group[0], block, size)
        elif p.ndim == 1:
            assert group[0].shape == block.shape
        elif len(x) == 1 and p.ndim == 2:
            assert close(torch.kron(*group), block, size)
        else:
            rows, columns = p.shape[0], p[0].numel()
            assert [tuple(f.shape) for f in group] == [(rows, rows), (columns, columns)]
    if p.ndim == 1 and len(factors) > 1 and all(p.requires_grad for p in model.parameters()):
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        blocks = dense_output_hessian(case.z, **case.all).view(len(x), case.z.shape[1], len(x), -1)
        assert close(factors[-2][0], sum(blocks[i, :, i] for i in range(len(x))), size)
        assert factors[-2][1].shape == (last.in_features, last.in_features)


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
    monkeypatch.setattr(kron, "BLOCK_ENTRIES", 11)
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
    truth, size = truth_and_size(drawn)
    moved = case.to(device)
    model, x = model.to(device), x.to(device)
    assert close(cc.ggn(model, x, **moved.all).cpu(), truth.diagonal().clamp(min=0), size)
    full = cc.ggn(model, x, structure="full", **moved.all).cpu()
    values, vectors = torch.linalg.eigh(truth)
    assert close(full, vectors @ torch.diag(values.clamp(min=0)) @ vectors.T, size)
    assert float(torch.linalg.eigvalsh(full).min()) >= -1e-12 * max(size, float(full.abs().max()))


@given(drawn=network_cases(max_points=4), seed=st.integers(0, 99))
def test_adds_up_over_listed_pairs(drawn: Drawn, seed: int, device: str) -> None:
    """With ``sum`` and a fix without projection, the curvature of two lists is that of both together."""
    model, x, case = drawn
    n = len(x)
    first, second = torch.randint(0, n, (2, 3, 5), generator=torch.Generator().manual_seed(seed))
    options = {**case.options, "normalization": "sum"}
    if options["pd_fix"] == "psd":
        options["pd_fix"] = "fixed"

    def of(triplets: Tensor) -> Tensor:
        return cc.ggn(model.to(device), x.to(device), pairs=tuple(triplets.to(device)), clamp=False, **options).cpu()

    size = float(dense_jacobian(model.cpu(), x).square().sum() / case.z.norm(dim=1).min() ** 2)
    assert close(of(first) + of(second), of(torch.cat([first, second], dim=1)), size, 1e-12)


def test_names_of_the_authors_code(device: str) -> None:
    torch.manual_seed(0)
    model, x, labels = nn.Linear(3, 2).to(device), torch.randn(6, 3, device=device), torch.tensor([0, 0, 1, 1, 2, 2])
    for alias, name in (("pos", "positive"), ("fix", "fixed")):
        assert torch.equal(cc.ggn(model, x, labels, pd_fix=alias), cc.ggn(model, x, labels, pd_fix=name))


def test_looks_through_a_normalisation_and_leaves_the_model_alone(device: str) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double().to(device)
    x, labels = torch.randn(8, 4, dtype=torch.float64, device=device), torch.arange(8, device=device) % 2
    wrapped = nn.Sequential(body, cc.L2Norm()).train()
    before = {k: v.clone() for k, v in wrapped.state_dict().items()}
    found = cc.ggn(wrapped, x, labels)
    assert wrapped.training
    assert body[1].training
    assert all(torch.equal(v, before[k]) for k, v in wrapped.state_dict().items())
    assert not any(m._forward_hooks for m in wrapped.modules())
    assert torch.equal(found, cc.ggn(body, x, labels))
    assert close(cc.ggn(wrapped, x, labels, subset_of_weights="last_layer"), found[-8:], tolerance=1e-14)


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


def test_one_point_or_no_pair_gives_zeros(device: str) -> None:
    model = nn.Linear(3, 2).to(device)
    x = torch.randn(1, 3, device=device)
    for fix in ("positive", "fixed", "full", "psd"):
        assert not cc.ggn(model, x, torch.zeros(1, dtype=torch.long), pd_fix=fix).any()


def test_clamp_of_a_matrix_is_the_nearest_psd_matrix(device: str) -> None:
    matrix = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64, device=device)
    assert torch.allclose(clamp_curvature(matrix), torch.full((2, 2), 1.5, dtype=torch.float64, device=device))
    assert finite.clamp_curvature(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


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
