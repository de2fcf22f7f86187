"""A training loop that continues after an interruption, with the same result as without the interruption."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from contrastive_curvature import validate
from contrastive_curvature.artifact import final_target
from contrastive_curvature.errors import DivergenceError, InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.fit.exchange import check_agreed
from contrastive_curvature.network.inputs import tokenized_batch
from contrastive_curvature.network.loader import check_loader, has_views, read_batch
from contrastive_curvature.online.checkpoint import load_checkpoint, save_checkpoint
from contrastive_curvature.online.learner import OnlineLaplace
from contrastive_curvature.online.options import described, repr_without_addresses
from contrastive_curvature.online.processes import Processes
from contrastive_curvature.online.randomness import Randomness


class Trainer:
    """Trains any module that returns the loss of a batch, such as :class:`OnlineLaplace`.

    If a training is killed and the same program starts it again, it continues from its last checkpoint. On a CPU the
    result is the same to the last bit, if random augmentations use the generators of torch, NumPy or Python, and the
    step keeps its whole state in its ``state_dict``. A checkpoint is refused if optimiser, scheduler or modules have
    other settings now, or while another training uses the file.

    Processes that share a training (``torch.distributed`` with a ``DistributedDataParallel`` or an ``OnlineLaplace`` in
    the step) share the file, which all must see: rank 0 writes the states of all. Their number must stay the same.

    Args:
        step: Module to train; ``step(x, targets)`` returns the loss of a batch, with its graph.
        optimizer: Optimiser of the parameters of ``step``.
        scheduler: Learning-rate scheduler, stepped after every epoch.
        checkpoint: File of the checkpoint. If it exists, the training continues from it. It is written every
            ``checkpoint_every`` steps and at the end of every epoch. ``None`` writes no file.
        checkpoint_every: Number of training steps between two checkpoints.
        dict_key_y: Key of the labels in a batch that is a mapping.
        progress: Whether to show a progress bar.

    Attributes:
        steps: Training steps taken so far.

    Raises:
        InputError: ``checkpoint_every`` is not a positive whole number, the folder of ``checkpoint`` does not exist, or
            ``step`` has no parameters.
        InputTypeError: ``step`` or ``optimizer`` has a wrong type.
        UnsupportedError: The scheduler needs a validation loss.
    """

    def __init__(
        self,
        step: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        checkpoint: Path | str | None = None,
        checkpoint_every: int = 200,
        dict_key_y: str = "labels",
        progress: bool = False,
    ) -> None:
        for name, value, kind in (("step", step, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
            if not isinstance(value, kind):
                raise InputTypeError(expected(name, f"a torch {kind.__name__}", f"a {type(value).__name__}"))
        validate.count("checkpoint_every", checkpoint_every)
        validate.flag("progress", progress)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        if self.checkpoint is not None and not self.checkpoint.parent.is_dir():
            raise InputError(expected("checkpoint", "a file in a folder that exists", str(checkpoint)))
        if next(step.parameters(), None) is None:
            raise InputError(expected("step", "a module with parameters to train", "one without"))
        if isinstance(scheduler, ReduceLROnPlateau):
            msg = (
                "scheduler: ReduceLROnPlateau needs a validation loss, which this loop does not compute. Use another "
                "scheduler."
            )
            raise UnsupportedError(msg)
        self.step, self.optimizer, self.scheduler = step, optimizer, scheduler
        self.checkpoint_every, self.dict_key_y, self.progress = checkpoint_every, dict_key_y, progress
        self.steps = 0
        self._epoch = 0
        self._saved_step: int | None = None
        # Taken before the first step, to compare them with the settings of a resumed program.
        self._settings = _settings(step, optimizer, scheduler)
        # An attention mask may hold -inf.
        self._infinite = {name for name, buffer in step.named_buffers() if not bool(buffer.isfinite().all())}

    def fit(self, train_loader: Iterable[Any], epochs: int) -> None:
        """Train.

        Args:
            train_loader: Batches ``(x, targets)`` or mappings, iterated once per epoch. A training that was interrupted
                within an epoch iterates over the first batches of that epoch again, without training on them.
            epochs: Total number of epochs, including those before an interruption.

        Raises:
            InputError: The loader is empty or can be iterated only once; or the checkpoint is damaged, belongs to
                another or a longer training, is used by another training, or differs between the processes.
            UnsupportedError: The loader has persistent workers, and there is a checkpoint.
            DivergenceError: The loss, a parameter or another state is not finite. The last good checkpoint stays.
            OSError: The checkpoint cannot be written. The last one stays.
            ProcessError: One of these happened in another process of the training.
        """
        validate.count("epochs", epochs)
        check_loader(train_loader, shares=True)
        if self.checkpoint is not None and getattr(train_loader, "persistent_workers", False):
            msg = (
                "train_loader: persistent workers keep random states between epochs that a checkpoint cannot contain. "
                "Use persistent_workers=False, or checkpoint=None."
            )
            raise UnsupportedError(msg)
        processes, randomness, batches = Processes(self.step), Randomness(train_loader), _length(train_loader)
        same = {
            "checkpoint": "none" if self.checkpoint is None else "a file",
            "checkpoint_every": str(self.checkpoint_every),
            "epochs": str(epochs),
            "train_loader: number of batches": str(batches),
        }
        hint = "Use equal trainers in all processes, and loaders of equal length, as with DistributedSampler."
        check_agreed(processes, same, hint)
        settings = {
            "processes": str(processes.count),
            "train_loader: number of batches": str(batches),
            "train_loader: numbers of random generators and samplers": str(randomness.counts),
            **self._settings,
        }
        frame = {"settings": settings, "workers": getattr(train_loader, "num_workers", 0)}
        with contextlib.ExitStack() as stack:
            with processes.together():
                if self.checkpoint is not None and processes.rank == 0:
                    stack.enter_context(_locked(self.checkpoint))
            with processes.together():
                done, after_done = self._resume(frame, epochs, randomness, processes)
            self.step.train()
            total = None if batches is None else epochs * batches
            bar = stack.enter_context(
                tqdm(total=total, initial=self.steps, desc="[training]", unit="step", disable=not self.progress)
            )
            start = randomness.state()
            while self._epoch < epochs:
                randomness.begin_epoch(self._epoch)
                for count, batch in _unfinished(train_loader, done, after_done, randomness):
                    loss = self._train_on_batch(batch)
                    if self.steps % 20 == 0:
                        bar.set_postfix(epoch=f"{self._epoch + 1}/{epochs}", loss=f"{loss:.4f}", refresh=False)
                    bar.update()
                    # Not after the last batch, where the checkpoint of the epoch follows.
                    if self.steps % self.checkpoint_every == 0 and count != batches:
                        self._save({**frame, "batch": count}, start, randomness.state(), processes)
                if self.scheduler is not None:
                    self.scheduler.step()
                self._epoch, done = self._epoch + 1, 0
                start = randomness.state()
                self._save({**frame, "batch": 0}, start, start, processes)

    def _train_on_batch(self, batch: Any) -> float:
        batch, device = tokenized_batch(self.step, batch), next(self.step.parameters()).device
        # A step that knows what to do with two views is asked.
        join = getattr(getattr(self.step, "module", self.step), "join", None)
        if join is not None and has_views(batch):
            x, targets, pairs = join(batch, self.dict_key_y)
        else:
            x, targets = read_batch(batch, device, self.dict_key_y)
            pairs = None
        try:
            loss = self.step(x, targets) if pairs is None else self.step(x, targets, pairs=pairs)
        except DivergenceError as error:
            raise self._diverged(error.reason) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            received = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise InputTypeError(expected("step(x, targets)", "a loss, one number in a tensor", received))
        value = float(loss.detach())
        if not math.isfinite(value):
            msg = f"the loss is {value}."
            raise self._diverged(msg)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return value

    def _diverged(self, reason: str) -> DivergenceError:
        kept = ""
        if self._saved_step is not None:
            kept = f" The last good checkpoint, of step {self._saved_step}, is {self.checkpoint}."
        advice = " In a new training, a smaller learning rate or a larger batch usually helps."
        return DivergenceError(f"(epoch {self._epoch + 1}) {reason}{kept}{advice}", self.steps + 1)

    def _refuse_divergence(self) -> None:
        every: list[tuple[str, Any]] = []
        for name, parameter in self.step.named_parameters():
            every.append((f"parameter {name!r}", parameter))
        for name, buffer in self.step.named_buffers():
            if name not in self._infinite:
                every.append((f"buffer {name!r}", buffer))
        for entry in self.optimizer.state.values():
            for name, value in entry.items():
                every.append((f"{name!r} of the optimizer", value))
        for name, value in every:
            if isinstance(value, Tensor) and not bool(value.isfinite().all()):
                msg = f"{name} is not finite after the step before."
                raise self._diverged(msg)

    def _save(self, frame: dict[str, Any], start: Any, now: Any, processes: Processes) -> None:
        """Write a checkpoint, with the random states at the start of the epoch and now."""
        with processes.together():
            self._refuse_divergence()
            if self.checkpoint is None:
                return
            step, optimizer = self.step.state_dict(), self.optimizer.state_dict()
            own = {
                "start": start,
                "now": now,
                # Such as the statistics of a batch normalisation.
                "step": processes.differences(step),
                "optimizer": processes.differences({"optimizer": optimizer}),
            }
            content = {
                **frame,
                "epoch": self._epoch,
                "steps": self.steps,
                "step": step,
                "optimizer": optimizer,
                "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
                "processes": processes.gather_states(own),
            }
            if processes.rank == 0:
                save_checkpoint(self.checkpoint, content)
                if self._saved_step is None:
                    # A state of the user's that cannot be read back should not wait for the next start to say so.
                    load_checkpoint(self.checkpoint)
        self._saved_step = self.steps

    def _resume(
        self, frame: dict[str, Any], epochs: int, randomness: Randomness, processes: Processes
    ) -> tuple[int, Any]:
        """Continue from the checkpoint, if there is one.

        Return how many batches of the epoch are finished, and the random states after them.
        """
        content = None
        if self.checkpoint is not None and self.checkpoint.exists():
            content = self._read(self.checkpoint, frame, epochs)
        seen = "no file" if content is None else f"that of step {content['steps']}"
        check_agreed(processes, {"checkpoint": seen}, "It must be on a file system that all processes share.")
        if content is None:
            return 0, None
        own = content["processes"][processes.rank]
        # Not a new dictionary, which would have no attribute _metadata with the versions of the modules.
        content["step"].update(own["step"])
        self.step.load_state_dict(content["step"])
        self.optimizer.load_state_dict(own["optimizer"].get("optimizer", content["optimizer"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        randomness.restore(own["start"])
        self.steps = self._saved_step = content["steps"]
        self._epoch = content["epoch"]
        if self.progress and processes.rank == 0:
            tqdm.write(f"continuing from {self.checkpoint}, step {self.steps}")
        return content["batch"], own["now"]

    def _read(self, file: Path, frame: dict[str, Any], epochs: int) -> dict[str, Any]:
        """Return the content of the checkpoint, which is one of this training."""
        content = load_checkpoint(file)
        if "settings" not in content:
            raise InputError(expected(str(file), "a checkpoint of a Trainer", "other content", "Name another file."))
        before, present = content["settings"], frame["settings"]
        for name in before | present:
            was, now = before.get(name), present.get(name)
            if was != now:
                hint = f"A training must keep the settings it began with; remove {file}, or name another file, "
                raise InputError(expected(name, f"{was}, as before", str(now), f"{hint}to start anew."))
        started = content["epoch"] + (content["batch"] > 0)
        if started > epochs:
            hint = f"Remove {file} to start anew."
            raise InputError(expected("epochs", f"at least the {started} that the checkpoint has", epochs, hint))
        if content["workers"] != frame["workers"]:
            msg = (
                f"train_loader: num_workers was {content['workers']} and is {frame['workers']}. Data that draw random "
                "numbers, as augmentations do, will differ from those of a training without interruption."
            )
            warnings.warn(msg, UserWarning, stacklevel=4)
        return content


def _unfinished(loader: Iterable[Any], done: int, after_done: Any, randomness: Randomness) -> Iterator[tuple[int, Any]]:
    """Give the batches of an epoch after the first ``done`` ones, with their numbers, counted from one."""
    count = 0
    for count, batch in enumerate(loader, 1):
        if count > done:
            yield count, batch
        elif count == done:
            # Here, because skipping the finished batches has drawn their random numbers again.
            randomness.restore(after_done)
    if count < max(done, 1):
        wanted = f"at least {done} batches, as before" if done else "at least one batch"
        received = f"{count} batches" if done else "an empty loader"
        raise InputError(expected("train_loader", wanted, received))


def _settings(step: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """Describe what must be the same when a training is resumed."""
    settings = {"optimizer": type(optimizer).__name__, "scheduler": type(scheduler).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                settings[f"optimizer: group {number}: {name}"] = described(value)
    if scheduler is not None:
        for name, value in scheduler.state_dict().items():
            settings[f"scheduler: {name}"] = described(value)
    for number, line in enumerate(repr_without_addresses(step).splitlines(), 1):
        settings[f"step, line {number} of its modules"] = line
    for module in step.modules():
        if isinstance(module, OnlineLaplace):
            settings |= {f"step: {name}": value for name, value in module.options.items()}
    return settings


def _locked(checkpoint: Path) -> AbstractContextManager[Any]:
    """Prevent other trainings from using a checkpoint; the system frees the lock when this process ends."""
    target = final_target(checkpoint)
    try:
        return FileLock(target.parent / f".{target.name}.lock").acquire(timeout=0)
    except Timeout:
        hint = "Wait until that training has ended, or use another checkpoint for each training and each process."
        received = f"{checkpoint}, which another training is using"
        raise InputError(expected("checkpoint", "a file that no other training uses", received, hint)) from None


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # torch's DataLoader always has __len__, which raises if its data set has no length
        return None
