"""The jobs of error callbacks, which are added when a job of a canvas fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import uuid_utils

from bulltask.config.config import Config
from bulltask.errors import BulltaskError, InvalidJobError
from bulltask.jobs.errbacks import OF_CHORD, Errback, FailedJob, read_errbacks
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import name_in_app
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.ancestry import ancestry
from bulltask.transport.scripts.add import AddedJob, added_job

__all__ = ["called_errbacks", "errback_data", "errback_jobs", "errback_queue"]


def called_errbacks(job: RunningJob, failed_job: FailedJob | None) -> Sequence[tuple[Errback, FailedJob]]:
    """Return the error callbacks of a job that fails, and the job that each of them describes.

    Args:
        job: The job.
        failed_job: The job whose failure causes this one to fail, if it is a different job. If it is a step before this
            one, the callbacks of this call are not called, but those of its chain. If it is the canvas with which the
            job's task has replaced itself, all of them are called.
    """
    if "errbacks" not in job.canvas:
        return ()
    try:
        errbacks = read_errbacks(job.canvas["errbacks"])
    except InvalidJobError:
        return ()  # another client has replaced the options
    own = FailedJob(job.id, job.name, job.queue)
    in_header = failed_job is not None and not job.replacement
    return [
        (it, own if failed_job is None or (in_header and it.cascades == OF_CHORD) else failed_job)
        for it in errbacks
        if it.cascades or failed_job is None or job.replacement
    ]


def errback_jobs(
    job: RunningJob, reason: str, trace: str, config: Config, now_ms: int, failed_job: FailedJob | None = None
) -> list[AddedJob]:
    """Return the jobs to add when a job fails, as arguments of ``finish_with_errbacks``.

    Args:
        job: The job that fails.
        reason, trace: Its failure.
        config: The app's settings.
        now_ms: The server's time.
        failed_job: As for :func:`called_errbacks`.
    """
    errbacks = called_errbacks(job, failed_job)
    if not errbacks:
        return []
    root_id = ancestry(job)["root_id"]
    return [
        added_job(
            f"{errback.queue}:",
            str(uuid_utils.uuid7()),
            errback.task,
            errback_data(errback, failed, reason, trace, config),
            errback.opts_of(failed, root_id, now_ms),
            now_ms,
        )
        for errback, failed in errbacks
    ]


def errback_queue(errback: Errback, config: Config) -> str:
    """Return the name of an error callback's queue in the app."""
    return name_in_app(errback.queue.removeprefix(f"{config.prefix}:"), hash_tag=config.queue_hash_tag)


def errback_data(errback: Errback, failed: FailedJob, reason: str, trace: str, config: Config) -> bytes:
    """Return the data of an error callback's job as it is stored."""

    def with_failure(own: Any) -> Any:
        return errback.data_of(own, failed, reason, trace)

    try:
        queue = errback_queue(errback, config)
        return PayloadCodec(config).change_arguments(errback.data, queue, errback.task, with_failure)
    except BulltaskError:
        # Add the callback anyway: if its arguments cannot be read here, its own job fails with an error that says so.
        return json.dumps(errback.data).encode()
