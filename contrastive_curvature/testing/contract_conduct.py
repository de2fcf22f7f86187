"""The part of the contract that is about conduct: scales, losses, dtypes, normalised encoders, state, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.network import pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.testing.cases import close
from contrastive_curvature.testing.contract_base import ContractBase, make_backend, same, snapshot
from contrastive_curvature.testing.networks import build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_ggn, dense_jacobian, dense_output_hessian

__all__ = ["ConductContract"]


class ConductContract(ContractBase):
    """What a user relies on besides the numbers of one batch."""

    def test_what_is_differentiated_are_the_raw_outputs(self, device: str) -> None:
        """An l2-normalisation at the end is looked through, also where the same module runs in the middle."""
        torch.manual_seed(0)
        norm, y = L2Norm(), torch.tensor([0, 0, 1, 1, 2, 2])
        for kind in self._accepted():
            body, x = build_network(kind, 3), make_inputs(kind, 6)
            inside = nn.Sequential(body, norm, nn.Linear(3, 2)).double().eval()
            for raw in (body, inside):
                for distance in ("arccos", "euclidean"):
                    truth, jacobian = dense_ggn(raw, x, y, distance=distance), dense_jacobian(raw, x)
                    whole = nn.Sequential(raw, norm).to(device)
                    made = make_backend(self.backend, whole, x.to(device), distance=distance, **self.options)
                    size = float(truth.abs().max())
                    assert close(made.full(x.to(device), y.to(device), N=6)[1].cpu(), truth, size), kind
                    assert close(made.diag(x.to(device), y.to(device), N=6)[1].cpu(), truth.diagonal(), size), kind
                    found = made.jacobians(x.to(device))[0].cpu()
                    assert close(found.flatten(0, 1), jacobian, float(jacobian.abs().max())), kind
                    raw.cpu()

    def test_modules_of_two_names(self, device: str) -> None:
        """A list of layers beside their own names; torch's functional calls would leave tensors in the model."""

        class Listed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
                self.layers = nn.ModuleList([self.body, self.head])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.head(torch.tanh(self.body(x)))
                return out

        torch.manual_seed(0)
        model, x, y = Listed().double(), make_inputs("tanh", 6), torch.tensor([0, 0, 1, 1, 2, 2])
        truth = dense_ggn(model, x, y)
        model, x, y = model.to(device), x.to(device), y.to(device)
        before = snapshot(model)
        made = make_backend(self.backend, model, x, **self.options)
        try:
            found = made.full(x, y, N=6)[1]
        except UnsupportedError as error:
            assert "ContrastiveGGN" in str(error)  # noqa: PT017  a host may know no modules of the user's
        else:
            assert close(found.cpu(), truth)
        assert same(snapshot(model), before)

    def test_a_subset_of_all_points_has_the_hessian_of_the_data(self, device: str) -> None:
        """The square root that posteriors in function space are built on."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 2, 2])
        model, x = build_network("tanh", 2), make_inputs("tanh", 6)
        for normalization in ("sum", "type", "anchor"):
            truth = dense_output_hessian(model(x).detach(), y, pd_fix="psd", normalization=normalization)
            blocks = torch.stack([truth[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(6)])
            moved = x.to(device), y.to(device)
            chosen = {"pd_fix": "psd", "normalization": normalization, **self.options}
            made = make_backend(self.backend, model.to(device), moved[0], **chosen)
            subset = made.fit_subset([moved], 6)[0]
            model.cpu()
            scale = 3.0 if normalization == "type" else 1.0
            assert close((subset.factor @ subset.factor.mT).cpu(), scale * blocks)

    def test_estimates_for_more_points_are_the_references(self, device: str) -> None:
        """Loss and curvature with N beyond the batch, a data set's loss, cost and factors, and bounded chunks."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
        model, x = build_network("tanh", 2).to(device), make_inputs("tanh", 6).to(device)
        for normalization in ("sum", "type", "anchor"):
            chosen = {"normalization": normalization, **self.options}
            made, other = (make_backend(kind, model, x, **chosen) for kind in (self.backend, ContrastiveGGN))
            for name in ("diag", "full", "kron"):
                (loss, found), (want_loss, want) = (getattr(b, name)(x, y, N=11) for b in (made, other))
                assert close(loss, want_loss)
                found, want = (h.to_matrix() if name == "kron" else h for h in (found, want))
                assert close(found, want), name
            value = ContrastiveLoss(normalization=normalization)(model(x).detach(), y)
            assert close(made.diag(x, y, N=6)[0], (3.0 if normalization == "type" else 1.0) * value)
            loader = [(x[:4], y[:4]), (x[4:], y[4:])]
            for structure in Structure:
                fit, want_fit = (b.fit(loader, structure) for b in (made, other))
                assert fit.n == want_fit.n == 6
                assert close(fit.loss, want_fit.loss)
                assert close(fit.cost, want_fit.cost)
            factors, wanted = (b.fit(loader, Structure.KRON).curvature for b in (made, other))
            assert all(close(f, g) for a, b in zip(factors, wanted, strict=True) for f, g in zip(a, b, strict=True))
            whole = made.full(x, y, N=6)[1]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pullback, "JACOBIAN_ELEMENTS", 60)
                assert close(made.full(x, y, N=6)[1], whole)
                assert close(made.diag(x, y, N=6)[1], whole.diagonal())

    def test_float32_in_float32_out(self, device: str) -> None:
        """Single precision is kept, and as accurate as it can be."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 1], device=device)
        for kind in self._accepted():
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 5).to(device)
            exact = make_backend(self.backend, model, x, **self.options).diag(x, y, N=5)[1]
            single = x.float() if x.is_floating_point() else x
            found = make_backend(self.backend, model.float(), single, **self.options).diag(single, y, N=5)[1]
            assert found.dtype == torch.float32
            made = make_backend(self.backend, model, single, **self.options)
            others = [made.full(single, y, N=5)[1], *made.jacobians(single)]
            others.append(made.matvec([(single, y)], torch.ones_like(found)))
            if kind not in self.refused_kron:
                others += [factor for group in made.kron(single, y, N=5)[1].kfacs for factor in group]
            assert all(other.dtype == torch.float32 for other in others), kind
            assert close(found.double(), exact, tolerance=1e-4), kind

    def test_leaves_the_encoder_as_it_was(self, device: str) -> None:
        """Parameters, buffers, gradients, modes, hooks and attributes."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1, 1, 1], device=device)
        for kind in self._accepted():
            model, x = build_network(kind, 2).to(device).train(), make_inputs(kind, 5).to(device)
            before = snapshot(model)
            made = make_backend(self.backend, model, x, **self.options)
            found = [made.diag(x, y, N=5)[1], made.full(x, y, N=5)[1], made.jacobians(x)[0]]
            if kind not in self.refused_kron:
                found += [factor for group in made.kron(x, y, N=5)[1].kfacs for factor in group]
            assert not any(tensor.requires_grad for tensor in found)
            assert same(snapshot(model), before), kind
            # The backend follows the parameters.
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).mul_(1.5)
            fresh = make_backend(self.backend, model, x, **self.options)
            assert torch.equal(made.diag(x, y, N=5)[1], fresh.diag(x, y, N=5)[1])

    def test_refusals_name_the_backend_that_can(self, device: str) -> None:
        """What a host cannot differentiate is refused before anything is computed."""
        torch.manual_seed(0)
        y = torch.tensor([0, 0, 1], device=device)
        for kind in sorted(self.refused):
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 3).to(device)
            with pytest.raises(UnsupportedError, match="ContrastiveGGN"):
                make_backend(self.backend, model, x, **self.options).diag(x, y, N=3)
        for kind in sorted(self.refused_kron - self.refused):
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 3).to(device)
            with pytest.raises(UnsupportedError, match="diag"):
                make_backend(self.backend, model, x, **self.options).kron(x, y, N=3)
