"""Many runs on a Ray cluster: one task per run, taken up again elsewhere when its worker or its node dies.

``--out`` must be on a file system that all nodes share, at the same path: a run that moves to another node resumes
from its checkpoint there, and the progress shown is read from the run directories. Every node needs gxd itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gxd.lab.errors import UserError
from gxd.lab.progress import Board, Progress
from gxd.lab.store import METRICS
from gxd.lab.workers import RETRIES, Failure, Job, Outcome, Total, close, cores, failed, outcome_of, prepare, train_one

LOOK = 1.0  # seconds between two looks at the run directories


def run_all(
    jobs: Sequence[Job],
    root: Path,
    board: Board,
    *,
    address: str = "auto",
    processes: int | None = None,
    gpus: float = 0.0,
    retries: int = RETRIES,
    files: Sequence[Path] = (),
) -> list[Outcome]:
    """Train all of them on the cluster, with one CPU and ``gpus`` GPUs each. Returns how each ended.

    Args:
        address: ``auto`` joins the cluster that this machine belongs to, ``local`` starts one for the time of the call
            with as many CPUs as ``processes``, and anything else is the address of a cluster.
        files: of the user's, that register methods, on the file system that all nodes share.
    """
    root = root.absolute()  # the workers stand elsewhere
    own = [str(file.absolute()) for file in files]
    prepare(root)
    with _joined(address, processes) as ray:
        train = ray.remote(_train).options(num_cpus=1, num_gpus=gpus, max_retries=retries, retry_exceptions=False)
        pending = {train.remote(job.config, str(root), own): index for index, job in enumerate(jobs)}
        outcomes: dict[int, Outcome] = {}
        total = Total(jobs, root, board)
        try:
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK)
                for reference in ready:
                    index = pending.pop(reference)
                    outcomes[index] = _outcome(ray, reference, jobs[index], root, retries)
                    total.finish(index)
                    close(board, outcomes[index])
                for index in pending.values():
                    seen = _progress(jobs[index], root)
                    if seen is not None and seen.task != total.done[index]:
                        total.update(index, seen.task)
                        board.update(jobs[index].name, seen)
        except BaseException:
            for reference in pending:
                ray.cancel(reference, force=True)
            raise
    return [outcomes[i] for i in range(len(jobs))]


def _train(config: Any, root: str, files: Sequence[str]) -> Failure | None:
    """What runs on a node."""
    return train_one(config, Path(root), files=[Path(file) for file in files])


def _outcome(ray: Any, reference: Any, job: Job, root: Path, retries: int) -> Outcome:
    try:
        failure = ray.get(reference)
    except ray.exceptions.RayError as error:
        first = str(error).strip().partition("\n")[0]
        return failed(job, Failure(f"its worker died {retries + 1} times ({type(error).__name__}: {first})"))
    return failed(job, failure) if failure is not None else outcome_of(job, root)


def _progress(job: Job, root: Path) -> Progress | None:
    """How far a run is, from the last whole line of its metrics."""
    try:
        lines = (job.config.run_directory(root) / METRICS).read_bytes().rpartition(b"\n")[0]
        last = json.loads(lines.rpartition(b"\n")[2])
    except (OSError, ValueError):  # not started yet, or being written
        return None
    return Progress(last["task"] + 1, job.config.tasks, last.get(job.config.metric), job.config.metric)


@contextmanager
def _joined(address: str, processes: int | None) -> Iterator[Any]:
    """A connection to the cluster; ``local`` starts one and stops it in the end."""
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray needs Ray: pip install 'gxd[cluster]'") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if ray.is_initialized():
        raise UserError("this process is connected to a Ray cluster already: leave it with ray.shutdown() first")
    try:
        if address == "local":
            ray.init(address="local", num_cpus=processes or cores(), include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        remedy = "start one with `ray start --head`, give its address, or use --ray local"
        raise UserError(f"no Ray cluster at {address!r} ({first}): {remedy}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
