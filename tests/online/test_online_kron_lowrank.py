"""Online Laplace with ``hessian_structure="kron_lowrank"``: discounted sketches, equality with ``kron``."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from torch import Tensor, nn

from contrastive_curvature.network.last_layer import sketch_matrix
from contrastive_curvature.online import OnlineLaplace

WIDTH, RANK, SIZE = 60, 2, 12
"""A sketch of 12 columns for rank 2."""


def toy(bias: bool = True, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3, bias=bias)).double()


def batches(count: int = 3, n: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 2) for _ in range(count)]


def make(structure: str, encoder: nn.Module, rank: int | None = None, **options: Any) -> OnlineLaplace:
    kwargs = {"pd_fix": "psd", **options.pop("backend_kwargs", {})}
    if rank is not None and structure == "kron_lowrank":
        kwargs["rank"] = rank
    return OnlineLaplace(
        encoder, probe=batches()[0][0], n_data=24, hessian_structure=structure, backend_kwargs=kwargs, **options
    )


def train(online: OnlineLaplace, lr: float = 0.1, seed: int = 0) -> list[float]:
    optimizer, losses = torch.optim.SGD(online.encoder.parameters(), lr=lr), []
    torch.manual_seed(seed)
    for x, y in batches():
        optimizer.zero_grad()
        loss = online(x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@given(
    bias=st.booleans(),
    memory_factor=st.sampled_from([0.0, 0.3]),
    normalization=st.sampled_from(["type", "anchor", "sum"]),
    fix=st.sampled_from(["psd", "fixed"]),
)
def test_the_discounted_sum_is_the_sketch_of_that_of_kron(bias, memory_factor, normalization, fix) -> None:
    options = {"normalization": normalization, "pd_fix": fix, "negative_weight": 0.2}
    settings: dict[str, Any] = {"memory_factor": memory_factor, "sampling_temperature": 0.0, "backend_kwargs": options}
    mine, theirs = make("kron_lowrank", toy(bias), RANK, **settings), make("kron", toy(bias), **settings)
    assert train(mine) == pytest.approx(train(theirs), rel=1e-12)
    (g, sketch, trace), *rest = mine.discounted.at_scale(24).curvature.plain()
    (wanted, a), *others = theirs.discounted.at_scale(24).curvature.plain()
    assert close(g, wanted)
    assert sketch.shape == (WIDTH, SIZE)
    assert close(sketch, a @ sketch_matrix(WIDTH, SIZE, a.dtype, a.device))
    assert close(trace, a.trace().reshape(1))
    assert len(rest) == len(others) == bias
    assert all(close(p[0], q[0]) for p, q in zip(rest, others, strict=True))


def test_where_nothing_moves_it_is_the_post_hoc_fit() -> None:
    online = make("kron_lowrank", toy(), RANK, memory_factor=0.0, sampling_temperature=0.0)
    train(online, lr=0.0)
    la: Any = Laplace(toy(), "contrastive", backend_kwargs={"pd_fix": "psd", "rank": RANK, "pairs": "batch"})
    la.fit(batches())
    la.optimize_prior_precision()
    found = online.laplace()
    assert type(found) is type(la)
    assert found.rank == RANK
    x = batches()[2][0]
    assert close(found(x).covariance, la(x).covariance, 1e-9)
    found.fit(batches())
    assert found.n_data == 24
