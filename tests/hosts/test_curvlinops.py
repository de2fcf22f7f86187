"""curvlinops: the operator against the dense curvature, and every tool of the host on it."""

from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch

if version("curvlinops-for-pytorch").startswith("2."):
    pytest.skip("the operator needs curvlinops 3", allow_module_level=True)

from curvlinops import CGInverseLinearOperator, HessianLinearOperator, SubmatrixLinearOperator
from curvlinops.examples import IdentityLinearOperator
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, close, network_cases
from tables import covering, each, refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.hosts.curvlinops import ContrastiveGGNLinearOperator
from contrastive_curvature.hosts.curvlinops import operator as operator_file
from contrastive_curvature.losses import LogisticLoss
from contrastive_curvature.losses.choice import choose_loss
from contrastive_curvature.testing import dense_ggn, dense_jacobian
from contrastive_curvature.testing.cases import truth_and_size

DEFAULTS = {"negative_weight": 0.5, "normalization": "anchor"}


def make_operator(
    drawn: tuple[nn.Module, Tensor, Case], step: int, device: str = "cpu", params: Any = None
) -> ContrastiveGGNLinearOperator:
    model, x, case = drawn
    moved = case.to(device)
    labels = torch.zeros(len(x)) if moved.labels is None else moved.labels
    loader = list(zip(x.to(device).split(step), labels.to(device).split(step), strict=True))
    loss = choose_loss(**case.options)
    return ContrastiveGGNLinearOperator(model.to(device), loss, params, loader, pairs=moved.pairs)


def fixed_case(pd_fix: str = "full", **options: Any) -> tuple[nn.Module, Tensor, Case]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 2, 2])
    return model, x, Case(model(x).detach(), y, None, {**DEFAULTS, "pd_fix": pd_fix, **options})


class WithReduction(nn.Module):
    """A loss as curvlinops asks for it."""

    reduction = "mean"

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        return cc.ContrastiveLoss()(z, labels)


@pytest.mark.parametrize(("step", "right"), [(6, True), (3, False)])
def test_the_hosts_own_hessian_has_the_pairs_of_one_batch(step: int, right: bool) -> None:
    """As docs/compare.md says: of two batches it lacks the pairs between them."""
    model, x, case = fixed_case()
    labels = case.labels
    data = list(zip(x.split(step), labels.split(step), strict=True))
    operator = HessianLinearOperator(model, WithReduction(), list(model.parameters()), data)
    product = operator @ torch.eye(operator.shape[1], dtype=x.dtype)

    def loss(flat: Tensor) -> Tensor:
        sizes = [p.numel() for p in model.parameters()]
        parts = zip(model.named_parameters(), flat.split(sizes), strict=True)
        weights = {name: part.view_as(p) for (name, p), part in parts}
        return cc.ContrastiveLoss()(torch.func.functional_call(model, weights, x), labels)

    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    truth: Any = torch.autograd.functional.hessian(loss, flat)
    assert close(product, truth) is right
    if not right:
        assert (product - truth).norm() > 0.1 * truth.norm()


@given(drawn=network_cases(), step=st.integers(1, 6), elements=st.sampled_from((1, 10**6)), draw=st.data())
def test_products_are_those_of_all_pairs_of_the_data(drawn, step, elements, draw, device) -> None:
    """Of all parameters or some in any order, with vectors, matrices and lists, in chunks of columns or one by one."""
    truth, size = truth_and_size(*drawn)
    drawn[0].to(device)
    params = [p for p in drawn[0].parameters() if p.requires_grad]
    ranges = torch.arange(len(truth)).split([p.numel() for p in params])
    chosen = None
    if draw.draw(st.booleans()):
        order = draw.draw(st.permutations(range(len(params))))[: draw.draw(st.integers(1, len(params)))]
        params = chosen = [params[k] for k in order]
        index = torch.cat([ranges[k] for k in order])
        truth = truth[index][:, index]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator_file, "_TANGENT_ELEMENTS", elements)
        operator = make_operator(drawn, step, device, chosen)
        eye = torch.eye(len(truth), dtype=torch.float64, device=device)
        assert close((operator @ eye).cpu(), truth, size)
        v = torch.linspace(-1, 2, len(truth), dtype=torch.float64, device=device)
        reach = size * len(truth)
        assert close((operator @ v).cpu(), truth @ v.cpu(), reach)
        assert close((operator.adjoint() @ v).cpu(), truth @ v.cpu(), reach)
        shapes = [p.shape for p in params]
        pieces = [t.view(s) for t, s in zip(v.split([s.numel() for s in shapes]), shapes, strict=True)]
        out = operator @ pieces
        assert [p.shape for p in out] == shapes
        assert close(torch.cat([p.flatten() for p in out]).cpu(), truth @ v.cpu(), reach)
        assert not any(p.requires_grad for p in out)


