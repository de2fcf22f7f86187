"""Losses of anchors over data sets: batches, two views, and what is refused."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from tables import covering, each, refused
from tiny import OfMapping, encoder, numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import contrastive_curvature as cc
from contrastive_curvature.testing.cases import close

LOSSES: dict[str, Any] = {
    "infonce": lambda **given: cc.InfoNCELoss(0.2, **given),
    "supcon": lambda **given: cc.SupConLoss(0.2, **given),
    "siglip": lambda **given: cc.SigLIPLoss(5.0, -2.0, **given),
    "multisimilarity": cc.MultiSimilarityLoss,
    "triplet": cc.TripletLoss,
    "proxies": lambda **given: cc.ProxyLoss(torch.eye(4, dtype=torch.float64)[:, :3] + 0.1, 4.0, **given),
}


def problem(device: str, n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    return encoder(device), numbers(7, n, 4).to(device), (torch.arange(n) % 4).to(device)


def share(loss: Any, z: Tensor, y: Tensor) -> float:
    """By what a fit multiplies a mean: its number of anchors."""
    return float(loss.output_hessian(z, y).derivatives.anchors) if loss.averages else 1.0


@covering(1, name=LOSSES, reduction=["mean", "sum"], fix=["psd_parts", "full", "fixed"], subset=["last_layer", "all"])
@pytest.mark.filterwarnings("ignore:The clamped curvature is zero everywhere")
def test_a_fit_is_the_sum_over_batches(name: str, reduction: str, fix: str, subset: str, device: str) -> None:
    model, x, y = problem(device)
    loss = LOSSES[name](reduction=reduction, pd_fix=fix)
    loader = list(zip(x.split(7), y.split(7), strict=True))
    truth: Any = 0
    for a, b in loader:
        part = cc.ggn(model, a, b, loss=loss, structure="full", subset_of_weights=subset, clamp=False)
        truth = truth + share(loss, model(a).detach(), b) * part
    for structure in ("diag", "full"):
        la = Laplace(model, "contrastive", subset, structure, backend_kwargs={"loss": loss})
        la.fit(loader)
        assert close(la.H_raw, truth.diagonal() if structure == "diag" else truth, tolerance=1e-11)
        values = sum(share(loss, model(a).detach(), b) * loss(model(a), b).detach() for a, b in loader)
        assert float(la.loss) == pytest.approx(float(values), rel=1e-10)
        assert 0 <= float(la.cost) <= float(la.loss) + 1e-12
        assert la.n_data == 12
    assert bool(la(x).kappa.isfinite().all())


def views(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0.1, x - 0.1


@pytest.mark.parametrize("form", ["pair", "pair and nothing", "pair and labels", "three", "mappings"])
def test_views_without_labels(form: str, device: str) -> None:
    """Whatever the loader's form, two views of an input belong together, and all 2 B points are candidates."""
    model, x, y = problem(device)
    first, second = views(x)
    batch: Any = {
        "pair": (first, second),
        "pair and nothing": ((first, second), None),
        "pair and labels": [[first, second], y],  # InfoNCE does not use them
        "three": (first, second, torch.arange(12, device=device)),
        "mappings": ({"0": first}, {"0": second}),
    }[form]

    chosen = OfMapping(model, "0") if form == "mappings" else model
    loss = cc.InfoNCELoss(0.2)
    la = Laplace(chosen, "contrastive", "last_layer", "diag", backend_kwargs={"loss": loss})
    la.fit([batch])
    joined, ids = torch.cat([first, second]), torch.arange(12, device=device).repeat(2)
    truth = 24 * cc.ggn(model, joined, ids, loss=loss, subset_of_weights="last_layer", clamp=False)
    assert close(la.H_raw, truth, tolerance=1e-11)
    assert la.n_data == 24
    assert la.class_centres is None


def test_labels_or_views(device: str) -> None:
    model, x, y = problem(device)
    first, second = views(x)
    batch = ((first, second), y)
    joined, labels, ids = torch.cat([first, second]), y.repeat(2), torch.arange(12, device=device).repeat(2)
    for loss, positives, targets in (
        (cc.SupConLoss(0.2), None, labels),
        (cc.SupConLoss(0.2), "views", ids),
        (cc.InfoNCELoss(0.2), None, ids),
        (cc.InfoNCELoss(0.2), "labels", labels),
    ):
        options = {"loss": loss, "positives": positives}
        la = Laplace(model, "contrastive", "last_layer", "diag", backend_kwargs=options)
        la.fit([batch])
        truth = 24 * cc.ggn(model, joined, targets, loss=loss, subset_of_weights="last_layer", clamp=False)
        assert close(la.H_raw, truth, tolerance=1e-11), (type(loss).__name__, positives)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Other views at every access."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.seen = x, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        self.seen += 1
        return self.x[k] + 0.1 * torch.randn(4), self.x[k] + 0.1 * torch.randn(4)


