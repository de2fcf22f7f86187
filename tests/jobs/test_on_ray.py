"""Jobs on a local Ray of two cores: those of one process, whoever dies on the way."""

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from job_cases import POINTS, assert_same, data, fitted, posterior, write

import contrastive_curvature as cc
from contrastive_curvature.errors import ProcessError

pytestmark = [
    pytest.mark.slow,
    # Of Ray itself: files that it leaves to the garbage collector, and what it will call otherwise.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PARTS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with two cores, which is stopped whatever happens."""
    import ray

    context = ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False, logging_level="error"
    )
    try:
        yield context
    finally:
        ray.shutdown()


def reader(place: Path, deaths: dict[int, int]) -> Callable[[dict[str, Any]], Any]:
    """A ``read`` whose process dies in the middle of a part, some times, and that notes whatever it has read."""
    (place / "notes").mkdir(parents=True, exist_ok=True)

    def read(batch: dict[str, Any]) -> Any:
        first = int(2 * batch["weight"][0])
        (place / "notes" / f"{first}-{time.monotonic_ns()}").touch()
        for at, times in deaths.items():
            died = sum(1 for _ in place.glob(f"died-{at}-*"))
            if first == at and died < times:
                (place / f"died-{at}-{died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.from_numpy(batch["features"]), torch.from_numpy(batch["target"])

    return read


def started(place: Path) -> list[int]:
    """First rows of all batches that were read, in order of the rows."""
    return sorted(int(path.name.split("-")[0]) for path in (place / "notes").iterdir())


def source(folder: Path, read: Any = None) -> cc.jobs.ParquetParts:
    """Parts of a row group, the last one of two: 0, 25, 50, 60, 85, 110 are their first rows; batches of 10."""
    if not folder.exists():
        write(folder, *data())
    return cc.jobs.ParquetParts(folder, PARTS, batch_size=10, read=read)


def test_a_fit_loses_nothing_with_a_killed_process(cluster: Any, device: str, tmp_path: Path) -> None:
    x, la = data()[0], posterior()
    parts = source(tmp_path / "d", reader(tmp_path, {60: 2}))

    def make() -> Any:
        return copy.deepcopy(la)

    # Killed in the middle of a part of the first pass, and, when all states but one are there, of the second one.
    found = cc.jobs.fit_on_ray(make, parts, folder=tmp_path / "s", max_retries=4)
    assert_same(found, fitted(), x[:20])
    assert found.n_data == POINTS
    assert len(list(tmp_path.glob("died-*"))) == 2
    assert len(list((tmp_path / "s").glob("*.safetensors"))) == 2 * PARTS
    # Nothing is left to do, and a lost part is computed alone.
    before = started(tmp_path)
    (lost,) = (tmp_path / "s").glob("curvature-00001-*")
    lost.unlink()
    again = cc.jobs.fit_on_ray(la, parts, folder=tmp_path / "s")
    assert again is la
    assert torch.equal(*(one.posterior.fitted.clamped.diagonal() for one in (la, found)))
    more = started(tmp_path)
    for first in before:
        more.remove(first)
    # The first batch of a part is read once more before the pass.
    assert more == [25, 25, 35, 45]
    # States of other options or of another encoder are neither used nor joined by others.
    other = posterior()
    with torch.no_grad():
        other.model.model[2].bias[0] += 1e-9
    for changed in (posterior(margin=0.2), posterior(structure="diag"), other):
        with pytest.raises(cc.InputError, match="folder: expected a new or an empty folder"):
            cc.jobs.fit_on_ray(changed, parts, folder=tmp_path / "s")


def test_a_list_of_loaders_is_fitted(cluster: Any, device: str, tmp_path: Path) -> None:
    (x, y), la = data(), posterior(negative_samples=None)
    loaders = [[batch] for batch in zip(x.split(50), y.split(50), strict=True)]
    found = cc.jobs.fit_on_ray(la, loaders, folder=tmp_path / "s")
    assert_same(found, fitted(negative_samples=None), x[:20])
    with pytest.raises(cc.InputError, match="parts: expected None"):
        cc.jobs.fit_on_ray(la, [[(x, y)]], folder=tmp_path / "t", parts=2)
    with pytest.raises(cc.InputTypeError, match="source: expected a ParquetParts or a path"):
        cc.jobs.embed_on_ray(found, [x], tmp_path / "e")


@pytest.mark.filterwarnings("ignore::contrastive_curvature.OptimisticPValueWarning")
def test_embeddings_lose_nothing_with_a_killed_process(cluster: Any, device: str, tmp_path: Path) -> None:
    (x, y), la = data(), fitted()
    la.calibrate([(x, y)])
    parts = source(tmp_path / "d", reader(tmp_path, {120: 1}))
    folder = cc.jobs.embed_on_ray(la, parts, tmp_path / "e", keep=["target"])
    assert len(list(tmp_path.glob("died-*"))) == 1
    assert folder.missing() == []
    found, exact = pq.read_table(tmp_path / "e"), la(x)
    assert found.column("identifier").to_pylist() == [f"point {k}" for k in range(POINTS)]
    assert found.column("target").to_pylist() == y.tolist()
    assert np.allclose(np.array(found.column("mu").to_pylist()), exact.mu.detach(), rtol=0, atol=1e-7)
    assert np.allclose(found.column("uncertainty"), exact.uncertainty.detach(), rtol=1e-6)
    assert np.allclose(found.column("p_value"), exact.p_value, rtol=1e-12)


def test_a_bad_part_ends_the_job_with_its_own_error(cluster: Any, device: str, tmp_path: Path) -> None:
    x, y = data()
    x[80, 0] = torch.nan
    bad = cc.jobs.ParquetParts(write(tmp_path / "bad", x, y), PARTS, batch_size=10)
    with pytest.raises(cc.InputError, match="finite") as raised:
        cc.jobs.fit_on_ray(posterior(), bad, folder=tmp_path / "s")
    assert raised.value.__notes__ == ["statistics of part 3, in a process of Ray"]
    assert "part_statistics" in str(raised.value.__cause__)
    # What was running ends: no further state appears.
    time.sleep(2)
    there = sorted((tmp_path / "s").iterdir())
    time.sleep(2)
    assert sorted((tmp_path / "s").iterdir()) == there


def test_a_process_that_always_dies_ends_the_job(cluster: Any, device: str, tmp_path: Path) -> None:
    place, la = tmp_path, posterior()
    with pytest.raises(ProcessError, match=r"statistics of part 3: its process has died more than max_retries times"):
        cc.jobs.fit_on_ray(la, source(place / "d", reader(place, {60: 9})), folder=place / "s", max_retries=1)
    # Once the reason is gone, the same call goes on.
    found = cc.jobs.fit_on_ray(la, source(place / "d", reader(place, {})), folder=place / "s")
    assert_same(found, fitted(), data()[0][:20])
