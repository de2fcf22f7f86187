"""Training with proxies: every distance, its loss against a loop, files, resumed runs and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from benchmark_methods import CLASSES, make_data, make_images, make_setting
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from benchmarks.experiments.methods import proxies as module
from benchmarks.experiments.methods.proxies import DISTANCES, Proxies, ProxyStep
from contrastive_curvature import metrics, vmf
from contrastive_curvature.errors import InputError, UnsupportedError

close = torch.testing.assert_close
LABELS = torch.tensor([7, -2, 40, 11])
"""Of the toy problem's classes: neither from 0 on, nor in order."""


def toy() -> RetrievalData:
    data = make_data()
    parts = {}
    for name, (pixels, labels) in {"train": make_images(10, 0), "test": make_images(6, 1)}.items():
        parts[name] = TensorSplit(pixels, LABELS[labels])
    return dataclasses.replace(data, train=parts["train"], test=parts["test"])


def fitted(folder: Path, distance: str, seed: int = 0, epochs: int = 2, lr: float = 1e-3) -> Proxies:
    folder.mkdir(parents=True, exist_ok=True)
    method = Proxies(make_setting(epochs=epochs, lr=lr), distance)
    method.fit(toy(), seed, folder)
    return method


def recall(method: Proxies) -> float:
    test = toy().test
    neighbors = metrics.nearest_neighbors(method.predict(test).mean, k=1)
    return metrics.recall_at_k(metrics.rank_by_labels(neighbors, test.targets), 1)


def share_right(method: Proxies) -> float:
    """How often the nearest proxy is that of the class; one with axes of its own need not be in the middle of them."""
    test, proxies = toy().test, method.proxies
    z, directions = method.outputs(test), proxies["directions"]
    if "nivmf" in method.distance:
        d = vmf.nivmf_distance(z, directions, proxies["log_kappa"].exp(), normalized=False)
    else:
        d = vmf.cosine_distance(z, directions)
    return float((proxies["classes"][d.argmin(1)] == test.targets).float().mean())


@pytest.mark.parametrize("distance", DISTANCES)
def test_learns_saves_and_loads(distance: str, tmp_path: Path) -> None:
    method = fitted(tmp_path / "fit", distance, epochs=8, lr=3e-3)
    assert recall(method) > 0.95
    assert share_right(method) > 0.95
    prediction = method.predict(toy().test)
    z = method.outputs(toy().test)
    assert prediction.uncertainty is not None
    assert prediction.metric == "cosine"
    close(prediction.mean, nn.functional.normalize(z, dim=1))
    close(prediction.uncertainty, 1 / z.norm(dim=1))

    method.save(tmp_path / "saved.pt")
    other = Proxies(make_setting(), distance)
    other.load(tmp_path / "saved.pt", toy())
    again = other.predict(toy().test)
    assert again.uncertainty is not None
    assert torch.equal(again.mean, prediction.mean)
    assert torch.equal(again.uncertainty, prediction.uncertainty)
    assert other.proxies.keys() == method.proxies.keys()
    for name, value in method.proxies.items():
        assert torch.equal(other.proxies[name], value)
    assert sorted(method.proxies["classes"].tolist()) == sorted(LABELS.tolist())


