"""The queries of CLINC150 (Larson et al. 2019): 150 intents, and what people asked beyond them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PARTS = ("train", "val", "test")


class Queries(NamedTuple):
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

    It is data/data_full.json of https://github.com/clinc/oos-eval (commit 828f809), gzipped. The few out-of-scope
    queries for training and validation are left out: what is unknown stays so.
    """
    content = json.loads(gzip.decompress((data_root / "clinc150" / "data_full.json.gz").read_bytes()))
    numbers = {name: number for number, name in enumerate(sorted({intent for _, intent in content["train"]}))}
    return Queries(
        {part: [text for text, _ in content[part]] for part in _PARTS},
        {part: np.array([numbers[intent] for _, intent in content[part]], dtype=np.int64) for part in _PARTS},
        [text for text, _ in content["oos_test"]],
    )
