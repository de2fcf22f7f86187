"""Several processes that train one encoder share one posterior."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_curvature.online import OnlineLaplace

PROCESSES, STEPS, MEMORY = 2, 3, 0.1

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of another size and another content in each process."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [6 + 2 * rank, 8, 6]
    return [(torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 2) for n in sizes]


def make(structure: str) -> OnlineLaplace:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return OnlineLaplace(
        encoder,
        probe=batches(0)[0][0],
        n_data=40,
        memory_factor=MEMORY,
        hessian_structure=structure,
        sampling_temperature=0,
    )


def train(rank: int, structure: str, folder: Path) -> None:
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    online = make(structure)
    wrapped = DistributedDataParallel(online)
    for x, labels in batches(rank):
        # No optimiser: the weights stay, so that single processes can be compared with.
        wrapped(x, labels).backward()
    torch.save(online.discounted.state_dict(), folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_all_processes_remember_the_batches_of_all(structure: str, tmp_path: Path) -> None:
    multiprocessing.spawn(train, (structure, tmp_path), nprocs=PROCESSES)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES)]
    alone = []
    for rank in range(PROCESSES):
        online = make(structure)
        for x, labels in batches(rank):
            online(x, labels)
        alone.append(online.discounted.state_dict())
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])
        if name in ("steps", "remembered", "positive"):
            assert torch.equal(found[0][name], alone[0][name])
        else:
            wanted = alone[0][name] + alone[1][name]
            assert torch.allclose(found[0][name], wanted, rtol=1e-12, atol=1e-14 * float(wanted.abs().max()))
    assert float(found[0]["points"]) == pytest.approx((1 - MEMORY) ** 2 * 14 + (1 - MEMORY) * 16 + 12)