def test_fresh_augmentation_in_one_pass(device: str) -> None:
    model, x, _ = problem(device, 32)
    model, data = model.float(), Augmented(x.float().cpu())
    loader = DataLoader(data, batch_size=8, shuffle=True)
    la = Laplace(model, "contrastive", backend_kwargs={"loss": cc.InfoNCELoss(0.2)})
    la.fit(loader)
    # One batch is looked at before, to analyse the encoder.
    assert data.seen <= 32 + 2 * 8
    la.optimize_prior_precision()
    assert bool(la(x.float()).uncertainty.isfinite().all())


@pytest.mark.parametrize("name", LOSSES)
def test_online_training_takes_every_loss(name: str, device: str) -> None:
    """Of one step without forgetting, the curvature is that of the batch."""
    model, x, y = problem(device)
    loss = LOSSES[name]()
    once = cc.OnlineLaplace(
        model, probe=x[:4], n_data=12, memory_factor=0.0, backend_kwargs={"loss": loss}, n_samples=1
    )
    assert float(once(x, y).detach()) == pytest.approx(float(loss(model(x), y).detach()))
    want = share(loss, model(x).detach(), y) * cc.ggn(model, x, y, loss=loss, subset_of_weights="last_layer")
    assert close(once.laplace().H, want, tolerance=1e-10)


