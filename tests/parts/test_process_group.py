"""The fit of the page in two processes is the fit in one process; a fit of one process's data alone warns."""

import datetime
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devices import START_METHOD
from laplace import Laplace
from torch import Tensor, distributed, multiprocessing
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature as cc

PROCESSES = 2
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "large_data.md").read_text(encoding="utf-8")
(RECIPE,) = re.findall(r"^## Several processes.*?^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def values(la: Any, x: Tensor) -> dict[str, Tensor]:
    found = la(x)
    out = {f"raw {k}": part for k, part in enumerate(la.curvature.tensors())}
    out |= {"prior": la.prior_precision, "mean": found.raw_mean, "covariance": found.covariance}
    numbers = {"loss": la.loss, "cost": la.cost, "n": la.n_data, "norm": la.typical_norm}
    out |= {name: torch.tensor(float(number)) for name, number in numbers.items()}
    return {name: part.detach().clone() for name, part in out.items()}


def attempt(act: Callable[[], Any]) -> str:
    """What a call raises, or what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(str(warning.message) for warning in caught)


def work(rank: int, folder: Path) -> None:
    """Run the recipe, then variants of it, in one of the processes."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=120)
    where = {"init_method": f"file://{folder}/meet", "rank": rank, "world_size": PROCESSES, "timeout": limit}
    recipe: dict[str, Any] = {}
    with mock.patch.object(distributed, "init_process_group", partial(distributed.init_process_group, **where)):
        exec(RECIPE, recipe)
    la, encoder, data, merged, part = (recipe[name] for name in ("la", "encoder", "data", "merged", "part"))
    assert part == (rank, PROCESSES)
    fitted = values(la, data.tensors[0][:5])
    whole, statistics = DataLoader(data, 256), la.part_statistics(recipe["loader"], part)

    def divided(**how: Any) -> Any:
        return DataLoader(data, 256, sampler=DistributedSampler(data, **how))

    def fit_divided_otherwise() -> None:
        loader = divided(seed=rank)
        la.part_curvature(loader, part, merged(la.part_statistics(loader, part)))

    pairs = Laplace(cc.TwoTowers(encoder, encoder), "contrastive", backend_kwargs={"loss": cc.InfoNCELoss()})
    views = [(data.tensors[0][:8], data.tensors[0][8:16])]
    said = {
        "everything": attempt(lambda: merged(la.part_statistics(whole, part))),
        "another part": attempt(lambda: la.part_statistics(divided(rank=1 - rank), part)),
        "another division": attempt(fit_divided_otherwise),
        "missing": attempt(lambda: la.part_curvature(recipe["loader"], part, statistics)),
        "fit of a part": attempt(lambda: la.fit(recipe["loader"])),
        "fit": attempt(lambda: la.fit(whole)),
        "update": attempt(lambda: la.update(whole)),
        "towers": attempt(lambda: pairs.fit(views)),
    }
    torch.save((encoder, data.tensors, fitted, said), folder / f"{rank}.pt")
    distributed.destroy_process_group()


SAID = {
    "everything": "InputError: states: expected other points in every part, got the same 1001 points in parts 0 and 1",
    "another part": "InputError: loader: expected part {0} of 2, as part= says, got rank {1} of 2",
    "another division": "InputError: statistics: expected every point in one part, got point",
    "missing": "InputError: statistics: expected all 2 parts, got none of [{1}]",
    "fit of a part": "UnsupportedError: train_loader: DistributedSampler gives each of 2 processes a part of the data",
    "fit": "fit: each of the 2 processes of torch.distributed fits only the data of its own loader",
    "update": "fit: each of the 2 processes of torch.distributed fits only the data of its own loader",
    "towers": "fit: each of the 2 processes of torch.distributed fits only the data of its own loader",
}


@pytest.fixture
def double() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.usefixtures("double")
def test_the_recipe_of_the_page(tmp_path: Path) -> None:
    multiprocessing.start_processes(work, (tmp_path,), PROCESSES, start_method=START_METHOD)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]
    for rank, (_, _, fitted, said) in enumerate(found):
        assert said.keys() == SAID.keys()
        for name, text in said.items():
            assert SAID[name].format(rank, 1 - rank) in text, (rank, name, text)
        for name in ("fit of a part", "fit"):
            (link,) = re.findall(r"docs/large_data.md#([\w-]+)", said[name])
            assert link == "several-processes-torchrun"
        assert all(torch.equal(part, found[0][2][name]) for name, part in fitted.items())
    encoder, tensors, fitted, _ = found[0]
    alone = Laplace(encoder, "contrastive", backend_kwargs={"negative_samples": 500})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of one process
        alone.fit(DataLoader(TensorDataset(*tensors), 256))
    alone.optimize_prior_precision()
    for name, wanted in values(alone, tensors[0][:5]).items():
        assert torch.allclose(fitted[name], wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max())), name
    assert int(fitted["n"]) == len(tensors[0]), "a repeated point counts once"
