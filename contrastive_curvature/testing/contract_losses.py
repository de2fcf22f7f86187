"""The part of the contract that is about losses: a backend knows nothing of them, so it is exact for every one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.losses import (
    CosineLoss,
    InfoNCELoss,
    MultiSimilarityLoss,
    ProxyLoss,
    SigLIPLoss,
    SupConLoss,
    TripletLoss,
)
from contrastive_curvature.options import Structure
from contrastive_curvature.testing.cases import Case, close
from contrastive_curvature.testing.contract_base import ContractBase, make_backend
from contrastive_curvature.testing.networks import build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_jacobian

__all__ = ["LOSSES", "LossContract", "size_of_terms"]

_shared = settings(
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow], deadline=None, max_examples=8
)


def _proxies(**options: Any) -> CosineLoss:
    weights = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return ProxyLoss(weights, scale=4.0, **options)


LOSSES: dict[str, Any] = {
    "infonce": InfoNCELoss,
    "supcon": SupConLoss,
    "siglip": SigLIPLoss,
    "multisimilarity": MultiSimilarityLoss,
    "triplet": TripletLoss,
    "proxies": _proxies,
}
"""Losses other than those of pairs, by name; called with ``reduction``, ``distance`` and ``pd_fix``."""


class LossContract(ContractBase):
    """Exactness for losses of anchors and of class proxies."""

    @pytest.mark.parametrize("name", sorted(LOSSES))
    @_shared
    @given(data=st.data())
    def test_every_loss_is_exact(self, name: str, data: st.DataObject, device: str) -> None:
        """Against autograd, through all parameters, the last layer and a subnetwork; over batches, and products."""
        seed, n = data.draw(st.integers(0, 2**16)), data.draw(st.integers(2, 6))
        torch.manual_seed(seed)
        kind = data.draw(st.sampled_from(self._accepted()))
        model, generator = build_network(kind, 2), torch.Generator().manual_seed(seed)
        points, labels = make_inputs(kind, n, generator), torch.randint(0, 3, (n,), generator=generator)
        fixes = (
            ("full", "fixed", "psd_parts") if name == "triplet" else ("full", "psd_parts", "ggn", "ggn_fixed", "psd")
        )
        fix, distance = data.draw(st.sampled_from(fixes)), data.draw(st.sampled_from(("arccos", "euclidean")))
        loss = LOSSES[name](reduction=data.draw(st.sampled_from(("mean", "sum"))), distance=distance, pd_fix=fix)
        jacobian, z = dense_jacobian(model, points), model(points).detach()
        hessian = loss.output_hessian(z, labels)
        if not hessian.derivatives.anchors:
            return
        if fix == "full" and distance == "arccos":
            found = torch.autograd.functional.hessian(lambda raw: loss(raw, labels), z)
            output = torch.as_tensor(found).reshape(z.numel(), -1)
        else:
            # What the fixes leave of it has its own oracle: tests/losses.
            output = hessian.dense()
        scale = float(hessian.derivatives.anchors) if loss.averages else 1.0
        truth = jacobian.T @ output @ jacobian
        size = size_of_terms(loss, z, labels) * float(jacobian.square().sum())
        step, x, y = data.draw(st.integers(2, n)), points.to(device), labels.to(device)
        for weights, part in self._parts((model, points, Case(z, labels)), truth, data):
            made = make_backend(self.backend, model.to(device), x, weights, loss=loss, **self.options)
            want = scale * truth[part][:, part]
            assert close(made.diag(x, y, N=len(x))[1].cpu(), want.diagonal(), scale * size)
            assert close(made.full(x, y, N=len(x))[1].cpu(), want, scale * size)
            loader = list(zip(x.split(step), y.split(step), strict=True))
            batches = [made.full(a, b, N=len(x))[1] for a, b in loader if self._has_anchors(loss, model, a, b)]
            together = torch.as_tensor(sum(batches)) if batches else None
            if together is None or not together.any():
                continue
            reach = scale * size
            assert close(made.fit(loader, Structure.FULL).curvature, together, reach)
            assert close(made.fit(loader, Structure.DIAG).curvature, together.diagonal(), reach)
            v = torch.linspace(-1, 1, len(want), dtype=torch.float64, device=device)
            assert close(made.matvec(loader, v), together @ v, reach * len(want))
            if isinstance(weights, str) and weights == "all":
                made.rank = len(want)
                vectors, values = made.fit_lowrank(loader).curvature
                assert close((vectors * values) @ vectors.T, clamp_curvature(together), reach, 1e-8)
        model.cpu()

    @pytest.mark.parametrize("name", sorted(LOSSES))
    def test_factors_of_every_loss_are_the_references(self, name: str, device: str) -> None:
        """K-FAC of a batch and of a data set, for block-diagonal fixes."""
        torch.manual_seed(0)
        for kind in self._accepted(self.refused_kron):
            model, x = build_network(kind, 2).to(device), make_inputs(kind, 6).to(device)
            y = (torch.arange(6) % 2).to(device)
            fix = "psd" if name == "triplet" else "ggn_fixed"
            pair = [
                make_backend(k, model, x, loss=LOSSES[name](pd_fix=fix), **self.options)
                for k in (self.backend, ContrastiveGGN)
            ]
            try:
                found, want = (b.fit([(x, y)], Structure.KRON).curvature for b in pair)
            except UnsupportedError:
                continue
            for group, other in zip(found, want, strict=True):
                assert all(close(f, g, tolerance=1e-8) for f, g in zip(group, other, strict=True))

    def _has_anchors(self, loss: CosineLoss, model: Any, x: Any, y: Any) -> bool:
        z = model(x).detach()
        return bool(loss.output_hessian(z, y).derivatives.anchors)


def size_of_terms(loss: CosineLoss, z: torch.Tensor, labels: torch.Tensor) -> float:
    """The size of the terms of a Hessian, which may cancel in it."""
    whole = loss.replaced(pd_fix="full").output_hessian(z, labels)
    sums = whole.derivatives.node_sums()
    parts = [part for part in (*whole.derivatives.dense(), sums.degree) if part is not None]
    if sums.moments is not None:
        parts.append(sums.moments.bound())
    return float(sum(part.abs().sum() for part in parts)) / float(z.norm(dim=1).min()) ** 2
