"""``embed_on_ray``: the embeddings of a corpus with their uncertainties, from Parquet to Parquet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike

from contrastive_curvature import validate
from contrastive_curvature.io.jobs.embedding_folder import EmbeddingFolder
from contrastive_curvature.io.jobs.parquet_parts import Reader
from contrastive_curvature.io.jobs.posteriors import Posterior, made
from contrastive_curvature.io.jobs.ray_parts import run_parts
from contrastive_curvature.io.jobs.ray_runtime import Ray, Resources, Stored
from contrastive_curvature.io.jobs.sources import Source, parts_of

__all__ = ["embed_on_ray"]


def embed_on_ray(
    posterior: Posterior,
    source: Source,
    destination: str | PathLike[str],
    *,
    parts: int | None = None,
    batch_size: int | None = None,
    read: Reader | None = None,
    columns: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
    workers: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    max_retries: int = 3,
    progress_bar: bool | None = None,
) -> EmbeddingFolder:
    """Embed a corpus in processes of Ray that hold encoder and posterior once.

    Writes one Parquet file a part, completely or not at all, see :class:`EmbeddingFolder`. A process that dies is
    started again with the part that it had; after the death of this process, the same call goes on with the parts that
    are missing. Ray is started if it has not been, and then stopped at the end.

    Args:
        posterior: The fitted posterior, which every process gets a copy of; or a function without arguments that makes
            it in every process and here, as on GPUs.
        source: See :func:`fit_on_ray`; targets are not used. Identifiers are the column ``identifier``, or else the
            numbers of the rows.
        destination: A folder, on a file system that all machines see.
        parts: Number of parts, each a file; ``None`` as in :func:`fit_on_ray`.
        batch_size: Rows of a batch; ``None`` for 4,096.
        read: See :class:`ParquetParts`; may return ``x`` alone.
        columns: See :class:`ParquetParts`.
        keep: Columns of the source to pass through; ``None`` for all but ``features``.
        workers: Number of processes; ``None`` for as many as Ray has room for.
        num_cpus: Cores of a process.
        num_gpus: GPUs of a process.
        max_retries: How often a part is started again whose process has died.
        progress_bar: Whether to show a progress bar; ``None`` shows it from the tenth second on.

    Returns:
        The folder.

    Raises:
        NotFittedError: Before ``fit``, or the calibration is of another posterior.
        InputError: An argument, a file or a batch is malformed; this machine has no room for a process; or the folder
            has something else in it.
        UnsupportedError: ray or pyarrow is not installed.
        ProcessError: A process has died too often. What is done is kept.
    """
    resources = Resources(workers, num_cpus, num_gpus, max_retries)
    if progress_bar is not None:
        validate.flag("progress_bar", progress_bar)
    runtime = Ray()
    data = parts_of(source, parts, batch_size, read, columns)
    folder = EmbeddingFolder(destination, made(posterior), data, keep)
    left = folder.missing()
    if left:
        with runtime:
            ray = runtime.start(resources)
            prepare = ray.put(_Prepare(folder, Stored(ray.put(posterior))))
            run_parts(ray, prepare, left, resources, "embeddings", progress_bar)
    return folder


@dataclass(frozen=True)
class _Prepare:
    """What a process does once: take the posterior from Ray's store."""

    folder: EmbeddingFolder
    posterior: Stored

    def __call__(self) -> Callable[[int], None]:
        la, folder = made(self.posterior.get()), self.folder
        return lambda part: folder.write(la, part)
