"""``fit`` in a ``torch.distributed`` process group: the posterior of one process on all ranks, or an error on all."""

import sys
import warnings
from typing import Any

import pytest
import torch
from group_cases import CASES, FAULTS, OTHERS, fitted, run, together, values
from torch import Tensor, distributed

ROUNDING = 1e-10

Said = list[dict[str, Any]]
"""What every process of a group said."""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_processes_fit_together(backend: str, device: str) -> None:
    """All in one start of the processes, which takes longer than what they do."""
    if backend == "nccl":
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        if gpus < 2:
            pytest.skip("nccl needs two GPUs")
        sizes = [(world,) for world in (3, 2) if world <= gpus]
    else:
        sizes = [(3, 2)]
    for worlds in sizes:
        for world, every in run(worlds, backend, device).items():
            check_fits(every, world, device)
            check_refusals(every, world)
            check_alone(every, world)
            check_failures(every, world)
            check_losses(every, world)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal up to rounding, with how far it is off."""
    if found.keys() != wanted.keys():
        return [f"{sorted(found)} for {sorted(wanted)}"]
    off = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    return [
        f"{name}: {off[name]:.2g}"
        for name in wanted
        if not off[name] <= ROUNDING * max(1, float(wanted[name].abs().max()))
    ]


def check_fits(every: Said, world: int, device: str) -> None:
    """All is as in one process, and the same bits in all."""
    wrong = {}
    for case in CASES:
        with warnings.catch_warnings():
            # A few random points are no data to fit; what is said of them is tested elsewhere.
            warnings.simplefilter("ignore")
            alone = values(fitted(device, case, together(case, world, device)))
        off = differences(every[0]["fits"][case], alone)
        if off:
            wrong[case] = off
        assert float(alone["raw 0"].abs().max()) > 0
        for said in every[1:]:
            mine = said["fits"][case]
            exact = "whole" not in case  # where each fits alone, in its own order
            for name, part in every[0]["fits"][case].items():
                same = torch.equal(part, mine[name]) if exact else torch.allclose(part, mine[name], atol=ROUNDING)
                assert same, (case, name)
    assert not wrong


REFUSED = {
    "encoders": "InputError: encoder: expected the same in all {world} processes",
    "options": "InputError: loss: expected the same in all {world} processes",
    "structures": "InputError: posterior: expected the same in all {world} processes",
    "seeds": "InputError: train_loader: expected samplers that give every point of the data set to one process",
    "nothing": "InputError: train_loader: expected at least one batch, got an empty loader",
    "cross terms": "UnsupportedError: pd_fix='full': every point is coupled with every other one",
    "two with the same": "InputError: train_loader: expected other points in every process, got the same in 0 and 1",
    "earlier fits": "InputError: earlier fit: expected the same in all {world} processes",
}


def check_refusals(every: Said, world: int) -> None:
    """What does not fit together is refused by all."""
    for rank, said in enumerate(every):
        texts = dict(said["refusals"])
        flag = texts.pop("only one flag")
        assert flag.startswith(
            "InputTypeError: override" if rank == world - 1 else OTHERS.format(world=world, last=rank)[:20]
        )
        assert texts.keys() == {name for name in REFUSED if world > 2 or "two with" not in name}
        for name, text in texts.items():
            assert text.startswith(REFUSED[name].format(world=world)), (name, text)


def check_alone(every: Said, world: int) -> None:
    """What one process does without the others takes all of the data, and says so."""
    for name, text in every[0]["alone"].items():
        if "whole" in name:
            assert text == "nothing", name
        else:
            assert text.startswith("UnsupportedError"), (name, text)
            assert f"DistributedSampler gives each of {world} processes a part of the data" in text


def check_failures(every: Said, world: int) -> None:
    """A failure in one process ends the others, and leaves all posteriors as they were."""
    own = {name: text for name, (_, _, text) in FAULTS.items()}
    own |= dict.fromkeys(("taking", "merging"), "MemoryError: no more")
    failing = {**dict.fromkeys(own, world - 1), "interrupted while waiting": 0}
    own["interrupted while waiting"] = "KeyboardInterrupt"
    for rank, said in enumerate(every):
        assert said["faults"].keys() == failing.keys()
        for name, text in said["faults"].items():
            wanted = own[name] if failing[name] == rank else OTHERS.format(last=failing[name], world=world)
            assert text.startswith(wanted), (name, text)
        for name, left in said["left"].items():
            assert all(torch.equal(part, left[key]) for key, part in said["before"].items() if name != "killed"), name
        assert not differences(said["after"], said["before"])


def check_losses(every: Said, world: int) -> None:
    """A process that does not come, or is killed, ends the others too."""
    lost = f"ProcessError: process {{}} of {world} lost the others during a fit"
    assert every[0]["absent"].startswith(lost.format(0))
    for rank, said in enumerate(every[:-1]):
        # nccl's watchdog may have been faster.
        assert said.get("killed", lost.format(rank)).startswith(lost.format(rank))
        assert not differences(said["left"].get("killed", said["after"]), said["after"])
