"""Bad input: the type of the error, what its message names, and that nothing is lost or computed in vain."""

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import pandas as pd
import pytest
import torch
from laplace import Laplace
from laplace.utils.enums import HessianStructure
from tables import covering, each
from tiny import Counting, data, encoder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.fit import dataset
from contrastive_curvature.laplace import ContrastiveLaplace
from contrastive_curvature.pairs.edges import MOST_POINTS
from contrastive_curvature.structures import REMOVED_STRUCTURES

N, F, D = 12, 4, 3


def outputs(device: str = "cpu") -> tuple[Tensor, Tensor]:
    z = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return z.to(device), (torch.arange(N) % 3).to(device)


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> str:
    """Call; the error must be of the kind, a ValueError too, and its message must hold every word."""
    with pytest.raises(cc.ContrastiveCurvatureError) as caught:
        call()
    assert isinstance(caught.value, kind), caught.value
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


CORE: list[Callable[..., Any]] = [
    lambda z, *a, **k: cc.ContrastiveLoss()(z, *a, **k),
    lambda z, *a, **k: cc.output_hessian(z, *a, **k),
]
on_loss_and_hessian = pytest.mark.parametrize("call", CORE, ids=["loss", "output_hessian"])


@on_loss_and_hessian
def test_embeddings(call: Callable[..., Any], device: str) -> None:
    z, y = outputs(device)
    refused(lambda: call(z[0], y), cc.InputError, "z", "(N, D)", "(3,)")
    refused(lambda: call(z[:, :0], y), cc.InputError, "z", "D >= 1")
    refused(lambda: call(z.long(), y), cc.InputTypeError, "z", "floating-point", "int64", ".float()")
    broken, zero = z.clone(), z.clone()
    broken[4, 1] = float("nan")
    refused(lambda: call(broken, y), cc.InputError, "z", "NaN or infinity", "[4]")
    zero[7] = 0
    refused(lambda: call(zero, y), cc.InputError, "z", "zero norm", "[7]", "dead unit")


@on_loss_and_hessian
def test_labels(call: Callable[..., Any], device: str) -> None:
    z, y = outputs(device)
    refused(lambda: call(z, y[:-1]), cc.InputError, "labels", "12 embeddings", "11 labels")
    refused(lambda: call(z, y.double()), cc.InputTypeError, "labels", "integer", "float64", ".long()")
    refused(lambda: call(z, y[:, None]), cc.InputError, "labels", "(N,)", "(12, 1)")
    refused(lambda: call(z), cc.InputError, "labels", "neither")


@on_loss_and_hessian
def test_pairs(call: Callable[..., Any], device: str) -> None:
    z, y = outputs(device)
    index = torch.tensor([0, 1, 2], device=device)
    for position, outside in enumerate((-1, N, N)):
        triplet = [index.clone() for _ in range(3)]
        triplet[position][1] = outside
        refused(lambda t=triplet: call(z, pairs=tuple(t)), cc.InputError, "pairs", "0..11", str(outside))
    refused(lambda: call(z, y, pairs=(index,) * 3), cc.InputError, "labels, pairs", "both")
    refused(lambda: call(z, pairs=(index.double(),) * 3), cc.InputTypeError, "pairs", "integer", "float64")
    refused(lambda: call(z, pairs=(index, index[:2], index)), cc.InputError, "pairs", "equal length", "[3, 2, 3]")
    many = z[:1].expand(MOST_POINTS + 1, -1)
    refused(lambda: call(many, pairs=(index,) * 3), cc.InputError, "pairs", "at most 16,384 points", "16385", "Labels")
    mask = y[:, None] == y
    refused(lambda: call(z, pairs=(mask, mask)), cc.InputError, "pairs", "both")
    refused(lambda: call(z, pairs=(mask[:, :5], ~mask)), cc.InputError, "pairs", "(12, 12)", "(12, 5)")
    refused(lambda: call(z, pairs=(mask.triu(), ~mask)), cc.InputError, "pairs", "symmetric", "mask | mask.T")


