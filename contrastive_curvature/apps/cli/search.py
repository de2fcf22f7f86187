"""``search``: neighbours by cosine and whether the nearest is right, to CSV or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature import metrics
from contrastive_curvature.apps.cli.console import BadInputError, Console, Result, readable
from contrastive_curvature.apps.cli.outputs import Rows, check_output, write_table
from contrastive_curvature.apps.cli.saved import open_posterior
from contrastive_curvature.apps.cli.sources import Loader, Source, shared_labels
from contrastive_curvature.artifact import Header, read_tensors, write_tensors
from contrastive_curvature.io.pretrained import load_match, read_info
from contrastive_curvature.progress import Progress

_AT_ONCE = 2**26
"""Numbers in the covariances of predictions that are held at once: 512 MiB in float64."""

_SAME = 1e-5
"""How far embeddings of norm 1 are apart at most that one input has in batches of two sizes."""

_ROWS = 4096
"""Queries whose hits are written at once."""

_STORED = ("mu", "kappa", "uncertainty")
"""What an index keeps of a point, besides its identifier."""


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
    gallery, queries, validation = (sources.get(name) for name in ("gallery", "queries", "validation"))
    assert queries is not None
    if index is None and gallery is not None and k > len(gallery):
        raise BadInputError("-k", f"at most {len(gallery)}, the number of points in {gallery.path}", f"{k}")
    labels: list[NDArray[np.int64]] = []
    if validation is not None and gallery is not None:
        validation.check_classes("--validation")
        gallery.check_classes("--gallery")
        labels, _ = shared_labels(validation, gallery)
    la, _ = open_posterior(folder, sources, **encoder, note=console.note)
    predictions = _Predictions(console, la, batch_size)
    if index is not None:
        hits = _in_index(predictions, gallery, queries, folder, index, k)
    elif gallery is not None:
        hits = _in_gallery(predictions, gallery, queries, validation, labels, folder, k)
    write_table(out, hits.rows(queries))
    size = len(hits.searched)
    values: dict[str, Any] = {"file": str(out), "queries": len(queries), "gallery": size, "k": k}
    line = f"{readable(str(out))}: {len(queries):,} queries in {size:,} points"
    if hits.right is not None:
        without = int((hits.right < 0.5).sum())
        values["more_likely_no_match"] = without
        line += f", {without:,} of them more likely without a match than with one"
    return values, line


def _in_gallery(
    predictions: _Predictions,
    gallery: Source,
    queries: Source,
    validation: Source | None,
    labels: list[NDArray[np.int64]],
    folder: Path,
    k: int,
) -> _Hits:
    """Search the embeddings of a gallery; ``labels`` are those of the validation data and of the gallery."""
    console = predictions.console
    searched, _ = predictions.directions(gallery, "[gallery]")
    asking, uncertainty = predictions.directions(queries, "[queries]")
    index = metrics.nearest_neighbors(asking, searched, k=k)
    nearest = index[:, 0]
    _warn_of_itself(console, f"--queries {queries.path}", asking, searched[nearest])
    match, gallery_size = None, len(gallery)
    if validation is not None:
        match = predictions.fitted_match(searched, gallery, validation, labels)
        # It has seen the gallery's hits only, whose number is no other size.
        gallery_size = match._gallery_size
    elif read_info(folder).match:
        match = load_match(folder)
    else:
        console.warn(
            "no validation data: match_probability and no_match are left out. Give --validation SOURCE with labelled "
            "inputs that the encoder was not trained on."
        )
    right = None
    if match is not None and match.use_uncertainty:
        right = predictions.right(match, gallery, queries, nearest, gallery_size)
    elif match is not None:
        right = match.hits(asking, searched[nearest], gallery_size=gallery_size)
    return _Hits(index, asking, searched, uncertainty, right, gallery.ids, gallery.classes)


def _in_index(
    predictions: _Predictions, gallery: Source | None, queries: Source, folder: Path, path: Path, k: int
) -> _Hits:
    """Search an index, which is written first where there is a gallery."""
    about, la, size = read_info(folder), predictions.la, predictions.batch_size
    digest = about.posteriors[0].encoder
    if gallery is not None:
        batches = Progress(predictions.console.progress).over(Loader(gallery, size), "[gallery]")
        parts = [cc.StoredEmbeddings.of(la(x)) for (x,) in batches]
        tensors = {name: torch.cat([getattr(part, name) for part in parts]).cpu() for name in _STORED}
        ids = bytearray(json.dumps(list(map(str, gallery.ids))), "utf-8")
        tensors["ids"] = torch.frombuffer(ids, dtype=torch.uint8)
        write_tensors(path, _IndexFile(encoder=digest), tensors)
    header, stored = read_tensors(path, _IndexFile)
    if header.encoder != digest:
        wanted = f"an index of embeddings of the encoder of {folder}"
        raise BadInputError(f"--index {path}", wanted, "one of another encoder")
    names, searched = json.loads(stored.pop("ids").numpy().tobytes()), stored["mu"]
    if k > len(searched):
        raise BadInputError("-k", f"at most {len(searched)}, the number of points in {path}", f"{k}")
    asking, uncertainty = predictions.directions(queries, "[queries]")
    index, right = metrics.nearest_neighbors(asking, searched, k=k), None
    if about.match:
        match, shares = load_match(folder), []
        for (x,), nearest in zip(Loader(queries, size), index[:, 0].split(size), strict=True):
            predicted = la(x)
            points = cc.StoredEmbeddings(**{name: part[nearest].to(predicted.mu) for name, part in stored.items()})
            shares.append(match.hits(predicted, points, gallery_size=len(searched)).cpu())
        right = torch.cat(shares)
    return _Hits(index, asking, searched, uncertainty, right, names, None)


class _IndexFile(Header):
    kind: ClassVar[str] = "index"
    described: ClassVar[str] = "an index that search --gallery --index wrote"
    repaired_by: ClassVar[str] = "Copy it again, or write it anew."

    encoder: str


@dataclass
class _Hits:
    """The k nearest of M gallery points to N queries.

    Args:
        index: Rows of the gallery, nearest first, shape (N, k).
        asking: Embeddings of the queries, of norm 1, shape (N, D).
        searched: Those of the gallery, shape (M, D).
        uncertainty: Of the queries, shape (N,).
        right: Probability that the nearest is of the query's class, shape (N,), or ``None`` without a fit of it.
        ids: Of the gallery, M of them.
        classes: Of the gallery, shape (M,), or ``None``.
    """

    index: Tensor
    asking: Tensor
    searched: Tensor
    uncertainty: Tensor
    right: Tensor | None
    ids: Sequence[str]
    classes: NDArray[Any] | None

    def rows(self, queries: Source) -> Iterator[Rows]:
        """Yield the columns of k rows a query, for some queries at once."""
        k = self.index.shape[1]
        cosine = torch.einsum("nd,nkd->nk", self.asking, self.searched[self.index]).clamp(-1, 1)
        for start in range(0, len(queries), _ROWS):
            rows = slice(start, start + _ROWS)
            hits = self.index[rows].flatten().tolist()
            part: dict[str, Any] = {
                "query": [query for query in queries.ids[rows] for _ in range(k)],
                "rank": [rank for _ in queries.ids[rows] for rank in range(1, k + 1)],
                "neighbour": [self.ids[hit] for hit in hits],
            }
            if self.classes is not None:
                part["label"] = [str(self.classes[hit]) for hit in hits]
            part["cosine"] = cosine[rows].flatten().numpy()
            if self.right is not None:
                # They are of the first of k hits.
                for name, values in (("match_probability", self.right[rows]), ("no_match", 1 - self.right[rows])):
                    part[name] = [value if rank == 0 else None for value in values.numpy() for rank in range(k)]
            yield {**part, "uncertainty": self.uncertainty[rows].repeat_interleave(k).numpy()}


def _warn_of_itself(console: Console, name: str, mu: Tensor, nearest: Tensor) -> None:
    """Warn if most inputs are their own nearest neighbours: all would seem right."""
    if float(((mu - nearest).abs().amax(1) < _SAME).double().mean()) > 0.5:
        console.warn(
            f"{name}: most of these inputs are in the gallery too, so that each is its own nearest neighbour and seems "
            "right. Leave them out of the gallery."
        )


@dataclass
class _Predictions:
    """Predictions of a posterior for sources, in batches."""

    console: Console
    la: Any
    batch_size: int

    def directions(self, source: Source, name: str) -> tuple[Tensor, Tensor]:
        """Return embeddings (N, D) of norm 1 and uncertainties (N,), on the CPU."""
        mu, uncertainty = [], []
        for (x,) in Progress(self.console.progress).over(Loader(source, self.batch_size), name):
            predicted = self.la(x)
            mu.append(predicted.mu.detach().cpu())
            uncertainty.append(predicted.uncertainty.detach().cpu())
        return torch.cat(mu), torch.cat(uncertainty)

    def of(self, source: Source, rows: NDArray[np.int64]) -> cc.EmbeddingDistribution:
        """Return the predictions for some rows as one distribution."""
        return cc.EmbeddingDistribution.cat([self.la(x) for (x,) in Loader(source, self.batch_size, rows)])

    def fitted_match(
        self, searched: Tensor, gallery: Source, validation: Source, labels: list[NDArray[np.int64]]
    ) -> cc.MatchProbability:
        """Learn P(match) from validation queries; only those points of the gallery are predicted that are a hit."""
        name = f"--validation {validation.path}"
        if len(gallery) < 2:
            raise BadInputError(f"--gallery {gallery.path}", "at least two points for P(match)", len(gallery))
        theirs, classes = (torch.from_numpy(each) for each in labels)
        limit = 8 * _AT_ONCE // self.la.n_outputs**2
        if len(validation) > limit:
            self.console.warn(
                f"{name}: match_probability is learned from the cosine alone, because the covariances of "
                f"{len(validation):,} inputs in {self.la.n_outputs:,} dimensions do not fit into memory; with "
                f"{limit:,} they do."
            )
            plain, _ = self.directions(validation, "[validation]")
            nearest = metrics.nearest_neighbors(plain, searched, k=1).squeeze(1)
            _warn_of_itself(self.console, name, plain, searched[nearest])
            return cc.MatchProbability(use_uncertainty=False).fit_retrieval(plain, theirs, searched, classes)
        asking = self.of(validation, np.arange(len(validation)))
        nearest = metrics.nearest_neighbors(asking.mu.cpu(), searched, k=1).squeeze(1)
        _warn_of_itself(self.console, name, asking.mu.cpu(), searched[nearest])
        hits = nearest.unique()
        if len(hits) == 1:
            # A search needs two points, so another one is added.
            hits = torch.cat([hits, torch.tensor([0 if int(hits) else 1])]).sort().values
        found, device = self.of(gallery, hits.numpy()), asking.mu.device
        return cc.MatchProbability().fit_retrieval(asking, theirs.to(device), found, classes[hits].to(device))

    def right(
        self, match: cc.MatchProbability, gallery: Source, queries: Source, nearest: Tensor, gallery_size: int
    ) -> Tensor:
        """Return the probability that the nearest neighbour of each query is of its class, on the CPU."""
        size = max(1, _AT_ONCE // self.la.n_outputs**2)
        parts = []
        for start, some in zip(range(0, len(queries), size), nearest.split(size), strict=True):
            hits, place = some.unique(return_inverse=True)
            asking = self.of(queries, np.arange(start, start + len(some)))
            found = self.of(gallery, hits.numpy())
            parts.append(match.hits(asking, found[place], gallery_size=gallery_size).cpu())
        return torch.cat(parts)
