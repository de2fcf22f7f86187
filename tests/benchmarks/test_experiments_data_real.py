"""The loaders on the published files, where a folder has them: ``CONTRASTIVE_CURVATURE_DATA``, or ``../shared/data``.

Nothing is copied from there, and nothing is fetched.
"""

import os
from pathlib import Path

import pytest

from benchmarks.experiments import cli
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


@faces
@digits
def test_faces_with_digits_as_the_unknown():
    data = load_data("lfw", ROOT, ood="mnist", image_size=64, test_size=50)
    assert (len(data.ood), data.ood_title) == (50, "MNIST")
    assert data.ood.images([0]).shape == (1, 3, 64, 64)


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


@pytest.mark.slow
@faces
@digits
def test_a_table_on_faces(tmp_path):
    """From random weights: it says nothing of the method, only that all parts fit together."""
    options = ["--table", "3", "--data", "lfw", "--ood", "mnist", "--network", "resnet50_untrained", "--dim", "8"]
    options += ["--image-size", "32", "--train-size", "64", "--test-size", "32", "--batch-size", "8", "--epochs", "1"]
    options += ["--per-class", "2", "--n-samples", "3", "--lr", "1e-4", "--data-root", str(ROOT), "--quiet"]
    # Of an encoder that has learned nothing, repulsion outweighs attraction, and the default curvature may be zero.
    options += ["--pd-fix", "psd"]
    rows = ["deterministic", "laplace_posthoc", "norm"]
    assert cli.main([*options, "--out", str(tmp_path), "--methods", *rows]) == 0
    text = (tmp_path / "results.md").read_text()
    assert "# Table 3: LFW; out of distribution: MNIST" in text
    assert "mnist out of distribution (there cub200)" in text
