"""What stands in the folder of a saved posterior: names of files, and the version of the format."""

from __future__ import annotations

import re

__all__ = ["CARD", "CONFIG", "FORMAT", "LIBRARY", "TENSORS", "VERSION", "tensors_name"]

FORMAT = "contrastive_curvature.io.pretrained"
VERSION = 1
"""Of the format. It is raised where an older version of this library would misread a folder."""

LIBRARY = "contrastive-curvature"
"""Name of this library on the Hugging Face hub and on PyPI."""

CONFIG, CARD = "config.json", "README.md"

TENSORS = re.compile(r"posterior-[0-9a-f]{16}\.safetensors")
"""Files of numbers. They carry their checksum in the name, so that a new one never replaces the numbers that the
present ``config.json`` refers to."""


def tensors_name(sha256: str) -> str:
    """Name of the file of numbers with this checksum."""
    return f"posterior-{sha256[:16]}.safetensors"
