"""``search``: neighbours by cosine, to CSV or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.apps.cli.console import BadInputError, Console, Result, readable
from contrastive_curvature.apps.cli.outputs import Rows, check_output, write_table
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source
from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.io.pretrained import read_info
from contrastive_curvature.progress import Progress

_SAME = 1e-5
"""How far embeddings of norm 1 are apart at most that one input has in batches of two sizes."""

_ROWS = 4096
"""Queries whose hits are written at once."""


class _IndexFile(Header):
    kind: ClassVar[str] = "index"
    described: ClassVar[str] = "an index that search --gallery --index wrote"
    repaired_by: ClassVar[str] = "Copy it again, or write it anew."

    encoder: str


def search(
    console: Console,
    *,
    sources: Mapping[str, Source],
    folder: Path,
    index: Path | None,
    out: Path,
    k: int,
    batch_size: int,
    **encoder: Any,
) -> Result:
    """Search a gallery, or an index, and write the hits; ``encoder`` has the options of :func:`.open_posterior`."""
    check_output(out, sources.values())
    gallery, queries = sources.get("gallery"), sources["queries"]
    if index is None and gallery is not None and k > len(gallery):
        raise BadInputError("-k", f"at most {len(gallery)}, the number of points in {gallery.path}", f"{k}")
    la, _ = open_posterior(folder, sources, **encoder, note=console.note)

    def embedded(source: Source, name: str) -> tuple[Tensor, Tensor]:
        """Return embeddings (N, D) of norm 1 and uncertainties (N,), on the CPU."""
        mu, uncertainty = [], []
        for (x,) in Progress(console.progress).over(Loader(source, batch_size), name):
            predicted = la(x)
            mu.append(predicted.mu.detach().cpu())
            uncertainty.append(predicted.uncertainty.detach().cpu())
        return torch.cat(mu), torch.cat(uncertainty)

    if gallery is not None:
        searched, ids, classes = embedded(gallery, "[gallery]")[0], gallery.ids, gallery.classes
    if index is not None:
        digest = read_info(folder).posteriors[0].encoder
        if gallery is not None:
            names = bytearray(json.dumps(list(map(str, ids))), "utf-8")
            tensors = {"mu": searched, "ids": torch.frombuffer(names, dtype=torch.uint8)}
            write_tensors(index, _IndexFile(encoder=digest), tensors)
        header, stored = read_tensors(index, _IndexFile)
        if header.encoder != digest:
            wanted = f"an index of embeddings of the encoder of {folder}"
            raise BadInputError(f"--index {index}", wanted, "one of another encoder")
        searched, ids, classes = stored["mu"], json.loads(stored["ids"].numpy().tobytes()), None
        if k > len(searched):
            raise BadInputError("-k", f"at most {len(searched)}, the number of points in {index}", f"{k}")
    asking, uncertainty = embedded(queries, "[queries]")
    hits = metrics.nearest_neighbors(asking, searched, k=k)
    if float(((asking - searched[hits[:, 0]]).abs().amax(1) < _SAME).double().mean()) > 0.5:
        console.warn(
            f"--queries {queries.path}: most of these inputs are in the gallery too, so that each is its own nearest "
            "neighbour and seems right. Leave them out of the gallery."
        )
    cosine = torch.einsum("nd,nkd->nk", asking, searched[hits]).clamp(-1, 1)
    write_table(out, _rows(queries.ids, ids, classes, hits, cosine, uncertainty))
    values = {"file": str(out), "queries": len(queries), "gallery": len(searched), "k": k}
    return values, f"{readable(str(out))}: {len(queries):,} queries in {len(searched):,} points"


def _rows(
    queries: Sequence[str],
    ids: Sequence[str],
    classes: NDArray[Any] | None,
    hits: Tensor,
    cosine: Tensor,
    uncertainty: Tensor,
) -> Iterator[Rows]:
    """Yield the columns of k rows a query, for some queries at once.

    Args:
        queries: Identifiers of the queries, N of them.
        ids: Identifiers of the gallery.
        classes: Its classes, or ``None``.
        hits: Rows of the gallery, nearest first, shape (N, k).
        cosine: Of these hits, shape (N, k).
        uncertainty: Of the queries, shape (N,).
    """
    k = hits.shape[1]
    for start in range(0, len(queries), _ROWS):
        rows = slice(start, start + _ROWS)
        nearest = hits[rows].flatten().tolist()
        yield {
            "query": [query for query in queries[rows] for _ in range(k)],
            "rank": [rank for _ in queries[rows] for rank in range(1, k + 1)],
            "neighbour": [ids[hit] for hit in nearest],
            **({} if classes is None else {"label": [str(classes[hit]) for hit in nearest]}),
            "cosine": cosine[rows].flatten().numpy(),
            "uncertainty": uncertainty[rows].repeat_interleave(k).numpy(),
        }
