"""Content behind a right header and a right checksum: refused as a whole, or trained with to the same bits."""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from online_training import Interrupted, Interrupting, make_training, states
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import contrastive_curvature as cc
from contrastive_curvature.online import OnlineLaplace, Trainer, load_checkpoint, save_checkpoint
from contrastive_curvature.online.plain import checksum
from contrastive_curvature.online.randomness import random_state
from contrastive_curvature.online.rehearsal import state_after_step

EPOCHS = 3
_BASE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real checkpoint from the middle of a training, and how that training ends."""
    if not _BASE:
        file = tmp_path_factory.mktemp("base") / "run.pt"
        trainer, loader = make_training("generator", file, 3)
        with pytest.raises(Interrupted):
            trainer.fit(Interrupting(loader, 9), EPOCHS)
        _BASE["content"] = load_checkpoint(file)
        assert _BASE["content"]["batch"] == 2
        trainer, loader = make_training("generator", file, 3)
        trainer.fit(loader, EPOCHS)
        _BASE["end"] = states(trainer)
    return _BASE


def everything(trainer: Trainer, loader: Any) -> str:
    """One string for all that a failed resume must leave as it is."""
    parts = {
        "step": trainer.step.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "random": random_state([loader.generator]),
        "steps": trainer.steps,
    }
    return checksum(parts)


def resume(content: dict[str, Any], file: Path) -> list[Any] | cc.InputError:
    """Save the content with a right header, and go on from it; after an error nothing may have changed."""
    save_checkpoint(file, content)
    trainer, loader = make_training("generator", file, 3)
    before = everything(trainer, loader)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "train_loader: num_workers was")
            trainer.fit(loader, EPOCHS)
    except cc.InputError as error:
        assert everything(trainer, loader) == before
        return error
    return states(trainer)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every part of content; of long lists the first and the last."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for place in sorted({*range(min(len(value), 6)), len(value) - 1} if value else set()):
            found += paths(value[place], (*path, place))
    return found


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def changed(content: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy with another value at the path, or, for a change that gives ``DROP``, without it."""
    if not path:
        return change(content)
    key, *rest = path
    inner = changed(content[key], tuple(rest), change)
    if isinstance(content, dict):
        # Copied as it is, with the versions of the modules that a state_dict carries.
        other = copy.copy(content)
        if inner is DROP:
            del other[key]
        else:
            other[key] = inner
        return other
    items = list(content)
    items[key : key + 1] = [] if inner is DROP else [inner]
    return type(content)(items)


DROP = object()


def mutations(value: Any) -> dict[str, Any]:
    """Changes of one value that a training cannot have made."""
    found: dict[str, Any] = {"drop": lambda _: DROP}
    for name, other in (("text", "x"), ("list", []), ("dict", {}), ("true", True), ("tensor", torch.ones(1))):
        if type(other) is not type(value) or (isinstance(value, str) and value != other):
            found[name] = lambda _, other=other: other
    if value is not None:
        found["nothing"] = lambda _: None
    if isinstance(value, dict):
        found["more"] = lambda v: type(v)({**v, "more": 1})
    if isinstance(value, (list, tuple)):
        found["longer"] = lambda v: type(v)([*v, 1])
    if type(value) is int:
        found["negative"] = lambda v: -1 - v
        found["huge"] = lambda _: 2**70
    if type(value) is float and value > 0:
        found["nan"], found["inf"], found["negative"] = (lambda _, x=x: x for x in (NAN, float("inf"), -1.0))
    if isinstance(value, Tensor):
        found["shape"] = lambda v: v.unsqueeze(0)
        found["claim"] = lambda v: torch.zeros(1, dtype=v.dtype).expand(5000)
        found["kind"] = lambda v: v.double() if v.dtype != torch.float64 else v.float()
        if value.is_floating_point() and value.numel():
            found["nan"] = lambda v: v.clone().index_fill_(0, torch.tensor([0]), NAN) if v.dim() else v * NAN
    return found


NAN = float("nan")


