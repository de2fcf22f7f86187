"""The files of a saved posterior: written whole or not at all, and refused by name when anything is wrong with them."""

import copy
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_cases import encoder, fitted, predicts_the_same
from tables import each

import contrastive_curvature as cc
from contrastive_curvature import artifact
from contrastive_curvature.artifact import VERSION
from contrastive_curvature.artifact import _checksum as checksum
from contrastive_curvature.io.pretrained.folder import Saved, place_of, read, write

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


@each("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(la: Any, tmp_path: Path, overwrite: bool) -> None:
    for name, content in (("config.json", b'{"model_type": "bert"}'), ("thesis.tex", b"x"), ("config.json", b"{")):
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(cc.InputError, match=f"which (has|holds) '{name}'.*Name another folder"):
            la.save_pretrained(folder, overwrite=overwrite)
        assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(name, content)]
        shutil.rmtree(folder)


@each(
    "options, message",
    [
        ({"licence": "mit"}, "licence: expected an option among .*license.*, got licence"),
        ({"tags": "one"}, "tags: expected a valid list, got one"),
        ({"metrics": {"auroc": float("nan")}}, r"metrics\.auroc: expected a finite number, got nan"),
    ],
)
def test_malformed_options(la: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(cc.InputError, match=message):
        la.save_pretrained(tmp_path / "new", **options)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
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
    with pytest.raises(cc.InputError, match=r"expected a saved posterior, got no config\.json there"):
        loaded(saved)
    config.write_bytes(content)
    (saved / "README.md").unlink()
    assert predicts_the_same(la, loaded(saved), DEVICE)
    with pytest.raises(cc.InputError, match="source: expected a folder that exists"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(cc.InputTypeError, match=r"encoder: expected a torch\.nn\.Module"):
        cc.load_pretrained(saved, torch.nn.Linear)  # type: ignore[arg-type]


def test_foreign_damaged_and_later_files(la: Any, saved: Path) -> None:
    path = saved / "config.json"
    later = {**json.loads(path.read_bytes()), "version": 99, "written_by": "7.1"}
    for content, message in [
        (b"", "no whole JSON"),
        (path.read_bytes()[:200], "no whole JSON"),
        (b'{"model_type": "bert"}', "something else"),
        (json.dumps(later).encode(), r"of version 3, got version 99\. contrastive_curvature 7\.1 wrote it"),
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


WRONG = (None, "", "..", -1, 1e308, True, [], {}, ["a"], {"$tensor": "none"}, {"$tuple": 3})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [path, *(found for key, part in parts for found in places(part, (*path, key)))]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_header_with_a_right_checksum_and_a_wrong_field_is_refused_by_name(la: Any, saved: Path) -> None:
    """What somebody else may have written: another value for every field, every field left out."""
    path = saved / "config.json"
    original = json.loads(path.read_bytes())["content"]
    # As in a folder of 0.2.0: the state itself is looked at, not its checksum.
    del original["posteriors"][0]["state"]["checksum"]
    model, refused = encoder(), 0
    for place in places(original)[1:]:
        for new in (*WRONG[refused % 3 :: 3], "left out"):
            content = copy.deepcopy(original)
            at = content
            for key in place[:-1]:
                at = at[key]
            if new == "left out":
                del at[place[-1]]
            else:
                at[place[-1]] = new
            about = {"format": Saved.format_name(), "version": VERSION, "sha256": checksum(content)}
            path.write_text(json.dumps({**about, "content": content}))
            refused += attempt(lambda folder: cc.load_pretrained(folder, model), saved)[1] != ""
    assert refused > len(places(original))


@each("name", ["..", "../secret", "/etc/passwd", "posterior-0123456789abcdef.safetensors/../../secret", "config.json"])
def test_numbers_outside_the_folder_are_not_opened(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved / "config.json"
    content = json.loads(path.read_bytes())["content"]
    content["numbers"]["name"] = name
    about = {"format": Saved.format_name(), "version": VERSION, "sha256": checksum(content)}
    path.write_text(json.dumps({**about, "content": content}))
    monkeypatch.setattr(artifact, "sha256_of", None)
    with pytest.raises(cc.InputError, match=r"config\.json: expected a saved posterior, got one with numbers\.name"):
        loaded(saved)


def test_nothing_is_written_through_a_link(la: Any, other: Any, saved: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    for name in ("README.md", numbers_of(other.save_pretrained(tmp_path / "new")).name, "config.json"):
        content = (saved / name).read_bytes() if (saved / name).exists() else b"mine"
        mine.write_bytes(content)
        (saved / name).unlink(missing_ok=True)
        (saved / name).symlink_to(mine)
        other.save_pretrained(saved, overwrite=True)
        assert mine.read_bytes() == content, name
        assert not (saved / name).is_symlink()
    assert predicts_the_same(other, loaded(saved), DEVICE)
    (saved / ".lock").unlink(missing_ok=True)
    (saved / ".lock").symlink_to(mine)
    with pytest.raises(cc.InputError, match="a lock of its own"):
        la.save_pretrained(saved, overwrite=True)
    assert mine.read_bytes() == content


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
