"""Tests of a loss in a backend: its rules, its output Hessian, and the curvature of drawn networks."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.errors import InputTypeError, UnsupportedError
from contrastive_curvature.laplace.backends import ContrastiveBackend, ContrastiveGGN
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
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.structures import STRUCTURES
from contrastive_curvature.testing.cases import Case, close
from contrastive_curvature.testing.networks import build_network, make_inputs
from contrastive_curvature.testing.oracle import (
    anchor_hessian,
    anchor_value,
    dense_jacobian,
    dense_output_hessian,
    masks_of,
)

Drawn = tuple[nn.Module, Tensor, Tensor]
"""A network, its inputs, and their labels."""


def _proxies(**options: Any) -> CosineLoss:
    weights = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu")
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


def make_backend(
    kind: type[ContrastiveBackend], model: nn.Module, x: Tensor, weights: str | Tensor = "all", **options: Any
) -> ContrastiveBackend:
    """Build a backend as the Laplace classes do, for ``"all"``, the ``"last_layer"``, or indices of a subnetwork."""
    if isinstance(weights, Tensor):
        return kind(model, "contrastive", subnetwork_indices=weights, **options)
    if weights == "all":
        return kind(model, "contrastive", **options)
    return kind(Encoder(model, x), "contrastive", last_layer=True, **options)


def parts_of(model: nn.Module, rows: Tensor, data: st.DataObject) -> list[tuple[str | Tensor, Any]]:
    """Return sets of weights, and the positions of their entries among all trainable parameters."""
    total = len(rows)
    parts: list[tuple[str | Tensor, Any]] = [("all", slice(None))]
    # A last layer always uses all its weights, frozen or not.
    last = list(list(model.modules())[-1].parameters())
    if last and all(p.requires_grad for p in last):
        parts.append(("last_layer", slice(total - sum(p.numel() for p in last), total)))
    seed = data.draw(st.integers(0, 99))
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")[: 1 + seed % total]
    return [*parts, (chosen, chosen)]


def fittable(case: Case) -> bool:
    """Return whether a case has a positive pair."""
    y = case.labels
    assert y is not None
    positive = case.pairs(y, y)[0] if case.pairs is not None else y[:, None] == y
    return bool(positive.fill_diagonal_(False).any())


def near(result: Any, want: Tensor, scale: float | None = None, dtype: torch.dtype = torch.float64) -> bool:
    """Return whether a result has this dtype and agrees with the truth: to 1e-10, or to 1e-4 in float32."""
    assert result.dtype == dtype
    return close(result.cpu().double(), want.cpu(), scale, 1e-10 if dtype == torch.float64 else 1e-4)


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of some points and their labels."""
    return list(zip(x.split(size), y.split(size), strict=True))


