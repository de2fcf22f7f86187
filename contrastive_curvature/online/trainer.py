"""A training loop that continues after an interruption, with the same result as without the interruption."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from contrastive_curvature import validate
from contrastive_curvature.errors import DivergenceError, InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.network.inputs import tokenized_batch
from contrastive_curvature.network.loader import check_loader, has_views, read_batch
from contrastive_curvature.online.checkpoint import load_checkpoint, save_checkpoint
from contrastive_curvature.online.content import check_frame, check_states, refused, restore, states_of_process
from contrastive_curvature.online.lock import lock_checkpoint
from contrastive_curvature.online.plain import checksum
from contrastive_curvature.online.processes import Processes
from contrastive_curvature.online.randomness import (
    begin_epoch,
    changed_state,
    loader_generators,
    random_state,
    restore_random_state,
    sampler_state,
)
from contrastive_curvature.online.schema import Flaw
from contrastive_curvature.online.settings import check_types, refuse_changes, settings_of
from contrastive_curvature.online.states import check_module, check_optimizer

__all__ = ["Trainer"]


class Trainer:
    """Trains any module that returns the loss of a batch, such as :class:`OnlineLaplace`.

    If a training is killed and the same program starts it again, it continues from its last checkpoint. On a CPU the
    result is the same to the last bit, including the order of the data and the sampled weights. For this, random
    augmentations must use the generators of torch, NumPy or Python, and the step must keep its whole state in its
    ``state_dict``. One file belongs to one training: the random seed comes from the checkpoint and not from the
    program. A checkpoint is refused if optimiser, scheduler or modules have other settings now, or if no training can
    have produced its content. A refused checkpoint changes nothing.

    Processes that share a training (``torch.distributed`` with a ``DistributedDataParallel`` or an ``OnlineLaplace`` in
    the step) share the file: rank 0 writes the states of all processes, and each process restores its own random
    generators. The number of processes must be the same as before, and all must see the same file. A second training
    that uses the file at the same time is refused.

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
        InputTypeError: An argument has a wrong type.
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
        validate.count("checkpoint_every", checkpoint_every)
        check_types(step, optimizer, checkpoint, dict_key_y)
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
        self._workers = 0
        # Taken before the first step, to compare them with the settings of a resumed program.
        self._settings = settings_of(step, optimizer, scheduler)

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
            DivergenceError: The loss or a state is not finite. The last good checkpoint stays.
            OSError: The checkpoint cannot be written. The last one stays.
        """
        processes = Processes(self.step)
        with contextlib.ExitStack() as stack:
            processes.run_in_all(lambda: self._begin(train_loader, epochs, processes, stack))
            batches = _length(train_loader)
            self._refuse_disagreement(processes, epochs, batches)
            self._run(train_loader, epochs, batches, processes)

    def _begin(
        self, train_loader: Iterable[Any], epochs: int, processes: Processes, stack: contextlib.ExitStack
    ) -> None:
        validate.count("epochs", epochs)
        check_loader(train_loader, shares=True)
        if self.checkpoint is None:
            return
        if getattr(train_loader, "persistent_workers", False):
            msg = (
                "train_loader: persistent workers keep random states between epochs that a checkpoint cannot contain. "
                "Use persistent_workers=False, or checkpoint=None."
            )
            raise UnsupportedError(msg)
        if processes.rank == 0:
            stack.enter_context(lock_checkpoint(self.checkpoint))

    def _refuse_disagreement(self, processes: Processes, epochs: int, batches: int | None) -> None:
        hint = "Pass the same value in all processes; rank 0 writes the file for all."
        processes.require_same("checkpoint", "none" if self.checkpoint is None else "a file", hint)
        hint = "Use equal trainers in all processes, and loaders of equal length, as with DistributedSampler."
        processes.require_same("checkpoint_every", self.checkpoint_every, hint)
        processes.require_same("epochs", epochs, hint)
        processes.require_same("train_loader: number of batches", batches, hint)

    def _run(self, train_loader: Iterable[Any], epochs: int, batches: int | None, processes: Processes) -> None:
        generators, unused = loader_generators(train_loader), sampler_state(train_loader)
        self._workers = getattr(train_loader, "num_workers", 0)
        epoch, done, state = self._resume(train_loader, epochs, batches, processes)
        self.step.train()
        with tqdm(
            total=None if batches is None else epochs * batches,
            initial=self.steps,
            desc="[training]",
            unit="step",
            mininterval=0.5,
            disable=not self.progress,
        ) as bar:
            while epoch < epochs:
                begin_epoch(train_loader, epoch)
                start = {**random_state(generators), "samplers": changed_state(unused, sampler_state(train_loader))}
                count = 0
                for batch in train_loader:
                    count += 1
                    if count <= done:
                        if count == done and state is not None:
                            # Restored here, because skipping the finished batches has drawn their random numbers again.
                            restore_random_state(state["now"], generators)
                        continue
                    loss = self._train_on_batch(batch, epoch)
                    if self.steps % 20 == 0 and self.progress:
                        bar.set_postfix(epoch=f"{epoch + 1}/{epochs}", loss=f"{loss:.4f}", refresh=False)
                    bar.update()
                    # Not after the last batch, where the checkpoint of the epoch follows.
                    if self.steps % self.checkpoint_every == 0 and (batches is None or count < batches):
                        self._save(epoch, count, batches, start, generators, processes)
                if not count:
                    raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
                if count < done:
                    received = f"{count} batches"
                    raise InputError(expected("train_loader", f"at least {done} batches, as before", received))
                if self.scheduler is not None:
                    self.scheduler.step()
                self._epoch = epoch = epoch + 1
                done = 0
                start = {**random_state(generators), "samplers": changed_state(unused, sampler_state(train_loader))}
                self._save(epoch, 0, batches, start, generators, processes)

    def _read(self, batch: Any, device: torch.device) -> tuple[Any, Any, Any]:
        """Inputs, targets and pairs; a step that knows what to do with two views is asked."""
        batch = tokenized_batch(self.step, batch)
        join = getattr(getattr(self.step, "module", self.step), "join", None)
        if join is not None and has_views(batch):
            return join(batch, self.dict_key_y)
        return *read_batch(batch, device, self.dict_key_y), None

    def _train_on_batch(self, batch: Any, epoch: int) -> float:
        device = next(self.step.parameters()).device
        x, targets, pairs = self._read(batch, device)
        try:
            loss = self.step(x, targets) if pairs is None else self.step(x, targets, pairs=pairs)
        except DivergenceError as error:
            raise self._diverged(error.reason, epoch) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            received = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise InputTypeError(expected("step(x, targets)", "a loss, one number in a tensor", received))
        value = float(loss.detach())
        if not math.isfinite(value):
            msg = f"the loss is {value}."
            raise self._diverged(msg, epoch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return value

    def _diverged(self, reason: str, epoch: int) -> DivergenceError:
        kept = (
            ""
            if self._saved_step is None
            else f" The last good checkpoint, of step {self._saved_step}, is {self.checkpoint}."
        )
        advice = " In a new training, a smaller learning rate or a larger batch usually helps."
        return DivergenceError(f"(epoch {epoch + 1}) {reason}{kept}{advice}", self.steps + 1)

    def _save(
        self,
        epoch: int,
        batch: int,
        batches: int | None,
        start: dict[str, Any],
        generators: list[torch.Generator],
        processes: Processes,
    ) -> None:
        processes.run_in_all(lambda: self._refuse_divergence(epoch))
        if self.checkpoint is None:
            return
        step, optimizer = self.step.state_dict(), self.optimizer.state_dict()
        own = {
            "epoch_start": start,
            "now": random_state(generators),
            "stateful": list(optimizer["state"]),
            "step": processes.differences(step),
            "optimizer": processes.differences({"optimizer": optimizer}).get("optimizer"),
        }
        content = {
            "step": step,
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "made_with": self._settings,
            "steps": self.steps,
            "epoch": epoch,
            "batch": batch,
            "batches": batches,
            "workers": self._workers,
            "processes": processes.gather_plain(own),
        }
        file = self.checkpoint
        processes.run_in_all(lambda: save_checkpoint(file, content) if processes.rank == 0 else None)
        self._saved_step = self.steps

    def _refuse_divergence(self, epoch: int) -> None:
        bad = [name for name, p in self.step.named_parameters() if not bool(p.isfinite().all())]
        if bad:
            msg = f"parameter {bad[0]!r} is not finite after the step before."
            raise self._diverged(msg, epoch)
        if self.checkpoint is None:
            return
        try:
            # The same checks as at loading, so that no checkpoint is written that would be refused later.
            check_module(self.step, self.step.state_dict(), "step")
            optimizer = self.optimizer.state_dict()
            check_optimizer(self.optimizer, optimizer, "optimizer", self.scheduler, rehearse=False)
        except (Flaw, InputError) as flaw:
            msg = f"{str(flaw).rstrip('.')}, after the step before."
            raise self._diverged(msg, epoch) from None

    def _resume(
        self, loader: Iterable[Any], epochs: int, batches: int | None, processes: Processes
    ) -> tuple[int, int, dict[str, Any] | None]:
        """The epoch, the number of its finished batches, and the random states; from the checkpoint if it exists."""
        loaded = processes.run_in_all(lambda: self._load(loader, epochs, batches, processes))
        if processes.count > 1 and self.checkpoint is not None:
            seen = "no file" if loaded is None else f"that of step {loaded[0]['steps']} ({checksum(loaded[0])[:6]})"
            hint = "It must be on a file system that all processes share, under the same name."
            processes.require_same(str(self.checkpoint), seen, hint)
        if loaded is None:
            return self._epoch, 0, None
        content, states = loaded
        processes.run_in_all(lambda: self._restore(states, loader))
        self.steps = self._saved_step = content["steps"]
        self._epoch = content["epoch"]
        if self.progress and processes.rank == 0:
            tqdm.write(f"continuing from {self.checkpoint}, step {self.steps}")
        return content["epoch"], content["batch"], states["random"]

    def _load(
        self, loader: Iterable[Any], epochs: int, batches: int | None, processes: Processes
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Read the checkpoint, and check it completely; returns its content and the states for this process."""
        file = self.checkpoint
        if file is None or not file.exists():
            return None
        content = load_checkpoint(file)
        check_frame(content, file)
        anew = f"remove {file} to start anew."
        before = len(content["processes"])
        if before != processes.count:
            hint = f"Start as many as before, or {anew}"
            raise InputError(expected("processes", f"{before} that share the training", f"{processes.count}", hint))
        if content["batches"] != batches:
            hint = f"Train with the same data and batch size, or {anew}"
            raise InputError(expected("train_loader", f"{content['batches']} batches, as before", f"{batches}", hint))
        states = states_of_process(content, processes.rank)
        saved = [len(states["random"]["epoch_start"][name]) for name in ("loader", "samplers")]
        present = [len(loader_generators(loader)), len(sampler_state(loader))]
        if saved != present:
            wanted, received = (f"{pair[0]} random generators and {pair[1]} samplers" for pair in (saved, present))
            hint = f"Train with the same kind of loader, or {anew}"
            raise InputError(expected("train_loader", f"{wanted}, as before", received, hint))
        unchanged = (
            f"A training must keep the settings it began with; remove {file}, or name another file, to start anew."
        )
        refuse_changes(content["made_with"], self._settings, unchanged)
        started = content["epoch"] + (content["batch"] > 0)
        if started > epochs:
            hint = f"R{anew[1:]}"
            raise InputError(expected("epochs", f"at least the {started} that the checkpoint has", epochs, hint))
        try:
            check_states(states, self.step, self.optimizer, self.scheduler, loader)
        except Flaw as flaw:
            raise refused(file, flaw) from None
        except InputError as error:
            msg = f"step: {error} {unchanged}"
            raise InputError(msg) from None
        if content["workers"] != self._workers:
            msg = (
                f"train_loader: num_workers was {content['workers']} and is {self._workers}. Data that draw random "
                "numbers, as augmentations do, will differ from those of a training without interruption."
            )
            warnings.warn(msg, UserWarning, stacklevel=7)
        return content, states

    def _restore(self, states: dict[str, Any], loader: Iterable[Any]) -> None:
        try:
            restore(states, self.step, self.optimizer, self.scheduler, loader)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            received = f"one that does not fit ({' '.join(str(error).split())[:300]})"
            wanted, hint = "a checkpoint of this training", "Remove it to start anew."
            raise InputError(expected(str(self.checkpoint), wanted, received, hint)) from None


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # torch's DataLoader always has __len__, which raises if its data set has no length
        return None
