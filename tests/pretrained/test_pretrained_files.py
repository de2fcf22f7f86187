"""The folder of a saved posterior and its card: what is in it, what it replaces; others are refused by name."""

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from saved_cases import encoder, fitted, inputs, predicts_the_same
from tables import each, refused
from test_pretrained_round_trip import Steep, same_label

import contrastive_curvature as cc
from contrastive_curvature import artifact

DEVICE = "cpu"
"""Files are the same on every device."""

FILES = ["README.md", "posterior.safetensors"]


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


def test_the_folder_holds_two_files_and_no_more(la: Any, tmp_path: Path) -> None:
    folder = la.save_pretrained(tmp_path / "a" / "b" / "saved")
    assert folder == tmp_path / "a" / "b" / "saved"
    assert sorted(os.listdir(folder)) == FILES
    assert os.listdir(folder.parent) == ["saved"]
    assert predicts_the_same(la, loaded(folder), DEVICE)


def test_overwrite_replaces_a_saved_posterior_and_keeps_other_files(la: Any, other: Any, saved: Path) -> None:
    (saved / "thumbnail.png").write_bytes(b"mine")
    with pytest.raises(cc.InputError, match=r"folder: expected a new or an empty .*a saved posterior.*overwrite=True"):
        other.save_pretrained(saved)
    assert predicts_the_same(la, loaded(saved), DEVICE)
    other.save_pretrained(saved, overwrite=True)
    assert predicts_the_same(other, loaded(saved), DEVICE)
    assert sorted(os.listdir(saved)) == [*FILES, "thumbnail.png"]
    assert "| structure | diag |" in (saved / "README.md").read_text()
    (saved / "README.md").unlink()
    assert predicts_the_same(other, loaded(saved), DEVICE)


@each("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(la: Any, tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / f"mine {overwrite}"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(cc.InputError, match=r"which has 'thesis\.tex' in it.*Name another folder"):
        la.save_pretrained(folder, overwrite=overwrite)
    assert os.listdir(folder) == ["thesis.tex"]


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


def test_missing_damaged_foreign_and_later_files(la: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved / "posterior.safetensors"
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
    refused(lambda: loaded(saved / "nowhere"), "source: expected a folder that exists")
    with pytest.raises(cc.InputTypeError, match=r"encoder: expected a torch\.nn\.Module"):
        cc.load_pretrained(saved, torch.nn.Linear)


def test_nothing_is_written_through_a_link(other: Any, saved: Path, tmp_path: Path) -> None:
    for name in FILES:
        content = (saved / name).read_bytes()
        shutil.move(saved / name, tmp_path / name)
        (saved / name).symlink_to(tmp_path / name)
        other.save_pretrained(saved, overwrite=True)
        assert (tmp_path / name).read_bytes() == content
        assert not (saved / name).is_symlink()
    assert predicts_the_same(other, loaded(saved), DEVICE)


def test_nothing_is_unpickled_or_run(saved: Path, la: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    model = encoder()
    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load"), (os, "system")):
        monkeypatch.setattr(module, name, never)
    assert predicts_the_same(la, cc.load_pretrained(saved, model), DEVICE)


"""Text is the same on every device."""

SAID = {
    "fitted_on": "1,797 digits",
    "encoder_source": "someone/small-encoder",
    "license": "cc-by-4.0",
    "metrics": {"auroc": 0.96875, "recall@1 | own": 1e-7},
    "evaluated_on": 'digits: "held-out"',
    "tags": ["digits", "laplace"],
    "notes": "Not for faces.",
}


def test_the_hub_reads_the_metadata(la: Any, tmp_path: Path) -> None:
    card = ModelCard.load(la.save_pretrained(tmp_path / "digits", **SAID) / "README.md")
    data: Any = card.data
    assert (data.library_name, data.pipeline_tag) == ("contrastive-curvature", "feature-extraction")
    assert (data.license, data.base_model) == ("cc-by-4.0", "someone/small-encoder")
    assert {"digits", "laplace", "contrastive-curvature"} <= set(data.tags)
    assert len(data.tags) == len(set(data.tags))
    assert data.model_name == "digits"
    results = [(r.task_type, r.dataset_name, r.metric_type, r.metric_value) for r in data.eval_results]
    assert results == [
        ("feature-extraction", 'digits: "held-out"', "auroc", 0.96875),
        ("feature-extraction", 'digits: "held-out"', "recall@1 | own", 1e-7),
    ]


def code_of(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code.replace("path/to/this/folder", str(folder))


def test_the_code_in_the_card_runs(la: Any, tmp_path: Path) -> None:
    x = inputs(0, 40)
    names: dict[str, Any] = {"encoder": encoder(), "x": x}
    exec(code_of(la.save_pretrained(tmp_path / "one")), names)
    assert torch.equal(names["mu"], la(x).mu)
    own = fitted("all", "diag", DEVICE, calibrated=False, backend_kwargs={"loss": Steep(), "relation": same_label})
    code = code_of(own.save_pretrained(tmp_path / "own"))
    assert "encoder=encoder, loss=..., relation=...)" in code
    assert "uncertainty" in code
    exec(code.replace("loss=...", "loss=Steep()").replace("relation=...", "relation=same_label"), globals() | names)
    assert "its code is not here" in (tmp_path / "own" / "README.md").read_text()