def near(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gap = torch.cdist(a, b)
    return gap < 1.5, gap >= 1.5


PROXIES = LOSSES["proxies"]()


@each(
    "options, kind, words",
    [
        *(({name: "dataset"}, cc.InputError, rf"keys among.*'{name}'") for name in ("candidates", "kfac_approx")),
        ({"positives": "both"}, cc.InputError, r"positives.*'labels', 'views'"),
        ({"pairs": "batch"}, cc.InputError, r"pairs.*candidates"),
        ({"loss": None, "positives": "views"}, cc.InputError, "ContrastiveLoss is a sum over pairs"),
        ({"loss": nn.TripletMarginLoss()}, cc.InputTypeError, r"loss.*function of the cosines"),
        ({"positives": "views", "relation": near}, cc.InputError, "relation"),
        ({"loss": PROXIES, "relation": near}, cc.InputError, "relation"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], kind: type[Exception], words: str, device: str) -> None:
    model, _, _ = problem(device)
    with pytest.raises(kind, match=words):
        Laplace(model, "contrastive", backend_kwargs={"loss": cc.InfoNCELoss(0.2), **options})


X, Y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 4
TWO = views(X)


@each(
    "options, batch, kind, words",
    [
        ({"loss": None}, TWO, cc.UnsupportedError, r"two views.*InfoNCELoss"),
        ({}, (X, Y + 0.5), cc.InputTypeError, "labels, or a second view"),
        ({"positives": "views"}, (X, Y), cc.InputError, r"positives.*one view"),
        ({"positives": "labels"}, TWO, cc.InputError, "two views and labels"),
        ({}, ((X, X[:5]), None), cc.InputError, "as many second views"),
        ({}, (*TWO, X), cc.InputError, "three"),
        ({"loss": cc.SupConLoss()}, (TWO, ["a"] * 12), cc.InputTypeError, r"labels as a tensor.*positives='views'"),
        ({}, (X, Y, torch.arange(12)), cc.InputTypeError, r"one number a point.*no second view"),
        ({"loss": PROXIES}, TWO, cc.InputError, r"class labels.*class weights"),
        ({"loss": PROXIES, "positives": "views"}, (TWO, Y), cc.InputError, r"positives.*class weights"),
        ({}, views(X[:1]), cc.InputError, r"zero everywhere.*larger batches"),
        ({}, X, cc.InputTypeError, r"batches \(x, labels\), \(view, view\)"),
        ({}, (X / 0, Y), cc.InputError, "finite"),
        ({"loss": cc.SupConLoss()}, (X, torch.arange(12)), cc.InputError, r"at least one anchor.*none of 12"),
        *(
            ({"loss": loss}, batch, cc.InputTypeError, r"whole numbers.*got one fraction a pair.*grades of pairs")
            for loss in (cc.InfoNCELoss(), cc.SupConLoss(), PROXIES)
            for batch in ((*TWO, Y / 4), (TWO, Y / 4))
        ),
    ],
)
def test_batches_that_are_refused(options, batch, kind, words, device) -> None:
    la = Laplace(problem(device)[0], "contrastive", backend_kwargs={"loss": cc.InfoNCELoss(0.2), **options})
    with pytest.raises(kind, match=words):
        la.fit([batch])


def test_grades_of_pairs_are_not_ignored_unless_told(device: str) -> None:
    model, loss = problem(device)[0], cc.InfoNCELoss(0.2)
    first, second, grades = (part.to(device) for part in (*TWO, Y / 4))
    learner = cc.OnlineLaplace(model, probe=first[:4], n_data=12, backend_kwargs={"loss": loss})
    refused(lambda: learner.join((first, second, grades)), "got one fraction a pair", kind=cc.InputTypeError)
    operator = cc.ContrastiveGGNLinearOperator
    refused(lambda: operator(model, loss, None, [(first, second, grades)]), "(view, view)", kind=cc.InputTypeError)
    found = []
    for batch, options in (((first, second, grades), {"positives": "views"}), ((first, second), {})):
        found.append(Laplace(model, "contrastive", "last_layer", "diag", backend_kwargs={"loss": loss, **options}))
        found[-1].fit([batch])
    assert torch.equal(found[0].H, found[1].H)
    x, labels = learner.join((first, second))
    assert torch.equal(x, torch.cat([first, second]))
    assert torch.equal(labels, torch.arange(12, device=device).repeat(2))


def test_factors_leave_cross_terms_out_and_say_so(device: str) -> None:
    model, x, y = problem(device)
    ours, theirs = ({"loss": cc.SupConLoss(0.2, pd_fix=fix)} for fix in ("ggn", "ggn_fixed"))
    with pytest.warns(UserWarning, match="so this is pd_fix='ggn_fixed'"):
        coupled = Laplace(model, "contrastive", "last_layer", "kron", backend_kwargs=ours)
    alone = Laplace(model, "contrastive", "last_layer", "kron", backend_kwargs=theirs)
    for la in (coupled, alone):
        la.fit([(x, y)])
    for found, expected in zip(coupled.H_raw, alone.H_raw, strict=True):
        assert all(close(u, v, tolerance=1e-12) for u, v in zip(found, expected, strict=True))


class Heads(nn.Module):
    """One body and two last layers, for inputs of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.image, self.text = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        kind = next(iter(x))
        out: Tensor = getattr(self, kind)(torch.tanh(self.body(x[kind])))
        return out


def test_the_operator_takes_views(device: str) -> None:
    model, x, y = problem(device)
    loss = cc.InfoNCELoss(0.2, pd_fix="full")
    first, second = views(x)
    data = [(first[:5], second[:5]), ((first[5:], second[5:]), y[5:])]
    operator = cc.ContrastiveGGNLinearOperator(model, loss, None, data)
    joined = torch.cat([first[:5], second[:5], first[5:], second[5:]])
    ids = torch.cat([torch.arange(5).repeat(2), 5 + torch.arange(7).repeat(2)]).to(device)
    truth = cc.ggn(model, joined, ids, loss=loss, structure="full", clamp=False)
    v = torch.linspace(-1, 1, len(truth), dtype=torch.float64, device=device)
    assert close(operator @ v, truth @ v, float(truth.abs().max()), 1e-10)


def test_targets_of_a_relation_may_look_like_inputs(device: str) -> None:
    """They are no second view, whatever their shape, in fits and in training."""
    model, x, _ = problem(device)
    loss = cc.SupConLoss(0.2)
    la = Laplace(model, "contrastive", "last_layer", "diag", backend_kwargs={"loss": loss, "relation": near})
    la.fit([(x, x)])
    anchors = float(loss.output_hessian(model(x).detach(), x, pairs=near).derivatives.anchors)
    truth = anchors * cc.ggn(model, x, x, pairs=near, loss=loss, subset_of_weights="last_layer", clamp=False)
    assert close(la.H_raw, truth, tolerance=1e-11)
    learner = cc.OnlineLaplace(model, probe=x[:4], n_data=12, backend_kwargs={"loss": loss, "relation": near})
    learner(x, x).backward()
    assert bool(learner.laplace()(x).kappa.isfinite().all())


@pytest.mark.filterwarnings("ignore:model. the Jacobians of 2 parameters")
def test_two_heads_get_a_message(device: str) -> None:
    _, x, y = problem(device)
    la = Laplace(Heads().double().to(device), "contrastive", backend_kwargs={"loss": cc.InfoNCELoss(0.2)})
    with pytest.raises(cc.UnsupportedError, match=r"layer 'image' \(Linear\).*two heads.*TwoTowers.*'all'"):
        la.fit([({"image": x}, y), ({"text": x}, y)])
    refused(lambda: la.fit([({"image": x}, {"text": x})]), "two views of one kind", "TwoTowers")
