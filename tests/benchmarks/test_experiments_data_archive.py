"""Photographs that stay in their archive."""

import shutil

import pytest
import torch
from benchmark_data_files import write_lfw

from benchmarks.experiments.data import load_data


@pytest.fixture
def both(tmp_path):
    """The same faces in a folder and in an archive."""
    folders = []
    for name in ("folder", "archive"):
        (tmp_path / name).mkdir()
        folders.append(write_lfw(tmp_path / name))
    shutil.make_archive(str(folders[1] / "lfw-deepfunneled"), "zip", folders[1], "lfw-deepfunneled")
    shutil.rmtree(folders[1] / "lfw-deepfunneled")
    return tmp_path / "folder", tmp_path / "archive"


def test_an_archive_is_read_as_its_folder(both):
    plain, packed = (load_data("lfw", root, ood="none", image_size=16) for root in both)
    assert plain.fingerprint() == packed.fingerprint()
    assert torch.equal(plain.test.images([0, 1, 2]), packed.test.images([0, 1, 2]))
    assert plain.train.targets.tolist() == packed.train.targets.tolist()
    assert not (both[1] / "lfw-py" / "lfw-deepfunneled").exists()  # nothing was unpacked
