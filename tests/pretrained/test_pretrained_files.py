"""The files of a saved posterior: written whole or not at all, and refused by name when anything is wrong with them."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_cases import encoder, fitted, predicts_the_same

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.io.pretrained import folder as writing
from contrastive_curvature.io.pretrained.folder import place_of, read, write

DEVICE = "cpu"
"""Files are the same on every device."""


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


def numbers_of(folder: Path) -> Path:
    (found,) = folder.glob("posterior-*.safetensors")
    return found


def visible(folder: Path) -> list[str]:
    """Names of the files, but for the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def loaded(folder: Path) -> Any:
    return cc.load_pretrained(folder, encoder())


def test_the_folder_holds_three_files_and_no_more(la: Any, tmp_path: Path) -> None:
    folder = la.save_pretrained(tmp_path / "a" / "b" / "saved")
    assert folder == tmp_path / "a" / "b" / "saved"
    assert visible(folder) == ["README.md", "config.json", numbers_of(folder).name]
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]
    assert predicts_the_same(la, loaded(folder), DEVICE)
    assert predicts_the_same(la, cc.load_pretrained(str(folder), encoder()), DEVICE)


def test_an_empty_folder_is_taken_and_a_link_is_followed(la: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert la.save_pretrained(tmp_path / "link") == tmp_path / "empty"
    assert (tmp_path / "link").is_symlink()
    assert predicts_the_same(la, loaded(tmp_path / "link"), DEVICE)


def test_overwrite_replaces_a_saved_posterior_and_keeps_other_files(
    la: Any, other: Any, saved: Path, tmp_path: Path
) -> None:
    (saved / "thumbnail.png").write_bytes(b"mine")
    with pytest.raises(cc.InputError, match=r"folder: expected a new folder.*holds a saved posterior.*overwrite=True"):
        other.save_pretrained(saved)
    assert predicts_the_same(la, loaded(saved), DEVICE)
    other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(other, loaded(saved), DEVICE)
    assert len(list(saved.glob("*.safetensors"))) == 1
    assert (saved / "thumbnail.png").read_bytes() == b"mine"
    assert "| structure | diag |" in (saved / "README.md").read_text()
    # The same once more, whose numbers have the same name.
    other.save_pretrained(saved, overwrite=True, notes="again")
    assert predicts_the_same(other, loaded(saved), DEVICE)
    assert "again" in (saved / "README.md").read_text()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(la: Any, tmp_path: Path, overwrite: bool) -> None:
    for name, content in (("config.json", b'{"model_type": "bert"}'), ("thesis.tex", b"x"), ("config.json", b"{")):
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(cc.InputError, match=f"which (has|holds) '{name}'.*Name another folder"):
            la.save_pretrained(folder, overwrite=overwrite)
        assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(name, content)]
        shutil.rmtree(folder)


