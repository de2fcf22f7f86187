"""A fit takes several passes over the data; they must see the same points with the same targets, and all of them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from tables import covering, refused
from tiny import OfMapping
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

import contrastive_curvature as cc
from contrastive_curvature.fit import dataset
from contrastive_curvature.fit.passes import PassRecord

N, WIDTH = 40, 5


@pytest.fixture(autouse=True)
def _no_features_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of the last layer take two passes, as they do of much data."""
    monkeypatch.setattr(dataset, "FEATURES_KEPT", 0)


class Passes:
    """A loader whose passes differ: pass k has what ``change(k, x, labels)`` gives, in batches of 8."""

    def __init__(self, change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]], device: str) -> None:
        self.x, self.labels = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 4
        self.change, self.device, self.count = change, device, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, labels = self.change(self.count, self.x, self.labels)
        self.count += 1
        return iter(list(zip(x.to(self.device).split(8), labels.to(self.device).split(8), strict=True)))


def from_pass(first: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """The data as they are before a pass, changed from it on."""
    return lambda number, x, labels: (x, labels) if number < first else change(x, labels)


def two_swapped(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    moved = labels.clone()
    moved[[3, 6]] = labels[[6, 3]]
    return x, moved


def inputs_shuffled_alone(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return x[torch.randperm(N, generator=torch.Generator().manual_seed(2))], labels


def shuffled_together(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    return x[order], labels[order]


def renamed(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return x, (labels + 1) % 4


WRONG = [two_swapped, inputs_shuffled_alone, renamed]


def model(device: str) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3).to(device)


# The loader is run once for a look at the first batch, and then for the first real pass.
LATER = 2


CROSS = {"backend_kwargs": {"pd_fix": "full", "margin": 0.9}}
FITS = [(LATER, "diag", {}), (LATER, "kron", {}), (LATER, "full", {})]
# Cross terms take passes of their own.
FITS += [(LATER + 1, "diag", CROSS), (LATER + 2, "diag", CROSS)]


@covering(1, change=WRONG, later__structure__more=FITS, far=[False, True])
def test_other_targets_in_a_later_pass_are_refused(later, structure, more, change, far, device) -> None:
    """Also beside a point that is far out, and whose numbers hide those of the others in a sum."""
    la = Laplace(model(device), "contrastive", hessian_structure=structure, **more)
    loader = Passes(from_pass(later, change), device)
    loader.x[-1] *= 1e6 if far else 1
    refused(lambda: la.fit(loader), "the same outputs with other targets")
    assert not la.n_data


def test_an_encoder_in_half_precision_may_round_otherwise(device: str) -> None:
    """Batches of other sizes are computed by other kernels, and round differently."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.runs = model(device), 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            with torch.autocast(device, dtype=torch.bfloat16):
                z = self.linear(x).float()
            # One unit in the last place, now up and now down.
            return (z * (1 + 2**-7 * (self.runs % 2))).bfloat16().float()

    la = Laplace(Rounded(), "contrastive", "all", "diag", backend=cc.ContrastiveGGN)
    la.fit(Passes(lambda _, x, y: (x, y), device))


def test_batches_are_counted_with_the_targets_they_come_with(device: str) -> None:
    def other(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return x, labels // 2

    def augmented(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return x + 0.1 * torch.randn_like(x), labels

    of_data = Laplace(model(device), "contrastive", hessian_structure="diag")
    hint = "pairs='batch' allows augmentation: it compares targets alone"
    refused(lambda: of_data.fit(Passes(from_pass(LATER, augmented), device)), hint)
    la = Laplace(model(device), "contrastive", backend_kwargs={"pairs": "batch"})
    refused(lambda: la.fit(Passes(from_pass(LATER, other), device)), "other targets")
    # Pairs of batches are formed in the second pass alone, so it may put points and labels together anew.
    la.fit(Passes(from_pass(LATER, shuffled_together), device))
    la.fit(Passes(from_pass(LATER, augmented), device))


@given(
    n=st.integers(2, 30),
    dim=st.integers(1, 4),
    classes=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 31),
    noise=st.sampled_from((0.0, 1e-6)),
)
def test_a_record_knows_its_points_in_any_order(n, dim, classes, seed, batch, noise, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=generator) + 0.1
    labels = torch.randint(0, classes, (n,), generator=generator)
    order = torch.randperm(n, generator=generator)

    def record(z: Tensor, labels: Tensor, step: int) -> PassRecord:
        made = PassRecord()
        for part, targets in zip(z.split(step), labels.split(step), strict=True):
            made.add(part.to(device), targets.to(device))
        return made

    first = record(z, labels, n)
    first.check_same(record(z[order] * (1 + noise), labels[order], batch))
    if classes > 1:
        moved = labels.clone()
        # A class that no point was in.
        moved[int(order[0])] = classes
        refused(lambda: first.check_same(record(z[order], moved[order], batch)), "other targets")
    other = z.clone()
    other[int(order[0])] *= -1.1
    refused(lambda: first.check_same(record(other[order], labels[order], batch)), "different outputs")
    refused(lambda: first.check_same(record(z[1:], labels[1:], batch)), "points in the first pass")


def test_a_sampler_that_divides_the_data_is_refused() -> None:
    """Every process would have another posterior, and none the right one."""

    class Wrapped:
        def __init__(self, loader: DataLoader) -> None:
            self.anything = loader

        def __iter__(self) -> Iterator[Any]:
            return iter(self.anything)

    data, encoder = TensorDataset(torch.randn(N, WIDTH), torch.arange(N) % 4), model("cpu")
    divided = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    la = Laplace(encoder, "contrastive", hessian_structure="diag")
    for loader in (divided, Wrapped(divided)):
        with pytest.raises(cc.UnsupportedError, match=r"DistributedSampler.* 2 processes.*state_dict"):
            la.fit(loader)
    assert not la.n_data
    with pytest.raises(cc.UnsupportedError, match="DistributedSampler"):
        cc.ContrastiveGGNLinearOperator(encoder, cc.ContrastiveLoss(), list(encoder.parameters()), divided)
    # One replica has all of the data.
    la.fit(DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)))
    with pytest.raises(cc.UnsupportedError, match="DistributedSampler"):
        la.optimize_prior_precision(method="gridsearch", val_loader=divided)
    whole = DataLoader(data, batch_size=8)
    for call in (
        lambda: la.calibrate(divided),
        lambda: la.measure_classes(divided),
        lambda: la.without(divided, [0]),
        lambda: cc.influence(la, divided, whole),
        lambda: cc.influence(la, whole, divided),
    ):
        with pytest.raises(cc.UnsupportedError, match="DistributedSampler"):
            call()


class Stream(IterableDataset[Any]):
    """Points one by one, some of them several times; workers split them, or each gives all."""

    def __init__(self, splits: bool, repeats: int = 0, keys: bool = False) -> None:
        x = torch.randn(N - repeats, WIDTH, generator=torch.Generator().manual_seed(0))
        self.x, self.splits, self.keys = torch.cat([x, x[:repeats]]), splits, keys

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker is not None and self.splits else (0, 1)
        for k in range(start, N, step):
            yield {"x": self.x[k], "labels": k % 4} if self.keys else (self.x[k], k % 4)


def test_workers_that_give_every_point_are_named() -> None:
    for encoder, options in (
        (model("cpu"), {}),
        (model("cpu"), {"pairs": "batch"}),
        (model("cpu"), {"loss": cc.SupConLoss(0.1)}),
        (OfMapping(model("cpu"), "x"), {}),
    ):
        keys = isinstance(encoder, OfMapping)

        def fit(stream: Stream, workers: int, encoder: nn.Module = encoder, options: Any = options) -> int:
            la = Laplace(encoder, "contrastive", "last_layer", "diag", backend_kwargs=options)
            la.fit(DataLoader(stream, batch_size=8, num_workers=workers))
            return int(la.n_data)

        with pytest.warns(UserWarning, match=r"50% of its 80 inputs.*2 workers.*get_worker_info") as caught:
            assert fit(Stream(splits=False, keys=keys), 2) == 2 * N
        assert sum("workers" in str(one.message) for one in caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fit(Stream(splits=True, repeats=N // 4, keys=keys), 2) == N
            assert fit(Stream(splits=False, keys=keys), 1) == N


class Counting(nn.Linear):
    """A layer that counts the points that it has seen."""

    points = 0

    def forward(self, input: Tensor) -> Tensor:
        self.points += len(input)
        return super().forward(input)


@pytest.mark.parametrize(
    ("structure", "options"),
    [("kron", {}), ("diag", {"negative_samples": 10}), ("diag", {"pd_fix": "full"}), ("full", {"pd_fix": "psd"})],
)
def test_the_encoder_runs_once_a_point_where_features_are_kept(structure, options, device, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(N, WIDTH, generator=generator).to(device), (torch.arange(N) % 4).to(device)
    points, curvatures = [], []
    # As many numbers as there are; and one less, which the last batch exceeds.
    for limit in (N * (WIDTH + 3), N * (WIDTH + 3) - 1):
        monkeypatch.setattr(dataset, "FEATURES_KEPT", limit)
        torch.manual_seed(0)
        body = Counting(WIDTH, WIDTH).to(device)
        whole, kwargs = nn.Sequential(body, nn.Linear(WIDTH, 3).to(device)), {"margin": 0.7, **options}
        la = Laplace(whole, "contrastive", hessian_structure=structure, backend_kwargs=kwargs)
        loader = DataLoader(TensorDataset(x, labels), 7)
        la.fit(loader)
        la.optimize_prior_precision()
        body = la.model.model[0]
        points.append(body.points)
        la.calibrate([x + 1])
        assert body.points == points[-1] + N, "a calibration runs the encoder once an input, the prior never"
        curvatures.append(la.H_raw if isinstance(la.H_raw, Tensor) else la.H_raw[0][0])
    assert points[0] <= N + 16, "besides, a few rows for the analysis"
    more = points[1] - points[0]
    assert more == (3 * N if options.get("pd_fix") == "full" else N), "cross terms take passes of their own"
    assert torch.equal(*curvatures)
