"""The model card: the hub reads its metadata, the code in it runs, and what a posterior is stands in it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from saved_cases import encoder, fitted, inputs
from test_pretrained_round_trip import Steep, same_label

import contrastive_curvature as cc

DEVICE = "cpu"
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


@pytest.fixture(scope="module")
def la() -> Any:
    return fitted("last_layer", "kron", DEVICE)


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
    cosine = (la(x).mu * la(x.flip(0)).mu).sum(1)
    match = cc.MatchProbability().fit_pairs(la(x), la(x.flip(0)), cosine > cosine.median())
    names: dict[str, Any] = {"encoder": encoder(), "x": x}
    exec(code_of(la.save_pretrained(tmp_path / "one", match=match)), names)
    assert torch.equal(names["mu"], la(x).mu)
    assert isinstance(names["match"], cc.MatchProbability)
    own = fitted("all", "diag", DEVICE, calibrated=False, backend_kwargs={"loss": Steep(), "relation": same_label})
    code = code_of(own.save_pretrained(tmp_path / "own"))
    assert "encoder=encoder, loss=..., relation=...)" in code
    assert "uncertainty" in code
    exec(code.replace("loss=...", "loss=Steep()").replace("relation=...", "relation=same_label"), globals() | names)
    assert "its code is not here" in (tmp_path / "own" / "README.md").read_text()