def test_no_path_and_no_folder(la: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for wrong, message in [
        (3, "folder: expected a path of a folder, got 3"),
        (None, "folder: expected a path of a folder, got None"),
        ("", "folder: expected a path of a folder, got "),
        (tmp_path / "file", "which is a file"),
    ]:
        with pytest.raises(cc.InputError, match=message):
            la.save_pretrained(wrong)
    with pytest.raises(cc.InputError, match="overwrite: expected True or False"):
        la.save_pretrained(tmp_path / "new", overwrite="yes")
    assert visible(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"licence": "mit"}, "licence: expected an option among .*license.*, got licence"),
        ({"license": 3}, "license: expected a valid string, got 3"),
        ({"notes": "  "}, "notes: .* at least 1 character"),
        ({"tags": "one"}, "tags: expected a valid list, got one"),
        ({"tags": [3]}, r"tags\.0: expected a valid string, got 3"),
        ({"metrics": [0.3]}, "metrics: expected a valid dictionary"),
        ({"metrics": {"auroc": float("nan")}}, r"metrics\.auroc: expected a finite number, got nan"),
        ({"metrics": {3: 0.3}}, "metrics.*: expected a valid string, got 3"),
    ],
)
def test_malformed_options(la: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(cc.InputError, match=message):
        la.save_pretrained(tmp_path / "new", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_of_the_disk_leaves_what_was_there(
    la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[int] = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == number + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    new = saved.parent / "new"
    with pytest.raises(OSError, match="No space left"):
        other.save_pretrained(new)
    # The card is the last file: by then the new posterior is complete.
    assert visible(new) == (["config.json", numbers_of(new).name] if number == 2 else [])
    calls.clear()
    with pytest.raises(OSError, match="No space left"):
        other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(other if number == 2 else la, loaded(saved), DEVICE)
    assert len(visible(saved)) == 3


def contents(folder: Path) -> tuple[bytes, bytes, bytes, str]:
    path = numbers_of(folder)
    card, config = (folder / "README.md").read_bytes(), (folder / "config.json").read_bytes()
    return path.read_bytes(), config, card, path.name


CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


def killed_at(step: int, write: Callable[[], None]) -> bool:
    """Run in a child process that ends at a call of the system; whether it came to that."""
    child = os.fork()
    if child == 0:
        count = 0

        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def ending(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == step:
                    os._exit(9)
                count += 1
                return call(*args, **kwargs)

            return ending

        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        try:
            write()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_any_step_leaves_the_old_or_the_new(la: Any, other: Any, tmp_path: Path) -> None:
    old, new = (one.save_pretrained(tmp_path / name) for one, name in ((la, "old"), (other, "new")))
    files = {which: contents(which) for which in (old, new)}
    content, card = read(new)[0], (new / "README.md").read_text()
    numbers = numbers_of(new).read_bytes()
    for start in (None, old):
        step, states = 0, set()
        while True:
            place = tmp_path / f"target-{step}"
            if start is not None:
                shutil.copytree(start, place)
            ended = killed_at(step, lambda: write(place_of(place), content, numbers, card, overwrite=True))  # noqa: B023
            if (place / "config.json").exists():
                name = read(place)[0].numbers.name
                assert (place / name).read_bytes() in (numbers, *([files[old][0]] if start else []))
                states.add(name)
            else:
                assert start is None
                states.add(None)
            if not ended:
                break
            # The next one finishes, and leaves nothing of the killed one.
            write(place_of(place), content, numbers, card, overwrite=True)
            assert contents(place) == files[new]
            assert len(visible(place)) == 3
            shutil.rmtree(place)
            step += 1
        assert states == {None if start is None else files[old][3], files[new][3]}
        assert step >= 6
        shutil.rmtree(place)


def test_an_interruption_leaves_nothing(la: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        la.save_pretrained(tmp_path / "new")
    assert visible(tmp_path / "new") == []


def test_two_writers_that_replace_one_folder(la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third = fitted("last_layer", "full", DEVICE)
    write, begun = artifact.write_whole, threading.Event()
    second = threading.Thread(target=lambda: third.save_pretrained(saved, overwrite=True))

    def slow(path: Path, writer: Any) -> None:
        write(path, writer)
        if threading.current_thread() is not second and path.suffix == ".safetensors" and not begun.is_set():
            begun.set()
            second.start()
            # Without a lock, it is through by then, and has removed the numbers.
            second.join(1)

    monkeypatch.setattr(writing, "write_whole", slow)
    other.save_pretrained(saved, overwrite=True)
    second.join()
    assert predicts_the_same(third, loaded(saved), DEVICE)
    assert len(visible(saved)) == 3


def test_what_came_between_the_check_and_the_write_stays(
    la: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contrastive_curvature.io.pretrained import save as saving

    numbers_file = saving.numbers_file
    precious = {"config.json": b'{"mine": 1}', "README.md": b"precious"}
    new = tmp_path / "new"

    def meanwhile(content: bytes) -> Any:
        monkeypatch.setattr(saving, "numbers_file", numbers_file)
        if foreign:
            new.mkdir()
            for name, content in precious.items():
                (new / name).write_bytes(content)
        else:
            other.save_pretrained(new)
        return numbers_file(content)

    for foreign, overwrite in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(saving, "numbers_file", meanwhile)
        with pytest.raises(cc.InputError, match="no saved posterior" if foreign else "overwrite=True"):
            la.save_pretrained(new, overwrite=overwrite)
        if foreign:
            assert {name: (new / name).read_bytes() for name in visible(new)} == precious
        else:
            assert predicts_the_same(other, loaded(new), DEVICE)
        shutil.rmtree(new)


@pytest.mark.parametrize("content", [b"", b'{"format": "contrastive_curv', b"\xff\xfe"])
def test_a_damaged_folder_can_be_saved_again(la: Any, other: Any, saved: Path, content: bytes) -> None:
    (saved / "config.json").write_bytes(content)
    with pytest.raises(cc.InputError, match="overwrite=True"):
        other.save_pretrained(saved)
    other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(other, loaded(saved), DEVICE)
    assert len(visible(saved)) == 3


def test_the_home_folder(la: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert la.save_pretrained("~/mine") == tmp_path / "mine"
    assert predicts_the_same(la, loaded("~/mine"), DEVICE)  # type: ignore[arg-type]


def test_a_reader_meets_a_writer(la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256_of = artifact.sha256_of

    def late(path: Path) -> str:
        monkeypatch.setattr(writing, "sha256_of", sha256_of)
        other.save_pretrained(saved, overwrite=True)
        return sha256_of(path)

    monkeypatch.setattr(writing, "sha256_of", late)
    assert predicts_the_same(other, loaded(saved), DEVICE)


def test_missing_files_are_named(la: Any, saved: Path, tmp_path: Path) -> None:
    config = saved / "config.json"
    content = config.read_bytes()
    path = numbers_of(saved)
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    with pytest.raises(cc.InputError, match=f"{path}: expected a saved posterior, got no such file"):
        loaded(saved)
    la.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(la, loaded(saved), DEVICE)
    config.unlink()
    for call in (loaded, cc.pretrained.read_info, cc.pretrained.load_match):
        with pytest.raises(cc.InputError, match=r"expected a saved posterior, got no config\.json there"):
            call(saved)
    config.write_bytes(content)
    (saved / "README.md").unlink()
    assert predicts_the_same(la, loaded(saved), DEVICE)
    with pytest.raises(cc.InputError, match="source: expected a folder that exists"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(cc.InputError, match=r"source: expected a folder, got .* which is a file"):
        loaded(path)
    no_paths: tuple[Any, ...] = (3, None, b"x", "")
    for wrong in no_paths:
        with pytest.raises(cc.InputTypeError, match="source: expected a path"):
            loaded(wrong)
    others: tuple[Any, ...] = (torch.nn.Linear, None, "encoder")
    for wrong in others:
        with pytest.raises(cc.InputTypeError, match=r"encoder: expected a torch\.nn\.Module"):
            cc.load_pretrained(saved, wrong)


def test_foreign_damaged_and_later_files(la: Any, saved: Path) -> None:
    path = saved / "config.json"
    later = {**json.loads(path.read_bytes()), "version": 99, "written_by": "7.1"}
    for content, message in [
        (b"", "no whole JSON"),
        (path.read_bytes()[:200], "no whole JSON"),
        (b'{"model_type": "bert"}', "something else"),
        (json.dumps(later).encode(), r"of version 2, got version 99\. contrastive_curvature 7\.1 wrote it"),
    ]:
        path.write_bytes(content)
        for call in (loaded, cc.pretrained.read_info):
            with pytest.raises(cc.InputError, match=message) as error:
                call(saved)
            assert str(error.value).startswith(f"{path}: expected a saved posterior")
    # A later release's folder is replaced, too, where the user says so.
    la.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(la, loaded(saved), DEVICE)
    assert len(visible(saved)) == 3


def attempt(call: Callable[[Path], Any], folder: Path) -> tuple[Any, str]:
    """What a call returns, or the message of the library's error."""
    try:
        return call(folder), ""
    except cc.ContrastiveCurvatureError as error:
        return None, str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.data())
def test_any_changed_byte_and_any_truncation_is_noticed(la: Any, saved: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([saved / "config.json", numbers_of(saved)]))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        changed = content[:place]
    else:
        changed = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    path.write_bytes(changed)
    found, refusal = attempt(loaded, saved)
    path.write_bytes(content)
    if found is None:
        assert refusal.startswith(f"{path}: expected ")
    else:
        # White space, or the name of the release.
        assert path.name == "config.json"
        assert json.loads(changed)["content"] == json.loads(content)["content"]
        assert predicts_the_same(la, found, DEVICE)


def test_nothing_is_unpickled_or_run(saved: Path, la: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    model = encoder()
    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load"), (os, "system")):
        monkeypatch.setattr(module, name, never)
    assert predicts_the_same(la, cc.load_pretrained(saved, model), DEVICE)


def test_a_posterior_that_does_not_load_leaves_the_encoder_as_it_was(saved: Path) -> None:
    model = encoder(seed=3).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(cc.InputError):
        cc.load_pretrained(saved, model)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
