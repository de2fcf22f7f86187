"""A tiny retrieval task, and methods fitted on it, for the tests of the benchmarks' methods."""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from benchmarks.experiments.methods import Method, Setting, make_method

__all__ = ["CLASSES", "fit", "make_data", "make_images", "make_setting"]

CLASSES = 4


def make_images(per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Each class has a bright row of its own; uint8 (N, 1, 8, 8) and labels (N,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat(per_class)
    pixels = torch.randint(0, 120, (len(labels), 1, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(len(labels)), 0, 2 * labels] += 130
    return pixels, labels


def make_data() -> RetrievalData:
    return RetrievalData(
        "tiny",
        "tiny",
        "none",
        train=TensorSplit(*make_images(10, 0)),
        test=TensorSplit(*make_images(3, 1)),
    )


def make_setting(device: str = "cpu", **changes: object) -> Setting:
    given: dict[str, object] = {
        "network": "digits",
        "epochs": 2,
        "batch_size": 16,
        "n_samples": 6,
        "eval_batch": 7,
        "progress": False,
        "device": device,
    }
    return Setting(**given | changes)  # type: ignore[arg-type]


def fit(name: str, setting: Setting, folder: Path, data: RetrievalData, seed: int = 0, **options: object) -> Method:
    """A fitted method, with a base of its own where it needs one."""
    base = None
    if make_method(name, setting).needs_base:
        base = fit("deterministic", setting, folder / "base", data, seed)
    folder.mkdir(parents=True, exist_ok=True)
    method = make_method(name, setting, **options)
    method.fit(data, seed, folder, base)
    return method
