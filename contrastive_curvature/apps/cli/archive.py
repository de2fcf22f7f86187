"""An ``.npz`` as a source: its arrays by name, checked; nothing in it is unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.apps.cli.errors import BadInputError
from contrastive_curvature.errors import expected

__all__ = ["Archive", "read_archive"]

_INPUTS = ("features", "embeddings", "inputs")
_LARGEST = 2**63 - 1
_KNOWN = (*_INPUTS, "labels", "ids", "weight", "bias")


@dataclass(frozen=True)
class Archive:
    """The arrays of an ``.npz``.

    Attributes:
        path: The file.
        values: Its arrays of known names.
        names: Names of all its arrays.
    """

    path: Path
    values: Mapping[str, NDArray[Any]]
    names: Sequence[str]

    def inputs(self) -> NDArray[np.float32]:
        """The one of ``features``, ``embeddings`` and ``inputs`` that is there, float32.

        Raises:
            BadInputError: None or several are there, or it is no array of finite numbers of the right shape.
        """
        there = [name for name in _INPUTS if name in self.values]
        if len(there) != 1:
            holds = ", ".join(sorted(self.names)) or "nothing"
            hint = "numpy.savez(file, inputs=X, labels=y) names them."
            raise BadInputError(expected(f"{self.path}", f"one of the arrays {', '.join(_INPUTS)}", holds, hint))
        return self._floats(there[0], 2 if there[0] != "inputs" else None)

    def weight(self) -> NDArray[np.float32] | None:
        """Weight of the last layer, shape (D, F), where it is there."""
        return self._floats("weight", 2) if "weight" in self.values else None

    def bias(self) -> NDArray[np.float32] | None:
        """Bias of the last layer, shape (D,), where it is there."""
        if "bias" in self.values and "weight" not in self.values:
            raise BadInputError(expected(f"{self.path}", "weight beside bias", "bias alone"))
        return self._floats("bias", 1) if "bias" in self.values else None

    def classes(self, count: int) -> NDArray[Any] | None:
        """``labels`` as int64 or texts, shape (count,), where they are there."""
        found = self.values.get("labels")
        if found is None:
            return None
        if found.ndim != 1 or len(found) != count or found.dtype.kind not in "iuU":
            wanted = f"{count} whole numbers or texts"
            raise BadInputError(expected(f"{self.path}: labels", wanted, f"{found.dtype}, shape {found.shape}"))
        if found.dtype.kind == "u" and count and int(found.max()) > _LARGEST:
            raise BadInputError(expected(f"{self.path}: labels", f"whole numbers up to {_LARGEST}", f"{found.max()}"))
        return found.astype(np.int64) if found.dtype.kind in "iu" else found

    def ids(self, count: int) -> list[str]:
        """``ids`` as texts, or the rows' numbers."""
        found = self.values.get("ids")
        if found is None:
            return [str(row) for row in range(count)]
        if found.ndim != 1 or len(found) != count or found.dtype.kind not in "iuU":
            wanted = f"{count} whole numbers or texts"
            raise BadInputError(expected(f"{self.path}: ids", wanted, f"{found.dtype}, shape {found.shape}"))
        return [str(each) for each in found]

    def _floats(self, name: str, axes: int | None) -> NDArray[np.float32]:
        found = self.values[name]
        if found.dtype.kind not in "fiu":
            raise BadInputError(expected(f"{self.path}: {name}", "real numbers", f"an array of {found.dtype}"))
        if found.ndim == 0 or (axes is not None and found.ndim != axes) or 0 in found.shape:
            wanted = "at least one axis" if axes is None else f"{axes} axes"
            raise BadInputError(expected(f"{self.path}: {name}", f"{wanted}, none empty", f"shape {found.shape}"))
        with np.errstate(over="ignore"):
            found = np.ascontiguousarray(found, dtype=np.float32)
        finite = np.isfinite(found).reshape(len(found), -1).all(1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            raise BadInputError(expected(f"{self.path}: {name}", "finite numbers", f"NaN or infinity in row {row}"))
        return found


def read_archive(path: Path) -> Archive:
    """Read an ``.npz``; arrays of other names are left out.

    Raises:
        BadInputError: It is missing, truncated, or something else.
    """
    wanted = f"an .npz with the arrays {', '.join(_INPUTS[:2])} or {_INPUTS[2]}"
    try:
        # An array of objects would be unpickled, which can run anything.
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                known = {name: _member(path, found, name) for name in found.files if name in _KNOWN}
                return Archive(path, known, found.files)
    except BadInputError:
        raise
    except MemoryError as error:
        raise BadInputError(expected(f"{path}", "arrays that fit into memory", f"larger ones ({error})")) from error
    except Exception as error:  # numpy, zipfile and the decompressors raise many kinds for damaged files
        if isinstance(error, OSError) and error.strerror:
            raise BadInputError(expected(f"{path}", wanted, error.strerror)) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInputError(expected(f"{path}", wanted, f"what cannot be read ({reason})")) from error
    raise BadInputError(expected(f"{path}", wanted, "a single array", "numpy.savez(file, features=...) writes one."))


def _member(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        found = archive[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        wanted, hint = "an array of numbers or texts", f"Save {name}.astype(str), or numbers."
        raise BadInputError(expected(f"{path}: {name}", wanted, "Python objects (dtype object)", hint)) from error
    if not isinstance(found, np.ndarray):
        raise BadInputError(expected(f"{path}: {name}", "an array as numpy writes it", "other content"))
    return found
