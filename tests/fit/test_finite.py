"""A curvature that is not finite is refused, by its layer and its batch, and never ends the process."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace.utils import Kron as HostKron
from tables import covering, each, refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.structures import Kron
from contrastive_curvature.structures.finite import eigenpairs

N, WIDTH, D = 24, 6, 3


def encoder(activation: nn.Module, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), activation, nn.Linear(16, D)).to(device)


def batches(value: float, device: str) -> list[tuple[Tensor, Tensor]]:
    """Three batches, of which the second has one outlier; the outputs of the encoders here stay finite."""
    x, labels = torch.randn(N, WIDTH), torch.arange(N) % 3
    x[10, 2] = value
    return [(a.to(device), b.to(device)) for a, b in zip(x.split(8), labels.split(8), strict=True)]


# Through tanh, infinity gives outputs like any; through ReLU, 1e20 does, and its square overflows float32.
OUTLIERS = [(nn.Tanh(), float("inf")), (nn.ReLU(), 1e20)]
STRUCTURES = [
    ("all", "diag", {}),
    ("all", "kron", {}),
    ("subnetwork", "full", {"subnetwork_indices": torch.arange(2, 90, 6)}),
]


@covering(1, activation__value=OUTLIERS, weights__structure__more=STRUCTURES)
def test_no_structure_keeps_it(weights, structure, more, activation, value, device) -> None:
    la = Laplace(encoder(activation, device), "contrastive", weights, structure, **more)
    # Infinity and too large outputs are found where the Hessian is made, the rest where it is pulled back.
    with pytest.raises(cc.InputError, match=r"finite|1 / norm"):
        la.fit(batches(value, device))
    assert not la.n_data, "a refused fit leaves no posterior"


@each(
    "structure, backend, options",
    [
        ("diag", None, {"pairs": "batch"}),
        ("diag", None, {"pairs": "batch", "pd_fix": "full"}),
        ("diag", cc.ContrastiveGGN, {"pd_fix": "full"}),
        ("kron", None, {}),
        ("full", cc.ContrastiveGGN, {}),
    ],
)
def test_the_message_names_layer_and_batch(structure: str, backend: Any, options: dict[str, Any], device: str) -> None:
    la = Laplace(encoder(nn.Tanh(), device), "contrastive", "all", structure, backend=backend, backend_kwargs=options)
    with pytest.raises(cc.InputError) as caught:
        la.fit(batches(float("inf"), device))
    message = str(caught.value)
    for word in ("layer '0'", "0.weight", "batch 1", "counted from 0", "squares overflow"):
        assert word in message, message


def test_so_does_that_of_an_operator(device: str) -> None:
    with pytest.raises(cc.InputError, match=r"layer '0' \(parameter '0.weight'\), first in batch 1 \(counted from 0\)"):
        cc.ContrastiveGGNLinearOperator(
            encoder(nn.Tanh(), device), cc.ContrastiveLoss(), None, batches(float("inf"), device)
        )


def huge(where: int, value: float, device: str) -> list[tuple[Tensor, Tensor]]:
    pairs = batches(0.0, device)
    pairs[where][0][3] = value
    return pairs


@each(
    "where, value, words",
    [(0, 1e38, "batch 0"), (2, 1e38, "batch 2"), (0, torch.inf, "first b"), (2, torch.nan, "batch 2")],
)
def test_the_message_of_huge_outputs_names_the_batch(where: int, value: float, words: str, device: str) -> None:
    model, data, infonce = encoder(nn.ReLU(), device), huge(where, value, device), {"loss": cc.InfoNCELoss()}
    towers: Any = cc.TwoTowers(model, nn.Linear(WIDTH, D).to(device))
    both = [(x, torch.ones_like(x)) for x, _ in data]
    calls = [
        lambda: Laplace(model, "contrastive").fit(data),
        lambda: Laplace(model, "contrastive", "all", "diag").fit(data),
        lambda: Laplace(model, "contrastive", "all", "diag", backend_kwargs=infonce).fit(data),
        lambda: Laplace(towers, "contrastive", "all", "diag", backend_kwargs=infonce).fit(both),
        lambda: cc.ContrastiveGGNLinearOperator(model, cc.ContrastiveLoss(), None, data),
    ]
    for call in calls:
        refused(call, words, "rows [3]")


@each("structure", ["diag", "kron", "full"])
def test_ggn_and_backends_refuse_it(structure: str, device: str) -> None:
    model = encoder(nn.Tanh(), device)
    x, labels = batches(float("inf"), device)[1]
    with pytest.raises(cc.InputError, match=r"layer '0' \(parameter '0.weight'\), first in this batch"):
        cc.ggn(model, x, labels, structure=structure)
    for kind in (cc.ContrastiveGGN, cc.BackPackContrastiveGGN, cc.StochManContrastiveGGN):
        with pytest.raises(cc.InputError, match="finite"):
            getattr(kind(model), structure)(x, labels)


def test_a_subnetwork_is_named_by_its_parameters(device: str) -> None:
    model = encoder(nn.Tanh(), device)
    x, labels = batches(float("inf"), device)[1]
    first = sum(p.numel() for p in model[0].parameters())
    # Of the first layer, the weights of the infinite input are not finite; those of the last layer are.
    indices = torch.tensor([first + 3, WIDTH + 2])
    refused(lambda: cc.ggn(model, x, labels, subset_of_weights=indices), "parameter '0.weight'")
    assert cc.ggn(model, x, labels, subset_of_weights=indices[:1]).isfinite().all()


def test_eigenvalues_that_cannot_be_had_are_an_error_of_ours(device: str) -> None:
    """laplace-torch's decomposition would call ``exit()``, with status 0."""
    for value in (float("nan"), float("inf")):
        matrix = torch.eye(4, device=device)
        matrix[1, 2] = matrix[2, 1] = value
        with pytest.raises(cc.InputError, match="finite"):
            eigenpairs(matrix)
        with pytest.raises(cc.InputError, match="finite"):
            Kron([[torch.eye(3, device=device), matrix]], torch.ones((), device=device)).clamped([12])


def test_the_decomposition_is_the_hosts(device: str) -> None:
    torch.manual_seed(0)
    factors = [[(a := torch.randn(4, 9)) @ a.T, (b := torch.randn(6, 3)) @ b.T], [(c := torch.randn(4, 5)) @ c.T]]
    ours, theirs = Kron(factors, torch.ones(())).clamped([24, 16]), HostKron(factors).decompose()
    for mine, other in ((ours.eigenvalues, theirs.eigenvalues), (ours.vectors, theirs.eigenvectors)):
        assert all(torch.equal(x, y) for f, g in zip(mine, other, strict=True) for x, y in zip(f, g, strict=True))
