"""A training loop that goes on where it was interrupted, with the same result as if it had not been."""

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

from contrastive_curvature.arguments import check_count, check_flag
from contrastive_curvature.errors import DivergenceError, InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.network.loader import check_loader, read_batch
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

    A training that was killed and is started again by the same program goes on from its last checkpoint. On a CPU the
    result is the same to the last bit, the order of the data and the sampled weights included; data that augmentations
    change must draw their randomness from torch, NumPy or Python, and what the step remembers outside its
    ``state_dict`` is not saved. One file is one training: the seed is the checkpoint's, whatever the program's is.
    Optimiser, scheduler and modules that are made with other settings are refused, and so is a file whose content no
    training can have left; a refused file changes nothing.

    Processes that share a training (``torch.distributed`` with a ``DistributedDataParallel`` or an ``OnlineLaplace`` in
    the step) share the file: rank 0 writes what all need, and each goes on with its own random numbers. They must be as
    many as before, and see the same file. Any other training that uses a file at the same time is refused.

    Args:
        step: ``step(x, targets)`` returns the loss of a batch, with its graph.
        optimizer: Of its parameters.
        scheduler: Stepped after every epoch.
        checkpoint: File to go on from if it is there, written every ``checkpoint_every`` steps and at every epoch's
            end; ``None`` keeps none.
        checkpoint_every: Training steps between two checkpoints.
        dict_key_y: Where a batch that is a mapping keeps its labels.
        progress: Whether to show a progress bar.

    Attributes:
        steps: Training steps taken so far.

    Raises:
        InputError: ``checkpoint_every`` is no positive number, or the folder of ``checkpoint`` does not exist.
        InputTypeError: ``step`` is no module.
        UnsupportedError: The scheduler waits for a validation loss.
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
        check_count("checkpoint_every", checkpoint_every)
        check_types(step, optimizer, checkpoint, dict_key_y)
        check_flag("progress", progress)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        if self.checkpoint is not None and not self.checkpoint.parent.is_dir():
            raise InputError(expected("checkpoint", "a file in a folder that exists", str(checkpoint)))
        if next(step.parameters(), None) is None:
            raise InputError(expected("step", "a module with parameters to train", "one without"))
        if isinstance(scheduler, ReduceLROnPlateau):
            msg = (
                "scheduler: ReduceLROnPlateau needs a validation loss, which this loop has not. Use another scheduler."
            )
            raise UnsupportedError(msg)
        self.step, self.optimizer, self.scheduler = step, optimizer, scheduler
        self.checkpoint_every, self.dict_key_y, self.progress = checkpoint_every, dict_key_y, progress
        self.steps = 0
        self._epoch = 0
        self._saved: int | None = None
        self._workers = 0
        # As they are before the first step: what a resumed program must have made them with again.
        self._made_with = settings_of(step, optimizer, scheduler)

    def fit(self, train_loader: Iterable[Any], epochs: int) -> None:
        """Train.

        Args:
            train_loader: Batches ``(x, targets)`` or mappings; iterated once an epoch, and after an interruption in the
                middle of one, that epoch's first batches once more.
            epochs: Passes over the loader, those of an earlier, interrupted training counted in.

        Raises:
            InputError: The loader is empty or can run only once; or the checkpoint is damaged, belongs to another or a
                longer training, is in use, or is not the same in all processes that share it.
            UnsupportedError: Persistent workers, with a checkpoint.
            DivergenceError: The loss, or what a checkpoint would hold, is not finite. The last good checkpoint stays.
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
        check_count("epochs", epochs)
        check_loader(train_loader)
        if self.checkpoint is None:
            return
        if getattr(train_loader, "persistent_workers", False):
            msg = (
                "train_loader: persistent workers keep random numbers from epoch to epoch that no checkpoint can hold. "
                "Use persistent_workers=False, or checkpoint=None."
            )
            raise UnsupportedError(msg)
        if processes.rank == 0:
            stack.enter_context(lock_checkpoint(self.checkpoint))

    def _refuse_disagreement(self, processes: Processes, epochs: int, batches: int | None) -> None:
        hint = "Pass the same in all of them; the one of rank 0 writes for all."
        processes.require_same("checkpoint", "none" if self.checkpoint is None else "a file", hint)
        hint = "Make the trainers alike, and their loaders equally long, as DistributedSampler does."
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
                            # Only now: the batches up to here drew their numbers once more, to be passed over.
                            restore_random_state(state["now"], generators)
                        continue
                    loss = self._one(batch, epoch)
                    if self.steps % 20 == 0 and self.progress:
                        bar.set_postfix(epoch=f"{epoch + 1}/{epochs}", loss=f"{loss:.4f}", refresh=False)
                    bar.update()
                    # After the last batch follows the checkpoint of the epoch.
                    if self.steps % self.checkpoint_every == 0 and (batches is None or count < batches):
                        self._save(epoch, count, batches, start, generators, processes)
                if not count:
                    raise InputError(expected("train_loader", "at least one batch", "an empty loader"))
                if count < done:
                    came = f"{count} batches"
                    raise InputError(expected("train_loader", f"at least {done} batches, as before", came))
                if self.scheduler is not None:
                    self.scheduler.step()
                self._epoch = epoch = epoch + 1
                done = 0
                start = {**random_state(generators), "samplers": changed_state(unused, sampler_state(train_loader))}
                self._save(epoch, 0, batches, start, generators, processes)

    def _one(self, batch: Any, epoch: int) -> float:
        device = next(self.step.parameters()).device
        x, targets = read_batch(batch, device, self.dict_key_y)
        try:
            loss = self.step(x, targets)
        except DivergenceError as error:
            raise self._diverged(error.reason, epoch) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise InputTypeError(expected("step(x, targets)", "a loss, one number in a tensor", came))
        value = float(loss.detach())
        if not math.isfinite(value):
            msg = f"the loss is {value}."
            raise self._diverged(msg, epoch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return value

    def _diverged(self, why: str, epoch: int) -> DivergenceError:
        kept = "" if self._saved is None else f" The last good checkpoint, of step {self._saved}, is {self.checkpoint}."
        advice = " In a training started anew, a smaller learning rate or a larger batch usually helps."
        return DivergenceError(f"(epoch {epoch + 1}) {why}{kept}{advice}", self.steps + 1)

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
        mine = {
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
            "made_with": self._made_with,
            "steps": self.steps,
            "epoch": epoch,
            "batch": batch,
            "batches": batches,
            "workers": self._workers,
            "processes": processes.gather_plain(mine),
        }
        file = self.checkpoint
        processes.run_in_all(lambda: save_checkpoint(file, content) if processes.rank == 0 else None)
        self._saved = self.steps

    def _refuse_divergence(self, epoch: int) -> None:
        bad = [name for name, p in self.step.named_parameters() if not bool(p.isfinite().all())]
        if bad:
            msg = f"parameter {bad[0]!r} is not finite after the step before."
            raise self._diverged(msg, epoch)
        if self.checkpoint is None:
            return
        try:
            # What would be refused when it is read again is not written.
            check_module(self.step, self.step.state_dict(), "step")
            optimizer = self.optimizer.state_dict()
            check_optimizer(self.optimizer, optimizer, "optimizer", self.scheduler, rehearse=False)
        except (Flaw, InputError) as flaw:
            msg = f"{str(flaw).rstrip('.')}, after the step before."
            raise self._diverged(msg, epoch) from None

    def _resume(
        self, loader: Iterable[Any], epochs: int, batches: int | None, processes: Processes
    ) -> tuple[int, int, dict[str, Any] | None]:
        """Epoch, finished batches of it, and states of the random numbers; from the checkpoint if there is one."""
        found = processes.run_in_all(lambda: self._found(loader, epochs, batches, processes))
        if processes.count > 1 and self.checkpoint is not None:
            seen = "no file" if found is None else f"that of step {found[0]['steps']} ({checksum(found[0])[:6]})"
            hint = "It must be on a file system that all processes share, under the same name."
            processes.require_same(str(self.checkpoint), seen, hint)
        if found is None:
            return self._epoch, 0, None
        content, states = found
        processes.run_in_all(lambda: self._restore(states, loader))
        self.steps = self._saved = content["steps"]
        self._epoch = content["epoch"]
        if self.progress and processes.rank == 0:
            tqdm.write(f"going on from {self.checkpoint}, step {self.steps}")
        return content["epoch"], content["batch"], states["random"]

    def _found(
        self, loader: Iterable[Any], epochs: int, batches: int | None, processes: Processes
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The checkpoint, and the states of this process in it, after all that could be wrong with them."""
        file = self.checkpoint
        if file is None or not file.exists():
            return None
        content = load_checkpoint(file)
        check_frame(content, file)
        anew = f"remove {file} to start anew."
        was = len(content["processes"])
        if was != processes.count:
            hint = f"Start as many as before, or {anew}"
            raise InputError(expected("processes", f"{was} that share the training", f"{processes.count}", hint))
        if content["batches"] != batches:
            hint = f"Train with the same data and batch size, or {anew}"
            raise InputError(expected("train_loader", f"{content['batches']} batches, as before", f"{batches}", hint))
        states = states_of_process(content, processes.rank)
        held = [len(states["random"]["epoch_start"][name]) for name in ("loader", "samplers")]
        parts = [len(loader_generators(loader)), len(sampler_state(loader))]
        if held != parts:
            wanted, came = (f"{pair[0]} random generators and {pair[1]} samplers" for pair in (held, parts))
            hint = f"Train with the same kind of loader, or {anew}"
            raise InputError(expected("train_loader", f"{wanted}, as before", came, hint))
        began = f"A training goes on as it began; remove {file}, or name another file, to start anew."
        refuse_changes(content["made_with"], self._made_with, began)
        begun = content["epoch"] + (content["batch"] > 0)
        if begun > epochs:
            hint = f"R{anew[1:]}"
            raise InputError(expected("epochs", f"at least the {begun} that the checkpoint has", epochs, hint))
        try:
            check_states(states, self.step, self.optimizer, self.scheduler, loader)
        except Flaw as flaw:
            raise refused(file, flaw) from None
        except InputError as error:
            msg = f"step: {error} {began}"
            raise InputError(msg) from None
        if content["workers"] != self._workers:
            msg = (
                f"train_loader: num_workers was {content['workers']} and is {self._workers}. Data that draw random "
                "numbers, as augmentations do, come out otherwise than in a training that was not interrupted."
            )
            warnings.warn(msg, UserWarning, stacklevel=7)
        return content, states

    def _restore(self, states: dict[str, Any], loader: Iterable[Any]) -> None:
        try:
            restore(states, self.step, self.optimizer, self.scheduler, loader)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            came = f"one that does not fit ({' '.join(str(error).split())[:300]})"
            wanted, hint = "a checkpoint of this training", "Remove it to start anew."
            raise InputError(expected(str(self.checkpoint), wanted, came, hint)) from None


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # torch's DataLoader has a length in name only where its data set has none
        return None
