"""The tables of what each backend can do are those that the contract gives now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import backend_tables as support
import pytest
import torch

import contrastive_curvature as cc
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.layerwise import LayerwisePullback

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/backends.md",)


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    return {"structures": support.structure_table(), "layers": support.layer_table()}


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_up_to_date(page: str, tables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, table in tables.items():
        monkeypatch.setattr(support, f"{name.removesuffix('s')}_table", lambda table=table: table)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(r"<!-- backends: \w+", text), f"{page} has no marks"
    assert support.rewrite(text) == text, f"{page} is out of date: run `make tables`"


def test_a_stale_page_is_noticed(tables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "structure_table", lambda: tables["structures"])
    text = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    assert support.rewrite(text.replace("| exact |", "| refused |", 1)) == support.rewrite(text)
    assert text.replace("| exact |", "| refused |", 1) != text


def test_every_backend_and_structure_has_its_place(tables: dict[str, str]) -> None:
    structures, layers = tables["structures"], tables["layers"]
    for backend in support.BACKENDS:
        assert f"`{backend}`" in layers
    found = [(weights, name) for weights, kinds in support.ROWS for name in kinds]
    rows = [line.split("|")[1:3] for line in structures.splitlines()[2:]]
    named = [(weights.strip(" `"), name.strip(" `")) for weights, names in rows for name in names.split(",")]
    assert sorted(named) == sorted(found)
    assert support._together(["exact", "refused", "exact"], "abc") == "`a`, `c`: exact; `b`: refused"
    assert support._together(["exact", "exact"], "ab") == "exact"
    # torch.func takes everything that anybody takes.
    assert all(line.split("|")[2].strip().startswith("exact") for line in layers.splitlines()[2:])


def test_wrong_factors_are_no_approximation() -> None:
    class Sevens(LayerwisePullback):
        def kron_factors(self, *args: Any) -> Any:
            return [[torch.full_like(f, 7.0) for f in group] for group in super().kron_factors(*args)]

    class Wrong(cc.ContrastiveBackend):
        def all_parameters(self, encoder: Any) -> Any:
            return Sevens(encoder)

    with pytest.raises(AssertionError, match=r"Wrong: kron of all .* is neither K-FAC nor refused"):
        support._survey(Wrong, "all", "kron")


def test_a_wrong_low_rank_is_no_approximation() -> None:
    class Halves(LastLayerPullback):
        def kron_factors(self, *args: Any) -> Any:
            return [[factor / 2 for factor in group] for group in super().kron_factors(*args)]

    class Wrong(cc.ContrastiveGGN):
        def pullback(self, probe: Any) -> Any:
            made = super().pullback(probe)
            return Halves(made.encoder, made.sketch)

    with pytest.raises(AssertionError, match=r"Wrong: kron_lowrank of last_layer .* is neither K-FAC nor refused"):
        support._survey(Wrong, "last_layer", "kron_lowrank")