@each(
    "option, value, kind, words",
    [
        ("distance", "cosine", cc.InputError, ("'euclidean'", "'arccos'", "cosine")),
        ("pd_fix", "posit", cc.InputError, ("'positive'", "'psd'", "posit")),
        ("normalization", "mean", cc.InputError, ("'anchor'", "mean")),
        ("margin", 0.0, cc.InputError, ("(0, 2]", "0.0", "unit embeddings")),
        ("margin", 2.5, cc.InputError, ("(0, 2]", "2.5")),
        ("negative_weight", -0.1, cc.InputError, ("[0, 1]", "-0.1", "Eq. 10")),
    ],
)
def test_options(option: str, value: Any, kind: type[Exception], words: tuple[str, ...]) -> None:
    z, y = outputs()
    x, _ = data()
    model = Counting(encoder())
    calls = [
        lambda: cc.output_hessian(z, y, **{option: value}),
        lambda: cc.ggn(model, x, y, **{option: value}),
        lambda: Laplace(model, "contrastive", "all", "diag", backend_kwargs={option: value}),
    ]
    if option not in ("distance", "pd_fix"):
        calls.append(lambda: cc.ContrastiveLoss(**{option: value}))
    for call in calls:
        refused(call, kind, option, *words)
    assert model.points == 0


def test_further_options_of_ggn() -> None:
    x, y = data()
    model = Counting(encoder())
    refused(lambda: cc.ggn(model, x, y, structure="dense"), cc.InputError, "structure", "'kron'", "dense")
    refused(lambda: cc.ggn(model, x[:0], y[:0]), cc.InputError, "x", "at least one point")
    assert model.points == 0
    refused(lambda: cc.ggn(model, x, y, subset_of_weights="first"), cc.InputError, "subset_of_weights", "first")
    for bad in ([0, 0], [43]):
        index = torch.tensor(bad)
        refused(lambda i=index: cc.ggn(model, x, y, subset_of_weights=i), cc.InputError, "subset_of_weights")
    frozen = encoder().requires_grad_(False)
    refused(lambda: cc.ggn(frozen, x, y), cc.InputError, "model", "requires a gradient")


@pytest.mark.parametrize("structure", REMOVED_STRUCTURES)
def test_a_removed_structure_says_what_to_use_instead(structure: str) -> None:
    x, y = data()
    two, instead = cc.TwoTowers(encoder(), encoder()), REMOVED_STRUCTURES[structure]
    for weights in ("last_layer", "all"):
        calls = [
            lambda w=weights: Laplace(encoder(), "contrastive", w, structure),
            lambda w=weights: Laplace(encoder(), "contrastive", w, HessianStructure(structure), n_subset=5),
            lambda w=weights: Laplace(two, "contrastive", w, structure),
            lambda w=weights: ContrastiveLaplace(encoder(), "contrastive", w, structure),
            lambda w=weights: cc.OnlineLaplace(
                encoder(), probe=x, n_data=N, subset_of_weights=w, hessian_structure=structure
            ),
            lambda w=weights: cc.ggn(encoder(), x, y, subset_of_weights=w, structure=structure),
        ]
        for call in calls:
            refused(call, cc.InputError, "structure", f"got {structure}", instead)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.inner(x) + 1)


class ScaledNorm(nn.Module):
    """A normalisation that is more than a rescaling: the raw outputs cannot be reached through it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.normalize(self.scale * z)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x


class BatchStatistics(nn.Module):
    """Its outputs depend on what else is in the batch, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 2, 2).double()
        self.norm = nn.BatchNorm2d(2, track_running_stats=False).double()
        self.head = nn.Linear(2, D).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x.view(-1, 1, 2, 2))).flatten(1))


