"""The queries of CLINC150 (Larson et al. 2019): 150 intents, and what people asked beyond them."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.data.files import require
from contrastive_curvature.errors import InputError

_FILE = "clinc150/data_full.json.gz"
_HOW = "Get data/data_full.json of https://github.com/clinc/oos-eval (commit 828f809), and gzip it."
_PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Queries:
    """Texts with the number of their intent.

    Args:
        texts: Part (``"train"``, ``"val"``, ``"test"``) -> queries in a fixed order.
        labels: Part -> intents, numbered in the order of their names, int64.
        beyond: Queries of the test that have none of the intents.
    """

    texts: dict[str, list[str]]
    labels: dict[str, NDArray[np.int64]]
    beyond: list[str]


def read_queries(data_root: Path) -> Queries:
    """Read ``ROOT/clinc150/data_full.json.gz``: 15,000 / 3,000 / 4,500 queries, and 1,000 out of scope.

    Args:
        data_root: The data root.

    Returns:
        The queries. The few out-of-scope queries for training and validation are left out: what is unknown stays so.

    Raises:
        InputError: The file is missing or damaged.
    """
    require(data_root, [_FILE], _HOW)
    path = data_root / _FILE
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        found = {part: [(text, intent) for text, intent in content[part]] for part in (*_PARTS, "oos_test")}
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        wanted = "gzipped JSON with lists of [query, intent]"
        raise InputError(str(path), wanted, f"something else ({error})", _HOW) from None
    numbers = {name: number for number, name in enumerate(sorted({intent for _, intent in found["train"]}))}
    return Queries(
        {part: [text for text, _ in found[part]] for part in _PARTS},
        {part: np.array([numbers[intent] for _, intent in found[part]], dtype=np.int64) for part in _PARTS},
        [text for text, _ in found["oos_test"]],
    )
