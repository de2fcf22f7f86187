"""Training of the benchmarks' encoders: batches, interruptions, and that it trains."""

import pytest
import torch
from benchmark_methods import make_data, make_setting
from devices import DEVICES

from benchmarks.experiments.methods.training import (
    ContrastiveStep,
    _generators,
    train,
    training_loader,
)


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
    assert any(part is batches.sampler.generator for part in _generators(batches))


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
