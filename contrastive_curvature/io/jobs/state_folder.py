"""States of the parts of a fit, a file each, in a folder that all machines see."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from os import PathLike
from pathlib import Path

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, State, check_identity
from contrastive_curvature.io.jobs.manifest import StatesManifest, open_folder

_log = logging.getLogger("contrastive_curvature")


class StateFolder:
    """Where the states of the parts of one fit are kept, ``statistics-00003-of-00008.safetensors`` and so on.

    Each is written completely or not at all, so a process that is killed leaves no half of one, and what is there is
    there once, however often a part was started.

    Args:
        path: The folder; it is made if need be, inside a folder that exists.
        count: Number of parts.
        source: What tells the data from other data, as ``ParquetParts(...).fingerprint``; may be empty.

    Raises:
        InputError: The folder has something else in it, or states of another number of parts or of other data.
    """

    def __init__(self, path: str | PathLike[str], count: int, source: str = "") -> None:
        self.count = validate.count("count", count)
        self.path = open_folder("folder", path, StatesManifest(parts=count, source=source))

    def __repr__(self) -> str:
        """Path and number of parts."""
        return f"StateFolder({str(self.path)!r}, {self.count} parts)"

    def save(self, state: State) -> None:
        """Keep the state of one part.

        Raises:
            InputError: It is of several parts, or counts the parts differently.
        """
        if len(state.origins) != 1 or state.count != self.count:
            came = f"parts {sorted(state.origins)[:5]} of {state.count}"
            raise InputError("state", f"the state of one of {self.count} parts", came)
        state.save(self.file(state.kind, next(iter(state.origins))))

    def load(self, kind: str, part: int) -> State:
        """Return the state of a part.

        Args:
            kind: ``"statistics"`` or ``"curvature"``.
            part: Index of the part.

        Raises:
            InputError: It is not there, or damaged.
        """
        return State.load(self.file(kind, part))

    def has(self, kind: str, part: int, identity: Mapping[str, str] | None = None) -> bool:
        """Whether the state of a part is there and whole.

        Args:
            kind: ``"statistics"`` or ``"curvature"``.
            part: Index of the part.
            identity: What the state must have in common with the fit, as ``state.identity``; ``None`` for anything, as
                :meth:`merged` compares the states with each other.

        Raises:
            InputError: The state is of another encoder, other options or other data. Nothing is overwritten.
        """
        file = self.file(kind, part)
        if not file.is_file():
            return False
        try:
            state = self.load(kind, part)
        except InputError as error:
            _log.warning("%s It is computed again.", error)
            return False
        if identity is not None:
            try:
                check_identity(state, identity)
            except InputError as error:
                error.add_note(f"This state is in {file}. Use another folder, or delete this one.")
                raise
        return True

    def missing(self, kind: str, identity: Mapping[str, str] | None = None) -> list[int]:
        """Parts whose state is not there or damaged, to be computed (again); arguments as of :meth:`has`."""
        return [part for part in range(self.count) if not self.has(kind, part, identity)]

    def merged(self, kind: str) -> State:
        """Merge the states of all parts; one after the other is in memory.

        Raises:
            InputError: One is missing or damaged, or they do not fit together.
        """
        return reduce(State.merge, (self.load(kind, part) for part in range(self.count)))

    def file(self, kind: str, part: int) -> Path:
        """Name of the file of a part."""
        validate.choice("kind", kind, (STATISTICS, CURVATURE))
        return self.path / f"{kind}-{part:05d}-of-{self.count:05d}.safetensors"
