import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.experiments.networks import NETWORKS, GeM, make_network

SMALL = ["digits", "fashionmnist", "cifar10"]


def images(name, n=2):
    channels, height, width = NETWORKS[name]
    side = 32 if name.startswith("resnet") else height
    return torch.rand(n, channels, side, side if name.startswith("resnet") else width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "features", "parameters"),
    [
        ("digits", 1024, 1 * 32 * 9 + 32 + 32 * 64 * 9 + 64),
        ("fashionmnist", 9216, 1 * 32 * 9 + 32 + 32 * 64 * 9 + 64),
        ("cifar10", 9216, 3 * 32 * 9 + 32 + 32 * 64 * 9 + 64 + 64 * 64 * 9 + 64),
        # ResNet50 has 25,557,032 with its classifier of 2,049,000; one more is the exponent of the pooling
        ("resnet50_untrained", 2048, 25_557_032 - 2_049_000 + 1),
    ],
)
def test_shapes_and_parameters_are_the_papers(name, features, parameters, device):
    network = make_network(name, 5).to(device)
    assert isinstance(network[-1], nn.Linear)
    assert network[-1].in_features == features
    assert sum(p.numel() for p in network.parameters()) == parameters + 5 * (features + 1)
    out = network(images(name).to(device))
    assert out.shape == (2, 5)
    assert not torch.allclose(out.norm(dim=1), torch.ones(2, device=device))


def test_the_trunk_is_torchvisions():
    from torchvision.models import resnet50

    network, host = make_network("resnet50_untrained", 3).eval(), resnet50().eval()
    features = {key: value for key, value in host.state_dict().items() if not key.startswith("fc.")}
    network.trunk.load_state_dict(features)
    host.fc = nn.Identity()
    with torch.no_grad():
        x = torch.rand(2, 3, 64, 64)
        assert network.trunk(x).shape == (2, 2048, 2, 2)  # still a map, for GeM to pool
        # average pooling is torchvision's, and GeM's at exponent 1
        network.pool.p.fill_(1.0)
        assert torch.allclose(network.pool(network.trunk(x)), host(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@given(seed=st.integers(0, 2**31), p=st.floats(1, 20), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_gem_is_the_generalised_mean(device, seed, p, scale):
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) * scale
    pooled = GeM(p).to(device)(x.to(device)).cpu()
    wanted = x.double().clamp(min=1e-6).pow(p).mean((2, 3)).pow(1 / p)
    assert pooled.shape == (2, 3)
    assert torch.allclose(pooled.double(), wanted, rtol=1e-4)
    assert bool((pooled <= x.amax((2, 3)) * (1 + 1e-5)).all())
    assert bool((pooled >= x.mean((2, 3)) * (1 - 1e-5)).all())
