"""What every test runs under: Hypothesis profiles, seeds, and one thread per process."""

import gc
import os
import random
from collections.abc import Generator, Iterator
from importlib.metadata import version
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")  # plots go to files, display or not

import numpy as np
import pytest
import torch
from devices import DEVICES, PRETENDED
from hypothesis import Phase, settings

# Timings on shared cores say nothing: no deadline. `ci`, which `make test` asks for, always tries the same examples.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("dev", deadline=None, max_examples=20)
# For work at the desk: says that something fails, at once, and leaves the smallest example to the others.
settings.register_profile("quick", deadline=None, max_examples=15, phases=(Phase.explicit, Phase.generate))
settings.register_profile("device", settings.get_profile("ci"), max_examples=2, phases=(Phase.explicit, Phase.generate))
settings.load_profile("ci" if os.environ.get("CI") else "dev")

THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else torch.get_num_threads()
torch.set_num_threads(THREADS)


LONGEST = {
    "test_process_group",
    "test_on_ray",
    "test_site",
    "test_types_for_users",
    "test_gallery_pages",
    "test_recipes",
}
"""Files whose tests wait for other processes, or run whole pages."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that no process of ``make test`` waits for another's last one."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    if not PRETENDED:
        return
    from pretend_device import CANNOT

    items[:] = [item for item in items if "device" in item.fixturenames]
    for item in items:
        for test, reason in CANNOT.items():
            if test in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"not on the pretended device: {reason}"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a ``device`` on all that there are."""
    given = [name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[:1]]
    if "device" in metafunc.fixturenames and "device" not in given:
        metafunc.parametrize("device", DEVICES)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test the same random numbers and as many threads, whichever tests ran before it."""
    torch.set_num_threads(THREADS)  # benchmarks set it: two processes of two threads each take ten times as long
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  scikit-learn draws from this generator
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Skip a test that needs curvlinops 3, whose operators ours are made of, where laplace-torch holds curvlinops 2."""
    try:
        return (yield)
    except ImportError as error:
        if "curvlinops" in str(error) and version("curvlinops-for-pytorch").startswith("2."):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """For tests that call the garbage collector: passing over all that is loaded would take a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