class Unsteady(nn.Module):
    """Another output at every run on the same batch: of dropout that is always on, or because the input is changed."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.inner = change, encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.change(x))


class OnApple(Tensor):
    """A tensor of a shape on a device that this machine need not have: whatever is computed with it fails."""

    @staticmethod
    def __new__(cls, *shape: int) -> Self:
        device = torch.device("mps")
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return cls(*args[0].shape)
        msg = f"{func} on mps"
        raise NotImplementedError(msg)


def apple() -> nn.Linear:
    layer = nn.Linear(F, D)
    layer.weight, layer.bias = (nn.Parameter(OnApple(*p.shape)) for p in (layer.weight, layer.bias))
    return layer


@each(
    "call",
    [
        lambda: cc.ggn(apple(), *data()),
        lambda: Laplace(apple(), "contrastive", "last_layer", "diag"),
        lambda: Laplace(cc.TwoTowers(apple(), apple()), "contrastive", "last_layer", "diag"),
        lambda: cc.with_last_layer(apple(), data()[0]),
        lambda: cc.output_hessian(OnApple(N, D), outputs()[1]),
        lambda: cc.SupConLoss()(OnApple(N, D), outputs()[1]),
    ],
)
def test_a_device_without_float64_is_refused_by_name(call: Callable[[], Any]) -> None:
    refused(call, cc.UnsupportedError, "CUDA", "mps", "no float64", "model.to('cpu')")


INSIDE, BATCH = ("model", "inside forward", "L2Norm"), ("model", "rest of its batch", "track_running_stats")
TUPLE = ("model", "tensor (N, D)", "tuple")
ENCODERS: list[tuple[Callable[[], nn.Module], str, type[Exception], tuple[str, ...]]] = [
    (lambda: encoder("cpu", nn.Tanh()), "last_layer", cc.UnsupportedError, ("last_layer", "nn.Linear")),
    (Inside, "all", cc.UnsupportedError, INSIDE),
    (Inside, "last_layer", cc.UnsupportedError, INSIDE),
    (lambda: nn.Sequential(Inside(), cc.L2Norm()), "all", cc.UnsupportedError, INSIDE),
    (lambda: encoder("cpu", ScaledNorm()), "all", cc.UnsupportedError, ("arccos", "already normalised", "euclidean")),
    (Pair, "all", cc.InputTypeError, TUPLE),
    (Pair, "last_layer", cc.InputTypeError, TUPLE),
    (lambda: encoder("cpu", nn.Unflatten(1, (D, 1))), "all", cc.InputError, ("model", "(N, D)", "(8, 3, 1)")),
    *(
        (lambda: Unsteady(torch.nn.functional.dropout), weights, cc.UnsupportedError, ("model", "two runs", "dropout"))
        for weights in ("all", "last_layer")
    ),
    *(
        (lambda: Unsteady(lambda x: x.mul_(2).add_(1)), weights, cc.UnsupportedError, ("model", "in place", "clone"))
        for weights in ("all", "last_layer")
    ),
    (BatchStatistics, "all", cc.UnsupportedError, BATCH),
    (BatchStatistics, "last_layer", cc.UnsupportedError, BATCH),
]


@each("build, weights, kind, words", ENCODERS)
def test_encoders(build: Callable[[], nn.Module], weights: str, kind: type[Exception], words: tuple[str, ...]) -> None:
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=N)
    model = build().train()
    refused(lambda: cc.ggn(model, x, y, subset_of_weights=weights), kind, *words)
    assert all(module.training for module in model.modules())
    la = Laplace(model, "contrastive", weights, "diag")
    # A second try must not slip through on what the first one has left behind.
    for _ in range(2):
        refused(lambda: la.fit(loader), kind, *words)
        with pytest.raises(AttributeError, match="fit"):
            la(x)


@each("name", ["nothing", "0.weight", "0"])
def test_a_wrong_name_of_the_last_layer(name: str) -> None:
    la = Laplace(encoder(), "contrastive", "last_layer", "diag", last_layer_name=name)
    refused(lambda: la.fit(DataLoader(TensorDataset(*data()), batch_size=5)), cc.InputError, "last_layer_name", name)


class Once:
    """Batches that change from pass to pass."""

    def __init__(self, passes: list[list[Any]]) -> None:
        self.passes = passes
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return iter(self.passes[min(self.count, len(self.passes)) - 1])


def loaders() -> list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]]:
    x, y = data()
    broken, dead = x.clone(), x.clone()
    broken[6, 1] = float("nan")
    dead[:] = 0
    good = [(x[:8], y[:8]), (x[8:], y[8:])]
    unlike = [(x[:8] + 1, y[:8]), (x[8:], y[8:])]
    return [
        ("empty", list, cc.InputError, ("train_loader", "at least one batch", "empty")),
        ("one point", lambda: [(x[:1], y[:1])], cc.InputError, ("train_loader", "two points", "1 point")),
        ("no positive", lambda: [(x, torch.arange(N))], cc.InputError, ("train_loader", "positive pair", "labels")),
        ("lengths", lambda: [(x, y[:-1])], cc.InputError, ("labels", "12", "11")),
        ("no labels", lambda: [(x,)], cc.InputTypeError, ("train_loader", "(x, labels)", "tuple of 1")),
        ("no key", lambda: [{"x": x}], cc.InputTypeError, ("train_loader", "'labels'", "dict_key_y")),
        ("empty batch", lambda: [*good, (x[:0], y[:0])], cc.InputError, ("train_loader", "batch")),
        ("NaN", lambda: [(broken, y)], cc.InputError, ("model(x)", "NaN", "6")),
        ("other data", lambda: Once([good, good, good, unlike]), cc.InputError, ("train_loader", "every pass")),
    ]


LOADERS = loaders()


@covering(
    1,
    name__build__kind__words=LOADERS,
    weights__structure=[("last_layer", "diag"), ("all", "diag"), ("last_layer", "kron")],
)
def test_a_bad_loader_costs_no_earlier_fit(weights, structure, name, build, kind, words, monkeypatch) -> None:
    monkeypatch.setattr(dataset, "FEATURES_KEPT", 0)
    if name == "other data":
        build, words = _unlike_in_the_last_pass, words[:1]
    x, y = data()
    model = encoder()
    fresh = Laplace(model, "contrastive", weights, structure)
    refused(lambda: fresh.fit(build()), kind, *words)
    with pytest.raises(AttributeError, match="fit"):
        fresh(x)
    la = Laplace(model, "contrastive", weights, structure)
    good = DataLoader(TensorDataset(x, y), batch_size=5)
    la.fit(good)
    before = (la(x).covariance, la.mean.clone(), la.n_data, float(la.loss), la.cost, la.log_marginal_likelihood())
    refused(lambda: la.fit(build()), kind, *words)
    refused(lambda: la.fit(build(), override=False), kind, *words)
    after = (la(x).covariance, la.mean, la.n_data, float(la.loss), la.cost, la.log_marginal_likelihood())
    assert all(torch.equal(torch.as_tensor(p), torch.as_tensor(q)) for p, q in zip(before, after, strict=True))
    # And it can still be fitted, also the one that never was.
    fresh.fit(good)
    assert torch.equal(fresh(x).covariance, before[0])


def _unlike_in_the_last_pass() -> Any:
    """A loader whose labels and inputs are others from the curvature's pass on, which is the third."""
    x, y = data()
    return Once([[(x, y)]] * 2 + [[(x + 1, y + 1)]])


