"""The pass over the data: batches become parts of a feature folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.io.feature_folder.header import Header, write_header
from contrastive_curvature.io.feature_folder.options import Options
from contrastive_curvature.io.feature_folder.place import storage_of
from contrastive_curvature.io.feature_folder.precision import target_type
from contrastive_curvature.io.feature_folder.resume import check_same_features, check_same_rows, whole_parts
from contrastive_curvature.io.feature_folder.storage import Rows, Storage
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.given_features import FeatureSource
from contrastive_curvature.network.inputs import Inputs, input_length, slice_inputs, tokenized_batch
from contrastive_curvature.network.loader import has_views, read_batch

__all__ = ["Writer"]

_PROBE = 8
"""Points of a kept part whose features are computed again, to see whether the data is the same."""


class Writer:
    """Takes batches in order, computes the features of those that are not there, and writes whole parts.

    Args:
        model: The encoder, in evaluation mode.
        folder: The folder.
        options: What the user asked for.

    Attributes:
        points: Number of points so far.
    """

    def __init__(self, model: nn.Module, folder: Path, options: Options) -> None:
        self.model, self.folder, self.options = model, folder, options
        self.points = 0
        self._device = next(model.parameters()).device
        self._header: Header | None = None
        self._storage: Storage | None = None
        self._encoder: Encoder | None = None
        self._kept: set[int] = set()
        self._waiting: list[Rows] = []

    def go_on(self, header: Header) -> None:
        """Take what an earlier run left."""
        self._header, self._storage = header, storage_of(self.folder, header)
        self._kept = whole_parts(header, self._storage)

    def nothing_to_do(self, expected_points: int | None) -> bool:
        """Whether an earlier run left every point, of as many as the loader has; called after the first batch."""
        header = self._header
        if header is None or not header.complete or len(self._kept) < len(header.parts):
            return False
        return expected_points is not None and expected_points == header.points

    def add(self, batch: Any) -> None:
        """Take one batch.

        Raises:
            InputError: It is malformed, or not what is there already.
            UnsupportedError: It has two views of every input.
        """
        batch = tokenized_batch(self.model, batch, "loader")
        if has_views(batch):
            msg = (
                "loader: batches of two views. A folder keeps one view of every input: yield (x, targets), or fit with "
                "the loader itself."
            )
            raise UnsupportedError(msg)
        x, y = read_batch(batch, self._device, self.options.label_key, "loader")
        header = self._started(x, y)
        n, found = input_length(x), None
        self._check_targets(y, n, header)
        for part, rows in self._pieces(n, header.rows_per_part):
            if part in self._kept:
                self._compare(x, y, part, rows, header)
                continue
            found = self._features(x, n) if found is None else found
            first = self.points + rows.start
            identifiers = self.options.identifiers.at(first, self.points + rows.stop)
            stored = self._store.precision.encode(found[rows], first)
            self._waiting.append(Rows(stored, y[rows].detach().cpu().numpy(), identifiers))
            if (self.points + rows.stop) % header.rows_per_part == 0:
                self._write(part)
        self.points += n

    def finish(self) -> None:
        """Write the last part, and close the folder.

        Raises:
            InputError: There are fewer points than the folder has, or another number of identifiers.
        """
        header, points = self._head, self.points
        self.options.identifiers.check_number(points)
        parts = -(-points // header.rows_per_part)
        if len(header.parts) > parts or header.points not in (None, points):
            there = header.points or len(header.parts) * header.rows_per_part
            received = f"{points} points, and {'' if header.points else 'at least '}{there} are there"
            hint = "Use another path; nothing has been changed."
            raise InputError(expected("loader", f"the data of the folder {self.folder}", received, hint))
        if self._waiting:
            self._write(parts - 1, points)
        self._header = replace(self._head, points=points)
        self._store.finish(self._header)
        write_header(self.folder, self._header)

    def _started(self, x: Inputs, y: Tensor) -> Header:
        """The header; the first batch shows what the encoder and the targets are."""
        if self._header is None:
            encoder = self._analysed(x)
            source = FeatureSource.of(self.model, str(encoder.last_layer_name))
            header = Header(
                self.options.storage,
                self.options.precision,
                source,
                target_type(y),
                tuple(y.shape[1:]),
                self.options.identifiers.type,
                self.options.rows_for(source.width),
            )
            self._check_targets(y, input_length(x), header)
            self._header, self._storage = header, storage_of(self.folder, header)
            write_header(self.folder, header)
        return self._header

    def _analysed(self, x: Inputs) -> Encoder:
        if self._encoder is None:
            name = self.options.last_layer_name if self._header is None else self._header.source.last_layer
            encoder = Encoder(self.model, slice_inputs(x, slice(0, _PROBE)), name, label_key=self.options.label_key)
            encoder.require_last_layer()
            self._encoder = encoder
        return self._encoder

    def _features(self, x: Inputs, n: int) -> Tensor:
        phi = self._analysed(x).features(x)[1]
        if phi.ndim != 2 or len(phi) != n:
            wanted = f"features of shape ({n}, F) for {n} points"
            raise InputError(expected("encoder", wanted, f"shape {tuple(phi.shape)}"))
        return phi

    def _compare(self, x: Inputs, y: Tensor, part: int, rows: slice, header: Header) -> None:
        """Refuse other data than that of a part that is kept."""
        start, stop = self.points + rows.start, self.points + rows.stop
        if header.points is not None and stop > header.points:
            received = f"more than the {header.points} points that are there"
            raise InputError(expected("loader", f"the data of the folder {self.folder}", received))
        kept, identifiers = self._store.rows(start, stop), self.options.identifiers.at(start, stop)
        check_same_rows(self.folder, kept, y[rows], identifiers, start)
        if start == header.rows_of(part)[0]:
            some = slice(rows.start, min(rows.stop, rows.start + _PROBE))
            inputs = slice_inputs(x, some)
            again = self._features(inputs, some.stop - some.start)
            if again.shape[1] != self._store.width:
                raise InputError(expected("encoder", f"{self._store.width} features", f"{again.shape[1]}"))
            check_same_features(self.folder, self._store.precision.decode(kept.features[: len(again)]), again, start)

    def _check_targets(self, y: Tensor, n: int, header: Header) -> None:
        wanted = f"one target for each of the {n} points of a batch"
        if y.ndim == 0 or len(y) != n:
            raise InputError(expected("loader", wanted, f"shape {tuple(y.shape)}"))
        if 0 in y.shape:
            raise InputError(expected("loader", "targets of at least one number", f"shape {tuple(y.shape)}"))
        if target_type(y) != header.target_type or tuple(y.shape[1:]) != header.target_shape:
            known = f"targets of {header.target_type} and shape (B, {', '.join(map(str, header.target_shape))})"
            raise InputError(expected("loader", f"{known}, as before", f"{y.dtype} and shape {tuple(y.shape)}"))

    def _pieces(self, n: int, rows_per_part: int) -> Iterator[tuple[int, slice]]:
        """The parts that the next n points lie in, with the rows of the batch."""
        start = 0
        while start < n:
            part, place = divmod(self.points + start, rows_per_part)
            stop = min(n, start + rows_per_part - place)
            yield part, slice(start, stop)
            start = stop

    def _write(self, part: int, points: int | None = None) -> None:
        """Write what is waiting as one part: out of the header, onto the disk, into the header."""
        header = self._head
        if part < len(header.parts) and header.parts[part] is not None:
            header = header.with_part(part, None)
            write_header(self.folder, header)
        rows = Rows(*(np.concatenate(columns) for columns in zip(*self._waiting, strict=True)))
        self._header = replace(header.with_part(part, self._store.write(part, rows)), points=points or header.points)
        self._waiting = []
        if points is None:
            write_header(self.folder, self._header)

    @property
    def _head(self) -> Header:
        if self._header is None:
            msg = "no batch has been added"
            raise RuntimeError(msg)
        return self._header

    @property
    def _store(self) -> Storage:
        if self._storage is None:
            msg = "no batch has been added"
            raise RuntimeError(msg)
        return self._storage
