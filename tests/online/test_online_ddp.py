"""Several processes that train one encoder: one posterior, one checkpoint; and trainings that must not meet."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from online_training import checksum, make_training
from tables import each
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from contrastive_curvature.online import OnlineLaplace, Trainer, load_checkpoint, save_checkpoint
from contrastive_curvature.online import trainer as trainer_file

PROCESSES, EPOCHS = 2, 3
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def make(rank: int, file: Path | None, share: bool = True, every: int = 2) -> tuple[Trainer, DataLoader[Any]]:
    """A training with batch statistics, dropout and sampled weights, whose data are divided among the processes."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)
    x, labels = torch.randn(48, 4), torch.arange(48) % 4
    online = OnlineLaplace(nn.Sequential(*layers), probe=x[:4], n_data=48, memory_factor=0.1)
    step: nn.Module = DistributedDataParallel(online) if share else nn.Sequential(*layers)
    torch.manual_seed(rank)  # the processes draw other weights
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-2)
    sampler = DistributedSampler(x, PROCESSES, rank, shuffle=True, seed=3) if share else None
    data = TensorDataset(x, labels)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return Trainer(step, optimizer, scheduler, checkpoint=file, checkpoint_every=every), DataLoader(
        data, 6, False, sampler
    )


def ended(trainer: Trainer) -> dict[str, Any]:
    parts = {"step": trainer.step.state_dict(), "optimizer": trainer.optimizer.state_dict(), "steps": trainer.steps}
    return {**parts, "random": torch.get_rng_state(), "curvature": trainer.step.module.discounted.state_dict()}


