"""Several processes and one checkpoint: of one training they share, or of trainings that must not meet."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from online_training import checksum, make_training
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from contrastive_curvature.online import OnlineLaplace, Trainer, load_checkpoint, save_checkpoint
from contrastive_curvature.online import trainer as trainer_file

PROCESSES, EPOCHS = 2, 3
ROOT = Path(__file__).resolve().parents[2]
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
        said["left"] = sorted(os.listdir(folder)) if rank == 0 else None
        trainer, loader = make(rank, folder / "full.pt")
        trainer.fit(loader, EPOCHS)
        said["after full"] = checksum(ended(trainer))

        trainer, loader = make(rank, folder / ("full.pt" if rank == 0 else "absent.pt"))
        before = checksum(ended(trainer))
        said["not shared"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        trainer, loader = make(rank, folder / f"other{rank}.pt")
        if rank == 0:
            save_checkpoint(folder / "other0.pt", load_checkpoint(folder / "full.pt"))
        else:
            other = {**load_checkpoint(folder / "full.pt"), "steps": 3}
            save_checkpoint(folder / "other1.pt", other)
        said["another step"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        if rank == 1:
            (folder / "other1.pt").write_bytes(b"damaged")
        said["damaged"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        assert checksum(ended(trainer)) == before  # as they were made
        trainer, loader = make(rank, folder / "one.pt" if rank == 0 else None)
        said["one has none"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        trainer, loader = make(rank, folder / "uneven.pt")
        batches = list(loader)[rank:]
        said["uneven"] = refusal(lambda: trainer.fit(batches, EPOCHS))

        # A second start by accident: rank 0 cannot have the file, and all are told.
        trainer, loader = make(rank, folder / "full.pt")
        with FileLock(folder / ".full.pt.lock") if rank == 0 else contextlib.nullcontext():
            distributed.barrier()
            said["in use"] = refusal(lambda: trainer.fit(loader, EPOCHS))
        # Steps that share nothing.
        trainer = Trainer(Plain(), SGD(), checkpoint=folder / "plain.pt")
        x = torch.ones(2, 1), torch.zeros(2)
        trainer.step.wait = folder / "refused"
        said["plain"] = refusal(lambda: trainer.fit([x], 1))
        if said["plain"] != "nothing":
            (folder / "refused").touch()
    (folder / f"{rank}.json").write_text(json.dumps(said))


class Plain(nn.Module):
    """A training of one process, whose step lasts until the other process has been refused."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.wait: Path | None = None

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        for _ in range(3000):
            if self.wait is None or self.wait.exists():
                break
            time.sleep(0.02)
        return (self.weight * x).square().sum()


def SGD() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)


def alone(rank: int, folder: Path) -> None:
    """Another number of processes."""
    with group(rank, folder, "alone", 1):
        trainer, loader = make(rank, folder / "full.pt")
        (folder / "alone.json").write_text(json.dumps(refusal(lambda: trainer.fit(loader, EPOCHS))))


