"""The Hugging Face hub, played by a folder: what is uploaded comes down again, and errors say what to do."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from saved_cases import encoder, fitted, predicts_the_same
from tables import each, refused

import contrastive_curvature as cc

DEVICE = "cpu"
"""The hub keeps files, which are the same on every device."""


class Hub:
    """What this library uses of ``huggingface_hub``, with a folder in the place of the network."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def HfApi(self, **options: Any) -> Hub:
        self.calls.append(("api", options))
        return self

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create", options))
        assert options["exist_ok"]
        (self.place / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **options: Any) -> Any:
        self.calls.append(("upload", options))
        target = self.place / repo_id
        for path in folder_path.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, target)
        pull = "https://hub/pull/1" if options["create_pr"] else None
        return SimpleNamespace(commit_url="https://hub/commit/1", pr_url=pull)

    def repo_info(self, repo_id: str, *, timeout: float, **options: Any) -> None:
        assert timeout <= 10

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], **options: Any) -> str:
        self.calls.append(("download", options))
        source, target = self.place / repo_id, self.place / "cache" / repo_id
        if not source.is_dir():
            msg = f"404 Client Error.\nRepository not found: {repo_id}"
            raise LocalEntryNotFoundError(msg)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in source.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, target)
        return str(target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    for name in ("HfApi", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(made, name))
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture(scope="module")
def la() -> Any:
    return fitted("last_layer", "kron", DEVICE)


def test_what_is_uploaded_comes_down_again(la: Any, hub: Hub) -> None:
    assert la.push_to_hub("me/digits", private=True, license="mit", token="secret") == "https://hub/commit/1"
    assert predicts_the_same(la, cc.load_pretrained("me/digits", encoder(), revision="main"), DEVICE)
    assert cc.pretrained.read_info("me/digits").about["license"] == "mit"
    card = (hub.place / "me/digits/README.md").read_text()
    assert 'cc.load_pretrained("me/digits", encoder=encoder)' in card
    assert "# me/digits" in card
    assert len(list((hub.place / "me/digits").iterdir())) == 2
    assert not any(b"secret" in path.read_bytes() for path in (hub.place / "me/digits").iterdir())
    assert hub.calls[0][1]["token"] == "secret"
    assert hub.calls[1][1]["private"] is True
    assert hub.calls[4][1]["revision"] == "main"


def test_a_second_upload_replaces_the_first_and_nothing_else_comes_down(la: Any, hub: Hub) -> None:
    la.push_to_hub("me/digits")
    other = fitted("all", "diag", DEVICE)
    assert other.push_to_hub("me/digits", create_pr=True) == "https://hub/pull/1"
    (hub.place / "me/digits/pytorch_model.bin").write_bytes(b"pickled")
    assert predicts_the_same(other, cc.load_pretrained("me/digits", encoder()), DEVICE)
    assert not (hub.place / "cache/me/digits/pytorch_model.bin").exists()


def test_a_folder_here_comes_before_the_hub(la: Any, hub: Hub, tmp_path: Path) -> None:
    la.save_pretrained("me/digits")
    assert predicts_the_same(la, cc.load_pretrained("me/digits", encoder()), DEVICE)
    assert hub.calls == []


@each("source", ["digits", "./me/digits", "/me/digits", "me/digits/x", "a b/c"])
def test_what_is_no_name_of_a_repository_is_not_looked_for(source: str, hub: Hub) -> None:
    refused(lambda: cc.load_pretrained(source, encoder()), "source: expected a folder that exists", "user/name")
    assert hub.calls == []


def test_errors_of_the_hub_say_what_was_looked_for(la: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cc.InputError) as error:
        cc.load_pretrained("me/nothing", encoder())
    text = str(error.value)
    assert text.startswith("source: expected a folder, or a repository that you may read, got 'me/nothing': no folder")
    assert "(LocalEntryNotFoundError: 404 Client Error.)" in text
    assert "hf auth login" in text

    def forbidden(*args: Any, **kwargs: Any) -> None:
        msg = "403 Forbidden"
        raise PermissionError(msg)

    monkeypatch.setattr(hub, "create_repo", forbidden)
    refused(lambda: la.push_to_hub("me/x"), "repo_id: expected a repository you may write to, got 'me/x'", "403")


def test_a_hub_that_does_not_answer_is_given_up(la: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was downloaded before is used, and anything else is refused in one sentence."""

    def silent(*args: Any, timeout: float, **kwargs: Any) -> None:
        msg = f"no answer in {timeout} seconds"
        raise TimeoutError(msg)

    monkeypatch.setattr(hub, "repo_info", silent)
    with pytest.raises(
        cc.InputError, match=r"^source: .*no answer from the hub \(TimeoutError: no answer in 10 seconds"
    ):
        cc.load_pretrained("me/nothing", encoder())
    assert hub.calls[-1][1]["local_files_only"] is True
    la.push_to_hub("me/x")
    cc.load_pretrained("me/x", encoder())
    assert hub.calls[-1][1]["local_files_only"] is True


@each("repo_id", ["", "me", "me/x/y", "me/x y", "-me/x", "me/a--b", "me/x.git", "me/" + 97 * "x", 3])
def test_names_of_repositories_are_checked_before_anything_is_saved(la, hub, tmp_path, repo_id) -> None:
    for save in (la.push_to_hub, lambda name: la.save_pretrained(tmp_path / "saved", repo_id=name)):
        with pytest.raises(cc.InputError, match=r"repo_id: expected (the name of a repository|a valid string)"):
            save(repo_id)
    assert hub.calls == []
    assert not (tmp_path / "saved").exists()
