"""Training of the benchmarks' encoders: batches, interruptions, and that it trains."""

import dataclasses

import numpy as np
import pytest
import torch
from benchmark_methods import fit, make_data, make_setting
from devices import DEVICES
from tables import covering

from benchmarks.experiments.data.split import TensorSplit
from benchmarks.experiments.methods import embed, make_method
from benchmarks.experiments.methods.training import (
    ContrastiveStep,
    train,
    training_loader,
)
from contrastive_curvature.online import Trainer
from contrastive_curvature.online.randomness import Randomness


class Fragile(TensorSplit):
    """Fails when a batch too many is read, as a killed training does."""

    reads = float("inf")

    def images(self, rows):
        if self.reads <= 0:
            raise InterruptedError
        self.reads -= 1
        return super().images(rows)


def fragile_data():
    data = make_data()
    return dataclasses.replace(data, train=Fragile(data.train.pixels, data.train.targets))


@covering(
    1,
    reads=[3],
    name__changes=[("deterministic", {"per_class": 4}), ("mc_dropout", {}), ("pfe", {}), ("laplace_online", {})],
)
def test_an_interrupted_training_ends_as_an_uninterrupted_one(name, changes, reads, tmp_path, monkeypatch):
    # PFE's head then reads images in training, instead of their features before
    monkeypatch.setattr(embed, "CACHE_BYTES", 0)
    setting, data = make_setting(epochs=3, checkpoint_every=1, **changes), fragile_data()
    options = {"members": 2} if name == "deep_ensemble" else {}
    base = fit("deterministic", setting, tmp_path / "base", data) if name == "pfe" else None
    step, steps = Trainer._train_on_batch, []

    def counted(*given):
        loss = step(*given)
        steps.append(loss)
        return loss

    monkeypatch.setattr(Trainer, "_train_on_batch", counted)
    whole, folder = make_method(name, setting, **options), tmp_path / "parts"
    for made in (tmp_path / "whole", folder):
        made.mkdir()
    whole.fit(data, 0, tmp_path / "whole", base)
    losses = steps.copy()
    steps.clear()
    data.train.reads = reads
    with pytest.raises(InterruptedError):
        make_method(name, setting, **options).fit(data, 0, folder, base)
    data.train.reads = float("inf")
    # another process has other random numbers
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002  samplers draw from it
    resumed = make_method(name, setting, **options)
    resumed.fit(data, 0, folder, base)
    # Every step once, none of them again.
    assert steps == losses
    first, second = whole.predict(data.test), resumed.predict(data.test)
    assert torch.equal(first.mean, second.mean)
    assert name == "deterministic" or torch.equal(first.uncertainty, second.uncertainty)


@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_counts_positives_and_active_negatives(device):
    z = torch.randn(12, 3, device=device, dtype=torch.float64)
    labels = torch.arange(12, device=device) % 3
    u = torch.nn.functional.normalize(z, dim=1)
    squared = (u.unsqueeze(1) - u).square().sum(2)
    i, j = torch.triu_indices(12, 12, 1, device=device)
    alike, distances = labels[i] == labels[j], squared[i, j]
    near = ~alike & (distances < 0.7**2)
    wanted = distances[alike].mean() / 2 + (0.49 - distances[near]).mean() / 2
    step = ContrastiveStep(torch.nn.Identity(), 0.7)
    # the paper's weights of attraction and repulsion are one half each
    assert torch.allclose(step(z, labels), wanted / 2)
    assert float(step(z[:1], labels[:1])) == 0


def test_the_demonstrations_order_is_that_of_its_committed_results():
    """Permutations of one generator that nothing else draws from, and that a training that goes on finds again."""
    data = make_data()
    batches = training_loader(make_setting(own_order=True), data.train, seed=5)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        order = torch.randperm(len(data.train), generator=generator)
        for (x, y), rows in zip(batches, order.split(16), strict=True):
            assert torch.equal(x, data.train.images(rows.tolist()))
            assert torch.equal(y, data.train.targets[rows])
    assert any(part is batches.sampler.generator for part in Randomness(batches).generators)


def test_bfloat16_is_for_the_encoders_training_alone(tmp_path):
    data, seen = make_data(), []

    class Step(ContrastiveStep):
        def forward(self, x, targets):
            z = self.encoder(x)
            seen.append((z.dtype, self.encoder(x).detach(), self.encoder))
            return super().forward(x, targets)

    setting = make_setting(precision="bfloat16", lr=1e-30)
    step = train(setting, data, 0, tmp_path / "t.pt", make_step=lambda encoder, _: Step(encoder, setting.margin))
    assert {dtype for dtype, _, _ in seen} == {torch.float32}
    assert {p.dtype for p in step.parameters()} == {torch.float32}
    x = data.train.images(range(16)).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        after = step.get_submodule("encoder")(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = step.get_submodule("encoder")(x)
    assert "forward" not in vars(step.get_submodule("encoder"))
    assert rough.dtype == torch.bfloat16
    # a step of no length leaves the weights: what was seen in training is the rounded output of the same network
    batches = iter(training_loader(setting, data.train, 0))
    first = next(batches)[0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(seen[0][1], step.get_submodule("encoder")(first).float(), rtol=0, atol=0)
    assert not torch.equal(after, rough.float())
