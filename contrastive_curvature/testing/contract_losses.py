"""The part of the contract that is about losses: a backend knows nothing of them, so it is exact for every one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.errors import InputTypeError, UnsupportedError, expected
from contrastive_curvature.fit.finite import clamp_curvature
from contrastive_curvature.laplace.backends import ContrastiveGGN
from contrastive_curvature.losses import (
    CosineLoss,
    InfoNCELoss,
    MultiSimilarityLoss,
    PairLoss,
    ProxyLoss,
    RowLoss,
    SigLIPLoss,
    SupConLoss,
    TripletLoss,
)
from contrastive_curvature.options import Distance, PDFix, Structure
from contrastive_curvature.testing.cases import Case, close
from contrastive_curvature.testing.contract_base import ContractBase, make_backend
from contrastive_curvature.testing.networks import build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_jacobian, dense_output_hessian
from contrastive_curvature.testing.oracle_anchors import AnchorCase, anchor_hessian, masks_of

__all__ = ["LOSSES", "LossContract", "check_loss", "size_of_terms"]

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
        self._is_exact(loss, (model, points, labels), data, device)

    def _is_exact(
        self, loss: CosineLoss, drawn: tuple[nn.Module, Tensor, Tensor], data: st.DataObject, device: str
    ) -> None:
        model, points, labels = drawn
        jacobian, z = dense_jacobian(model, points), model(points).detach()
        hessian, of_pairs = loss.output_hessian(z, labels), isinstance(loss, PairLoss)
        if not (self._fittable(Case(z, labels)) if of_pairs else hessian.derivatives.anchors):
            return
        if loss.pd_fix == "full" and loss.distance == "arccos":
            found = torch.autograd.functional.hessian(lambda raw: loss(raw, labels), z)
            output = torch.as_tensor(found).reshape(z.numel(), -1)
        else:
            # What the fixes leave of it has its own oracle: tests/losses.
            output = hessian.dense()
        # As a fit scales it: a mean counts times its number of anchors, the means over pairs times half of the points.
        if of_pairs:
            scale = len(z) / 2 if loss.normalization == "type" else 1.0
        else:
            scale = float(hessian.derivatives.anchors) if loss.averages else 1.0
        truth = jacobian.T @ output @ jacobian
        size = size_of_terms(loss, z, labels) * float(jacobian.square().sum())
        step, x, y = data.draw(st.integers(2, len(z))), points.to(device), labels.to(device)
        for weights, part in self._parts((model, points, Case(z, labels)), truth, data):
            made = make_backend(self.backend, model.to(device), x, weights, loss=loss, **self.options)
            want = scale * truth[part][:, part]
            assert close(made.diag(x, y, N=len(x))[1].cpu(), want.diagonal(), scale * size)
            assert close(made.full(x, y, N=len(x))[1].cpu(), want, scale * size)
            loader = list(zip(x.split(step), y.split(step), strict=True))
            some = [] if of_pairs else [batch for batch in loader if self._has_batch(loss, model, *batch)]
            batches = [made.full(a, b, N=len(x))[1] for a, b in some]
            # Pairs are those of the whole data set, candidates those of a batch.
            together = want if of_pairs else torch.as_tensor(sum(batches)) if batches else None
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

    def _has_batch(self, loss: CosineLoss, model: Any, x: Any, y: Any) -> bool:
        z = model(x).detach()
        return bool(loss.output_hessian(z, y).derivatives.anchors)


def check_loss(loss: PairLoss | RowLoss, device: str = "cpu") -> None:
    """Check a loss of one's own: its rules against autograd in float64, and then the contract of all losses.

    Call it in a test, with the options that you use. Points, networks and subsets of weights are drawn.

    Args:
        loss: The loss.
        device: Where it is checked.

    Raises:
        InputTypeError: It is neither a :class:`~contrastive_curvature.PairLoss` nor a
            :class:`~contrastive_curvature.RowLoss`, or a rule returns something else than tensors.
        InputError: A rule returns another shape than it should.
        AssertionError: A rule is wrong; the message names it.
    """
    if not isinstance(loss, (PairLoss, RowLoss)):
        raise InputTypeError(expected("loss", "a PairLoss or a RowLoss", f"a {type(loss).__name__}"))
    name = type(loss).__name__
    lost = [key for key in loss.arguments() if not hasattr(loss, key)]
    assert not lost, f"{name}.__init__: keep {', '.join(lost)} as attributes of the same names."
    variants = [made for fix in PDFix for distance in Distance for made in _with(loss, fix, distance)]
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        _check_terms(loss, draw, device)
    z = (torch.randn(5, 2, generator=draw, dtype=torch.float64) * torch.arange(1, 6).view(-1, 1)).to(device)
    labels = torch.tensor([0, 1, 0, 1, 2], device=device)
    listed = tuple(torch.tensor(part, device=device) for part in ((0, 1), (2, 3), (0, 4), (1, 2)))
    for each in variants:
        for source in ({"labels": labels}, {"pairs": listed}):
            _check_hessian(each, z, source)

    class Contract(LossContract):
        backend = ContrastiveGGN

    @_shared
    @given(data=st.data())
    def exact(data: st.DataObject) -> None:
        seed, n = data.draw(st.integers(0, 2**16)), data.draw(st.integers(2, 6))
        torch.manual_seed(seed)
        kind, random = data.draw(st.sampled_from(("linear", "tanh"))), torch.Generator().manual_seed(seed)
        drawn = build_network(kind, 2), make_inputs(kind, n, random), torch.randint(0, 3, (n,), generator=random)
        Contract()._is_exact(data.draw(st.sampled_from(variants)), drawn, data, device)

    exact()


def _with(loss: Any, fix: PDFix, distance: Distance) -> list[Any]:
    """The loss with a fix and a distance, unless it refuses them."""
    try:
        return [loss.replaced(pd_fix=fix, distance=distance)]
    except UnsupportedError:
        return []


def _check_terms(loss: Any, random: torch.Generator, device: str) -> None:
    """Compare ``_terms`` with the derivatives of ``_value``, at a block of cosines that belong to no points."""
    name, of_pairs = type(loss).__name__, isinstance(loss, PairLoss)
    cosine = (1.8 * torch.rand(4, 7, generator=random, dtype=torch.float64) - 0.9).to(device)
    first_kind = (torch.rand(4, 7, generator=random) < 0.4).to(cosine)
    first_kind[:, :2] = torch.tensor([1.0, 0.0])
    masks, signs = (first_kind, 1 - first_kind), () if of_pairs else loss.root_signs
    roots: tuple[Tensor, ...] = ()

    def value(s: Tensor) -> Tensor:
        made: Tensor = loss._value(s, *masks).sum()
        return made

    slope = torch.autograd.functional.jacobian(value, cosine)
    bend = torch.as_tensor(torch.autograd.functional.hessian(value, cosine)).reshape(28, 28)
    if of_pairs:
        first, second = loss._checked_terms(cosine, *masks)
    else:
        kept = loss._has_terms(*masks)
        loss._checked("_value", cosine, *masks)
        statistics = loss._statistics(cosine, *masks)
        first, second, roots = loss._checked_terms(cosine, *masks, statistics, kept)
        some = loss._checked_terms(cosine[:, ::2], masks[0][:, ::2], masks[1][:, ::2], statistics, kept)
        same = close(some.first, first[:, ::2], 1.0)
        assert same, f"{name}._terms: other derivatives where it is called with some of the columns only."
        slope, bend = slope * kept.unsqueeze(1), bend * kept.repeat_interleave(7).unsqueeze(1)
    made = torch.zeros_like(bend) if second is None else torch.diag(second.flatten())
    for sign, root in zip(signs, roots, strict=True):
        made = made + sign * torch.block_diag(*(row[:, None] * row for row in root))
    size = 1 + float(slope.abs().max()) + float(bend.abs().max())
    assert close(first, slope, size), f"{name}._terms: the first derivatives are not those of _value."
    assert close(made, bend, size), f"{name}._terms: the second derivatives are not those of _value."
    moved = value(cosine + 0.05) if not of_pairs and loss.shift_invariant else value(cosine)
    assert close(moved, value(cosine), size), f"{name}: shift_invariant = True, but another number changes _value."


def _check_hessian(loss: Any, z: Tensor, given: dict[str, Any]) -> None:
    """Compare the output Hessian with the oracle, which believes the value rule alone."""
    fix, distance = str(loss.pd_fix), str(loss.distance)
    if isinstance(loss, RowLoss):
        case = AnchorCase(loss, *(mask.to(z) for mask in masks_of(len(z), given.get("labels"), given.get("pairs"))))
        truth = anchor_hessian(case, z, distance, fix)
    else:
        truth = dense_output_hessian(z, **given, loss=loss)
    found = loss.output_hessian(z, given.get("labels"), pairs=given.get("pairs")).dense()
    says = f"{type(loss).__name__}: the Hessian with pd_fix={fix!r}, distance={distance!r} is not that of autograd."
    assert close(found, truth, size_of_terms(loss, z, **given)), says


def size_of_terms(loss: CosineLoss, z: Tensor, labels: Tensor | None = None, pairs: Any = None) -> float:
    """The size of the terms of a Hessian, which may cancel in it."""
    whole = loss.replaced(pd_fix="full").output_hessian(z, labels, pairs=pairs)
    sums = whole.derivatives.node_sums()
    parts = [part for part in (*whole.derivatives.dense(), sums.degree) if part is not None]
    if sums.moments is not None:
        parts.append(sums.moments.bound())
    return float(sum(part.abs().sum() for part in parts)) / float(z.norm(dim=1).min()) ** 2
