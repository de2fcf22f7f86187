"""The folder of a saved posterior: what is in it, what it replaces; others are refused by name."""

import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_cases import encoder, fitted, predicts_the_same
from tables import each, refused

import contrastive_curvature as cc
from contrastive_curvature import artifact

DEVICE = "cpu"
"""Files are the same on every device."""

FILE = "posterior.safetensors"


@pytest.fixture(scope="module")
def la() -> Any:
    return fitted("last_layer", "kron", DEVICE)


@pytest.fixture(scope="module")
def other() -> Any:
    return fitted("last_layer", "diag", DEVICE)


@pytest.fixture
def saved(la: Any, tmp_path: Path) -> Path:
    folder: Path = la.save_pretrained(tmp_path / "saved")
    return folder


def loaded(folder: Path) -> Any:
    return cc.load_pretrained(folder, encoder())


def test_the_folder_holds_one_file_and_no_more(la: Any, tmp_path: Path) -> None:
    folder = la.save_pretrained(tmp_path / "a" / "b" / "saved")
    assert folder == tmp_path / "a" / "b" / "saved"
    assert os.listdir(folder) == [FILE]
    assert os.listdir(folder.parent) == ["saved"]
    assert predicts_the_same(la, loaded(folder), DEVICE)


def test_overwrite_replaces_a_saved_posterior_and_keeps_other_files(la: Any, other: Any, saved: Path) -> None:
    (saved / "README.md").write_text("mine")
    with pytest.raises(cc.InputError, match=r"folder: expected a new or an empty .*a saved posterior.*overwrite=True"):
        other.save_pretrained(saved)
    assert predicts_the_same(la, loaded(saved), DEVICE)
    other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(other, loaded(saved), DEVICE)
    assert sorted(os.listdir(saved)) == ["README.md", FILE]
    assert (saved / "README.md").read_text() == "mine"


@each("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(la: Any, tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / f"mine {overwrite}"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(cc.InputError, match=r"which has 'thesis\.tex' in it.*Name another folder"):
        la.save_pretrained(folder, overwrite=overwrite)
    assert os.listdir(folder) == ["thesis.tex"]


def test_options_that_it_does_not_have(la: Any, saved: Path, tmp_path: Path) -> None:
    for call, name in (
        (lambda: la.save_pretrained(tmp_path / "new", license="mit"), "license"),
        (lambda: cc.load_pretrained(saved, encoder(), revision="main"), "revision"),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call()
    assert not (tmp_path / "new").exists()


def test_missing_damaged_foreign_and_later_files(la: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved / FILE
    content = path.read_bytes()
    monkeypatch.setattr(artifact, "VERSION", 99)
    la.save_pretrained(saved, overwrite=True)
    monkeypatch.undo()
    later = path.read_bytes()
    for new, message in (
        (
            None,
            r"no such file\. Name a folder that la\.save_pretrained\(folder\) wrote\..* 0\.2 is not read: fit again",
        ),
        (b"", "a damaged one"),
        (content[:200], "a damaged one"),
        (later, r"of version [0-9]+, got version 99\. contrastive_curvature .* wrote it"),
        (content[:-1] + bytes([content[-1] ^ 1]), "its checksum is another. Copy or download"),
    ):
        path.unlink(missing_ok=True)
        if new is not None:
            path.write_bytes(new)
        # Information alone is in the header.
        for call in (loaded, cc.pretrained.read_info)[: 1 if "checksum" in message else 2]:
            with pytest.raises(cc.InputError, match=message) as error:
                call(saved)
            assert str(error.value).startswith(f"{path}: expected a saved posterior")
    # What is damaged or of a later release is replaced, too, where the user says so.
    la.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(la, loaded(saved), DEVICE)
    for call in (loaded, cc.pretrained.read_info):
        says = ("source: expected a folder that exists, got user/name", "keep_and_serve.md#the-hugging-face-hub")
        refused(partial(call, "user/name"), *says)
    with pytest.raises(cc.InputTypeError, match=r"encoder: expected a torch\.nn\.Module"):
        cc.load_pretrained(saved, torch.nn.Linear)


def test_nothing_is_written_through_a_link(other: Any, saved: Path, tmp_path: Path) -> None:
    content = (saved / FILE).read_bytes()
    shutil.move(saved / FILE, tmp_path / FILE)
    (saved / FILE).symlink_to(tmp_path / FILE)
    other.save_pretrained(saved, overwrite=True)
    assert (tmp_path / FILE).read_bytes() == content
    assert not (saved / FILE).is_symlink()
    assert predicts_the_same(other, loaded(saved), DEVICE)


def test_nothing_is_unpickled_or_run(saved: Path, la: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    model = encoder()
    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load"), (os, "system")):
        monkeypatch.setattr(module, name, never)
    assert predicts_the_same(la, cc.load_pretrained(saved, model), DEVICE)
