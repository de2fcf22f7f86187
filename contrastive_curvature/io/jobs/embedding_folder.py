"""A folder of Parquet files with the embeddings of a corpus, one a part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.io.jobs.embedded import embedded, output_schema
from contrastive_curvature.io.jobs.manifest import open_folder
from contrastive_curvature.io.jobs.packages import arrow, parquet
from contrastive_curvature.io.jobs.posteriors import posterior_digest
from contrastive_curvature.io.jobs.sources import Source, parts_of
from contrastive_curvature.laplace.calibration import calibrated_reference

__all__ = ["EmbeddingFolder"]

_KEY = b"contrastive_curvature.part"

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
        source: Source | Any,
        keep: Sequence[str] | None = None,
        parts: int | None = None,
    ) -> None:
        if keep is not None and (isinstance(keep, str) or not all(isinstance(name, str) for name in keep)):
            raise InputTypeError(expected("keep", "a list of names of columns", repr(keep)))
        la.check_fitted()
        calibrated = calibrated_reference(la) is not None
        self._parts = parts_of(source, parts)
        self.count = len(self._parts)
        schema = output_schema(self._parts, int(la.n_outputs), calibrated, keep)
        job = {
            "kind": "embeddings",
            "parts": self.count,
            "source": self._parts.fingerprint,
            "posterior": posterior_digest(la),
            "columns": [f"{field.name}: {field.type}" for field in schema],
        }
        self.path = open_folder("destination", path, job)
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self._schema = schema

    def __repr__(self) -> str:
        """Path and number of parts."""
        return f"EmbeddingFolder({str(self.path)!r}, {self.count} parts)"

    def has(self, part: int) -> bool:
        """Whether the file of a part is there, with all its rows.

        Raises:
            InputError: It is something else.
        """
        file = self.file(part)
        if not file.is_file():
            return False
        try:
            with parquet().ParquetFile(file) as opened:
                found, rows = opened.schema_arrow.metadata or {}, opened.metadata.num_rows
        except (OSError, ValueError):
            return False
        if found.get(_KEY) != self._mark(part):
            received = f"{file}, which is something else"
            raise InputError(expected("destination", "the embeddings of this job", received, "Use another folder."))
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
        loader = self._parts[part]
        schema = self._schema.with_metadata({_KEY: self._mark(part)})
        module, written = arrow(), 0

        def write(file: Any) -> None:
            nonlocal written
            waiting: list[Any] = []
            with parquet().ParquetWriter(file, schema, write_page_checksum=True) as writer:
                for table in embedded(la, loader, self._schema):
                    waiting.append(table)
                    written += len(table)
                    if sum(rows.nbytes for rows in waiting) >= _GROUP_BYTES:
                        writer.write_table(module.concat_tables(waiting))
                        waiting = []
                if waiting:
                    writer.write_table(module.concat_tables(waiting))
            if written != len(loader.dataset):
                wanted = f"{len(loader.dataset)} rows of part {part}"
                raise InputError(expected("source", wanted, f"{written}"))

        write_whole(self.file(part), write)

    def file(self, part: int) -> Path:
        """Name of the file of a part."""
        return self.path / f"part-{part:05d}-of-{self.count:05d}.parquet"

    def _mark(self, part: int) -> bytes:
        return f"{self._job} {part}".encode()
