"""Several processes that train one encoder have one posterior."""

import datetime
import warnings
from pathlib import Path

import pytest
import torch
from devices import START_METHOD
from tables import each
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_curvature.online import OnlineLaplace

PROCESSES = 2
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def of_process(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of another size and another content in each process."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [6 + 2 * rank, 8, 6]
    return [(torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 2) for n in sizes]


def remembering(structure: str) -> OnlineLaplace:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    how = {"n_data": 40, "memory_factor": 0.1, "hessian_structure": structure, "sampling_temperature": 0}
    return OnlineLaplace(encoder, probe=of_process(0)[0][0], **how)


def remember(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=PROCESSES, timeout=limit)
    for structure in ("diag", "kron"):
        online = remembering(structure)
        wrapped = DistributedDataParallel(online)
        for x, labels in of_process(rank):
            # No optimiser: the weights stay, so that single processes can be compared with.
            wrapped(x, labels).backward()
        torch.save(online.discounted.state_dict(), folder / f"{structure}{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processes")
    multiprocessing.start_processes(remember, (made,), PROCESSES, start_method=START_METHOD)
    return made


@each("structure", ["diag", "kron"])
def test_all_processes_remember_the_batches_of_all(structure: str, folder: Path) -> None:
    found = [torch.load(folder / f"{structure}{rank}.pt", weights_only=True) for rank in range(PROCESSES)]
    alone = []
    for rank in range(PROCESSES):
        online = remembering(structure)
        for x, labels in of_process(rank):
            online(x, labels)
        alone.append(online.discounted.state_dict())
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])
        if name in ("steps", "remembered", "positive"):
            assert torch.equal(found[0][name], alone[0][name])
        else:
            wanted = alone[0][name] + alone[1][name]
            assert torch.allclose(found[0][name], wanted, rtol=1e-12, atol=1e-14 * float(wanted.abs().max()))
    assert float(found[0]["points"]) == pytest.approx(0.9**2 * 14 + 0.9 * 16 + 12)
