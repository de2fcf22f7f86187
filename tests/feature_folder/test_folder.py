"""What is written is what is read: content, shards, slices, damaged headers."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_networks import POINTS, WIDTH, data, encoder, loader
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import each, refused
from tiny import OfMapping
from torch import Tensor

import contrastive_curvature as cc


def write(path: Path, device: str, **options: Any) -> cc.FeatureFolder:
    x, y = data(device)
    return cc.features(encoder(device), loader(x, y), path, **{"rows_per_part": 12, **options})


def hidden(device: str) -> Tensor:
    """What the last layer takes in."""
    with torch.no_grad():
        return encoder(device)[:2](data(device)[0]).cpu()


@each("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_content(dtype: str, device: str, tmp_path: Path) -> None:
    folder = write(tmp_path / dtype, device, dtype=dtype)
    wanted = hidden(device).to(getattr(torch, dtype))
    lifted = wanted.to(torch.float64 if dtype == "float64" else torch.float32)
    batches = list(cc.FeatureFolder(folder.path, batch_size=13))
    assert len(batches) == len(cc.FeatureFolder(folder.path, batch_size=13)) == 4
    found = torch.cat([inputs["contrastive_curvature.features"] for inputs, _ in batches])
    # The computation in batches of another size rounds the last bits.
    assert torch.allclose(found, lifted, rtol=4 * torch.finfo(wanted.dtype).eps, atol=1e-14)
    assert torch.equal(torch.from_numpy(folder.numpy()), found)
    assert torch.equal(torch.from_numpy(folder.numpy(5, 31)), found[5:31])
    assert folder.numpy(7, 7).shape == (0, WIDTH)
    assert torch.equal(torch.cat([targets for _, targets in batches]), data()[1])
    assert torch.equal(folder.targets, data()[1])
    assert folder.identifiers.tolist() == list(range(POINTS))
    assert (folder.width, folder.dtype, folder.last_layer_name) == (WIDTH, wanted.dtype, "2")
    assert len(folder.dataset) == POINTS
    assert torch.equal(folder.numbers, torch.arange(POINTS))


@settings(max_examples=15)
@given(count=st.integers(1, 70), rows=st.integers(1, 60), size=st.integers(1, 60), seed=st.none() | st.integers(0, 9))
def test_shards_are_a_partition(count, rows, size, seed, device, tmp_path_factory) -> None:
    folder = write(tmp_path_factory.mktemp("f") / "f", device, dtype="float64", rows_per_part=rows)
    whole = cc.FeatureFolder(folder.path, batch_size=size, seed=seed)
    shards = [whole.shard(index, count) for index in range(count)]
    assert torch.cat([shard.numbers.sort().values for shard in shards]).tolist() == list(range(POINTS))
    sizes = [len(shard.numbers) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    for shard in shards:
        mine = shard.numbers
        assert shard.identifiers.tolist() == mine.sort().values.tolist()
        assert np.array_equal(shard.features, folder.features[mine.sort().values.numpy()])
        found = [(inputs["contrastive_curvature.features"], targets) for inputs, targets in shard]
        assert len(found) == len(shard)
        assert all(len(targets) <= size for _, targets in found)
        if found:
            assert torch.equal(torch.cat([targets for _, targets in found]), folder.targets[mine])
            assert torch.equal(torch.cat([part for part, _ in found]), torch.from_numpy(folder.numpy())[mine])
    inner = whole.shard(count - 1, count).shard(0, 2)
    assert inner.dataset.start == shards[-1].dataset.start


def test_pickle_opens_the_same_points(device: str, tmp_path: Path) -> None:
    shard = cc.FeatureFolder(write(tmp_path / "f", device).path, batch_size=5).shard(1, 3)
    stored = pickle.dumps(shard)
    assert len(stored) < 1000
    again = pickle.loads(stored)
    assert (again.dataset, again.batch_size) == (shard.dataset, 5)
    assert np.array_equal(again.numpy(), shard.numpy())


@each("targets", [torch.rand(POINTS, 2, 3), torch.arange(POINTS) % 2 == 0, torch.rand(POINTS).double()])
def test_targets_of_other_kinds(targets: Tensor, device: str, tmp_path: Path) -> None:
    path = tmp_path / str(targets.dtype)
    folder = cc.features(encoder(device), loader(data(device)[0], targets), path, rows_per_part=12)
    assert folder.targets.dtype is targets.dtype
    assert torch.equal(folder.targets, targets)
    cc.features(encoder(device), loader(data(device)[0], targets), path)


def test_shuffling_loader_is_read_in_the_order_of_its_data(device: str, tmp_path: Path) -> None:
    x, y = data(device)
    folder = cc.features(encoder(device), loader(x, y, shuffle=True), tmp_path / "f")
    assert torch.equal(folder.targets, y.cpu())
    cc.features(encoder(device), loader(x, y, shuffle=True), tmp_path / "f")


def test_mappings_and_plain_batches(device: str, tmp_path: Path) -> None:
    (x, y), model = data(device), OfMapping(encoder(device), "image")
    given_batches = [{"image": x[:20], "class": y[:20]}, {"image": x[20:], "class": y[20:]}]
    folder = cc.features(model, given_batches, tmp_path / "f", label_key="class", dtype="float64")
    assert torch.allclose(torch.from_numpy(folder.numpy()), hidden(device), rtol=1e-12)
    refused(lambda: cc.features(model, given_batches, tmp_path / "g"), "loader:", "labels under 'labels'")


def test_options_of_the_folder(device: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "f", device)
    for options in ({"batch_size": 0}, {"batch_size": 2.5}, {"seed": "a"}):
        refused(partial(cc.FeatureFolder, folder.path, **options), *options)
    refused(lambda: cc.FeatureFolder(tmp_path), "a feature folder, got no such file")
    refused(lambda: folder.shard(2, 2), "index")
    refused(lambda: folder.numpy(0, POINTS + 1), "start, stop")
