"""A data set fitted in batches equals the same data in one batch, exactly, in every structure and for every fix."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import NETWORKS, build_network, close, make_inputs, options, relate_by_remainder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.fit import cross_terms
from contrastive_curvature.losses import contrastive
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.structures import Dense, Diagonal, Kron, Structure
from contrastive_curvature.testing import dense_jacobian

WITHOUT_FACTORS = (nn.Embedding, nn.MultiheadAttention)


@st.composite
def data(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor, DataLoader, dict[str, Any]]:
    n, dim = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(tuple(NETWORKS)))
    model, x = build_network(kind, dim), make_inputs(kind, n)
    y = torch.randint(0, draw(st.integers(1, 3)), (n,))
    y[1] = y[0]
    loader = DataLoader(TensorDataset(x, y), batch_size=draw(st.integers(1, n)), shuffle=True)
    chosen = draw(options)
    if draw(st.booleans()):
        chosen["relation"] = relate_by_remainder
    return model, x, y, loader, chosen


def fit(model: nn.Module, loader: DataLoader, chosen: dict[str, Any], structure: type[Structure], last: bool) -> Any:
    backend_model: Any = model
    if last:
        backend_model = Encoder(model, next(iter(loader))[0].to(next(model.parameters()).device))
    return cc.ContrastiveGGN(backend_model, last_layer=last, **chosen).fit(loader, structure)


@given(drawn=data(), last=st.booleans(), held=st.sampled_from((1, 2**27)), class_sums=st.sampled_from((0, 2**28)))
def test_equals_one_batch(drawn: Any, last: bool, held: int, class_sums: int, device: str) -> None:
    model, x, y, loader, chosen = drawn
    model = model.to(device)
    pairs = {"pairs" if k == "relation" else k: v for k, v in chosen.items()}
    x, y = x.to(device), y.to(device)
    subset = "last_layer" if last else "all"
    scale = len(x) / 2 if chosen["normalization"] == "type" else 1.0
    with pytest.MonkeyPatch.context() as patch:
        # Both routes of the coupled fixes, and blocks that hold one batch or all of them.
        patch.setattr(cross_terms, "_FEATURE_ELEMENTS", held)
        patch.setattr(cross_terms, "_CLASS_SUM_ELEMENTS", class_sums)
        for structure in (Diagonal, Dense):
            truth = scale * cc.ggn(
                model, x, y, structure=structure.name, subset_of_weights=subset, clamp=False, **pairs
            )
            found = fit(model, loader, chosen, structure, last)
            size = _size(model, x, y, pairs)
            assert found.n == len(x)
            assert close(found.curvature.plain(), truth, scale * size)
    loss = cc.ContrastiveLoss(*(chosen[k] for k in ("margin", "negative_weight", "normalization")))
    value = scale * loss(model(x), y, pairs=pairs.get("pairs"))
    assert close(found.loss.reshape(1), value.detach().reshape(1), 4 * scale * len(x) ** 2, 1e-12)


@given(drawn=data(), last=st.booleans(), pd_fix=st.sampled_from(("psd", "positive", "full")))
def test_kron_equals_one_batch(drawn: Any, last: bool, pd_fix: str, device: str) -> None:
    """Of coupled fixes too, whose cross terms the factors leave out."""
    model, x, y, loader, chosen = drawn
    assume(last or not any(isinstance(m, WITHOUT_FACTORS) or hasattr(m, "layer") for m in model.modules()))
    model, x, y = model.to(device), x.to(device), y.to(device)
    chosen.pop("relation", None)
    chosen.update(pd_fix=pd_fix, normalization="anchor")
    truth = cc.ggn(
        model, x, y, structure="kron", subset_of_weights="last_layer" if last else "all", clamp=False, **chosen
    )
    found = fit(model, loader, chosen, Kron, last).curvature.plain()
    for group, expected in zip(found, truth, strict=True):
        for factor, other in zip(group, expected, strict=True):
            assert close(factor, other, 1e-3 * _size(model, x, y, chosen))


@given(drawn=data())
def test_one_batch_of_everything_is_the_batch_estimate(drawn: Any, device: str) -> None:
    model, x, _, loader, chosen = drawn
    model = model.to(device)
    whole = DataLoader(loader.dataset, batch_size=len(x))
    exact = fit(model, whole, chosen, Diagonal, False)
    estimate = fit(model, whole, {**chosen, "pairs": "batch"}, Diagonal, False)
    found, wanted = estimate.curvature.plain(), exact.curvature.plain()
    assert close(found, wanted, 1e-3 * float(wanted.abs().max()) + 1e-12)
    assert close(estimate.loss.reshape(1), exact.loss.reshape(1), 1.0)


def test_memory_of_a_last_layer_fit_does_not_grow_with_pairs(device: str) -> None:
    """Nothing of the size of the pairs is made on the way, let alone times F: the largest tensor is a tile."""
    n, width = 3000, 50
    torch.manual_seed(0)
    model = nn.Linear(width, 2).to(device)
    loader = DataLoader(TensorDataset(torch.randn(n, width), torch.arange(n) % 3), batch_size=100)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        fit(model, loader, {}, Diagonal, True)
    assert largest <= contrastive._TILE_ROWS * contrastive._TILE_COLUMNS


def _size(model: nn.Module, x: Tensor, y: Tensor, pairs: dict[str, Any]) -> float:
    """Size of what may cancel in the curvature, times 1e-3."""
    z = model(x).detach()
    made = cc.output_hessian(z, y, **pairs).derivatives.dense()[0].abs().sum()
    return 1e-3 * float(made / z.norm(dim=1).min() ** 2 * dense_jacobian(model, x).square().sum())
