"""Training with proxies: every distance, its loss against a loop, files, resumed runs and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from benchmark_methods import CLASSES, make_data, make_images, make_setting
from torch import Tensor, nn

from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from benchmarks.experiments.methods.proxies import DISTANCES, Proxies, ProxyStep
from contrastive_curvature import metrics, vmf

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


def test_embeddings_are_learned_and_their_length_is_the_concentration(tmp_path: Path) -> None:
    method = fitted(tmp_path / "fit", "el_nivmf", epochs=8, lr=3e-3)
    assert recall(method) > 0.95
    prediction, z = method.predict(toy().test), method.outputs(toy().test)
    assert prediction.uncertainty is not None
    close(prediction.mean, nn.functional.normalize(z, dim=1))
    close(prediction.uncertainty, 1 / z.norm(dim=1))


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
