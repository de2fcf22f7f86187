"""The optional packages of jobs, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from contrastive_curvature.errors import UnsupportedError, expected

__all__ = ["arrow", "parquet", "ray_data"]


def arrow() -> Any:
    """The module ``pyarrow``.

    Raises:
        UnsupportedError: It is not installed.
    """
    return _need("pyarrow", "parquet")


def parquet() -> Any:
    """The module ``pyarrow.parquet``.

    Raises:
        UnsupportedError: It is not installed.
    """
    return _need("pyarrow.parquet", "parquet")


def ray_data() -> tuple[Any, Any]:
    """The modules ``ray`` and ``ray.data``.

    Raises:
        UnsupportedError: They are not installed.
    """
    return _need("ray", "ray"), _need("ray.data", "ray")


def _need(module: str, extra: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        hint = f"pip install 'contrastive-curvature[{extra}]'."
        raise UnsupportedError(expected("jobs", f"the package {package}", "none installed", hint)) from None