def check_batch(
    backend: ContrastiveBackend,
    x: Tensor,
    y: Tensor,
    want: Tensor,
    reach: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare a backend's curvature of a batch with a dense curvature."""
    assert near(backend.diag(x, y, N=len(x))[1], want.diagonal(), reach, dtype)
    assert near(backend.full(x, y, N=len(x))[1], want, reach, dtype)


def check_data(
    backend: ContrastiveBackend, loader: Any, want: Tensor, reach: float, dtype: torch.dtype = torch.float64
) -> None:
    """Compare a backend's curvature of a data set with a dense curvature."""
    assert near(backend.fit(loader, STRUCTURES["diag"]).curvature.plain(), want.diagonal(), reach, dtype)
    assert near(backend.fit(loader, STRUCTURES["full"]).curvature.plain(), want, reach, dtype)


def draw_loss_case(data: st.DataObject, networks: list[str]) -> Drawn:
    """Draw a network of one of these kinds, and points with labels."""
    seed, n = data.draw(st.integers(0, 2**16)), data.draw(st.integers(2, 6))
    torch.manual_seed(seed)
    kind = data.draw(st.sampled_from(networks))
    model, generator = build_network(kind, 2), torch.Generator().manual_seed(seed)
    return model, make_inputs(kind, n, generator), torch.randint(0, 3, (n,), generator=generator, device="cpu")


def is_exact(
    backend: type[ContrastiveBackend],
    loss: CosineLoss,
    drawn: Drawn,
    data: st.DataObject,
    device: str,
    **more: Any,
) -> None:
    """Compare a batch and a data set of a loss with autograd."""
    model, points, labels = drawn
    jacobian, z = dense_jacobian(model, points), model(points).detach()
    hessian, of_pairs = loss.output_hessian(z, labels), loss.compares == "pairs"
    if not (fittable(Case(z, labels)) if of_pairs else hessian.derivatives.anchors):
        return
    if loss.pd_fix == "full" and loss.distance == "arccos":
        second = torch.autograd.functional.hessian(lambda raw: loss(raw, labels), z)
        output = torch.as_tensor(second, device=z.device).reshape(z.numel(), -1)
    else:
        # Other cases have their own oracle: tests/losses.
        output = hessian.dense()
    # Scale as in a fit: a mean counts times its number of anchors, the means over pairs times half the points.
    scale = loss.data_scale(len(z)) if of_pairs or not loss.averages else float(hessian.derivatives.anchors)
    truth = scale * (jacobian.T @ output @ jacobian)
    reach = scale * size_of_terms(loss, z, labels) * float(jacobian.square().sum())
    step, x, y = data.draw(st.integers(2, len(z))), points.to(device), labels.to(device)
    loader = batches(x, y, step)
    for weights, part in parts_of(model, truth, data):
        instance = make_backend(backend, model.to(device), x, weights, loss=loss, **more)
        want = truth[part][:, part]
        check_batch(instance, x, y, want, reach)
        if not of_pairs:
            # Pairs come from the whole data set, candidates from a batch.
            counted = [(a, b) for a, b in loader if loss.output_hessian(model(a).detach(), b).derivatives.anchors]
            want = sum((instance.full(a, b, N=len(x))[1].cpu() for a, b in counted), start=torch.zeros_like(want))
        if not want.any():
            continue
        check_data(instance, loader, want, reach)
    model.cpu()


def check_loss(loss: PairLoss | RowLoss, device: str = "cpu") -> None:
    """Check your own loss: its rules against autograd in float64, and then the contract of all losses.

    Call it in a test, with the options that you use. Points, networks and subsets of weights are drawn.

    Args:
        loss: The loss.
        device: Device of the check.

    Raises:
        InputTypeError: ``loss`` is neither a :class:`~contrastive_curvature.PairLoss` nor a
            :class:`~contrastive_curvature.RowLoss`, or a rule does not return tensors.
        InputError: A rule returns a wrong shape.
        AssertionError: A rule is wrong; the message names it.
    """
    if isinstance(loss, type) or getattr(loss, "compares", None) not in ("pairs", "anchors"):
        raise InputTypeError("loss", "a PairLoss or a RowLoss", f"a {type(loss).__name__}")
    name = type(loss).__name__
    lost = [key for key in loss.arguments() if not hasattr(loss, key)]
    assert not lost, f"{name}.__init__: keep {', '.join(lost)} as attributes of the same names."
    variants = [variant for fix in PDFix for distance in Distance for variant in _with(loss, fix, distance)]
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        _check_terms(loss, draw, device)
    z = (
        torch.randn(5, 2, generator=draw, dtype=torch.float64, device="cpu")
        * torch.arange(1, 6, device="cpu").view(-1, 1)
    ).to(device)
    labels = torch.tensor([0, 1, 0, 1, 2], device=device)
    listed = tuple(torch.tensor(part, device=device) for part in ((0, 1), (2, 3), (0, 4), (1, 2)))
    for each in variants:
        for source in ({"labels": labels}, {"pairs": listed}):
            _check_hessian(each, z, source)

    @settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def exact(data: st.DataObject) -> None:
        drawn = draw_loss_case(data, ["linear", "tanh"])
        is_exact(ContrastiveGGN, data.draw(st.sampled_from(variants)), drawn, data, device)

    exact()


def _with(loss: Any, fix: PDFix, distance: Distance) -> list[Any]:
    """Return the loss with a fix and a distance, unless it refuses them."""
    try:
        return [loss.replaced(pd_fix=fix, distance=distance)]
    except UnsupportedError:
        return []


def _check_terms(loss: Any, random: torch.Generator, device: str) -> None:
    """Compare ``_terms`` with the derivatives of ``_value``, for a block of arbitrary cosines."""
    name, of_pairs = type(loss).__name__, loss.compares == "pairs"
    cosine = (1.8 * torch.rand(4, 7, generator=random, dtype=torch.float64, device="cpu") - 0.9).to(device)
    first_kind = (torch.rand(4, 7, generator=random, device="cpu") < 0.4).to(cosine)
    first_kind[:, :2] = torch.tensor([1.0, 0.0], device="cpu")
    masks, signs = (first_kind, 1 - first_kind), () if of_pairs else loss.root_signs
    roots: tuple[Tensor, ...] = ()

    def value(s: Tensor) -> Tensor:
        total: Tensor = loss._value(s, *masks).sum()
        return total

    slope = torch.autograd.functional.jacobian(value, cosine)
    bend = torch.as_tensor(torch.autograd.functional.hessian(value, cosine), device=cosine.device).reshape(28, 28)
    if of_pairs:
        first, second = loss._checked_terms(cosine, *masks)
        curved = second is None or not loss.convex or bool((second >= 0).all())
        assert curved, f"{name}._terms: second derivatives are negative; set convex = False in the class."
    else:
        kept = loss._checked("_counts", *masks) > 0
        loss._checked("_value", cosine, *masks)
        statistics = loss._statistics(cosine, *masks)
        first, second, roots = loss._checked_terms(cosine, *masks, statistics, kept)
        some = loss._checked_terms(cosine[:, ::2], masks[0][:, ::2], masks[1][:, ::2], statistics, kept)
        same = close(some.first, first[:, ::2], 1.0)
        assert same, f"{name}._terms: other derivatives where it is called with some of the columns only."
        slope, bend = slope * kept.unsqueeze(1), bend * kept.repeat_interleave(7).unsqueeze(1)
    matrix = torch.zeros_like(bend) if second is None else torch.diag(second.flatten())
    for sign, root in zip(signs, roots, strict=True):
        matrix = matrix + sign * torch.block_diag(*(row[:, None] * row for row in root))
    size = 1 + float(slope.abs().max()) + float(bend.abs().max())
    assert close(first, slope, size), f"{name}._terms: the first derivatives are not those of _value."
    assert close(matrix, bend, size), f"{name}._terms: the second derivatives are not those of _value."
    moved = value(cosine + 0.05) if not of_pairs and loss.shift_invariant else value(cosine)
    assert close(moved, value(cosine), size), f"{name}: shift_invariant = True, but another number changes _value."


def _check_hessian(loss: Any, z: Tensor, source: dict[str, Any]) -> None:
    """Compare the output Hessian with the oracle, which uses only the value rule."""
    fix, distance = str(loss.pd_fix), str(loss.distance)
    if loss.compares == "anchors":
        masks = (mask.to(z) for mask in masks_of(len(z), source.get("labels"), source.get("pairs")))
        truth = anchor_hessian(anchor_value(loss, *masks), z, distance, fix)
    else:
        truth = dense_output_hessian(z, **source, loss=loss)
    hessian = loss.output_hessian(z, source.get("labels"), pairs=source.get("pairs")).dense()
    says = f"{type(loss).__name__}: the Hessian with pd_fix={fix!r}, distance={distance!r} is not that of autograd."
    assert close(hessian, truth, size_of_terms(loss, z, **source)), says


def size_of_terms(loss: CosineLoss, z: Tensor, labels: Tensor | None = None, pairs: Any = None) -> float:
    """Return the size of the terms of a Hessian, which may cancel in it."""
    whole = loss.replaced(pd_fix="full").output_hessian(z, labels, pairs=pairs)
    sums = whole.derivatives.node_sums()
    parts = [part for part in (*whole.derivatives.dense(), sums.degree) if part is not None]
    if sums.moments is not None:
        parts.append(sums.moments.bound())
    return float(sum(part.abs().sum() for part in parts)) / float(z.norm(dim=1).min()) ** 2
