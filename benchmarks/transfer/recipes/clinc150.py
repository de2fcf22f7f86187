"""CLINC150: a small encoder trained here on queries of 150 intents; unknown are the queries that have none of them.

The training queries train the encoder and fit the posterior, the validation queries are for its calibration, and the
test queries judge it; all have the same intents. Where intents are left out, the test queries have those, and training
and validation the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.transfer.corruption import LEVELS, TEXT_KINDS, corrupt_text
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes.queries import read_queries
from benchmarks.transfer.recipes.text_encoder import make_text_encoder, parts_of
from benchmarks.transfer.train import LOSSES, Training, seeded, train

_DIM = 64
_CORRUPTED = 1000
# With several queries of each of so many intents in a batch.
_TRAINING = Training(epochs=15, rate=3e-3, batch=256, together=4)
_ROWS = 1000
_LEFT_OUT = 30


def _make(loss: str, left_out: int, root: Path, _folder: Path, seed: int) -> FeatureFile:
    queries = read_queries(root)
    unseen = np.random.default_rng(seed).permutation(len(np.unique(queries.labels["test"])))[:left_out]
    texts, labels = {}, {}
    for part, known in queries.labels.items():
        rows = np.flatnonzero(np.isin(known, unseen) == (part == "test" and left_out > 0))
        texts[part], labels[part] = [queries.texts[part][row] for row in rows], known[rows]
    parts = {part: parts_of(some) for part, some in texts.items()}
    with seeded(seed):
        encoder = make_text_encoder(_DIM)
        # Within: dropout draws from the same source.
        inputs = parts["train"]
        train(encoder, lambda rows: inputs[rows], torch.from_numpy(labels["train"]), loss, _TRAINING, seed)
    trunk, head = encoder[:-1], encoder.head
    features = {part: _features(trunk, numbers) for part, numbers in parts.items()}
    rows = np.sort(np.random.default_rng(seed).permutation(len(parts["test"]))[:_CORRUPTED])
    chosen = [texts["test"][row] for row in rows]
    corrupted = {
        (kind, level): _features(trunk, parts_of(corrupt_text(chosen, kind, level, seed)))
        for kind in TEXT_KINDS
        for level in LEVELS
    }
    return FeatureFile(
        train_features=features["train"],
        train_labels=labels["train"],
        test_features=features["test"],
        test_labels=labels["test"],
        weight=head.weight.detach().numpy(),
        bias=head.bias.detach().numpy(),
        unknown={"outofscope": _features(trunk, parts_of(queries.beyond))},
        corrupted=corrupted,
        corrupted_rows=rows,
        calibration_features=features["val"],
        calibration_labels=labels["val"],
    )


def _features(trunk: nn.Module, numbers: Tensor) -> NDArray[np.float32]:
    with torch.no_grad():
        return torch.cat([trunk(rows) for rows in numbers.split(_ROWS)]).numpy()


CLINC150 = {
    f"clinc150-{name}{_DIM}-{loss}": (f"CLINC150{title}, D = {_DIM}, {loss}", partial(_make, loss, left_out))
    for name, title, left_out in (("", "", 0), ("unseen-", f", {_LEFT_OUT} intents left out", _LEFT_OUT))
    for loss in LOSSES
}
"""Dimension 64, three losses, of queries of seen and of unseen intents."""