@covering(1, pd_fix=["full", "psd"], distance=["arccos", "euclidean"])
def test_tools_of_the_host(pd_fix: str, distance: str) -> None:
    drawn = fixed_case(pd_fix, distance=distance)
    truth, size = truth_and_size(*drawn)
    operator = make_operator(drawn, 4)
    total = len(truth)
    eye = np.eye(total)
    exported = operator.to_scipy()
    assert close(torch.as_tensor(exported @ eye), truth, size)
    assert close(torch.as_tensor(exported.T @ eye), truth, size)
    rows, columns = [0, 3, 5], [1, 2]
    part = SubmatrixLinearOperator(operator, rows, columns)
    assert close(part @ torch.eye(2, dtype=torch.float64), truth[rows][:, columns], size)
    twice = 2.0 * operator - operator
    assert close(twice @ torch.eye(total, dtype=torch.float64), truth, size)
    if pd_fix == "psd":
        shapes = [tuple(p.shape) for p in drawn[0].parameters()]
        damped = operator + 0.5 * IdentityLinearOperator(shapes, torch.device("cpu"), torch.float64)
        inverted = CGInverseLinearOperator(damped, eps=0, tolerance=1e-10, max_iter=200, max_tridiag_iter=200)
        b = torch.linspace(-1, 1, total, dtype=torch.float64)
        wanted = torch.linalg.solve(truth + 0.5 * torch.eye(total, dtype=torch.float64), b)
        assert close(inverted @ b, wanted, tolerance=1e-8)


@covering(2, mode=["mean", "sum", "max"], padding=[None, -2], weighted=[False, True])
def test_bags_of_embeddings(mode: str, padding: int | None, weighted: bool) -> None:
    """Torch has no second derivative of them, through which a product with the Jacobian goes."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding).double()
            self.head = nn.Linear(3, 2).double()
            self.share = torch.linspace(0.5, 2, 4, dtype=torch.float64) if weighted and mode == "sum" else None

        def forward(self, x: Tensor) -> Tensor:
            share = None if self.share is None else self.share.expand(len(x), 4)
            return self.head(self.words(x, per_sample_weights=share))

    model, y = Bags(), torch.tensor([0, 1, 0, 1, 0, 1, 1])
    x = torch.randint(0, 6, (7, 4), generator=torch.Generator().manual_seed(3))
    x[0] = 4  # nothing but padding, where there is one
    loss = cc.ContrastiveLoss(margin=None, pd_fix="full")
    jacobian = dense_jacobian(model, x)
    truth = jacobian.T @ loss.output_hessian(model(x).detach(), y).dense() @ jacobian
    operator = ContrastiveGGNLinearOperator(model, loss, None, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert close(operator @ torch.eye(len(truth), dtype=torch.float64), truth)


def test_the_model_is_left_alone_and_normalisation_looked_through() -> None:
    model, x, case = fixed_case("positive")
    wrapped = nn.Sequential(model, nn.Dropout(0.5), cc.L2Norm()).train()
    operator = ContrastiveGGNLinearOperator(wrapped, cc.ContrastiveLoss(pd_fix="positive"), None, [(x, case.labels)])
    truth = dense_ggn(model, x, **case.all)
    assert close(operator @ torch.eye(len(truth), dtype=torch.float64), truth)
    assert all(module.training for module in wrapped.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in wrapped.modules())
    assert all(p.grad is None for p in wrapped.parameters())
    # An operator keeps the values of its construction, also where the model becomes another of the same outputs.
    with torch.no_grad():
        model[2].weight *= 10
    assert close(operator @ torch.eye(len(truth), dtype=torch.float64), truth)


def test_what_the_operator_refuses() -> None:
    model, x, case = fixed_case()
    y, loss = case.labels, cc.ContrastiveLoss()
    make = ContrastiveGGNLinearOperator
    refused(lambda: make(model, nn.MSELoss(), None, [(x, y)]), "loss: expected a loss of contrastive_curvature")
    refused(lambda: make(model, loss, None, []), "data:", "empty loader")
    refused(lambda: make(model, loss, [nn.Parameter(torch.zeros(2))], [(x, y)]), "parameters of the model")

    class Shuffled:
        def __iter__(self) -> Any:
            order = torch.randperm(len(x))
            return iter([(x[order], y[order])])

    torch.manual_seed(0)
    refused(lambda: make(model, loss, None, Shuffled()), "data:", "shuffle=False")


def test_a_shuffling_loader_is_taken_in_the_order_of_its_data() -> None:
    model, x, case = fixed_case()
    truth = dense_ggn(model, x, **case.all)
    loader = DataLoader(TensorDataset(x, case.labels), batch_size=4, shuffle=True)
    loss = choose_loss(**case.options)
    listed = case.labels[:, None] == case.labels, case.labels[:, None] != case.labels
    for pairs in (None, listed):
        operator = ContrastiveGGNLinearOperator(model, loss, None, loader, pairs=pairs)
        assert close(operator @ torch.eye(len(truth), dtype=torch.float64), truth)


@each("pd_fix", ["positive", "fixed", "full", "psd"])
def test_another_loss(pd_fix: str) -> None:
    """Without closed forms of its blocks."""
    model, x, case = fixed_case()
    loss = LogisticLoss(scale=2.0, bias=-0.3, pd_fix=pd_fix)
    jacobian = dense_jacobian(model, x)
    truth = jacobian.T @ loss.output_hessian(case.z, case.labels).dense() @ jacobian
    operator = ContrastiveGGNLinearOperator(model, loss, None, [(x[:4], case.labels[:4]), (x[4:], case.labels[4:])])
    assert close(operator @ torch.eye(len(truth), dtype=torch.float64), truth)
