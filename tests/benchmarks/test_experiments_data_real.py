"""The loaders on the published files, where a folder has them: ``CONTRASTIVE_CURVATURE_DATA``, or ``../shared/data``.

Nothing is copied from there, and nothing is fetched.
"""

import os
from pathlib import Path

import pytest

from benchmarks.experiments.data import load_data

PROJECT = Path(__file__).resolve().parents[2]
ROOT = Path(os.environ.get("CONTRASTIVE_CURVATURE_DATA", PROJECT.parent / "shared" / "data"))


def needs(*names):
    missing = [name for name in names if not (ROOT / name).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} in {ROOT}")


faces = needs("lfw-py/lfw-deepfunneled.zip", "lfw-py/peopleDevTrain.txt", "lfw-py/peopleDevTest.txt")
drawings = needs("omniglot/images_background.zip", "omniglot/images_evaluation.zip")
digits = needs("MNIST/raw/t10k-images-idx3-ubyte.gz")


@faces
def test_faces_in_the_published_split_and_in_their_archive():
    data = load_data("lfw", ROOT, ood="none", image_size=64)
    assert (len(data.train), len(data.test)) == (9525, 3708)
    assert (len(data.train.targets.unique()), len(data.test.targets.unique())) == (4038, 1711)
    assert not set(data.train.targets.tolist()) & set(data.test.targets.tolist())
    largest = data.train.targets.bincount().max() + data.test.targets.bincount().max()
    assert int(largest) > 200  # George W Bush has 530 pictures, of which all are in one part
    images = data.test.images(range(0, 3708, 500))
    assert images.shape == (8, 3, 64, 64)
    # Photographs, normalised with ImageNet's numbers: neither dark nor all alike.
    assert float(images.mean().abs()) < 1
    assert float(images.std()) > 0.5


@drawings
@digits
def test_all_of_omniglot_in_its_published_split():
    data = load_data("omniglot_full", ROOT)
    assert (len(data.train), len(data.test)) == (19_280, 13_180)
    assert (len(data.train.targets.unique()), len(data.test.targets.unique())) == (964, 659)
    assert all(part.targets.bincount().unique().tolist()[-1] == 20 for part in (data.train, data.test))
    assert not set(data.train.targets.tolist()) & set(data.test.targets.tolist())
    ink = data.train.images(range(0, 19_280, 100)).mean()
    assert 0.02 < float(ink) < 0.2  # strokes on an empty ground, not the reverse
