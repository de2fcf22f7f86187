"""Zero-shot classification: limits in closed form, Monte Carlo over sampled embeddings, and the temperature."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import covering
from torch import Tensor
from torch.nn import functional as F
from tower_cases import numbers

import contrastive_curvature as cc
from contrastive_curvature.embedding.zero_shot import ZeroShotClassifier

SCALES = (1.0, 20.0, 100.0)


def uncertain(mean: Tensor, spread: float, kind: str = "variance") -> cc.EmbeddingDistribution:
    """Errors of a size for each embedding, in one of the forms that a distribution has."""
    size = spread**2 * (1 + torch.arange(len(mean)).to(mean)).view(-1, 1) / len(mean)
    variance = size * mean.square().sum(1, keepdim=True).expand_as(mean)
    if kind == "variance":
        return cc.EmbeddingDistribution(mean, variance=variance)
    return cc.EmbeddingDistribution(mean, covariance=torch.diag_embed(variance))


def sampled(images: Any, prompts: Any, scale: float, labels: Tensor, n: int = 20_000) -> Tensor:
    """Mean probabilities over sampled embeddings; a class is the mean of its prompts, of the length without errors."""
    generator = torch.Generator(labels.device).manual_seed(0)
    u, p = images.sample(n, generator), prompts.sample(n, generator)
    total, classes = F.normalize(prompts.raw_mean), labels.unique()
    centres = [p[:, labels == c].mean(1) / total[labels == c].mean(0).norm() for c in classes]
    return (scale * u @ torch.stack(centres, 2)).softmax(2).mean(0)


@given(seed=st.integers(0, 999), scale=st.sampled_from(SCALES), classes=st.integers(2, 6), kind=st.booleans())
def test_without_uncertainty_it_is_a_softmax(seed: int, scale: float, classes: int, kind: bool, device: str) -> None:
    images, prompts = numbers(seed, 5, 4).to(device), numbers(seed + 1, classes, 4).to(device)
    truth = (scale * F.normalize(images) @ F.normalize(prompts).T).softmax(1)
    zero = torch.zeros_like(prompts)
    given = cc.EmbeddingDistribution(prompts, variance=zero) if kind else prompts
    found = ZeroShotClassifier(given, scale=scale).probabilities(images)
    assert torch.allclose(found, truth, rtol=1e-9, atol=1e-13)


@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from(SCALES),
    spread=st.floats(0.01, 1.0),
    which=st.sampled_from(["images", "prompts", "both"]),
    kind=st.sampled_from(["variance", "covariance"]),
)
def test_rows_sum_to_one_and_uncertainty_pulls_to_uniform(seed, scale, spread, which, kind, device) -> None:
    images, prompts = numbers(seed, 5, 4).to(device), numbers(seed + 1, 3, 4).to(device)

    def entropy(size: float) -> Tensor:
        a = images if which == "prompts" or not size else uncertain(images, size, kind)
        b = prompts if which == "images" or not size else uncertain(prompts, size, kind)
        p = ZeroShotClassifier(b, scale=scale).probabilities(a)
        assert torch.allclose(p.sum(1), torch.ones_like(p[:, 0]), rtol=0, atol=1e-12)
        return -(p * p.clamp(min=1e-300).log()).sum(1)

    # On average, and not to the last digit: a prompt of its own size may cost a runner-up more than the winner.
    assert float(entropy(spread).mean()) >= float(entropy(0.0).mean()) - 1e-4
    assert bool((entropy(1e6) > 0.999 * math.log(3)).all())


@covering(1, kind=["variance", "covariance"], which=["images", "both"], scale=[10.0, 100.0])
def test_two_classes_agree_with_samples(scale: float, which: str, kind: str, device: str) -> None:
    """MacKay's factor is within 0.02 of the integral of a sigmoid for every mean and variance; and the noise of 20,000
    samples and the errors of the moments of directions, here second-order in a spread of 0.1, are below 0.01."""
    labels = torch.arange(2, device=device)
    base = numbers(0, 1, 16)
    images = uncertain((base + 0.5 * numbers(1, 12, 16)).to(device), 0.1, kind)
    prompts = uncertain((base + 0.5 * numbers(2, 2, 16)).to(device), 0.1 if which == "both" else 1e-9, kind)
    found = ZeroShotClassifier(prompts, scale=scale).probabilities(images)
    assert float((found - sampled(images, prompts, scale, labels)).abs().max()) < 0.03


def test_many_classes_are_nearer_to_samples_than_a_softmax(device: str) -> None:
    """The approximation has no bound; where a softmax of the means is far off, it takes a third of the way."""
    labels, scale = torch.arange(8, device=device).repeat_interleave(2), 50.0
    base = numbers(0, 1, 32)
    images = uncertain((base + 0.5 * numbers(1, 20, 32)).to(device), 0.15)
    prompts = uncertain((base + 0.5 * numbers(2, 16, 32)).to(device), 0.05)
    truth = sampled(images, prompts, scale, labels, 4000)
    classifier = ZeroShotClassifier(prompts, scale=scale, labels=labels)
    certain = ZeroShotClassifier(prompts.raw_mean, scale=scale, labels=labels).probabilities(images.raw_mean)
    errors = [float((p - truth).abs().sum(1).mean()) / 2 for p in (classifier.probabilities(images), certain)]
    assert errors[0] < 0.66 * errors[1]
    assert errors[0] < 0.1


def test_several_prompts_of_a_class(device: str) -> None:
    """As CLIP has it: the mean of the directions, normalised. Labels may be any numbers in any order."""
    images, prompts = numbers(0, 6, 4).to(device), numbers(1, 5, 4).to(device)
    labels = torch.tensor([7, -2, 7, 3, -2], device=device)
    units = F.normalize(prompts)
    classes = F.normalize(torch.stack([units[labels == c].mean(0) for c in (-2, 3, 7)]))
    truth = (9.0 * F.normalize(images) @ classes.T).softmax(1)
    found = ZeroShotClassifier(prompts, scale=9.0, labels=labels)
    assert found.classes.tolist() == [-2, 3, 7]
    assert torch.allclose(found.probabilities(images), truth, rtol=1e-10, atol=1e-14)
    assert torch.equal(found.predict(images), found.classes[truth.argmax(1)])


def test_temperature_is_that_of_the_labels(device: str) -> None:
    """Labels that are drawn from the probabilities at one scale make up for another one, up to their number."""
    images, prompts, wrong = numbers(0, 4000, 6).to(device), numbers(1, 4, 6).to(device), 0.25
    true = ZeroShotClassifier(prompts, scale=5.0).probabilities(images)
    labels = torch.multinomial(true.cpu(), 1, generator=torch.Generator().manual_seed(0))[:, 0].to(device)
    classifier = ZeroShotClassifier(prompts, scale=5.0 * wrong)
    before = classifier.predict(images)
    assert classifier.fit_temperature(images, labels) == pytest.approx(wrong, rel=0.1)
    assert torch.equal(classifier.predict(images), before)
    p = classifier.probabilities(images)
    cost = F.nll_loss(p.log(), labels)
    for factor in (0.99, 1.01):
        other = ZeroShotClassifier(prompts, scale=5.0 * wrong)
        other.temperature = factor * classifier.temperature
        assert float(F.nll_loss(other.probabilities(images).log(), labels)) > float(cost)


def test_temperature_without_a_mistake_is_bounded(device: str) -> None:
    prompts = torch.eye(3, dtype=torch.float64, device=device)
    classifier = ZeroShotClassifier(prompts, scale=1.0)
    assert classifier.fit_temperature(prompts, torch.arange(3, device=device)) < 0.05
    assert classifier.fit_temperature(prompts, torch.tensor([1, 2, 0], device=device)) == pytest.approx(100.0)


def test_bad_input(device: str) -> None:
    prompts, images = numbers(0, 3, 4).to(device), numbers(1, 2, 4).to(device)
    for arguments, message in (
        ({"prompts": 3, "scale": 1.0}, "prompts: expected an EmbeddingDistribution"),
        ({"prompts": prompts, "scale": 0.0}, "scale: expected a finite number > 0"),
        ({"prompts": prompts, "scale": 1.0, "labels": torch.zeros(3).long()}, "two classes or more"),
        ({"prompts": torch.cat([prompts, -prompts]), "scale": 1.0, "labels": torch.arange(3).repeat(2)}, "opposite"),
    ):
        with pytest.raises(cc.InputError, match=message):
            ZeroShotClassifier(**arguments)
    classifier = ZeroShotClassifier(prompts, scale=1.0)
    for wrong in (images[:, :3], 0 * images, "images"):
        with pytest.raises(cc.InputError, match="images"):
            classifier.probabilities(wrong)
    for labels in (torch.tensor([0, 3]), torch.tensor([0])):
        with pytest.raises(cc.InputError, match="labels"):
            classifier.fit_temperature(images, labels.to(device))
    assert classifier.temperature == 1
