"""Revoking a job: one operation for queues, results and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bulltask.config.config import Config
from bulltask.errors import RECOVERABLE, BrokerError, DecodeError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import FAN_OUT
from bulltask.jobs.states import Revocation
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import job as job_scripts
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.canvas import with_dependents
from bulltask.transport.scripts.fetch import FetchOptions
from bulltask.transport.scripts.move import fail_malformed, malformed_finish, move_to_finished

__all__ = ["revoke"]

_LOCK_OWNER: Final = "revoked"  # the token of a lock that is held for one step


def revoke(
    keys: QueueKeys, job_id: str, config: Config, now_ms: Callable[[], int], *, terminate: bool
) -> Operation[Revocation]:
    """Fail a job that is not running; with ``terminate``, request that the worker of a running job cancel it.

    Args:
        keys: The queue.
        job_id: The job.
        config: The caller's settings.
        now_ms: Returns the server's time; called once there is a connection.
        terminate: Add a revocation request if the job is running.
    """
    job = yield from _read(keys, job_id)
    try:
        revocation = yield from execute(job_scripts.revoke(keys, job, config, now_ms(), terminate=terminate))
    except BrokerError as exc:
        if isinstance(exc, RECOVERABLE) or not (yield from _fail_malformed(keys, job, config, now_ms(), exc)):
            raise
        return Revocation.REVOKED
    if revocation is Revocation.REVOKED and job.deduplication_id:
        # BullMQ 5.72 and newer may defer a duplicate until this job has finished.
        yield from execute(add_deferred_duplicate(keys, job.deduplication_id, job_id, now_ms()))
    return revocation


def _fail_malformed(keys: QueueKeys, job: RunningJob, config: Config, now_ms: int, exc: BrokerError) -> Operation[bool]:
    """Fail a job that made the script fail with an error, if the job's hash is malformed."""
    options = FetchOptions.from_config(config, keys, _LOCK_OWNER, "")
    failure = malformed_finish(str(exc), job.keep("removeOnFail", config.keep_failed))
    finish = move_to_finished(keys, job.id, options, failure, fetch_next=False, now_ms=now_ms)
    finish = with_dependents(keys, job, finish, None, now_ms)
    return (yield from execute(fail_malformed(keys, finish, _LOCK_OWNER, only_malformed=True)))


def _read(keys: QueueKeys, job_id: str) -> Operation[RunningJob]:
    """Read what is needed to revoke a job: its options, and which jobs follow a fan-out job."""
    name, opts = yield from execute(job_scripts.job_fields(keys, job_id, ("name", "opts")))
    fields = [b"opts", opts or b"{}", b"name", name or b""]
    if name == FAN_OUT.encode():
        (data,) = yield from execute(job_scripts.job_fields(keys, job_id, ("data",)))
        fields += [b"data", data or b"null"]
    try:
        return RunningJob.from_hash(keys.queue, job_id, fields)
    except DecodeError as exc:  # a job that cannot be read can still be revoked
        return RunningJob.placeholder(keys.queue, job_id, str(exc))
