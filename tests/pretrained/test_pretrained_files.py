"""The files of a saved posterior: written whole or not at all, and refused by name when anything is wrong with them."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from saved_cases import encoder, fitted, predicts_the_same

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.io.pretrained import folder as writing
from contrastive_curvature.io.pretrained.config import config_bytes, read_config
from contrastive_curvature.io.pretrained.folder import write_folder

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


def loaded(folder: Path) -> Any:
    return cc.load_pretrained(folder, encoder())


def test_the_folder_holds_three_files_and_no_more(la: Any, tmp_path: Path) -> None:
    folder = la.save_pretrained(tmp_path / "a" / "b" / "saved")
    assert folder == tmp_path / "a" / "b" / "saved"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", numbers_of(folder).name]
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
        with pytest.raises(cc.InputError, match=f"which holds '{name}' and no saved posterior"):
            la.save_pretrained(folder, overwrite=overwrite)
        assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(name, content)]
        shutil.rmtree(folder)


def test_no_path_and_no_folder(la: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "circle").symlink_to("circle")
    for wrong, message in [
        (3, "folder: expected a path of a folder, got a int"),
        (None, "folder: expected a path of a folder, got a NoneType"),
        ("", "folder: expected a path of a folder, got "),
        (b"x", "folder: expected a path of a folder"),
        ("a\0b", "folder: expected a path of a folder"),
        ("\ud800", "folder: expected a path of a folder"),
        (tmp_path / "file", "which is a file"),
        (
            tmp_path / "file" / "below",
            "folder: expected a folder that can be written, got .*(File exists|Not a directory)",
        ),
        (tmp_path / "circle", "symbolic links that form a circle"),
        (tmp_path / ("x" * 300), "folder: expected a folder that can be written, got .*File name too long"),
    ]:
        with pytest.raises(cc.InputError, match=message):
            la.save_pretrained(wrong)
    with pytest.raises(cc.InputError, match="overwrite: expected True or False"):
        la.save_pretrained(tmp_path / "new", overwrite="yes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"licence": "mit"}, "save_pretrained: expected options among .*license.*, got licence"),
        ({"license": 3}, "license: expected a text, got a int"),
        ({"notes": "  "}, "notes: expected a text, got an empty one"),
        ({"fitted_on": "\ud800"}, "fitted_on: expected a text, got one that has no UTF-8"),
        ({"tags": "one"}, "tags: expected a list of strings, got a str"),
        ({"tags": [3]}, "tags: expected a text, got a int"),
        ({"metrics": [0.3]}, "metrics: expected names and numbers, got a list"),
        ({"metrics": {"auroc": float("nan")}}, r"metrics\['auroc'\]: expected a finite number, got nan"),
        ({"metrics": {"auroc": "0.3"}}, r"metrics\['auroc'\]: expected a finite number"),
        ({"metrics": {3: 0.3}}, "metrics: expected a text, got a int"),
    ],
)
def test_malformed_options(la: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(cc.InputError, match=message):
        la.save_pretrained(tmp_path / "new", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_of_the_disk_leaves_what_was_there(
    la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, error: int, number: int
) -> None:
    written: list[str] = []

    def full(path: Path, content: bytes) -> None:
        if len(written) == number:
            raise OSError(error, os.strerror(error), str(path))
        written.append(path.name)
        artifact.write_whole(path, lambda file: file.write(content) and None)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "_write", full)
    new = saved.parent / "new"
    with pytest.raises(cc.InputError, match=f"folder: expected a folder that can be written.*{os.strerror(error)}"):
        other.save_pretrained(new)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    written.clear()
    told = "The new posterior is in the folder" if number == 2 else "Nothing was changed there"
    with pytest.raises(cc.InputError, match=f"{os.strerror(error)}.*{told}"):
        other.save_pretrained(saved, overwrite=True)
    # The card is the last file: by then the new posterior is complete.
    assert predicts_the_same(other if number == 2 else la, loaded(saved), DEVICE)
    assert len(list(saved.iterdir())) == 3


class Killed(BaseException):
    """Stands for the end of the process: nothing runs after it, also no cleaning up."""


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
    for start in (None, old):
        step, states = 0, set()
        while True:
            place = tmp_path / f"target-{step}"
            if start is not None:
                shutil.copytree(start, place)
            numbers, config, card, name = files[new]
            ended = killed_at(step, lambda: write_folder(place, (name, numbers), config, card))  # noqa: B023
            if place.exists():
                found = read_config(place)["tensors"]["file"]
                assert (place / found).read_bytes() in (numbers, *([files[old][0]] if start else []))
                states.add(found)
            else:
                assert start is None
                states.add(None)
            if not ended:
                break
            # The next one finishes, and leaves nothing of the killed one.
            write_folder(place, (name, numbers), config, card)
            assert contents(place) == files[new]
            assert len(list(place.iterdir())) == 3
            assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
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
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_writers_of_one_new_folder(
    la: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        la.save_pretrained(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    if overwrite:
        other.save_pretrained(tmp_path / "new", overwrite=True)
    else:
        with pytest.raises(cc.InputError, match="holds a saved posterior"):
            other.save_pretrained(tmp_path / "new")
    assert predicts_the_same(other if overwrite else la, loaded(tmp_path / "new"), DEVICE)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_two_writers_that_replace_one_folder(la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third = fitted("last_layer", "full", DEVICE)
    write, begun = writing._write, threading.Event()
    second = threading.Thread(target=lambda: third.save_pretrained(saved, overwrite=True))

    def slow(path: Path, content: bytes) -> None:
        write(path, content)
        if threading.current_thread() is not second and path.suffix == ".safetensors" and not begun.is_set():
            begun.set()
            second.start()
            # Without a lock, it is through by then, and has removed the numbers.
            second.join(1)

    monkeypatch.setattr(writing, "_write", slow)
    other.save_pretrained(saved, overwrite=True)
    second.join()
    assert predicts_the_same(third, loaded(saved), DEVICE)
    assert len(list(saved.iterdir())) == 3


def test_a_signal_handler_that_saves_while_a_posterior_is_saved(
    la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refusals = writing._write, []

    def interrupted(path: Path, content: bytes) -> None:
        write(path, content)
        if path.suffix == ".safetensors":
            with pytest.raises(cc.InputError, match="which this thread is saving to") as error:
                la.save_pretrained(saved, overwrite=True)
            refusals.append(error)

    monkeypatch.setattr(writing, "_write", interrupted)
    other.save_pretrained(saved, overwrite=True)
    assert len(refusals) == 1
    assert predicts_the_same(other, loaded(saved), DEVICE)
    monkeypatch.setattr(writing, "_write", write)
    la.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(la, loaded(saved), DEVICE)


def test_numbers_that_another_configuration_names_stay(
    la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a system without locks: another writer is done between the configuration and the end.
    write = writing._write

    def late(path: Path, content: bytes) -> None:
        write(path, content)
        if path.name == "README.md":
            monkeypatch.setattr(writing, "_write", write)
            shutil.copytree(elsewhere, saved, dirs_exist_ok=True)

    elsewhere = shutil.copytree(saved, saved.parent / "elsewhere")
    monkeypatch.setattr(writing, "_write", late)
    other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(la, loaded(saved), DEVICE)


def test_what_came_between_the_check_and_the_write_stays(
    la: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contrastive_curvature.io.pretrained import save as saving

    numbers_bytes = saving.numbers_bytes
    precious = {"config.json": b'{"mine": 1}', "README.md": b"precious"}
    new = tmp_path / "new"

    def meanwhile(tensors: Any) -> Any:
        monkeypatch.setattr(saving, "numbers_bytes", numbers_bytes)
        if foreign:
            new.mkdir()
            for name, content in precious.items():
                (new / name).write_bytes(content)
        else:
            other.save_pretrained(new)
        return numbers_bytes(tensors)

    for foreign, overwrite in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(saving, "numbers_bytes", meanwhile)
        with pytest.raises(cc.InputError, match="no saved posterior" if foreign else "overwrite=True"):
            la.save_pretrained(new, overwrite=overwrite)
        if foreign:
            assert {path.name: path.read_bytes() for path in new.iterdir()} == precious
        else:
            assert predicts_the_same(other, loaded(new), DEVICE)
        shutil.rmtree(new)


@pytest.mark.parametrize("content", [b"", b'{"format": "contrastive_curv', b"\xff\xfe", None])
def test_a_damaged_folder_can_be_saved_again(la: Any, other: Any, saved: Path, content: bytes | None) -> None:
    config = saved / "config.json"
    config.unlink() if content is None else config.write_bytes(content)
    with pytest.raises(cc.InputError, match="no saved posterior"):
        other.save_pretrained(saved)
    (saved / "thesis.tex").write_bytes(b"mine")
    with pytest.raises(cc.InputError, match="no saved posterior"):
        other.save_pretrained(saved, overwrite=True)
    (saved / "thesis.tex").unlink()
    other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(other, loaded(saved), DEVICE)
    assert len(list(saved.iterdir())) == 3


def test_the_home_folder(la: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert la.save_pretrained("~/mine") == tmp_path / "mine"
    assert predicts_the_same(la, cc.load_pretrained("~/mine", encoder()), DEVICE)
    with pytest.raises(cc.InputError, match="folder: expected a path of a folder"):
        la.save_pretrained("~nobody-of-this-name/mine")


def test_a_reader_meets_a_writer(la: Any, other: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contrastive_curvature.io.pretrained import load as reading

    replaced: list[int] = []

    def read(folder: Path) -> dict[str, Any]:
        config = read_config(folder)
        if not replaced:
            replaced.append(1)
            other.save_pretrained(saved, overwrite=True)
        return config

    monkeypatch.setattr(reading, "read_config", read)
    assert predicts_the_same(other, loaded(saved), DEVICE)


def test_missing_files_are_named(la: Any, saved: Path, tmp_path: Path) -> None:
    config = saved / "config.json"
    content = config.read_bytes()
    path = numbers_of(saved)
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    with pytest.raises(cc.InputError, match=f"{path}: expected the file as it was written, got no such file"):
        loaded(saved)
    moved.rename(path)
    config.unlink()
    for call in (loaded, cc.pretrained.read_info, cc.pretrained.load_match):
        with pytest.raises(cc.InputError, match=r"expected a folder with a config.json, got none of that name"):
            call(saved)
    config.mkdir()
    with pytest.raises(cc.InputError, match=r"config\.json: expected a file that can be read"):
        loaded(saved)
    config.rmdir()
    config.write_bytes(content)
    (saved / "README.md").unlink()
    assert predicts_the_same(la, loaded(saved), DEVICE)
    with pytest.raises(cc.InputError, match="source: expected a folder that exists"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(cc.InputError, match=r"source: expected a folder, got .* which is a file"):
        loaded(path)
    no_paths: tuple[Any, ...] = (3, None, b"x")
    for wrong in no_paths:
        with pytest.raises(cc.InputTypeError, match="source: expected a path"):
            loaded(wrong)
    others: tuple[Any, ...] = (torch.nn.Linear, None, "encoder")
    for wrong in others:
        with pytest.raises(cc.InputTypeError, match=r"encoder: expected a torch\.nn\.Module"):
            cc.load_pretrained(saved, wrong)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"no whole JSON"),
        (b'{"format": "contrastive_curvature.pre', "no whole JSON"),
        (b"\xff\xfe", "no whole JSON"),
        (b"[" * 100_000, "no whole JSON"),
        (b"[]", "those of something else"),
        (b"null", "those of something else"),
        (b'{"model_type": "bert"}', "those of something else"),
        (b'{"format": "contrastive_curvature.io.pretrained"}', "no version of the format"),
        (b'{"format": "contrastive_curvature.io.pretrained", "format_version": true}', "no version of the format"),
        (
            b'{"format": "contrastive_curvature.io.pretrained", "format_version": 99,'
            b' "versions": {"contrastive_curvature": "7.1"}}',
            "format version 1 or lower, got 99, written by contrastive_curvature 7.1. Update with: pip install -U",
        ),
        (b'{"format": "contrastive_curvature.io.pretrained", "format_version": 99, "versions": 3}', "or lower, got 99"),
        (b'{"format": "contrastive_curvature.io.pretrained", "format_version": 1}', "its checksum does not fit"),
    ],
)
def test_foreign_damaged_and_later_files(saved: Path, content: bytes, message: str) -> None:
    path = saved / "config.json"
    path.write_bytes(content)
    for call in (loaded, cc.pretrained.read_info):
        with pytest.raises(cc.InputError, match=message) as error:
            call(saved)
        assert str(error.value).startswith(f"{path}: expected ")


def test_a_file_of_any_size_is_not_read_whole(saved: Path) -> None:
    with (saved / "config.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(cc.InputError, match="more than 67,108,864 bytes"):
        loaded(saved)


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
        # White space of JSON, in which no content is.
        assert path.name == "config.json"
        assert json.loads(changed) == json.loads(content)
        assert predicts_the_same(la, found, DEVICE)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from paths(part, (*path, key))


def replaced(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    if value is Killed:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1e300,
    -0.5,
    "x",
    "../../etc/passwd",
    [],
    {},
    [[]],
    {"a": 1},
    {"$tensor": "state.mean"},
    {"$tensor": 3},
    {"$float": "nan"},
    {"$tuple": 3},
    {"$pairs": [[1]]},
    {"$pairs": [[[], 1]]},
    Killed,
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(number=st.integers(0, 10_000), value=st.sampled_from(ODD))
@example(number=0, value=Killed)
def test_a_changed_content_with_a_right_checksum_is_refused_or_harmless(
    la: Any, saved: Path, number: int, value: Any
) -> None:
    config = read_config(saved)
    config.pop("checksum")
    places = [path for path in paths(config) if path[0] not in ("format", "format_version")]
    changed = replaced(config, places[number % len(places)], value)
    content = (saved / "config.json").read_bytes()
    (saved / "config.json").write_bytes(config_bytes(changed))
    with warnings.catch_warnings():
        # A calibration of another statistic, or a state without a norm: left out, and said so.
        warnings.simplefilter("ignore", UserWarning)
        (found, refusal), (info, message) = attempt(loaded, saved), attempt(cc.pretrained.read_info, saved)
    (saved / "config.json").write_bytes(content)
    assert found is not None or str(saved) in refusal
    assert info is not None or str(saved) in message
    assert found is None or bool(found(torch.ones(2, 4).double()).mu.isfinite().all())


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """With a right checksum, and without white space: the writer of that cannot follow as many levels."""
    config.pop("checksum")
    checksum = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    (folder / "config.json").write_text(json.dumps({**config, "checksum": checksum}))


CALLS_OF_READING = [loaded, cc.pretrained.read_info, cc.pretrained.load_match]


@pytest.mark.parametrize("call", CALLS_OF_READING)
@pytest.mark.parametrize("levels", [150, 600])
def test_content_that_is_nested_deep_is_refused(saved: Path, call: Callable[[Path], Any], levels: int) -> None:
    config = read_config(saved)
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    config["posteriors"]["encoder"]["state"]["mean"] = deep
    config["match"] = {"use_uncertainty": deep, "curve": deep}
    write_config(saved, config)
    with pytest.raises(
        cc.InputError, match=r"config.json: expected the file as it was written, got more than 100 levels"
    ):
        call(saved)


@pytest.mark.parametrize(
    ("missing", "needed_by"),
    [
        ("match", CALLS_OF_READING[1:]),
        ("posteriors", CALLS_OF_READING[:2]),
        ("towers", CALLS_OF_READING[:2]),
        ("tensors", CALLS_OF_READING),
    ],
)
def test_a_missing_entry_is_refused_by_all_that_read_it(
    saved: Path, missing: str, needed_by: list[Callable[[Path], Any]]
) -> None:
    config = read_config(saved)
    del config[missing]
    write_config(saved, config)
    for call in needed_by:
        with pytest.raises(cc.InputError, match=r"config.json: expected the file as it was written"):
            call(saved)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not finite": lambda t: t * torch.nan,
    "empty": lambda t: t[:0],
    "another precision": lambda t: t.float(),
    "another axis": lambda t: t.unsqueeze(0),
    "negative": lambda t: -t.abs() - 1,
}


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        ("state.mean", ["not finite", "empty", "another precision", "another axis"]),
        ("state.prior_precision", ["not finite", "empty", "another precision", "negative"]),
        ("state.H.0.0", ["not finite", "empty", "another precision", "another axis"]),
        ("state.H.0.1", ["not finite", "empty", "another precision"]),
        ("state.calibration.scale", list(CHANGES)[:5]),
        ("state.class_centres.sums", ["not finite", "empty", "another precision", "another axis"]),
        ("example_outputs", ["not finite", "empty", "another axis", "negative"]),
    ],
)
def test_changed_numbers_with_a_right_checksum_are_refused(saved: Path, key: str, kinds: list[str]) -> None:
    for kind in kinds:
        refuses_changed(saved, key, CHANGES[kind])


def refuses_changed(saved: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = numbers_of(saved)
    tensors = load(path.read_bytes())
    tensors[key] = change(tensors[key]).contiguous()
    content = save(tensors)
    config = read_config(saved)
    config.pop("checksum")
    config["tensors"] = {**config["tensors"], "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    before = path.read_bytes(), (saved / "config.json").read_bytes()
    path.write_bytes(content)
    (saved / "config.json").write_bytes(config_bytes(config))
    with pytest.raises(cc.ContrastiveCurvatureError, match=str(saved)):
        loaded(saved)
    path.write_bytes(before[0])
    (saved / "config.json").write_bytes(before[1])


def test_numbers_that_are_no_safetensors(saved: Path) -> None:
    path = numbers_of(saved)
    for content in (b"", b"x" * 100, (2**62).to_bytes(8, "little") + b"{}", pickle.dumps({"a": 1})):
        config = read_config(saved)
        config.pop("checksum")
        config["tensors"] = {**config["tensors"], "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        path.write_bytes(content)
        (saved / "config.json").write_bytes(config_bytes(config))
        with pytest.raises(cc.InputError, match=f"{path}: expected the file as it was written"):
            loaded(saved)


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
