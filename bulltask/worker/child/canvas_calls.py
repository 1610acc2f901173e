"""The error callbacks that are added when a job of a canvas fails."""

from __future__ import annotations

import json
from typing import Any

import uuid_utils

from bulltask.config.config import Config
from bulltask.errors import BulltaskError, InvalidJobError
from bulltask.jobs.errbacks import Errback, FailedJob, read_errbacks
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import name_in_app
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.ancestry import ancestry
from bulltask.transport.scripts.add import standard_job_args
from bulltask.worker.child.outcomes import FailedOutcome

__all__ = ["errback_data", "errback_queue", "error_callbacks"]


def error_callbacks(
    job: RunningJob, outcome: FailedOutcome, config: Config, now_ms: int
) -> list[tuple[str, bytes, bytes, bytes]]:
    """Return the error callbacks to add when a job fails, as arguments of ``finish_with_errbacks``."""
    if "errbacks" not in job.canvas:
        return []
    try:
        errbacks = read_errbacks(job.canvas["errbacks"])
    except InvalidJobError:
        return []  # another client has replaced the options
    failed = outcome.failed_job or FailedJob(job.id, job.name, job.queue)
    jobs, root_id = [], ancestry(job)["root_id"]
    for errback in errbacks:
        if errback.cascades or outcome.failed_job is None:
            base, data = f"{errback.queue}:", errback_data(errback, failed, outcome, config)
            opts = errback.opts_of(failed, root_id)
            arguments = standard_job_args(base, str(uuid_utils.uuid7()), errback.task, data, opts, now_ms)
            jobs.append((base, *arguments))
    return jobs


def errback_queue(errback: Errback, config: Config) -> str:
    """Return the name of an error callback's queue in the app."""
    return name_in_app(errback.queue.removeprefix(f"{config.prefix}:"), hash_tag=config.queue_hash_tag)


def errback_data(errback: Errback, failed: FailedJob, outcome: FailedOutcome, config: Config) -> bytes:
    """Return the data of an error callback's job as it is stored."""

    def with_failure(own: Any) -> Any:
        return errback.data_of(own, failed, outcome.reason, outcome.trace)

    try:
        queue = errback_queue(errback, config)
        return PayloadCodec(config).change_arguments(errback.data, queue, errback.task, with_failure)
    except BulltaskError:
        # Add the callback anyway: if its arguments cannot be read here, its own job fails with an error that says so.
        return json.dumps(errback.data).encode()
