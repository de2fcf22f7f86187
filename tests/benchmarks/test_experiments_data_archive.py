"""Photographs that stay in their archive."""

import shutil
import zipfile

import pytest
import torch
from benchmark_data_files import write_lfw

from benchmarks.experiments.data import load_data, loader
from contrastive_curvature.errors import InputError


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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_several_processes_read_one_archive(both):
    packed = load_data("lfw", both[1], ood="none", image_size=16)
    packed.train_plain.images([0])  # the archive is open in this process
    found = torch.cat([x for x, _ in loader(packed.train_plain, 1, workers=2)])
    assert torch.equal(found, packed.train_plain.images([0, 1, 2]))


def test_images_that_an_archive_lacks_are_named(both):
    path = both[1] / "lfw-py" / "lfw-deepfunneled.zip"
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if "Cy_D" not in name}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(InputError, match=r"1 missing, the first \S*zip\S*Cy_D_0001\.jpg"):
        load_data("lfw", both[1], ood="none")


def test_a_damaged_image_in_an_archive_is_named(both):
    path = both[1] / "lfw-py" / "lfw-deepfunneled.zip"
    with zipfile.ZipFile(path) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("Eve_F_0002.jpg"))
    content = bytearray(path.read_bytes())
    start = entry.header_offset + 30 + len(entry.filename)
    content[start : start + entry.compress_size] = bytes(entry.compress_size)
    path.write_bytes(content)
    data = load_data("lfw", both[1], ood="none", image_size=16)
    with pytest.raises(InputError, match=r"Eve_F_0002\.jpg: expected an image file, got one that cannot be read"):
        data.test.images([1])
    assert data.test.images([0]).shape == (1, 3, 16, 16)


def test_an_archive_that_was_cut_is_named(both):
    path = both[1] / "lfw-py" / "lfw-deepfunneled.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"lfw-deepfunneled\.zip: expected a zip archive, got a damaged one"):
        load_data("lfw", both[1], ood="none")