@given(data=st.data())
def test_every_change_is_refused_or_without_effect(
    data: st.DataObject, base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "changed.pt"
    content = base["content"]
    path = data.draw(st.sampled_from(paths(content)))
    options = mutations(at(content, path))
    name = data.draw(st.sampled_from(sorted(options)))
    found = resume(changed(content, path, options[name]), file)
    if isinstance(found, cc.InputError):
        # The file, or the argument that does not fit to it.
        assert str(file) in str(found)
    else:
        assert found == base["end"]


def test_the_unchanged_content_goes_on(base: dict[str, Any], tmp_path: Path) -> None:
    assert resume(base["content"], tmp_path / "run.pt") == base["end"]


CHANGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("steps",), -3, r"content\['steps'\]: expected a whole number of at least 0, got '-3', a int"),
    (("epoch",), True, r"content\['epoch'\]: expected a whole number of at least 0, got 'True', a bool"),
    (("batch",), 4, r"content\['batch'\]: expected a whole number from 0 to 3"),
    (("batches",), DROP, r"content\['batches'\]: expected an entry of that name, got none"),
    (("processes",), [], r"content\['processes'\]: expected one entry or more"),
    (("processes", 0, "now", "torch"), torch.zeros(5056), r"\['torch'\]: expected a tensor \(5056,\) of torch\.uint8"),
    (
        ("processes", 0, "now", "torch"),
        torch.zeros(5056, dtype=torch.uint8),
        r"\['torch'\]: .*a state of the generator",
    ),
    (("processes", 0, "now", "numpy", 2), 625, r"\['numpy'\]\[2\]: expected a whole number from 0 to 624"),
    (("processes", 0, "now", "numpy", 1), torch.full((624,), 2**33), r"\['numpy'\]\[1\]: expected words of 32 bits"),
    (("processes", 0, "now", "python", 1), (1, 2), r"\['python'\]\[1\]: expected a tuple of 625 items"),
    (("processes", 0, "now", "python", 0), 2, r"\['python'\]\[0\]: expected a whole number from 3 to 3"),
    (("processes", 0, "now", "cuda"), [torch.zeros(3)], r"\['cuda'\]\[0\]: expected a tensor \(16,\)"),
    (("scheduler", "last_epoch"), 1.0, r"\['last_epoch'\]: expected a whole number"),
    (("scheduler", "gamma"), NAN, r"\['gamma'\]: expected a finite number"),
    (("scheduler",), None, r"content\['scheduler'\]: expected a dictionary, got 'None'"),
    (("optimizer", "param_groups", 0, "lr"), -1.0, r"\['lr'\]: expected a number of at least 0"),
    (("optimizer", "param_groups", 0, "params"), [0, 1], r"\['params'\]: expected 6 items, got '\[0, 1\]'"),
    (("optimizer", "state", 0, "step"), torch.tensor(-1.0), r"\['step'\]: expected a whole number of at least 0"),
    (("optimizer", "state", 0, "exp_avg"), DROP, r"\['exp_avg'\]: expected an entry of that name, got none"),
    (("optimizer", "state", 0, "exp_avg_sq"), torch.full((6, 4), -1.0), r"\['exp_avg_sq'\]: expected numbers of at"),
    (("optimizer", "state", 3), DROP, r"content\['optimizer'\]\['state'\]: expected the parameters \[0, 1, 2, 3"),
    (("step", "encoder.0.weight"), torch.full((6, 4), NAN), r"\['encoder.0.weight'\]: expected finite numbers, got 24"),
    (("step", "encoder.1.running_var"), -torch.ones(6), r"running_var'\]: expected numbers of at least 0"),
    (
        ("step", "encoder.0.weight"),
        torch.zeros(6, 4, dtype=torch.float64),
        r"expected a tensor \(6, 4\) of torch.float32",
    ),
    (
        ("step", "discounted.points"),
        torch.tensor(-1.0),
        r"discounted\.points'\]: expected numbers of at least 0, got -1",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), CHANGES)
def test_what_is_said(path: Any, value: Any, message: str, base: dict[str, Any], tmp_path: Path) -> None:
    content = changed(base["content"], path, lambda _: value)
    found = resume(content, tmp_path / "run.pt")
    assert isinstance(found, cc.InputError)
    assert str(tmp_path / "run.pt") in str(found)
    assert "o start anew." in str(found)
    with pytest.raises(cc.InputError, match=message):
        raise found


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Adafactor(p),
    ],
)
@pytest.mark.parametrize("wrap", [True, False])
def test_what_optimisers_will_remember_is_known_beforehand(make: Any, wrap: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = make(list(net.parameters()))
    if wrap:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hooked: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: hooked.append(1))
    before = checksum({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()})
    wanted = state_after_step(optimizer)
    handle.remove()
    after = checksum({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()})
    assert before == after
    assert not hooked
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    found = optimizer.state_dict()["state"]
    assert wanted is not None
    assert wanted.keys() == found.keys()
    for index, entry in found.items():
        assert entry.keys() == wanted[index].keys()
        for name, value in entry.items():
            other = wanted[index][name]
            assert type(other) is type(value)
            if isinstance(value, Tensor):
                assert (other.shape, other.dtype) == (value.shape, value.dtype), name


