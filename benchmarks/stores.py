"""What a corpus in a vector store costs: time to build and to search, recall, memory, and what is lost in it.

Real embeddings: scikit-learn's digits, each drawn several times with another small rotation, shift and scale, through a
network with 64 outputs and the posterior of its last layer. Queries are images of which no version is in the corpus.
Every store is built and searched in a process of its own. A search gives the ten best hits; the filtered one looks
among the tenth of the corpus with the least uncertainty. Recall is against all cosines in float64.

Then ``MatchProbability``: its Brier score if the gallery has the whole predictions, if it has what a store keeps, and
without uncertainties.

    python -m benchmarks.stores [--sizes N ...] [--queries N]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks.machine import (
    describe,
    machine_line,
    measure_time,
    options,
    run_apart,
    table,
    watch_memory,
    write_results,
)

SIZES = (10_000, 100_000)
STORES = (
    ("FAISS", "flat"),
    ("FAISS", "hnsw"),
    ("FAISS", "ivf"),
    ("Lance", "flat"),
    ("Lance", "ivf_pq"),
    ("Lance", "ivf_hnsw_sq"),
)
DIM, K, CHUNK, TRAIN, STEPS = 64, 10, 10_000, 1200, 300
_TIE = 1e-6
COLUMNS = (
    "store",
    "add, s",
    "index, s",
    "ms a query",
    "ms, one query",
    "ms, filtered",
    "recall",
    "recall, filtered",
    "MiB",
    "MiB, search",
    "disk, MiB",
)


def versions(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` versions of images (N, 64), in turn: rotated by 15 degrees, shifted and scaled by a tenth at most."""
    picked = images[torch.arange(count) % len(images)].view(-1, 1, 8, 8)
    angle, scale, x, y = (2 * torch.rand(4, count, generator=generator) - 1) * torch.tensor(
        [[0.26], [0.1], [0.2], [0.2]]
    )
    cos, sin = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    turns = torch.stack([torch.stack([cos, -sin, x], 1), torch.stack([sin, cos, y], 1)], 1)
    grid = affine_grid(turns, [count, 1, 8, 8], align_corners=False)
    return grid_sample(picked, grid, align_corners=False).flatten(1)


