"""The contract of structures: what each answers is that of its dense matrix; and a structure of one's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from tiny import encoder
from torch import Tensor
from torch.nn.functional import linear

import contrastive_curvature as cc
from contrastive_curvature.codec import from_tree, to_tree
from contrastive_curvature.fit.part_state import State
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.options import PDFix
from contrastive_curvature.structures import STRUCTURES, Clamped, Structure
from contrastive_curvature.testing.losses import LOSSES

pytestmark = [
    pytest.mark.filterwarnings("ignore:hessian_structure='kron.* with pd_fix"),
    pytest.mark.filterwarnings("ignore:The clamped curvature is zero everywhere"),
    pytest.mark.filterwarnings("ignore::contrastive_curvature.FeatureNormWarning"),
]

FACTOR = 0.7


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(device: str, n: int = 18, seed: int = 0) -> tuple[Tensor, Tensor]:
    return numbers(n, 4, seed=seed).to(device), (torch.arange(n) % 3).to(device)


def fitted(weights: str, structure: str, device: str, seed: int = 0, **options: Any) -> ContrastiveLaplace:
    more = {"subnetwork_indices": torch.tensor([0, 3, 17, 30, 41])} if weights == "subnetwork" else {}
    la = ContrastiveLaplace(encoder(device), "contrastive", weights, structure, backend_kwargs=options, **more)
    x, labels = data(device, seed=seed)
    la.fit([(x[:7], labels[:7]), (x[7:], labels[7:])])
    return la


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()) + 1e-12)


def dense(clamped: Clamped) -> Tensor:
    """The matrix of a clamped curvature, from the precision at the smallest prior that changes no digit of it."""
    eye = torch.eye(sum(clamped.sizes), dtype=torch.float64, device=clamped.values.device)
    return clamped.out_of(clamped.into(eye) * clamped.values)


def priors_of(clamped: Clamped, room: tuple[str, ...]) -> list[Tensor]:
    total, like = sum(clamped.sizes), clamped.values
    every = {
        "scalar": torch.tensor([0.4]),
        "layerwise": torch.linspace(0.3, 2, len(clamped.sizes)),
        "diag": torch.linspace(0.2, 3, total),
    }
    return [every[name].to(like) for name in room]


def check(clamped: Clamped, room: tuple[str, ...]) -> None:
    """Compare every answer with that of the dense matrix."""
    matrix, total = dense(clamped), sum(clamped.sizes)
    jacobians = numbers(2, 3, total, seed=1).to(matrix)
    delta = numbers(total, seed=2).to(matrix)
    assert close(clamped.diagonal(), matrix.diagonal())
    for prior in priors_of(clamped, room):
        sizes = torch.tensor(clamped.sizes, device=prior.device)
        each = prior if len(prior) in (1, total) else prior.repeat_interleave(sizes)
        each = each.expand(total)
        precision = FACTOR * matrix + each.diag()
        covariance = torch.linalg.inv(precision)
        root = clamped.sampler(prior, FACTOR)(torch.eye(total).to(matrix))
        assert close(root.T @ root, covariance)
        assert close(clamped.covariance(jacobians, prior, FACTOR), jacobians @ covariance @ jacobians.mT)
        assert close(clamped.square_norm(delta, prior, FACTOR), delta @ precision @ delta)
        ratio = precision.logdet() - each.log().sum()
        assert close(clamped.log_det_ratio(prior, FACTOR), ratio)
        effective = float(torch.linalg.solve(matrix + each.diag(), matrix).trace())
        assert clamped.effective_parameters(prior) == pytest.approx(effective, rel=1e-9, abs=1e-12)
        stated = clamped.posterior_precision(prior, FACTOR)
        assert close(stated, precision if stated.ndim == 2 else precision.diagonal())
        assert close(clamped.variances(prior, FACTOR), covariance.diagonal())
        assert clamped.independent == bool((covariance == covariance.diagonal().diag()).all())


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_every_answer_is_that_of_the_dense_matrix(name: str, device: str) -> None:
    kind = STRUCTURES[name]
    for weights in kind.weights:
        for pd_fix in ("psd", "full", "positive"):
            la = fitted(weights, name, device, pd_fix=pd_fix, margin=None, negative_weight=0.1)
            check(la.posterior.fitted.clamped, ("scalar",) if weights == "subnetwork" else kind.priors)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_structures_hold_the_curvature_of_every_loss_and_fix(name: str, device: str) -> None:
    """The diagonal is that of the matrix; Kronecker factors have its block of the bias, where nothing is coupled."""
    x, labels = data(device)
    for pd_fix in PDFix:
        try:
            loss = LOSSES[name]().replaced(pd_fix=pd_fix)  # not every loss has every fix
        except (cc.InputError, cc.UnsupportedError):
            continue
        options = {"loss": loss, "subset_of_weights": "last_layer", "clamp": False}
        diag, full, kron = (
            cc.ggn(encoder(device, outputs=2), x, labels, structure=structure, **options)
            for structure in ("diag", "full", "kron")
        )
        assert close(diag, full.diagonal()), pd_fix
        if not loss.coupled:
            assert close(kron[1][0], full[-2:, -2:]), pd_fix


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_two_data_sets_add_up_and_a_tree_comes_back(name: str, device: str) -> None:
    one, other = (fitted("last_layer", name, device, seed=seed, pd_fix="psd").curvature for seed in (0, 1))
    both = one + other
    for mine, first, second in zip(both.tensors(), one.tensors(), other.tensors(), strict=True):
        assert torch.equal(mine, first + second)
    again = from_tree("curvature", to_tree(both), STRUCTURES.values())
    assert type(again) is STRUCTURES[name]
    assert all(torch.equal(a, b) for a, b in zip(again.tensors(), both.tensors(), strict=True))
    twice = both.scaled(2.0).clamped([15, 3])
    assert close(dense(twice), 2 * dense(both.clamped([15, 3])))


def test_an_unknown_structure_is_refused_by_name(device: str) -> None:
    with pytest.raises(cc.InputError, match=r"hessian_structure: expected one of 'diag', 'full', 'kron'.*got rows"):
        ContrastiveLaplace(encoder(device), "contrastive", "last_layer", "rows")
    with pytest.raises(cc.InputError, match="structure: expected one of 'diag', 'full', 'kron', got kron_lowrank"):
        cc.ggn(encoder(device), *data(device), structure="kron_lowrank")


@dataclass(frozen=True, eq=False)
class OneBlockAnOutput(Structure):
    """The exact blocks of a last layer: the weights of an output depend on each other, those of two do not."""

    name = "outputs"
    weights = ("last_layer",)
    priors = ("scalar",)

    blocks: Tensor

    @classmethod
    def term(cls, _pullback: Any, context: Any, blocks: Any) -> Self:
        phi = torch.cat([context, torch.ones_like(context[:, :1])], 1)
        return cls(torch.einsum("nd,nf,ng->dfg", blocks.diagonal(), phi, phi))

    def traces(self) -> Tensor:
        return self.blocks.diagonal(dim1=1, dim2=2).abs().sum().reshape(1)

    def clamped(self, sizes: list[int]) -> Clamped:
        values, vectors = torch.linalg.eigh(self.blocks)
        return ClampedBlocks(values.clamp(min=0).flatten(), sizes, vectors)

    def plain(self) -> list[list[Tensor]]:
        return [[self.blocks]]


@dataclass(frozen=True, eq=False)
class ClampedBlocks(Clamped):
    vectors: Tensor

    def _order(self) -> Tensor:
        """Places of ``[w_k, b_k]`` for every output k in ``[W.flatten(), b]``."""
        dim, width = self.vectors.shape[:2]
        weight = torch.arange(dim * (width - 1)).view(dim, -1)
        return torch.cat([weight, dim * (width - 1) + torch.arange(dim)[:, None]], 1).flatten()

    def into(self, v: Tensor) -> Tensor:
        rows = v[..., self._order()].unflatten(-1, self.vectors.shape[:2])
        return torch.einsum("...df,dfk->...dk", rows, self.vectors).flatten(-2)

    def out_of(self, x: Tensor) -> Tensor:
        rows = torch.einsum("...dk,dfk->...df", x.unflatten(-1, self.vectors.shape[:2]), self.vectors).flatten(-2)
        return rows[..., self._order().argsort()]

    def diagonal_of(self, values: Tensor) -> Tensor:
        values = values.view(self.vectors.shape[:2])
        return torch.einsum("dfk,dk->df", self.vectors.square(), values).flatten()[self._order().argsort()]

    def plain(self) -> Self:
        return self


def test_a_structure_of_ones_own(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One class of sums and one of their decomposition: it fits, predicts, samples, merges, saves, loads, exports."""
    monkeypatch.setitem(STRUCTURES, "outputs", OneBlockAnOutput)
    la = fitted("last_layer", "outputs", device, pd_fix="fixed")
    full = fitted("last_layer", "full", device, pd_fix="fixed")
    check(la.posterior.fitted.clamped, ("scalar",))
    places = torch.arange(18)
    output = torch.cat([places[:15] // 5, places[:3]])
    blocks = full.H_raw.cpu() * (output[:, None] == output)
    order = la.posterior.fitted.clamped._order()
    raw = torch.block_diag(*la.curvature.blocks.cpu())
    assert close(raw, blocks[order][:, order])

    la.optimize_prior_precision()
    x = data(device, seed=5)[0]
    with torch.no_grad():
        out, phi = la(x), torch.tanh(linear(x, *la.model.model[0].parameters()))
    eye = torch.eye(3).to(phi)
    jacobian = torch.cat([torch.einsum("kd,nf->nkdf", eye, phi).flatten(2), eye.expand(len(x), 3, 3)], 2)
    covariance = torch.linalg.inv(la.posterior_precision)
    assert close(out.covariance, jacobian @ covariance @ jacobian.mT)
    assert la.sample(5).shape == (5, 18)

    points, labels = data(device)
    parts = [[(points[:7], labels[:7])], [(points[7:], labels[7:])]]
    given = {"backend_kwargs": {"pd_fix": "fixed"}}
    made = [ContrastiveLaplace(encoder(device), "contrastive", "last_layer", "outputs", **given) for _ in range(3)]
    states = [one.part_statistics(part, (k, 2)) for k, (one, part) in enumerate(zip(made, parts, strict=False))]
    statistics = State.merged(states)
    sums = [one.part_curvature(p, (k, 2), statistics) for k, (one, p) in enumerate(zip(made, parts, strict=False))]
    sums[0].save(tmp_path / "part")
    made[2].fit_parts(statistics, State.merged([State.load(tmp_path / "part"), sums[1]]))
    assert close(made[2].curvature.blocks, la.curvature.blocks)

    again = ContrastiveLaplace(encoder(device), "contrastive", "last_layer", "outputs", **given)
    again.load_state_dict(la.state_dict())
    la.save_pretrained(tmp_path / "folder")
    for loaded in (again, cc.load_pretrained(tmp_path / "folder", encoder(device))):
        assert torch.equal(loaded(x).covariance, out.covariance)
    la.export(tmp_path / "model.pt2")
    uncertainty = torch.export.load(tmp_path / "model.pt2").module()(x)[2]
    assert torch.allclose(uncertainty, out.uncertainty, rtol=1e-6)
