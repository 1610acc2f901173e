"""Calls that finish a job of a canvas: they also start the jobs after it, or add its error callbacks."""

from __future__ import annotations

import json
from typing import Any

import uuid_utils

from bulltask.config.config import Config
from bulltask.errors import BulltaskError, DecodeError, InvalidJobError
from bulltask.jobs import codec
from bulltask.jobs.errbacks import Errback, FailedJob, read_errbacks
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import FAN_OUT, address_of, name_in_app
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.relatives import relatives
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.add import standard_job_args
from bulltask.transport.scripts.canvas import finish_fan_out
from bulltask.worker.child.outcomes import FailedOutcome

__all__ = ["errback_data", "errback_queue", "error_callbacks", "with_followers"]


def with_followers(keys: QueueKeys, job: RunningJob, call: Call[Any], result: bytes | None, now_ms: int) -> Call[Any]:
    """Return the call that also makes a fan-out job's followers ready to run; ``call`` for any other job.

    Args:
        keys: The job's queue.
        job: The job.
        call: The call of ``moveToFinished`` for it.
        result: The job's return value, ``None`` if it fails.
        now_ms: The server's time.
    """
    if job.name != FAN_OUT or not job.sent_by_bulltask:
        return call
    try:
        followers = [address_of(key, keys.prefix) for key in codec.decode(job.data)["followers"]]
    except (DecodeError, LookupError, TypeError, AttributeError):
        return call  # another client has replaced the data
    addresses = [(f"{prefix}:{name}", job_id) for prefix, name, job_id in followers]
    return finish_fan_out(keys, job.id, call, addresses, result, now_ms)


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
    jobs, root_id = [], relatives(job)["root_id"]
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