def embed(sizes: tuple[int, ...], n_queries: int) -> dict[str, Any]:
    """Predictions of the corpus and the queries, and classes."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, generator = (images / 16).float(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, DIM))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    loss = cc.ContrastiveLoss(margin=0.7, normalization="type")
    for _ in range(STEPS):
        rows = torch.randint(TRAIN, (256,), generator=generator)
        optimizer.zero_grad()
        loss(encoder(versions(images[rows], 256, generator)), labels[rows]).backward()
        optimizer.step()
    la: Any = Laplace(encoder, likelihood="contrastive")
    la.fit(DataLoader(TensorDataset(images[:TRAIN], labels[:TRAIN]), batch_size=300))
    la.optimize_prior_precision()
    corpus = versions(images[:TRAIN], max(sizes), generator)
    asked = versions(images[TRAIN:], n_queries, generator)
    of_query = labels[TRAIN:][torch.arange(n_queries) % (len(labels) - TRAIN)]
    return {
        "corpus": [la(block) for block in corpus.split(CHUNK)],
        "labels": labels[torch.arange(max(sizes)) % TRAIN],
        "queries": la(asked),
        "query_labels": of_query,
    }


def save(data: dict[str, Any], path: Path) -> None:
    """What the processes of the stores need: of the corpus, what a store keeps."""
    parts = [cc.StoredEmbeddings.of(block) for block in data["corpus"]]
    kept = [torch.cat([getattr(part, name) for part in parts]) for name in ("mu", "kappa", "uncertainty")]
    torch.save({"corpus": kept, "queries": data["queries"].mu}, path)


def recall(result: cc.SearchResult, cosine: Tensor) -> float:
    """Share of hits that are as near as the tenth best."""
    least = cosine.topk(K).values[:, -1:] - _TIE
    return float((cosine.gather(1, torch.as_tensor(result.ids)) >= least).double().mean())


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One store of one size."""
    torch.set_num_threads(1)
    data = torch.load(case["path"], weights_only=True, mmap=True)
    corpus, queries = [part[: case["size"]].clone() for part in data["corpus"]], data["queries"].clone()
    folder = Path(tempfile.mkdtemp(dir=case["folder"]))
    store: Any = cc.FaissStore() if case["store"] == "FAISS" else cc.LanceStore(folder / "corpus.lance")

    def fill() -> float:
        start = time.perf_counter()
        for at in range(0, case["size"], CHUNK):
            store.add(range(at, min(at + CHUNK, case["size"])), tuple(part[at : at + CHUNK] for part in corpus))
        return time.perf_counter() - start

    def index() -> float:
        start = time.perf_counter()
        if case["index"] != "flat":
            store.create_index(case["index"])
        return time.perf_counter() - start

    (add, build), peak = watch_memory(lambda: (fill(), index()))
    most = float(corpus[2].quantile(0.1))
    cosine = queries.double() @ corpus[0].double().T
    found, search_peak = watch_memory(lambda: store.search(queries, K))
    out = {"add_seconds": add, "index_seconds": build, "peak_mib": peak, "search_peak_mib": search_peak}
    out["recall"] = recall(found, cosine)
    filtered = store.search(queries, K, max_uncertainty=most)
    out["filtered_recall"] = recall(filtered, cosine.masked_fill(corpus[2] > most, -2))
    n, one = len(queries), queries[:1]
    out["query_ms"] = 1e3 * measure_time(lambda: store.search(queries, K), 3)["seconds"] / n
    out["filtered_ms"] = 1e3 * measure_time(lambda: store.search(queries, K, max_uncertainty=most), 3)["seconds"] / n
    out["single_ms"] = 1e3 * measure_time(lambda: store.search(one, K), 20)["median_seconds"]
    if case["store"] == "FAISS":
        store.save(folder / "corpus")
    out["disk_mib"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20
    return out


def brier(data: dict[str, Any]) -> dict[str, float]:
    """Brier scores of the best hit's probability, fitted on half of the queries and judged on the other half."""
    gallery, labels = data["corpus"][0], data["labels"][:CHUNK]
    kept, asked, classes = cc.StoredEmbeddings.of(gallery), data["queries"], data["query_labels"]
    half = len(classes) // 2

    def part(rows: slice) -> cc.EmbeddingDistribution:
        taken = cc.EmbeddingDistribution(asked.raw_mean[rows], variance=asked.variance[rows])
        return taken.relative_to(asked._typical_norm, asked._class_centres)

    out: dict[str, float] = {"gallery": len(labels)}
    for name, theirs, use in (("predictions", gallery, True), ("store", kept, True), ("cosine", kept, False)):
        match = cc.MatchProbability(use_uncertainty=use)
        match.fit_retrieval(part(slice(half)), classes[:half], theirs, labels)
        found = match.nearest(part(slice(half, None)), theirs)
        right = labels[found.index] == classes[half:]
        out[name] = float((found.right - right.to(found.right)).square().mean())
        out["wrong"] = float((~right).double().mean())
    return out


def render(result: dict[str, Any]) -> str:
    """A table for each size."""
    out = [
        "# Vector stores",
        "",
        f"`python -m benchmarks.stores`, {machine_line(result['machine'])}: embeddings of digits in {DIM} dimensions, "
        f"{result['queries']} queries, ten hits. Time of a query: of all queries in one call, per query; of one query "
        "in a call; of all in one call among the tenth of the corpus with the least uncertainty. FAISS and torch with "
        "one thread, LanceDB with its own threads. Memory: resident memory at its highest above what the process held "
        "before, while the store was filled, and while it was searched (Lance maps files into memory). Disk: the saved "
        "store.",
    ]
    for size in result["sizes"]:
        rows = []
        for row in result["rows"]:
            if row["size"] == size:
                cells = [f"{row['store']} `{row['index']}`", f"{row['add_seconds']:.2f}", f"{row['index_seconds']:.2f}"]
                cells += [f"{row[name]:.2g}" for name in ("query_ms", "single_ms", "filtered_ms")]
                cells += [f"{row[name]:.3f}" for name in ("recall", "filtered_recall")]
                cells += [f"{row[name]:.0f}" for name in ("peak_mib", "search_peak_mib", "disk_mib")]
                rows.append(cells)
        out += ["", f"## {size:,} embeddings", "", table(COLUMNS, rows)]
    scores = result["brier"]
    out += [
        "",
        "## The probability that the best hit is right",
        "",
        f"Brier score, gallery of {scores['gallery']:,}, {scores['wrong']:.1%} of the best hits wrong: "
        f"{scores['predictions']:.4f} with the whole predictions, {scores['store']:.4f} with what a store keeps (one "
        f"concentration in place of a covariance), {scores['cosine']:.4f} from the cosine alone.",
    ]
    return "\n".join(out) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        print(json.dumps(measure(json.loads(given.case))))
        return
    machine = describe()
    data = embed(tuple(given.sizes), given.queries)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "embeddings.pt")
        save(data, Path(path))
        for size in given.sizes:
            for store, index in STORES:
                case = {"store": store, "index": index, "size": size}
                found = run_apart("benchmarks.stores", {**case, "path": path, "folder": folder}, OMP_NUM_THREADS="1")
                rows.append({**case, **found})
                print(rows[-1], flush=True)
    result = {"machine": machine, "sizes": given.sizes, "queries": given.queries, "rows": rows, "brier": brier(data)}
    write_results(given.out, "stores", result, render(result))


if __name__ == "__main__":
    main()
