"""Revoking a job: one operation for queues, results and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bulltask.config.config import Config
from bulltask.errors import RECOVERABLE, BrokerError, DecodeError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.states import Revocation
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import job as job_scripts
from bulltask.transport.scripts.add import add_kept_job
from bulltask.transport.scripts.move import FetchOptions, malformed_finish, move_to_finished, quarantine

__all__ = ["revoke"]

_HOLDER: Final = "revoked"  # of the lock that is held for one step


def revoke(
    keys: QueueKeys, job_id: str, config: Config, now_ms: Callable[[], int], *, terminate: bool
) -> Operation[Revocation]:
    """End a job that does not run; have its worker end one that does, if ``terminate``.

    Args:
        keys: the queue.
        job_id: the job.
        config: the settings of whoever revokes it.
        now_ms: gives the server's time, once there is a connection.
        terminate: end a run, too.
    """
    options: Call[bytes | None] = command("HGET", keys.job(job_id), "opts")
    job = _options_of(keys, job_id, (yield from execute(options)))
    try:
        found = yield from execute(job_scripts.revoke(keys, job, config, now_ms(), terminate=terminate))
    except BrokerError as exc:
        if isinstance(exc, RECOVERABLE) or not (yield from _set_aside(keys, job, config, now_ms(), exc)):
            raise
        return Revocation.REVOKED
    if found is Revocation.REVOKED and job.deduplication_id:
        # BullMQ 5.72 and newer may have put another job aside until this one has ended
        yield from execute(add_kept_job(keys, job.deduplication_id, job_id, now_ms()))
    return found


def _set_aside(keys: QueueKeys, job: RunningJob, config: Config, now_ms: int, exc: BrokerError) -> Operation[bool]:
    """End a job at which the script stopped half-way, if the job's hash is to blame."""
    claim, ending = (
        FetchOptions.from_config(config, keys, _HOLDER, ""),
        malformed_finish(str(exc), job.keep("removeOnFail", config.keep_failed)),
    )
    finish = move_to_finished(keys, job.id, claim, ending, fetch_next=False, now_ms=now_ms)
    return (yield from execute(quarantine(keys, finish, _HOLDER, only_malformed=True)))


def _options_of(keys: QueueKeys, job_id: str, opts: bytes | None) -> RunningJob:
    try:
        return RunningJob.from_hash(keys.queue, job_id, [b"opts", opts or b"{}"])
    except DecodeError as exc:  # a job that cannot be read can be ended all the same
        return RunningJob.broken(keys.queue, job_id, str(exc))