@pytest.mark.parametrize("pairs", ["dataset", "batch"])
def test_a_loader_that_can_be_read_only_once_is_named(pairs: str) -> None:
    x, y = data()
    la = Laplace(encoder(), "contrastive", "all", "diag", backend_kwargs={"pairs": pairs})
    batches = ((x[k : k + 4], y[k : k + 4]) for k in (0, 4, 8))
    message = refused(lambda: la.fit(batches), cc.InputError, "train_loader")
    assert "augmentation" not in message  # that is another fault


def test_relations() -> None:
    x, y = data()
    loader = [(x, y.double())]

    def la(relation: Any) -> Any:
        return Laplace(encoder(), "contrastive", "all", "diag", backend_kwargs={"relation": relation})

    refused(lambda: la(lambda a, b: a[:, None] == b).fit(loader), cc.InputTypeError, "pairs", "Tensor")
    refused(lambda: la(lambda a, b: (a[:, None] - b, a[:, None] - b)).fit(loader), cc.InputTypeError, "boolean")
    refused(lambda: la(lambda a, b: (a[:, None] == b, a[:, None] != b)).fit([(x, y[:-1])]), cc.InputError, "12")


def test_options_of_the_laplace_object() -> None:
    model = encoder()

    def la(weights: str = "all", structure: str = "diag", *args: Any, **kwargs: Any) -> Any:
        return Laplace(model, "contrastive", weights, structure, *args, **kwargs)

    refused(lambda: la(backend_kwargs={"marign": 0.5}), cc.InputError, "backend_kwargs", "marign", "margin")
    refused(lambda: la(backend_kwargs={"pairs": "all"}), cc.InputError, "pairs", "'batch'", "all")
    refused(lambda: la(backend_kwargs={"rank": 3}), cc.InputError, "rank", "kron_lowrank")
    refused(lambda: la("last_layer", "kron_lowrank", backend_kwargs={"rank": 0}), cc.InputError, "rank", "0")
    refused(lambda: la(sigma_noise=2.0), cc.UnsupportedError, "sigma_noise", "temperature")
    refused(lambda: la("last_layer", feature_reduction="average"), cc.UnsupportedError, "feature_reduction")
    refused(lambda: Laplace(nn.ReLU(), "contrastive", "all", "diag"), cc.InputError, "model", "parameters")
    with pytest.raises(ValueError, match=r"[Ss]ubnetwork"):  # ours, or the host's for a name imported before us
        la("subnetwork", "kron")


