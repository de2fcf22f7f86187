"""The part of the contract that is about numbers: everything that is called exact, against the oracle."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.fit.finite import clamp_curvature
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.options import Structure
from contrastive_curvature.testing.cases import Case, close
from contrastive_curvature.testing.contract_base import ContractBase, make_backend
from contrastive_curvature.testing.networks import repeats_weights
from contrastive_curvature.testing.oracle import dense_jacobian

__all__ = ["ExactnessContract"]

# Every adapter inherits the same functions, which Hypothesis would report.
_shared = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow], deadline=None)


class ExactnessContract(ContractBase):
    """Diagonals, matrices, products, eigenpairs, factors and Jacobians, for drawn networks, pairs and options."""

    @_shared
    @given(data=st.data())
    def test_diag_and_full_of_a_batch_are_exact(self, data: st.DataObject, device: str) -> None:
        """All parameters, the last layer, and a subnetwork."""
        drawn = self._draw(data)
        truth, size, scale = self._truth(drawn)
        for weights, part in self._parts(drawn, truth, data):
            made, x, y = self._make(drawn, device, weights)
            want = scale * truth[part][:, part]
            assert close(made.diag(x, y, N=len(x))[1].cpu(), want.diagonal(), scale * size)
            assert close(made.full(x, y, N=len(x))[1].cpu(), want, scale * size)

    @_shared
    @given(data=st.data())
    def test_data_sets_couple_across_batches(self, data: st.DataObject, device: str) -> None:
        """A loader of small batches gives what all its points at once give; products with it too."""
        drawn = self._draw(data, min_points=2)
        if not self._fittable(drawn[2]):
            return
        truth, size, scale = self._truth(drawn)
        step = data.draw(st.integers(1, len(drawn[1])))
        for weights, part in self._parts(drawn, truth, data):
            made, x, y = self._make(drawn, device, weights)
            loader = list(zip(x.split(step), y.split(step), strict=True))
            want = scale * truth[part][:, part]
            assert close(made.fit(loader, Structure.DIAG).curvature.cpu(), want.diagonal(), scale * size)
            assert close(made.fit(loader, Structure.FULL).curvature.cpu(), want, scale * size)
            v = torch.linspace(-1, 1, len(want), dtype=torch.float64)
            reach = scale * size * len(want)
            assert close(made.matvec(loader, v.to(device)).cpu(), want @ v, reach)

    @_shared
    @given(data=st.data())
    def test_low_rank_of_full_rank_is_the_clamped_matrix(self, data: st.DataObject, device: str) -> None:
        """Eigenpairs of all parameters, for every fix."""
        drawn = self._draw(data, min_points=2)
        if not self._fittable(drawn[2]):
            return
        truth, size, scale = self._truth(drawn)
        made, x, y = self._make(drawn, device, "all", rank=len(truth))
        vectors, values = made.fit_lowrank([(x, y)]).curvature
        found = (vectors * values) @ vectors.T
        assert close(found.cpu(), clamp_curvature(scale * truth), scale * size, 1e-8)

    @_shared
    @given(data=st.data())
    def test_kron_factors(self, data: st.DataObject, device: str) -> None:
        """Exact where K-FAC is (one point; blocks), and everywhere the same factors as the reference backend's."""
        drawn = self._draw(data, without=self.refused_kron)
        truth, size, scale = self._truth(drawn)
        model, points, case = drawn
        made, x, y = self._make(drawn, device)
        factors = [[f.cpu() for f in group] for group in made.kron(x, y, N=len(x))[1].kfacs]
        reference = make_backend(ContrastiveGGN, model, x, **self._options(case))
        expected = [[f.cpu() for f in group] for group in reference.kron(x, y, N=len(x))[1].kfacs]
        assert all(
            close(f, g, scale * size if k == 0 else None)
            for group, other in zip(factors, expected, strict=True)
            for k, (f, g) in enumerate(zip(group, other, strict=True))
        )
        if case.options["pd_fix"] in ("positive", "full"):
            return
        start = 0
        for p, group in zip((p for p in model.parameters() if p.requires_grad), factors, strict=True):
            block = scale * truth[start : start + p.numel(), start : start + p.numel()]
            start += p.numel()
            if len(group) == 1:
                assert close(group[0], block, scale * size)
            elif len(points) == 1 and p.ndim == 2 and not repeats_weights(model):
                assert close(torch.kron(*group), block, scale * size)

    @_shared
    @given(data=st.data())
    def test_jacobians_are_those_of_the_raw_outputs(self, data: st.DataObject, device: str) -> None:
        """Shape (N, D, P), and the outputs beside them."""
        drawn = self._draw(data)
        truth = dense_jacobian(drawn[0], drawn[1])
        z = drawn[2].z
        for weights, part in self._parts(drawn, truth.T, data):
            made, x, _ = self._make(drawn, device, weights)
            jacobians, outputs = made.jacobians(x)
            assert close(jacobians.cpu().flatten(0, 1), truth[:, part], float(truth.abs().max()))
            assert close(outputs.cpu(), z, tolerance=1e-13)

    @_shared
    @given(data=st.data())
    def test_batch_estimates_are_the_references(self, data: st.DataObject, device: str) -> None:
        """``pairs="batch"`` in every normalisation is that of the reference, whose weights have tests of their own."""
        model, points, case = self._draw(data, min_points=4)
        x, y = points.to(device), self._targets(case).to(device)
        loader = list(zip(x.split(3), y.split(3), strict=True))
        if not any(self._fittable(Case(part, part_y, case.pairs, case.options)) for part, part_y in loader):
            return
        for normalization in ("sum", "type", "anchor"):
            case.options["normalization"] = normalization
            kinds = (self.backend, ContrastiveGGN)
            both = [make_backend(kind, model.to(device), x, **self._options(case), pairs="batch") for kind in kinds]
            found, want = (b.fit(loader, Structure.FULL).curvature for b in both)
            assert close(found, want, float(want.abs().max()) + float(want.norm()))

    @_shared
    @given(data=st.data())
    def test_a_positive_semidefinite_fix_stays_so(self, data: st.DataObject, device: str) -> None:
        """``psd``, and ``positive`` with ``euclidean``, in every structure, before any clamp."""
        drawn = self._draw(data)
        safe = data.draw(st.sampled_from(({"pd_fix": "psd"}, {"pd_fix": "positive", "distance": "euclidean"})))
        drawn[2].options.update(safe)
        _, size, scale = self._truth(drawn)
        made, x, y = self._make(drawn, device)
        full = made.full(x, y, N=len(x))[1]
        floor = -1e-12 * max(scale * size, float(full.abs().max()))
        assert float(torch.linalg.eigvalsh((full + full.T) / 2).min()) >= floor
        assert float(made.diag(x, y, N=len(x))[1].min()) >= floor
        if drawn[2].options["pd_fix"] != "psd":
            return
        try:
            factors = made.kron(x, y, N=len(x))[1].kfacs
        except UnsupportedError:
            # test_refusals_name_the_backend_that_can knows which networks have none.
            return
        for group in factors:
            for factor in group:
                lowest = torch.linalg.eigvalsh((factor + factor.mT) / 2).min()
                assert float(lowest) >= -1e-12 * max(scale * size, float(factor.abs().max()))
