"""``search``: queries against a gallery, to CSV or Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from contrastive_curvature.apps.cli.console import Console, common_options
from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.apps.cli.options import PATH, check_device, computing_options, source_options, take_columns
from contrastive_curvature.errors import expected

if TYPE_CHECKING:
    from contrastive_curvature.apps.cli.searching import Found
    from contrastive_curvature.apps.cli.sources import Source

__all__ = ["search"]

_ROWS = 4096
"""Queries whose hits are written at once."""


@click.command(
    epilog="Example: contrastive-curvature search posterior --gallery train.npz --queries new.npz "
    "--validation validation.npz -k 5 --out hits.csv"
)
@click.argument("folder", type=PATH)
@click.option("--gallery", type=PATH, required=True, help="Inputs that are searched.")
@click.option("--queries", type=PATH, required=True, help="Inputs that are searched for.")
@click.option("--validation", type=PATH, help="Labelled queries that the encoder was not trained on: for P(match).")
@click.option("-k", "k", type=click.IntRange(min=1), default=5, show_default=True, help="Neighbours of each query.")
@click.option("--out", type=PATH, required=True, help="File that is written: .csv or .parquet.")
@source_options
@computing_options
@common_options
def search(
    console: Console, folder: Path, gallery: Path, queries: Path, validation: Path | None, out: Path, **options: Any
) -> None:
    """Search a gallery with the posterior in FOLDER, and write the hits, k rows a query.

    \b
    query, rank        identifier of the query; 1 is the nearest
    neighbour          identifier of the gallery point
    label              its class, where the gallery has classes
    cosine             between query and neighbour
    match_probability  that the nearest neighbour is of the query's class (rank 1 only)
    no_match           1 - match_probability: nothing in the gallery, or something else is nearer
    uncertainty        of the query, in radians

    match_probability and no_match are learned from --validation: labelled inputs that are like the queries, those
    without a match in the gallery among them, against the gallery's classes. Without it they are left out, unless the
    folder has a saved MatchProbability. See docs/matching.md.
    """  # noqa: D301
    from contrastive_curvature.apps.cli.outputs import check_output, write_table
    from contrastive_curvature.apps.cli.saved import open_posterior
    from contrastive_curvature.apps.cli.score import number_type
    from contrastive_curvature.apps.cli.searching import find
    from contrastive_curvature.apps.cli.sources import open_source
    from contrastive_curvature.apps.cli.texts import readable

    given = [path for path in (gallery, queries, validation) if path is not None]
    check_output(out, *given)
    columns, device = take_columns(options), check_device(options["device"])
    for path in given:
        open_source(path, columns=columns)
    la, encoder = open_posterior(folder, options["encoder"], options["encoder_options"], device, console.note)
    searched, asking = open_source(gallery, encoder, columns), open_source(queries, encoder, columns)
    asked = None if validation is None else open_source(validation, encoder, columns)
    k = options["k"]
    if k > len(searched):
        raise BadInputError(expected("-k", f"at most {len(searched)}, the number of points in {gallery}", f"{k}"))
    found = find(console, la, folder, searched, asking, asked, k, options["batch_size"])
    write_table(out, lambda: _table(found, searched, asking, k, number_type(la)))
    values: dict[str, Any] = {"file": str(out), "queries": len(asking), "gallery": len(searched), "k": k}
    line = f"{readable(str(out))}: {len(asking):,} queries in {len(searched):,} points"
    if found.right is not None:
        without = int((found.right < 0.5).sum())
        values["more_likely_no_match"] = without
        line += f", {without:,} of them more likely without a match than with one"
    console.result(values, line)


def _table(found: Found, gallery: Source, queries: Source, k: int, number: str) -> Any:
    from contrastive_curvature.apps.cli.outputs import Table

    types = {"query": "text", "rank": "int", "neighbour": "text"}
    if gallery.classes is not None:
        types["label"] = "text"
    types["cosine"] = number
    if found.right is not None:
        types |= {"match_probability": number, "no_match": number}
    return Table({**types, "uncertainty": number}, _parts(found, gallery, queries, k))


def _parts(found: Found, gallery: Source, queries: Source, k: int) -> Iterator[Mapping[str, Sequence[Any]]]:
    for start in range(0, len(queries), _ROWS):
        rows = range(start, min(start + _ROWS, len(queries)))
        index = found.index[start : rows.stop].flatten().tolist()
        part: dict[str, Any] = {
            "query": [queries.ids[row] for row in rows for _ in range(k)],
            "rank": [rank for _ in rows for rank in range(1, k + 1)],
            "neighbour": [gallery.ids[place] for place in index],
            "cosine": found.cosine[start : rows.stop].flatten().numpy(),
            "uncertainty": found.uncertainty[start : rows.stop].repeat_interleave(k).numpy(),
        }
        if gallery.classes is not None:
            part["label"] = [str(gallery.classes[place]) for place in index]
        if found.right is not None:
            right = found.right[start : rows.stop].tolist()
            part["match_probability"] = [value if rank == 0 else None for value in right for rank in range(k)]
            part["no_match"] = [1 - value if rank == 0 else None for value in right for rank in range(k)]
        yield part
