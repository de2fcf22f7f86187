"""What the tests of the command line share besides fixtures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from click.testing import Result

from contrastive_curvature.apps.cli import saved
from contrastive_curvature.apps.cli.sources import Columns, Source, open_source
from contrastive_curvature.artifact import read_tensors, write_tensors

WIDTH, DIM, CLASSES = 12, 4, 5
WEIGHT = np.random.default_rng(0).normal(size=(DIM, WIDTH)).astype(np.float32)
BIAS = np.linspace(-0.1, 0.1, DIM, dtype=np.float32)
CENTRES = 2 * np.random.default_rng(1).normal(size=(CLASSES + 1, WIDTH))

Run = Callable[..., Result]


def points(n: int, seed: int, classes: int = CLASSES) -> dict[str, np.ndarray]:
    """Features and labels of n inputs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    features = np.maximum(CENTRES[labels] + rng.normal(size=(n, WIDTH)), 0).astype(np.float32)
    return {"features": features, "labels": labels}


def opened(name: str, **columns: str) -> Source:
    """A source that is opened as the commands do."""
    return open_source(Path(name), Columns(**columns))


def encoder_file(folder: str = "posterior") -> Path:
    """The file that names the encoder of a posterior."""
    (found,) = Path(folder).glob("encoder-*.safetensors")
    return found


def rewrite_encoder(folder: str, **spec: object) -> None:
    """Write another encoder into that file on purpose, with a right checksum."""
    path = encoder_file(folder)
    header, tensors = read_tensors(path, saved.EncoderFile)
    write_tensors(path, saved.EncoderFile(spec={**header.spec, **spec}), tensors)


def error_of(result: Result) -> str:
    """The one line of an error."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stdout == ""
    return lines[0]
