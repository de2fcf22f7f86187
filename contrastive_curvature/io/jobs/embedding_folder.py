"""A folder of Parquet files with the embeddings of a corpus, one a part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError
from contrastive_curvature.io.jobs.manifest import EmbeddingsManifest, open_folder
from contrastive_curvature.io.jobs.parquet_parts import need
from contrastive_curvature.io.jobs.sources import Parts, Source, parts_of
from contrastive_curvature.laplace.calibration import present_calibration
from contrastive_curvature.network.digest import encoder_digest

_OWN = ("identifier", "mu", "kappa", "uncertainty", "p_value")
"""Columns of embeddings; the last one where the posterior is calibrated. Others are passed through."""

_GROUP_BYTES = 2**25
"""Of a row group that is written."""


class EmbeddingFolder:
    """Where the embeddings of a corpus are written, ``part-00003-of-00008.parquet`` and so on.

    Columns ``identifier``, ``mu`` (a list of D float32), ``kappa``, ``uncertainty``, and ``p_value`` of a calibrated
    posterior (see :class:`~contrastive_curvature.EmbeddingDistribution`), then those that are passed through. Each file
    is written completely or not at all, so every input is there once, however often a part was started.

    Args:
        path: The folder; it is made if need be, inside a folder that exists.
        la: The fitted posterior.
        source: A :class:`ParquetParts`, a feature folder, or the path of one.
        keep: Columns of the source to pass through; ``None`` for all but features.
        parts: Number of parts, where the source does not say it.

    Raises:
        NotFittedError: Before ``fit``, or the calibration is of another posterior.
        InputError: The folder has something else in it, or embeddings of another posterior, source or number of parts;
            or a column to pass through is not there, or has the name of a result.
        UnsupportedError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        la: Any,
        source: Source | Parts,
        keep: Sequence[str] | None = None,
        parts: int | None = None,
    ) -> None:
        la.check_fitted()
        calibrated = present_calibration(la) is not None
        self._parts = parts_of(source, parts)
        self.count = len(self._parts)
        types = self._parts.kept_types()
        self._keep = _names_to_keep([name for name in types if name != "identifier"], keep)
        arrow = need("pyarrow")
        self._schema = arrow.schema(
            [
                ("identifier", types["identifier"]),
                ("mu", arrow.list_(arrow.float32(), int(la.n_outputs))),
                ("kappa", arrow.float32()),
                ("uncertainty", arrow.float32()),
                *([("p_value", arrow.float64())] if calibrated else []),
                *((name, types[name]) for name in self._keep),
            ]
        )
        job = EmbeddingsManifest(
            parts=self.count,
            source=self._parts.fingerprint,
            posterior=posterior_digest(la),
            columns=[f"{field.name}: {field.type}" for field in self._schema],
        )
        self.path = open_folder("destination", path, job)

    def __repr__(self) -> str:
        """Path and number of parts."""
        return f"EmbeddingFolder({str(self.path)!r}, {self.count} parts)"

    def has(self, part: int) -> bool:
        """Whether the file of a part is there, with all its rows."""
        try:
            rows = need("pyarrow.parquet").read_metadata(self.file(part)).num_rows
        except (OSError, ValueError):
            return False
        return bool(rows == len(self._parts[part].dataset))

    def missing(self) -> list[int]:
        """Parts that are not there, or cannot be read, to be written (again)."""
        return [part for part in range(self.count) if not self.has(part)]

    def write(self, la: Any, part: int) -> None:
        """Embed a part, and write its file.

        Args:
            la: The posterior of this folder.
            part: Index of the part.

        Raises:
            InputError: A batch is malformed, or the encoder gives no finite output for it.
        """

        def write(file: Any) -> None:
            with need("pyarrow.parquet").ParquetWriter(file, self._schema, write_page_checksum=True) as writer:
                waiting: list[Any] = []
                for table in self._embedded(la, part):
                    waiting.append(table)
                    if sum(rows.nbytes for rows in waiting) >= _GROUP_BYTES:
                        writer.write_table(need("pyarrow").concat_tables(waiting))
                        waiting = []
                if waiting:
                    writer.write_table(need("pyarrow").concat_tables(waiting))

        write_whole(self.file(part), write, follow=False)

    def file(self, part: int) -> Path:
        """Name of the file of a part."""
        return self.path / f"part-{part:05d}-of-{self.count:05d}.parquet"

    def _embedded(self, la: Any, part: int) -> Iterator[Any]:
        """Yield an Arrow table for every batch of a part."""
        arrow = need("pyarrow")
        for x, identifiers, others in self._parts.to_embed(part, self._keep):
            inputs = x[0] if isinstance(x, (tuple, list)) and len(x) == 2 else x
            with torch.no_grad():
                found = la(inputs)
                numbers = [found.mu.flatten(), found.kappa, found.uncertainty]
                mu, *own = [arrow.array(values.float().cpu().numpy()) for values in numbers]
                if "p_value" in self._schema.names:
                    own.append(arrow.array(found.p_value.double().cpu().numpy()))
            n, dim = found.mu.shape
            if n != len(identifiers):
                raise InputError("read", f"{len(identifiers)} inputs, one a row", f"{n}")
            mu = arrow.FixedSizeListArray.from_arrays(mu, dim)
            yield arrow.Table.from_arrays([identifiers, mu, *own, *others], schema=self._schema)


def posterior_digest(la: Any) -> str:
    """Return a short text that changes with anything that predictions of a fitted posterior depend on."""
    text = f"{encoder_digest(la.model)} {la.state_dict()['checksum']}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _names_to_keep(known: list[str], keep: Sequence[str] | None) -> list[str]:
    """Return the names of the columns to pass through."""
    names = known if keep is None else list(dict.fromkeys(keep))
    if isinstance(keep, str) or set(names) - set(known):
        raise InputError("keep", f"a list of columns of the source: {', '.join(known)}", repr(keep))
    twice = [name for name in names if name in _OWN]
    if twice:
        hint = "Name the columns to pass through with keep=."
        raise InputError("source", f"columns other than {', '.join(_OWN)}", str(twice), hint)
    return names
