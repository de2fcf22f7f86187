"""A training loop that goes on where it was interrupted, with the same result as if it had not been."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from contrastive_curvature.backends.checks import check_loader, read_batch
from contrastive_curvature.errors import DivergenceError, InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.online.checkpoint import load_checkpoint, save_checkpoint
from contrastive_curvature.online.randomness import (
    changed_state,
    loader_generators,
    random_state,
    restore_random_state,
    restore_sampler_state,
    sampler_state,
)

__all__ = ["Trainer"]


class Trainer:
    """Trains any module that returns the loss of a batch, such as :class:`OnlineLaplace`.

    A training that was killed and is started again by the same program goes on from its last checkpoint. On a CPU the
    result is the same to the last bit, the order of the data and the sampled weights included; data that augmentations
    change must draw their randomness from torch, NumPy or Python, and what the step remembers outside its
    ``state_dict`` is not saved. One file is one training: the seed is the checkpoint's, whatever the program's is.
    Optimiser, scheduler and modules that are made with other settings are refused.

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
        if not isinstance(step, nn.Module):
            raise InputTypeError(expected("step", "a torch.nn.Module that returns a loss", f"a {type(step).__name__}"))
        _check_count("checkpoint_every", checkpoint_every)
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
        self._made_with: dict[str, Any] = {
            "optimizer": _plain_groups(optimizer),
            "scheduler": _plain_state(scheduler),
            "step": repr(step),
        }

    def fit(self, train_loader: Iterable[Any], epochs: int) -> None:
        """Train.

        Args:
            train_loader: Batches ``(x, targets)`` or mappings; iterated once an epoch, and after an interruption in the
                middle of one, that epoch's first batches once more.
            epochs: Passes over the loader, those of an earlier, interrupted training counted in.

        Raises:
            InputError: The loader is empty or can run only once, or the checkpoint belongs to another or a longer
                training.
            UnsupportedError: Persistent workers, with a checkpoint.
            DivergenceError: The loss is not a finite number. The last good checkpoint stays.
        """
        _check_count("epochs", epochs)
        check_loader(train_loader)
        if self.checkpoint is not None and getattr(train_loader, "persistent_workers", False):
            msg = (
                "train_loader: persistent workers keep random numbers from epoch to epoch that no checkpoint can hold. "
                "Use persistent_workers=False, or checkpoint=None."
            )
            raise UnsupportedError(msg)
        generators, unused = loader_generators(train_loader), sampler_state(train_loader)
        batches = _length(train_loader)
        self._workers = getattr(train_loader, "num_workers", 0)
        epoch, done, state = self._resume(batches, [len(generators), len(unused)])
        if epoch > epochs:
            hint = f"Remove {self.checkpoint} to start anew."
            raise InputError(expected("epochs", f"at least the {epoch} that the checkpoint has", epochs, hint))
        if state is not None:
            restore_random_state(state["epoch_start"], generators)
            restore_sampler_state(train_loader, state["epoch_start"]["samplers"])
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
                    if self.steps % self.checkpoint_every == 0 and count != batches:
                        self._save(epoch, count, batches, start, generators)
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
                self._save(epoch, 0, batches, start, generators)

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
    ) -> None:
        bad = [name for name, p in self.step.named_parameters() if not bool(p.isfinite().all())]
        if bad:
            msg = f"parameter {bad[0]!r} is not finite after the step before."
            raise self._diverged(msg, epoch)
        if self.checkpoint is None:
            return
        content = {
            "step": self.step.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "kinds": self._kinds(),
            "made_with": self._made_with,
            "steps": self.steps,
            "epoch": epoch,
            "batch": batch,
            "batches": batches,
            "workers": self._workers,
            "random": {"epoch_start": start, "now": random_state(generators)},
        }
        save_checkpoint(self.checkpoint, content)
        self._saved = self.steps

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        hint = self._as_it_began()
        for part in ("optimizer", "scheduler"):
            was, now = before[part], self._made_with[part]
            differ = sorted(name for name in was | now if was.get(name) != now.get(name))
            if differ:
                wanted, came = (", ".join(f"{name} = {given.get(name)}" for name in differ) for given in (was, now))
                raise InputError(expected(part, f"{wanted}, as before", came, hint))
        was, now = (given["step"].splitlines() for given in (before, self._made_with))
        if was != now:
            wanted, came = next((a, b) for a, b in zip_longest(was, now, fillvalue="nothing") if a != b)
            raise InputError(expected("step", f"the modules as before: {wanted.strip()}", came.strip(), hint))

    def _as_it_began(self) -> str:
        return f"A training goes on as it began; remove {self.checkpoint}, or name another file, to start anew."

    def _kinds(self) -> list[str]:
        return [type(part).__name__ for part in (self.optimizer, self.scheduler)]

    def _resume(self, batches: int | None, parts: list[int]) -> tuple[int, int, dict[str, Any] | None]:
        """Epoch, finished batches of it, and states of the random numbers; from the checkpoint if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return self._epoch, 0, None
        content = load_checkpoint(self.checkpoint)
        if "made_with" not in content:
            hint = "Remove it, or name another file."
            raise InputError(expected(str(self.checkpoint), "a checkpoint of a Trainer", "other content", hint))
        if content["batches"] != batches:
            hint = f"Train with the same data and batch size, or remove {self.checkpoint} to start anew."
            raise InputError(expected("train_loader", f"{content['batches']} batches, as before", f"{batches}", hint))
        held = [len(content["random"]["epoch_start"][name]) for name in ("loader", "samplers")]
        if held != parts:
            wanted, came = (f"{pair[0]} random generators and {pair[1]} samplers" for pair in (held, parts))
            raise InputError(expected("train_loader", f"{wanted}, as before", came))
        for name, was, now in zip(("optimizer", "scheduler"), content["kinds"], self._kinds(), strict=True):
            if was != now:
                raise InputError(expected(name, f"{was}, as before", now, f"Or remove {self.checkpoint}."))
        self._refuse_changes(content["made_with"])
        if content["workers"] != self._workers:
            msg = (
                f"train_loader: num_workers was {content['workers']} and is {self._workers}. Data that draw random "
                "numbers, as augmentations do, come out otherwise than in a training that was not interrupted."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)
        try:
            self.step.load_state_dict(content["step"])
            self.optimizer.load_state_dict(content["optimizer"])
        except InputError as error:
            msg = f"step: {error} {self._as_it_began()}"
            raise InputError(msg) from None
        except (RuntimeError, ValueError, KeyError) as error:
            came = f"one that does not fit ({' '.join(str(error).split())[:300]})"
            hint = "Remove it to start anew."
            raise InputError(expected(str(self.checkpoint), "a checkpoint of this training", came, hint)) from None
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        self.steps = self._saved = content["steps"]
        self._epoch = content["epoch"]
        if self.progress:
            tqdm.write(f"going on from {self.checkpoint}, step {self.steps}")
        return content["epoch"], content["batch"], content["random"]


def _plain_groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Learning rates and the like of every group of parameters."""
    return {
        f"group {number}: {name}": _plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _plain_state(scheduler: Any) -> dict[str, Any]:
    return {} if scheduler is None else {name: _plain(value) for name, value in scheduler.state_dict().items()}


def _plain(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bool, int, float, type(None))) else repr(type(value).__name__)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # torch's DataLoader has a length in name only where its data set has none
        return None


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(expected(name, "a positive whole number", value))
