"""The part of the contract that is about single precision: the exact numbers again, to what float32 can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.options import Structure
from contrastive_curvature.testing.cases import Case, close
from contrastive_curvature.testing.contract_base import ContractBase, Drawn, make_backend
from contrastive_curvature.testing.contract_losses import LOSSES, size_of_terms
from contrastive_curvature.testing.networks import build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_jacobian

__all__ = ["SinglePrecisionContract"]

_shared = settings(
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
    max_examples=10,
)

_TOLERANCE = 1e-4
"""A thousand roundings of float32, relative to the largest entry or to the terms that may cancel in it."""

_LEAST_NORM = 0.02
"""Of raw outputs. They are sums of numbers of about one, so shorter ones keep few digits of their direction."""

_GAP = 1e-4
"""Distance from the margin within which rounding may decide whether a pair counts."""

_LEAST_ENTRY = 1e-15
"""Of a curvature: float32 does not hold the squares of much smaller numbers, which saturated losses have."""


class SinglePrecisionContract(ContractBase):
    """Diagonals, matrices, products, factors and Jacobians in float32, against the oracle in float64."""

    @_shared
    @given(data=st.data())
    def test_float32_is_exact_to_its_rounding(self, data: st.DataObject, device: str) -> None:
        """For drawn networks, pairs and options; all parameters, the last layer and a subnetwork."""
        model, x, case = drawn = self._rounded(data)
        if not self._fittable(case):
            return
        truth, size, scale = self._truth(drawn)
        jacobian, reach = dense_jacobian(model, x), 50 * scale * size
        parts = self._parts(drawn, truth, data)
        factors = self._factors(model, x, case)
        single, y, step = _single(x, device), self._targets(case).to(device), data.draw(st.integers(1, len(x)))
        model.to(device, torch.float32)
        loader = list(zip(single.split(step), y.split(step), strict=True))
        for weights, part in parts:
            made = make_backend(self.backend, model, single, weights, **self._options(case))
            want = scale * truth[part][:, part]
            assert _close(made.diag(single, y, N=len(x))[1], want.diagonal(), reach)
            assert _close(made.full(single, y, N=len(x))[1], want, reach)
            assert _close(made.fit(loader, Structure.DIAG).curvature, want.diagonal(), reach)
            assert _close(made.fit(loader, Structure.FULL).curvature, want, reach)
            v = torch.linspace(-1, 1, len(want), dtype=torch.float64)
            assert _close(made.matvec(loader, v.to(device, torch.float32)), want @ v, reach * len(want))
            jacobians, outputs = made.jacobians(single)
            assert _close(jacobians.flatten(0, 1), jacobian[:, part], float(jacobian.abs().max()))
            assert _close(outputs, case.z, float(case.z.abs().max()))
        if factors is not None:
            made = make_backend(self.backend, model, single, **self._options(case))
            for group, other in zip(made.kron(single, y, N=len(x))[1].kfacs, factors, strict=True):
                assert all(
                    _close(f, g, reach if k == 0 else None) for k, (f, g) in enumerate(zip(group, other, strict=True))
                )

    @pytest.mark.parametrize("name", sorted(LOSSES))
    @_shared
    @given(data=st.data())
    def test_float32_of_every_loss(self, name: str, data: st.DataObject, device: str) -> None:
        """A batch through all parameters, the last layer and a subnetwork."""
        seed, n = data.draw(st.integers(0, 2**16)), data.draw(st.integers(2, 6))
        torch.manual_seed(seed)
        kind = data.draw(st.sampled_from(self._accepted()))
        generator = torch.Generator().manual_seed(seed)
        model, x = _rounded_pair(build_network(kind, 2), make_inputs(kind, n, generator))
        labels = torch.randint(0, 3, (n,), generator=generator)
        distance = data.draw(st.sampled_from(("arccos", "euclidean")))
        loss = LOSSES[name](distance=distance, pd_fix="full" if name == "triplet" else "psd_parts")
        z = model(x).detach()
        assume(float(z.norm(dim=1).min()) > _LEAST_NORM)
        hessian, jacobian = loss.output_hessian(z, labels), dense_jacobian(model, x)
        if not hessian.derivatives.anchors:
            return
        scale = float(hessian.derivatives.anchors) if loss.averages else 1.0
        truth = scale * (jacobian.T @ hessian.dense() @ jacobian)
        assume(float(truth.abs().max()) > _LEAST_ENTRY)
        reach = scale * size_of_terms(loss, z, labels) * float(jacobian.square().sum())
        parts, single = self._parts((model, x, Case(z, labels)), truth, data), _single(x, device)
        model.to(device, torch.float32)
        for weights, part in parts:
            made = make_backend(self.backend, model, single, weights, loss=loss, **self.options)
            want = truth[part][:, part]
            assert _close(made.diag(single, labels.to(device), N=n)[1], want.diagonal(), reach)
            assert _close(made.full(single, labels.to(device), N=n)[1], want, reach)

    def _rounded(self, data: st.DataObject) -> Drawn:
        """A case whose numbers float32 holds exactly, with no pair so close to the margin that rounding decides."""
        model, x, case = self._draw(data, min_points=2)
        model, x = _rounded_pair(model, x)
        case.z = model(x).detach()
        assume(float(case.z.norm(dim=1).min()) > _LEAST_NORM)
        if case.options["margin"] is not None:
            u = normalize(case.z)[0]
            assume(float((torch.cdist(u, u) - case.options["margin"]).abs().min()) > _GAP)
        return model, x, case

    def _factors(self, model: nn.Module, x: Tensor, case: Case) -> list[list[Tensor]] | None:
        """Of the reference in float64; ``None`` where this backend or the reference has none."""
        try:
            make_backend(self.backend, model, x, **self._options(case)).kron(x, self._targets(case), N=len(x))
            made = make_backend(ContrastiveGGN, model, x, **self._options(case))
            return [list(group) for group in made.kron(x, self._targets(case), N=len(x))[1].kfacs]
        except UnsupportedError:
            # test_refusals_name_the_backend_that_can knows which networks have none.
            return None


def _rounded_pair(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return model.float().double(), x.float().double() if x.is_floating_point() else x


def _single(x: Tensor, device: str) -> Tensor:
    return x.to(device, torch.float32) if x.is_floating_point() else x.to(device)


def _close(found: Any, want: Tensor, scale: float | None) -> bool:
    assert found.dtype == torch.float32
    return close(found.cpu().double(), want, scale, _TOLERANCE)