def test_processes_that_share_a_training_share_its_file(tmp_path: Path) -> None:
    multiprocessing.spawn(several, (tmp_path,), nprocs=PROCESSES)
    multiprocessing.spawn(alone, (tmp_path,), nprocs=1)
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES))
    for said in (one, two):
        assert "No space left on device" in said["full"]
        assert said["after full"] == said["whole"]
        file = str(tmp_path / "full.pt")
        assert "that of step 12" in said["not shared"]
        assert "no file in process 1. It must be on a file system that all processes share" in said["not shared"]
        assert "that of step 12" in said["another step"]
        assert "that of step 3" in said["another step"]
        assert "other1.pt: expected a checkpoint of version 3, got a file that cannot be read" in said["damaged"]
        assert "checkpoint: expected the same in all 2 processes, got a file in process 0, none" in said["one has none"]
        assert "number of batches: expected the same in all 2 processes" in said["uneven"]
        assert f"{file}, which another training is using" in said["in use"]
        assert all(said[name].startswith("InputError") for name in ("not shared", "another step", "uneven"))
        assert said["orders"][0] != said["orders"][1]  # the sampler was told the epoch
    assert one["full"].startswith("OSError")
    assert two["full"].startswith("ProcessError: the fit failed in process 0 of 2; its own error says why: OSError")
    assert two["in use"].startswith("ProcessError: the fit failed in process 0 of 2")
    assert one["damaged"].startswith("ProcessError: the fit failed in process 1 of 2")
    assert one["in use"].startswith("InputError")
    assert two["damaged"].startswith("InputError")
    assert one["left"] == [".full.pt.lock", "full.pt", "meet"]
    assert sorted((one["plain"][:10], two["plain"][:10])) == ["InputError", "nothing"]
    assert "which another training is using" in one["plain"] + two["plain"]
    assert len(load_checkpoint(tmp_path / "full.pt")["processes"]) == PROCESSES
    said = json.loads((tmp_path / "alone.json").read_text())
    assert "processes: expected 2, as before, got 1. A training must keep" in said


def training(rank: int, folder: Path, slow: bool, name: str) -> None:
    with group(rank, folder, name):
        trainer, loader = make(rank, folder / "run.pt")
        if slow:
            trainer.step.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        trainer.fit(loader, EPOCHS)
        torch.save(ended(trainer), folder / f"{name}{rank}.pt")


def test_all_killed_and_started_again(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    multiprocessing.spawn(training, (tmp_path, False, "whole"), nprocs=PROCESSES)
    file.unlink()
    victims = multiprocessing.spawn(training, (tmp_path, True, "killed"), nprocs=PROCESSES, join=False)
    while not file.exists() or load_checkpoint(file)["steps"] < 6:
        assert all(process.is_alive() for process in victims.processes)
        time.sleep(0.02)
    for process in victims.processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in victims.processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert 6 <= load_checkpoint(file)["steps"] < 12
    assert (tmp_path / ".run.pt.lock").exists()  # left by the kill, and in nobody's way
    multiprocessing.spawn(training, (tmp_path, False, "again"), nprocs=PROCESSES)
    for rank in range(PROCESSES):
        found, wanted = (torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for name in ("again", "whole"))
        assert found["steps"] == 12
        assert checksum(found) == checksum(wanted)


SECOND = """
import sys
from pathlib import Path
from online_training import make_training
trainer, loader = make_training("generator", Path(sys.argv[1]), 3)
try:
    trainer.fit(loader, 2)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("trained", trainer.steps)
"""


def second(file: Path) -> str:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SECOND, str(file)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_same_program_started_twice(tmp_path: Path) -> None:
    """Also by another name of the same file, and from a thread; and the lock goes with the first."""
    file, link = tmp_path / "run.pt", tmp_path / "link.pt"
    link.symlink_to("run.pt")
    trainer, loader = make_training("generator", file, 3)
    said: list[str] = []

    def meanwhile(*_: Any) -> None:
        if not said:
            said.append(second(link))
            other, data = make_training("generator", link, 3)
            thread = threading.Thread(target=lambda: said.append(refusal(lambda: other.fit(data, 2))))
            thread.start()
            thread.join()

    trainer.step.register_forward_pre_hook(meanwhile)
    trainer.fit(loader, 1)
    assert said[0].startswith("InputError checkpoint: expected a file that no other training uses, got ")
    assert "which another training is using. Wait until that training has ended" in said[0]
    assert "which another training is using" in said[1]
    assert sorted(os.listdir(tmp_path)) == [".run.pt.lock", "link.pt", "run.pt"]
    assert second(file).split() == ["trained", "8"]


def test_a_failed_training_gives_its_file_back(tmp_path: Path) -> None:
    trainer, loader = make_training("generator", tmp_path / "run.pt", 3)
    handle = trainer.step.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(loader, 1)
    handle.remove()
    trainer.fit(loader, 1)
    assert sorted(os.listdir(tmp_path)) == [".run.pt.lock", "run.pt"]