class Weighing(torch.optim.SGD):
    """A user's own, which remembers what it likes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["turns"] = group.get("turns", 0) + 1
            for p in group["params"]:
                self.state[p]["history"] = [*self.state[p].get("history", []), float(p.detach().sum())]
        return super().step(closure)


class Noting(torch.optim.lr_scheduler.StepLR):
    """Likewise."""

    def step(self, *epoch: Any) -> None:
        super().step(*epoch)
        self.noted = [*getattr(self, "noted", []), self.last_epoch]


def test_optimisers_and_schedulers_of_the_user_go_on(tmp_path: Path) -> None:
    def make(file: Path | None) -> tuple[Trainer, Any]:
        trainer, loader = make_training("generator", None)
        optimizer = Weighing(trainer.step.parameters(), lr=0.1)
        return Trainer(trainer.step, optimizer, Noting(optimizer, 1, 0.5), checkpoint=file, checkpoint_every=3), loader

    whole, loader = make(None)
    whole.fit(loader, EPOCHS)
    expected = states(whole)
    trainer, loader = make(tmp_path / "run.pt")
    with pytest.raises(Interrupted):
        trainer.fit(Interrupting(loader, 9), EPOCHS)
    trainer, loader = make(tmp_path / "run.pt")
    trainer.fit(loader, EPOCHS)
    assert states(trainer) == expected
    assert trainer.scheduler.noted == whole.scheduler.noted
    assert trainer.optimizer.param_groups[0]["turns"] == 4 * EPOCHS


@pytest.mark.parametrize("kind", ["SequentialLR", "OneCycleLR", "LambdaLR", "CosineAnnealingWarmRestarts", "CyclicLR"])
def test_schedulers_of_torch_go_on(kind: str, tmp_path: Path) -> None:
    kinds = torch.optim.lr_scheduler

    def scheduler(optimizer: Any) -> Any:
        if kind == "SequentialLR":
            parts = [kinds.LinearLR(optimizer, 0.5, total_iters=1), kinds.MultiStepLR(optimizer, [1, 2])]
            return kinds.SequentialLR(optimizer, parts, [1])
        if kind == "OneCycleLR":
            return kinds.OneCycleLR(optimizer, 0.1, total_steps=5)
        if kind == "LambdaLR":
            return kinds.LambdaLR(optimizer, lambda epoch: 0.5 - epoch)
        if kind == "CyclicLR":
            return kinds.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False)
        return kinds.CosineAnnealingWarmRestarts(optimizer, 2)

    def make(file: Path | None) -> tuple[Trainer, Any]:
        trainer, loader = make_training("generator", None)
        optimizer = torch.optim.Adam(trainer.step.parameters(), lr=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR's own way of setting up its parts
            made = scheduler(optimizer)
        return Trainer(trainer.step, optimizer, made, checkpoint=file, checkpoint_every=3), loader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)
        whole, loader = make(None)
        whole.fit(loader, EPOCHS)
        expected = states(whole)
        trainer, loader = make(tmp_path / "run.pt")
        with pytest.raises(Interrupted):
            trainer.fit(Interrupting(loader, 9), EPOCHS)
        trainer, loader = make(tmp_path / "run.pt")
        trainer.fit(loader, EPOCHS)
    assert states(trainer) == expected


class Stubborn(nn.Module):
    """A part that finds a fault of its own, after others were loaded."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.net, self.last, self.refuses = nn.Linear(4, 3), nn.Linear(3, 3), refuses
        self.last.register_load_state_dict_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        if self.refuses:
            raise ValueError("not today")

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.last(self.net(x)).square().mean()