@pytest.mark.parametrize("distance", ["el_nivmf"])
def test_resumed_training_gives_the_same(distance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fitted(tmp_path / "whole", distance)
    forward = ProxyStep.forward
    calls = 0

    def stops(self: ProxyStep, x: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return forward(self, x, targets)

    monkeypatch.setattr(ProxyStep, "forward", stops)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "parts", distance)
    monkeypatch.setattr(ProxyStep, "forward", forward)
    resumed = fitted(tmp_path / "parts", distance)
    assert torch.equal(resumed.outputs(toy().test), whole.outputs(toy().test))
    for name, value in whole.proxies.items():
        assert torch.equal(resumed.proxies[name], value)


class _Points(nn.Module):
    """An encoder whose outputs are its images."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def make_step(distance: str) -> ProxyStep:
    torch.manual_seed(3)
    return ProxyStep(_Points(), torch.randn(6, 5), LABELS, distance)


def pair_distance(distance: str, step: ProxyStep, z: Tensor, row: int, label: int) -> Tensor:
    """Of one embedding to one proxy, from the densities of the package's other functions."""
    m, nu = step.directions[label : label + 1], z[row : row + 1]
    scale = 1.0
    if step.log_embedding_kappa is not None:
        scale = step.log_embedding_kappa.exp() / torch.stack([one.norm() for one in z]).mean()
    kappa = (scale * nu).norm(dim=1)
    if distance == "cosine":
        return -nn.functional.cosine_similarity(nu, m).squeeze()
    assert step.log_kappa is not None
    other = step.log_kappa[label : label + 1].exp()
    if distance == "nivmf":
        return -vmf.nivmf_log_prob(nu, m, other, normalized=False).squeeze()
    a, b = scale * nu, other[:, None] * nn.functional.normalize(m, dim=1)
    log_c = [vmf.log_normalizer(length, nu.shape[1]) for length in ((a + b).norm(dim=1), kappa, other)]
    if distance == "l2":
        return (a - b).square().sum()
    if distance == "el_vmf":
        return (log_c[0] - log_c[1] - log_c[2]).squeeze()
    if distance == "b_vmf":
        half = vmf.log_normalizer((a + b).norm(dim=1) / 2, nu.shape[1])
        return (half - log_c[1] / 2 - log_c[2] / 2).squeeze()
    return vmf.kl_divergence(nu, kappa, m, other).squeeze()


@pytest.mark.parametrize("distance", [name for name in DISTANCES if name != "el_nivmf"])
def test_loss_is_that_of_a_loop(distance: str) -> None:
    step = make_step(distance).double()
    with torch.no_grad():
        for p in step.parameters():
            p += 0.1 * torch.randn_like(p)
        step.encoder.factor.fill_(1.0)  # type: ignore[operator, union-attr]
    z = torch.randn(6, 5, dtype=torch.float64)
    targets = LABELS[torch.tensor([0, 1, 2, 3, 1, 1])]
    order = sorted(LABELS.tolist())
    losses = []
    for row, label in enumerate(targets.tolist()):
        d = torch.stack([pair_distance(distance, step, z, row, c) for c in range(CLASSES)])
        losses.append(-(-d / step.log_temperature.exp()).log_softmax(0)[order.index(label)])
    close(step(z, targets), torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


def test_sampled_loss_is_algorithm_1() -> None:
    step = make_step("el_nivmf")
    z = torch.randn(6, 5)
    torch.manual_seed(0)
    found = step.logits(z)
    torch.manual_seed(0)
    mu, length = vmf.from_embedding(z)
    samples = vmf.sample(mu, step.scale(length.mean()) * length, 10)
    assert step.log_kappa is not None
    kappa = step.log_kappa.exp()
    log_f = [vmf.nivmf_log_prob(samples, step.directions[c], kappa[c], normalized=False) for c in range(CLASSES)]
    wanted = torch.stack([(one / step.log_temperature.exp()).exp().sum(0).log() for one in log_f], dim=1)
    close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("distance", DISTANCES)
def test_starts_as_asked_and_every_parameter_has_a_gradient_and_a_rate(distance: str) -> None:
    step = make_step(distance)
    torch.manual_seed(3)
    length = torch.randn(6, 5).norm(dim=1)
    assert (step.scale() * length).mean().item() == pytest.approx(
        length.mean().item() if distance in ("cosine", "nivmf") else module.FIRST[distance][1]
    )
    assert step.log_temperature.exp().item() == pytest.approx(module.FIRST[distance][0])
    close(step.directions.norm(dim=1), torch.ones(CLASSES))
    if step.log_kappa is not None:
        close(step.log_kappa.exp(), torch.full_like(step.log_kappa, module.FIRST[distance][2]))
        assert step.log_kappa.shape == ((CLASSES, 5) if "nivmf" in distance else (CLASSES,))
    groups = step.parameter_groups(0.01)
    found = {id(p): group["lr"] for group in groups for p in group["params"]}
    wanted = {"encoder.factor": 0.01, "directions": 0.1, "log_temperature": 0.1}
    wanted |= {"log_kappa": 0.01, "log_embedding_kappa": 0.01}
    assert found == {id(p): pytest.approx(wanted[name]) for name, p in step.named_parameters()}
    step(torch.randn(8, 5), LABELS.repeat(2)).backward()
    largest = {name: p.grad.abs().max().item() for name, p in step.named_parameters() if p.grad is not None}
    # A common factor of all outputs changes nothing.
    assert largest.pop("encoder.factor") < 1e-5 * max(largest.values())
    assert largest.keys() == wanted.keys() & dict(step.named_parameters()).keys() - {"encoder.factor"}
    assert min(largest.values()) > 1e-5


def test_concentrations_are_relative_to_the_mean_length_of_the_batch_and_later_of_the_last_ones() -> None:
    step = make_step("el_vmf")
    first, z = float(step.mean_length), torch.randn(7, 5)
    found = step.logits(z)
    torch.testing.assert_close(step.logits(1000 * z), found, rtol=1e-4, atol=1e-4)
    mean = z.norm(dim=1).mean().item()
    by_hand = 0.9 * (0.9 * first + 0.1 * mean) + 0.1 * 1000 * mean
    assert step.mean_length.item() == pytest.approx(by_hand)
    step.eval()
    assert step.scale().item() == pytest.approx(30 / by_hand)
    assert not torch.allclose(step.logits(z), step.logits(2 * z), rtol=1e-3)
    step.logits(z)
    assert step.mean_length.item() == pytest.approx(by_hand)


def test_samples_are_draws_of_the_embeddings_distributions(tmp_path: Path) -> None:
    method, test = fitted(tmp_path, "el_nivmf"), toy().test
    found, again = (list(method.samples(test, 150, 5) or ()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert found[0].shape == (len(test), 3)
    assert not torch.equal(found[0], found[1])
    z = method.outputs(test)
    mean_length = vmf.mean_resultant_length(z.norm(dim=1), 3)
    mean = torch.stack(found).mean(0)
    along = (mean * nn.functional.normalize(z, dim=1)).sum(1)
    # The cosine's standard deviation is below 0.6, so that of the mean of 150 draws of 24 images below 0.01.
    assert float((along - mean_length).mean().abs()) < 0.03


@pytest.mark.parametrize("distance", ["cosine", "nivmf", "l2"])
def test_embeddings_that_are_no_distribution_give_no_samples(distance: str, tmp_path: Path) -> None:
    assert fitted(tmp_path, distance).samples(toy().test, 2, 0) is None


@pytest.mark.parametrize("distance", DISTANCES)
def test_first_logits_follow_the_cosine_alike(distance: str) -> None:
    """At the first values, a logit rises by 0.5 to 1 when the cosine rises by 1, whatever the distance."""
    torch.manual_seed(0)
    step = ProxyStep(_Points(), torch.randn(6, 32), LABELS, distance)
    torch.manual_seed(1)
    z = torch.randn(400, 32)
    cosine = -vmf.cosine_distance(z, step.directions.detach())
    logits = step.logits(z).detach()
    logits, cosine = logits - logits.mean(0), cosine - cosine.mean(0)
    assert 0.5 < ((logits * cosine).sum() / cosine.square().sum()).item() < 1.02


def test_refuses_positions(tmp_path: Path) -> None:
    places = TensorSplit(torch.zeros(8, 1, 8, 8, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.float64))
    data = dataclasses.replace(toy(), train=places)
    with pytest.raises(UnsupportedError, match=r"have positions and no classes for proxies\. Take"):
        Proxies(make_setting()).fit(data, 0, tmp_path)


def test_refuses_what_was_not_fitted_and_another_distance(tmp_path: Path) -> None:
    for ask in (lambda m: m.predict(toy().test), lambda m: m.samples(toy().test, 1, 0), lambda m: m.proxies):
        with pytest.raises(InputError, match="Call fit or load first"):
            ask(Proxies(make_setting()))
    fitted(tmp_path / "fit", "cosine", epochs=1).save(tmp_path / "saved.pt")
    with pytest.raises(InputError, match="distance: expected 'cosine', as in training"):
        Proxies(make_setting(), "nivmf").load(tmp_path / "saved.pt", toy())


def test_one_class_is_refused(tmp_path):
    data = make_data()
    alike = TensorSplit(data.train.pixels, torch.zeros_like(data.train.targets))
    with pytest.raises(InputError, match="at least two classes"):
        Proxies(make_setting()).fit(dataclasses.replace(data, train=alike), 0, tmp_path)
