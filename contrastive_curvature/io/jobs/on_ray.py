"""Fits and embeddings on Ray, a part of the data at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, ProcessError
from contrastive_curvature.fit.state import CURVATURE, STATISTICS, digest_of
from contrastive_curvature.io.jobs.embedding_folder import EmbeddingFolder
from contrastive_curvature.io.jobs.parquet_parts import Reader, need
from contrastive_curvature.io.jobs.sources import Source, parts_of
from contrastive_curvature.io.jobs.state_folder import StateFolder
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.progress import Progress

Posterior = ContrastiveLaplace | Callable[[], Any]


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

    Every part's state is written to ``folder`` as soon as it is computed. The part of a process that dies is computed
    again; after the death of this process, the same call goes on with the missing parts. Ray is started if it does not
    run, and then stopped at the end.

    Args:
        posterior: A posterior that is not fitted yet, copied to every process; or a function without arguments that
            makes one, in every process and here. On GPUs use a function that brings the encoder to ``"cuda"``.
        source: Parquet files (a path, or a list of them), a :class:`ParquetParts`, or a feature folder or its path; on
            a file system that all machines see.
        folder: Where the states are kept, on such a file system.
        parts: Number of parts; ``None`` for one per 50,000 rows, at least 16 and at most 1,000.
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
    with _Processes(posterior, workers, num_cpus, num_gpus, max_retries, progress_bar) as processes:
        data = parts_of(source, parts, batch_size, read, columns)
        count = len(data)
        la = made(posterior)
        states = StateFolder(folder, count, data.fingerprint)
        # A first pass without data has only what the states of all parts have in common.
        identity = dict(la.part_statistics([], (0, count)).identity)

        def first_pass(la: Any, part: int) -> None:
            states.save(la.part_statistics(data[part], (part, count), progress_bar=False))

        def second_pass(la: Any, part: int) -> None:
            states.save(la.part_curvature(data[part], (part, count), statistics, progress_bar=False))

        processes.run(first_pass, states.missing(STATISTICS, identity), STATISTICS)
        statistics = states.merged(STATISTICS)
        identity["statistics"] = digest_of(statistics)
        processes.run(second_pass, states.missing(CURVATURE, identity), CURVATURE)
    la.fit_parts(statistics, states.merged(CURVATURE))
    return la


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

    Writes one Parquet file a part (:class:`EmbeddingFolder`). The part of a process that dies is computed again; after
    the death of this process, the same call goes on with the missing parts. Ray is started if it does not run, and then
    stopped at the end.

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
    with _Processes(posterior, workers, num_cpus, num_gpus, max_retries, progress_bar) as processes:
        folder = EmbeddingFolder(destination, made(posterior), parts_of(source, parts, batch_size, read, columns), keep)
        processes.run(folder.write, folder.missing(), "embeddings")
    return folder


def made(posterior: Any) -> Any:
    """Return the posterior, or what a function without arguments makes."""
    # A posterior is callable, too.
    la = posterior() if callable(posterior) and not isinstance(posterior, ContrastiveLaplace) else posterior
    if not isinstance(la, ContrastiveLaplace):
        wanted = "a posterior of likelihood='contrastive', or a function that returns one"
        hint = "laplace.Laplace(encoder, likelihood='contrastive', ...) makes one."
        raise InputTypeError("posterior", wanted, f"a {type(la).__name__}", hint)
    return la


@dataclass
class _Processes:
    """Processes of Ray. Ray is started when they are needed, if it does not run, and then stopped at the end."""

    posterior: Posterior
    workers: int | None
    num_cpus: float
    num_gpus: float
    max_retries: int
    progress_bar: bool | None
    started: bool = False

    def __post_init__(self) -> None:
        self.ray = need("ray", "ray")
        if self.workers is not None:
            validate.count("workers", self.workers)
        validate.number("num_cpus", self.num_cpus, positive=True)
        validate.number("num_gpus", self.num_gpus)
        if not isinstance(self.max_retries, int) or self.max_retries < 0:
            raise InputError("max_retries", "a whole number >= 0", self.max_retries)
        if self.progress_bar is not None:
            validate.flag("progress_bar", self.progress_bar)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self.started:
            self.ray.shutdown()

    def run(self, work: Callable[[Any, int], None], parts: Sequence[int], name: str) -> None:
        """Call ``work`` with the posterior and every part; it writes its result itself.

        These are actors and not ``ray.data.map_batches``, which starts a part again without end if its process dies.

        Raises:
            ProcessError: A process has died too often.
            Exception: What a part raised, as it is, with a note that names the part.
        """
        if not parts:
            return
        count = min(self._start(), len(parts))
        options = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        options |= {"max_restarts": -1, "max_task_retries": self.max_retries}
        worker = self.ray.remote(**options)(_Worker)
        # Once in Ray's store, however many processes take it; in a list, because Ray reads it for every part otherwise.
        stored = [self.ray.put((self.posterior, work))]
        actors = [worker.remote() for _ in range(count)]
        waiting = iter(parts)
        # A process that has no room yet gets no part that another one could do.
        running: dict[Any, tuple[Any, int | None]] = {actor.__ray_ready__.remote(): (actor, None) for actor in actors}
        try:
            with Progress(self.progress_bar).bar(f"[{name}]", len(parts)) as bar:
                while bar.n < len(parts):
                    (done,), _ = self.ray.wait(list(running))
                    actor, part = running.pop(done)
                    self._check(done, name, part)
                    bar.update(part is not None)
                    following = next(waiting, None)
                    if following is not None:
                        running[actor.do.remote(stored, following)] = actor, following
                        continue
                    # Processes without a part make room for those that died and are started again.
                    running = {done: job for done, job in running.items() if job[1] is not None}
                    busy = [actor for actor, _ in running.values()]
                    for actor in actors:
                        if actor not in busy:
                            self.ray.kill(actor)
        finally:
            for actor in actors:
                self.ray.kill(actor)

    def _check(self, done: Any, name: str, part: int | None) -> None:
        """Raise the error of a part, or of a process that did not start."""
        try:
            self.ray.get(done)
        except self.ray.exceptions.RayTaskError as error:
            error.cause.add_note(f"{name} of part {part}, in a process of Ray")
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            raise ProcessError(
                f"{name} of part {part}: its process has died (max_retries={self.max_retries}), or its error cannot be "
                f"pickled: {error}\nWhat is done is kept: call this again with the same arguments, and only the rest "
                "is computed. A process that needs too much memory wants smaller batches, or more num_cpus, so that "
                "fewer run at once."
            ) from error

    def _start(self) -> int:
        """Start Ray if it does not run, and return how many processes there may be."""
        grows = self.ray.is_initialized() or "RAY_ADDRESS" in os.environ
        if not self.ray.is_initialized():
            self.started = True
            self.ray.init()
        # Processes without room wait until others end, or the cluster has grown; this machine does not grow.
        if grows:
            return self.workers or sys.maxsize
        whole = self.ray.cluster_resources()
        cores, gpus = whole.get("CPU", 0), whole.get("GPU", 0)
        room = int(min(cores / self.num_cpus, gpus / self.num_gpus if self.num_gpus else cores / self.num_cpus))
        if not room:
            there = f"at most what Ray has, {cores:g} cores and {gpus:g} GPUs"
            raise InputError("num_cpus, num_gpus", there, f"{self.num_cpus:g}, {self.num_gpus:g}")
        return self.workers or room


class _Worker:
    """One process: it holds the posterior once for all its parts."""

    _la: Any = None

    def do(self, stored: list[Any], part: int) -> None:
        """Compute a part, and write it."""
        if self._la is None:
            posterior, self._work = need("ray", "ray").get(stored[0])
            self._la = made(posterior)
        self._work(self._la, part)