def test_a_module_that_refuses_in_the_middle_leaves_all_as_it_was(tmp_path: Path) -> None:
    data = [(torch.randn(6, 4), torch.arange(6) % 2)] * 2

    def make(refuses: bool) -> Trainer:
        step = Stubborn(refuses)
        optimizer = torch.optim.Adam(step.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return Trainer(step, optimizer, scheduler, checkpoint=tmp_path / "run.pt")

    make(False).fit(data, 1)
    trainer = make(True)
    parts = trainer.step, trainer.optimizer, trainer.scheduler
    before = checksum({str(i): part.state_dict() for i, part in enumerate(parts)})
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    with pytest.raises(cc.InputError, match=r"run\.pt: expected a checkpoint of this training, .*not today"):
        trainer.fit(data, 2)
    assert checksum({str(i): part.state_dict() for i, part in enumerate(parts)}) == before
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1:] == (random.getstate(), np.random.get_state()[2])  # noqa: NPY002
    assert trainer.steps == 0


def test_fewer_epochs_than_the_checkpoint_has_change_nothing(base: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run.pt", base["content"])
    trainer, loader = make_training("generator", tmp_path / "run.pt", 3)
    before = everything(trainer, loader)
    with pytest.raises(cc.InputError, match="epochs: expected at least the 2 that the checkpoint has, got 1"):
        trainer.fit(loader, 1)
    assert everything(trainer, loader) == before


class Overflowing(nn.Module):
    """A finite loss and a gradient whose square is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, *_: Any) -> Tensor:
        return 1e25 * self.weight.sum()


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    step = Overflowing()
    trainer = Trainer(step, torch.optim.Adam(step.parameters()), checkpoint=tmp_path / "run.pt")
    with pytest.raises(cc.DivergenceError, match=r"training step 2: .*\['exp_avg_sq'\]: expected finite numbers"):
        trainer.fit([(torch.zeros(2, 1), torch.zeros(2))], 1)
    assert not (tmp_path / "run.pt").exists()


STATES: list[tuple[str, Any, str]] = [
    ("discounted.points", torch.tensor(-1.0), "expected numbers of at least 0, got -1"),
    ("discounted.points", torch.tensor(NAN), "expected finite numbers"),
    ("discounted.points", torch.ones(2), r"expected a tensor \(\) of floating-point numbers"),
    ("discounted.remembered", torch.tensor(50.0), "expected 1 to 2 of 2, got 50 steps remembered of 2"),
    ("discounted.steps", torch.tensor(-2), "expected numbers of at least 0"),
    ("discounted.steps", torch.tensor(2.0), r"expected a tensor \(\) of torch.int64"),
    ("discounted.cost", torch.tensor(float("inf")), "expected finite numbers"),
    ("discounted.positive", torch.tensor(False), "expected steps and points that explain the positive curvature"),
    ("options", torch.zeros(5), "expected the options of an OnlineLaplace as text in bytes, got a tensor of"),
    ("options", torch.full((5,), 255, dtype=torch.uint8), "expected the options of an OnlineLaplace"),
    ("options", "pd_fix=psd", "expected the options of an OnlineLaplace as text in bytes, got a str"),
]


@pytest.mark.parametrize("structure", ["diag", "full", "kron"])
def test_a_state_of_online_laplace_is_checked_before_it_is_loaded(structure: str) -> None:
    x, labels = torch.randn(6, 4), torch.arange(6) % 2

    def make() -> OnlineLaplace:
        return OnlineLaplace(nn.Linear(4, 3), probe=x, n_data=6, hessian_structure=structure, memory_factor=0.5)

    online, fresh = make(), make()
    for _ in range(2):
        online(x, labels)
    state, before = online.state_dict(), checksum(fresh.state_dict())
    curvature = state["discounted.curvature_0"]
    wrong = [*STATES, ("discounted.curvature_0", curvature * NAN, "expected finite numbers")]
    wrong.append(("discounted.curvature_0", -curvature, "expected numbers of at least 0"))
    if structure != "diag":
        tilted = curvature + curvature.max() * torch.ones_like(curvature).triu(1)
        wrong.append(("discounted.curvature_0", tilted, "a symmetric matrix"))
    for name, value, message in wrong:
        other = OrderedDict({**state, name: value})
        with pytest.raises(cc.InputError, match=rf"state_dict\['{name.replace('points', '.*')[:12]}.*{message}"):
            fresh.load_state_dict(other)
        assert checksum(fresh.state_dict()) == before
    fresh.load_state_dict(state)
    assert torch.equal(fresh.laplace()(x).kappa, online.laplace()(x).kappa) or structure  # the same encoder too
    assert checksum(fresh.state_dict()) == checksum(state)