@contextlib.contextmanager
def group(rank: int, folder: Path, name: str, size: int = PROCESSES) -> Any:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", f"file://{folder}/{name}", rank=rank, world_size=size, timeout=limit)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def refusal(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def several(rank: int, folder: Path) -> None:
    """All that needs no kill, in one start of the processes."""
    said: dict[str, Any] = {}
    with group(rank, folder, "meet"):
        whole, loader = make(rank, None)
        orders = [list(loader.sampler)]
        whole.fit(loader, EPOCHS)
        orders.append(list(loader.sampler))
        said["orders"] = orders
        said["whole"] = checksum(ended(whole))

        class Full:
            """Stands for a disk that is full at the second write of rank 0."""

            count = 0

            def __call__(self, *arguments: Any) -> None:
                self.count += 1
                if self.count == 2:
                    raise OSError(errno.ENOSPC, "No space left on device")
                save_checkpoint(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(trainer_file, "save_checkpoint", Full())
            trainer, loader = make(rank, folder / "full.pt")
            said["full"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        trainer, loader = make(rank, folder / "full.pt")
        trainer.fit(loader, EPOCHS)
        said["after full"] = checksum(ended(trainer))

        trainer, loader = make(rank, folder / ("full.pt" if rank == 0 else "absent.pt"))
        before = checksum(ended(trainer))
        said["not shared"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        trainer, loader = make(rank, folder / f"other{rank}.pt")
        content = load_checkpoint(folder / "full.pt")
        save_checkpoint(folder / f"other{rank}.pt", content if rank == 0 else {**content, "steps": 3})
        said["another step"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        assert checksum(ended(trainer)) == before  # as they were made
        trainer, loader = make(rank, folder / "uneven.pt")
        batches = list(loader)[rank:]
        said["uneven"] = refusal(lambda: trainer.fit(batches, EPOCHS))

        # A second start by accident: rank 0 cannot have the file, and all are told.
        trainer, loader = make(rank, folder / "full.pt")
        with FileLock(folder / ".full.pt.lock") if rank == 0 else contextlib.nullcontext():
            distributed.barrier()
            said["in use"] = refusal(lambda: trainer.fit(loader, EPOCHS))
    if rank == 0:
        with group(0, folder, "alone", 1):
            trainer, loader = make(0, folder / "full.pt")
            said["alone"] = refusal(lambda: trainer.fit(loader, EPOCHS))
    (folder / f"{rank}.json").write_text(json.dumps(said))


def training(rank: int, folder: Path, slow: bool, name: str) -> None:
    with group(rank, folder, name):
        trainer, loader = make(rank, folder / "run.pt")
        if slow:
            trainer.step.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        trainer.fit(loader, EPOCHS)
        (folder / f"{name}{rank}").write_text(checksum(ended(trainer)))


def kill_and_start_again(folder: Path) -> None:
    file = folder / "run.pt"
    victims = fork(training, (folder, True, "killed"), join=False)
    while not file.exists() or load_checkpoint(file)["steps"] < 6:
        assert all(process.is_alive() for process in victims.processes)
        time.sleep(0.02)
    for process in victims.processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in victims.processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert 6 <= load_checkpoint(file)["steps"] < 12
    assert (folder / ".run.pt.lock").exists()  # left by the kill, and in nobody's way
    fork(training, (folder, False, "again"))


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


def remember(rank: int, folder: Path, structure: str) -> None:
    with group(rank, folder, f"meet {structure}"):
        online = remembering(structure)
        wrapped = DistributedDataParallel(online)
        for x, labels in of_process(rank):
            # No optimiser: the weights stay, so that single processes can be compared with.
            wrapped(x, labels).backward()
        torch.save(online.discounted.state_dict(), folder / f"{structure}{rank}.pt")


def fork(function: Any, arguments: tuple[Any, ...], join: bool = True) -> Any:
    return multiprocessing.start_processes(function, arguments, PROCESSES, join=join, start_method="fork")


def conduct(_: int, folder: Path) -> None:
    """Everything, from one fresh process that forks: what it imports is imported once."""
    fork(several, (folder,))
    kill_and_start_again(folder)
    for structure in ("diag", "kron"):
        fork(remember, (folder, structure))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(conduct, (made,), nprocs=1)
    return made


def test_processes_that_share_a_training_share_its_file(folder: Path) -> None:
    one, two = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES))
    for said in (one, two):
        assert "No space left on device" in said["full"]
        assert said["after full"] == said["whole"]
        assert "that of step 12" in said["not shared"]
        assert "no file in process 1. It must be on a file system that all processes share" in said["not shared"]
        assert "that of step 12" in said["another step"]
        assert "that of step 3" in said["another step"]
        assert "number of batches: expected the same in all 2 processes" in said["uneven"]
        assert f"{folder / 'full.pt'}, which another training is using" in said["in use"]
        assert said["orders"][0] != said["orders"][1]  # the sampler was told the epoch
    assert one["full"].startswith("OSError")
    assert two["full"].startswith("ProcessError: the fit failed in process 0 of 2; its own error says why: OSError")
    assert one["in use"].startswith("InputError")
    assert two["in use"].startswith("ProcessError: the fit failed in process 0 of 2")
    assert len(load_checkpoint(folder / "full.pt")["processes"]) == PROCESSES
    assert "processes: expected 2, as before, got 1. A training must keep" in one["alone"]


def test_all_killed_and_started_again(folder: Path) -> None:
    for rank in range(PROCESSES):
        whole = json.loads((folder / f"{rank}.json").read_text())["whole"]
        assert (folder / f"again{rank}").read_text() == whole


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


def test_the_same_program_started_twice(tmp_path: Path) -> None:
    """Also by another name of the same file; and the lock goes with the first, also with one that fails."""
    file, link = tmp_path / "run.pt", tmp_path / "link.pt"
    link.symlink_to("run.pt")
    trainer, loader = make_training("generator", file, 3)
    said: list[str] = []

    def meanwhile(*_: Any) -> None:
        other, data = make_training("generator", link, 3)
        said.append(refusal(lambda: other.fit(data, 2)))
        msg = "broken"
        raise ValueError(msg)

    handle = trainer.step.register_forward_pre_hook(meanwhile)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(loader, 1)
    assert said[0].startswith("InputError: checkpoint: expected a file that no other training uses, got ")
    assert "which another training is using. Wait until that training has ended" in said[0]
    handle.remove()
    trainer.fit(loader, 1)
    again, loader = make_training("generator", file, 3)
    again.fit(loader, 2)
    assert again.steps == 8
    assert sorted(os.listdir(tmp_path)) == [".run.pt.lock", "link.pt", "run.pt"]
