"""A batch of a fit does not wait for a GPU, and what is looked at later is refused as at once."""

import math
from typing import Any, Self

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature import validate


class Waits(torch.overrides.TorchFunctionMode):
    """Counts reads of numbers that a GPU would have: made from floating-point numbers, or moved to the device."""

    READS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "cpu", "tolist", "numpy")

    def __init__(self) -> None:
        self.count = 0
        self._there: dict[int, Tensor] = {}  # keeps the tensors, so that no other one has their id

    def _reads(self, name: str, given: Any) -> bool:
        there = any(t.is_floating_point() or id(t) in self._there for t in tree_leaves(given) if isinstance(t, Tensor))
        self.count += there and name in self.READS
        return there

    def _mark(self, out: Any) -> Any:
        self._there.update({id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)})
        return out

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name in ("cpu", "tolist", "numpy"):
            self._reads(name, args)
        out = function(*args, **(kwargs or {}))
        if name == "cpu":
            out = out.view_as(out)
            self._there.pop(id(out), None)
        elif name == "to" and any(isinstance(value, (Tensor, torch.device)) for value in args[1:]):
            out = self._mark(out.view_as(out))
        return out

    def __enter__(self) -> Self:
        self._operations = Operations(self)
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """Shows a :class:`Waits` what torch's functions are made of."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = self.waits._reads(function.overloadpacket.__name__, (args, kwargs))
        out = function(*args, **(kwargs or {}))
        return self.waits._mark(out) if there else out


def waits(n: int, weights: str, structure: str, loss: cc.losses.CosineLoss) -> int:
    """Count the waits of a fit of n batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    loader = DataLoader(TensorDataset(torch.randn(10 * n, 6), torch.arange(10 * n) % 5), batch_size=10)
    with pytest.MonkeyPatch.context() as patch, Waits() as counted:
        patch.setattr(validate, "_WITHOUT_WAITING", ())
        Laplace(model, "contrastive", weights, structure, backend_kwargs={"loss": loss}).fit(loader)
    return counted.count


@pytest.mark.parametrize(
    ("weights", "structure", "loss", "most"),
    [
        ("last_layer", "kron_lowrank", cc.ContrastiveLoss(), 0),
        ("all", "diag", cc.ContrastiveLoss(), 0),
        ("last_layer", "kron_lowrank", cc.LogisticLoss(pd_fix="psd"), 0),
        ("last_layer", "kron_lowrank", cc.InfoNCELoss(), 0),
        ("all", "kron", cc.SupConLoss(), 1),
    ],
)
def test_a_batch_does_not_wait(weights: str, structure: str, loss: cc.losses.CosineLoss, most: int) -> None:
    """Only the cost of SupCon, whose positives are listed, does; conditions are looked at after many batches."""
    assert waits(24, weights, structure, loss) - waits(4, weights, structure, loss) <= 20 * (most + 0.25)


def test_conditions_that_are_looked_at_late_are_refused_alike(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_WITHOUT_WAITING", ())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    x, y = torch.randn(40, 6), torch.arange(40) % 5
    for row, bad in ((23, math.nan), (13, math.inf)):
        broken = x.clone()
        broken[row] = bad
        with pytest.raises(cc.InputError, match=rf"batch {row // 10} .*NaN or infinity in rows \[{row % 10}\]"):
            Laplace(model, "contrastive").fit(DataLoader(TensorDataset(broken, y), batch_size=10))

    class Changing(list[Any]):
        """Another label in the second pass."""

        def __iter__(self) -> Any:
            self.passes = getattr(self, "passes", 0) + 1
            return iter([(x[:20], y[:20]), (x[20:], y[20:] + 9 * (self.passes > 2))])

    with pytest.raises(cc.InputError, match=r"other targets in the second, \[9, 10, 11, 12, 13\]"):
        Laplace(model, "contrastive", "all", "diag").fit(Changing([0, 0]))
