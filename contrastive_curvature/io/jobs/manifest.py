"""The header of a job's folder, so that only the same job continues in it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from contrastive_curvature.artifact import ArtifactFolder, Header
from contrastive_curvature.errors import InputError


class Manifest(Header):
    """What has to be the same to continue a job."""

    # Readers of a folder of Parquet files skip names that begin with an underscore.
    file_name: ClassVar[str] = "_job.json"
    repaired_by: ClassVar[str] = "Use another folder, or delete this one to start over."

    parts: int
    source: str


class StatesManifest(Manifest):
    """Of a folder with the states of a fit."""

    kind = "states"
    described = "a folder with the states of a fit"


class EmbeddingsManifest(Manifest):
    """Of a folder with embeddings."""

    kind = "embeddings"
    described = "a folder of embeddings"

    posterior: str
    columns: list[str]


def open_folder(argument: str, path: object, job: Manifest) -> Path:
    """Make the folder of a job, or continue in it. Processes that do so at the same time write the same header."""
    folder = ArtifactFolder(path, type(job), argument)
    folder.make()
    if not folder.exists:
        folder.write(job)
    found = folder.read()
    for name, wanted in job:
        if getattr(found, name) != wanted:
            same = f"one of a job with the same {name} ({wanted!r})"
            received = f"{getattr(found, name)!r} in {folder.path}"
            raise InputError(argument, same, received, job.repaired_by)
    return folder.path
