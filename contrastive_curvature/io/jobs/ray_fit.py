"""``fit_on_ray``: both passes of a fit over parts of the data, in processes of Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, State, digest_of
from contrastive_curvature.io.jobs.parquet_parts import Reader
from contrastive_curvature.io.jobs.posteriors import Posterior, identity_of, made
from contrastive_curvature.io.jobs.ray_parts import run_parts
from contrastive_curvature.io.jobs.ray_runtime import Ray, Resources, Stored
from contrastive_curvature.io.jobs.sources import Parts, Source, parts_of
from contrastive_curvature.io.jobs.state_folder import StateFolder

__all__ = ["fit_on_ray"]


def fit_on_ray(
    posterior: Posterior,
    source: Source,
    *,
    folder: str | PathLike[str],
    parts: int | None = None,
    batch_size: int | None = None,
    read: Reader | None = None,
    columns: Sequence[str] | None = None,
    workers: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    max_retries: int = 3,
    progress_bar: bool | None = None,
) -> Any:
    """Fit a posterior to data that many processes read, a part at a time.

    Every part's state is written to ``folder`` as soon as it is computed. A process that dies is started again with the
    part that it had, which is computed again alone; after the death of this process, the same call goes on with the
    parts that are missing. Nothing is lost, and nothing counts twice.

    Ray is started if it has not been (``ray.init``), and then stopped at the end.

    Args:
        posterior: A posterior that is not fitted yet, which every process gets a copy of; or a function without
            arguments that makes one, in every process and here. With GPUs use a function, and bring the encoder to
            ``"cuda"`` in it where there is one.
        source: Parquet files (a path, or a list of them), a :class:`ParquetParts`, or a feature folder or its path; on
            a file system that all machines see.
        folder: Where the states are kept, on such a file system.
        parts: Number of parts; ``None`` for one per 50,000 rows, at least 16 and at most 1,000. What one process does
            at a time, and what is computed again if it dies.
        batch_size: Rows of a batch; ``None`` for 4,096.
        read: See :class:`ParquetParts`.
        columns: See :class:`ParquetParts`.
        workers: Number of processes; ``None`` for as many as Ray has room for.
        num_cpus: Cores of a process.
        num_gpus: GPUs of a process.
        max_retries: How often a part is started again whose process has died.
        progress_bar: Whether to show progress bars; ``None`` shows them from the tenth second on.

    Returns:
        The fitted posterior: the given one, or the one that the function has made.

    Raises:
        InputError: An argument, a file or a batch is malformed; this machine has no room for a process; or the folder
            has states of another encoder, other options, other data or another number of parts.
        UnsupportedError: The posterior has no fit in parts, or ray or pyarrow is not installed.
        ProcessError: A process has died too often. What is done is kept.
    """
    resources = Resources(workers, num_cpus, num_gpus, max_retries)
    if progress_bar is not None:
        validate.flag("progress_bar", progress_bar)
    runtime = Ray()
    data = parts_of(source, parts, batch_size, read, columns)
    la = made(posterior)
    states = StateFolder(folder, len(data), data.fingerprint)
    identity = identity_of(la, data[0], len(data))
    # Looked at before Ray starts: states of another fit are refused, and there may be nothing to do.
    left = states.missing(STATISTICS, identity)
    with runtime:

        def run(kind: str, todo: Sequence[int], statistics: State | None) -> State:
            if todo:
                ray = runtime.start(resources)
                known = None if statistics is None else ray.put(statistics)
                prepare = ray.put(_Prepare(data, states, Stored(ray.put(posterior)), Stored(known)))
                run_parts(ray, prepare, todo, resources, kind, progress_bar)
            return states.merged(kind)

        statistics = run(STATISTICS, left, None)
        left = states.missing(CURVATURE, {**identity, "statistics": digest_of(statistics)})
        curvature = run(CURVATURE, left, statistics)
    la.fit_parts(statistics, curvature)
    return la


@dataclass(frozen=True)
class _Prepare:
    """What a process does once: take the posterior, and the statistics, where there are any, from Ray's store."""

    data: Parts
    states: StateFolder
    posterior: Stored
    statistics: Stored

    def __call__(self) -> Callable[[int], None]:
        la, statistics, data, states = made(self.posterior.get()), self.statistics.get(), self.data, self.states

        def work(part: int) -> None:
            place, loader = (part, len(data)), data[part]
            if statistics is None:
                states.save(la.part_statistics(loader, place, progress_bar=False))
            else:
                states.save(la.part_curvature(loader, place, statistics, progress_bar=False))

        return work