def test_no_pair_is_no_curvature_in_the_functions_themselves(device: str) -> None:
    z, y = outputs(device)
    x = data()[0].to(device)
    model = encoder().to(device)
    for rows, labels in ((slice(0, 1), y[:1]), (slice(0, 0), y[:0])):
        assert float(cc.ContrastiveLoss()(z[rows], labels)) == 0
        assert not cc.output_hessian(z[rows], labels).diagonal().any()
    for structure, shape in (("diag", (43,)), ("full", (43, 43))):
        curvature = cc.ggn(model, x[:1], y[:1], structure=structure)
        assert curvature.shape == shape
        assert not curvature.any()
    apart = torch.arange(N, device=device)
    assert not cc.ggn(model, x, apart, pd_fix="positive").any()


X, LABELS = data()
NAMES = [f"class {label}" for label in LABELS.tolist()]


@each(
    "call, words",
    [
        (lambda la: la.fit(X, LABELS), ("train_loader", "a Tensor", "DataLoader(TensorDataset(x, labels)")),
        (lambda la: la.fit(pd.DataFrame(X), LABELS.numpy()), ("train_loader", "a DataFrame", "DataLoader(")),
        (lambda la: la.fit(TensorDataset(X, LABELS)), ("train_loader", "a TensorDataset", "DataLoader(TensorDataset(")),
        (lambda la: la(DataLoader(TensorDataset(X, LABELS))), ("x: ", "a DataLoader", "for x, _ in loader")),
        (lambda la: la(X.numpy().astype(complex)), ("x: ", "real numbers", "complex128")),
        (lambda la: la(np.ma.MaskedArray(X.numpy())), ("x: ", "without a mask", "masked array")),
        (lambda la: la([[1.0, 2.0], [3.0]]), ("x: ", "vectors of numbers, all of one length")),
        (lambda la: la.predict("one text"), ("data: ", "Pass [text]")),
        (lambda la: la.predict(TensorDataset(X, LABELS)), ("data: ", "a TensorDataset", "DataLoader(TensorDataset(")),
        (lambda la: la.predict(X[:0].numpy()), ("data: ", "at least one input")),
        (lambda la: la.predict([(X, LABELS), (X[:, :2], LABELS)]), ("data: batch 1", "shape (2,)")),
        (lambda la: la.predict(X, batch_size=0), ("batch_size", "0")),
        (lambda la: la.update(X), ("train_loader", "a Tensor")),
        (lambda la: la(X).to_pandas(mu="yes"), ("mu: ", "a str")),
        (lambda la: la.fit([(X, NAMES)]), ("labels as a tensor", "a list", "numpy.unique(names")),
    ],
)
def test_what_newcomers_type(call: Callable[[Any], Any], words: tuple[str, ...]) -> None:
    la = Laplace(encoder(), "contrastive")
    la.fit([(X, LABELS)])
    refused(lambda: call(la), cc.ContrastiveCurvatureError, *words)


def test_an_evaluation_says_which_classes_the_fit_did_not_have() -> None:
    la = Laplace(encoder(), "contrastive")
    la.fit([(X, LABELS)])
    la.optimize_prior_precision()
    la.calibrate([(X + 0.1, LABELS)])
    with pytest.warns(cc.LabelWarning, match=r"2 of the 3 classes of test were not in the fit.*measure_classes"):
        cc.report.evaluate(la, [(X + 0.2, LABELS + 2)], n_samples=0, n_shown=0)
