"""A batch of a fit seldom waits for a GPU, and conditions that are looked at later are refused as at once."""

import math
from typing import Any, Self

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature import waiting


class Waits(torch.overrides.TorchFunctionMode):
    """Counts what would wait for a GPU, on the CPU.

    A GPU would have all floating-point numbers, what is made of them, and what was moved there. Waiting for it: reading
    such numbers, results whose shape depends on them, and copies that are waited for.
    """

    READS = (
        "_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "bincount", "masked_select", "equal", "cpu",
        "tolist", "numpy", "_linalg_eigh",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count = 0
        self._moved: dict[int, Tensor] = {}  # keeps the tensors, so that no other one has their id

    def there(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.is_floating_point() or id(value) in self._moved)

    def mark(self, out: Any) -> Any:
        self._moved.update({id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)})
        return out

    def note(self, name: str, args: Any, kwargs: Any) -> bool:
        """Count an operation if it waits; return whether a GPU would run it."""
        there = any(map(self.there, tree_leaves((args, kwargs))))
        waits = name in self.READS or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if there and "index" in name and isinstance(args[1], (list, tuple)):
            indices = [index for index in args[1] if index is not None]
            waits = any(index.dtype == torch.bool or not self.there(index) for index in indices)
        self.count += there and waits
        return there

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        if name in ("cpu", "tolist", "numpy"):
            self.note(name, args, kwargs)
        out = function(*args, **kwargs)
        if name == "cpu":
            out = out.view_as(out)
            self._moved.pop(id(out), None)
        elif name == "to" and any(isinstance(value, (Tensor, torch.device)) for value in args[1:]):
            self.count += not self.there(args[0]) and not kwargs.get("non_blocking", False)
            out = self.mark(out.view_as(out))
        elif kwargs.get("device") is not None and isinstance(out, Tensor):
            out = self.mark(out.view_as(out))
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
        there = self.waits.note(function.overloadpacket.__name__, args, kwargs or {})
        out = function(*args, **(kwargs or {}))
        return self.waits.mark(out) if there else out


def waits(n: int, weights: str, structure: str, loss: cc.losses.CosineLoss) -> int:
    """Count the waits of a fit of n batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    loader = DataLoader(TensorDataset(torch.randn(10 * n, 6), torch.arange(10 * n) % 5), batch_size=10)
    with pytest.MonkeyPatch.context() as patch, Waits() as counted:
        patch.setattr(waiting, "_WITHOUT_WAITING", ())
        Laplace(model, "contrastive", weights, structure, backend_kwargs={"loss": loss}).fit(loader)
    return counted.count


@pytest.mark.parametrize(
    ("weights", "structure", "loss", "most"),
    [
        ("last_layer", "kron_lowrank", cc.ContrastiveLoss(), 0),
        ("last_layer", "kron_lowrank", cc.InfoNCELoss(), 0),
        ("last_layer", "kron_lowrank", cc.LogisticLoss(pd_fix="psd"), 1),  # eigenvalues
        ("all", "diag", cc.ContrastiveLoss(), 3),  # signed square roots
        ("all", "kron", cc.SupConLoss(), 2),  # its cost, whose positives are listed; eigenvalues
    ],
)
def test_a_batch_seldom_waits(weights: str, structure: str, loss: cc.losses.CosineLoss, most: int) -> None:
    """Conditions are looked at after many batches."""
    assert waits(24, weights, structure, loss) - waits(4, weights, structure, loss) <= 20 * (most + 0.25)


def test_conditions_that_are_looked_at_late_are_refused_alike(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_WITHOUT_WAITING", ())
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
